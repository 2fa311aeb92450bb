"""What launches of kernels on a GPU share."""

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
    return _multiprocessors(device) * per_multiprocessor


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # interpreted: few programs, so that each has several items
    return torch.cuda.get_device_properties(device).multi_processor_count
