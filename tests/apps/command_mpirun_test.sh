#!/usr/bin/env bash
# `fsdp train` under mpirun: the losses of one process, one error line whatever is wrong, and a job that always ends.
# Usage: command_mpirun_test.sh FSDP_BINARY TINY_CONFIG
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
fsdp=$1
config=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
fail() {
  echo "FAILED: $*"
  sed 's/^/    /' "$work/out" | head -n 30
  failures=$((failures + 1))
}
job() { timeout 120 bash "$here/../support/mpirun.sh" "$@" >"$work/out" 2>&1; }

for i in $(seq 1 1200); do echo "And it came to pass in year $((i % 97)) that king $((i % 13)) spoke $i words."; done >"$work/text"
tiny=(train --config "$config" --set "data.files=[\"$work/text\"]")

"$fsdp" "${tiny[@]}" --ranks 1 --log "$work/1.jsonl" >"$work/out" 2>&1 || fail "one process"
for ranks in 2 4; do
  job $ranks "$fsdp" "${tiny[@]}" --log "$work/$ranks.jsonl" --profile "$work/$ranks.json" || fail "$ranks processes: exit code $?"
  [ "$(grep -c "$ranks ranks started by mpirun" "$work/out")" = 1 ] || fail "$ranks processes: one report"
done
job 4 "$fsdp" "${tiny[@]}" --log "$work/hsdp.jsonl" --set parallel.strategy=hsdp --set 'mesh.axes=["outer=2", "inner=2"]' || fail "hsdp"
python3 - "$work" <<'PY' || fail "the logs"
import json, sys
def steps(name):
    lines = [json.loads(line) for line in open(f"{sys.argv[1]}/{name}.jsonl")]
    assert lines[-1]["event"] == "done", lines[-1]
    return [line for line in lines if line["event"] == "step"]
one = steps("1")
for name in ("2", "4", "hsdp"):
    other = steps(name)
    assert len(other) == len(one) == 30
    for a, b in zip(one[:20], other[:20]):
        assert abs(a["loss"] - b["loss"]) < 1e-3, (name, a, b)
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-3 * max(1, a["grad_norm"]), (name, a, b)
PY

# expect_one_error CODE MESSAGE: of the last job
expect_one_error() {
  [ "$code" = "$1" ] || fail "expected exit code $1, got $code"
  [ "$(grep -c "^fsdp: error: " "$work/out")" = 1 ] || fail "expected one error line"
  grep -qE -- "^fsdp: error: .*$2" "$work/out" || fail "expected \"$2\""
}
echo "precious" >"$work/kept.jsonl"
job 3 "$fsdp" "${tiny[@]}" --log "$work/kept.jsonl"
code=$?
expect_one_error 2 "run.batch: expected a multiple of ranks x microbatches = 3 x 1 = 3, got 8"
job 2 "$fsdp" "${tiny[@]}" --ranks 4
code=$?
expect_one_error 2 "--ranks 4 asks for in-process ranks, but mpirun started 2 processes"
job 1 "$fsdp" "${tiny[@]}" --log "$work/kept.jsonl" : -n 1 "$fsdp" train --config "$config" --set "data.files=[\"$work/none\"]"
code=$?
expect_one_error 2 "on rank 1: .*none"
job 1 "$fsdp" "${tiny[@]}" --log "$work/kept.jsonl" : -n 1 "$fsdp" "${tiny[@]}" --set run.steps=31
code=$?
expect_one_error 2 "run.steps = 30 on rank 0, run.steps = 31 on rank 1"
cp "$work/text" "$work/elsewhere"
echo "one more line" >>"$work/elsewhere"
job 1 "$fsdp" "${tiny[@]}" --log "$work/kept.jsonl" : -n 1 "$fsdp" train --config "$config" --set "data.files=[\"$work/elsewhere\"]"
code=$?
expect_one_error 2 "training tokens = [0-9]* on rank 0, training tokens = [0-9]* on rank 1"
[ "$(cat "$work/kept.jsonl")" = precious ] || fail "a refused run has touched an earlier log"

# A failure on one rank in the middle: a token beyond the vocabulary that only one rank comes to read.
for i in $(seq 1 4000); do echo "{\"tokens\": [$((i % 50)), $((i == 2000 ? 300 : i % 7)), $((i % 3))]}"; done >"$work/tokens.jsonl"
"$fsdp" data prepare --input "$work/tokens.jsonl" --format tokens --vocabulary 512 --output "$work/tokens" >"$work/out" 2>&1 || fail "data prepare"
job 4 "$fsdp" train --config "$config" --set "data.files=[\"$work/tokens\"]" --set run.steps=2000
code=$?
expect_one_error 1 "(rank [0-3]: )?.*token 300 at position [0-9]* .*beyond the vocabulary of 256"

# start RANKS ARGS...: a long run in the background, of which the first steps are done.
start() {
  local ranks=$1
  shift
  rm -f "$work/long.jsonl"
  timeout 120 bash "$here/../support/mpirun.sh" "$ranks" "$fsdp" "${tiny[@]}" --set run.steps=1000000 --log "$work/long.jsonl" "$@" >"$work/out" 2>&1 &
  launcher=$!
  for _ in $(seq 1 300); do
    [ -f "$work/long.jsonl" ] && [ "$(wc -l <"$work/long.jsonl")" -ge 5 ] && return
    sleep 0.1
  done
  fail "the run did not start"
}
rank_pid() {  # of a rank of this test's run
  local pid
  for pid in $(pgrep -f -- "--log $work/long.jsonl"); do
    if tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "OMPI_COMM_WORLD_RANK=$1"; then echo "$pid"; fi
  done
}

start 2
kill -KILL "$(rank_pid 1)"
wait $launcher
code=$?
[ $code != 0 ] && [ $code != 124 ] || fail "a killed rank: exit code $code"

start 2 --set run.deadline_seconds=2
stopped=$(rank_pid 1)
kill -STOP "$stopped"
wait $launcher
code=$?
[ $code != 0 ] && [ $code != 124 ] || fail "a stopped rank: exit code $code"
kill -KILL "$stopped" 2>/dev/null
[ "$(grep -c "^fsdp: error: .*waited 2000 ms; missing ranks: 1" "$work/out")" = 1 ] || fail "a stopped rank is named"

start 2
kill -TERM "$(rank_pid 0)"
wait $launcher
grep -q '"event":"interrupted"' "$work/long.jsonl" || fail "an interrupted run says so in its log"
grep -q "interrupted" "$work/out" || fail "an interrupted run says so"

[ "$failures" = 0 ] && echo "all good"
exit "$failures"
