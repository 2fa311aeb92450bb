"""Tensors that are more, or less, than numbers in memory: the right result, or a named error."""

import io
from collections.abc import Callable
from typing import Any

import calls
import pytest
import torch
from measure import leaf, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.masked import MaskedTensor

import ppokern
from ppokern import _check

EVERY = {**calls.every(), **calls.packing()}
STATIC = [*calls.NAMES, "next_token_targets"]  # the shapes of their results follow from shapes
BATCH_OR_PACKED = [(kind, n) for kind in ("every", "packed") for n in getattr(calls, kind)()]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(prototype|quantized tensor creation|MaskedTensor).*:UserWarning"
)


def tensors(call: calls.Call) -> list[str]:
    return [k for k, x in call.args.items() if isinstance(x, Tensor)]


def freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "MaskedTensor": lambda x: MaskedTensor(x, torch.ones_like(x, dtype=torch.bool)),
    "AsyncCollectiveTensor": AsyncCollectiveTensor,
    "nested": lambda x: torch.nested.as_nested_tensor([x, x]),
    "NestedTensor": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "without storage": freed,
    "zeros without storage": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "negated": lambda x: torch.complex(x, x).conj().imag,
    "mkldnn": lambda x: x.to_mkldnn(),
    "complex": lambda x: torch.complex(x, x),
    "quint8": lambda x: torch._empty_affine_quantized(
        x.shape, scale=1, zero_point=0, dtype=torch.quint8
    ),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
}
FLOATS_ONLY = ("negated", "complex", "mkldnn", "float8")


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("name", EVERY)
def test_what_no_kernel_can_read_is_refused_by_name(name: str, kind: str) -> None:
    call = EVERY[name]
    for argument in tensors(call):
        x = call.args[argument]
        if x.dim() == 0 or (kind in FLOATS_ONLY and x.dtype != torch.float32):
            continue
        if name in ("pack", "unpack") and kind in ("complex", "float8", "quint8"):
            continue  # any dtype is moved
        with pytest.raises(TypeError, match=f"^{argument}: expected .*, got "):
            call.fn(**{**call.args, argument: UNREADABLE[kind](x)})


@pytest.mark.parametrize("name", STATIC)
def test_fake_tensors_tell_shapes_and_dtypes(name: str) -> None:
    call = EVERY[name]
    expected, leaves = call.run(call.leaves()), call.leaves()
    with FakeTensorMode() as mode:
        args = {k: mode.from_tensor(x) if isinstance(x, Tensor) else x for k, x in leaves.items()}
        found = call.run(args)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]


@pytest.mark.parametrize("name", STATIC)
def test_meta_tensors_tell_shapes_and_dtypes(name: str) -> None:
    call = EVERY[name]
    expected = call.run(call.leaves())
    args = {k: x.to("meta") if isinstance(x, Tensor) else x for k, x in call.args.items()}
    found = call.run({k: leaf(x) if k in call.flows else x for k, x in args.items()})
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
    assert all(t.is_meta for t in found)


@pytest.mark.parametrize("name", STATIC)
def test_make_fx_holds_the_op_and_not_its_result(name: str) -> None:
    call = EVERY[name]
    names = tensors(call)

    def fn(*given: Tensor) -> list[Tensor]:
        return calls.outputs(call.fn(**{**call.args, **dict(zip(names, given, strict=True))}))

    graph = make_fx(fn)(*[call.args[k] for k in names])
    other = [
        x.roll(1, 0) if x.is_floating_point() and x.dim() else x
        for x in (call.args[k] for k in names)
    ]
    assert all(same_bits(a, b) for a, b in zip(graph(*other), fn(*other), strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_vmap_is_refused_by_name(name: str) -> None:
    call = EVERY[name]
    names = tensors(call)

    def fn(*given: Tensor) -> list[Tensor]:
        return calls.outputs(call.fn(**{**call.args, **dict(zip(names, given, strict=True))}))

    with pytest.raises(TypeError, match=rf"^({'|'.join(names)}): .*vmap"):
        torch.func.vmap(fn)(*[torch.stack([call.args[k]] * 2) for k in names])


@pytest.mark.parametrize("name", [n for n, call in EVERY.items() if call.flows])
def test_grad_of_torch_func_is_refused_by_name(name: str) -> None:
    call = EVERY[name]
    first = call.flows[0]

    def loss(x: Tensor) -> Tensor:
        return calls.outputs(call.fn(**{**call.args, first: x}))[0].sum()

    with pytest.raises(TypeError, match=f"^{first}: .*torch.func"):
        torch.func.grad(loss)(call.args[first])


DIFFERENTIABLE = [n for n, call in calls.every().items() if call.flows]


def first_output(name: str, args: dict[str, Any]) -> Tensor:
    call = EVERY[name]
    args = dict(args)
    if name.startswith("ppo"):  # a loss per token, so that gradients have a shape
        args.update(aggregate="none")
        args.pop("denominator", None)
    return calls.outputs(call.fn(**args))[0]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_sign_of_an_incoming_gradient_that_is_a_negated_view_stays(name: str) -> None:
    """From `torch.complex(a, x).conj()` comes a gradient whose memory holds its negative."""
    found = []
    for conj in (True, False):
        args = EVERY[name].leaves()
        x = first_output(name, args)
        z = torch.complex(torch.zeros_like(x), x)
        imag = torch.view_as_real(z.conj().resolve_conj())[..., 1] if conj else -x
        weights = torch.linspace(-1, 1, x.numel()).view(x.shape)
        if conj:
            gradient = torch.complex(torch.zeros_like(x), weights).conj().imag
            assert gradient.is_neg()
            grads = torch.autograd.grad(x, [args[k] for k in EVERY[name].flows], gradient)
        else:
            grads = torch.autograd.grad(x, [args[k] for k in EVERY[name].flows], -weights)
        assert torch.equal(imag, -x)
        found.append(grads)
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_batched_incoming_gradients_are_refused_by_name(name: str) -> None:
    args = EVERY[name].leaves()
    out = first_output(name, args)
    inputs = [args[k] for k in EVERY[name].flows]
    with pytest.raises(TypeError, match=r"gradient that comes to .*is_grads_batched"):
        torch.autograd.grad(out, inputs, torch.ones(2, *out.shape), is_grads_batched=True)

    def of(x: Tensor) -> Tensor:
        return first_output(name, {**args, EVERY[name].flows[0]: x})

    with pytest.raises(TypeError, match=r"gradient that comes to .*is_grads_batched"):
        torch.autograd.functional.jacobian(of, inputs[0].detach(), vectorize=True)


@pytest.mark.parametrize("backend", ppokern.available_backends(), indirect=True)
@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_a_default_device_or_dtype_changes_nothing(name: str, number: bool, backend: str) -> None:
    call = EVERY[name]
    args = dict(call.args)
    if number:  # options in place of tensors
        args = {k: 1.5 if k in ("temperature", "denominator") else x for k, x in args.items()}

    def run() -> list[Tensor]:
        return call.run({k: leaf(x) if k in call.flows else x for k, x in args.items()})

    expected = run()
    with torch.device("meta"):
        elsewhere = run()
    torch.set_default_dtype(torch.float64)
    try:
        wide = run()
    finally:
        torch.set_default_dtype(torch.float32)
    for found in (elsewhere, wide):
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


MALFORMED = [
    [0, 3, 2**30],
    [0, -5, 9],
    [0, 7, 3, 9],
    [2, 5, 9],
    [0, 4, 4, 8],
    [0, 4, 10],
    [-(2**31), 4, 9],
]


def malformed(name: str, boundaries: list[int]) -> dict[str, Any]:
    args, sequences = calls.packed()[name].leaves(), len(boundaries) - 1
    args["cu_seqlens"] = torch.tensor(boundaries, dtype=torch.int32)
    if "scores" in args:
        args.update(scores=torch.randn(sequences), score_mask=torch.ones(sequences).bool())
    return args


@pytest.mark.parametrize("backend", ppokern.available_backends(), indirect=True)
@pytest.mark.parametrize("boundaries", MALFORMED, ids=str)
@pytest.mark.parametrize("name", calls.PACKED_NAMES)
def test_malformed_boundaries_are_an_error_when_a_graph_runs(
    name: str, boundaries: list[int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is made without looking at values; what it calls looks at them."""
    args, call = malformed(name, boundaries), calls.packed()[name]

    def compiled(**args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            real = _check.boundaries
            patch.setattr(_check, "cu_seqlens", lambda *_: None)
            patch.setattr(
                _check,
                "boundaries",
                lambda *a: (patch.setattr(torch.compiler, "is_compiling", lambda: False), real(*a)),
            )
            return call.fn(**args)

    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        compiled(**args)


@pytest.mark.parametrize("boundaries", MALFORMED, ids=str)
@pytest.mark.parametrize("name", calls.PACKED_NAMES)
def test_malformed_boundaries_that_nothing_looks_at_give_nan(
    name: str, boundaries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA without validation: no address follows from them."""
    monkeypatch.setattr(_check, "values_of", lambda _: False)
    call = calls.packed()[name]
    with ppokern.use_backend("torch"):
        out = calls.outputs(call.fn(**malformed(name, boundaries)))
    assert all(bool(t.isnan().all()) for t in out)


def test_unpack_of_nothing_is_attached_to_the_graph() -> None:
    """Else the other processes of DDP wait for a gradient that never comes."""
    values = torch.zeros(0, 2, requires_grad=True)
    rows = ppokern.unpack(values, torch.tensor([0, 0, 0]), length=3, fill=-1.0)
    assert rows.shape == (2, 3, 2) and bool((rows == -1).all())
    rows.sum().backward()
    assert values.grad is not None and values.grad.shape == (0, 2)


@pytest.mark.parametrize(
    ("kind", "fill"),
    [
        (torch.uint8, -100),
        (torch.uint8, 256),
        (torch.int8, 200),
        (torch.int64, 0.5),
        (torch.int32, float("nan")),
        (torch.int64, float("inf")),
        (torch.bool, 2),
        (torch.float16, 1e5),
        (torch.float32, 1e39),
    ],
)
def test_a_fill_that_the_dtype_cannot_hold_is_refused(kind: torch.dtype, fill: float) -> None:
    values, cu_seqlens = torch.ones(3).to(kind), torch.tensor([0, 1, 3])
    with pytest.raises(ValueError, match=r"^fill: expected a number that torch\.\w+ holds"):
        ppokern.unpack(values, cu_seqlens, fill=fill)


def test_fills_that_a_dtype_holds() -> None:
    cu_seqlens = torch.tensor([0, 1, 3])
    for dtype, fill in [
        (torch.int64, -100),
        (torch.bool, False),
        (torch.float16, -float("inf")),
        (torch.float32, float("nan")),
        (torch.uint8, 255.0),
    ]:
        rows = ppokern.unpack(torch.ones(3).to(dtype), cu_seqlens, fill=fill)
        expected = torch.tensor([[1, fill], [1, 1]], dtype=dtype)
        assert same_bits(rows, expected), dtype


@pytest.mark.parametrize("name", EVERY)
def test_results_are_saved_and_loaded_with_torchs_defaults(name: str) -> None:
    result, file = EVERY[name].fn(**EVERY[name].args), io.BytesIO()
    torch.save(result, file)
    file.seek(0)
    again = torch.load(file)
    assert type(again) is type(result)
    pairs = zip(calls.outputs(again), calls.outputs(result), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)
