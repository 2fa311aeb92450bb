"""The kernels of `gae` in C++ and CUDA: layouts, strides, lanes, instruction sets, threads."""

import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrix import CUDA_DEVICE
from measure import CAPABILITIES, on_instruction_set
from torch import Tensor

from ppokern import available_backends
from ppokern.gae import kernel_native
from ppokern.gae.reference import Inputs, Options

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="no C++ kernels built")
KERNELS = {"cpu": kernel_native.gae}
if "cuda" in available_backends() and CUDA_DEVICE == "cpu":  # compiled by g++
    KERNELS["cuda"] = partial(kernel_native.gae, on_cuda=True)
gae = kernel_native.gae  # the one that `run` takes
on_cpu = pytest.mark.parametrize("kernel", ["cpu"], indirect=True)

FLAGS = ("none", "bootstrap", "continues", "both")
LAYOUTS = ("BT", "TB", "packed")
Call = dict[str, Any]


@pytest.fixture(autouse=True, params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys.modules[__name__], "gae", KERNELS[request.param])
    return request.param


def walk(call: Call, at: list[tuple[int, ...]], last_value: float, real: type) -> list[list[float]]:
    """One sequence in a plain loop; `at` are the places of its steps in the tensors."""
    get = {
        name: [x[i].item() for i in at]
        for name, x in call.items()
        if isinstance(x, Tensor) and x.shape == call["rewards"].shape
    }
    n = len(at)
    mask = get.get("mask", [True] * n)
    bootstrap = get.get("bootstrap", [True] * n)
    continues = get.get("continues", bootstrap)
    gamma, decay = real(call["gamma"]), real(call["gamma"] * call["lam"])
    advantages, returns = [0.0] * n, [0.0] * n
    next_advantage, next_value, last = real(0), real(last_value), True
    for t in reversed(range(n)):
        if not mask[t]:
            if call["masked_are_steps"] and not last:
                next_advantage = gamma * next_value + decay * next_advantage
                next_value = real(0)
            continue
        reward, value = real(get["rewards"][t]), real(get["values"][t])
        follower = real(get["next_values"][t]) if "next_values" in get else next_value
        advantage = reward + gamma * (follower if bootstrap[t] else real(0)) - value
        if continues[t] and not last:
            advantage += decay * next_advantage
        cut = bootstrap[t] and not continues[t] and "next_values" not in get
        if not last and ((continues[t] and not bootstrap[t]) or cut):
            advantage = real(np.nan)
        advantages[t], returns[t] = float(advantage), float(advantage + value)
        next_advantage, next_value, last = advantage, value, False
    return [advantages, returns]


def expected(call: Call, real: type = np.float64) -> Tensor:
    """Advantages and returns of all sequences, ``(2, *layout)``."""
    shape = call["rewards"].shape
    out = torch.zeros(2, *shape, dtype=torch.float64)
    if call["cu_seqlens"] is not None:
        bounds = call["cu_seqlens"].tolist()
        rows = [[(i,) for i in range(a, b)] for a, b in itertools.pairwise(bounds)]
    elif len(shape) == 1:
        rows = [[(t,) for t in range(shape[0])]]
    elif call["time_dim"] == 0:
        rows = [[(t, s) for t in range(shape[0])] for s in range(shape[1])]
    else:
        rows = [[(s, t) for t in range(shape[1])] for s in range(shape[0])]
    last_values = call["last_values"]
    last = [0.0] * len(rows) if last_values is None else last_values.reshape(-1).tolist()
    for row, last_value in zip(rows, last, strict=True):
        for place, *pair in zip(row, *walk(call, row, last_value, real), strict=True):
            out[(slice(None), *place)] = torch.tensor(pair, dtype=torch.float64)
    return out


def make(
    layout: str,
    lengths: list[int],
    *,
    flags: str = "none",
    masked: float = 0.0,
    next_values: bool = False,
    last_values: bool = True,
    decay: bool = False,
    seed: int = 0,
) -> Call:
    """Draw a valid call; `lengths` of dense layouts are all the first one."""
    rng = torch.Generator().manual_seed(seed)
    shape: tuple[int, ...] = (len(lengths), lengths[0]) if lengths else (0, 3)
    if layout == "TB":
        shape = shape[::-1]
    if layout == "T":
        shape = (lengths[0],)
    if layout == "packed":
        shape = (sum(lengths),)
    per_sequence = {"BT": shape[:1], "TB": shape[1:], "T": ()}.get(layout, (len(lengths),))

    def floats(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=rng)

    def bools(share: float) -> Tensor:
        return torch.rand(shape, generator=rng) < share

    bounds = [0, *itertools.accumulate(lengths)]
    call: Call = dict(
        rewards=floats(shape), values=floats(shape), mask=None, bootstrap=None, continues=None,
        next_values=floats(shape) if next_values else None,
        last_values=floats(per_sequence) if last_values else None,
        cu_seqlens=torch.tensor(bounds) if layout == "packed" else None,
        gamma=0.97, lam=0.9, masked_are_steps=decay, time_dim=0 if layout == "TB" else -1,
        check=True,
    )  # fmt: skip
    if masked:
        call["mask"] = bools(1 - masked)
        for name in ("rewards", "values", "next_values"):
            if call[name] is not None:
                call[name][~call["mask"]] = torch.nan  # never read
    if flags in ("bootstrap", "both"):
        call["bootstrap"] = bools(0.8)
        if next_values:
            call["next_values"][~call["bootstrap"]] = torch.nan  # neither is this
    if flags == "both" and next_values:
        call["continues"] = call["bootstrap"] & bools(0.8)
    elif flags in ("both", "continues"):
        # without next_values every transition but the last must go on, or end
        call["continues"] = bools(0.8) if next_values else call["bootstrap"]
    return call


def run(call: Call) -> tuple[Tensor, bool]:
    x = Inputs(**{name: call[name] for name in Inputs._fields})
    o = Options(**{name: call[name] for name in Options._fields})
    advantages, returns, finite = gae(x, o, call["check"])
    assert advantages.dtype == returns.dtype == torch.float32
    return torch.stack([advantages, returns]), finite


def assert_right(call: Call) -> None:
    out, finite = run(call)
    exact, eager = expected(call), expected(call, np.float32)
    assert finite
    error, allowed = (out - exact).abs(), 2 * (eager - exact).abs() + 1e-6
    assert bool((error <= allowed).all()), f"off by {float((error - allowed).max())}"


# 37 and 70 sequences: some in vectors of each width, some in four at once, and a rest
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("masked", [0.0, 0.4])
@pytest.mark.parametrize("next_values", [False, True])
@pytest.mark.parametrize("decay", [False, True])
def test_equals_a_plain_loop(
    layout: str, flags: str, masked: float, next_values: bool, decay: bool
) -> None:
    options: Any = dict(flags=flags, masked=masked, next_values=next_values, decay=decay)
    for lengths in ([21] * 37, [5] * 70, [1] * 3, [40]):
        if layout == "packed":
            lengths = [(i * n) % (2 * n) for i, n in enumerate(lengths)]  # 0, n, 0, n, …
            lengths[-1] += 33
        assert_right(make(layout, lengths, **options))


@given(
    st.sampled_from([*LAYOUTS, "T"]),
    st.lists(st.integers(0, 50), min_size=1, max_size=40),
    st.sampled_from(FLAGS),
    st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_equals_a_plain_loop_on_any_shape(
    layout: str,
    lengths: list[int],
    flags: str,
    masked: float,
    next_values: bool,
    last_values: bool,
    decay: bool,
    seed: int,
) -> None:
    options: Any = dict(next_values=next_values, last_values=last_values, decay=decay, seed=seed)
    assert_right(make(layout, lengths, flags=flags, masked=masked, **options))


@pytest.mark.parametrize("layout", [*LAYOUTS, "T"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_empty(layout: str, lengths: list[int]) -> None:
    call = make(layout, lengths or ([0] if layout == "T" else []))
    out, finite = run(call)
    assert finite
    assert out.shape == (2, *call["rewards"].shape)


def stretched(x: Tensor) -> Tensor:
    """Return `x` with gaps between its elements, and between its rows."""
    size = [4 * n + 3 for n in x.shape]
    wide = torch.full(size, torch.nan) if x.is_floating_point() else torch.ones(size).bool()
    view = wide[tuple(slice(2, 2 + 4 * n, 4) for n in x.shape)]
    return view.copy_(x)


def transposed(x: Tensor) -> Tensor:
    """Return `x` with its dimensions in the other order in memory."""
    return x.t().contiguous().t() if x.dim() == 2 else x


@pytest.mark.parametrize("layout", [*LAYOUTS, "T"])
@pytest.mark.parametrize("masked", [0.0, 0.3])
def test_strides(layout: str, masked: float) -> None:
    lengths = [19] * (1 if layout == "T" else 67)
    call = make(layout, lengths, masked=masked, flags="both", next_values=True, last_values=True)
    out, _ = run(call)
    names = [name for name, x in call.items() if isinstance(x, Tensor) and name != "cu_seqlens"]
    for one in [[name] for name in names] + [names]:
        for restride in (stretched, transposed):
            other = call | {name: restride(call[name]) for name in one}
            assert torch.equal(run(other)[0], out), (restride, one)
    rewards = call["rewards"].flatten()[0].nan_to_num()
    flat = call | {"rewards": rewards.expand_as(call["rewards"])}  # stride 0
    dense = call | {"rewards": flat["rewards"].contiguous()}
    assert torch.equal(run(flat)[0], run(dense)[0])


@pytest.mark.parametrize("narrow_dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_are_widened(narrow_dtype: torch.dtype) -> None:
    call = make("BT", [9] * 20, next_values=True)
    narrow = {
        name: call[name].to(narrow_dtype)
        for name in ("rewards", "values", "next_values", "last_values")
    }
    assert_right(call | narrow)


def test_int32_boundaries() -> None:
    call = make("packed", [3, 0, 20, 7])
    narrow = call | {"cu_seqlens": call["cu_seqlens"].to(torch.int32)}
    assert torch.equal(run(call)[0], run(narrow)[0])


@pytest.mark.parametrize(
    "bounds", [[0, 5, 3, 9], [1, 9], [0, 10], [0, 8], [0, -1, 9], [0, 2**40, 9], [0]]
)
def test_boundaries_out_of_bounds_are_refused(kernel: str, bounds: list[int]) -> None:
    """On CUDA, where nobody reads them back, all results are NaN."""
    call = make("packed", [9], last_values=False) | {"cu_seqlens": torch.tensor(bounds)}
    if kernel == "cuda":
        out, finite = run(call)
        assert out.isnan().all() and not finite
        return
    with pytest.raises(ValueError, match="cu_seqlens: expected non-decreasing values from 0 to 9"):
        run(call)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [60, 65, 511, 514, 1023, 2051])
def test_lengths_about_tiles(layout: str, length: int) -> None:
    """Several tiles of every team, rows that begin at any address, a gap as long as two tiles."""
    lengths = [length - i for i in range(5)] if layout == "packed" else [length] * 5
    call = make(layout, lengths, flags="both", masked=0.1, next_values=True)
    for decay in (False, True):
        assert_right(call | {"masked_are_steps": decay})
    call = make(layout, lengths, masked=0.1, decay=True)
    call["mask"].view(-1)[length // 4 : -length // 8] = False
    assert_right(call)


# What is wrong is NaN at its place, and reported -------------------------------------------------


def one(*rewards: float, **options: Any) -> Call:
    call = make("T", [len(rewards)], last_values=False)
    return call | {"rewards": torch.tensor(rewards), "values": torch.zeros(len(rewards))} | options


def flags(*xs: int) -> Tensor:
    return torch.tensor(xs) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"bootstrap": flags(1, 0, 1, 1), "continues": flags(1, 1, 1, 1)},
        {"continues": flags(1, 0, 1, 1)},
        {"bootstrap": flags(1, 1, 1, 1), "continues": flags(1, 0, 1, 1)},
    ],
)
def test_a_transition_without_what_it_needs_is_nan(wrong: Call) -> None:
    out, finite = run(one(1, 1, 1, 1, **wrong))
    assert not finite
    assert out.isnan().tolist() == [[True, True, False, False]] * 2
    # at a masked position nobody looks at the flags
    assert run(one(1, 1, 1, 1, **wrong, mask=flags(1, 0, 1, 1)))[1]
    # at the last transition `continues` is not read, nor is a cut one
    assert run(one(1, 1, 1, 1, **wrong, mask=flags(1, 1, 0, 0)))[1]


def test_a_cut_needs_next_values_only() -> None:
    call = one(1, 1, continues=flags(0, 1), next_values=torch.tensor([3.0, 0]))
    assert run(call)[1]
    assert not run(call | {"bootstrap": flags(0, 1), "continues": flags(1, 1)})[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["rewards", "values", "next_values", "last_values"])
def test_anything_not_finite_is_reported(layout: str, bad: float, name: str) -> None:
    call = make(layout, [30] * 70, masked=0.2, next_values=name == "next_values")
    for at in (0, 7, call[name].numel() - 1):
        spoilt = call[name].clone()
        spoilt.view(-1)[at] = bad
        masked = None if name == "last_values" else call["mask"].clone()
        if masked is not None:
            masked.view(-1)[at] = True
        spoilt_call = call | {name: spoilt, "mask": masked}
        if name == "last_values":
            for other in ("rewards", "values"):
                spoilt_call[other] = spoilt_call[other].nan_to_num()
        else:
            for other in {"rewards", "values", "next_values"} - {name}:
                if call[other] is not None:
                    spoilt_call[other] = call[other].nan_to_num()
        assert not run(spoilt_call)[1], at
        assert run(spoilt_call | {"check": False})[1]


def test_overflow_is_reported() -> None:
    assert not run(one(3e38, 3e38))[1]
    assert not run(one(3e38) | {"values": torch.tensor([-3e38])})[1]


def test_nothing_beyond_an_end_gets_in() -> None:
    # the second transition does not continue: the infinity behind it is its own error alone
    out, finite = run(one(1, 1, 3e38, 3e38, bootstrap=flags(1, 0, 1, 1)))
    assert not finite
    assert out[:, :2].isfinite().all()


# Same bits ----------------------------------------------------------------------------------------


def battery() -> list[Call]:
    """Return calls through every path of the kernel."""
    return [
        make(layout, [29] * 70 if layout != "packed" else [(7 * i) % 61 for i in range(70)],
             flags=flags, masked=masked, next_values=next_values, decay=decay)
        for layout in LAYOUTS
        for flags in ("none", "both")
        for masked in (0.0, 0.3)
        for next_values in (False, True)
        for decay in (False, True)
    ]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [0.0, 0.3])
def test_a_sequence_alone_or_among_others(layout: str, masked: float) -> None:
    lengths = [(13 * i) % 50 for i in range(70)] if layout == "packed" else [45] * 70
    call = make(layout, lengths, flags="both", masked=masked, next_values=True)
    out, _ = run(call)
    bounds = [0, *itertools.accumulate(lengths)]
    for s in (0, 1, 16, 63, 64, 69):

        def pick(x: Tensor, s: int = s) -> Tensor:
            if x.shape != call["rewards"].shape:
                return x[s : s + 1]
            if layout == "packed":
                return x[bounds[s] : bounds[s + 1]]
            return x[:, s : s + 1] if layout == "TB" else x[s : s + 1]

        alone = {name: pick(x) for name, x in call.items() if isinstance(x, Tensor)}
        if layout == "packed":
            alone["cu_seqlens"] = torch.tensor([0, lengths[s]])
        assert torch.equal(run(call | alone)[0], torch.stack([pick(x) for x in out])), s


@on_cpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads(layout: str) -> None:
    """Enough elements for several threads, and fewer sequences than threads."""
    for lengths in ([700] * 101, [70_000]):
        if layout == "packed":
            lengths = [n + (-1) ** i * i for i, n in enumerate(lengths)] + [0, 0]
        call = make(layout, lengths, flags="both", masked=0.1, next_values=True)
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(run(call))
        assert all(finite for _, finite in outs)
        assert torch.equal(outs[0][0], outs[1][0])
        assert torch.equal(outs[0][0], outs[2][0])


@on_cpu
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_instruction_sets_give_the_same_bits(capability: str, tmp_path: Path) -> None:
    results = "[t.run(call)[0] for call in t.battery()]"
    theirs = on_instruction_set(capability, "test_gae_native", results, tmp_path)
    for call, their in zip(battery(), theirs, strict=True):
        mine, _ = run(call)
        assert torch.equal(mine, their)


@on_cpu
def test_an_unknown_instruction_set_is_an_error() -> None:
    command = [sys.executable, "-c", "from ppokern import _native; _native.cpu_capability()"]
    environment = os.environ | {"PPOKERN_CPU_CAPABILITY": "sse9"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "ValueError: PPOKERN_CPU_CAPABILITY: expected default, avx2, avx512 or" in done.stderr
