#!/usr/bin/env bash
# `fsdp train` that stops and goes on, and `fsdp checkpoint`: losses of a run that never stopped, to the last digit.
# Usage: command_checkpoint_test.sh FSDP_BINARY TINY_CONFIG
set -uo pipefail
export OMP_NUM_THREADS=1  # sums over several threads do not come out alike twice
fsdp=$1
config=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
fail() {
  echo "FAILED: $*"
  [ -f "$work/out" ] && sed 's/^/    /' "$work/out" | tail -n 30
  failures=$((failures + 1))
}
for i in $(seq 1 1200); do echo "And it came to pass in year $((i % 97)) that king $((i % 13)) spoke $i words."; done >"$work/text"
tiny=(train --config "$config" --set "data.files=[\"$work/text\"]" --set optimizer.decay=constant --set optimizer.warmup_steps=1 --set run.sample_length=0)
run() { timeout 120 "$fsdp" "$@" >"$work/out" 2>&1; }
losses() { grep '"event":"step"' "$1" | grep -o '"step":[0-9]*\|"loss":[^,]*\|"grad_norm":[^,]*'; }
# expect_error CODE MESSAGE ARGS...
expect_error() {
  local code=$1 message=$2
  shift 2
  run "$@"
  local got=$?
  [ "$got" = "$code" ] || fail "expected exit code $code, got $got: $*"
  grep -qF -- "$message" "$work/out" || fail "expected \"$message\" from: $*"
}
# same A.jsonl B.jsonl WHAT: the same losses and norms of the same steps, and at least 30 of them
same() {
  cmp <(losses "$1") <(losses "$2") || fail "$3: other losses than without a stop"
  [ "$(losses "$2" | grep -c loss)" -ge 30 ] || fail "$3: steps are missing in the log"
  grep -q '"event":"done"' "$2" || fail "$3: not done"
}

# dense, with other strategies, and a mixture of experts whose biases move.
for kind in zero3 zero1 moe; do
  case $kind in
    moe) more=(--ranks 4 --set model.preset=tiny-moe --set run.microbatches=2 --set parallel.expert_ranks=2 --set model.bias_rate=0.01) ;;
    *) more=(--ranks 2 --set "parallel.strategy=$kind") ;;
  esac
  kept=(--set "checkpoint.folder=$work/$kind" --set checkpoint.interval=8 --log "$work/$kind.jsonl")
  run "${tiny[@]}" "${more[@]}" --set run.steps=30 --log "$work/$kind-whole.jsonl" || fail "$kind: without a stop"
  run "${tiny[@]}" "${more[@]}" "${kept[@]}" --set run.steps=20 || fail "$kind: the first part"
  [ "$(ls "$work/$kind")" = "$(printf 'step-00000016\nstep-00000020')" ] || fail "$kind: kept $(ls "$work/$kind")"
  run "${tiny[@]}" "${more[@]}" "${kept[@]}" --set run.steps=30 || fail "$kind: the second part"
  grep -q "weights from $work/$kind/step-00000020, after 20 steps" "$work/out" || fail "$kind: did not say where it goes on"
  same "$work/$kind-whole.jsonl" "$work/$kind.jsonl" "$kind"
  run checkpoint verify "$work/$kind/step-00000030" || fail "$kind: verify"
done
run "${tiny[@]}" --set run.steps=30 --set "checkpoint.folder=$work/zero3" || fail "nothing left to do is no error"
grep -q "validation loss" "$work/out" || fail "a finished run is evaluated again"

# Experts over other ranks: steps of the optimizer come along.
cp -r "$work/moe" "$work/moe4"
rm -r "$work/moe4/step-00000030"
run "${tiny[@]}" --ranks 4 --set model.preset=tiny-moe --set run.microbatches=2 --set parallel.expert_ranks=4 --set model.bias_rate=0.01 \
  --set run.steps=30 --set "checkpoint.folder=$work/moe4" --log "$work/moe4.jsonl" || fail "experts over more ranks"
python3 - "$work/moe-whole.jsonl" "$work/moe4.jsonl" <<'PY' || fail "experts over more ranks: the losses"
import json, sys
whole, later = ({line["step"]: line for line in map(json.loads, open(path)) if line["event"] == "step"} for path in sys.argv[1:])
assert len(later) == 6, sorted(later)
for step, line in later.items():
    assert abs(line["loss"] - whole[step]["loss"]) < 1e-4, (step, line, whole[step])
PY

# On other numbers of ranks: the same state, so nearly the same losses.
for ranks in 1 4; do
  cp -r "$work/zero3" "$work/on$ranks"
  rm -r "$work/on$ranks/step-00000030"
  run "${tiny[@]}" --ranks $ranks --set run.steps=30 --set "checkpoint.folder=$work/on$ranks" --log "$work/on$ranks.jsonl" || fail "on $ranks ranks"
  python3 - "$work/zero3-whole.jsonl" "$work/on$ranks.jsonl" <<'PY' || fail "on $ranks ranks: the losses"
import json, sys
whole, later = ({line["step"]: line for line in map(json.loads, open(path)) if line["event"] == "step"} for path in sys.argv[1:])
first = min(later)
assert first == 25 and max(later) == 30, sorted(later)
for step, line in later.items():
    assert abs(line["loss"] - whole[step]["loss"]) < 1e-4, (step, line, whole[step])
PY
done

# Killed in the middle, without a chance to do anything: the newest whole checkpoint counts.
kept=(--set "checkpoint.folder=$work/killed" --set checkpoint.interval=10 --log "$work/killed.jsonl")
"$fsdp" "${tiny[@]}" --ranks 2 "${kept[@]}" --set run.steps=1000000 >"$work/out" 2>&1 &
process=$!
until [ "$(cat "$work/killed.jsonl" 2>/dev/null | grep -c '"event":"checkpoint"')" -ge 4 ] || ! kill -0 $process 2>/dev/null; do sleep 0.05; done
kill -KILL $process
wait $process 2>/dev/null
mkdir -p "$work/killed/step-99999999.part"  # and one that was being written
steps=$(($(ls "$work/killed" | grep -v part | tail -1 | sed 's/step-0*//') + 7))
run "${tiny[@]}" --ranks 2 "${kept[@]}" --set run.steps=$steps || fail "after a kill"
run "${tiny[@]}" --ranks 2 --set run.steps=$steps --log "$work/killed-whole.jsonl" || fail "the same without a kill"
same "$work/killed-whole.jsonl" "$work/killed.jsonl" "after a kill"
[ ! -e "$work/killed/step-99999999.part" ] || fail "what a killed run left was not tidied"

# Ctrl-C writes one.
kept=(--set "checkpoint.folder=$work/stopped" --log "$work/stopped.jsonl")
"$fsdp" "${tiny[@]}" --ranks 2 "${kept[@]}" --set run.steps=1000000 >"$work/out" 2>&1 &
process=$!
until grep -q '"step":3,' "$work/stopped.jsonl" 2>/dev/null || ! kill -0 $process 2>/dev/null; do sleep 0.05; done
kill -INT $process
wait $process
[ $? = 130 ] || fail "Ctrl-C: exit code"
[ "$(ls "$work/stopped" | wc -l)" = 1 ] || fail "Ctrl-C: no checkpoint"

# Two runs do not share a folder; the first goes on.
"$fsdp" "${tiny[@]}" --set run.steps=1000000 --set "checkpoint.folder=$work/shared" --set checkpoint.interval=1 --log "$work/shared.jsonl" >"$work/first" 2>&1 &
process=$!
until grep -q '"event":"checkpoint"' "$work/shared.jsonl" 2>/dev/null || ! kill -0 $process 2>/dev/null; do sleep 0.05; done
for i in 1 2 3; do expect_error 1 "another run is using $work/shared" "${tiny[@]}" --set run.steps=2 --set "checkpoint.folder=$work/shared"; done
before=$(grep -c '"event":"checkpoint"' "$work/shared.jsonl")
until [ "$(grep -c '"event":"checkpoint"' "$work/shared.jsonl")" -gt $((before + 3)) ] || ! kill -0 $process 2>/dev/null; do sleep 0.05; done
kill -0 $process || fail "a second run on the folder ended the first: $(tail -3 "$work/first")"
kill -INT $process
wait $process

# Evaluations around a stop: each once.
evaluated=("${tiny[@]}" --ranks 2 --set run.eval_interval=5 --set "checkpoint.folder=$work/evaluated" --log "$work/evaluated.jsonl")
run "${evaluated[@]}" --set run.steps=10 && run "${evaluated[@]}" --set run.steps=20 && run "${evaluated[@]}" --set run.steps=20 || fail "evaluations"
[ "$(grep '"event":"validation"' "$work/evaluated.jsonl" | grep -o '"step":[0-9]*' | tr -dc '0-9\n' | xargs)" = "5 10 15 20" ] ||
  fail "evaluations after a stop: $(grep validation "$work/evaluated.jsonl")"

# What would not be the same run.
again=("${tiny[@]}" --ranks 2 --set run.steps=40 --set "checkpoint.folder=$work/zero3")
expect_error 1 "run.seed = 1, and it is 5 now" "${again[@]}" --set run.seed=5
expect_error 1 "run.batch = 8, and it is 16 now" "${again[@]}" --set run.batch=16
tr a e <"$work/text" >"$work/other"
expect_error 1 "the digest of the first sequences" "${again[@]}" --set "data.files=[\"$work/other\"]"
expect_error 1 "has sizes" "${again[@]}" --set model.ffn_width=80
expect_error 1 "lacks" "${again[@]}" --set model.layers=3
expect_error 1 "checkpoint.resume is false" "${again[@]}" --set checkpoint.resume=false
expect_error 1 "has 30 steps behind it, and run.steps is 10" "${again[@]}" --set run.steps=10
damaged=$work/zero3/step-00000030/rank-00001.safetensors
printf 'x' | dd of="$damaged" bs=1 seek=$(($(stat -c %s "$damaged") - 100)) conv=notrunc 2>/dev/null
expect_error 1 "is damaged" "${again[@]}"
expect_error 2 "is damaged" checkpoint verify "$work/zero3/step-00000030"
expect_error 2 "there is no checkpoint" checkpoint inspect "$work/none"
touch "$work/file"
expect_error 1 "cannot be written" "${tiny[@]}" --set run.steps=2 --set "checkpoint.folder=$work/file/below"

# Weights for others, and from others.
from=$work/zero3/step-00000024
run checkpoint inspect "$from" --tensors || fail "inspect"
grep -q "saved by 2 ranks after 24 steps" "$work/out" || fail "inspect: ranks and steps"
grep -q "weights/blocks.0.attention.query.weight *F32" "$work/out" || fail "inspect: tensors"
run checkpoint inspect "$from" --json && python3 -c 'import json,sys; o=json.load(open(sys.argv[1])); assert o["attributes"]["step"]=="24" and o["kinds"]["weights"]["tensors"]>10, o' "$work/out" || fail "inspect --json"
for names in own llama; do
  run checkpoint export "$from" --output "$work/$names.safetensors" --names $names || fail "export, $names"
  run "${tiny[@]}" --set run.steps=1 --set "checkpoint.weights=$work/$names.safetensors" --set checkpoint.weights_format=$names --log "$work/from-$names.jsonl" ||
    fail "weights from a plain file, $names"
done
run "${tiny[@]}" --set run.steps=1 --set "checkpoint.weights=$from" --log "$work/from-checkpoint.jsonl" || fail "weights from a checkpoint"
cmp <(losses "$work/from-own.jsonl") <(losses "$work/from-checkpoint.jsonl") || fail "exported weights are others"
cmp <(losses "$work/from-llama.jsonl") <(losses "$work/from-checkpoint.jsonl") || fail "weights under Llama's names are others"
python3 - "$work/llama.safetensors" <<'PY' || fail "the exported file"
import json, struct, sys
data = open(sys.argv[1], "rb").read()
length = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:8 + length])
assert header["model.layers.1.mlp.gate_proj.weight"]["dtype"] == "F32", header
assert max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__") == len(data) - 8 - length
PY
run checkpoint export "$from" --output "$work/half.safetensors" --dtype bf16 || fail "export in bf16"
[ $(($(stat -c %s "$work/half.safetensors") * 18 / 10)) -lt "$(stat -c %s "$work/own.safetensors")" ] || fail "bf16 is not smaller"
expect_error 1 "lacks" "${tiny[@]}" --set run.steps=1 --set "checkpoint.weights=$work/llama.safetensors"
expect_error 2 "--output" checkpoint export "$from" --output "$from/rank-00000.safetensors"
expect_error 2 "--output" checkpoint export "$from" --output "$from/index.json"
expect_error 1 "name the folder" "${tiny[@]}" --set run.steps=1 --set "checkpoint.weights=$from/rank-00000.safetensors"

[ $failures = 0 ] && echo "all as expected"
exit $((failures > 0))
