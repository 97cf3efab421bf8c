#!/usr/bin/env python3
"""A training step of PyTorch (local, in a CUDA graph, under FSDP2) beside libfsdp's, taking turns round by round.

FSDP2 runs as rank 0 of N on one GPU: a fake process group, and collectives that copy the right bytes on the device, as
libfsdp's loopback does. The other side is `fsdp bench step --serve`, a child process that waits while this one measures.

  gpu_step.py FSDP_COMMAND --shape A --modes local,graph,fsdp2,ours:bare,ours:sharded --rounds 10

With --nccl all modes run on real ranks, one a GPU; every rank has its own `fsdp bench step --serve` then. Modes are also
ddp, fsdp2-kept (weights stay gathered after forward) and fsdp2-compiled, local-compiled; of libfsdp those of `fsdp bench step`.

Prints one JSON object a mode; `x_local` is the step over PyTorch's local one of the same rounds. --profile K adds what K
steps of PyTorch's modes on real ranks have exposed: time of NCCL's kernels and of copies between devices, without compute."""
import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranks import emulate_collectives, spawn

SHAPES = {
    "A": (8, 4096, 4096, 11008), "B": (32, 2048, 2048, 5504), "C": (64, 1024, 512, 2752),
    "D": (32, 4096, 4096, 11008), "E": (32, 4096, 8192, 14336), "tiny": (4, 256, 128, 512),
}
WARM_UP = 4


class Block(nn.Module):
    def __init__(self, width, ffn):
        super().__init__()
        self.heads = width // 128
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def milliseconds(seconds):
    return 1000 * seconds


class Torch:
    """One of PyTorch's modes."""

    def __init__(self, mode, shape, ranks):
        layers, width, tokens, ffn = shape
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            self.blocks = nn.Sequential(*[Block(width, ffn) for _ in range(layers)])
        torch.set_default_dtype(torch.float32)
        if mode.endswith("compiled"):
            for i in range(layers):
                self.blocks[i] = torch.compile(self.blocks[i], fullgraph=True, dynamic=False)
        self.model = self.blocks
        if mode == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.blocks, gradient_as_bucket_view=True)
        if mode.startswith("fsdp2"):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cuda", (ranks,))
            for block in self.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=mode != "fsdp2-kept")
            fully_shard(self.blocks, mesh=mesh)
        self.x = torch.randn(1, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.one = torch.ones_like(self.x)
        self.graph = None
        for _ in range(WARM_UP - 1):
            self.step()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        self.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
        if mode == "graph":
            self.capture()

    def step(self):
        y = self.model(self.x)
        middle = time.perf_counter()
        y.backward(self.one)
        end = time.perf_counter()
        self.x.grad = None
        for p in self.blocks.parameters():
            p.grad = None
        return middle, end

    def capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step()
        graph.replay()
        self.graph = graph

    def run(self, count):
        times = []
        for _ in range(count):
            torch.cuda.synchronize()
            meet()
            start = time.perf_counter()
            if self.graph is not None:
                self.graph.replay()
                middle = end = start
            else:
                middle, end = self.step()
            torch.cuda.synchronize()
            times.append([milliseconds(t) for t in (time.perf_counter() - start, middle - start, end - middle)])
        return times


def meet():
    """Real ranks start each step together."""
    if os.environ.get("PEER_RANKS"):
        dist.barrier()
        torch.cuda.synchronize()


def union(intervals):
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def length(merged):
    return sum(end - begin for begin, end in merged)


def exposed(runner, steps):
    """-> ms a step: communication, and what of it no compute kernel ran beside."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        runner.run(steps)
    communication, compute = [], []
    for event in profiled.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        if event.name.startswith(("FSDP", "nccl:", "##", "Torch-Compiled", "DistributedDataParallel")):
            continue  # a range around kernels
        interval = (event.time_range.start, event.time_range.end)  # us
        if "nccl" in event.name or "PtoP" in event.name:
            communication.append(interval)
        elif not event.name.startswith(("Memcpy", "Memset", "Barrier")):
            compute.append(interval)
    communication, compute = union(communication), union(compute)
    together = length(union(communication + compute))
    return [round(us / 1000 / steps, 3) for us in (length(communication), together - length(compute))]


class Ours:
    """One of libfsdp's modes, in the child process."""

    def __init__(self, server, mode):
        self.server, self.mode = server, mode
        self.run(1)

    def run(self, count):
        answer = self.server.ask(f"{self.mode} {count}")
        self.peak_gib = answer["peak_gib"]
        return answer["times"]


class Server:
    def __init__(self, command):
        environment = dict(os.environ)
        if "SECOND_PORT" in environment:  # where its ranks meet
            environment["MASTER_PORT"] = environment["SECOND_PORT"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"gpu_step.py: the command ended with {self.process.wait()}")
        return json.loads(answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", help="the command fsdp")
    parser.add_argument("--shape", default="A", choices=SHAPES)
    parser.add_argument("--modes", default="local,fsdp2,ours:bare,ours:sharded")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--link", action="store_true")
    parser.add_argument("--steps", type=int, default=1, help="in a row, a round")
    parser.add_argument("--nccl", action="store_true", help="real ranks, one a GPU")
    parser.add_argument("--profile", type=int, default=0, help="steps to profile after the rounds, with --nccl")
    options = parser.parse_args()

    if options.nccl:
        if "PEER_RANKS" not in os.environ:
            sys.exit(spawn(options.ranks))
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.cuda.set_device(0)
        dist.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
        emulate_collectives(options.ranks)
    command = [options.command, "bench", "step", "--serve", "--shape", options.shape, "--ranks", str(options.ranks),
               "--depth", str(options.depth)] + ["--link"] * options.link + ["--nccl"] * options.nccl
    server = Server(command) if "ours" in options.modes else None
    layers = SHAPES[options.shape][0]
    modes = {}
    for mode in options.modes.split(","):
        modes[mode] = Ours(server, mode[5:]) if mode.startswith("ours:") else Torch(mode, SHAPES[options.shape], options.ranks)
    gc.disable()
    times = {mode: [] for mode in modes}
    for _ in range(options.rounds):
        for mode, runner in modes.items():
            times[mode] += runner.run(options.steps)
    if server:
        server.close()
    exposures = {}
    if options.nccl and options.profile:
        exposures = {mode: exposed(runner, options.profile) for mode, runner in modes.items() if isinstance(runner, Torch)}
    if options.nccl:
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank != 0:
            return
    median = {mode: statistics.median(t[0] for t in times[mode]) for mode in modes}
    for mode, runner in modes.items():
        line = {"bench": "gpu_step", "shape": options.shape, "mode": mode, "ranks": options.ranks,
                "loopback": "none: NCCL" if options.nccl else "link" if options.link else "copy",
                "depth": options.depth, "step_ms": round(median[mode], 3),
                "step_ms_least": round(min(t[0] for t in times[mode]), 3),
                "forward_host_us_per_unit": round(1000 * statistics.median(t[1] for t in times[mode]) / layers, 1),
                "backward_host_us_per_unit": round(1000 * statistics.median(t[2] for t in times[mode]) / layers, 1),
                "peak_gib": round(runner.peak_gib, 3), "rounds": options.rounds, "torch": torch.__version__,
                "gpu": torch.cuda.get_device_name()}
        if mode.startswith("ours:"):
            line["of_it_communication_us_per_unit"] = round(1000 * statistics.median(t[3] for t in times[mode]) / layers, 1)
        if mode in exposures:
            line["communication_ms"], line["exposed_ms"] = exposures[mode]
        for base in ("local", "graph", "fsdp2", "ours:bare"):
            if base in median and base != mode:
                line["x_" + base.replace("ours:", "")] = round(median[mode] / median[base], 3)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
