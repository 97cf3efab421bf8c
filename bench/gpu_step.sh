#!/usr/bin/env bash
# A step of libfsdp and of PyTorch on one GPU, taking turns: shapes A to E, as rank 0 of 4 (bench/peers/gpu_step.py).
#   gpu_step.sh [SHAPE...]
set -uo pipefail
cd "$(dirname "$0")/.."
fsdp=${FSDP_COMMAND:-build/bin/fsdp}
python=${PYTHON:-python3}
run() { "$python" bench/peers/gpu_step.py "$fsdp" "$@" 2> >(grep -v Warning >&2); }
for shape in ${@:-A B C D E}; do
  case $shape in
    A | B | C) run --shape $shape --rounds 12 --modes local,graph,fsdp2,fsdp2-compiled,ours:bare,ours:control,ours:sharded,ours:sharded+graph ;;
    D) run --shape D --rounds 7 --modes local,fsdp2,ours:sharded ;;
    E) run --shape E --rounds 5 --modes local,ours:sharded
       run --shape E --rounds 5 --modes fsdp2,ours:sharded ;;
    *) run --shape $shape --rounds 7 ;;
  esac
done
