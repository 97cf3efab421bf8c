#!/usr/bin/env bash
# Configures and builds. Quiet, unless it fails; in a terminal one line shows how far it is.
# Usage: scripts/build.sh [release|asan|tsan] [TARGET...]
#
# The presets are those of CMakePresets.json; their folders build/, build-asan/, build-tsan/. What the tools print goes
# to .cache/build-PRESET.log. FSDP_JOBS=N sets how many compilers run at once.
source "$(dirname "$0")/lib.sh"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi

preset=${1:-release}
[ $# -gt 0 ] && shift
case $preset in
  release) folder=build ;;
  asan | tsan) folder=build-$preset ;;
  *) die "no preset '$preset': expected release, asan or tsan" ;;
esac
log=.cache/build-$preset.log
jobs=$(job_count)

for tool in cmake ninja g++; do
  command -v $tool >/dev/null || die "$tool is missing: run scripts/setup.sh first"
done
torch=$(find_torch)
[ -n "$torch" ] || die "no LibTorch: run scripts/setup.sh first, or name an installed torch $torch_version with FSDP_TORCH_ROOT"
[ "$(torch_version_of "$torch")" = "$torch_version" ] || die "$torch is torch '$(torch_version_of "$torch")', expected $torch_version: run scripts/setup.sh"

if command -v flock >/dev/null; then
  exec 9>".cache/build-$preset.lock"
  flock 9  # another build of this folder ends first
fi
started=$SECONDS
if ! cmake --preset "$preset" -DFSDP_TORCH_ROOT="$torch" >"$log" 2>&1; then
  cat "$log" >&2
  die "configuring failed"
fi

set_run_as "$preset"  # the build runs the tests' programs to list their cases
command=("${run_as[@]}" cmake --build "$folder" --parallel "$jobs")
[ $# -gt 0 ] && command+=(--target "$@")
if [ -t 1 ]; then
  "${command[@]}" || die "the build in $folder/ failed"
else
  say "build: $preset into $folder/, $jobs at once"
  if ! "${command[@]}" >>"$log" 2>&1; then
    # Ninja prints FAILED before the output of a command; what else was running follows it.
    sed -n '/FAILED:/,$p' "$log" | head -n 150 >&2
    die "the build in $folder/ failed; the whole log is $log"
  fi
fi
say "build: $folder/ is up to date ($((SECONDS - started)) s)"
