#!/usr/bin/env bash
# Installs what building and testing need, on Debian 12 as root or with sudo. Quick when nothing is missing.
# Usage: scripts/setup.sh
#
# Debian packages (scripts/packages.txt) come from apt-get, LibTorch and its libraries (scripts/requirements.txt) and the
# tokenizers (scripts/requirements-tokenize.txt) from the Python package index into .venv: a download of about 2.5 GB,
# once. An installed torch 2.11.0 can be used instead:
#   FSDP_TORCH_ROOT=/path/to/site-packages/torch scripts/setup.sh     (the same variable for the other scripts)
# What the tools print goes to .cache/setup.log.
source "$(dirname "$0")/lib.sh"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi
[ $# -eq 0 ] || die "expected no arguments, got $*; see --help"

log=.cache/setup.log
stamp=.cache/setup.stamp
attempts=3
venv_needs_kb=8000000  # 4.6 GB installed, and the downloads meanwhile

if command -v flock >/dev/null; then
  exec 9>.cache/setup.lock
  flock 9  # a second setup in this tree waits for the first
fi

packages() { grep -v '^#' scripts/packages.txt; }

missing_packages() {
  local installed
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' 2>/dev/null | sed -n 's/^installed //p' | sort -u)
  packages | sort | comm -23 - <(echo "$installed")
}

# What was installed last time, from what: changes when this script or a list changes.
fingerprint() {
  cat scripts/setup.sh scripts/packages.txt scripts/requirements*.txt | sha256sum | cut -d ' ' -f 1
  find_torch
}

# retry COMMAND...: output to the log, a pause between attempts.
retry() {
  local attempt
  for attempt in $(seq 1 $attempts); do
    echo "--- $(date -u +%FT%TZ) $* (attempt $attempt)" >>"$log"
    if "$@" >>"$log" 2>&1 </dev/null; then return 0; fi
    [ "$attempt" -lt $attempts ] && sleep $((attempt * 10))
  done
  return 1
}

fail_with_log() {
  echo "--- the end of $log:" >&2
  tail -n 15 "$log" >&2
  die "$*"
}

install_packages() {
  local names=("$@") as_root=(env)
  command -v apt-get >/dev/null ||
    die "these Debian packages are missing, and there is no apt-get to install them: ${names[*]}. Install their equivalents, then run scripts/build.sh; only Debian 12 is tested"
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "installing ${names[*]} needs root: run as root, or install sudo"
    if ! sudo -n true 2>/dev/null; then
      [ -t 0 ] || die "installing ${names[*]} needs root: run as root, or allow sudo without a password (there is no terminal to ask on)"
      sudo -v || die "sudo was refused"
    fi
    as_root=(sudo env)
  fi
  say "setup: installing ${#names[@]} Debian packages: ${names[*]}"
  local apt=("${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
  # An update that fails in part (a foreign source is down) is no reason to stop: the install tells.
  update_and_install() {
    "${apt[@]}" update || echo "apt-get update failed"
    "${apt[@]}" install -y --no-install-recommends "${names[@]}"
  }
  retry update_and_install ||
    fail_with_log "apt-get could not install ${names[*]}: is the network up, and is this Debian 12? The whole log is $log"
}

check_torch() {
  local folder=$1 version
  version=$(torch_version_of "$folder")
  [ -n "$version" ] || die "FSDP_TORCH_ROOT=$folder holds no torch: expected the folder torch inside site-packages, with version.py in it"
  [ "$version" = "$torch_version" ] || die "FSDP_TORCH_ROOT=$folder is torch $version, and libfsdp needs $torch_version. Without the variable this script installs it"
  [ -e "$folder/lib/libtorch_cpu.so" ] || die "FSDP_TORCH_ROOT=$folder has no lib/libtorch_cpu.so"
}

make_venv() {
  local python=/usr/bin/python3
  [ -x "$python" ] || python=python3
  if [ -d .venv ] && ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    rm -rf .venv  # left half made, or made by a Python that is gone
  fi
  [ -d .venv ] && return
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$python is $("$python" -V), and the pinned packages need Python 3.11 or later"
  "$python" -m venv .venv >>"$log" 2>&1 || fail_with_log "$python -m venv .venv failed"
}

# pip_install LIST [OPTION...]
pip_install() {
  retry .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off -r "$@" ||
    fail_with_log "pip could not install $1: is the network up, or a proxy or index to be set in pip's configuration? The whole log is $log"
}

install_torch() {
  local free_kb
  if [ "$(torch_version_of "$(find_torch)")" != "$torch_version" ]; then
    free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
    [ "$free_kb" -ge $venv_needs_kb ] ||
      die "$((free_kb / 1000000)) GB are free in $tree, and LibTorch needs $((venv_needs_kb / 1000000)). Free some, or name an installed torch $torch_version with FSDP_TORCH_ROOT"
    say "setup: installing LibTorch $torch_version into .venv (a download of about 2.5 GB)"
  fi
  pip_install scripts/requirements.txt
  [ "$(torch_version_of "$(find_torch)")" = "$torch_version" ] || fail_with_log "pip ended well, but .venv has no torch $torch_version"
}

missing=$(missing_packages)
[ -z "${FSDP_TORCH_ROOT:-}" ] || check_torch "$FSDP_TORCH_ROOT"
if [ -z "$missing" ] && [ -f $stamp ] && [ "$(cat $stamp)" = "$(fingerprint)" ] &&
  [ "$(torch_version_of "$(find_torch)")" = "$torch_version" ]; then
  say "setup: nothing to do"
  exit 0
fi

: >"$log"
if [ -n "$missing" ]; then
  # shellcheck disable=SC2086  # one word a package
  install_packages $missing
fi
make_venv
[ -n "${FSDP_TORCH_ROOT:-}" ] || install_torch
pip_install scripts/requirements-tokenize.txt --no-deps  # what they ask for serves downloads only
fingerprint >$stamp
say "setup: ready, LibTorch $torch_version in $(find_torch)"
