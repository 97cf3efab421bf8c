#!/usr/bin/env bash
# Runs the GPU tests on however many GPUs there are, and ends with "N passed, N failed".
#   test_gpu.sh [BUILD_FOLDER] [GTEST_FILTER]
set -uo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
filter=${2:-*}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c "^GPU") || true
if [ "${gpus:-0}" -eq 0 ]; then
  echo "test_gpu.sh: no GPU here (nvidia-smi -L lists none)" >&2
  exit 1
fi
passed=0 failed=0
run() {  # name command...
  local name=$1 log
  shift
  log=$(mktemp)
  local code=0
  "$@" > "$log" 2>&1 || code=$?
  local good bad
  good=$(grep -c "^\[       OK \]" "$log")
  bad=$(grep -c "^\[  FAILED  \].*ms)$" "$log")
  if ! grep -q "^\[==========\] .* ran\." "$log"; then  # it crashed, or hung until the time limit
    bad=$((bad + 1))
    echo "$name ended with code $code before its end:"
    tail -20 "$log"
  elif [ "$code" -ne 0 ] && [ "$bad" -eq 0 ]; then  # rank 0 saw no failure, another one did
    bad=1
    echo "$name: $(grep -m3 "tests failed" "$log" || echo "ended with code $code")"
  fi
  passed=$((passed + good))
  failed=$((failed + bad))
  echo "$name: $good passed, $bad failed"
  grep -B 30 "^\[  FAILED  \].*ms)$" "$log" | grep -v "^\[       OK\|^\[ RUN" | head -80
  rm -f "$log"
}
# A run that must end with an error, in time: code and text of the error.
fails_with() {  # name text command...
  local name=$1 text=$2 log code
  shift 2
  log=$(mktemp)
  "$@" > "$log" 2>&1
  code=$?
  if [ "$code" -ne 0 ] && [ "$code" -ne 124 ] && grep -q "$text" "$log"; then
    passed=$((passed + 1))
    echo "$name: ends with code $code: $(grep -m1 "$text" "$log" | cut -c1-300)"
  else
    failed=$((failed + 1))
    echo "$name: FAILED: code $code, expected an error with \"$text\""
    tail -20 "$log"
  fi
  rm -f "$log"
}
succeeds() {  # name command...
  local name=$1 log code
  shift
  log=$(mktemp)
  "$@" > "$log" 2>&1
  code=$?
  if [ "$code" -eq 0 ]; then
    passed=$((passed + 1))
    echo "$name: passed"
    grep "^{" "$log"
  else
    failed=$((failed + 1))
    echo "$name: FAILED with code $code"
    tail -20 "$log"
  fi
  rm -f "$log"
}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
run "one rank" timeout 400 "$build/tests/gpu_test" --gtest_filter="$filter"
ranks=$gpus
if [ "$gpus" -eq 1 ]; then
  ranks=2
  export FSDP_SHARE_GPU=1  # both ranks on it, over sockets
fi
several=$build/tests/gpu_ranks_test
run "$ranks ranks" timeout 300 "$several" "$ranks" --gtest_filter="$filter"
run "$ranks ranks, all gathers by reads of the peers" env FSDP_READ_PEERS_FROM_MIB=0 timeout 300 "$several" "$ranks" --gtest_filter="$filter"
if [ "$gpus" -gt 1 ]; then
  run "$ranks ranks, all gathers by copy engine" env FSDP_COPY_ENGINE_FROM_MIB=0 timeout 300 "$several" "$ranks" --gtest_filter="$filter"
fi
if [ "$filter" = "*" ]; then
  fails_with "a killed rank" "did not end within\|another rank has failed\|remote process exited" timeout 120 "$several" "$ranks" --scenario killed
  fails_with "a wrong order" "ranks run different operations" timeout 120 "$several" "$ranks" --scenario order
  succeeds "communicators made and dropped" timeout 120 "$several" "$ranks" --scenario leak
  succeeds "a thousand steps" timeout 300 "$several" "$ranks" --scenario long
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
