#!/usr/bin/env bash
# Runs the GPU tests on however many GPUs there are, and ends with "N passed, N failed". Parts run side by side, but for
# those that look at how much memory of the device is free.
#   test_gpu.sh [BUILD_FOLDER] [GTEST_FILTER]
set -uo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
filter=${2:-*}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c "^GPU") || true
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ] && [ "${gpus:-0}" -gt 0 ]; then
  gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c .)
fi
if [ "${gpus:-0}" -eq 0 ]; then
  echo "test_gpu.sh: no GPU here (nvidia-smi -L lists none)" >&2
  exit 1
fi
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
parts=0
start() {  # function arguments...: in the background; what it prints is shown by `finish`
  parts=$((parts + 1))
  local part=$results/$(printf %03d $parts)
  : > "$part.text"
  ("$@" > "$part.text" 2>&1; echo "$passed $failed" > "$part.counts") &
}
finish() {
  wait
  local part good bad
  for part in "$results"/*.text; do
    cat "$part"
    good=0 bad=0
    { read -r good bad < "${part%.text}.counts"; } 2>/dev/null || bad=1  # it died
    if [ "$filter" = "*" ] && [ $((good + bad)) -eq 0 ]; then bad=1; fi
    if [ "$bad" -gt 0 ] && ! grep -q "FAILED\|failed" "$part"; then
      echo "${part##*/}: FAILED: a part of the tests ended without counting any"
    fi
    total_passed=$((total_passed + good)) total_failed=$((total_failed + bad))
  done
  rm -f "$results"/*
}
passed=0 failed=0 total_passed=0 total_failed=0
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
start run "one rank" timeout 400 "$build/tests/gpu_test" --gtest_filter="$filter"
ranks=$gpus
if [ "$gpus" -eq 1 ]; then
  ranks=2
  export FSDP_SHARE_GPU=1  # both ranks on it, over sockets
fi
several=$build/tests/gpu_ranks_test
start run "$ranks ranks" timeout 400 "$several" "$ranks" --gtest_filter="$filter"
start run "$ranks ranks, all gathers by reads of the peers" env FSDP_READ_PEERS_FROM_MIB=0 timeout 400 "$several" "$ranks" --gtest_filter="$filter"
if [ "$gpus" -lt 4 ]; then  # meshes of two axes, and sums of more than two
  start run "4 ranks that share GPUs, reads of the peers" env FSDP_SHARE_GPU=1 FSDP_READ_PEERS_FROM_MIB=0 timeout 400 "$several" 4 --gtest_filter="$filter"
fi
if [ "$gpus" -gt 1 ]; then
  start run "$ranks ranks, all gathers by copy engine" env FSDP_COPY_ENGINE_FROM_MIB=0 timeout 400 "$several" "$ranks" --gtest_filter="$filter"
fi
if [ "$filter" = "*" ]; then
  start fails_with "a killed rank" "did not end within\|another rank has failed\|remote process exited" timeout 120 "$several" "$ranks" --scenario killed
  start fails_with "a wrong order" "ranks run different operations" timeout 120 "$several" "$ranks" --scenario order
  start succeeds "a thousand steps" timeout 300 "$several" "$ranks" --scenario long
  finish
  start succeeds "communicators made and dropped" timeout 120 "$several" "$ranks" --scenario leak
fi
finish
echo "$total_passed passed, $total_failed failed"
[ "$total_failed" -eq 0 ] && [ "$total_passed" -gt 0 ]
