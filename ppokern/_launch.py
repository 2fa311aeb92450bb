"""What the launches of kernels on a GPU have in common."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Make the device of `x` the current one, on which kernels are launched."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def stream(x: Tensor) -> int:
    """Return the address of the stream on which the caller works."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


def resident(device: torch.device, per_multiprocessor: int) -> int:
    """Return how many programs a device holds at a time: more only wait."""
    return _multiprocessors(device)[0] * per_multiprocessor


def rows_in_cache(x: Tensor) -> int:
    """Return how many rows of `x` stay in a device's L2 cache, beside what else passes through."""
    cache_size = _multiprocessors(x.device)[1]
    return cache_size * 3 // 4 // (x.shape[-1] * x.element_size())


@cache
def _multiprocessors(device: torch.device) -> tuple[int, int]:
    """Return their number and the size of the cache that they share."""
    if device.type != "cuda":
        return 1, 2**18  # interpreted: few programs, so that each has several items
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size
