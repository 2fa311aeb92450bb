"""The loss's pass over logits in CUDA C++: one kernel against two passes in float64.

On a GPU, or compiled by g++ and run on the CPU. What every backend does alike stands in
test_linear_loss.py.
"""

from typing import Any

import loss_pass
import pytest
import torch
from loss_pass import draw, run
from matrix import CUDA_DEVICE

import ppokern
from ppokern.linear import kernel_native

pytestmark = pytest.mark.skipif(
    "cuda" not in ppokern.available_backends() or CUDA_DEVICE == "cuda",
    reason="make cuda-on-cpu runs this; on a GPU the tests of the op do",
)


@pytest.mark.parametrize("v", [1, 33, 512, 16 * 512 + 1, 3 * 8192 - 5])
@pytest.mark.parametrize("options", loss_pass.OPTIONS.values(), ids=loss_pass.OPTIONS)
def test_equals_two_passes(v: int, options: dict[str, Any]) -> None:
    loss_pass.equals_two_passes(kernel_native.loss_pass, v, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(dtype: torch.dtype) -> None:
    """Gradients are rounded once: as those from float32 logits of the same values."""
    logits, ids, terms = draw(5001, dtype)
    mine = run(kernel_native.loss_pass, logits, ids, terms)
    wide = run(kernel_native.loss_pass, logits.float(), ids, terms)
    assert torch.allclose(mine[0], wide[0], atol=4e-6) and torch.equal(mine[2], wide[2])
    unit = torch.finfo(dtype)
    assert torch.allclose(mine[3].float(), wide[3], rtol=unit.eps, atol=unit.smallest_normal)


def test_forbidden_tokens_and_ids_out_of_range() -> None:
    tile = slice(32, 8192)
    loss_pass.forbidden_tokens_and_ids_out_of_range(kernel_native.loss_pass, 9000, tile)


def test_a_row_alone_and_among_others() -> None:
    loss_pass.a_row_alone_and_among_others(kernel_native.loss_pass, 1001, torch.float32)


def test_the_op_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_pass.the_op_takes_it("cuda", monkeypatch)
