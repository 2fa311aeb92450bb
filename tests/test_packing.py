import math
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure import leaf, unchanged
from torch import Tensor

from ppokern import Packed, next_token_targets, pack, position_ids, unpack

OP = "packing"
NAN = math.nan
T_, F_ = True, False
MASK = torch.tensor([[T_, T_, F_, F_], [F_, F_, F_, F_], [F_, T_, T_, T_], [T_, F_, T_, F_]])
CU = [0, 2, 2, 5, 7]
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
)


def ints(*xs: int) -> Tensor:
    return torch.tensor(xs, dtype=torch.int32)


@pytest.mark.parametrize("tail", [(), (3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack(backend: str, dtype: torch.dtype, tail: tuple[int, ...]) -> None:
    x = (5 * torch.randn(4, 4, *tail)).to(dtype)
    with unchanged(x, MASK):
        out = pack(x, MASK)
    assert isinstance(out, Packed)
    values, cu, longest = oracle.pack(x, MASK)
    assert out.values.dtype == dtype and out.values.shape == (7, *tail)
    assert torch.equal(out.values, torch.stack(values))
    assert out.cu_seqlens.dtype == torch.int32 and out.cu_seqlens.tolist() == cu == CU
    assert out.max_seqlen == longest == 3 and isinstance(out.max_seqlen, int)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [None, 3, 6])
@pytest.mark.parametrize("tail", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64], ids=str)
def test_unpack(
    backend: str,
    dtype: torch.dtype,
    cu_dtype: torch.dtype,
    tail: tuple[int, ...],
    length: int | None,
    side: str,
) -> None:
    values = torch.randn(7, *tail).to(dtype)
    out = unpack(
        values, torch.tensor(CU, dtype=cu_dtype), length=length, fill=-1.5, padding_side=side
    )
    assert out.dtype == dtype
    assert torch.equal(out.double(), oracle.unpack(values, CU, length or 3, -1.5, side))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8], ids=str)
def test_unpack_of_other_dtypes(backend: str, dtype: torch.dtype) -> None:
    out = unpack(torch.tensor([1, 0, 1]).to(dtype), ints(0, 1, 3))
    assert out.dtype == dtype and out.tolist() == [[1, 0], [0, 1]]
    if dtype == torch.int64:
        out = unpack(torch.tensor([1, 2, 3]), ints(0, 1, 3), fill=-100)
        assert out.tolist() == [[1, -100], [2, 3]]


@pytest.mark.parametrize("fill", [NAN, math.inf, 7])
def test_unpack_fill_reaches_no_gradient(backend: str, fill: float) -> None:
    values = leaf(torch.randn(3))
    out = unpack(values, ints(0, 1, 3), fill=fill)
    (g,) = torch.autograd.grad(out, values, torch.tensor([[1.0, NAN], [2, 3]]))
    assert g.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("shape", "cu"), [((0, 3), [0]), ((2, 0), [0, 0, 0]), ((0, 0, 5), [0]), ((2, 3, 0), [0, 3, 6])]
)
def test_pack_of_nothing(backend: str, shape: tuple[int, ...], cu: list[int]) -> None:
    x = torch.empty(shape)
    out = pack(x, torch.ones(shape[:2], dtype=torch.bool))
    assert out.values.shape == (cu[-1], *shape[2:])
    assert out.cu_seqlens.tolist() == cu
    assert out.max_seqlen == (3 if cu[-1] else 0)
    assert unpack(out.values, out.cu_seqlens).shape == (shape[0], out.max_seqlen, *shape[2:])


def test_pack_with_everything_masked(backend: str) -> None:
    x = leaf(torch.full((2, 3), NAN))
    out = pack(x, torch.zeros(2, 3, dtype=torch.bool))
    assert out.values.shape == (0,) and out.cu_seqlens.tolist() == [0, 0, 0]
    assert out.max_seqlen == 0
    (g,) = torch.autograd.grad(out.values.sum(), x)
    assert (g == 0).all()
    assert unpack(out.values.detach(), out.cu_seqlens, length=2, fill=9).tolist() == [[9, 9]] * 2


def test_gradients_flow_through_pack(backend: str, dtype: torch.dtype) -> None:
    x = leaf(torch.randn(4, 4, 2).to(dtype).masked_fill(~MASK[..., None], NAN))
    values = pack(x, MASK).values
    incoming = torch.randn(7, 2).to(dtype)
    (g,) = torch.autograd.grad(values, x, incoming)
    assert g.dtype == dtype
    assert torch.equal(g[MASK], incoming) and (g[~MASK] == 0).all()


@pytest.mark.parametrize("side", ["right", "left"])
def test_gradcheck(side: str) -> None:
    x = torch.randn(4, 4, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor) -> Tensor:
        out = pack(x**2, MASK)
        return unpack(out.values, out.cu_seqlens, padding_side=side)

    assert torch.autograd.gradcheck(there_and_back, x)
    assert torch.autograd.gradgradcheck(there_and_back, x)


def test_strides_change_nothing(backend: str) -> None:
    x, mask = torch.randn(4, 6, 2).transpose(0, 1), MASK.repeat(2, 1)[1:7].T.contiguous().T
    a, b = pack(x, mask), pack(x.contiguous(), mask.contiguous())
    assert torch.equal(a.values, b.values) and torch.equal(a.cu_seqlens, b.cu_seqlens)
    wide = torch.randn(14)[::2]
    assert torch.equal(unpack(wide, ints(*CU)), unpack(wide.contiguous(), ints(*CU)))


@pytest.mark.parametrize("given_total", [False, True])
@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("cu", "expected"),
    [
        ([0, 3, 3, 4, 6], [0, 1, 2, 0, 0, 1]),
        ([0, 0, 2], [0, 1]),
        ([0], []),
        ([0, 0], []),
        ([0, 4], [0, 1, 2, 3]),
        ([0, 2, 2], [0, 1]),
    ],
    ids=str,
)
def test_position_ids(
    backend: str, cu: list[int], expected: list[int], cu_dtype: torch.dtype, given_total: bool
) -> None:
    out = position_ids(
        torch.tensor(cu, dtype=cu_dtype), total=len(expected) if given_total else None
    )
    assert out.tolist() == expected and not out.is_floating_point()
    assert out.shape == (len(expected),)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("cu", "last"),
    [
        ([0, 3, 3, 4, 6], [2, 3, 5]),
        ([0, 0, 6], [5]),
        ([0, 1, 2, 3, 4, 5, 6, 6], [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_next_token_targets(
    backend: str, dtype: torch.dtype, cu: list[int], last: list[int]
) -> None:
    tokens = torch.tensor([11, 12, 13, 14, 15, 16], dtype=dtype)
    targets, mask = next_token_targets(tokens, ints(*cu))
    assert targets.shape == mask.shape == (6,) and mask.dtype == torch.bool
    assert mask.tolist() == [i not in last for i in range(6)]
    for i in range(6):
        if i not in last:
            assert targets[i] == tokens[i + 1]


def test_next_token_targets_score_with_the_mask_alone(backend: str) -> None:
    """The last of a segment is left out by the mask, also where its target is not an id."""
    from ppokern import selected_logprobs

    tokens = torch.tensor([1, 2, 0, 2])
    targets, mask = next_token_targets(tokens, ints(0, 3, 4))
    out = selected_logprobs(torch.randn(4, 3), targets, mask=mask)
    assert (out[mask] < 0).all() and (out[~mask] == 0).all()


@pytest.mark.parametrize("cu", [[0], [0, 0, 0]])
def test_next_token_targets_of_nothing(backend: str, cu: list[int]) -> None:
    targets, mask = next_token_targets(torch.empty(0, dtype=torch.int64), ints(*cu))
    assert targets.shape == mask.shape == (0,)


@given(data=st.data(), seed=st.integers(0, 2**20))
def test_round_trip(backend: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    side = data.draw(st.sampled_from(["right", "left"]))
    width = max(lengths) + data.draw(st.integers(0, 2))
    cols = torch.arange(width) if side == "right" else width - 1 - torch.arange(width)
    mask = cols < torch.tensor(lengths)[:, None]
    x = torch.randn(len(lengths), width).masked_fill(~mask, 0.0)
    out = pack(x, mask)
    assert out.cu_seqlens.diff().tolist() == lengths and out.max_seqlen == max(lengths)
    assert torch.equal(unpack(out.values, out.cu_seqlens, length=width, padding_side=side), x)
    again: Any = pack(*unpack_with_mask(out, width))
    assert torch.equal(again.values, out.values)
    starts = position_ids(out.cu_seqlens) == 0
    assert starts.sum() == sum(n > 0 for n in lengths)


def unpack_with_mask(out: Packed, width: int) -> tuple[Tensor, Tensor]:
    ones = torch.ones(out.values.shape[0], dtype=torch.bool)
    return (
        unpack(out.values, out.cu_seqlens, length=width),
        unpack(ones, out.cu_seqlens, length=width),
    )
