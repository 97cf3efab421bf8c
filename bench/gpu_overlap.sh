#!/usr/bin/env bash
# Overlap of gathers and reductions with compute, as CUPTI saw it: four linear units, rank 0 of 4 on a loopback that takes
# the time of a link.   gpu_overlap.sh [WIDTH...]
# The last lines must not hide all: prefetch off.
set -uo pipefail
cd "$(dirname "$0")/.."
fsdp=${FSDP_COMMAND:-build/bin/fsdp}
steps=${STEPS:-20} processes=${PROCESSES:-3}
tokens() { case $1 in 4096) echo 16384 ;; 8192) echo 16384 ;; *) echo 32768 ;; esac; }
for width in ${@:-4096 8192 16384}; do
  shape=4,$width,$(tokens "$width"),0
  for held in 0 24; do
    for process in $(seq "$processes"); do
      "$fsdp" bench overlap --shape "$shape" --steps "$steps" --gather-multiprocessors $held
    done
  done
  "$fsdp" bench overlap --shape "$shape" --steps "$steps" --keep-last false
  "$fsdp" bench overlap --shape "$shape" --steps "$steps" --unify
  "$fsdp" bench overlap --shape "$shape" --steps "$steps" --delay 1
  "$fsdp" bench overlap --shape "$shape" --steps "$steps" --strategy zero2
  "$fsdp" bench overlap --shape "$shape" --steps "$steps" --strategy zero1
  "$fsdp" bench overlap --shape "$shape" --steps "$steps" --prefetch none
done
