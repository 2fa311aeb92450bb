"""One way to register an op: eager calls and `torch.compile` run the same functions.

Eager mode goes through `torch.autograd.Function`, which costs a few microseconds a call; under
`torch.compile` the call goes through `torch.library`, which keeps the graph whole. Both are made
here from one forward, one backward and their shapes.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ppokern import _address

T = TypeVar("T")


def loadable(kind: type[T]) -> type[T]:
    """Let `torch.load`, with its default, take a NamedTuple of tensors that an op returned."""
    torch.serialization.add_safe_globals([kind])
    return kind


class _SecondDerivative(torch.autograd.Function):
    """Pass gradients on; say so when somebody differentiates them."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor | None) -> Any:
        ctx.name = name
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{ctx.name}: the second derivative is not implemented")


def register(
    name: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., tuple] | None = None,
    gradient: Callable[..., Any] | None = None,
    gradient_fake: Callable[..., Any] | None = None,
    schema: str | None = None,
    learned: int = sys.maxsize,
) -> Callable[..., Any]:
    """Register ``ppokern::name`` and return the function that ops call.

    Args:
        name: of the op in ``torch.ops.ppokern``.
        forward: takes and returns what its annotations say (they are the schema).
        fake: the same signature, returns tensors of the right shape and dtype.
        setup_context: ``(ctx, inputs, output)``, as in `torch.autograd.Function`.
        backward: ``(ctx, gradient, *grads)`` returns a gradient or None for each input, or for the
            `learned` ones; calls `gradient`.
        gradient: the kernel of the backward pass, registered as ``ppokern::name_backward``.
        gradient_fake: its shapes.
        schema: of `forward`, where its annotations do not say it.
        learned: how many inputs, from the first on, may take a gradient; by default all. To torch
            the others are one constant: each argument costs time.
    """
    op = torch.library.custom_op(f"ppokern::{name}", forward, mutates_args=(), schema=schema)
    op.register_fake(fake)
    if backward is None or setup_context is None:
        return _by_mode(op, forward)
    gradient_op = gradient
    if gradient is not None and gradient_fake is not None:
        gradient_op = torch.library.custom_op(
            f"ppokern::{name}_backward", gradient, mutates_args=()
        )
        gradient_op.register_fake(gradient_fake)

    def differentiate(compiled: bool, ctx: Any, *grads: Tensor | None) -> tuple:
        ctx.compiled = compiled
        kernel = gradient_op if compiled else gradient
        if not torch.is_grad_enabled():
            return backward(ctx, kernel, *grads)
        with torch.no_grad():
            result = backward(ctx, kernel, *grads)
        # attached to what they depend on, so that a second derivative is an error and not a zero
        return _SecondDerivative.apply(name, len(result), *result, *ctx.saved_tensors, *grads)

    def differentiate_compiled(ctx: Any, *grads: Tensor | None) -> tuple:
        result = differentiate(True, ctx, *grads)
        return *result, *(None,) * (len(ctx.needs_input_grad) - len(result))

    op.register_autograd(differentiate_compiled, setup_context=setup_context)

    def forward_eagerly(ctx: Any, *inputs: Any) -> Any:
        # a `setup_context` of its own would have torch bind the signature anew for each call
        inputs = *inputs[:-1], *inputs[-1]
        output = forward(*inputs)
        setup_context(ctx, inputs, output)
        return output

    def differentiate_eagerly(ctx: Any, *grads: Tensor | None) -> tuple:
        grads = tuple(_address.gradient(name, grad) for grad in grads)
        return *differentiate(False, ctx, *grads)[:learned], None

    function = type(
        name,
        (torch.autograd.Function,),
        {
            "forward": staticmethod(forward_eagerly),
            "backward": staticmethod(differentiate_eagerly),
        },
    )

    def eager(*inputs: Any) -> Any:
        forward_mode = forward_ad._current_level >= 0  # its derivative is an error, not left out
        if forward_mode or torch.is_grad_enabled():
            first = inputs[:learned]
            for x in first:
                if isinstance(x, Tensor) and (forward_mode or x.requires_grad):
                    return function.apply(*first, inputs[learned:])
        return forward(*inputs)

    return _by_mode(op, eager)


_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "SymInt",
    bool: "bool",
    str: "str",
}


def schema_of(*structs: type, returns: int) -> str:
    """Return the schema of an op that takes the fields of NamedTuples, then the backend's name."""
    arguments = [
        f"{_SCHEMA_TYPES[kind]} {name}"
        for struct in structs
        for name, kind in struct.__annotations__.items()
    ]
    return f"({', '.join([*arguments, 'str backend'])}) -> ({', '.join(['Tensor'] * returns)})"


def _by_mode(compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        graph = torch.compiler.is_compiling() or _address.tracing(args)
        return compiled(*args) if graph else eager(*args)

    return call
