"""One way to register an op: eager calls and `torch.compile` run the same functions.

Eager mode goes through `torch.autograd.Function`, which costs a few microseconds a call; under
`torch.compile` the call goes through `torch.library`, which keeps the graph whole. Both are made
here from one forward, one backward and their shapes.
"""

import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

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
    op, in_graph = _custom_op(name, forward, fake, schema)
    if backward is None or setup_context is None:
        return _by_mode(in_graph, forward)
    gradient_op = gradient
    if gradient is not None and gradient_fake is not None:
        gradient_op, _ = _custom_op(f"{name}_backward", gradient, gradient_fake)

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

    return _by_mode(in_graph, eager)


Coefficient = Annotated[float, "0 switches its term off"]
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    Coefficient: "coefficient",
    int: "SymInt",
    bool: "bool",
    str: "str",
}


def schema_of(*structs: type, returns: int) -> str:
    """Return the schema of an op that takes the fields of NamedTuples, then the backend's name.

    Numbers stand in it as such; `_custom_op` makes tensors of them.
    """
    arguments = [
        f"{_SCHEMA_TYPES[kind]} {name}"
        for struct in structs
        for name, kind in struct.__annotations__.items()
    ]
    return f"({', '.join([*arguments, 'str backend'])}) -> ({', '.join(['Tensor'] * returns)})"


_IN_GRAPHS = {"float": "Tensor", "float?": "Tensor?", "coefficient": "Tensor?"}


def _custom_op(
    name: str, kernel: Callable[..., Any], fake: Callable[..., Any], schema: str | None = None
) -> tuple[Any, Callable[..., Any]]:
    """Register an op of `torch.library`; return it, and a function that calls it with numbers.

    To a graph a number is a constant, and each new value a new graph. So the op takes numbers as
    0-d tensors, which its kernel reads when it runs. A coefficient that is 0 in every call of a
    graph is None. Of one that varies the graph has all outputs: they are 0 where it is.
    """
    schema = schema or torch.library.infer_schema(kernel, mutates_args=())
    arguments, returns = schema.lstrip("(").split(") -> ")
    kinds, names = zip(*(argument.split(" ", 1) for argument in arguments.split(", ")), strict=True)
    places = [i for i, kind in enumerate(kinds) if kind in _IN_GRAPHS]
    in_graph = (f"{_IN_GRAPHS.get(k, k)} {n}" for k, n in zip(kinds, names, strict=True))

    def with_numbers(args: tuple, read: Callable[[Tensor], float]) -> list[Any]:
        given = list(args)
        for i in places:
            if given[i] is not None:
                given[i] = read(given[i])
            elif kinds[i] == "coefficient":
                given[i] = 0.0
        return given

    def unknown(_: Tensor) -> float:
        return math.nan  # other than 0, and nothing else is looked at

    def run(*args: Any) -> Any:
        given = with_numbers(args, Tensor.item)
        out = kernel(*given)
        if any(kinds[i] == "coefficient" and given[i] == 0 and args[i] is not None for i in places):
            promised = fake(*with_numbers(args, unknown))
            out = (
                x if x.shape == p.shape else p.zero_() for x, p in zip(out, promised, strict=True)
            )
            out = tuple(out)
        return out

    def call(*args: Any) -> Any:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        given = list(args)
        for i in places:
            if given[i] is not None:
                off = kinds[i] == "coefficient" and statically_known_true(given[i] == 0)
                given[i] = None if off else scalar(given[i])
        return op(*given)

    op = torch.library.custom_op(
        f"ppokern::{name}", run, mutates_args=(), schema=f"({', '.join(in_graph)}) -> {returns}"
    )
    op.register_fake(lambda *args: fake(*with_numbers(args, unknown)))
    return op, call


def scalar(x: float) -> Tensor:
    """Return a number as a 0-d float64 tensor on the CPU, which any device reads without a wait."""
    if torch.compiler.is_compiling():  # a sum, as that is what torch keeps open for other values
        return torch.zeros((), dtype=torch.float64, device="cpu") + x
    return torch.scalar_tensor(x, dtype=torch.float64, device="cpu")


def is_on(coefficient: float) -> bool:
    """Return whether a coefficient is not 0, where a graph for either case is worth it.

    One that no guard can look at (a number of numpy's) is on.
    """
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return guard_or_true(coefficient != 0)
    return coefficient != 0


def _by_mode(compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        graph = torch.compiler.is_compiling() or _address.tracing(args)
        return compiled(*args) if graph else eager(*args)

    return call
