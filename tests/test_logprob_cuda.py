"""The CUDA kernels of the log-probs beyond the tests of the op: wide rows, wherever they lie.

On a GPU, or compiled by g++ and run on the CPU.
"""

from typing import Any

import pytest
import torch
from matrix import CUDA_DEVICE
from torch import Tensor

import ppokern
from ppokern.logprob import kernel_native, reference
from ppokern.logprob.reference import Rows

pytestmark = pytest.mark.skipif(
    "cuda" not in ppokern.available_backends(), reason="needs a GPU, or make cuda-on-cpu"
)
if CUDA_DEVICE == "cuda":
    pytestmark = [pytestmark, pytest.mark.gpu]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (8 * 4096, 3 * 4096 + 8, 4096 + 1, 2 * 4096 - 1, 1001, 5)


def logits_of(rows: int, width: int, dtype: torch.dtype, lead: int = 0, gap: int = 0) -> Tensor:
    """Random logits; the first row begins after `lead` elements, and `gap` lie between rows."""
    stride = width + gap
    memory = torch.zeros(lead + rows * stride, dtype=dtype, device=CUDA_DEVICE)
    x = memory[lead:].as_strided((rows, width), (stride, 1))
    x.copy_(4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(width)))
    x[0, : width // 2] = -torch.inf
    return x


def passes(logits: Tensor, kernel: Any, softcap: float | None, out: Tensor | None = None) -> list:
    """Both passes with an entropy, over a part of the columns, with masked rows and bad ids."""
    rows, width = logits.shape
    ids = torch.arange(rows, device=CUDA_DEVICE) * 37 % width
    ids[1], ids[2] = -100, width
    x = Rows(logits, ids, None, 0.7, softcap, max(width - 3, 1))
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs, entropy, found = kernel.forward(x, True, dtype)
    grads = torch.linspace(-1, 1, rows, device=CUDA_DEVICE)
    out = torch.full_like(logits, 7.0) if out is None else out
    kernel.backward(grads, grads, x, found, out)
    return [logprobs, entropy, out.clone()]


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows(dtype: torch.dtype, width: int, softcap: float | None) -> None:
    logits = logits_of(6, width, dtype)
    mine = passes(logits, kernel_native.CUDA, softcap)
    exact = passes(logits.double(), reference, softcap)
    for a, e, error in zip(mine, exact, (4e-6, 2e-5, 2e-6), strict=True):
        unit = torch.finfo(dtype).eps if a.dtype == dtype else 0.0
        torch.testing.assert_close(a.double(), e, rtol=4e-6 + unit, atol=error, equal_nan=True)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_wherever_it_lies(dtype: torch.dtype, width: int) -> None:
    """To the bit: alignment decides how it is read, not in what order it is added up."""
    first = passes(logits_of(6, width, dtype), kernel_native.CUDA, None)
    for lead, gap in ((1, 0), (0, 1), (3, 5), (7, 16), (8, 8)):
        logits = logits_of(6, width, dtype, lead, gap)
        for out in (None, logits):  # in place last
            other = passes(logits, kernel_native.CUDA, None, out)
            for a, b in zip(first, other, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    memory = torch.zeros(6 * (width + 9) + 16, dtype=dtype, device=CUDA_DEVICE)
    out = memory[5:].as_strided((6, width), (width + 9, 1))  # aligned unlike the logits
    apart = passes(logits_of(6, width, dtype, 1), kernel_native.CUDA, None, out)
    torch.testing.assert_close(apart[-1], first[-1], rtol=0, atol=0, equal_nan=True)
    out.zero_()
    assert not memory.any(), "written outside of the rows"


@pytest.mark.parametrize("width", [4096, 4096 + 1, 40])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_unmasked_rows_move_up_in_place(dtype: torch.dtype, width: int) -> None:
    rows = 21
    logits = logits_of(rows, width, dtype)
    ids = torch.arange(rows, device=CUDA_DEVICE)
    ids[3] = -100
    mask = torch.arange(rows, device=CUDA_DEVICE) % 3 != 1
    x = Rows(logits, ids, mask, 1.0, None, width)
    _, _, found = kernel_native.CUDA.forward(x, False, torch.float32)
    args = torch.ones(rows, device=CUDA_DEVICE), None, x, found
    whole = kernel_native.CUDA.backward(*args, torch.empty_like(logits))
    kernel_native.CUDA.backward(*args, logits, compact=True)
    taken = mask & (ids != -100)
    assert torch.equal(logits[: int(taken.sum())], whole[taken])
