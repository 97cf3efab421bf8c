#!/usr/bin/env bash
# A whole training step of the 1B preset on one GPU: by hand, with the library, and in local PyTorch, eager and compiled.
set -uo pipefail
cd "$(dirname "$0")/.."
fsdp=${FSDP_COMMAND:-build/bin/fsdp}
"$fsdp" bench train --preset 1B --modes bare,sharded,sharded+graph "$@"
"${PYTHON:-python3}" bench/peers/gpu_train.py 2> >(grep -v Warning >&2)
