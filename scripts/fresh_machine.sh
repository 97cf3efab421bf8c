#!/usr/bin/env bash
# Proves that the scripts install everything they need: makes a minimal Debian 12 in a temporary folder, puts a clone of
# the last commit there (what is not committed stays out) and runs scripts/demo.sh and scripts/test.sh in it as root.
# Usage: scripts/fresh_machine.sh [--keep] [--packages-only]
#
#   --keep           leaves the folder for a look inside
#   --packages-only  installs the Debian packages and finds the wheels' index, then ends: minutes instead of an hour
#
# Needs root, the command debootstrap, 15 GB below TMPDIR (default /tmp) and about an hour on two cores. Each step has a
# time limit. How this machine reaches Debian's packages and the Python package index (apt's and pip's configuration,
# proxies, certificates, name servers) is copied. All mounts are private to this script and end with it.

# shellcheck disable=SC2016  # what stands in single quotes is expanded elsewhere
source "$(dirname "$0")/lib.sh"

keep='' packages_only='' private=''
for argument in "$@"; do
  case $argument in
    --keep) keep=yes ;;
    --packages-only) packages_only=yes ;;
    --inside-namespace) private=yes ;;  # set by this script itself
    -h | --help) usage; exit ;;
    *) die "unknown option '$argument'; see --help" ;;
  esac
done
bootstrap_limit=20m packages_limit=20m demo_limit=90m test_limit=90m
needs_kb=15000000

[ "$(id -u)" = 0 ] || die "needs root"
command -v debootstrap >/dev/null || die "the command debootstrap is missing: apt-get install debootstrap"
[ -n "$packages_only" ] || git rev-parse -q --verify HEAD >/dev/null || die "there is no commit to clone"
if [ -z "$private" ]; then
  unshare --mount true 2>/dev/null || die "this machine does not allow mounts of one's own (unshare --mount failed)"
  exec unshare --mount --propagation private bash "scripts/$invoked_as" --inside-namespace "$@"
fi

free_kb=$(df -Pk "${TMPDIR:-/tmp}" | awk 'NR == 2 {print $4}')
[ "$free_kb" -ge $needs_kb ] || die "$((free_kb / 1000000)) GB are free in ${TMPDIR:-/tmp}, and $((needs_kb / 1000000)) are needed"

machine=$(mktemp -d "${TMPDIR:-/tmp}/fsdp_fresh_machine.XXXXXX")
child=
cleanup() {
  local mount
  if [ -n "$child" ]; then kill "$child" 2>/dev/null || true; fi
  for mount in dev proc; do
    if mountpoint -q "$machine/$mount"; then umount -R -l "$machine/$mount"; fi
  done
  if [ -n "$keep" ]; then
    say "fresh machine: kept in $machine"
  else
    rm -rf --one-file-system "$machine"
  fi
}
trap cleanup EXIT
trap 'exit 130' INT TERM

log=$tree/.cache/fresh_machine.log
: >"$log"
logged=(bash -c 'exec "$@" >>"$0" 2>&1' "$log")

# step LIMIT TITLE COMMAND...: ends the script when the command fails or takes longer.
step() {
  local limit=$1 title=$2 started=$SECONDS code=0
  shift 2
  say "fresh machine: $title"
  timeout "$limit" "$@" </dev/null &
  child=$!
  wait "$child" || code=$?
  child=
  case $code in
    0) say "fresh machine: $title took $((SECONDS - started)) s" ;;
    124) die "$title was not done after $limit; see $log" ;;
    *) die "$title failed with exit code $code after $((SECONDS - started)) s; see $log" ;;
  esac
}

copy() {  # copy FILE_OR_FOLDER [PLACE]: to the same place of the new machine
  local from=$1 to=$machine${2:-$1}
  [ -e "$from" ] || return 0
  rm -rf "$to"
  mkdir -p "$(dirname "$to")"
  cp -rL "$from" "$to"
}

# In the new machine, as root, in the clone.
environment=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "TERM=${TERM:-dumb}" CI=true)
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST PIP_CERT PIP_DEFAULT_TIMEOUT SSL_CERT_FILE; do
  if [ -n "${!name:-}" ]; then environment+=("$name=${!name}"); fi
done
inside=(chroot "$machine" env -i "${environment[@]}" bash -c 'cd /root/libfsdp && eval "$1"' bash)

# The mirror that apt-get uses here for Debian 12; debootstrap's own choice when there is none.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' 2>/dev/null | head -n 1 || true)
step "$bootstrap_limit" "a minimal Debian 12 in $machine" \
  "${logged[@]}" debootstrap --variant=minbase bookworm "$machine" ${mirror:+"$mirror"}

# Ways to the package servers. Sources of other software than Debian 12 stay out.
copy /etc/apt/apt.conf
copy /etc/apt/apt.conf.d
copy /etc/apt/auth.conf
copy /etc/apt/auth.conf.d
copy /etc/resolv.conf
copy /etc/hosts
copy /usr/local/share/ca-certificates
for file in /etc/ssl/certs/ca-certificates.crt "${PIP_CERT:-}" "${SSL_CERT_FILE:-}"; do copy "$file"; done
for file in "${PIP_CONFIG_FILE:-}" /root/.pip/pip.conf /root/.config/pip/pip.conf /etc/pip.conf; do
  if [ -f "$file" ]; then copy "$file" /etc/pip.conf; break; fi
done
if [ -n "$mirror" ]; then
  rm -f "$machine/etc/apt/sources.list"
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    grep -E ' bookworm(-security|-updates)? ' | sort -u >"$machine/etc/apt/sources.list"
fi

mount -t proc proc "$machine/proc"
mount --rbind /dev "$machine/dev"
mountpoint -q "$machine/dev/shm" || mount -t tmpfs tmpfs "$machine/dev/shm"

if [ -n "$packages_only" ]; then
  mkdir "$machine/root/libfsdp"
  cp -r scripts "$machine/root/libfsdp/"
  step "$packages_limit" "Debian packages" "${logged[@]}" "${inside[@]}" \
    'apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(grep -v "^#" scripts/packages.txt)'
  step "$packages_limit" "the Python package index" "${logged[@]}" "${inside[@]}" \
    'python3 -m venv /tmp/venv && /tmp/venv/bin/pip download --no-deps -d /tmp/wheels $(grep "^filelock==" scripts/requirements.txt)'
  exit
fi

git clone -q --no-hardlinks . "$machine/root/libfsdp"
commit=$(git -C "$machine/root/libfsdp" rev-parse --short HEAD)
step "$demo_limit" "scripts/demo.sh of commit $commit" "${inside[@]}" 'bash scripts/demo.sh'
step "$test_limit" "scripts/test.sh of commit $commit" "${inside[@]}" 'bash scripts/test.sh'
say "fresh machine: all good, commit $commit"
