"""The maths page: each formula against Python floats, each slope against autograd in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from measure import leaf
from torch import Tensor

from ppokern import token_math as page

F64 = torch.float64
INF = math.inf


def grid(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


D = grid(-3.0, -0.5, -1e-9, 0.0, 1e-9, 0.25, 2.0)
LOGITS = grid(-40.0, -3.0, 0.0, 0.5, 124.0)


@pytest.mark.parametrize(
    ("formula", "x", "expected"),
    [
        (lambda z: page.softcap_logit(z, 30.0), LOGITS, lambda z: 30 * math.tanh(z / 30)),
        (lambda z: page.softcap_slope(z, 30.0), LOGITS, lambda z: 1 - math.tanh(z / 30) ** 2),
        (
            lambda z: page.tempered_logit(z, grid(124.0)[0], grid(0.7)[0]),
            LOGITS,
            lambda z: (z - 124) / 0.7,
        ),
        (page.own_logprob_slope, grid(-1e-12, -0.5, -30.0), lambda lp: -math.expm1(lp)),
        (page.kl_k1, D, lambda d: d),
        (page.kl_k2, D, lambda d: d * d / 2),
        (page.kl_k3, D, lambda d: math.expm1(-d) + d),
        (page.kl_k1_slope, D, lambda d: 1.0),
        (page.kl_k2_slope, D, lambda d: d),
        (page.kl_k3_slope, D, lambda d: -math.expm1(-d)),
    ],
    ids=[
        *("softcap", "softcap_slope", "tempered", "own_logprob_slope"),
        *("k1", "k2", "k3", "k1_slope", "k2_slope", "k3_slope"),
    ],
)
def test_formula(
    formula: Callable[[Tensor], Tensor], x: Tensor, expected: Callable[[float], float]
) -> None:
    assert formula(x).tolist() == pytest.approx([expected(v) for v in x.tolist()], abs=1e-24)


@pytest.mark.parametrize(
    ("formula", "slope", "x"),
    [
        (lambda z: page.softcap_logit(z, 3.0), lambda z: page.softcap_slope(z, 3.0), LOGITS[:4]),
        (page.kl_k1, page.kl_k1_slope, D),
        (page.kl_k2, page.kl_k2_slope, D),
        (page.kl_k3, page.kl_k3_slope, D),
    ],
    ids=["softcap", "k1", "k2", "k3"],
)
def test_slope(
    formula: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    x = leaf(x)
    (g,) = torch.autograd.grad(formula(x).sum(), x)
    assert torch.allclose(g, slope(x.detach()), atol=1e-14)


def test_the_row_slopes_are_those_of_a_softmax() -> None:
    z = leaf(torch.randn(7, dtype=F64))
    logp = z.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum()
    (own,) = torch.autograd.grad(logp[2], z, retain_graph=True)
    assert own[2].item() == pytest.approx(page.own_logprob_slope(logp[2].detach()).item())
    (g,) = torch.autograd.grad(entropy, z)
    p, logp, entropy = logp.exp().detach(), logp.detach(), entropy.detach()
    assert torch.allclose(page.entropy_slope(p, logp, entropy), g, atol=1e-14)
    assert page.entropy_term(p, logp).sum().item() == pytest.approx(entropy.item())


def test_infinities_meet_no_zero() -> None:
    forbidden = grid(-INF)
    assert page.softcap_logit(forbidden, 30.0).item() == -INF
    assert page.entropy_term(grid(0.0), forbidden).item() == 0
    assert page.entropy_slope(grid(0.0), forbidden, grid(1.0)).item() == 0
    assert page.gae_step(grid(2.0), grid(0.0), grid(math.nan)).item() == 2
    for ratio in (INF, 0.0):
        loss, slope, _ = page.clip_surrogate(grid(ratio), grid(0.0), 0.2, 0.2, 3.0)
        assert loss.item() == slope.item() == 0
    loss, slope, flat = page.clip_surrogate(grid(INF), grid(2.0), 0.2, 0.2, None)
    assert (loss.item(), slope.item(), flat.item()) == (pytest.approx(-2.4), 0, True)


def test_gae() -> None:
    delta = page.gae_delta(grid(1.0), grid(0.5), grid(2.0), 0.9)
    assert delta.item() == pytest.approx(1 + 0.9 * 2 - 0.5)
    assert page.gae_step(delta, grid(0.8), grid(3.0)).item() == pytest.approx(2.3 + 0.8 * 3)


RATIOS = (0.5, 0.8, 0.9, 1.0, 1.15, 1.3, 2.5, 4.0)


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 1.5])
@pytest.mark.parametrize("ratio", RATIOS)
def test_clip_surrogate(ratio: float, advantage: float, dual: float | None) -> None:
    low, high = 0.25, 0.2
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    flat = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    if dual is not None and advantage < 0 and ratio > dual:
        objective, flat = dual * advantage, True
    loss, slope, is_flat = page.clip_surrogate(grid(ratio), grid(advantage), low, high, dual)
    assert loss.item() == pytest.approx(-objective)
    assert slope.item() == pytest.approx(0 if flat else -ratio * advantage)
    assert bool(is_flat) == flat


@pytest.mark.parametrize("target", [-1.0, 0.9, 3.0])
@pytest.mark.parametrize("value", [0.5, 0.9, 1.0, 1.15, 2.0])
def test_clip_value(value: float, target: float) -> None:
    clipped = min(max(value, 1 - 0.2), 1 + 0.2)
    error, other = (value - target) ** 2, (clipped - target) ** 2
    loss, slope, larger = page.clip_value(grid(value), grid(1.0), grid(target), 0.2)
    assert loss.item() == pytest.approx(max(error, other) / 2)
    assert slope.item() == pytest.approx(0 if other > error else value - target)
    assert bool(larger) == (other > error)
    loss, slope = page.value_error(grid(value), grid(target))
    assert loss.item() == pytest.approx(error / 2) and slope.item() == pytest.approx(value - target)
