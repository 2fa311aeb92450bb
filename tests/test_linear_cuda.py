"""The loss's pass over logits in CUDA C++: one kernel against two passes in float64.

On a GPU, or compiled by g++ and run on the CPU. What every backend does alike stands in
test_linear_loss.py.
"""

from typing import Any

import pytest
import torch
from loss_pass import TWO_PASSES, N, close, draw, run
from matrix import CUDA_DEVICE
from measure import leaf, same_bits

import ppokern
from ppokern.linear import kernel_native, reference

pytestmark = pytest.mark.skipif(
    "cuda" not in ppokern.available_backends() or CUDA_DEVICE == "cuda",
    reason="make cuda-on-cpu runs this; on a GPU the tests of the op do",
)


@pytest.mark.parametrize("v", [1, 33, 512, 16 * 512 + 1, 3 * 8192 - 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compact": False, "valid": torch.arange(N) % 3 != 1},
        {"softcap": 4.0, "temperature": torch.rand(N) + 0.5, "entropy_coef": 0.1},
        {"rows": torch.tensor([1, 2, 5, 10]), "kl_coef": 0.3},
    ],
    ids=["plain", "masked", "all of the head", "some rows"],
)
def test_equals_two_passes(v: int, options: dict[str, Any]) -> None:
    logits, ids, terms = draw(v)
    rows = options.get("rows", slice(0, N))
    exact = run(TWO_PASSES, logits[rows], ids, terms, **options)
    close(run(kernel_native.loss_pass, logits[rows], ids, terms, **options), exact)
    if v > 1 and not options:
        assert 0 < len(exact[2]) < N, "some rows have no slope"


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
    logits, ids, terms = draw(9000)
    logits[0, 32:8192] = -torch.inf
    logits[1, : ids[1]], logits[1, ids[1] + 1 :] = -torch.inf, -torch.inf  # it alone is left
    logits[2] = -torch.inf
    logits[3, ids[3]] = -torch.inf
    ids[4], ids[5] = 9000, -1
    logits[6, 150] = torch.inf
    logits[7, 3] = torch.nan
    logits[8, 64:] *= 1e37
    options: dict[str, Any] = {"entropy_coef": 0.1, "temperature": torch.tensor(0.5)}
    mine, exact = (
        run(k, logits, ids, terms, **options) for k in (kernel_native.loss_pass, TWO_PASSES)
    )
    close(mine, exact)
    assert mine[0].isnan().nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_a_row_alone_and_among_others() -> None:
    logits, ids, terms = draw(1001)
    options: dict[str, Any] = {"entropy_coef": 0.1, "compact": False}
    whole = run(kernel_native.loss_pass, logits, ids, terms, **options)
    for i in range(N):
        rows = slice(i, i + 1)
        alone = run(kernel_native.loss_pass, logits[rows], ids, terms, rows=rows, **options)
        assert same_bits(alone[0][rows], whole[0][rows])
        assert same_bits(alone[1][rows], whole[1][rows])
        assert same_bits(alone[-1], whole[-1][rows])


def test_the_op_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "two_passes", None)
    hidden, weight, x = torch.randn(5, 3), torch.randn(9, 3), torch.randn(5)
    with ppokern.use_backend("cuda"):
        loss = ppokern.linear_ppo_loss(leaf(hidden), weight, torch.arange(5), x, x).loss
    loss.backward()
    assert loss.isfinite()
