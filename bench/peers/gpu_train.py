#!/usr/bin/env python3
"""A whole training step of the 1B preset in local PyTorch, eager and compiled, on one GPU: what `fsdp bench train` is
measured beside. fp32 weights under bf16 autocast, gradient clipping, fused AdamW, loss read each step.
  gpu_train.py [--modes compiled,eager] [--sequences 4] [--context 4096] [--rounds 10]"""
import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCABULARY, THETA = 16, 2048, 32, 8, 8192, 128256, 5e5
PEAK_FLOPS = 989e12


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
        self.tables = rotary_tables(context, WIDTH // HEADS)

    def forward(self, tokens, targets):
        x = self.embedding(tokens).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, *self.tables)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.view(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default="compiled,eager")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    tokens = torch.randint(VOCABULARY, (options.sequences, options.context), device="cuda")
    targets = torch.randint(VOCABULARY, (options.sequences, options.context), device="cuda")
    for mode in options.modes.split(","):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Model(options.context)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        run = torch.compile(model) if mode == "compiled" else model

        def step():
            with torch.autocast("cuda", torch.bfloat16):
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
            start = time.perf_counter()
            loss = step().item()
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start))
        ms = statistics.median(times)
        count = options.sequences * options.context
        weights = sum(p.numel() for p in model.parameters())
        flops = count * (6 * weights + 6 * LAYERS * WIDTH * options.context)
        print(json.dumps({"bench": "train", "preset": "1B", "mode": "torch:" + mode, "sequences": options.sequences,
                          "context": options.context, "step_ms": round(ms, 2), "tokens_per_second": round(count / ms * 1000),
                          "model_flop_utilisation": round(flops / (ms * 1e-3) / PEAK_FLOPS, 4), "loss": round(loss, 4),
                          "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "rounds": options.rounds,
                          "torch": torch.__version__}), flush=True)
        del model, optimizer, run
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
