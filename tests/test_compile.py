import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import calls
import numpy as np
import pytest
import torch
import torch._dynamo.utils
from measure import leaf, same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ppokern

CALLS = [pytest.param("batch", name, id=name) for name in calls.NAMES]
CALLS += [pytest.param("packed", name, id=f"{name}-packed") for name in calls.PACKED_NAMES]


def call_of(kind: str, name: str) -> calls.Call:
    return (calls.every() if kind == "batch" else calls.packed())[name]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


# torch.compile ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_whole_graph(kind: str, name: str) -> None:
    call = call_of(kind, name)
    compiled = torch.compile(call.fn, fullgraph=True, backend="aot_eager")
    close(call.run(call.leaves(), compiled), call.run(call.leaves()))


@pytest.mark.parametrize("name", calls.NAMES)
def test_nothing_is_compiled_anew_for_another_size(name: str) -> None:
    """Compiled for sizes that vary, the graph serves them all; and the numbers are right."""
    first, graphs = calls.every()[name], 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(first.fn, fullgraph=True, backend=count, dynamic=True)
    for rows, columns in ((3, 5), (4, 7), (2, 9), (6, 8)):
        call = calls.every(rows=rows, columns=columns)[name]
        with torch.no_grad():
            close(calls.outputs(compiled(**call.args)), calls.outputs(call.fn(**call.args)))
    assert graphs == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_inductor() -> None:
    """One graph with every op in it."""
    every = calls.every()

    def step(args: dict[str, dict[str, Any]]) -> dict[str, list[Tensor]]:
        return {name: calls.outputs(call.fn(**args[name])) for name, call in every.items()}

    leaves = {name: call.leaves() for name, call in every.items()}
    out = torch.compile(step, fullgraph=True)(leaves)
    loss = sum(t.sum() for ts in out.values() for t in ts if t.requires_grad)
    assert isinstance(loss, Tensor)
    loss.backward()
    for name, call in every.items():
        grads = [leaves[name][k].grad for k in call.flows]
        close([t.detach() for t in out[name]] + grads, call.run(call.leaves()))


@pytest.mark.parametrize("bad", [7, -1, 10**6])
def test_a_bad_id_gives_nan_in_a_compiled_graph(bad: int) -> None:
    logits, ids = torch.randn(3, 7), torch.tensor([1, bad, -100])
    compiled = torch.compile(
        ppokern.selected_logprobs_with_entropy, fullgraph=True, backend="aot_eager"
    )
    out = compiled(logits, ids)
    good = ppokern.selected_logprobs_with_entropy(logits[:1], ids[:1])
    assert out.logprobs[1].isnan()
    assert torch.allclose(out.logprobs[0], good.logprobs[0]) and out.logprobs[2] == 0
    hidden, weight = torch.randn(3, 4), torch.randn(7, 4)
    compiled = torch.compile(ppokern.linear_selected_logprobs, fullgraph=True, backend="aot_eager")
    out = compiled(hidden, weight, ids)
    assert out[1].isnan() and out[0].isfinite() and out[2] == 0


def test_inplace_backward_in_a_compiled_graph() -> None:
    source, ids = torch.randn(3, 7), torch.tensor([1, 2, -100])

    def step(x: Tensor) -> Tensor:
        return ppokern.selected_logprobs(x * 2, ids, inplace_backward=True).sum()

    a, b = leaf(source), leaf(source)
    torch.compile(step, fullgraph=True, backend="aot_eager")(a).backward()
    ppokern.selected_logprobs(b * 2, ids).sum().backward()
    assert torch.allclose(a.grad, b.grad)


@pytest.mark.parametrize("name", [n for n, call in calls.every().items() if call.flows])
def test_a_backend_asked_for_by_name_in_a_compiled_graph(name: str) -> None:
    """A graph takes the one that is named when it runs, not that of its first run."""
    call = calls.every(rows=5, columns=40)[name]
    compiled = torch.compile(call.fn, fullgraph=True, backend="aot_eager")
    for backend in ("torch", *ppokern.available_backends()):
        with ppokern.use_backend(backend):
            mine, theirs = call.run(call.leaves(), compiled), call.run(call.leaves())
        assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True)), backend


def test_a_backend_that_cannot_do_a_compiled_call_says_so() -> None:
    compiled = torch.compile(ppokern.gae, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3).double()
    expected = compiled(x, x)
    for backend in ppokern.available_backends()[1:]:
        with ppokern.use_backend(backend), pytest.raises(ValueError, match=f"{backend}.*torch"):
            compiled(x, x)
    assert torch.equal(compiled(x, x).advantages, expected.advantages)


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every op of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "ppokern":
            self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded(call: calls.Call, args: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops that a graph would hold, forward and backward, with the arguments it would give."""
    with monkeypatch.context() as patch, Recorder() as recorder:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        call.run(args)
    assert recorder.seen
    return recorder.seen


def opcheck(seen: list[Any], **how: Any) -> None:
    for op, args, kwargs in seen:
        first_order = not op.name().endswith("_backward")  # those are differentiated no further

        def fresh(x: Any, first_order: bool = first_order) -> Any:
            if not isinstance(x, Tensor):
                return x
            copy = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
            copy.as_strided(*same_memory(x)).copy_(x.detach().as_strided(*same_memory(x)))
            return copy.requires_grad_(x.requires_grad and first_order)

        named = {k: fresh(x) for k, x in kwargs.items()}
        torch.library.opcheck(op, [fresh(x) for x in args], named, **how)


def same_memory(x: Tensor) -> tuple[list[int], list[int]]:
    """Size and strides of a tensor's elements, each once: without the dimensions of stride 0."""
    once = [1 if stride == 0 else n for n, stride in zip(x.shape, x.stride(), strict=True)]
    return once, list(x.stride())


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_opcheck(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(kind, name)
    opcheck(recorded(call, call.leaves(), monkeypatch))


def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for n in range(1, len(names) + 1):
        yield from itertools.combinations(names, n)


@pytest.mark.parametrize("name", [n for n, call in calls.every().items() if len(call.flows) > 1])
def test_outputs_have_storage_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever inputs are trained (a frozen head, an adapter): torch refuses shared outputs."""
    full = calls.every()[name]
    for flows in subsets(full.flows):
        call = full._replace(flows=flows)
        for op, args, kwargs in recorded(call, call.leaves(), monkeypatch):
            with torch.no_grad():
                out = op(*args, **kwargs)
            places = [t.untyped_storage()._cdata for t in calls.outputs(out)]
            assert len(set(places)) == len(places), (op, flows)


# of every option that is a number: values that a compiled loop goes through
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.3, 2.0),
    "softcap": (1.0, 50.0),
    "gamma": (0.5, 1.0),
    "lam": (0.0, 1.0),
    "eps": (0.0, 0.5),
    "correction": (0.0, 1.5),
    "clip_range": (0.05, 0.9),
    "dual_clip": (1.1, 5.0),
    "log_ratio_limit": (0.1, 20.0),
    "value_clip_range": (0.05, 0.9),
    "kl_coef": (-0.5, 0.5),
    "entropy_coef": (-0.2, 0.3),
    "value_coef": (-0.1, 1.0),
    "denominator": (1.0, 9.0),
    "value_denominator": (1.0, 9.0),
}
SWITCHES = ("kl_coef", "entropy_coef", "value_coef")  # 0 is off


def numbers_of(call: calls.Call, at: float) -> dict[str, float]:
    """A value of each option of a call that is a number; `at` between 0 and 1 moves them all."""
    names = [n for n in NUMBERS if n in inspect.signature(call.fn).parameters]
    if call.args.get("aggregate") == "sum":
        names = [n for n in names if "denominator" not in n]
    if "ref_logprobs" not in call.args:
        names = [n for n in names if n != "kl_coef"]
    places = ((at + 0.37 * i) % 1 for i in range(len(names)))
    return {
        n: NUMBERS[n][0] + (NUMBERS[n][1] - NUMBERS[n][0]) * u
        for n, u in zip(names, places, strict=True)
    }


@pytest.mark.parametrize("name", [n for n, c in calls.every().items() if numbers_of(c, 0.0)])
def test_numbers_that_change_make_no_graph(name: str) -> None:
    """A hundred values of all options at once (an adaptive coefficient, a schedule): two graphs."""
    call, made = calls.every()[name], torch._dynamo.utils.counters["stats"]
    compiled = torch.compile(call.fn, fullgraph=True, backend="aot_eager")
    before = made["unique_graphs"]
    for i in range(100):
        changed = call._replace(args={**call.args, **numbers_of(call, 0.01 * i)})
        mine = changed.run(changed.leaves(), compiled)
        if i % 9 == 0:
            close(mine, changed.run(changed.leaves()))
    assert made["unique_graphs"] - before <= 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_numbers_that_change_in_inductor() -> None:
    """With a term that goes through 0 and comes back."""
    call, made = calls.every()["ppo_loss"], torch._dynamo.utils.counters["stats"]
    compiled = torch.compile(call.fn, fullgraph=True)
    before = made["unique_graphs"]
    for i, coef in enumerate((0.1, 0.2, 0.0, -0.3, 0.0, 0.5, 0.6, 0.7, 0.8, 0.9)):
        values = {**numbers_of(call, 0.07 * i), **dict.fromkeys(SWITCHES, coef)}
        changed = call._replace(args={**call.args, **values})
        mine = changed.run(changed.leaves(), compiled)
        if coef:
            close(mine, changed.run(changed.leaves()))
        else:  # the graph has the gradients of terms that are off
            out = calls.outputs(call.fn(**changed.args))
            close(mine[: len(out)], out)
            assert not mine[-1].any() and not mine[-2].any()
    assert made["unique_graphs"] - before <= 2


@pytest.mark.parametrize("kinds", [(int, float), (np.float32,), (np.int64, np.float64)], ids=str)
def test_kinds_of_numbers_in_a_compiled_graph(kinds: tuple[type, ...]) -> None:
    call, made = calls.every()["ppo_loss"], torch._dynamo.utils.counters["stats"]
    compiled = torch.compile(call.fn, fullgraph=True, backend="aot_eager")
    before = made["unique_graphs"]
    for i in range(12):
        one = kinds[i % len(kinds)]
        values = {"kl_coef": one(i % 4 + 1), "clip_range": one(1 + i), "denominator": one(i + 2)}
        args = {**call.args, **values}
        close(calls.outputs(compiled(**args)), calls.outputs(call.fn(**args)))
    assert made["unique_graphs"] - before <= 3  # an int has a type of its own


def test_a_number_that_does_not_fit_is_named_in_a_compiled_graph() -> None:
    x = torch.randn(3, 4)
    compiled = torch.compile(ppokern.ppo_policy_loss, fullgraph=True, backend="aot_eager")
    assert compiled(x, x, x, clip_range=0.1).loss.isfinite()
    assert compiled(x, x, x, clip_range=0.2).loss.isfinite()
    with pytest.raises(ValueError, match=r"^clip_range: .*-0\.1"):
        compiled(x, x, x, clip_range=-0.1)
    for wrong in (-2.0, torch.tensor(0.0)):
        with pytest.raises(ValueError, match=r"^denominator: "):
            compiled(x, x, x, denominator=wrong)


# Drawn calls --------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 1],
    "cut": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "expanded": lambda x: x[:1].expand(x.shape),
    "offset": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
}


def drawn(name: str, seed: int) -> tuple[str, calls.Call]:
    """A call with layouts, numbers, a dtype, optional tensors and trained inputs by chance."""
    pick = random.Random(f"{name} {seed}")
    dtype = pick.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    call = calls.every(dtype)[name]
    args, defaults = dict(call.args), inspect.signature(call.fn).parameters
    options = {k for k, x in args.items() if isinstance(x, Tensor) and defaults[k].default is None}
    gone = {k for k in sorted(options) if pick.random() < 0.3}
    if gone & {"next_values", "bootstrap", "continues"}:
        gone |= {"next_values", "bootstrap", "continues"}
    for k in gone & set(args):
        del args[k]
    numbers = {k: x for k, x in numbers_of(call, pick.random()).items() if pick.random() < 0.5}
    args.update(numbers)
    for tensor, coef in (("entropy", "entropy_coef"), ("ref_logprobs", "kl_coef")):
        if tensor in gone:
            args[coef] = 0.0
    layouts, shared = {}, ("transposed", None, "expanded")[seed]
    for k, x in args.items():
        if isinstance(x, Tensor) and x.dim():
            layouts[k] = shared or pick.choice(list(LAYOUTS))
            args[k] = LAYOUTS[layouts[k]](x)
    flows = [k for k in call.flows if k in args]
    flows = tuple(k for k in flows if pick.random() < 0.6) or tuple(flows[:1])
    told = f"{dtype} without {sorted(gone)} {numbers} {layouts} trained {flows}"
    return told, calls.Call(call.fn, args, flows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", calls.NAMES)
def test_drawn_calls(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as eager, strides too, and in order for `opcheck`."""
    told, call = drawn(name, seed)
    print(told)
    compiled = torch.compile(call.fn, fullgraph=True, backend="aot_eager")
    mine, theirs = call.run(call.leaves(), compiled), call.run(call.leaves())
    close(mine, theirs)
    count = len(mine) - len(call.flows)
    assert [x.stride() for x in mine[:count]] == [x.stride() for x in theirs[:count]]
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(recorded(call, call.leaves(), monkeypatch), test_utils=quick)


# What every op does alike -------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), CALLS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_no_argument_is_changed(kind: str, name: str, requires_grad: bool) -> None:
    call = call_of(kind, name)
    args = call.leaves() if requires_grad else call.args
    before = {k: (x.detach().clone(), x._version) for k, x in args.items() if isinstance(x, Tensor)}
    first = call.run(args) if requires_grad else calls.outputs(call.fn(**args))
    for k, (copy, version) in before.items():
        assert torch.equal(args[k], copy) and args[k]._version == version, k
    for out in first:
        assert all(out.data_ptr() != args[k].data_ptr() for k in before if args[k].numel())


@pytest.mark.parametrize("name", [*calls.NAMES, *calls.packing()])
def test_only_the_named_arguments_get_gradients(name: str) -> None:
    call = {**calls.every(), **calls.packing()}[name]
    args = {
        k: leaf(x) if isinstance(x, Tensor) and x.is_floating_point() else x
        for k, x in call.args.items()
    }
    out = [t for t in calls.outputs(call.fn(**args)) if t.requires_grad]
    assert bool(out) == bool(call.flows)
    if out:
        torch.stack([t.sum() for t in out]).sum().backward()
    got = {k for k, x in args.items() if isinstance(x, Tensor) and x.grad is not None}
    assert got == set(call.flows)
    args = {k: x.detach() if k in got else x for k, x in args.items()}
    assert not any(t.requires_grad for t in calls.outputs(call.fn(**args)))


@pytest.mark.parametrize("name", calls.NAMES)
def test_autocast_changes_nothing_in_float32(name: str) -> None:
    """The linear ops may multiply in bfloat16 there; all others compute in float32."""
    call = calls.every()[name]
    plain = call.run(call.leaves())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = call.run(call.leaves())
    for a, b in zip(inside, plain, strict=True):
        assert a.dtype == b.dtype
        if "linear" in name:
            assert (a - b).norm() <= 0.02 * b.norm()
        else:
            assert same_bits(a, b)


def test_linear_under_autocast_with_a_bfloat16_trunk() -> None:
    """Hidden states as autocast leaves them, a float32 head: each gradient in its own dtype."""
    hidden, weight = leaf(torch.randn(3, 4)), leaf(torch.randn(7, 4))
    trunk = torch.nn.Linear(4, 4)
    ids = torch.tensor([1, 2, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = trunk(hidden)
        assert states.dtype == torch.bfloat16
        lp = ppokern.linear_selected_logprobs(states, weight, ids)
    assert lp.dtype == torch.float32
    lp.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("name", [n for n, call in calls.every().items() if call.flows])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(name: str, use_reentrant: bool) -> None:
    call = calls.every()[name]
    args = call.leaves()
    inputs = [args[k] for k in call.flows]
    n = sum(t.requires_grad for t in calls.outputs(call.fn(**args)))  # the first outputs

    def body(*flows: Tensor) -> Tensor:
        given = {**args, **dict(zip(call.flows, flows, strict=True))}
        return torch.stack([t.sum() for t in calls.outputs(call.fn(**given))[:n]]).sum()

    expected = torch.autograd.grad(body(*inputs), inputs)
    checkpoint(body, *inputs, use_reentrant=use_reentrant).backward()
    close([x.grad for x in inputs], list(expected))


@pytest.mark.parametrize("name", [*calls.NAMES, *calls.packing()])
def test_results_are_reproducible(name: str) -> None:
    call = {**calls.every(), **calls.packing()}[name]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        a, b = call.run(call.leaves()), call.run(call.leaves())
        assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", calls.NAMES)
def test_dtypes_of_the_results(name: str, dtype: torch.dtype) -> None:
    call = calls.every(dtype)[name]
    out = call.run(call.leaves())
    assert out[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for k, g in zip(call.flows, out[len(out) - len(call.flows) :], strict=True):
        assert g.dtype == call.args[k].dtype == dtype


def test_every_public_op_is_in_the_list() -> None:
    fns = {call.fn for call in (*calls.every().values(), *calls.packing().values())}
    for name in ppokern.__all__:
        thing = getattr(ppokern, name)
        if inspect.isfunction(thing) and name not in (
            "available_backends",
            "set_validation",
            "cpu_capability",
            "use_backend",
        ):
            assert thing in fns, name
