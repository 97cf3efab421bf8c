#!/usr/bin/env bash
# What a user of the installed library does: installs it into an empty prefix, builds the examples with
# find_package(fsdp) from copies outside the tree's own CMake project, runs them.
# Usage: package_test.sh SOURCE_FOLDER BUILD_FOLDER [SANITIZERS]
set -euo pipefail
source_folder=$1 build_folder=$2 sanitizers=${3:-}
work=$build_folder/package_test  # a fixed place, so that ccache knows the compile again
prefix=$work/prefix

fail() {
  echo "FAILED: $*"
  exit 1
}

rm -rf "$work"
mkdir -p "$work"
cmake --install "$build_folder" --prefix "$prefix" >"$work/install.log" || fail "cmake --install: $(tail -n 20 "$work/install.log")"

# Every header must have come along: no installed one includes one that is not.
while IFS=: read -r file _ header; do
  [ -e "$prefix/include/$header" ] || fail "${file#"$prefix/"} includes $header, which is not installed"
done < <(grep -rnoP '^#include "\K(fsdp|models)/[^"]+' "$prefix/include")

options=(-G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_PREFIX_PATH=$prefix")
if command -v ccache >/dev/null; then options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
if [ -n "$sanitizers" ]; then options+=("-DCMAKE_CXX_FLAGS=-fsanitize=$sanitizers"); fi
for example in quickstart finetune moe_1f1b; do
  cp -r "$source_folder/examples/$example" "$work/$example"
  cmake -S "$work/$example" -B "$work/build/$example" "${options[@]}" || fail "find_package(fsdp) in a project of its own"
  cmake --build "$work/build/$example" || fail "building $example against the installed package"
  "$work/build/$example/$example" | tee "$work/output" || fail "running $example"

  # "step N  loss X" at growing steps, the last loss well under the first.
  awk '$1 == "step" && $3 == "loss" { if (!lines++) first = $4; last = $4 }
       END { if (lines < 3 || !(last < 0.5 * first)) { print "expected a falling loss over 3 steps or more"; exit 1 } }' "$work/output" ||
    fail "the output of $example"
done
echo "all good"
