"""Runs a function in two real processes joined by gloo."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _child(rank: int, port: int, size: int, fn: Callable[..., Any], queue: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    limit = timedelta(minutes=2)  # reached where the two no longer do the same
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=limit)
    try:
        queue.put((rank, fn(rank)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run(fn: Callable[[int], Any], size: int = 2) -> list[Any]:
    """What `fn(rank)` returned (plain Python values), in the order of the ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_child, (port, size, fn, queue), nprocs=size, join=True)
    return [result for _, result in sorted(queue.get() for _ in range(size))]
