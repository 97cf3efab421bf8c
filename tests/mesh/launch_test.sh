#!/usr/bin/env bash
# Ranks of a launcher that throw, leave, exit, are killed or are stopped: the job ends, within the deadline, with names.
# Usage: launch_test.sh LAUNCHER LAUNCH_PROGRAM      LAUNCHER: mpirun.sh or torchrun.sh of tests/support
set -uo pipefail
launcher=$1
program=$2
case $launcher in
  *torchrun.sh) module=libfsdp_zeromq.so package=libzmq3-dev ;;
  *) module=libfsdp_mpi.so package=libopenmpi-dev ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
fail() {
  echo "FAILED: $*"
  sed 's/^/    /' "$work/out" | head -n 30
  failures=$((failures + 1))
}

# run RANKS MODE DEADLINE_MS: exit code in $code. A job that hangs is ended after 60 s with code 124.
run() {
  timeout 60 bash "$launcher" "$1" "$program" "$2" "$3" >"$work/out" 2>&1
  code=$?
}
expect() { grep -qE -- "$1" "$work/out" || fail "$mode: expected \"$1\""; }

mode=well
for ranks in 1 2 3 5; do
  run $ranks well 30000
  [ $code = 0 ] || fail "well on $ranks ranks: exit code $code"
  [ "$(grep -c "is done" "$work/out")" = $((ranks == 1 ? 2 : ranks)) ] || fail "well on $ranks ranks: not all are done"
done

mode=throw
run 3 throw 30000
[ $code != 0 ] && [ $code != 124 ] || fail "throw: exit code $code"
expect "^error: the disk is full"
expect "^aborted: rank [01]: all_reduce \"step\" #20 .* was aborted: rank 2 failed: the disk is full"

mode=leave
run 3 leave 30000
[ $code != 0 ] && [ $code != 124 ] || fail "leave: exit code $code"
expect "all_reduce \"step\" #20 of 65536 Float on communicator loop cannot complete, for a rank has ended; missing ranks: ([01], )?2"

mode=exit
run 3 exit 30000
[ $code != 0 ] && [ $code != 124 ] || fail "exit: exit code $code"

mode=stop
run 3 stop 1500
[ $code != 0 ] && [ $code != 124 ] || fail "stop: exit code $code"
expect "all_reduce \"step\" #(19|20) of 65536 Float on communicator loop waited 1500 ms; missing ranks: 2"

mode="no module"
FSDP_MODULE_DIR=$work run 2 well 30000
[ $code != 0 ] && [ $code != 124 ] || fail "no module: exit code $code"
expect "error: the module $work/$module cannot be opened .*$package"

mode="wrong module"
g++ -shared -fPIC -o "$work/$module" -xc++ - <<<'extern "C" { extern const int fsdp_transport_module; const int fsdp_transport_module = 0; }'
FSDP_MODULE_DIR=$work run 2 well 30000
expect "error: the module $work/$module belongs to another version of libfsdp"

mode="variables that lie"
alone() { env "$@" timeout 60 "$program" well 1000 >"$work/out" 2>&1; code=$?; }
case $module in
  libfsdp_mpi.so)
    alone OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0
    expect "error: mpirun says rank 0 of 2 \(OMPI_COMM_WORLD_SIZE\), but MPI says rank 0 of 1"
    ;;
  *)
    alone RANK=0 WORLD_SIZE=2
    expect "error: RANK and WORLD_SIZE name 2 processes, but MASTER_ADDR and MASTER_PORT"
    alone RANK=0 WORLD_SIZE=2 MASTER_ADDR=no.such.host.invalid MASTER_PORT=29400
    expect "error: .*(no.such.host.invalid|for all processes of the job to join)"  # whichever deadline ends first
    # By hand, four at once: rank 0 runs the store until the last has read it.
    for attempt in 1 2 3; do
      pids=()
      for rank in 0 1 2 3; do
        RANK=$rank WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + ($$ + attempt) % 20000)) timeout 60 "$program" well 30000 >"$work/out" 2>&1 &
        pids+=($!)
      done
      for pid in "${pids[@]}"; do wait "$pid" || fail "by hand, attempt $attempt: exit code $?"; done
    done
    alone RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 20000))
    expect "error: rank 0 waited 1000 ms for rank 1 to come to 127.0.0.1"
    ;;
esac
[ $code = 1 ] || fail "variables that lie: exit code $code"

[ "$failures" = 0 ] && echo "all good"
exit "$failures"
