#!/usr/bin/env bash
# torchrun as the tests need it: processes of this machine, no Python in them.
# Usage: torchrun.sh RANKS COMMAND...        FSDP_TORCH_ROOT: the folder of the installed package torch
ranks=$1
shift
site=$(dirname "${FSDP_TORCH_ROOT:?}")
export PYTHONPATH=$site OMP_NUM_THREADS=1
python=$(cd "$site/../../.." && pwd)/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m torch.distributed.run --nproc-per-node "$ranks" --master-port "$((20000 + $$ % 20000))" --no-python "$@"
