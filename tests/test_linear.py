import math
from typing import Any

import eager
import oracle
import pytest
import ranks
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure import grads, leaf, same_bits, unchanged, usage
from oracle import assert_within_rule, f64
from torch import Tensor

from ppokern import (
    LogProbs,
    linear_ppo_loss,
    linear_selected_logprobs,
    linear_selected_logprobs_with_entropy,
    selected_logprobs_with_entropy,
)
from ppokern.linear.reference import Head, plan

OP = "linear"
H, V = 6, 23
NAN = math.nan
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def draw(shape: tuple[int, ...], dtype: torch.dtype, head: torch.dtype | None = None) -> Any:
    hidden = torch.randn(*shape, H).to(dtype)
    weight = torch.randn(V, H).to(head or dtype)
    return hidden, weight, torch.randint(0, V - 4, shape)


def exact_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = hidden @ weight.T
    return out if bias is None else out + bias


def check(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None, **options: Any
) -> None:
    """Both outputs and every gradient against float64, under the rule."""
    chunk = {k: options.pop(k) for k in ("max_logits_bytes", "compact") if k in options}
    given_in = [hidden, weight] + ([] if bias is None else [bias])
    mine, peer, truth = ([make(x) for x in given_in] for make in (leaf, leaf, f64))
    incoming = list(torch.randn(2, *ids.shape))
    out = linear_selected_logprobs_with_entropy(
        mine[0], mine[1], ids, bias=mine[2] if bias is not None else None, **options, **chunk
    )
    theirs = eager.linear_logprobs(peer[0], peer[1], ids, *peer[2:], **options)
    exact = oracle.logprobs(
        exact_logits(truth[0], truth[1], truth[2] if bias is not None else None), ids, **options
    )
    assert isinstance(out, LogProbs)
    wide = F64 if F64 in [x.dtype for x in given_in] else F32
    narrow = F32 not in (hidden.dtype, weight.dtype) and wide == F32  # a quarter of a bfloat16 ulp
    for a, b, c in zip(out, theirs, exact, strict=True):
        assert a.dtype == wide
        assert_within_rule(a, b, c, unit=1e3 * c.abs().max().item() if narrow else 1.0)
    for x, a, b, c in zip(
        given_in,
        grads(out, mine, incoming),
        grads(theirs, peer, incoming),
        grads(exact, truth, incoming),
        strict=True,
    ):
        assert a.dtype == x.dtype
        assert_within_rule(a, b, c, unit=(1e3 if narrow else 1.0) * c.abs().max().item())


ONE_ROW, TWO_ROWS, ALL = 1, 2 * V * 4, 2**28

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap_temperature": {"softcap": 5.0, "temperature": 0.5},
    "vocab_size": {"vocab_size": V - 4},
}


# Values and gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_logits_bytes", [ONE_ROW, TWO_ROWS, ALL])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 2, 2)], ids=str)
def test_every_layout(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], max_logits_bytes: int
) -> None:
    hidden, weight, ids = draw(shape, dtype)
    check(hidden, weight, ids, max_logits_bytes=max_logits_bytes)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("compact", [True, False])
def test_every_option(
    backend: str, dtype: torch.dtype, options: str, bias: bool, masked: bool, compact: bool
) -> None:
    hidden, weight, ids = draw((3, 4), dtype)
    extra = dict(OPTIONS[options], max_logits_bytes=TWO_ROWS, compact=compact)
    if masked:
        extra["mask"] = torch.rand(3, 4) < 0.6
    check(hidden, weight, ids, torch.randn(V).to(dtype) if bias else None, **extra)


@pytest.mark.parametrize(
    ("trunk", "head"), [(BF16, F32), (F16, F32), (F32, BF16), (BF16, F64), (F32, F64)], ids=str
)
@pytest.mark.parametrize("max_logits_bytes", [TWO_ROWS, ALL])
def test_L14_trunk_and_head_of_different_dtypes(
    trunk: torch.dtype, head: torch.dtype, max_logits_bytes: int
) -> None:
    hidden, weight, ids = draw((5,), trunk, head)
    check(hidden, weight, ids, max_logits_bytes=max_logits_bytes)


def test_temperature_per_token(backend: str) -> None:
    hidden, weight, ids = draw((2, 3), F32)
    check(hidden, weight, ids, temperature=torch.rand(2, 3) + 0.5, max_logits_bytes=ONE_ROW)
    column = torch.tensor([[0.5], [2.0]])
    check(hidden, weight, ids, temperature=column, max_logits_bytes=TWO_ROWS)


@pytest.mark.parametrize("max_logits_bytes", [1 * V * 4, 3 * V * 4, ALL])
def test_L4_weight_gradient_of_single_tokens(backend: str, max_logits_bytes: int) -> None:
    """Incoming gradient [1, 0, 2, 5], the last id -100: exactly 1 x (token 0) + 2 x (token 2)."""
    hidden, weight, _ = draw((4,), F32)
    ids, w = torch.tensor([1, 2, 3, -100]), leaf(weight)
    lp = linear_selected_logprobs(hidden, w, ids, max_logits_bytes=max_logits_bytes)
    (g,) = torch.autograd.grad(lp, w, torch.tensor([1.0, 0, 2, 5]))
    expected = torch.zeros(V, H, dtype=F64)
    for i, incoming in ((0, 1.0), (2, 2.0)):
        p = (hidden[i].double() @ weight.double().T).softmax(-1)
        expected += incoming * torch.outer(torch.eye(V, dtype=F64)[ids[i]] - p, hidden[i].double())
    assert torch.allclose(g.double(), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_L9_weight_gradient_does_not_drift_with_the_chunks(dtype: torch.dtype) -> None:
    hidden, weight, ids = draw((512,), dtype)
    exact_in = f64(weight)
    exact = oracle.logprobs(hidden.double() @ exact_in.T, ids)[0].sum()
    (truth,) = torch.autograd.grad(exact, exact_in)

    def error(rows: int) -> float:
        w = leaf(weight)
        lp = linear_selected_logprobs(hidden, w, ids, max_logits_bytes=rows * V * 4)
        return (torch.autograd.grad(lp.sum(), w)[0].double() - truth).abs().max().item()

    one, many = error(512), error(4)
    assert many <= 1.5 * one + 1e-3


@pytest.mark.parametrize("max_logits_bytes", [TWO_ROWS, ALL])
def test_L13_padded_vocabulary(backend: str, max_logits_bytes: int) -> None:
    """Zero rows of padding would win over real logits that are all negative."""
    hidden = -torch.rand(5, H)
    real, ids = torch.rand(V - 4, H), torch.randint(0, V - 4, (5,))
    padded = leaf(torch.cat([real, torch.zeros(4, H)]))
    lp = linear_selected_logprobs(
        hidden, padded, ids, vocab_size=V - 4, max_logits_bytes=max_logits_bytes
    )
    exact = oracle.logprobs(hidden.double() @ real.double().T, ids)[0]
    assert torch.allclose(lp.double(), exact, atol=1e-5)
    (g,) = torch.autograd.grad(lp.sum(), padded)
    assert (g[V - 4 :] == 0).all() and (g[: V - 4] != 0).any()


def test_equals_the_two_step_form_bitwise_in_one_chunk_of_exact_logits(backend: str) -> None:
    """Small integers multiply exactly, so that only the row op is left to differ."""
    hidden, weight = (torch.randint(-3, 4, s).float() for s in ((5, H), (V, H)))
    ids = torch.randint(0, V, (5,))
    direct = selected_logprobs_with_entropy(hidden @ weight.T, ids)
    for size in (ONE_ROW, TWO_ROWS, ALL):
        fused = linear_selected_logprobs_with_entropy(hidden, weight, ids, max_logits_bytes=size)
        assert all(same_bits(a, b) for a, b in zip(fused, direct, strict=True))


@given(data=st.data(), seed=st.integers(0, 2**20))
def test_any_mask_any_chunk(backend: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    hidden, weight, ids = draw(shape, F32)
    ids = torch.where(torch.rand(shape) < 0.2, -100, ids)
    mask = torch.rand(shape) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    rows = data.draw(st.integers(1, 9))
    check(hidden, weight, ids, mask=mask, max_logits_bytes=rows * V * 4 + 5)


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("poison", [NAN, math.inf])
@pytest.mark.parametrize("max_logits_bytes", [TWO_ROWS, ALL])
def test_masked_rows_are_never_read(
    backend: str, dtype: torch.dtype, compact: bool, poison: float, max_logits_bytes: int
) -> None:
    hidden, weight, ids = draw((2, 5), dtype)
    mask = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
    results = []
    for h, tokens, g in (
        (hidden, ids, torch.ones(2, 5)),
        (
            hidden.masked_fill(~mask[..., None], poison),
            ids.masked_fill(~mask, -7),
            torch.full((2, 5), NAN).masked_fill(mask, 1.0),
        ),
    ):
        inputs = [leaf(h), leaf(weight), leaf(torch.ones(V, dtype=dtype))]
        out = linear_selected_logprobs_with_entropy(
            inputs[0],
            inputs[1],
            tokens,
            bias=inputs[2],
            mask=mask,
            compact=compact,
            max_logits_bytes=max_logits_bytes,
        )
        results.append([*out, *grads(out, inputs, [g, g])])
    clean, dirty = results
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)  # NaN is not equal
    assert (dirty[0][~mask] == 0).all() and (dirty[1][~mask] == 0).all()
    assert (dirty[2][~mask] == 0).all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_empty(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    hidden, weight, ids = draw(shape, dtype)
    inputs = [leaf(hidden), leaf(weight)]
    out = linear_selected_logprobs_with_entropy(*inputs, ids)
    assert out.logprobs.shape == out.entropy.shape == shape
    gh, gw = grads(out, inputs, [torch.empty(shape)] * 2)
    assert gh.shape == hidden.shape and gh.dtype == dtype
    assert gw.dtype == dtype and (gw == 0).all()


@pytest.mark.parametrize(("vocabulary", "width"), [(0, H), (V, 0), (0, 0)])
def test_no_vocabulary_or_no_hidden_states(
    backend: str, dtype: torch.dtype, vocabulary: int, width: int
) -> None:
    """Without a vocabulary every token is masked; without states all of them are as likely."""
    hidden, weight = torch.empty(2, 3, width, dtype=dtype), torch.empty(vocabulary, width).to(dtype)
    ids, inputs = torch.full((2, 3), 1 if vocabulary else -100), [leaf(hidden), leaf(weight)]
    out = linear_selected_logprobs_with_entropy(*inputs, ids)
    level = -math.log(vocabulary) if vocabulary else 0.0
    assert torch.allclose(out.logprobs.float(), torch.full((2, 3), level))
    assert torch.allclose(out.entropy.float(), torch.full((2, 3), -level))
    loss = linear_ppo_loss(*inputs, ids, torch.full((2, 3), level), torch.ones(2, 3)).loss
    assert float(loss.detach()) == pytest.approx(-1.0 if vocabulary else 0.0, abs=1e-6)
    for losses in ((out.logprobs.sum(), out.entropy.sum()), (loss,)):
        for g, x in zip(torch.autograd.grad(losses, inputs), inputs, strict=True):
            assert g.shape == x.shape and (g == 0).all()


@pytest.mark.parametrize("compact", [True, False])
def test_everything_masked(backend: str, compact: bool) -> None:
    hidden, weight, ids = draw((4,), F32)
    inputs = [leaf(hidden), leaf(weight)]
    mask = torch.zeros(4, dtype=torch.bool)
    out = linear_selected_logprobs_with_entropy(*inputs, ids, mask=mask, compact=compact)
    assert (out.logprobs == 0).all() and (out.entropy == 0).all()
    assert all((g == 0).all() for g in grads(out, inputs, [torch.ones(4)] * 2))


@pytest.mark.parametrize("masked", [False, True])
def test_bad_id_names_its_position(backend: str, masked: bool) -> None:
    hidden, weight, ids = draw((2, 3), F32)
    ids[1, 2] = V
    mask = torch.tensor([[False, True, True], [True, True, True]]) if masked else None
    with pytest.raises(IndexError, match=r"token_ids.*\(?1, ?2"):
        linear_selected_logprobs(hidden, weight, ids, mask=mask)


def test_minus_infinity_from_the_bias_forbids(backend: str) -> None:
    hidden, weight, ids = draw((4,), F32)
    bias = torch.zeros(V)
    bias[V - 4 :] = -math.inf
    check(hidden, weight, ids, bias)
    lp = linear_selected_logprobs(hidden, weight, torch.full((4,), V - 1), bias=bias)
    assert (lp == -math.inf).all()


# Strides ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_logits_bytes", [TWO_ROWS, ALL])
def test_L6_strides_change_nothing(backend: str, max_logits_bytes: int) -> None:
    cases = {
        "transposed": (torch.randn(4, 3, H).transpose(0, 1), torch.randn(H, V).T),
        "sliced": (torch.randn(3, 5, H)[:, :-1], torch.randn(V, H + 2)[:, :H]),
        "expanded": (torch.randn(1, 4, H).expand(3, 4, H), torch.randn(V, 1).expand(V, H)),
        "last_strided": (torch.randn(3, H, 4).transpose(1, 2), torch.randn(2 * V, H)[::2]),
    }
    ids = torch.randint(0, V, (4, 3)).T
    incoming = [torch.tensor(1.0).expand(3, 4), torch.randn(4, 3).T]
    for hidden, weight in cases.values():
        check(hidden, weight, ids, max_logits_bytes=max_logits_bytes)
        inputs = [hidden.requires_grad_(), weight.requires_grad_()]
        dense = [leaf(hidden), leaf(weight)]
        with unchanged(hidden, weight, ids, *incoming):
            out = linear_selected_logprobs_with_entropy(
                *inputs, ids, max_logits_bytes=max_logits_bytes
            )
            mine = grads(out, inputs, incoming)
        out = linear_selected_logprobs_with_entropy(
            *dense, ids.contiguous(), max_logits_bytes=max_logits_bytes
        )
        expected = grads(out, dense, [g.contiguous() for g in incoming])
        for a, b in zip(mine, expected, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


# Work and memory ----------------------------------------------------------------------------------

BIG_V, BIG_H, BIG_N = 4000, 8, 120  # logits of 1.92 MB in float32


def big(dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor]:
    return (
        leaf(torch.randn(BIG_N, BIG_H).to(dtype)),
        leaf(torch.randn(BIG_V, BIG_H).to(dtype)),
        torch.randint(0, BIG_V, (BIG_N,)),
    )


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("chunks", [1, 4])
def test_holds_no_more_logits_than_allowed(
    backend: str, chunks: int, dtype: torch.dtype, entropy: bool
) -> None:
    """At most max_logits_bytes + 10 % beyond inputs and gradients, forward and backward."""
    limit = BIG_N * BIG_V * 4 // chunks
    hidden, weight, ids = big(dtype)
    fn = linear_selected_logprobs_with_entropy if entropy else linear_selected_logprobs

    def forward() -> Any:
        out = fn(hidden, weight, ids, max_logits_bytes=limit)
        return out if entropy else (out,)

    forward()  # first use
    vectors = 64 * BIG_N + 20_000  # ids, maxima, sums: a few numbers per row
    ran = usage(forward)
    assert ran.peak_bytes <= 1.1 * limit + vectors, "forward"
    gradients = (hidden.numel() + weight.numel()) * dtype.itemsize
    accumulator = 4 * weight.numel() if dtype == BF16 and chunks > 1 else 0
    back = usage(lambda: grads(ran.result, [hidden, weight], [torch.ones(BIG_N)] * len(ran.result)))
    assert back.peak_bytes <= 1.1 * limit + gradients + accumulator + vectors, "backward"


def test_holds_a_few_rows_where_only_one_is_allowed(backend: str) -> None:
    hidden, weight, ids = big()
    ran = usage(lambda: linear_selected_logprobs(hidden, weight, ids, max_logits_bytes=1))
    assert ran.peak_bytes <= 8 * 4 * BIG_V + 64 * BIG_N + 20_000


@pytest.mark.parametrize("limit", [1, 2**14, 2**17])
def test_a_small_limit_does_not_cut_the_weight_into_columns(limit: int) -> None:
    """A product with a few columns takes as long as one with 512."""
    hidden, weight, _ = big(BF16)
    head = Head(weight.detach(), None, 1.0, None, BIG_V, F32)
    how = plan(hidden, head, torch.ones(BIG_N, dtype=torch.bool), True, limit)
    assert how.columns >= 512


def gemm(rows: int) -> int:
    return 2 * rows * BIG_V * BIG_H


@pytest.mark.parametrize("chunks", [1, 6])
@pytest.mark.parametrize("compact", [True, False])
def test_computes_only_unmasked_rows(backend: str, chunks: int, compact: bool) -> None:
    hidden, weight, ids = big()
    mask = torch.arange(BIG_N) % 4 == 0
    ids[torch.arange(BIG_N) % 8 == 0] = -100
    rows = BIG_N // 8 if compact else BIG_N
    limit = BIG_N * BIG_V * 4 // chunks
    ran = usage(
        lambda: linear_selected_logprobs(
            hidden, weight, ids, mask=mask, max_logits_bytes=limit, compact=compact
        )
    )
    assert ran.gemm_flops == gemm(rows)
    back = usage(lambda: torch.autograd.grad(ran.result.sum(), [hidden, weight]))
    assert back.gemm_flops <= 3 * gemm(rows)  # logits again, and two gradients


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_argument_costs_no_gradient_gemm(backend: str, frozen: str) -> None:
    hidden, weight, ids = big()
    bias = leaf(torch.zeros(BIG_V))
    kept = [weight, bias] if frozen == "hidden" else [hidden, bias]
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    lp = linear_selected_logprobs(hidden, weight, ids, bias=bias)
    back = usage(lambda: torch.autograd.grad(lp.sum(), kept))
    assert back.gemm_flops <= 2 * gemm(BIG_N)


def test_only_the_bias_is_trained(backend: str) -> None:
    hidden, weight, ids = big()
    bias = leaf(torch.zeros(BIG_V))
    lp = linear_selected_logprobs(hidden.detach(), weight.detach(), ids, bias=bias)
    back = usage(lambda: torch.autograd.grad(lp.sum(), bias))
    assert back.gemm_flops <= gemm(BIG_N)
    expected = torch.bincount(ids, minlength=BIG_V) - (hidden @ weight.T).softmax(-1).sum(0)
    assert torch.allclose(back.result[0], expected, atol=1e-4)


def test_nothing_requires_a_gradient(backend: str) -> None:
    hidden, weight, ids = draw((4,), F32)
    assert not linear_selected_logprobs(hidden, weight, ids).requires_grad
    with torch.no_grad():
        assert not linear_selected_logprobs(leaf(hidden), leaf(weight), ids).requires_grad


# Autograd -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_logits_bytes", [ONE_ROW, ALL])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options: str, max_logits_bytes: int) -> None:
    hidden, weight, ids = draw((2, 2), F64)
    mask = torch.tensor([[True, False], [True, True]])

    def fn(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            linear_selected_logprobs_with_entropy(
                h, w, ids, bias=b, mask=mask, max_logits_bytes=max_logits_bytes, **OPTIONS[options]
            )
        )

    assert torch.autograd.gradcheck(fn, (leaf(hidden), leaf(weight), leaf(torch.randn(V).double())))


def test_second_derivative_is_right_or_an_error(backend: str) -> None:
    hidden, weight, ids = draw((3,), F32)

    def second(h: Tensor, w: Tensor, lp: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(lp.sum(), w, create_graph=True)
        return torch.autograd.grad((g**2).sum() + (h**3).sum(), h)[0]

    h, w = f64(hidden), f64(weight)
    expected = second(h, w, oracle.logprobs(h @ w.T, ids)[0])
    h, w = leaf(hidden), leaf(weight)
    try:
        mine = second(h, w, linear_selected_logprobs(h, w, ids))
    except RuntimeError as error:
        assert str(error)
    else:
        assert torch.allclose(mine.double(), expected, atol=1e-4)


def test_backward_twice(backend: str) -> None:
    hidden, weight, ids = draw((5,), F32)
    inputs = [leaf(hidden), leaf(weight)]
    lp = linear_selected_logprobs(*inputs, ids, max_logits_bytes=TWO_ROWS)
    first = torch.autograd.grad(lp.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(2 * lp.sum(), inputs)
    assert all(torch.allclose(2 * a, b) for a, b in zip(first, second, strict=True))


def sharded_weight(rank: int) -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    torch.manual_seed(0)
    hidden, weight = torch.randn(3, H), torch.randn(V + 1, H)
    ids = torch.tensor([1, 2, V])
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    half = (V + 1) // 2
    shard = DTensor.from_local(weight[rank * half : (rank + 1) * half], mesh, [Shard(0)])
    expected = oracle.logprobs(hidden.double() @ weight.double().T, ids)[0]
    try:
        lp = linear_selected_logprobs(hidden, shard, ids)
    except (TypeError, ValueError) as error:
        return "clear error" if "weight" in str(error) else f"unclear error: {error}"
    lp = lp.full_tensor() if isinstance(lp, DTensor) else lp
    return "right" if torch.allclose(lp.double(), expected, atol=1e-4) else "wrong in silence"


def test_L15_sharded_weight_is_an_error_or_right() -> None:
    assert set(ranks.run(sharded_weight)) <= {"clear error", "right"}


def test_L15_a_module_is_not_a_weight() -> None:
    hidden, _, ids = draw((3,), F32)
    head = torch.nn.Linear(H, V, bias=False)
    with pytest.raises(TypeError, match="weight"):
        linear_selected_logprobs(hidden, head, ids)


def test_L15_a_parametrised_weight_is_seen(backend: str) -> None:
    """LoRA as a parametrisation: what is read from the module has the adapter in it."""

    class Adapter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.randn(s)) for s in ((V, 2), (2, H)))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.a @ self.b

    hidden, _, ids = draw((3,), F32)
    head = torch.nn.Linear(H, V, bias=False)
    torch.nn.utils.parametrize.register_parametrization(head, "weight", Adapter())
    lp = linear_selected_logprobs(hidden, head.weight, ids)
    exact = oracle.logprobs(head(hidden).detach().double(), ids)[0]
    assert torch.allclose(lp.double(), exact, atol=1e-4)
    lp.sum().backward()
    assert all(p.grad is not None for p in head.parameters())


def test_determinism(backend: str) -> None:
    hidden, weight, ids = draw((50,), F32)

    def run() -> list[Tensor]:
        inputs = [leaf(hidden), leaf(weight)]
        out = linear_selected_logprobs_with_entropy(*inputs, ids, max_logits_bytes=7 * V * 4)
        return [*out, *grads(out, inputs, [torch.ones(50)] * 2)]

    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [F32, BF16], ids=str)
@pytest.mark.parametrize(("width", "vocab"), [(64, 1000), (576, 4096)])
def test_a_rows_bits_depend_on_its_logits_alone(
    width: int, vocab: int, kind: torch.dtype, threads: int
) -> None:
    """Whatever the batch: torch's GEMM may round few rows in another way, and nothing else may."""
    torch.set_num_threads(threads)
    hidden = torch.randn(67, width).to(kind)
    weight = (torch.randn(vocab, width) / 20).to(kind)
    ids = torch.randint(vocab, (67,))
    logits = hidden @ weight.t()
    together = linear_selected_logprobs(hidden, weight, ids)
    found = 0
    for rows in (1, 2, 3, 4, 5, 7, 16, 33, 66):
        for part in (slice(0, rows), slice(67 - rows, 67)):
            alone = linear_selected_logprobs(hidden[part], weight, ids[part])
            same = (hidden[part] @ weight.t() == logits[part]).all(-1)
            assert torch.equal(alone[same], together[part][same])
            assert torch.allclose(alone, together[part], rtol=1e-5, atol=1e-5)
            found += int(same.sum())
    assert found > 100  # else nothing was compared
