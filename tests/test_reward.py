import math
from typing import Any

import eager
import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure import grads, leaf, same_bits, unchanged
from oracle import assert_within_rule, f64
from torch import Tensor

from ppokern import ShapedRewards, kl_estimate, shaped_rewards

OP = "reward"
KINDS = ("k1", "k2", "k3", "k3+")
NAN, INF = math.nan, math.inf
T_, F_ = True, False


# The estimates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (7,), (2, 5), (2, 2, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_kl_estimate(
    backend: str, dtype: torch.dtype, kind: str, shape: tuple[int, ...], masked: bool
) -> None:
    a, b = torch.randn(2, *shape).to(dtype)
    mask = torch.rand(shape) < 0.6 if masked else None
    x, peer_in, exact_in = leaf(a), leaf(a), f64(a)
    with unchanged(x, b, mask):
        out = kl_estimate(x, b, kind, mask)
        (g,) = grads([out], [x], [torch.ones(shape)])
    peer = eager.total(eager.kl(peer_in, b, kind), mask, "none")
    exact = oracle.kl(exact_in, b, kind, mask)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert g.dtype == dtype
    assert_within_rule(out, peer, exact)
    ones = [torch.ones(shape)]
    assert_within_rule(g, grads([peer], [peer_in], ones)[0], grads([exact], [exact_in], ones)[0])


def test_kl_hand_worked(backend: str) -> None:
    a, b = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])  # d = .5, -1
    assert kl_estimate(a, b).tolist() == pytest.approx([0.5, -1.0])
    assert kl_estimate(a, b, "k2").tolist() == pytest.approx([0.125, 0.5])
    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(1) - 1 - 1]
    assert kl_estimate(a, b, "k3").tolist() == pytest.approx(k3)


def test_k3_of_a_small_difference_is_not_negative(backend: str) -> None:
    d = torch.tensor([1e-3, -1e-3, 1e-5, -1e-5, 0.0])
    out = kl_estimate(d, torch.zeros(5), "k3")
    assert (out >= 0).all()
    assert out.tolist() == pytest.approx([5e-7, 5e-7, 5e-11, 5e-11, 0], abs=2.5e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_kl_masked_positions_are_never_read(backend: str, kind: str, poison: float) -> None:
    a, b = torch.randn(2, 2, 6)
    mask = torch.tensor([T_, F_, T_, T_, F_, T_]).expand(2, 6)
    results = []
    for u, v, g in (
        (a, b, torch.ones(2, 6)),
        (
            a.masked_fill(~mask, poison),
            b.masked_fill(~mask, poison),
            torch.ones(2, 6).masked_fill(~mask, NAN),
        ),
    ):
        x = leaf(u)
        out = kl_estimate(x, v, kind, mask=mask)
        results.append((out, *grads([out], [x], [g])))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and (dirty[~mask] == 0).all()


def test_kl_reference_is_a_constant(backend: str) -> None:
    x, ref = leaf(torch.randn(4)), leaf(torch.randn(4))
    kl_estimate(x, ref, "k3").sum().backward()
    assert x.grad is not None and ref.grad is None
    assert not kl_estimate(x.detach(), ref).requires_grad


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2(backend: str) -> None:
    x, ref = leaf(torch.tensor([-1.0, -2.0, -0.5])), torch.tensor([-1.5, -1.0, -0.5])
    out = kl_estimate(x, ref, "k3+")
    assert torch.equal(out, kl_estimate(x, ref, "k3"))
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.5, -1.0, 0.0]


def test_on_average_the_gradient_of_k3_plus_is_that_of_the_kl() -> None:
    logits, ref = torch.randn(2, 7, dtype=torch.float64)
    logits = leaf(logits)
    logp, logq = logits.log_softmax(0), ref.log_softmax(0)
    p = logp.exp()
    (exact,) = torch.autograd.grad((p * (logp - logq)).sum(), logits, retain_graph=True)

    def expected(kind: str) -> Tensor:
        estimate = (p.detach() * kl_estimate(logp, logq, kind)).sum()
        return torch.autograd.grad(estimate, logits, retain_graph=True)[0]

    assert torch.allclose(expected("k3+"), exact, atol=1e-12)
    assert not torch.allclose(expected("k3"), exact, atol=1e-3)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])  # of k3+ value and gradient are of two kinds
def test_kl_gradcheck(kind: str) -> None:
    a, b = torch.randn(2, 2, 5, dtype=torch.float64)
    mask = torch.rand(2, 5) < 0.7
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, b, kind, mask), leaf(a))


@pytest.mark.parametrize("kind", KINDS)
def test_kl_second_derivative_is_right_or_an_error(backend: str, kind: str) -> None:
    a, b = torch.randn(2, 5)

    def second(x: Tensor, out: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return torch.autograd.grad((g**2).sum() + (x**3).sum(), x)[0]

    exact_in, x = f64(a), leaf(a)
    expected = second(exact_in, oracle.kl(exact_in, b, kind))
    try:
        mine = second(x, kl_estimate(x, b, kind))
    except RuntimeError as error:
        assert str(error)
    else:
        assert torch.allclose(mine.double(), expected, atol=1e-4)


def test_kl_strides_change_nothing(backend: str) -> None:
    a, b, mask = torch.randn(4, 3), torch.randn(3, 8)[:, ::2], torch.rand(3, 5)[:, :-1] < 0.5
    out = kl_estimate(a.T, b, "k3", mask)
    assert same_bits(out, kl_estimate(a.T.contiguous(), b.contiguous(), "k3", mask.contiguous()))


def test_mixed_dtypes(backend: str) -> None:
    a, b = torch.randn(4).bfloat16(), torch.randn(4)
    assert kl_estimate(a, b).dtype == torch.float32
    assert torch.allclose(kl_estimate(a, b, "k2").double(), oracle.kl(a, b, "k2"), atol=1e-6)
    assert kl_estimate(torch.randn(4).double(), b).dtype == torch.float64


# Shaped rewards -----------------------------------------------------------------------------------


def check(scores: Tensor, lp: Tensor, ref: Tensor, **options: Any) -> ShapedRewards:
    inputs = [x for x in (scores, lp, ref, *options.values()) if isinstance(x, Tensor)]
    with unchanged(*inputs):
        out = shaped_rewards(scores, lp, ref, **options)
    exact = oracle.shaped_rewards(scores, lp, ref, **options)
    assert isinstance(out, ShapedRewards)
    floats = [x.dtype for x in inputs if x.is_floating_point()]
    kl_peer = eager.kl(lp, ref, options.get("kl_kind", "k1"))
    for mine, truth, peer in zip(out, exact, (-options["kl_coef"] * kl_peer, kl_peer), strict=True):
        assert mine.dtype == (torch.float64 if torch.float64 in floats else torch.float32)
        del peer
        assert_within_rule(
            mine,
            truth,
            truth,
            unit=4 * max(1.0, kl_peer.abs().max().item()) if kl_peer.numel() else 1.0,
        )
    assert not out.rewards.requires_grad and not out.kl.requires_grad
    return out


def test_A6_the_score_lands_on_the_last_token(backend: str) -> None:
    mask = torch.tensor([[T_, T_, T_, F_, F_]])
    lp, ref = torch.tensor([[-1.0, -2, -3, NAN, NAN]]), torch.tensor([[-1.5, -1, -3, NAN, 7.0]])
    out = shaped_rewards(torch.tensor([4.0]), lp, ref, kl_coef=0.1, mask=mask)
    assert out.kl.tolist() == [pytest.approx([0.5, -1, 0, 0, 0])]
    assert out.rewards.tolist() == [pytest.approx([-0.05, 0.1, 4.0, 0, 0])]
    assert out.rewards.sum().item() == pytest.approx(4.0 - 0.1 * out.kl.sum().item())


@pytest.mark.parametrize(
    ("mask", "at"),
    [
        ([T_, T_, T_, T_], 3),
        ([F_, F_, T_, T_], 3),
        ([T_, F_, T_, F_], 2),
        ([T_, F_, F_, F_], 0),
        ([F_, F_, F_, F_], None),
    ],
    ids=["full", "left", "gap", "one", "none"],
)
def test_where_the_score_lands(backend: str, mask: list[bool], at: int | None) -> None:
    zeros = torch.zeros(4)
    score = torch.tensor(NAN if at is None else 3.0)
    out = shaped_rewards(score, zeros, zeros, kl_coef=0.5, mask=torch.tensor(mask))
    assert out.rewards.tolist() == [3.0 if i == at else 0.0 for i in range(4)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["plain", "mask", "score_mask", "token_rewards", "all"])
@pytest.mark.parametrize("layout", ["(T,)", "(B, T)", "(B, K, T)", "packed"])
def test_every_option_and_layout(
    backend: str, dtype: torch.dtype, layout: str, case: str, kind: str
) -> None:
    shape = {"(T,)": (5,), "(B, T)": (3, 5), "(B, K, T)": (2, 3, 4), "packed": (11,)}[layout]
    lp, ref = torch.randn(2, *shape).to(dtype)
    options: dict[str, Any] = {"kl_coef": 0.3, "kl_kind": kind}
    per_sequence = shape[:-1]
    if layout == "packed":
        options["cu_seqlens"] = torch.tensor([0, 4, 4, 9, 11], dtype=torch.int32)
        per_sequence = (4,)
    scores = torch.randn(per_sequence).to(dtype)
    if case in ("mask", "all"):
        options["mask"] = torch.rand(shape) < 0.6
    if case in ("score_mask", "all"):
        options["score_mask"] = torch.rand(per_sequence) < 0.5
        scores = scores.masked_fill(~options["score_mask"], NAN)
    if case in ("token_rewards", "all"):
        options["token_rewards"] = torch.randn(shape).to(dtype)
    check(scores, lp, ref, **options)


def test_int64_cu_seqlens(backend: str) -> None:
    lp, ref = torch.randn(2, 5)
    check(torch.randn(2), lp, ref, kl_coef=0.1, cu_seqlens=torch.tensor([0, 2, 5]))


@pytest.mark.parametrize(
    ("shape", "extra"),
    [
        ((0, 5), {}),
        ((3, 0), {}),
        ((0,), {}),
        ((2, 0, 3), {}),
        ((0,), {"cu_seqlens": torch.tensor([0], dtype=torch.int32)}),
        ((0,), {"cu_seqlens": torch.tensor([0, 0], dtype=torch.int32)}),
    ],
    ids=str,
)
def test_empty(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], extra: dict[str, Any]
) -> None:
    x = torch.empty(shape, dtype=dtype)
    n = len(extra["cu_seqlens"]) - 1 if extra else None
    scores = torch.ones(shape[:-1] if n is None else (n,), dtype=dtype)
    out = shaped_rewards(scores, x, x, kl_coef=0.1, **extra)
    assert out.rewards.shape == out.kl.shape == shape


@pytest.mark.parametrize("poison", [NAN, INF, -200.0])
def test_masked_positions_are_never_read(backend: str, poison: float) -> None:
    mask = torch.tensor([[T_, F_, T_], [F_, T_, F_]])
    lp, ref, extra = torch.randn(3, 2, 3)
    kwargs: dict[str, Any] = {"kl_coef": 0.2, "mask": mask, "kl_kind": "k3"}
    clean = shaped_rewards(torch.ones(2), lp, ref, token_rewards=extra, **kwargs)
    a, b, c = (x.masked_fill(~mask, poison) for x in (lp, ref, extra))
    dirty = shaped_rewards(torch.ones(2), a, b, token_rewards=c, **kwargs)
    assert all(torch.equal(x, y) for x, y in zip(clean, dirty, strict=True))
    assert (dirty.rewards[~mask] == 0).all() and (dirty.kl[~mask] == 0).all()


def test_a_coefficient_of_zero_is_off(backend: str) -> None:
    nothing = torch.full((1, 3), NAN)
    out = shaped_rewards(torch.tensor([2.0]), torch.zeros(1, 3), nothing, kl_coef=0.0)
    assert out.rewards.tolist() == [[0, 0, 2]]
    out = shaped_rewards(torch.tensor([2.0]), torch.zeros(1, 3), nothing - INF, kl_coef=0)
    assert out.rewards.tolist() == [[0, 0, 2]]


def test_outputs_are_constants(backend: str) -> None:
    scores, lp, ref, extra = (leaf(torch.randn(s)) for s in ((2,), (2, 3), (2, 3), (2, 3)))
    out = shaped_rewards(scores, lp, ref, kl_coef=0.1, token_rewards=extra)
    assert not out.rewards.requires_grad and not out.kl.requires_grad


def test_strides_change_nothing(backend: str) -> None:
    lp, ref, mask = torch.randn(5, 3).T, torch.randn(3, 10)[:, ::2], (torch.rand(5, 3) < 0.6).T
    scores = torch.tensor(2.0).expand(3)
    check(scores, lp, ref, kl_coef=0.1, mask=mask, token_rewards=torch.ones(1, 5).expand(3, 5))
    check(torch.randn(6)[::2], lp, ref, kl_coef=0.1, mask=mask)


@given(data=st.data(), seed=st.integers(0, 2**20))
def test_packed_equals_padded_and_sums_up(backend: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    total, width = sum(lengths), max(lengths) + 1
    lp, ref = torch.randn(2, total)
    scores, mask = torch.randn(len(lengths)), torch.rand(total) < 0.7
    packed = shaped_rewards(scores, lp, ref, kl_coef=0.3, mask=mask, cu_seqlens=cu)
    where = torch.arange(width) < torch.tensor(lengths)[:, None]
    padded_in = [torch.full(where.shape, NAN).masked_scatter(where, x) for x in (lp, ref)]
    padded_mask = torch.zeros_like(where).masked_scatter(where, mask)
    padded = shaped_rewards(scores, *padded_in, kl_coef=0.3, mask=padded_mask)
    assert torch.allclose(padded.rewards[where], packed.rewards, atol=1e-6)
    assert torch.allclose(padded.kl[where], packed.kl, atol=1e-6)
    given_scores = scores * padded_mask.any(-1)
    sums = given_scores - 0.3 * padded.kl.sum(-1)
    assert torch.allclose(padded.rewards.sum(-1), sums, atol=1e-5)
