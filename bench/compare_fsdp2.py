"""`fsdp train` over mpirun against PyTorch FSDP2 on gloo: the same transformer, 2 ranks, one thread each, zero3.

Usage: scripts/bench.sh compare_fsdp2 [--rounds 3] [--scale 1.0]

Four arms take turns, round by round: ours; FSDP2; as many processes of ours that do not communicate (each `fsdp train`
on one rank with the same batch a rank); the same of PyTorch. A figure is tokens a second from the median step after
warm-up, the median over the rounds. Targets: at least 0.9 of our communication-free rate, and more than FSDP2.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
from peers.launching import mpirun  # noqa: E402

RANKS = 2
WARM_UP = 5
# layers, width, heads, kv_heads, ffn, context, sequences a rank; steps
SHAPES = {
    "6x384_context128_batch8": ([6, 384, 6, 6, 1024, 128, 8], 30),
    "12x256_context64_batch1": ([12, 256, 4, 4, 684, 64, 1], 150),
}


def command(shape, text, log, ranks, steps):
    layers, width, heads, kv_heads, ffn, context, batch = shape
    settings = {
        "model.preset": "tiny",
        "model.layers": layers,
        "model.width": width,
        "model.heads": heads,
        "model.kv_heads": kv_heads,
        "model.ffn_width": ffn,
        "data.files": f'["{text}"]',
        "run.batch": batch * ranks,
        "run.context": context,
        "run.steps": steps,
        "run.eval_batches": 1,
        "run.sample_length": 0,
        "run.log_interval": steps,
    }
    words = [str(ROOT / "build/bin/fsdp"), "train", "--config", str(text.parent / "empty.toml"), "--log", str(log)]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return words


def step_times(log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["step_ms"] for line in lines if line["event"] == "step"]


def rate(times, shape, processes):
    return processes * shape[5] * shape[6] / statistics.median(times[WARM_UP:]) * 1e3


def run_all(commands, environment):
    running = [subprocess.Popen(c, stdout=subprocess.DEVNULL, env=environment) for c in commands]
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(f"compare_fsdp2: {commands[0]} ended with {codes}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of steps")
    options = parser.parse_args()
    subprocess.run(["bash", "scripts/build.sh", "release", "fsdp_command", "fsdp_mpi"], stdout=sys.stderr, check=True, cwd=ROOT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for name, (shape, steps) in SHAPES.items():
        steps = max(WARM_UP + 5, int(steps * options.scale))
        rates = {"ours": [], "fsdp2": [], "free": [], "torch_free": []}
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            text = folder / "text"
            text.write_bytes(random.Random(0).randbytes(1 << 20))
            (folder / "empty.toml").write_text("")
            for _ in range(options.rounds):
                run_all([mpirun(RANKS) + command(shape, text, folder / "ours", RANKS, steps)], environment)
                rates["ours"].append(rate(step_times(folder / "ours"), shape, RANKS))
                logs = [folder / f"free{rank}" for rank in range(RANKS)]
                run_all([command(shape, text, log, 1, steps) for log in logs], environment)
                rates["free"].append(sum(rate(step_times(log), shape, 1) for log in logs))
                for arm, mode in (("fsdp2", "fsdp2"), ("torch_free", "plain")):
                    peer = [sys.executable, str(ROOT / "bench/peers/fsdp2_train.py"), "--mode", mode, "--ranks", str(RANKS)]
                    peer += ["--shape", ",".join(map(str, shape)), "--steps", str(steps)]
                    output = subprocess.run(peer, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
                    times = [json.loads(line)["step_ms"] for line in output.splitlines() if line.startswith("{")]
                    each = RANKS // len(times)
                    rates[arm].append(sum(rate(t, shape, each) for t in times))
        medians = {arm: statistics.median(values) for arm, values in rates.items()}
        for peer, target in (("free", 0.9), ("fsdp2", 1.0), ("torch_free", None)):
            result = {
                "bench": "compare_fsdp2",
                "metric": f"{name}_over_{peer}",
                "value": round(medians["ours"]),
                "unit": "tokens/s",
                "peer": round(medians[peer]),
                "ratio": round(medians["ours"] / medians[peer], 3),
                "rounds": [round(a / b, 3) for a, b in zip(rates["ours"], rates[peer])],
                "better": "higher",
            }
            if target:
                result["target"] = target
            print(json.dumps(result, separators=(",", ":")), flush=True)
        print(
            json.dumps(
                {
                    "bench": "compare_fsdp2",
                    "metric": f"{name}_fsdp2_over_its_own_free",
                    "value": round(medians["fsdp2"]),
                    "unit": "tokens/s",
                    "peer": round(medians["torch_free"]),
                    "ratio": round(medians["fsdp2"] / medians["torch_free"], 3),
                    "better": "higher",
                },
                separators=(",", ":"),
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
