#!/usr/bin/env bash
# A whole training step on one GPU: the 1B preset by hand, with the library, and in local PyTorch, eager and compiled; then
# the 8B preset at a context of 8192 as rank 0 of 4, the library and FSDP2 in turns.
set -uo pipefail
cd "$(dirname "$0")/.."
fsdp=${FSDP_COMMAND:-build/bin/fsdp}
peer() { "${PYTHON:-python3}" bench/peers/gpu_train.py "$@" 2> >(grep -v Warning >&2); }
"$fsdp" bench train --preset 1B --modes bare,sharded,sharded+graph "$@"
peer
large=(--preset 8B --ranks 4 --sequences 1 --context 8192 --rounds 8)
for turn in 1 2; do
  "$fsdp" bench train "${large[@]}" --modes sharded
  peer "${large[@]}" --modes fsdp2
done
peer "${large[@]}" --modes fsdp2-compiled
