#!/usr/bin/env bash
# The command from outside: exit codes, messages, the log, equal losses on 1 and 2 ranks, Ctrl-C.
# Usage: command_test.sh FSDP_BINARY TINY_CONFIG
set -uo pipefail  # so a reader must take all: a writer that is cut off counts as failed
fsdp=$1
config=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}

# A text of about 60 KB with some structure.
for i in $(seq 1 1200); do echo "And it came to pass in year $((i % 97)) that king $((i % 13)) spoke $i words."; done >"$work/text"
tiny=(train --config "$config" --set "data.files=[\"$work/text\"]")

# expect_error CODE MESSAGE ARGS...: exit code and one line on standard error that contains MESSAGE.
expect_error() {
  local code=$1 message=$2
  shift 2
  "$fsdp" "$@" >"$work/out" 2>"$work/err"
  local got=$?
  [ "$got" = "$code" ] || fail "expected exit code $code, got $got: $*"
  grep -qF -- "$message" "$work/err" || fail "expected \"$message\" from: $* ; got: $(cat "$work/err")"
  [ "$(grep -c '^fsdp: error: ' "$work/err")" = 1 ] || fail "expected one error line from: $*"
}

expect_error 2 "subcommand" 
expect_error 2 "--config is missing" train
expect_error 2 "--nonsense" train --nonsense
expect_error 2 "no such config file" train --config "$work/none.toml"
expect_error 2 "unknown key run.stepz; the nearest is run.steps" "${tiny[@]}" --set run.stepz=1
expect_error 2 "run.steps: expected an integer" "${tiny[@]}" --set run.steps=many
expect_error 2 "run.batch: expected a multiple of ranks x microbatches" "${tiny[@]}" --ranks 3
expect_error 2 "mesh.axes make 4 ranks, but there are 2" "${tiny[@]}" --set 'mesh.axes=["dp=4"]'
expect_error 2 "model.heads: expected a divisor of model.width 32, got 5" "${tiny[@]}" --set model.heads=5
expect_error 2 "run.ranks: expected an integer from 1 to 256, got 1000" "${tiny[@]}" --ranks 1000
expect_error 2 "need at least" "${tiny[@]}" --set model.width=16384 --set model.heads=128 --set model.ffn_width=65536 --set model.layers=1000
expect_error 2 "data.weights" "${tiny[@]}" --set 'data.weights=[1, 2]'
expect_error 2 "$work/none does not exist" "${tiny[@]}" --set "data.files=[\"$work/none\"]"
expect_error 2 "--log: cannot" "${tiny[@]}" --log "$work/text/run.jsonl"
WORLD_SIZE=2 RANK=0 expect_error 2 "MASTER_ADDR and MASTER_PORT" "${tiny[@]}"

"$fsdp" info >"$work/info" || fail "fsdp info"
grep -q "LibTorch" "$work/info" || fail "fsdp info names LibTorch"
"$fsdp" --help >"$work/help" || fail "fsdp --help"
"$fsdp" train --help-config | grep "^  steps " >/dev/null || fail "--help-config explains run.steps"
"$fsdp" "${tiny[@]}" --print-config >"$work/printed.toml" || fail "--print-config"
"$fsdp" train --config "$work/printed.toml" --print-config | cmp - "$work/printed.toml" || fail "--print-config reads back as the same"

# A mixture of experts: the merged schedule trains as the sequential one does, to the last digit.
moe=("${tiny[@]}" --set model.preset=tiny-moe --set run.microbatches=2 --set parallel.expert_ranks=2 --set run.steps=6)
for schedule in sequential 1f1b; do
  "$fsdp" "${moe[@]}" --set parallel.schedule=$schedule --log "$work/logs/$schedule.jsonl" >"$work/$schedule" 2>&1 ||
    fail "a mixture of experts, $schedule: $(cat "$work/$schedule")"
  grep -q "4 experts of 64 over 2 ranks, 2 a token" "$work/$schedule" || fail "$schedule: the experts are not described"
done
cmp <(grep -o '"loss":[^,]*' "$work/logs/sequential.jsonl") <(grep -o '"loss":[^,]*' "$work/logs/1f1b.jsonl") ||
  fail "sequential and 1f1b train differently"
[ "$(grep -c '"loss":' "$work/logs/1f1b.jsonl")" -ge 6 ] || fail "1f1b: no losses in the log"
"$fsdp" bench schedule --preset tiny-moe --layers 2 --context 64 --simulated >"$work/schedules" || fail "bench schedule --simulated"
[ "$(wc -l <"$work/schedules")" = 5 ] || fail "bench schedule prints a line a schedule"
expect_error 2 "mixture of experts" bench schedule --preset 1B --simulated

for ranks in 1 2; do
  "$fsdp" "${tiny[@]}" --ranks $ranks --log "$work/logs/$ranks.jsonl" --profile "$work/logs/$ranks.json" >"$work/out$ranks" 2>&1 ||
    fail "training on $ranks ranks: $(cat "$work/out$ranks")"
  grep -q "validation loss" "$work/out$ranks" || fail "$ranks ranks: no validation loss printed"
  [ -s "$work/logs/$ranks.json" ] || fail "$ranks ranks: no trace"
done
python3 - "$work/logs" <<'PY' || fail "the logs"
import json, sys
folder = sys.argv[1]
runs = {}
for ranks in (1, 2):
    lines = [json.loads(line) for line in open(f"{folder}/{ranks}.jsonl")]
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 31)), "one object a step"
    for key in ("step", "loss", "grad_norm", "lr", "tokens_per_second", "step_ms", "peak_bytes", "data_wait_ms"):
        assert all(key in line for line in steps), key
    done = lines[-1]
    assert done["event"] == "done" and done["ranks"] == ranks and done["parameters"] > 0 and done["steps"] == 30, done
    assert done["validation_loss"] < steps[0]["loss"], "the model learned something"
    assert len(json.load(open(f"{folder}/{ranks}.json"))) > 10, "spans in the trace"
    runs[ranks] = (steps, done)
for one, two in zip(runs[1][0][:20], runs[2][0][:20]):
    assert abs(one["loss"] - two["loss"]) < 1e-3, (one, two)
    assert abs(one["grad_norm"] - two["grad_norm"]) < 1e-3 * max(1, one["grad_norm"]), (one, two)
PY

# Ctrl-C in the middle of a run that would take hours.
"$fsdp" "${tiny[@]}" --set run.steps=1000000 --log "$work/long.jsonl" >"$work/out" 2>&1 &
pid=$!
for _ in $(seq 1 300); do
  [ -f "$work/long.jsonl" ] && [ "$(wc -l <"$work/long.jsonl")" -ge 5 ] && break
  sleep 0.1
done
kill -INT $pid
wait $pid
code=$?
[ "$code" = 130 ] || fail "expected exit code 130 after Ctrl-C, got $code: $(cat "$work/out")"
tail -n 1 "$work/long.jsonl" | grep -q '"event":"interrupted"' || fail "no record of the interruption: $(tail -n 1 "$work/long.jsonl")"
grep -q "interrupted" "$work/out" || fail "no report after Ctrl-C"

# Ctrl-C in an evaluation that would take hours.
rm -f "$work/long.jsonl"
"$fsdp" "${tiny[@]}" --set run.steps=1 --set optimizer.warmup_steps=0 --set run.eval_batches=1000000 --log "$work/long.jsonl" >"$work/out" 2>&1 &
pid=$!
for _ in $(seq 1 300); do
  [ -f "$work/long.jsonl" ] && [ "$(wc -l <"$work/long.jsonl")" -ge 1 ] && break
  sleep 0.1
done
kill -TERM $pid
wait $pid
code=$?
[ "$code" = 130 ] || fail "expected exit code 130 after SIGTERM in the evaluation, got $code: $(cat "$work/out")"

# Token files: mixed with weights, tokens instead of text in the sample, and a token beyond the vocabulary.
"$fsdp" data prepare --input "$work/text" --output "$work/bytes" --document line >"$work/out" 2>&1 || fail "data prepare: $(cat "$work/out")"
"$fsdp" data inspect "$work/bytes" | grep "1200 documents\|documents.*1200" >/dev/null || fail "data inspect counts 1200 documents: $("$fsdp" data inspect "$work/bytes")"
for i in $(seq 1 3000); do echo "{\"tokens\": [$((i % 50)), $((i % 7 + 300)), $((i % 3 + 400))]}"; done >"$work/tokens.jsonl"
"$fsdp" data prepare --input "$work/tokens.jsonl" --format tokens --vocabulary 512 --output "$work/tokens" >"$work/out" 2>&1 || fail "data prepare --format tokens: $(cat "$work/out")"
"$fsdp" train --config "$config" --set "data.files=[\"$work/bytes\", \"$work/tokens\"]" --set 'data.weights=[1, 3]' \
  --set data.mask_document_starts=true --set model.vocabulary=512 --log "$work/mixed.jsonl" >"$work/out" 2>&1 || fail "training on two token files: $(cat "$work/out")"
grep -q "sample, as tokens:" "$work/out" || fail "no sample of tokens"
# The loss over unmasked targets does not depend on ranks and microbatches, although these hold different numbers of them.
for split in "1 1" "2 1" "2 2" "4 2"; do
  read -r ranks microbatches <<<"$split"
  "$fsdp" train --config "$config" --ranks "$ranks" --set run.microbatches="$microbatches" --set "data.files=[\"$work/bytes\"]" \
    --set data.mask_document_starts=true --log "$work/masked$ranks$microbatches.jsonl" >"$work/out" 2>&1 || fail "masked on $split: $(cat "$work/out")"
done
python3 - "$work" <<'PY' || fail "the masked losses"
import json, sys
def steps(name):
    return [json.loads(line) for line in open(f"{sys.argv[1]}/masked{name}.jsonl") if '"event":"step"' in line]
one = steps("11")
for name in ("21", "22", "42"):
    for a, b in zip(one[:20], steps(name)[:20], strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-3, (name, a, b)
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-3 * max(1, a["grad_norm"]), (name, a, b)
PY
cp "$work/text" "$work/kept.bin.part"
expect_error 2 "--output: $work/kept.bin.part is $work/kept.bin.part" data prepare --input "$work/kept.bin.part" --output "$work/kept"
cmp -s "$work/text" "$work/kept.bin.part" || fail "prepare has changed its input"
for i in $(seq 1 3000); do echo "[$((i % 50))]"; done >"$work/short.jsonl"
"$fsdp" data prepare --input "$work/short.jsonl" --format tokens --vocabulary 256 --output "$work/short" >"$work/out" 2>&1 || fail "data prepare of short documents"
expect_error 1 "step 1 has no targets" train --config "$config" --set "data.files=[\"$work/short\"]" --set data.mask_document_starts=true
OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 "$fsdp" "${tiny[@]}" --print-config | grep "^ranks = 1$" >/dev/null || fail "one process of a launcher is one rank"
expect_error 1 "is beyond the vocabulary of 256" train --config "$config" --set "data.files=[\"$work/tokens\"]"

[ "$failures" = 0 ] && echo "all good"
exit "$failures"
