#!/usr/bin/env bash
# Everything that is measured on several GPUs of one host, a part after the other, each with a time limit; JSON lines.
#   gpu_ranks.sh [PART...]      step overlap collectives schedule train kill      default: all of them
# RANKS, default: the GPUs there are. TEXT: a file to train on (train, kill), default runs/data/bible.txt. STEPS of train.
# FSDP_SHARE_GPU=1: ranks share GPUs, of train alone, for its numbers and not its times.
set -uo pipefail
cd "$(dirname "$0")/.."
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
fsdp=${FSDP_COMMAND:-build/bin/fsdp}
python=${PYTHON:-python3}
ranks=${RANKS:-$(nvidia-smi -L | grep -c "^GPU")}
text=${TEXT:-runs/data/bible.txt}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

limited() {  # seconds command...: a line when it fails, then on
  local code=0
  timeout "$1" "${@:2}" 2> "$work/stderr" || code=$?
  if [ "$code" -ne 0 ]; then
    echo "gpu_ranks.sh: code $code: ${*:2}" >&2
    grep -v Warning "$work/stderr" | tail -5 >&2
  fi
  return "$code"
}

step() {  # SHAPE MODES ROUNDS
  limited 240 "$python" bench/peers/gpu_step.py "$fsdp" --nccl --ranks "$ranks" --shape "$1" --modes "$2" --rounds "$3" --profile 3
}
part_step() {
  local peers=local,ddp,fsdp2,fsdp2-kept,fsdp2-compiled
  step A graph,$peers,ours:bare,ours:sharded,ours:sharded+kernel,ours:sharded+nccl,ours:sharded+keep=2 12
  step B graph,$peers,ours:bare,ours:sharded,ours:sharded+graph 10
  step C graph,$peers,ours:bare,ours:sharded,ours:bare+graph,ours:sharded+graph 10
  step D local,fsdp2,ours:bare,ours:sharded 8
  step D fsdp2-kept,ours:bare,ours:sharded+keep=10 6
  step E local,ours:sharded 5
  step E fsdp2,ours:sharded 5
  limited 60 "$fsdp" bench step --nccl --ranks "$ranks" --shape 4,4096,8192,0 --modes bare,sharded --rounds 20
  limited 60 "$fsdp" bench host --nccl --ranks "$ranks" --shape A --rounds 12
}

part_overlap() {
  local shape
  run() { limited 90 "$fsdp" bench overlap --nccl --ranks "$ranks" --shape "$shape" --steps 20 "$@"; }
  for shape in 4,4096,16384,0 4,8192,16384,0 4,16384,32768,0 8,4096,4096,11008; do
    run
    run --unify                                   # one stream for both
    run --delay 1                                 # the baseline: reductions after the next gather
    run --unify --delay 1
    run --reducer kernel
    run --symmetric false --one-sided false --reducer kernel
    run --symmetric false --one-sided false --reducer kernel --unify --delay 1
  done
  shape=4,8192,16384,0 run --prefetch none
}

part_collectives() { limited 200 "$fsdp" bench collectives --ranks "$ranks"; }

part_schedule() { limited 200 "$fsdp" bench schedule --nccl --ranks "$ranks" --layers 4 --sequences 4; }

# The 1B preset on text for 1,000 steps, on all GPUs and on one with the same batches; then a model of 8 billion
# parameters at a context of 8192, both libraries in turns.
start() {  # RANKS arguments...
  if [ -n "${FSDP_SHARE_GPU:-}" ]; then
    "$python" -m torch.distributed.run --nproc-per-node "$1" --no-python -- "$fsdp" "${@:2}"
  else
    "$fsdp" "${@:2}" --ranks "$1"
  fi
}
export -f start
export fsdp python
settings=(--config configs/1b_bytes.toml --set "data.files=[\"$text\"]" --set run.log_interval=100 --set "run.steps=${STEPS:-1000}")
part_train() {
  local n
  for n in "$ranks" 1; do
    limited 400 bash -c 'start "$@"' bash "$n" train "${settings[@]}" --log "$work/$n.jsonl" | tail -4
  done
  "$python" - "$work/$ranks.jsonl" "$work/1.jsonl" <<'PYTHON'
import json, statistics, sys

runs = [[json.loads(line) for line in open(path)] for path in sys.argv[1:]]
several, one = ([line for line in run if "grad_norm" in line] for run in runs)
apart = [abs(a["loss"] - b["loss"]) for a, b in zip(several, one)]
validation = [run[-1]["validation_loss"] for run in runs]
print(json.dumps({"bench": "train_1000", "steps": len(several), "loss_apart_first_100": max(apart[:100]),
                  "loss_apart": max(apart), "loss_apart_mean": statistics.mean(apart),
                  "last_losses": [several[-1]["loss"], one[-1]["loss"]],
                  "validation_losses": validation,
                  "step_ms": [statistics.median(line["step_ms"] for line in run[20:]) for run in (several, one)]}))
PYTHON
  if [ -n "${FSDP_SHARE_GPU:-}" ]; then return; fi
  for n in 1 2; do
    limited 150 "$fsdp" bench train --preset 8B --modes sharded --sequences 1 --context 8192 --nccl --ranks "$ranks" --rounds 8
    limited 150 "$python" bench/peers/gpu_train.py --preset 8B --modes fsdp2 --sequences 1 --context 8192 --nccl --ranks "$ranks" --rounds 8
  done
  limited 200 "$python" bench/peers/gpu_train.py --preset 8B --modes fsdp2-compiled --sequences 1 --context 8192 --nccl --ranks "$ranks" --rounds 8
}

# A rank that is killed in the middle of a run: the others must end, with its name, within the deadline; the same command
# then goes on from the newest checkpoint.
part_kill() {
  if [ "$ranks" -lt 2 ]; then echo "gpu_ranks.sh: kill needs two GPUs or more, there are $ranks" >&2; return; fi
  local kept=(--set run.deadline_seconds=30 --set "checkpoint.folder=$work/checkpoints" --set checkpoint.interval=20)
  "$fsdp" train "${settings[@]}" "${kept[@]}" --ranks "$ranks" --log "$work/killed.jsonl" > "$work/killed" 2>&1 &
  local parent=$! victim= started
  until [ "$(grep -c grad_norm "$work/killed.jsonl" 2> "$work/stderr")" -ge 50 ] || ! kill -0 "$parent" 2> "$work/stderr"; do
    sleep 0.2
  done
  victim=$(pgrep -P "$parent" | tail -1)
  started=$(date +%s%N)
  kill -KILL "$victim"
  local code=0
  wait "$parent" || code=$?
  echo "{\"bench\":\"killed_rank\",\"ranks\":$ranks,\"code\":$code,\"ended_after_ms\":$((($(date +%s%N) - started) / 1000000))}"
  grep -i "rank\|checkpoint:" "$work/killed" | tail -6 >&2
  limited 120 "$fsdp" train "${settings[@]}" "${kept[@]}" --ranks "$ranks" --set run.max_seconds=20 --log "$work/killed.jsonl" |
    grep "weights from\|checkpoint:\|steps in"
}

for part in "${@:-step overlap collectives schedule train kill}"; do
  for name in $part; do "part_$name"; done
done
