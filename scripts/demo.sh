#!/usr/bin/env bash
# From a fresh clone to a trained model: sets up, builds, makes the text, trains configs/demo.toml on two ranks and
# checks what it learned. About four minutes of training on two cores.
# Usage: scripts/demo.sh [OPTION...]      options of `fsdp train`, e.g. --ranks 1, --set run.steps=1000
#
# The text is the King James Bible of the Debian package bible-kjv. Log: runs/demo/run.jsonl, one JSON object a step.
# Trace: runs/demo/trace.json, to be opened in a trace viewer that reads Chrome's format.
source "$(dirname "$0")/lib.sh"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi

target_loss=1.6
text=runs/data/bible.txt

# option NAME DEFAULT ARGS...: the value given on the command line, or the default.
option() {
  local name=$1 value=$2
  shift 2
  while [ $# -gt 0 ]; do
    case $1 in
      "$name") value=${2:-} ;;
      "$name="*) value=${1#*=} ;;
    esac
    shift
  done
  echo "$value"
}
log=$(option --log runs/demo/run.jsonl "$@")
trace=$(option --profile runs/demo/trace.json "$@")

# What is given replaces the demo's own.
command=(build/bin/fsdp train)
for default in "--config configs/demo.toml" "--ranks 2" "--log runs/demo/run.jsonl" "--profile runs/demo/trace.json"; do
  name=${default% *}
  [ -n "$(option "$name" "" "$@")" ] || command+=("$name" "${default#* }")
done

bash scripts/setup.sh
bash scripts/build.sh release fsdp_command

if [ ! -s $text ]; then
  command -v bible >/dev/null || die "the command bible of the Debian package bible-kjv is missing: run scripts/setup.sh"
  mkdir -p runs/data
  bible -f 'gen1:1-rev22:21' </dev/null >$text.part
  mv $text.part $text
  say "demo: made $text ($(wc -c <$text) bytes)"
fi

say "demo: ${command[*]} $*"
code=0
"${command[@]}" "$@" || code=$?
if [ "$code" = 130 ]; then exit 130; fi  # Ctrl-C: the command has reported
[ "$code" = 0 ] || die "fsdp train ended with exit code $code"

say "demo: log $log, trace $trace"
python3 - "$log" $target_loss <<'PY' || die "see $log"
import json, sys
done = json.loads(open(sys.argv[1]).read().splitlines()[-1])
loss, target = done.get("validation_loss"), float(sys.argv[2])
if done.get("event") != "done" or loss is None:
    sys.exit(f"demo: the log does not end with a validation loss, but with {done}")
if not loss < target:
    sys.exit(f"demo: the validation loss is {loss:.3f} nats a byte, expected less than {target}")
print(f"== demo: validation loss {loss:.3f} nats a byte (under {target}) after {done['seconds']:.0f} s on {done['ranks']} ranks")
PY
