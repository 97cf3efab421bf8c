# shellcheck shell=bash disable=SC2034
# Shared by the scripts of this folder, which source it. Changes to the root of the tree.
set -euo pipefail
invoked_as=${0##*/}
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$tree"
mkdir -p .cache

torch_version=2.11.0

# Paths below the tree count as relative, so that what one clone compiled is there for the others.
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$tree} CCACHE_ABSSTDERR=true

say() { echo "== $*"; }

die() {
  echo "$invoked_as: error: $*" >&2
  exit 1
}

# The comment at the head of the calling script.
usage() { sed -n '2,/^\($\|[^#]\)/{s/^# \{0,1\}//p}' "$tree/scripts/$invoked_as"; }

# The folder of the installed Python package torch, or nothing.
find_torch() {
  if [ -n "${FSDP_TORCH_ROOT:-}" ]; then
    echo "$FSDP_TORCH_ROOT"
    return
  fi
  local folder
  for folder in .venv/lib/python3*/site-packages/torch; do
    [ -d "$folder" ] && echo "$tree/$folder" && return
  done
  return 0
}

# torch_version_of FOLDER: "2.11.0", or nothing when there is no torch.
torch_version_of() {
  sed -n "s/^__version__ = '\([0-9.]*\).*/\1/p" "$1/version.py" 2>/dev/null || true
}

# Compilers that run at once: one a core, as far as memory goes (one needs up to 1.5 GB). FSDP_JOBS overrides.
job_count() {
  local cores memory_kb by_memory
  cores=$(nproc)
  memory_kb=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  by_memory=$((memory_kb / 1500000))
  [ "$by_memory" -lt 1 ] && by_memory=1
  [ "$by_memory" -lt "$cores" ] && cores=$by_memory
  echo "${FSDP_JOBS:-$cores}"
}

# Sets run_as to what programs of a preset have to be started with: the thread sanitizer of GCC 12 does not start where
# the kernel spreads addresses over more than 28 bits.
set_run_as() {
  run_as=(env)
  if [ "$1" = tsan ] && setarch "$(uname -m)" -R true 2>/dev/null; then run_as=(setarch "$(uname -m)" -R); fi
}
