"""The loss's pass over logits in Triton, interpreted: one kernel against two passes in float64.

What every backend does alike stands in test_linear_loss.py.
"""

import importlib
import os
from typing import Any

import pytest
import torch
from loss_pass import TWO_PASSES, N, close, draw, run
from measure import leaf, same_bits

import ppokern
from ppokern import _launch
from ppokern.linear import reference

pytest.importorskip("triton", reason="no Triton: make triton installs it")
kernel_triton = importlib.import_module("ppokern.linear.kernel_triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_triton.py runs this interpreted"
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles to a row, and several rounds of tiles."""
    monkeypatch.setattr(kernel_triton, "SHORT", (32, 8, 2))
    monkeypatch.setattr(kernel_triton, "TILES", 2)


@pytest.mark.parametrize("v", [1, 16, 31, 32, 33, 64, 80, 129, 200])
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
    close(run(kernel_triton.loss_pass, logits[rows], ids, terms, **options), exact)
    if v > 1 and not options:
        assert 0 < len(exact[2]) < N, "some rows have no slope"


@pytest.mark.parametrize("compact", [True, False])
def test_forbidden_tokens_and_ids_out_of_range(compact: bool) -> None:
    logits, ids, terms = draw(200)
    logits[0, 32:64] = -torch.inf
    logits[1, : ids[1]], logits[1, ids[1] + 1 :] = -torch.inf, -torch.inf  # it alone is left
    logits[2] = -torch.inf
    logits[3, ids[3]] = -torch.inf
    ids[4], ids[5] = 200, -1
    logits[6, 150] = torch.inf
    logits[7, 3] = torch.nan
    logits[8, 64:] *= 1e37
    options: dict[str, Any] = {"temperature": torch.tensor(0.5), "compact": compact}
    options["entropy_coef"] = 0.1
    mine, exact = (
        run(k, logits, ids, terms, **options) for k in (kernel_triton.loss_pass, TWO_PASSES)
    )
    close(mine, exact)
    assert mine[0].isnan().nonzero().flatten().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_alone_and_among_others(dtype: torch.dtype) -> None:
    logits, ids, terms = draw(300, dtype)
    options: dict[str, Any] = {"entropy_coef": 0.1, "compact": False}
    whole = run(kernel_triton.loss_pass, logits, ids, terms, **options)
    for i in range(N):
        rows = slice(i, i + 1)
        alone = run(kernel_triton.loss_pass, logits[rows], ids, terms, rows=rows, **options)
        assert same_bits(alone[0][rows], whole[0][rows])
        assert same_bits(alone[1][rows], whole[1][rows])
        assert same_bits(alone[-1], whole[-1][rows])


def test_few_rows_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids, terms = draw(200)
    one = run(kernel_triton.loss_pass, logits, ids, terms, entropy_coef=0.1)
    monkeypatch.setattr(_launch, "resident", lambda device, most: 100 * most)
    monkeypatch.setattr(kernel_triton, "loss_kernel", None)
    close(run(kernel_triton.loss_pass, logits, ids, terms, entropy_coef=0.1), one)


def test_the_op_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "two_passes", None)
    hidden, weight, x = torch.randn(5, 3), torch.randn(9, 3), torch.randn(5)
    with ppokern.use_backend("triton"):
        loss = ppokern.linear_ppo_loss(leaf(hidden), weight, torch.arange(5), x, x).loss
    loss.backward()
    assert loss.isfinite()
