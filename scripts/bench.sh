#!/usr/bin/env bash
# Runs a benchmark, which prints one JSON object a line. Without a name: lists them.
# Usage: scripts/bench.sh [--record] NAME [ARG...]
#
# NAME is bench/NAME.py or bench/NAME.sh, or the C++ program bench_NAME, which is built first. The objects:
#   {"bench":…,"metric":…,"value":…,"unit":…,"peer":…,"ratio":…,"target":…,"better":"lower"|"higher"}
# ratio is value / peer; target is for the ratio where there is a peer, else for the value.
# --record appends them, with date, commit, machine and versions, to bench/results/NAME.jsonl.
source "$(dirname "$0")/lib.sh"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi

record=
if [ "${1:-}" = --record ]; then
  record=yes
  shift
fi
name=${1:-}
[ $# -gt 0 ] && shift

# Standard output carries the results only.
bash scripts/setup.sh >&2

programs() {
  bash scripts/build.sh release help >/dev/null  # configures, so that new ones are seen
  ninja -C build -t targets all | sed -n 's/^bench_\(\w*\): phony$/\1/p'
}
scripts_of() { find bench -maxdepth 1 -name "*.$1" -printf '%f\n' | sed "s/\.$1$//"; }
list() { { programs; scripts_of py; scripts_of sh; } | sort -u; }

if [ -z "$name" ]; then
  list
  exit
fi
python=.venv/bin/python
[ -x $python ] || python=python3
if [ -f "bench/$name.py" ]; then
  command=("$python" "bench/$name.py" "$@")
elif [ -f "bench/$name.sh" ]; then
  command=(bash "bench/$name.sh" "$@")
else
  programs | grep -qxF -- "$name" || die "no benchmark '$name'; there are: $(list | paste -sd ' ')"
  bash scripts/build.sh release "bench_$name" >&2
  command=("build/bin/bench_$name" "$@")
fi
if [ -z "$record" ]; then exec "${command[@]}"; fi

mkdir -p bench/results
commit=$(git describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null || echo unknown)
"${command[@]}" | python3 -c '
import json, os, re, subprocess, sys
from datetime import datetime, timezone

path, commit, torch, arguments = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
model = re.search(r"^model name\s*:\s*(.*)$", open("/proc/cpuinfo").read(), re.MULTILINE)
facts = {
    "arguments": arguments,
    "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    "commit": commit,
    "machine": {"cpu": model[1] if model else os.uname().machine, "cores": len(os.sched_getaffinity(0))},
    "versions": {"torch": torch, "compiler": subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip(), "kernel": os.uname().release},
}
with open(path, "a") as file:
    for line in sys.stdin:
        sys.stdout.write(line)
        sys.stdout.flush()
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if isinstance(result, dict) and "bench" in result:
            file.write(json.dumps({**result, **facts}, separators=(",", ":")) + "\n")
' "bench/results/$name.jsonl" "$commit" "$torch_version" "$@"
