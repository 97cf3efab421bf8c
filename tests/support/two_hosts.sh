#!/usr/bin/env bash
# Two hosts on one machine: network namespaces with names, addresses and no shared memory transport between them, joined
# by a virtual cable. Runs a command over them with mpirun, half of the ranks on each.
# Usage: two_hosts.sh RANKS COMMAND...        exit code 77: this machine does not allow it (needs root)
set -uo pipefail
ranks=$1
shift
skip() {
  echo "skipped: $*"
  exit 77
}
[ "$(id -u)" = 0 ] || skip "needs root"
command -v ip >/dev/null || skip "the command ip is missing (Debian package iproute2)"

a=fsdp$$a b=fsdp$$b
work=$(mktemp -d)
cleanup() {
  ip netns del $a 2>/dev/null
  ip netns del $b 2>/dev/null
  rm -rf "$work"
}
trap cleanup EXIT
ip netns add $a 2>/dev/null && ip netns add $b 2>/dev/null || skip "network namespaces are not allowed here"
ip link add $a type veth peer name $b 2>/dev/null || skip "virtual cables are not allowed here"
for side in $a:10.77.0.1 $b:10.77.0.2; do
  name=${side%:*} address=${side#*:}
  ip link set "$name" netns "$name" && ip -n "$name" addr add "$address/24" dev "$name" &&
    ip -n "$name" link set "$name" up && ip -n "$name" link set lo up || skip "namespaces cannot be set up here"
done

# How mpirun reaches the second host: AGENT HOST COMMAND..., as ssh would.
cat >"$work/agent" <<AGENT
#!/bin/sh
shift
exec ip netns exec $b unshare --uts sh -c 'hostname second && exec sh -c "\$0"' "\$*"
AGENT
chmod +x "$work/agent"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
half=$((ranks / 2))
ip netns exec $a unshare --uts sh -c 'hostname first && exec "$@"' sh \
  mpirun --mca plm_rsh_agent "$work/agent" --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 \
  --host "10.77.0.1:$((ranks - half)),10.77.0.2:$half" -n "$ranks" --oversubscribe --bind-to none "$@"
