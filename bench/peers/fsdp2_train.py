"""The transformer of models/ in PyTorch, trained on random bytes: with FSDP2 on gloo, or without any sharding.

Usage: fsdp2_train.py --mode fsdp2|plain --ranks N --shape LAYERS,WIDTH,HEADS,KV_HEADS,FFN,CONTEXT,BATCH --steps N

BATCH is sequences a rank. `plain` runs N processes that do not communicate. Rank 0 (of plain: each) prints
{"rank":..., "step_ms":[...]}: forward, backward, clipping, fused AdamW and reading the loss, as `fsdp train` does.
"""

import argparse
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads, context):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        frequency = 10000.0 ** (-torch.arange(0, self.head, 2, dtype=torch.float64) / self.head)
        angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
        self.cosine = torch.cat([angle.cos()] * 2, -1).unsqueeze(1).float()
        self.sine = torch.cat([-angle.sin(), angle.sin()], -1).unsqueeze(1).float()

    def rotate(self, x):
        half = self.head // 2
        swapped = torch.cat([x[..., half:], x[..., :half]], -1)
        return torch.addcmul(x * self.cosine, swapped, self.sine)

    def forward(self, x):
        b, t, d = x.shape
        q = self.rotate(self.query(x).view(b, t, self.heads, self.head)).transpose(1, 2)
        k = self.rotate(self.key(x).view(b, t, self.kv_heads, self.head)).transpose(1, 2)
        v = self.value(x).view(b, t, self.kv_heads, self.head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.output(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads, ffn, context):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width, 1e-5), Attention(width, heads, kv_heads, context)
        self.feed_forward_norm = nn.RMSNorm(width, 1e-5)
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        h = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    def __init__(self, layers, width, heads, kv_heads, ffn, context):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList([Block(width, heads, kv_heads, ffn, context) for _ in range(layers)])
        self.norm = nn.RMSNorm(width, 1e-5)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def work(rank, options, store):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers, width, heads, kv_heads, ffn, context, batch = options.shape
    model = Transformer(layers, width, heads, kv_heads, ffn, context)
    if options.mode == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
        mesh = init_device_mesh("cpu", (options.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(rank)
    times = []
    for _ in range(options.steps):
        tokens = torch.randint(0, 256, (batch, context + 1), generator=generator)
        start = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append((time.perf_counter() - start) * 1e3)
    if rank == 0 or options.mode == "plain":
        print(json.dumps({"rank": rank, "step_ms": times}), flush=True)
    if options.mode == "fsdp2":
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["fsdp2", "plain"], required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", type=lambda text: [int(part) for part in text.split(",")], required=True)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (arguments, os.path.join(folder, "store")), arguments.ranks)
