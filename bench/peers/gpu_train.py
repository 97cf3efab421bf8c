#!/usr/bin/env python3
"""A whole training step of a preset in PyTorch: what `fsdp bench train` is measured beside. Locally, eager and compiled
(fp32 weights under bf16 autocast), or under FSDP2 (fp32 shards, bf16 compute, reductions in fp32), as rank 0 of N on one
GPU or on real ranks; gradient clipping, fused AdamW, loss read each step.
  gpu_train.py [--preset 1B|8B] [--modes compiled,eager] [--sequences 4] [--context 4096] [--rounds 10]
  gpu_train.py --modes fsdp2,fsdp2-compiled --ranks 4 [--nccl]"""
import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranks import emulate_collectives, spawn

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCABULARY, THETA, TIED = 16, 2048, 32, 8, 8192, 128256, 5e5, True
PEAK_FLOPS = 989e12


def use_preset(name):
    global LAYERS, WIDTH, FFN, TIED
    if name == "8B":
        LAYERS, WIDTH, FFN, TIED = 32, 4096, 14336, False


def rotary_tables(context, width):
    positions = torch.arange(context, device="cuda", dtype=torch.float64)
    frequencies = THETA ** (-torch.arange(0, width, 2, device="cuda", dtype=torch.float64) / width)
    angles = torch.outer(positions, frequencies)
    angles = torch.cat([angles, angles], 1)
    sine = angles.sin()
    sine[:, : width // 2] *= -1
    return angles.cos().to(torch.bfloat16)[:, None], sine.to(torch.bfloat16)[:, None]


def rotate(x, cosine, sine):
    return x * cosine + x.roll(x.shape[-1] // 2, -1) * sine


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        head = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = nn.Linear(WIDTH, KV_HEADS * head, bias=False), nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x, cosine, sine):
        b, t, d = x.shape
        h = self.norm1(x)
        q = rotate(self.query(h).view(b, t, HEADS, -1), cosine, sine)
        k = rotate(self.key(h).view(b, t, KV_HEADS, -1), cosine, sine)
        v = self.value(h).view(b, t, KV_HEADS, -1)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                           enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, 1e-5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if TIED:
            self.head.weight = self.embedding.weight
        self.tables = rotary_tables(context, WIDTH // HEADS)

    def forward(self, tokens, targets):
        x = self.embedding(tokens).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, *self.tables)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.view(-1))


def make_model(mode, options):
    """-> the model, and what runs its forward."""
    torch.manual_seed(0)
    sharded = mode.startswith("fsdp2")
    with torch.device("cuda"):
        model = Model(options.context)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    compiled = mode.endswith("compiled")
    if not sharded:
        return model, torch.compile(model) if compiled else model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (options.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.blocks):
        if compiled:
            block = model.blocks[i] = torch.compile(block, fullgraph=True, dynamic=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if not TIED:
        fully_shard(model.embedding, mesh=mesh, mp_policy=policy)
        fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, model


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="1B", choices=["1B", "8B"])
    parser.add_argument("--modes", default="compiled,eager")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--nccl", action="store_true", help="real ranks, one a GPU")
    options = parser.parse_args()
    use_preset(options.preset)
    if options.nccl:
        if "PEER_RANKS" not in os.environ:
            sys.exit(spawn(options.ranks))
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    elif options.ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
        emulate_collectives(options.ranks)
    tokens = torch.randint(VOCABULARY, (options.sequences, options.context), device="cuda")
    targets = torch.randint(VOCABULARY, (options.sequences, options.context), device="cuda")
    for mode in options.modes.split(","):
        model, run = make_model(mode, options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        sharded = mode.startswith("fsdp2")

        def step():
            with torch.autocast("cuda", torch.bfloat16, enabled=not sharded):
                loss = run(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        for _ in range(3):
            step().item()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(options.rounds):
            if options.nccl:
                dist.barrier()
                torch.cuda.synchronize()
            start = time.perf_counter()
            loss = step().item()
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start))
        ms = statistics.median(times)
        count = options.sequences * options.context
        weights = sum(p.numel() for p in model.parameters()) - (0 if TIED else VOCABULARY * WIDTH)
        flops = count * (6 * weights + 6 * LAYERS * WIDTH * options.context)
        if not options.nccl or dist.get_rank() == 0:
            print(json.dumps({"bench": "train", "preset": options.preset, "mode": "torch:" + mode, "ranks": options.ranks,
                              "loopback": "none: NCCL" if options.nccl else "copy" if options.ranks > 1 else "none",
                              "sequences": options.sequences, "context": options.context, "step_ms": round(ms, 2),
                              "tokens_per_second": round(count / ms * 1000),
                              "model_flop_utilisation": round(flops / (ms * 1e-3) / PEAK_FLOPS, 4), "loss": round(loss, 4),
                              "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "rounds": options.rounds,
                              "torch": torch.__version__}), flush=True)
        del model, optimizer, run
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
