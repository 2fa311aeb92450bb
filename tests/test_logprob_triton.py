"""The Triton kernels of the log-probs, interpreted: what hangs on how rows are cut into segments.

What every backend does alike stands in test_logprob.py.
"""

import importlib
import math
import os
from typing import Any

import pytest
import torch
from measure import same_bits
from torch import Tensor

from ppokern.logprob import reference
from ppokern.logprob.reference import Rows

pytest.importorskip("triton", reason="no Triton: make triton installs it")
kernel_triton = importlib.import_module("ppokern.logprob.kernel_triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_triton.py runs this interpreted"
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many segments to a row, and several tiles of rows."""
    for name, value in {"TILE": 32, "MOVED_ROWS": 4, "MOVED_COLUMNS": 16}.items():
        monkeypatch.setattr(kernel_triton, name, value)


def run(logits: Tensor, ids: Tensor, kernel: Any = kernel_triton, **options: Any) -> list[Tensor]:
    """Log-probs, entropies, those two, maximum and log-sum of the backward pass, gradient."""
    mask, dtype = options.get("mask"), torch.float32
    if kernel is reference:
        logits, dtype = logits.double(), torch.float64
    at, cap = options.get("temperature", 1.0), options.get("softcap")
    size = options.get("vocab_size", logits.shape[-1])
    x = Rows(logits, ids, mask, at, cap, size)
    logprobs, entropy, found = kernel.forward(x, True, dtype)
    slopes = torch.linspace(-1, 2, ids.numel()), torch.linspace(1, -0.5, ids.numel())
    out = logits.clone() if options.get("inplace", True) else torch.empty_like(logits)
    x = x._replace(logits=out) if options.get("inplace", True) else x
    kernel.backward(*slopes, x, found, out, compact=options.get("compact", False))
    return [logprobs, entropy, *found.unbind(-1), out]


@pytest.mark.parametrize("v", [1, 15, 16, 31, 32, 33, 64, 95, 96, 200, 1056])
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "temperature": 0.7}], ids=str)
def test_every_number_of_segments(v: int, options: dict[str, Any]) -> None:
    logits, ids = 3 * torch.randn(5, v), torch.randint(0, v, (5,))
    truth = run(logits, ids, reference, **options)
    for mine, exact in zip(run(logits, ids, **options), truth, strict=True):
        assert torch.allclose(mine.double(), exact, atol=4e-6)


def test_a_whole_segment_is_forbidden() -> None:
    logits, ids = torch.randn(4, 200), torch.tensor([3, 40, 70, 199])
    logits[0, 32:64] = -torch.inf
    logits[1, :40], logits[1, 41:] = -torch.inf, -torch.inf  # the token alone is left
    logits[2] = -torch.inf
    logits[3, 160:] = -torch.inf
    for mine, exact in zip(run(logits, ids), run(logits, ids, reference), strict=True):
        assert torch.allclose(mine.double(), exact, atol=4e-6)


def test_ids_out_of_range() -> None:
    """NaN, of a row of nothing but -inf too, where nobody has checked the ids."""
    logits, ids = torch.randn(5, 64), torch.tensor([3, 60, 64, -1, 2**40])
    logits[3] = -torch.inf
    mine, exact = (run(logits, ids, k, vocab_size=60) for k in (kernel_triton, reference))
    assert mine[0].isnan().tolist() == [False, True, True, True, True]
    for a, b in zip(mine, exact, strict=True):
        assert torch.allclose(a.double(), b, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("rest", [1e-4, 1e-7, 1e-12, 1e-30])
@pytest.mark.parametrize("v", [2, 40, 1000])
def test_nearly_certain_tokens_are_exact(v: int, rest: float) -> None:
    """A sum of 1 and the rest would keep nothing of it."""
    logits = torch.full((1, v), math.log(rest / (v - 1)))
    logits[0, v // 2] = 0.0
    logprob, *_, grad = run(logits, torch.tensor([v // 2]))
    exact = run(logits, torch.tensor([v // 2]), reference)
    assert logprob.item() == pytest.approx(exact[0].item(), rel=1e-5)
    assert logprob.item() == pytest.approx(-rest, rel=1e-3)
    assert grad[0, v // 2].item() == pytest.approx(exact[-1][0, v // 2].item(), rel=1e-4)


@pytest.mark.parametrize("v", [48, 50, 200])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_compact_gradients(v: int, share: float) -> None:
    """In place, whatever stands where rows move to; padded columns become 0."""
    logits, ids = torch.randn(11, v), torch.randint(0, v - 3, (11,))
    mask = torch.rand(11) < share
    whole = run(logits, ids, mask=mask, vocab_size=v - 3)[-1]
    for inplace in (True, False):
        moved = run(logits, ids, mask=mask, vocab_size=v - 3, compact=True, inplace=inplace)[-1]
        assert same_bits(moved[: mask.sum()], whole[mask])
    assert (whole[~mask] == 0).all() and (whole[:, v - 3 :] == 0).all()


def test_a_row_alone_and_among_others() -> None:
    logits, ids = torch.randn(9, 300), torch.randint(0, 300, (9,))
    whole = run(logits, ids)
    for i in range(9):
        for a, b in zip(run(logits[i : i + 1], ids[i : i + 1])[:-1], whole[:-1], strict=True):
            assert same_bits(a, b[i : i + 1])
