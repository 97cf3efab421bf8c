#!/usr/bin/env bash
# Policies side by side on one GPU, rank 0 of 4 on a loopback that takes the time of a link: step time, what is exposed,
# units alive, bytes gathered at most.   gpu_policies.sh [SHAPE...]
set -uo pipefail
cd "$(dirname "$0")/.."
fsdp=${FSDP_COMMAND:-build/bin/fsdp}
for shape in ${@:-4,8192,16384,0 8,4096,4096,11008}; do
  run() { "$fsdp" bench overlap --shape "$shape" --steps "${STEPS:-10}" "$@" || true; }
  run --prefetch none
  run --amount 1
  run --amount 2
  run --prefetch lists
  run --prefetch recorded
  for held in 1 2 3; do run --prefetch delayed_release --amount $held; done
  run --delay 1
  run --keep-last false
  run --unify
  # Multiprocessors: of a ring's gathers; left free by the products for them; for reductions (16) alone.
  run --gather-multiprocessors 24
  run --gather-multiprocessors 24 --carve-out 24
  run --carve-out 16
done
