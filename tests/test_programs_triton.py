"""Interpreted Triton programs: in any order, inside their arguments, with a GPU's NaNs."""

import importlib
import os
from typing import Any

import calls
import pytest
import torch
from measure import same_bits

from ppokern import use_backend

triton = pytest.importorskip("triton", reason="no Triton: make triton installs it")
tl = triton.language
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_triton.py runs this interpreted"
)
SMALL = {  # several programs even of small calls
    "logprob": {"TILE": 8, "MOVED_ROWS": 4, "MOVED_COLUMNS": 4, "RESIDENT": 3},
    "linear": {"SHORT": (16, 8, 3)},
    "gae": {"SHORT": (2, 4), "LONG": (1, 8), "BLOCK": 4, "PARTIALS": 4},
    "reward": {"SHORT": (2, 4), "LONG": (1, 4)},
    "ppo_loss": {"BLOCK": 4, "RESIDENT": 3},
}
CALLS = [
    (name, packed)
    for packed, names in ((False, calls.NAMES), (True, calls.PACKED_NAMES))
    for name in names
    if name.split("_")[0] in ("selected", "linear", "gae", "whiten", "shaped", "ppo")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "packed"), CALLS)
def test_the_order_of_programs_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, name: str, packed: bool, dtype: torch.dtype
) -> None:
    """A GPU runs them in any: what one writes, no other one of its launch may read."""
    interpreter = importlib.import_module("interpreter")
    for room, sizes in SMALL.items():
        kernels = importlib.import_module(f"ppokern.{room}.kernel_triton")
        for size, value in sizes.items():
            monkeypatch.setattr(kernels, size, value)
    call = (calls.packed() if packed else calls.every(dtype))[name]
    with use_backend("triton"):
        forwards = call.run(call.leaves())
        with interpreter.reversed_programs() as grids:
            backwards = call.run(call.leaves())
    assert max(grids) > 1
    for a, b in zip(forwards, backwards, strict=True):
        assert same_bits(a, b)


@triton.jit
def copy_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i))


@pytest.mark.parametrize("short", ["x", "out"])
def test_addresses_outside_of_the_arguments_are_errors(short: str) -> None:
    """Else the interpreter reads and writes what happens to stand there."""
    given: dict[str, Any] = {"x": torch.zeros(16), "out": torch.zeros(16)}
    copy_kernel[(1,)](**given, N=16)
    given[short] = torch.zeros(15)
    with pytest.raises(Exception, match="outside of all arguments"):
        copy_kernel[(1,)](given["x"], given["out"], N=16)


@triton.jit
def functions_kernel(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.maximum(a, b))
    tl.store(out + N + i, tl.minimum(a, b))
    tl.store(out + 2 * N + i, tl.exp(a))


def test_maxima_and_exponentials_are_those_of_a_gpu() -> None:
    nan = torch.nan
    x, y = torch.tensor([nan, 1.0, nan, 20.3]), torch.tensor([2.0, nan, nan, 5.0])
    out = torch.zeros(3, 4)
    functions_kernel[(1,)](x, y, out, N=4)
    assert same_bits(out[0], torch.tensor([2.0, 1.0, nan, 20.3]))
    assert same_bits(out[1], torch.tensor([2.0, 1.0, nan, 5.0]))
    error = (out[2, 3].double() / x[3].double().exp() - 1).abs().item()
    assert 1e-7 < error < 2e-6
