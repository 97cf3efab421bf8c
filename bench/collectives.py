"""Both CPU communicators against PyTorch's gloo: time of all_gather, reduce_scatter and all_reduce by size.

Usage: scripts/bench.sh collectives [--ranks 2] [--rounds 50] [--repeats 3]

The three take turns; a figure is the median over the turns. `ratio` is ours / gloo, below 1 is faster.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
from peers.launching import mpirun  # noqa: E402


def figures(command):
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["metric"]: line["value"] for line in lines}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    subprocess.run(["bash", "scripts/build.sh", "release", "bench_collectives", "fsdp_mpi"], stdout=sys.stderr, check=True, cwd=ROOT)
    program = str(ROOT / "build/bin/bench_collectives")
    size, rounds = str(options.ranks), str(options.rounds)
    commands = {
        "threads": [program, size, rounds],
        "mpi": mpirun(options.ranks) + [program, size, rounds],
        "gloo": [sys.executable, str(ROOT / "bench/peers/gloo_collectives.py"), size, rounds],
    }
    runs = {name: [] for name in commands}
    for _ in range(options.repeats):
        for name, command in commands.items():
            runs[name].append(figures(command))
    for name in ("threads", "mpi"):
        for metric in runs[name][0]:
            ours = statistics.median(run[metric] for run in runs[name])
            peer = statistics.median(run[metric] for run in runs["gloo"])
            kib = int(metric.rsplit("_", 1)[1].removesuffix("KiB"))
            print(
                json.dumps(
                    {
                        "bench": "collectives",
                        "metric": f"{name}_{metric}",
                        "value": round(ours, 1),
                        "unit": "us",
                        "gigabytes_per_second": round(kib * 1024 / ours / 1e3, 3),
                        "ranks": options.ranks,
                        "peer_name": "gloo",
                        "peer": round(peer, 1),
                        "ratio": round(ours / peer, 3),
                        "better": "lower",
                    },
                    separators=(",", ":"),
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
