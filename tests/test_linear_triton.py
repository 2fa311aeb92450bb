"""The loss's pass over logits in Triton, interpreted: one kernel against two passes in float64.

What every backend does alike stands in test_linear_loss.py.
"""

import importlib
import os
from typing import Any

import loss_pass
import pytest
import torch
from loss_pass import close, draw, run

from ppokern import _launch

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
@pytest.mark.parametrize("options", loss_pass.OPTIONS.values(), ids=loss_pass.OPTIONS)
def test_equals_two_passes(v: int, options: dict[str, Any]) -> None:
    loss_pass.equals_two_passes(kernel_triton.loss_pass, v, options)


@pytest.mark.parametrize("compact", [True, False])
def test_forbidden_tokens_and_ids_out_of_range(compact: bool) -> None:
    tile = slice(32, 64)
    loss_pass.forbidden_tokens_and_ids_out_of_range(kernel_triton.loss_pass, 200, tile, compact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_alone_and_among_others(dtype: torch.dtype) -> None:
    loss_pass.a_row_alone_and_among_others(kernel_triton.loss_pass, 300, dtype)


def test_few_rows_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids, terms = draw(200)
    one = run(kernel_triton.loss_pass, logits, ids, terms, entropy_coef=0.1)
    monkeypatch.setattr(_launch, "resident", lambda device, most: 100 * most)
    monkeypatch.setattr(kernel_triton, "loss_kernel", None)
    close(run(kernel_triton.loss_pass, logits, ids, terms, entropy_coef=0.1), one)


def test_the_op_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_pass.the_op_takes_it("triton", monkeypatch)
