"""One way to register an op: eager calls and `torch.compile` run the same functions.

Eager mode goes through `torch.autograd.Function`, which costs a few microseconds a call; under
`torch.compile` the call goes through `torch.library`, which keeps the graph whole. Both are made
here from one forward, one backward and their shapes.
"""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

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
    trained: tuple[str, ...] = (),
    differentiable: int = 1,
    keep: Callable[..., tuple] | None = None,
    backward: Callable[..., Any] | None = None,
    backward_fake: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register ``ppokern::name`` and return the function that ops call, as they would `forward`.

    The annotations of `forward` and `backward` declare their arguments. A parameter is a NamedTuple
    or one of `_SCHEMA_TYPES`, as the fields of a NamedTuple are, which holds tensors alone or none.

    Args:
        name: of the op in ``torch.ops.ppokern``.
        forward: returns a tensor or a NamedTuple of tensors.
        fake: the same signature, returns tensors of the right shape and dtype.
        trained: names of the inputs that may take a gradient.
        differentiable: how many outputs, from the first on, have one.
        keep: ``(*arguments, output)`` returns what `backward` takes behind the first two.
        backward: ``(*grads, needed, *kept)`` returns a gradient for each trained input: `grads` are
            those of the differentiable outputs, `needed` is a NamedTuple that says which are wanted
            (``need_NAME``). What is returned in place of others is not looked at.
        backward_fake: its shapes, where it is an op of its own in graphs; else they look into it.
    """
    layout = _Layout(forward)
    op, in_graph = _custom_op(name, layout, forward, fake)
    if backward is None or keep is None:
        return _by_mode(layout, in_graph, forward)
    flags = [(f"need_{field}", bool) for field in trained]
    needed_type = NamedTuple("Needed", flags)  # type: ignore[arg-type]
    kept = _Layout(backward, needed=needed_type)
    saved = kept.tensors(differentiable + 1)
    places = [layout.place(field) for field in trained]
    backward_op = backward
    if backward_fake is not None:
        raw, _ = _custom_op(f"{name}_backward", kept, backward, backward_fake)

        def backward_op(*args: Any) -> Any:
            return raw(*kept.flat(args))

    def remember(ctx: Any, args: Sequence[Any], output: Any) -> None:
        found = keep(*args, output)
        ctx.save_for_backward(*saved.of(found))
        ctx.others = saved.without(found)
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[differentiable:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, kernel: Any, flags: Sequence[bool], grads: Any) -> tuple:
        if grads[0] is None and all(grad is None for grad in grads):
            return (None,) * len(trained)
        tensors = ctx.saved_tensors
        args = *grads, needed_type(*flags), *saved.put(ctx.others, tensors)
        if not torch.is_grad_enabled():
            return wanted(kernel(*args), flags)
        with torch.no_grad():
            result = wanted(kernel(*args), flags)
        # attached to what they depend on, so that a second derivative is an error and not a zero
        return _SecondDerivative.apply(name, len(result), *result, *tensors, *grads)

    def wanted(found: Any, flags: Sequence[bool]) -> tuple:
        if isinstance(found, Tensor):
            return (found,)  # of the one that is trained
        return tuple(grad if want else None for grad, want in zip(found, flags, strict=True))

    def set_up(ctx: Any, inputs: tuple, output: Any) -> None:
        output = output if layout.output is None else layout.output(*output)
        remember(ctx, layout.deep(inputs), output)

    def differentiate_in_graph(ctx: Any, *grads: Tensor | None) -> tuple:
        flags = [ctx.needs_input_grad[flat] for flat, _, _ in places]
        result = [None] * len(ctx.needs_input_grad)
        found = differentiate(ctx, backward_op, flags, grads[:differentiable])
        for (flat, _, _), grad in zip(places, found, strict=True):
            result[flat] = grad
        return tuple(result)

    op.register_autograd(differentiate_in_graph, setup_context=set_up)

    def forward_eagerly(ctx: Any, *inputs: Any) -> Any:
        # a `setup_context` of its own would have torch bind the signature anew for each call
        output = forward(*inputs[-1])
        remember(ctx, inputs[-1], output)
        return output

    def differentiate_eagerly(ctx: Any, *grads: Tensor | None) -> tuple:
        grads = tuple(_address.gradient(name, grad) for grad in grads[:differentiable])
        return *differentiate(ctx, backward, ctx.needs_input_grad[:-1], grads), None

    function = type(
        name,
        (torch.autograd.Function,),
        {
            "forward": staticmethod(forward_eagerly),
            "backward": staticmethod(differentiate_eagerly),
        },
    )

    def eager(*args: Any) -> Any:
        forward_mode = forward_ad._current_level >= 0  # its derivative is an error, not left out
        if forward_mode or torch.is_grad_enabled():
            inputs = [args[i] if j is None else args[i][j] for _, i, j in places]
            for x in inputs:
                if isinstance(x, Tensor) and (forward_mode or x.requires_grad):
                    # to autograd the others are one constant: each argument costs time
                    output = function.apply(*inputs, args)
                    return output if layout.output is None else layout.output(*output)
        return forward(*args)

    return _by_mode(layout, in_graph, eager)


Coefficient = Annotated[float, "0 switches its term off"]
PerToken = Annotated[Tensor | None, "of the shape of the call, and of the dtypes of its arithmetic"]
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    PerToken: "Tensor?",
    float: "float",
    float | None: "float?",
    Coefficient: "coefficient",
    int: "SymInt",
    bool: "bool",
    str: "str",
}


def of_kind(struct: type, kind: Any) -> Callable[[Any], tuple]:
    """Return what takes the fields of one type out of a NamedTuple, of two at least."""
    return itemgetter(*(i for i, its in enumerate(struct.__annotations__.values()) if its == kind))


class _Layout:
    """The parameters of a function, and the same laid flat: fields of NamedTuples side by side."""

    def __init__(self, function: Callable[..., Any], **types: type) -> None:
        """Read a function's annotations; `types` stand in place of some."""
        hints = get_type_hints(function, include_extras=True) | types
        returned = hints.pop("return")
        self.output = None if returned is Tensor else returned
        self.schema_of_output = ", ".join(["Tensor"] * len(getattr(returned, "_fields", "1")))
        self.structs = [kind if hasattr(kind, "_fields") else None for kind in hints.values()]
        self.fields: dict[str, str] = {}  # of the flat arguments, and their types in a schema
        self.holds: list[bool] = []  # of the parameters: whether they hold tensors
        self._places: dict[str, tuple[int, int, int | None]] = {}
        for i, (parameter, kind) in enumerate(hints.items()):
            within = kind.__annotations__ if self.structs[i] else {parameter: kind}
            for j, (field, its) in enumerate(within.items()):
                if field in self.fields:
                    raise TypeError(f"{function.__qualname__}: two arguments are named {field}")
                self._places[field] = len(self.fields), i, j if self.structs[i] else None
                self.fields[field] = _SCHEMA_TYPES.get(its, "")  # "": not of an op in graphs
            self.holds.append({_SCHEMA_TYPES.get(its) for its in within.values()} <= _TENSORS)

    def place(self, field: str) -> tuple[int, int, int | None]:
        """Return where a field is: flat; of which parameter; in that (None: it is all of it)."""
        return self._places[field]

    def tensors(self, first: int = 0) -> "_Tensors":
        """Return where the tensors of the parameters from `first` on are."""
        return _Tensors(self.structs[first:], self.holds[first:])

    def flat(self, args: Sequence[Any]) -> list[Any]:
        """Return arguments, laid flat."""
        out: list[Any] = []
        for x in args:
            out.extend(x) if isinstance(x, tuple) else out.append(x)
        return out

    def deep(self, flat: Sequence[Any]) -> list[Any]:
        """Return arguments that were laid flat."""
        rest = iter(flat)
        return [
            next(rest) if struct is None else struct(*islice(rest, len(struct._fields)))
            for struct in self.structs
        ]


_TENSORS = {"Tensor", "Tensor?"}


class _Tensors:
    """Which arguments are tensors, or NamedTuples of them: these side by side, and the others."""

    def __init__(self, structs: Sequence[Any], holds: Sequence[bool]) -> None:
        self._slots, start = [], 0
        for i, (struct, holds_tensors) in enumerate(zip(structs, holds, strict=True)):
            if holds_tensors:
                end = start + (1 if struct is None else len(struct._fields))
                self._slots.append((i, struct, slice(start, end)))
                start = end
        # the one parameter that holds tensors, where that is a NamedTuple
        self._one = self._slots[0][0] if len(self._slots) == 1 and self._slots[0][1] else None

    def of(self, args: Sequence[Any]) -> Sequence[Tensor | None]:
        if self._one is not None:
            return args[self._one]
        out: list[Tensor | None] = []
        for i, struct, _ in self._slots:
            out += (args[i],) if struct is None else args[i]
        return out

    def without(self, args: Sequence[Any]) -> list[Any]:
        out = list(args)
        for i, _, _ in self._slots:
            out[i] = None
        return out

    def put(self, others: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[Any]:
        """Return the arguments that both came from."""
        out = list(others)
        for i, struct, part in self._slots:
            out[i] = tensors[part.start] if struct is None else struct._make(tensors[part])
        return out


_IN_GRAPHS = {"float": "Tensor", "float?": "Tensor?", "coefficient": "Tensor?"}


def _custom_op(
    name: str, layout: _Layout, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> tuple[Any, Callable[..., Any]]:
    """Register an op of `torch.library`; return it, and a function that calls it with numbers.

    To a graph a number is a constant, and each new value a new graph. So the op takes numbers as
    0-d tensors, which its kernel reads when it runs. A coefficient that is 0 in every call of a
    graph is None. Of one that varies the graph has all outputs: they are 0 where it is.
    """
    kinds = tuple(layout.fields.values())
    places = [i for i, kind in enumerate(kinds) if kind in _IN_GRAPHS]
    coefficients = [i for i in places if kinds[i] == "coefficient"]
    schema = ", ".join(f"{_IN_GRAPHS.get(k, k)} {n}" for n, k in layout.fields.items())

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

    def promised(*args: Any) -> Any:
        return _plain(fake(*layout.deep(with_numbers(args, unknown))))

    def run(*args: Any) -> Any:
        given = with_numbers(args, Tensor.item)
        out = _plain(kernel(*layout.deep(given)))
        if any(given[i] == 0 and args[i] is not None for i in coefficients):
            pairs = zip(out, promised(*args), strict=True)
            out = tuple(x if x.shape == p.shape else p.zero_() for x, p in pairs)
        return out

    def call(*args: Any) -> Any:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        given = layout.flat(args)
        for i in places:
            if given[i] is not None:
                off = kinds[i] == "coefficient" and statically_known_true(given[i] == 0)
                given[i] = None if off else scalar(given[i])
        out = op(*given)
        return out if layout.output is None else layout.output(*out)

    op = torch.library.custom_op(
        f"ppokern::{name}",
        run,
        mutates_args=(),
        schema=f"({schema}) -> ({layout.schema_of_output})",
    )
    op.register_fake(promised)
    return op, call


def _plain(out: Any) -> Any:
    """Return a tensor, or the plain tuple of a NamedTuple."""
    return tuple(out) if isinstance(out, tuple) else out


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


def makes_graph(args: Sequence[Any]) -> bool:
    """Return whether a call on these arguments makes a graph, or only finds out shapes."""
    return torch.compiler.is_compiling() or _address.tracing(args)


def _by_mode(
    layout: _Layout, in_graph: Callable[..., Any], eager: Callable[..., Any]
) -> Callable[..., Any]:
    tensors = layout.tensors()

    def call(*args: Any) -> Any:
        return in_graph(*args) if makes_graph(tensors.of(args)) else eager(*args)

    return call
