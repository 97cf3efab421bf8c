#!/usr/bin/env bash
# Sets up, builds and runs every test; the last line counts them. Quick when repeated.
# Usage: scripts/test.sh [--sanitize asan|tsan] [CTEST OPTION...]      e.g. scripts/test.sh -R parity
#
# Among the tests: the layer check, and the example of the README built against the installed package. --sanitize
# builds everything with the address and undefined behaviour sanitizers, or the thread sanitizer, in a folder of its own.
source "$(dirname "$0")/lib.sh"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi

preset=release folder=build
if [ "${1:-}" = --sanitize ]; then
  preset=${2:-}
  case $preset in
    asan)
      export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1}
      export UBSAN_OPTIONS=${UBSAN_OPTIONS:-halt_on_error=1:print_stacktrace=1}
      ;;
    tsan) export OMP_NUM_THREADS=1 ;;  # LibTorch's OpenMP is not instrumented: its threads would be reported
    *) die "--sanitize: expected asan or tsan, got '$preset'" ;;
  esac
  folder=build-$preset
  shift 2
fi
set_run_as "$preset"

started=$SECONDS
bash scripts/setup.sh
python3 tools/check_layers.py
bash scripts/build.sh "$preset"

say "tests"
results=$tree/.cache/ctest-$preset.xml
rm -f "$results"
code=0
"${run_as[@]}" ctest --test-dir "$folder" --output-on-failure --no-tests=error --parallel "$(nproc)" \
  --output-junit "$results" "$@" </dev/null || code=$?

[ -f "$results" ] || die "ctest ended with exit code $code before it ran a test"
say "$preset: setup, build and tests took $((SECONDS - started)) s"
python3 scripts/summarize_tests.py "$results" || code=1
exit "$code"
