"""What Triton kernels and their launches share."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Return float32 in `dtype`, to the nearest even; the interpreter cuts bfloat16 off instead."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Make the device of `x` the current one, on which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def resident(device: torch.device, per_multiprocessor: int) -> int:
    """Return how many programs a device holds at a time: more only wait."""
    return _multiprocessors(device) * per_multiprocessor


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # interpreted: few programs, so that each has several items
    return torch.cuda.get_device_properties(device).multi_processor_count
