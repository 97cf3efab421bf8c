"""The peer of bench/collectives: the same operations and sizes with PyTorch's gloo process group, processes of one machine.

Usage: gloo_collectives.py [RANKS] [ROUNDS]      prints one JSON object a figure: {"metric":..., "value":...}
"""

import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, ranks, rounds, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    size = 1 << 10
    while size <= 16 << 20:
        total = size // 4
        whole = torch.zeros(total)
        own = torch.zeros(total // ranks)
        operations = {
            "all_gather": lambda: dist.all_gather_into_tensor(whole, own),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole),
            "all_reduce": lambda: dist.all_reduce(whole),
        }
        for name, operation in operations.items():
            times = []
            for _ in range(rounds + 3):
                dist.barrier()
                start = time.perf_counter()
                operation()
                times.append((time.perf_counter() - start) * 1e6)
            if rank == 0:
                metric = f"{name}_{size >> 10}KiB"
                print(json.dumps({"metric": metric, "value": statistics.median(times[3:])}), flush=True)
        size *= 4
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 50
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (ranks, rounds, os.path.join(folder, "store")), ranks)
