import math
from typing import Any

import oracle
import pytest
import ranks
import torch
from eager import compute
from hypothesis import given
from hypothesis import strategies as st
from measure import leaf, same_bits, unchanged
from oracle import assert_within_rule
from torch import Tensor

from ppokern import whiten

OP = "whiten"
NAN, INF = math.nan, math.inf


def check(x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    with unchanged(x, mask):
        out = whiten(x, mask, **options)
    exact = oracle.whiten(x, mask, **options)
    peer = compute(x)
    kept = peer if mask is None else peer[mask]
    eps, correction = options.get("eps", 1e-8), options.get("correction", 1)
    if kept.numel() > correction:
        white = (peer - kept.mean()) / (kept.var(correction=correction) + eps).sqrt()
        peer = white if options.get("shift_mean", True) else white + kept.mean()
        peer = peer if mask is None else peer.masked_fill(~mask, 0.0)
    assert out.dtype == compute(x).dtype
    assert_within_rule(out, peer, exact)
    return out


def test_hand_worked(backend: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    assert whiten(x).tolist() == pytest.approx([-1, 0, 1], abs=1e-6)
    root = math.sqrt(1.5)
    assert whiten(x, correction=0).tolist() == pytest.approx([-root, 0, root], abs=1e-6)
    assert whiten(x, shift_mean=False).tolist() == pytest.approx([1, 2, 3], abs=1e-6)
    assert whiten(2 * x, eps=5.0).tolist() == pytest.approx([-2 / 3, 0, 2 / 3], abs=1e-6)


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 4), (5000,)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"shift_mean": False}, {"correction": 0}, {"eps": 1.0}], ids=str
)
def test_every_option_and_layout(
    backend: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    masked: bool,
    options: dict[str, Any],
) -> None:
    x = (3 * torch.randn(shape) + 2).to(dtype)
    check(x, torch.rand(shape) < 0.7 if masked else None, **options)


def test_large_mean_small_spread(backend: str) -> None:
    check(1e4 + torch.randn(501))


@pytest.mark.parametrize("mean", [0.1, 1.0, -3e4])
@pytest.mark.parametrize("steps", [(-1, 0, 1), (0, 1), (0, 0, 0, 0, 1), (5, -3, 0, 2)], ids=str)
def test_values_that_differ_in_their_last_bits(
    backend: str, dtype: torch.dtype, mean: float, steps: tuple[int, ...]
) -> None:
    """Only equal values have no variance: here they are a few units in the last place apart."""
    centre = torch.tensor(mean).to(dtype)
    unit = (torch.nextafter(centre, torch.tensor(INF, dtype=dtype)) - centre).abs() * 2
    x = centre + torch.tensor(steps).to(dtype) * unit
    exact = (x.double() - x.double()[0]) / unit.double()
    exact = (exact - exact.mean()) / exact.std()
    assert torch.allclose(whiten(x, eps=0.0).double(), exact, atol=1e-6)


def test_a_mean_of_a_million(backend: str) -> None:
    x = torch.tensor([1e6 - 0.0625, 1e6, 1e6 + 0.0625])
    assert whiten(x).tolist() == pytest.approx([-1, 0, 1], abs=3e-6)


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
def test_masked_positions_are_never_read(backend: str, poison: float) -> None:
    x, mask = torch.randn(4, 5), torch.rand(4, 5) < 0.5
    for options in ({}, {"shift_mean": False}):
        dirty = whiten(x.masked_fill(~mask, poison), mask, **options)
        assert torch.equal(dirty, whiten(x, mask, **options))
        assert (dirty[~mask] == 0).all()


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize(
    ("values", "mask"),
    [
        ([5.0, NAN, NAN], [True, False, False]),
        ([NAN, NAN, NAN], [False, False, False]),
        ([0.1] * 7, [True] * 7),
        ([1e4 + 0.1] * 7, [True] * 7),
        ([0.0] * 3, [True] * 3),
        ([3.0], [True]),
        ([], []),
    ],
    ids=["one", "none", "equal", "equal_and_large", "zeros", "single", "empty"],
)
def test_A7_nothing_to_scale_by(
    backend: str,
    values: list[float],
    mask: list[bool],
    shift_mean: bool,
    correction: int,
    eps: float,
) -> None:
    x, m = torch.tensor(values), torch.tensor(mask, dtype=torch.bool)
    out = whiten(x, m, shift_mean=shift_mean, correction=correction, eps=eps)
    expected = torch.zeros_like(x) if shift_mean else x.masked_fill(~m, 0.0)
    assert torch.allclose(out, expected, rtol=2e-7, atol=1e-6)


def test_A7_fewer_values_than_the_correction(backend: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    for correction in (3, 5):
        assert whiten(x, correction=correction).tolist() == pytest.approx([-1, 0, 1])
        assert whiten(x, correction=correction, shift_mean=False).tolist() == pytest.approx(
            [1, 2, 3]
        )


def test_zero_dimensional(backend: str) -> None:
    assert whiten(torch.tensor(3.0)).item() == 0
    assert whiten(torch.tensor(3.0), torch.tensor(False)).item() == 0


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_empty(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert whiten(torch.empty(shape, dtype=dtype)).shape == shape


def test_strides_change_nothing(backend: str) -> None:
    x, mask = torch.randn(6, 8), torch.rand(6, 8) < 0.7
    for view in (lambda t: t.T, lambda t: t[:, :-1], lambda t: t[::2, 1::3]):
        dense = whiten(view(x).contiguous(), view(mask).contiguous())
        assert torch.allclose(whiten(view(x), view(mask)), dense, atol=1e-6)
    check(torch.tensor([[1.0], [2.0], [5.0]]).expand(3, 4))


def test_output_is_a_constant(backend: str) -> None:
    assert not whiten(leaf(torch.randn(4))).requires_grad


def test_determinism(backend: str) -> None:
    x, mask = torch.randn(50_000), torch.rand(50_000) < 0.5
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert same_bits(whiten(x, mask), whiten(x, mask))


@given(seed=st.integers(0, 2**20), n=st.integers(2, 40))
def test_order_and_padding_change_nothing(backend: str, seed: int, n: int) -> None:
    torch.manual_seed(seed)
    x, order = torch.randn(n), torch.randperm(n + 3)
    padded = torch.cat([x, torch.full((3,), NAN)])[order]
    mask = torch.cat([torch.ones(n, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)])[order]
    back = torch.empty(n + 3).scatter(0, order, whiten(padded, mask))
    assert torch.allclose(back[:n], whiten(x), atol=1e-5)
    assert (back[n:] == 0).all()


# More than one process ----------------------------------------------------------------------------

PARTS = (torch.tensor([[1.0, 4.0], [7.5, NAN]]), torch.full((1, 3), NAN))
MASKS = (torch.tensor([[True, True], [True, False]]), torch.zeros(1, 3, dtype=torch.bool))
SPLIT = (torch.tensor([1e3 + 1.0, 1e3 + 2.0, 1e3 + 9.0]), torch.tensor([1e3 - 4.0]))


def on_a_rank(rank: int) -> dict[str, list[float]]:
    import torch.distributed as dist

    world = dist.group.WORLD
    return {
        "uneven": whiten(PARTS[rank], MASKS[rank], group=world).flatten().tolist(),
        "back": whiten(PARTS[rank], MASKS[rank], group=world, shift_mean=False).flatten().tolist(),
        "split": whiten(SPLIT[rank], group=world).tolist(),
        "one": whiten(torch.tensor([3.0 + rank]), torch.tensor([rank == 1]), group=world).tolist(),
        "none": whiten(PARTS[1], MASKS[1], group=world).flatten().tolist(),
        "empty": whiten(torch.empty(0), group=world).tolist(),
        "equal": whiten(torch.full((3,), 0.1), group=world, eps=0.0).tolist(),
        "equal_on_each": whiten(torch.full((2,), float(rank)), group=world, eps=0.0).tolist(),
        "close": whiten(1e6 + 0.0625 * torch.arange(2 - rank), group=world).tolist(),
        "alone": whiten(SPLIT[0] * (rank + 1)).tolist(),
    }


def test_A8_two_ranks_of_which_one_has_nothing() -> None:
    first, second = ranks.run(on_a_rank)
    alone = oracle.whiten(PARTS[0], MASKS[0])
    assert first["uneven"] == pytest.approx(alone.flatten().tolist(), abs=1e-5)
    assert second["uneven"] == second["none"] == first["none"][:3] == [0, 0, 0]
    mean = (1 + 4 + 7.5) / 3
    shifted = [x + mean for x in alone.flatten().tolist()[:3]]
    assert first["back"] == pytest.approx([*shifted, 0], abs=1e-5)
    together = oracle.whiten(torch.cat(SPLIT)).tolist()
    assert first["split"] + second["split"] == pytest.approx(together, abs=1e-4)
    assert first["one"] == second["one"] == [0]
    assert first["empty"] == second["empty"] == []
    assert first["equal"] + second["equal"] == pytest.approx([0] * 6, abs=1e-6)
    half = math.sqrt(3 / 4)  # deviations of .5, three degrees of freedom
    assert first["equal_on_each"] == pytest.approx([-half, -half], abs=1e-5)
    assert second["equal_on_each"] == pytest.approx([half, half], abs=1e-5)
    third = math.sqrt(1 / 3)  # of 0, 1 and 0
    assert first["close"] == pytest.approx([-third, 2 * third], abs=1e-5)
    assert second["close"] == pytest.approx([-third], abs=1e-5)
    for rank, result in enumerate((first, second)):
        assert result["alone"] == pytest.approx(
            oracle.whiten(SPLIT[0] * (rank + 1)).tolist(), abs=1e-3
        )
