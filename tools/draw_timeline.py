"""Draws part of a Chrome trace of `fsdp train --profile` or `fsdp bench overlap --trace` as an SVG.

    draw_timeline.py TRACE.json OUT.svg [--from MS] [--to MS] [--width PIXELS] [--title TEXT]

One row a stream: compute on top, then gathers, reductions, and what else there is. Times are in milliseconds from the
trace's first span. Kernels on the compute stream are drawn without labels; collectives carry the name of their unit.
"""

import argparse
import html
import json
import sys

ROW, GAP, LEFT, TOP = 26, 8, 90, 40
COLOURS = {"compute": "#7a9cc6", "all_gather": "#5aa469", "reduce_scatter": "#d08c3c", "all_reduce": "#d08c3c",
           "all_to_all": "#a05195", "unit": "#c8c8c8"}

# Nodes of docs/one_f_one_b.md.
EXCHANGES = {"dispatch": "D.f", "combine": "C.f", "dispatch_backward": "D.b", "combine_backward": "C.b"}


def fail(message):
    sys.exit(f"draw_timeline.py: {message}")


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)
    except (OSError, ValueError) as error:
        fail(f"cannot read {path}: {error}")
    events = events.get("traceEvents", []) if isinstance(events, dict) else events
    names = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in COLOURS]
    if not spans:
        fail(f"{path} holds no spans of a training step")
    return names, sorted(spans, key=lambda e: e["ts"])


def rows_of(spans):
    """Streams in the order compute, gathers, reductions, others."""
    kinds = {}
    for span in spans:
        kinds.setdefault(span["tid"], set()).add(span["cat"])
    def rank(tid):
        return (tid != 0, "all_gather" not in kinds[tid], "reduce_scatter" not in kinds[tid], tid)
    return [tid for tid in sorted(kinds, key=rank) if tid == 0 or kinds[tid] != {"unit"}]


def merged(spans, gap):
    """Compute without its seams: what follows within `gap` us becomes one span."""
    result = []
    for span in (s for s in spans if s["tid"] == 0 and s["cat"] == "compute"):
        if result and span["ts"] - result[-1]["ts"] - result[-1]["dur"] <= gap:
            result[-1]["dur"] = max(result[-1]["dur"], span["ts"] + span["dur"] - result[-1]["ts"])
        else:
            result.append(dict(span, name="compute"))
    return result + [s for s in spans if s["tid"] != 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("svg")
    parser.add_argument("--from", dest="begin", type=float, default=0.0, help="ms")
    parser.add_argument("--to", dest="end", type=float, default=None, help="ms")
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    names, spans = read(options.trace)
    start = spans[0]["ts"]
    last = max(s["ts"] + s["dur"] for s in spans)
    end = options.end if options.end is not None else (last - start) / 1000
    if end <= options.begin:
        fail(f"--to {end} is not after --from {options.begin}")
    rows = rows_of(spans)
    spans = merged(spans, 1000 * (end - options.begin) / options.width)
    scale = (options.width - LEFT - 10) / (end - options.begin)
    height = TOP + len(rows) * (ROW + GAP) + 30
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{options.width}" height="{height}" '
           f'viewBox="0 0 {options.width} {height}" font-family="sans-serif" font-size="11">',
           '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="{LEFT}" y="18" font-size="13">{html.escape(options.title)}</text>']
    x_of = lambda ms: LEFT + (ms - options.begin) * scale
    for index, tid in enumerate(rows):
        y = TOP + index * (ROW + GAP)
        kinds = {s["cat"] for s in spans if s["tid"] == tid}
        name = ("compute" if tid == 0 else "communication" if {"all_gather", "reduce_scatter"} <= kinds else
                "gather" if "all_gather" in kinds else "reduce" if "reduce_scatter" in kinds else
                "exchange" if "all_to_all" in kinds else names.get(tid, f"stream {tid}"))
        out.append(f'<text x="6" y="{y + 17}">{html.escape(name)}</text>')
        out.append(f'<line x1="{LEFT}" y1="{y + ROW}" x2="{options.width - 10}" y2="{y + ROW}" stroke="#e0e0e0"/>')
        for span in spans:
            ms, length = (span["ts"] - start) / 1000, span["dur"] / 1000
            if span["tid"] != tid or ms + length < options.begin or ms > end:
                continue
            if tid != 0 and span["cat"] in ("unit", "compute"):
                continue
            left, right = x_of(max(ms, options.begin)), x_of(min(ms + length, end))
            title = f'{span["name"]}: {ms:.3f} ms, {1000 * length:.0f} us'
            out.append(f'<rect x="{left:.1f}" y="{y}" width="{max(right - left, 0.6):.1f}" height="{ROW}" '
                       f'fill="{COLOURS[span["cat"]]}" stroke="white" stroke-width="0.4"><title>{html.escape(title)}</title></rect>')
            words = span["name"].split(":")
            label = "" if words[0] != "FSDP" else EXCHANGES.get(words[2], "") if words[1] == "experts" else words[1]
            if label and right - left > 6 * len(label):
                out.append(f'<text x="{left + 2:.1f}" y="{y + 17}" fill="white">{html.escape(label)}</text>')
            elif label and right - left > 4:
                out.append(f'<text x="{left:.1f}" y="{y - 2}" font-size="9">{html.escape(label)}</text>')
    for tick in range(11):
        ms = options.begin + (end - options.begin) * tick / 10
        out.append(f'<text x="{x_of(ms):.1f}" y="{height - 8}" text-anchor="middle" fill="#606060">{ms:.1f}</text>')
    out.append(f'<text x="6" y="{height - 8}" fill="#606060">ms</text></svg>')
    with open(options.svg, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
