"""Ranks for the scripts beside this one: processes, one a GPU, or rank 0 of several that only look as if they were there."""
import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist


def emulate_collectives(world):
    """Copies of the right size in place of communication; every other rank holds what this one does."""

    class Done:
        def wait(self, *_):
            return True

    @torch.no_grad()
    def all_gather(output_tensor, input_tensor, group=None, async_op=False):
        parts = output_tensor.view(world, input_tensor.numel())
        for part in parts:
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor.view(-1))
        return Done() if async_op else None

    @torch.no_grad()
    def reduce_scatter(output, input, op=None, group=None, async_op=False):
        output.copy_(input.view(-1)[: output.numel()].view_as(output))
        return Done() if async_op else None

    dist.all_gather_into_tensor = all_gather
    dist.reduce_scatter_tensor = reduce_scatter


def free_ports():
    """Two of them."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def spawn(ranks):
    """Runs this script once a rank; -> exit code."""
    port, other_port = free_ports()
    children = []
    for rank in range(ranks):
        environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                           LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                           PEER_RANKS=str(ranks), SECOND_PORT=str(other_port))
        children.append(subprocess.Popen([sys.executable] + sys.argv, env=environment))
    while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
        time.sleep(0.1)
    for child in children:
        child.kill()  # some are still there only when one has failed
    return max(abs(child.wait()) for child in children)
