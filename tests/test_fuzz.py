"""Odd arguments, drawn: the right result, or an error that names an argument; never a signal.

Each call runs in a child process of its own, so that a crash is a failed test with its input.
"""

import inspect
import math
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from typing import Any, NamedTuple

import calls
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ppokern
from ppokern._check import FLOATS


class Own(Tensor):
    """A subclass that changes nothing."""


class Odd(NamedTuple):
    """An argument, and the plain one that means the same; without it the call has to fail."""

    value: Any
    same: Any = None
    fails: bool = True


def right(value: Any, same: Any) -> Odd:
    return Odd(value, same, False)


def strided(x: Tensor) -> Odd:
    wide = torch.stack([x, x], -1)[..., 0]
    return right(wide, x)


def turned(x: Tensor) -> Odd:
    return right(x.t().contiguous().t() if x.dim() == 2 else x, x)


def expanded(x: Tensor) -> Odd:
    one = x[:1].expand(x.shape) if x.dim() else x
    return right(one, one.contiguous())


def misaligned(x: Tensor) -> Odd:
    memory = bytearray(x.nbytes + 1)
    moved = torch.frombuffer(memory, dtype=x.dtype, offset=1, count=x.numel()).view(x.shape)
    return right(moved.copy_(x.detach()), x)


def behind(x: Tensor) -> Odd:
    return right(torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape), x)


def freed(x: Tensor) -> Odd:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return Odd(x)


def other_dtype(dtype: torch.dtype) -> Callable[[Tensor], Odd]:
    def make(x: Tensor) -> Odd:
        kinds = (torch.bool, torch.int64, torch.int32)
        if (x.dtype in kinds) != (dtype in kinds) or torch.bool in (x.dtype, dtype):
            return Odd(x.to(dtype), fails=x.dtype != dtype)
        return right(x.to(dtype), x.to(dtype))

    return make


def with_value(value: float) -> Callable[[Tensor], Odd]:
    def make(x: Tensor) -> Odd:
        if not x.is_floating_point() or not x.numel():
            return right(x, x)
        x = x.clone()
        x.view(-1)[-1] = value
        return right(x, x)  # the same error, or the same result

    return make


TENSORS: list[Callable[[Tensor], Odd]] = [
    strided,
    turned,
    expanded,
    misaligned,
    behind,
    freed,
    lambda x: right(x.clone().as_subclass(Own), x),
    lambda x: right(nn.Parameter(x, requires_grad=x.is_floating_point()), x),
    lambda x: Odd(x.to("meta")),
    lambda x: Odd(x.unsqueeze(0)),
    lambda x: Odd(x.reshape(-1)[:0]),
    lambda x: Odd(x.to_sparse()),
    lambda x: Odd(torch.nested.nested_tensor([x.view(-1)] * 2, layout=torch.jagged)),
    lambda x: Odd(torch._efficientzerotensor(x.shape, dtype=x.dtype)),
    lambda x: Odd(x.tolist(), x, x.dim() > 0),
    lambda x: Odd(x.numpy()),
    *(
        other_dtype(d)
        for d in (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool)
    ),
    *(other_dtype(d) for d in (torch.complex64, torch.float8_e4m3fn)),
    *(with_value(v) for v in (math.nan, math.inf, -math.inf, 3e38, 1e-45)),
]
NUMBERS = [0, 1, 2, -1, 0.5, 1e39, -1e39, 1e-50, math.nan, math.inf, -math.inf, 10**400, 2**63]
NUMBERS += [True, "1", None, Fraction(1, 2), np.float32(0.5), np.float64(0.5), np.int64(2)]
NUMBERS += [np.float32("nan"), torch.tensor(0.5), torch.tensor(-1.0), [0.5], (0.1, 0.2), 1j]
MOVED = (("pack", "x"), ("unpack", "values"))  # of any dtype
BOUNDARIES = [[0, 3, 10**6], [0, -5, 9], [0, 7, 3, 9], [0], [], [0, 9, 9, 9], [[0, 9]], [0.0, 9.0]]

EVERY = {
    **calls.every(),
    **calls.packing(),
    **{f"{name}*": call for name, call in calls.packed().items()},
}


def call_of(name: str) -> calls.Call:
    torch.manual_seed(0)
    table = calls.packed() if name[-1] == "*" else {**calls.every(), **calls.packing()}
    return table[name.rstrip("*")]


def odd(name: str, argument: str, which: int) -> Odd:
    """One odd value of an argument; a missing one counts as a number."""
    x = call_of(name).args.get(argument)
    if argument == "cu_seqlens":
        return Odd(torch.tensor(BOUNDARIES[which % len(BOUNDARIES)]), fails=False)
    if isinstance(x, Tensor):
        drawn = TENSORS[which % len(TENSORS)](x)
        if (
            (name, argument) in MOVED
            and isinstance(y := drawn.value, Tensor)
            and y.dtype != x.dtype
        ):
            return right(y, y)
        return drawn
    return Odd(NUMBERS[which % len(NUMBERS)], NUMBERS[which % len(NUMBERS)], False)


def outcome(name: str, changes: dict[str, Any], backend: str = "") -> list[Tensor] | Exception:
    """Results and gradients of a call, or its error."""
    call = call_of(name)
    args = {**call.args, **changes}
    leaves = {
        k: x.detach().requires_grad_()
        if k in call.flows and type(x) in (Tensor, Own) and x.dtype in FLOATS
        else x
        for k, x in args.items()
    }
    try:
        with ppokern.use_backend(backend) if backend else nullcontext():
            out = calls.outputs(call.fn(**leaves))
            kept = [o for o in out if o.requires_grad]
            inputs = [
                x for k in call.flows if isinstance(x := leaves[k], Tensor) and x.requires_grad
            ]
            sums = [o.sum() for o in kept]
            grads = (
                torch.autograd.grad(sums, inputs, allow_unused=True, materialize_grads=True)
                if kept and inputs
                else ()
            )
    except Exception as error:  # whatever it is, it is looked at
        return error
    return [*(o.detach() for o in out), *grads]


def fault(name: str, argument: str, which: int) -> str | None:
    """Run one call, beside the specification on plain tensors; return what is wrong with it."""
    call, drawn = call_of(name), odd(name, argument, which)
    ours = outcome(name, {argument: drawn.value})
    if isinstance(ours, Exception):
        names = "|".join(inspect.signature(call.fn).parameters)
        kinds = (ValueError, TypeError, IndexError)
        if not isinstance(ours, kinds) or not re.search(rf"\b({names})\b", str(ours)):
            return f"{type(ours).__name__}: {ours}"
        if drawn.fails or drawn.same is None:
            return None
    elif drawn.fails:
        return f"no error, but {ours}"
    if drawn.same is None:
        return None
    theirs = outcome(name, {argument: odd(name, argument, which).same}, "torch")
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        return None if repr(ours) == repr(theirs) else f"{ours!r}, the specification: {theirs!r}"
    given = (*call.args.values(), drawn.same)
    half = any(isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) for x in given)
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.as_subclass(Tensor).double(), b.double()
        close = torch.allclose(a, b, rtol=2**-7 if half else 1e-4, atol=1e-5, equal_nan=True)
        if a.shape != b.shape or not close:
            return f"{a}, the specification: {b}"
    return None


def in_a_child(name: str, argument: str, which: int) -> str | None:
    """The same in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")  # of prototypes: nested tensors and the like
        try:
            found = fault(name, argument, which)
        except BaseException as error:
            found = f"the test itself: {error!r}"
        os.write(writing, (found or "").encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"the process ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return found or None


@pytest.mark.skipif(sys.platform == "win32", reason="children are forked")
@pytest.mark.parametrize("name", EVERY)
def test_odd_arguments(name: str) -> None:
    arguments = sorted(set(inspect.signature(EVERY[name].fn).parameters) - {"group"})

    @settings(max_examples=20)
    @given(st.sampled_from(arguments), st.integers(0, len(TENSORS) * len(NUMBERS) - 1))
    def drawn(argument: str, which: int) -> None:
        found = in_a_child(name, argument, which)
        assert found is None, f"{argument}, number {which} of what is drawn: {found}"

    drawn()
