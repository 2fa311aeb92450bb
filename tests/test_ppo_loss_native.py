"""The C++ kernel of the PPO losses: lanes, blocks, segments, strides, instruction sets, threads.

What every backend does alike stands in test_ppo_loss.py.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure import CAPABILITIES, on_instruction_set, usage
from oracle import assert_within_rule
from test_ppo_loss import AGGREGATES, check_joint, draw_joint
from torch import Tensor

from ppokern import available_backends, use_backend
from ppokern.ppo_loss import kernel_native, reference
from ppokern.ppo_loss.op import checked_options
from ppokern.ppo_loss.reference import Inputs, Options, Output

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="no C++ kernels built")

INF, NAN = torch.inf, torch.nan
Call = tuple[Inputs, Options]
# around vectors, blocks (of 64, 128 or 256 tokens) and a segment
EDGES = [n + d for n in (4, 8, 16, 32, 64, 128, 256, 512, 2**14) for d in (-1, 0, 1)]
SIZES = [1, 2, *EDGES, 40_001]


def make(shape: tuple[int, ...], cu_seqlens: Tensor | None = None, **options: Any) -> Call:
    """Draw a call with every part that `options` switch on; masks unless ``mask=False``."""
    tensors = draw_joint(shape, torch.float32, options)
    if options.pop("weighted", False):
        tensors["weights"] = torch.rand(shape)
    if options.pop("mask", True):
        tensors["mask"], tensors["value_mask"] = torch.rand(2, *shape) < 0.7
    for name in ("denominator", "value_denominator"):
        if name in options:
            tensors[name] = torch.tensor(options.pop(name))
    x = Inputs(**tensors, cu_seqlens=cu_seqlens)
    defaults: dict[str, Any] = {"value_clip_range": 0.2, "log_ratio_limit": 20.0}
    return x, checked_options(**(defaults | options))


def cast(x: Inputs, dtype: torch.dtype) -> Inputs:
    return Inputs(*(t.to(dtype) if t is not None and t.is_floating_point() else t for t in x))


def assert_right(call: Call, out: Output) -> None:
    """Against the specification in float64, with that in float32 as the peer."""
    x, o = call
    exact, peer = reference.forward(cast(x, torch.float64), o), reference.forward(x, o)
    names = reference.stat_names(x, o)
    summed = o.aggregate in ("sum", "sequence_sum")
    size = float(exact.stats[names.index("n_tokens")]) if summed else 1.0
    assert_within_rule(out.loss, peer.loss, exact.loss, unit=size)
    for i, name in enumerate(names):
        unit = size if name in ("policy_loss", "value_loss") else 1.0
        assert_within_rule(out.stats[i], peer.stats[i], exact.stats[i], unit=unit)
    for mine, theirs, truth in zip(out[2:], peer[2:], exact[2:], strict=True):
        largest = truth.abs().max().item() if truth.numel() else 0.0
        assert_within_rule(mine, theirs, truth, unit=largest)


def same(a: Output, b: Output) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unmasked": {"mask": False},
    "all": {
        "clip_range": (0.3, 0.2), "dual_clip": 2.0, "weighted": True, "entropy_coef": 0.1,
        "kl_coef": 0.3, "aggregate": "sequence_mean", "value_coef": 0.5,
    },
    "sequence": {
        "ratio": "sequence", "clip_range": 0.05, "kl_coef": 0.1, "aggregate": "sequence_sum",
    },
    "none": {
        "aggregate": "none", "entropy_coef": 0.1, "kl_coef": 0.2, "kl_kind": "k1", "mask": False,
    },
    "sequence_none": {"aggregate": "none", "ratio": "sequence", "kl_coef": 0.2, "kl_kind": "k2"},
    "sum": {"aggregate": "sum", "value_clip_range": None, "log_ratio_limit": None},
    "denominator": {"denominator": 7, "value_denominator": 2.5, "value_coef": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", SIZES)
def test_sizes(n: int, case: str) -> None:
    call = make((n,), **CASES[case])
    assert_right(call, kernel_native.forward(*call))


LAYOUTS: dict[str, tuple[tuple[int, ...], Tensor | None]] = {
    "rows": ((67, 301), None),
    "of_one_token": ((700, 1), None),
    "short": ((333, 2, 5), None),
    "long": ((2, 20_000), None),
    "packed": ((1111,), torch.tensor([0, 0, 3, 3, 510, 512, 1111, 1111])),
    "a_token": ((), None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, case: str) -> None:
    call = make(*LAYOUTS[layout], **CASES[case])
    assert_right(call, kernel_native.forward(*call))


@given(
    st.sampled_from(AGGREGATES),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["k1", "k2", "k3", "k3+"]),
    st.sampled_from([0.2, 0.0, INF, (0.3, 0.2)]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([None, 0.7, 20.0]),
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_any_call_against_the_oracle(
    aggregate: str,
    ratio: str,
    kl_kind: str,
    clip_range: Any,
    dual_clip: float | None,
    limit: float | None,
    lengths: list[int],
    value_masked: bool,
    seed: int,
) -> None:
    """The public op, forward and backward, on packed sequences."""
    torch.manual_seed(seed)
    total = sum(lengths)
    options: dict[str, Any] = {
        "entropy_coef": 0.1, "kl_coef": 0.3, "aggregate": aggregate, "ratio": ratio,
        "kl_kind": kl_kind, "clip_range": clip_range, "dual_clip": dual_clip,
        "log_ratio_limit": limit, "mask": torch.rand(total) < 0.8, "value_coef": 1.0,
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)]),
    }  # fmt: skip
    if value_masked:
        options["value_mask"] = torch.rand(total) < 0.5
    with use_backend("cpu"):
        check_joint(draw_joint((total,), torch.float32, options), **options)


def test_nothing_unmasked() -> None:
    for case in CASES.values():
        x, o = make((5, 7), **case)
        x = x._replace(mask=torch.zeros(5, 7).bool(), value_mask=torch.zeros(5, 7).bool())
        assert all((t == 0).all() for t in kernel_native.forward(x, o))


# Numbers that need care ---------------------------------------------------------------------------


def slopes_and_terms(log_ratio: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Of tokens with an advantage of -1 that nothing clips, or of 0 with a KL term."""
    zero = torch.zeros_like(log_ratio)
    kl = options.get("kl_coef", 0.0) != 0
    x = Inputs(
        logprobs=log_ratio, old_logprobs=zero, advantages=zero if kl else zero - 1,
        ref_logprobs=zero if kl else None,
    )  # fmt: skip
    o = checked_options(INF, aggregate="none", **options)
    out = kernel_native.forward(x, o)
    return out.logprob_slopes.double(), out.loss.double()


GRID = torch.cat([torch.linspace(-87, 88.7, 100_003), torch.linspace(-1, 1, 10_001)])
TINY = torch.tensor([10.0**-k for k in range(1, 38)])


def test_the_exponential_is_exact_to_a_rounding() -> None:
    for values in slopes_and_terms(GRID):
        exact = GRID.double().exp()
        assert ((values - exact) / exact).abs().max() < 1.5e-7
    low = torch.tensor([-90.0, -100.0, -103.0, -104.5, -200.0, -3e38])
    _, values = slopes_and_terms(low)
    assert torch.allclose(values, low.double().exp(), rtol=0, atol=2e-45)
    assert slopes_and_terms(torch.tensor([88.8, 100.0, 3e38]))[1].tolist() == [INF] * 3


def test_the_slope_of_k3_is_exact_near_zero_and_far_from_it() -> None:
    d = torch.cat([GRID, -GRID, TINY, -TINY])
    slopes, terms = slopes_and_terms(d, kl_coef=1.0)
    exact = -torch.expm1(-d.double())
    finite = exact.abs() < 3e38
    assert ((slopes - exact) / exact.where(d != 0, 1.0))[finite].abs().max() < 2e-7
    k3 = torch.expm1(-d.double()) + d.double()
    size = torch.maximum(k3, d.double().abs())  # what is added up
    assert ((terms - k3).abs() / size.where(d != 0, 1.0))[finite].max() < 2e-7
    assert slopes_and_terms(torch.tensor([200.0, -200.0]), kl_coef=1.0)[0].tolist() == [1, -INF]


def test_sums_of_equal_numbers_do_not_drift() -> None:
    """Their roundings are equal as well."""
    zero = torch.zeros(20_000)
    for d in torch.linspace(-1, 1, 201):
        x = Inputs(logprobs=zero + d, old_logprobs=zero, advantages=zero - 1, entropy=zero + d)
        o = checked_options(INF, aggregate="sum")
        out = kernel_native.forward(x, o)
        stats = dict(zip(reference.stat_names(x, o), out.stats.double(), strict=True))
        ratio = d.double().exp()
        assert (stats["ratio_mean"] / ratio - 1).abs() < 6e-7
        assert (out.loss / (20_000 * ratio) - 1).abs() < 6e-7
        assert (stats["entropy"] - d).abs() <= 6e-7 * d.abs()


TENSORS = Inputs._fields[:9]


@pytest.mark.parametrize("case", ["all", "sequence", "none", "sequence_none", "sum"])
@pytest.mark.parametrize("name", TENSORS)
def test_what_is_not_finite_goes_where_the_specification_lets_it(name: str, case: str) -> None:
    """Every output, statistics and slopes as well."""
    for value, at in itertools.product((NAN, INF, -INF, 3e38, -3e38), (0, 20, 34)):
        x, o = make((5, 7), **CASES[case])
        if getattr(x, name) is None:
            return
        for mask in (x.mask, x.value_mask):
            if mask is not None:
                mask.view(-1)[at] = True
        getattr(x, name).view(-1)[at] = value
        for mine, theirs in zip(kernel_native.forward(x, o), reference.forward(x, o), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True), (value, at)


@pytest.mark.parametrize("case", CASES)
def test_what_is_masked_is_not_read(case: str) -> None:
    x, o = make((19, 31), **CASES[case] | {"mask": True})
    out = kernel_native.forward(x, o)
    of_values = ("values", "old_values", "returns")
    masks = {name: x.value_mask if name in of_values else x.mask for name in TENSORS}
    for value in (NAN, INF, -INF):
        spoilt = {
            name: getattr(x, name).masked_fill(~mask, value)
            for name, mask in masks.items()
            if mask is not None and getattr(x, name) is not None
        }
        assert same(kernel_native.forward(x._replace(**spoilt), o), out)


# Memory -------------------------------------------------------------------------------------------


def test_strides_and_dtypes() -> None:
    """The same bits as of a contiguous tensor, and of a 16-bit one widened."""
    for case in CASES.values():
        x, o = make((33, 21), **case)
        given = {k: t for k, t in x._asdict().items() if t is not None and t.dim()}
        out = kernel_native.forward(x, o)
        for view in (
            lambda t: t.t().contiguous().t(),
            lambda t: torch.stack([t, t], -1)[..., 1],
            lambda t: torch.cat([t, t], -1)[:, 21:],
        ):
            views = {k: view(t) for k, t in given.items()}
            for some in (views, *({k: t} for k, t in views.items())):
                assert same(kernel_native.forward(x._replace(**some), o), out)
        flat = {k: t[:1].expand(33, 21) for k, t in given.items()}
        dense = {k: t.contiguous() for k, t in flat.items()}
        wide = kernel_native.forward(x._replace(**dense), o)
        assert same(kernel_native.forward(x._replace(**flat), o), wide)
        for dtype in (torch.bfloat16, torch.float16):
            narrow = cast(x, dtype)
            wide = kernel_native.forward(cast(narrow, torch.float32), o)
            assert same(kernel_native.forward(narrow, o), wide)


def test_nothing_is_held_but_the_slopes() -> None:
    x, o = make((1000, 100))
    ran = usage(lambda: kernel_native.forward(x, o))
    assert ran.peak_bytes <= 2 * 4 * 100_000 + 1000


@pytest.mark.parametrize("bounds", [[0, 5, 3, 9], [1, 9], [0, 10], [0, 8], [0, -1, 9]])
def test_boundaries_out_of_bounds_are_refused(bounds: list[int]) -> None:
    call = make((9,), torch.tensor(bounds))
    with pytest.raises(ValueError, match="cu_seqlens: expected non-decreasing values from 0 to 9"):
        kernel_native.forward(*call)


def test_int32_boundaries() -> None:
    x, o = make((9,), torch.tensor([0, 4, 9], dtype=torch.int32), aggregate="sequence_mean")
    wide = x._replace(cu_seqlens=torch.tensor([0, 4, 9]))
    assert same(kernel_native.forward(x, o), kernel_native.forward(wide, o))


# Threads and instruction sets ---------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(700, 101), (70_001,), (1, 65_536)])
def test_threads(shape: tuple[int, ...], case: str) -> None:
    call, outs = make(shape, **CASES[case]), []
    for threads in (1, 2, 5, 2):
        torch.set_num_threads(threads)
        outs.append(kernel_native.forward(*call))
    assert all(same(out, outs[0]) for out in outs)


def battery() -> list[Call]:
    """Return calls through every path of the kernel."""
    torch.manual_seed(0)
    shapes = [(n,) for n in (3, 17, 2**14 + 5)] + [(33, 21)]
    return [make(shape, **case) for shape in shapes for case in CASES.values()]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_instruction_set(capability: str, tmp_path: Path) -> None:
    """They differ by rounding alone."""
    results = "[tuple(t.kernel_native.forward(*call)) for call in t.battery()]"
    results += ", t.slopes_and_terms(t.GRID), t.slopes_and_terms(t.GRID, kl_coef=1.0)"
    outs, *numbers = on_instruction_set(
        capability, "test_ppo_loss_native", f"[{results}]", tmp_path
    )
    for call, out in zip(battery(), outs, strict=True):
        assert_right(call, Output(*out))
    mine = [slopes_and_terms(GRID), slopes_and_terms(GRID, kl_coef=1.0)]
    for ours, theirs in zip(mine, numbers, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=3e-7, atol=1e-7)
