#!/usr/bin/env bash
# mpirun as the tests need it: as root, with more ranks than cores, ranks not bound to cores.
# Usage: mpirun.sh RANKS COMMAND...
ranks=$1
shift
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
# Open MPI is not instrumented: what it keeps until the end is no leak of ours, nor are its locks visible.
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0
exec mpirun -n "$ranks" "$@"
