import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure import leaf, same_bits, unchanged
from oracle import assert_within_rule
from torch import Tensor

from ppokern import Advantages, gae

OP = "gae"
NAN, INF = math.nan, math.inf
T_, F_ = True, False


def row(*xs: Any) -> Tensor:
    return torch.tensor(xs)


def check(rewards: Tensor, values: Tensor, **options: Any) -> Advantages:
    """(B, T), (T,) or packed, against float64; the peer is the same recursion in float32."""
    inputs = [x for x in (rewards, values, *options.values()) if isinstance(x, Tensor)]
    with unchanged(*inputs):
        out = gae(rewards, values, **options)
    truth_options = dict(options)
    if "terminated" in options or "truncated" in options:
        none = torch.zeros(rewards.shape, dtype=torch.bool)
        ended = truth_options.pop("terminated", none)
        cut = truth_options.pop("truncated", none)
        truth_options.update(bootstrap=~ended, continues=~ended & ~cut)
    exact = oracle.gae_rows(rewards, values, **truth_options)
    floats = [x for x in inputs if x.is_floating_point()]
    wide = torch.float64 if torch.float64 in [x.dtype for x in floats] else torch.float32
    scalar = np.float64 if wide == torch.float64 else np.float32
    peer = oracle.gae_rows(rewards, values, **truth_options, scalar=scalar)
    assert isinstance(out, Advantages)
    for mine, theirs, truth in zip(out, peer, exact, strict=True):
        assert mine.dtype == wide
        assert_within_rule(mine, theirs, truth)
    return out


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


# Hand-worked --------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [0.0, NAN, INF])
def test_A1_padding_is_not_read(backend: str, poison: float) -> None:
    pad = 100.0 if poison == 0 else poison
    out = gae(row(0.0, 1.0, poison), row(0.0, 0.0, pad), mask=row(T_, T_, F_), lam=0.95)
    assert out.advantages.tolist() == pytest.approx([0.95, 1, 0])
    assert out.returns.tolist() == pytest.approx([0.95, 1, 0])


@pytest.mark.parametrize("poison", [9.0, NAN])
@pytest.mark.parametrize(("mode", "first"), [("skip", 0.46), ("decay", 0.412)])
def test_A2_a_gap_is_passed_over_or_counts(
    backend: str, mode: str, first: float, poison: float
) -> None:
    out = gae(
        row(0.0, 0.0 if poison == 9 else poison, 1.0),
        row(0.5, poison, 0.2),
        mask=row(T_, F_, T_),
        mask_mode=mode,
    )
    assert out.advantages.tolist() == pytest.approx([first, 0, 0.8])
    assert out.returns.tolist() == pytest.approx([first + 0.5, 0, 1.0])


def test_A3_terminated_at_the_end(backend: str) -> None:
    out = gae(row(0.0, 1.0), row(0.4, 0.7), gamma=0.9, terminated=row(F_, T_))
    assert out.advantages.tolist() == pytest.approx([0.4865, 0.3])
    assert out.returns.tolist() == pytest.approx([0.8865, 1.0])


@pytest.mark.parametrize(
    ("lam", "expected"),
    [(0.0, [0.1445, 0.143, 0.597, 0.2]), (0.95, [0.9734, 0.8814, 0.7851, 0.2])],
)
def test_A4_lambda(backend: str, lam: float, expected: list[float]) -> None:
    out = gae(
        row(0.0, 0.0, 1.0, 0.5),
        row(0.4, 0.55, 0.7, 0.3),
        gamma=0.99,
        lam=lam,
        terminated=row(F_, F_, F_, T_),
    )
    assert out.advantages.tolist() == pytest.approx(expected, abs=5e-5)


def test_A5_truncated_then_terminated(backend: str) -> None:
    out = gae(
        row(1.0, 100.0),
        row(2.0, 50.0),
        gamma=0.9,
        next_values=row(3.0, 0.0),
        truncated=row(T_, F_),
        terminated=row(F_, T_),
    )
    assert out.advantages.tolist() == pytest.approx([1.7, 50])
    assert out.returns.tolist() == pytest.approx([3.7, 100])


def test_lambda_one_gives_discounted_returns(backend: str) -> None:
    out = gae(row(1.0, 2.0, 4.0), row(5.0, -3.0, 7.0), gamma=0.5, lam=1.0)
    assert out.returns.tolist() == pytest.approx([1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4])


@pytest.mark.parametrize("shape", ["(T,)", "(1, T)", "(T, 1)", "packed"])
def test_last_values_bootstrap_the_end(backend: str, shape: str) -> None:
    r, v, last = row(1.0, 2.0), row(0.5, 0.25), torch.tensor(10.0)
    extra: dict[str, Any] = {}
    if shape == "(1, T)":
        r, v, last = r[None], v[None], last[None]
    elif shape == "(T, 1)":
        r, v, last, extra = r[:, None], v[:, None], last[None], {"time_dim": 0}
    elif shape == "packed":
        last, extra = last[None], {"cu_seqlens": torch.tensor([0, 2], dtype=torch.int32)}
    out = gae(r, v, gamma=0.9, lam=0.5, last_values=last, **extra)
    a1 = 2 + 0.9 * 10 - 0.25
    a0 = 1 + 0.9 * 0.25 - 0.5 + 0.9 * 0.5 * a1
    assert out.advantages.flatten().tolist() == pytest.approx([a0, a1])


def test_last_values_is_not_used_beside_next_values(backend: str) -> None:
    r, v, following = torch.randn(3, 2, 4)
    alone = gae(r, v, next_values=following)
    both = gae(r, v, next_values=following, last_values=row(NAN, 5.0))
    assert all(same_bits(a, b) for a, b in zip(alone, both, strict=True))


def test_terminated_and_truncated_is_terminated(backend: str) -> None:
    r, v = row(1.0, 2.0, 3.0), row(0.5, 0.6, 0.7)
    both = gae(r, v, terminated=row(F_, T_, F_), truncated=row(F_, T_, F_))
    assert all(
        same_bits(a, b) for a, b in zip(gae(r, v, terminated=row(F_, T_, F_)), both, strict=True)
    )


def test_last_continues_is_not_read(backend: str) -> None:
    r, v = row(1.0, 2.0, 9.0), row(0.5, 0.6, NAN)
    kwargs: dict[str, Any] = {"mask": row(T_, T_, F_), "bootstrap": row(T_, F_, F_)}
    a = gae(r, v, continues=row(T_, T_, T_), **kwargs)
    b = gae(r, v, continues=row(T_, F_, F_), **kwargs)
    assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def test_flags_at_masked_positions_are_not_read(backend: str) -> None:
    """A contradiction, a cut and NaN next values inside a gap: none is there."""
    r, v = row(1.0, 7.0, 7.0, 2.0), row(0.5, 7.0, 7.0, 0.6)
    mask = row(T_, F_, F_, T_)
    for mode in ("skip", "decay"):
        clean = gae(r, v, mask=mask, mask_mode=mode)
        dirty = gae(
            r,
            v,
            mask=mask,
            mask_mode=mode,
            bootstrap=row(T_, F_, T_, T_),
            continues=row(T_, T_, F_, T_),
        )
        assert all(same_bits(a, b) for a, b in zip(clean, dirty, strict=True))
        following = row(0.3, NAN, INF, 0.1)
        check(r, v, mask=mask, mask_mode=mode, next_values=following)


def test_decay_through_a_gap_with_next_values(backend: str) -> None:
    """A masked step has reward 0 and value 0, and its next value is that of its neighbour."""
    out = check(
        row(1.0, 9.0, 2.0),
        row(0.5, 9.0, 0.6),
        mask=row(T_, F_, T_),
        mask_mode="decay",
        gamma=0.9,
        lam=0.8,
        next_values=row(0.3, NAN, 0.1),
    )
    a2 = 2 + 0.9 * 0.1 - 0.6
    a1 = 0.9 * 0.6 + 0.72 * a2
    a0 = 1 + 0.9 * 0.3 - 0.5 + 0.72 * a1
    assert out.advantages.tolist() == pytest.approx([a0, 0, a2])


# Layouts ------------------------------------------------------------------------------------------

CASES: dict[str, Any] = {
    "plain": lambda r: {},
    "discounted": lambda r: {"gamma": 0.97, "lam": 0.6},
    "zero_gamma": lambda r: {"gamma": 0.0},
    "mask": lambda r: {"mask": torch.rand(r.shape) < 0.7},
    "decay": lambda r: {"mask": torch.rand(r.shape) < 0.7, "mask_mode": "decay", "gamma": 0.9},
    "terminated": lambda r: {"terminated": torch.rand(r.shape) < 0.3, "gamma": 0.9},
    "cut": lambda r: {
        "terminated": torch.rand(r.shape) < 0.2,
        "truncated": torch.rand(r.shape) < 0.3,
        "next_values": torch.randn(r.shape).to(r.dtype),
    },
    "flags": lambda r: _flags(r),
    "bootstrap": lambda r: {"bootstrap": torch.rand(r.shape) < 0.7},
    "masked_flags": lambda r: {"mask": torch.rand(r.shape) < 0.7, **_flags(r)},
    "decay_flags": lambda r: {
        "mask": torch.rand(r.shape) < 0.7,
        "mask_mode": "decay",
        **_flags(r),
    },
}


def _flags(r: Tensor) -> dict[str, Tensor]:
    bootstrap = torch.rand(r.shape) < 0.8
    return {
        "bootstrap": bootstrap,
        "continues": bootstrap & (torch.rand(r.shape) < 0.7),
        "next_values": torch.randn(r.shape).to(r.dtype),
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (5, 8), (9, 3)], ids=str)
def test_batch(backend: str, dtype: torch.dtype, shape: tuple[int, ...], case: str) -> None:
    r, v = draw(shape, dtype)
    options = CASES[case](r)
    if "next_values" not in options:
        options["last_values"] = torch.randn(shape[0]).to(dtype)
    check(r, v, **options)


@pytest.mark.parametrize("case", CASES)
def test_one_sequence(backend: str, dtype: torch.dtype, case: str) -> None:
    r, v = draw((11,), dtype)
    options = {**CASES[case](r), "last_values": torch.tensor(0.5, dtype=dtype)}
    out = check(r, v, **options)
    assert all(same_bits(a, b) for a, b in zip(out, gae(r, v, time_dim=0, **options), strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64], ids=str)
def test_packed(backend: str, dtype: torch.dtype, case: str, cu_dtype: torch.dtype) -> None:
    r, v = draw((14,), dtype)
    cu = torch.tensor([0, 3, 3, 4, 11, 14, 14], dtype=cu_dtype)
    check(r, v, cu_seqlens=cu, **CASES[case](r), last_values=torch.randn(6).to(dtype))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("memory", ["contiguous", "transposed"])
def test_time_first(backend: str, dtype: torch.dtype, case: str, memory: str) -> None:
    """(T, B) is the transpose of (B, T), in either memory order."""
    r, v = draw((4, 9), dtype)
    options = {**CASES[case](r), "last_values": torch.randn(4).to(dtype)}
    expected = gae(r, v, **options)

    def turn(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim != 2:
            return x
        return x.T.contiguous() if memory == "contiguous" else x.T

    turned = {k: turn(x) for k, x in options.items()}
    out = gae(turn(r), turn(v), time_dim=0, **turned)
    for a, b in zip(out, expected, strict=True):
        assert torch.allclose(a, b.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", ["mask", "decay", "cut", "masked_flags"])
def test_strides_change_nothing(backend: str, dtype: torch.dtype, case: str) -> None:
    r, v = draw((8, 20), dtype)
    options = CASES[case](r)
    dense = {
        k: x[::2, 1:19:2].contiguous() if isinstance(x, Tensor) else x for k, x in options.items()
    }
    views = {k: x[::2, 1:19:2] if isinstance(x, Tensor) else x for k, x in options.items()}
    expected = gae(r[::2, 1:19:2].contiguous(), v[::2, 1:19:2].contiguous(), **dense)
    out = gae(r[::2, 1:19:2], v[::2, 1:19:2], **views)
    assert all(same_bits(a, b) for a, b in zip(out, expected, strict=True))


def test_expanded_inputs(backend: str) -> None:
    r, v, m = torch.randn(1, 6).expand(3, 6), torch.tensor(0.5).expand(3, 6), torch.tensor(True)
    check(r, v, mask=m.expand(3, 6), last_values=torch.tensor(1.0).expand(3))


@pytest.mark.parametrize("length", [255, 1024, 3001])
def test_long_sequences(backend: str, dtype: torch.dtype, length: int) -> None:
    r, v = draw((2, length), dtype)
    check(r, v, gamma=0.999, lam=0.98, mask=torch.rand(2, length) < 0.9)


@pytest.mark.parametrize("mode", ["skip", "decay"])
def test_a_gap_of_any_length(backend: str, mode: str) -> None:
    """Longer than what a kernel looks at in one go."""
    r, v = draw((1, 2300), torch.float32)
    mask = torch.zeros(1, 2300, dtype=torch.bool)
    mask[:, [3, 4, 7, 2250, 2251]] = True
    check(r, v, mask=mask, mask_mode=mode, last_values=torch.ones(1))


@pytest.mark.parametrize("batch", [1, 3, 4, 5, 7, 33])
def test_every_number_of_rows(backend: str, batch: int) -> None:
    r, v = draw((batch, 6), torch.float32)
    check(r, v, mask=torch.rand(batch, 6) < 0.6, last_values=torch.randn(batch))
    lengths = torch.randint(0, 5, (batch,))
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    r, v = draw((int(cu[-1]),), torch.float32)
    check(r, v, cu_seqlens=cu)


@pytest.mark.parametrize(
    ("shape", "extra"),
    [
        ((0, 5), {}),
        ((3, 0), {}),
        ((0, 0), {}),
        ((0,), {}),
        ((5, 0), {"time_dim": 0}),
        ((0, 5), {"time_dim": 0}),
        ((0,), {"cu_seqlens": torch.tensor([0], dtype=torch.int32)}),
        ((0,), {"cu_seqlens": torch.tensor([0, 0, 0], dtype=torch.int32)}),
    ],
    ids=str,
)
def test_empty(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], extra: dict[str, Any]
) -> None:
    r, v = draw(shape, dtype)
    out = gae(r, v, mask=torch.ones(shape, dtype=torch.bool), **extra)
    assert out.advantages.shape == out.returns.shape == shape


def test_a_sequence_without_transitions(backend: str) -> None:
    """Its last value is not read."""
    r, v = torch.randn(2, 3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    r[1], v[1] = NAN, NAN
    out = gae(r, v, mask=mask, last_values=row(1.0, NAN, 2.0))
    assert (out.advantages[1] == 0).all() and (out.returns[1] == 0).all()
    assert out.advantages[[0, 2]].isfinite().all()


def test_mixed_dtypes(backend: str) -> None:
    r, v = torch.randn(2, 5), torch.randn(2, 5).bfloat16()
    check(r, v, last_values=torch.randn(2).half())


def test_float64_beside_float32() -> None:
    check(torch.randn(2, 5), torch.randn(2, 5).double())


def test_outputs_are_constants(backend: str) -> None:
    r, v = leaf(torch.randn(2, 5)), leaf(torch.randn(2, 5))
    out = gae(r, v, last_values=leaf(torch.randn(2)))
    assert not out.advantages.requires_grad and not out.returns.requires_grad


def test_determinism(backend: str) -> None:
    r, v = draw((64, 50), torch.float32)
    mask = torch.rand(64, 50) < 0.8
    for threads in (1, 2):
        torch.set_num_threads(threads)
        a, b = gae(r, v, mask=mask), gae(r, v, mask=mask)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Values that are checked --------------------------------------------------------------------------


def bad(shape: tuple[int, ...], at: tuple[int, ...], value: float) -> Tensor:
    out = torch.zeros(shape)
    out[at] = value
    return out


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["rewards", "values"])
@pytest.mark.parametrize(
    ("shape", "at", "where", "extra"),
    [
        ((3, 4), (1, 2), r"\(?1, ?2", {}),
        ((4, 3), (2, 1), r"\(?2, ?1", {"time_dim": 0}),
        ((5,), (3,), r"\b3\b", {}),
        ((7,), (5,), r"\b5\b", {"cu_seqlens": torch.tensor([0, 4, 7], dtype=torch.int32)}),
    ],
    ids=["batch", "time_first", "one", "packed"],
)
def test_non_finite_input_names_its_place(
    backend: str,
    name: str,
    value: float,
    shape: tuple[int, ...],
    at: tuple[int, ...],
    where: str,
    extra: dict[str, Any],
) -> None:
    inputs = {"rewards": torch.zeros(shape), "values": torch.zeros(shape)}
    inputs[name] = bad(shape, at, value)
    with pytest.raises(ValueError, match=rf"{name}.*{where}"):
        gae(**inputs, **extra)


def test_non_finite_next_value(backend: str) -> None:
    r, v = torch.zeros(2, 2, 3)
    following = bad((2, 3), (1, 0), NAN)
    with pytest.raises(ValueError, match=r"next_values.*\(?1, ?0"):
        gae(r, v, next_values=following)
    ended = torch.zeros(2, 3, dtype=torch.bool)
    ended[1, 0] = True  # not bootstrapped from: not read
    assert gae(r, v, next_values=following, terminated=ended).advantages.isfinite().all()


def test_non_finite_last_value(backend: str) -> None:
    r, v = torch.zeros(2, 2, 3)
    with pytest.raises(ValueError, match=r"last_values.*\b1\b"):
        gae(r, v, last_values=row(0.0, INF))
    ended = torch.zeros(2, 3, dtype=torch.bool)
    ended[1, 2] = True
    assert gae(r, v, last_values=row(0.0, INF), terminated=ended).advantages.isfinite().all()
    cu = torch.tensor([0, 2, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"last_values.*\b1\b"):
        gae(r[0], v[0], last_values=row(0.0, NAN), cu_seqlens=cu)


@pytest.mark.parametrize(
    ("shape", "at", "where", "extra"),
    [
        ((3, 4), (1, 2), r"\(?1, ?2", {}),
        ((4, 3), (2, 1), r"\(?2, ?1", {"time_dim": 0}),
        ((7,), (5,), r"\b5\b", {"cu_seqlens": torch.tensor([0, 4, 7], dtype=torch.int32)}),
    ],
    ids=["batch", "time_first", "packed"],
)
def test_overflow_names_its_place(
    backend: str, shape: tuple[int, ...], at: tuple[int, ...], where: str, extra: dict[str, Any]
) -> None:
    ends = torch.ones(shape, dtype=torch.bool)  # every transition on its own
    with pytest.raises(ValueError, match=where):
        gae(bad(shape, at, 3e38), bad(shape, at, -3e38), terminated=ends, **extra)


def test_overflow_in_the_sum(backend: str) -> None:
    with pytest.raises(ValueError):
        gae(torch.full((4,), 1.5e38), torch.zeros(4), lam=1.0)


def test_overflow_in_the_returns_only(backend: str) -> None:
    """Advantages [2e38, 2e38] and value 2e38 are finite; their sum is not."""
    with pytest.raises(ValueError, match=r"\b0\b"):
        gae(row(2e38, 2e38), row(2e38, 0.0), lam=1.0)


def test_no_overflow_where_the_result_has_none(backend: str) -> None:
    """The sum of the first two rewards alone would overflow; no advantage does."""
    out = gae(row(2e38, 2e38, -2e38), torch.zeros(3), lam=1.0)
    assert out.advantages.tolist() == pytest.approx([2e38, 0, -2e38])


@pytest.mark.parametrize("layout", ["batch", "time_first", "packed"])
def test_contradicting_flags(backend: str, layout: str) -> None:
    r, v = torch.zeros(2, 2, 3)
    bootstrap, continues = torch.ones(2, 2, 3, dtype=torch.bool)
    bootstrap[1, 0] = False
    extra: dict[str, Any] = {}
    where = r"\(?1, ?0"
    if layout == "time_first":
        r, v, bootstrap, continues = (x.T for x in (r, v, bootstrap, continues))
        extra, where = {"time_dim": 0}, r"\(?0, ?1"
    elif layout == "packed":
        r, v, bootstrap, continues = (x.flatten() for x in (r, v, bootstrap, continues))
        extra, where = {"cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32)}, r"\b3\b"
    with pytest.raises(ValueError, match=rf"(?s)continues.*{where}"):
        gae(r, v, bootstrap=bootstrap, continues=continues, **extra)


@pytest.mark.parametrize(
    "flags",
    [
        {"truncated": row(F_, T_, F_)},
        {"continues": row(T_, F_, T_)},
        {"bootstrap": row(T_, T_, T_), "continues": row(F_, T_, T_)},
    ],
    ids=["truncated", "continues", "both"],
)
def test_a_cut_inside_a_row_needs_next_values(backend: str, flags: dict[str, Tensor]) -> None:
    r, v = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="next_values"):
        gae(r, v, **flags)
    with pytest.raises(ValueError, match="next_values"):
        gae(r, v, **flags, last_values=torch.tensor(1.0))
    gae(r, v, **flags, next_values=torch.zeros(3))


def test_a_cut_at_the_last_transition_needs_none(backend: str) -> None:
    r, v = row(1.0, 2.0, NAN), row(0.5, 0.6, NAN)
    out = gae(r, v, truncated=row(F_, T_, F_), mask=row(T_, T_, F_), last_values=torch.tensor(4.0))
    assert out.advantages[1].item() == pytest.approx(2 + 4 - 0.6)
    cu = torch.tensor([0, 2, 3], dtype=torch.int32)
    gae(*torch.zeros(2, 3), truncated=row(F_, T_, T_), cu_seqlens=cu)


# Properties ---------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(0, 2**20))
def test_packed_and_padded_agree(backend: str, data: st.DataObject, seed: int) -> None:
    """The same sequences packed, right-padded and left-padded, with poison in the padding."""
    torch.manual_seed(seed)
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    width, total = max(lengths) + data.draw(st.integers(0, 2)), sum(lengths)
    gamma, lam = data.draw(st.sampled_from([(1.0, 0.95), (0.9, 1.0), (0.5, 0.0)]))
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    r, v, following = torch.randn(3, total)
    taken, last = torch.rand(total) < 0.8, torch.randn(len(lengths))
    flags = _flags(r) if data.draw(st.booleans()) else {}
    options: dict[str, Any] = {
        "gamma": gamma,
        "lam": lam,
        "mask_mode": data.draw(st.sampled_from(["skip", "decay"])),
    }
    if flags:
        flags["next_values"] = following
    else:
        options["last_values"] = last
    packed = gae(r, v, mask=taken, cu_seqlens=cu, **flags, **options)
    exact = oracle.gae_rows(r, v, mask=taken, cu_seqlens=cu, **flags, **options)
    for mine, truth in zip(packed, exact, strict=True):
        assert torch.allclose(mine.double(), truth, atol=1e-5)

    for side in ("right", "left"):
        where = torch.zeros(len(lengths), width, dtype=torch.bool)
        for s, n in enumerate(lengths):
            where[s, slice(0, n) if side == "right" else slice(width - n, width)] = True

        def pad(x: Tensor, fill: Any, where: Tensor = where) -> Tensor:
            out = torch.full(where.shape, fill, dtype=x.dtype)
            out[where] = x
            return out

        padded = gae(
            pad(r, NAN),
            pad(v, INF),
            mask=pad(taken, False),
            **{k: pad(x, NAN if x.is_floating_point() else True) for k, x in flags.items()},
            **options,
        )
        for a, b in zip(padded, packed, strict=True):
            assert torch.allclose(a[where], b, atol=1e-6)
            assert (a[~where] == 0).all()


@given(seed=st.integers(0, 2**20))
def test_all_ones_mask_and_permuted_rows(backend: str, seed: int) -> None:
    torch.manual_seed(seed)
    r, v = draw((5, 7), torch.float32)
    order = torch.randperm(5)
    plain = gae(r, v)
    masked = gae(r, v, mask=torch.ones(5, 7, dtype=torch.bool))
    permuted = gae(r[order], v[order])
    for a, b, c in zip(plain, masked, permuted, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
        assert torch.allclose(a[order], c, atol=1e-6)
