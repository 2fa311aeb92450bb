import math
from collections.abc import Callable
from typing import Any

import eager
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure import grads, leaf, same_bits, unchanged
from oracle import assert_within_rule, f64
from torch import Tensor

from ppokern import Loss, ppo_loss, ppo_policy_loss, ppo_value_loss

OP = "ppo_loss"
NAN, INF = math.nan, math.inf
T_, F_ = True, False
AGGREGATES = ("token_mean", "sequence_mean", "sequence_sum", "sum", "none")
SHAPES = {
    "(N,)": ((7,), None),
    "(B, T)": ((3, 5), None),
    "(B, K, T)": ((2, 2, 4), None),
    "packed": ((11,), torch.tensor([0, 4, 4, 9, 11], dtype=torch.int32)),
    "packed_int64": ((6,), torch.tensor([0, 1, 6])),
}


def away_from_edges(log_ratio: Tensor, edges: list[float]) -> Tensor:
    """Moves log-ratios that a rounding could push over a clip edge."""
    for e in edges:
        log_ratio = torch.where((log_ratio - e).abs() < 0.02, log_ratio + 0.05, log_ratio)
    return log_ratio


def draw(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 0.5) -> dict[str, Tensor]:
    """A policy batch; the dtype's own rounding is over before the oracle sees it."""
    old = -torch.rand(shape) * 3 - 0.1
    d = away_from_edges(spread * torch.randn(shape), [math.log(x) for x in (0.7, 0.8, 1.2, 1.3, 2)])
    return {
        "logprobs": (old + d).to(dtype),
        "old_logprobs": old.to(dtype),
        "advantages": torch.randn(shape).to(dtype),
    }


def draw_values(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    old = torch.randn(shape)
    off = away_from_edges(0.3 * torch.randn(shape), [0.2, -0.2])
    return {
        "values": (old + off).to(dtype),
        "old_values": old.to(dtype),
        "returns": torch.randn(shape).to(dtype),
    }


def check_stats(mine: dict[str, Tensor], truth: dict[str, float], wide: torch.dtype) -> None:
    for name, expected in truth.items():
        got = mine[name]
        assert got.ndim == 0 and got.is_floating_point() and not got.requires_grad, name
        tolerance = 1e-12 if wide == torch.float64 else 3e-6
        assert got.item() == pytest.approx(expected, rel=tolerance, abs=tolerance), name


def incoming_for(loss: Tensor) -> Tensor:
    return torch.randn(loss.shape) if loss.ndim else torch.tensor(1.7)


def compare(
    run: Callable[..., Loss],
    inputs: dict[str, Tensor],
    flows: tuple[str, ...],
    eager_fn: Callable[..., Tensor],
    oracle_fn: Callable[..., tuple[Tensor, dict[str, float]]],
    **options: Any,
) -> Loss:
    """Loss, statistics and every gradient against float64 under the rule."""
    mine, peer, truth = (
        {k: make(x) if k in flows else x for k, x in inputs.items()} for make in (leaf, leaf, f64)
    )
    tensors = [x for x in (*mine.values(), *options.values()) if isinstance(x, Tensor)]
    with unchanged(*tensors):
        out = run(**mine, **options)
        incoming = incoming_for(out.loss)
        got = grads([out.loss], [mine[k] for k in flows], [incoming])
    theirs = eager_fn(**peer, **options)
    exact, stats = oracle_fn(**truth, **options)
    floats = [x.dtype for x in tensors if x.is_floating_point()]
    wide = torch.float64 if torch.float64 in floats else torch.float32
    assert isinstance(out, Loss) and out.loss.dtype == wide
    assert_within_rule(out.loss, theirs, exact)
    peers = grads([theirs], [peer[k] for k in flows], [incoming])
    truths = grads([exact], [truth[k] for k in flows], [incoming])
    for k, a, b, c in zip(flows, got, peers, truths, strict=True):
        assert a.dtype == inputs[k].dtype
        assert_within_rule(a, b, c, unit=c.abs().max().item())
    check_stats(out.stats, stats, wide)
    return out


def eager_policy(**kw: Any) -> Tensor:
    shared = {k: kw.get(k) for k in ("mask", "denominator", "cu_seqlens")}
    how = kw.pop("aggregate", "token_mean")
    kw.pop("denominator", None)
    tokens = eager.policy_tokens(**kw)
    return eager.total(tokens, shared["mask"], how, shared["denominator"], shared["cu_seqlens"])


def check_policy(inputs: dict[str, Tensor], **options: Any) -> Loss:
    return compare(
        ppo_policy_loss, inputs, ("logprobs",), eager_policy, oracle.policy_loss, **options
    )


def eager_value(**kw: Any) -> Tensor:
    names = ("values", "old_values", "returns", "clip_range")
    tokens = eager.value_tokens(**{k: v for k, v in kw.items() if k in names})
    return eager.total(
        tokens,
        kw.get("mask"),
        kw.get("aggregate", "token_mean"),
        kw.get("denominator"),
        kw.get("cu_seqlens"),
    )


def check_value(inputs: dict[str, Tensor], **options: Any) -> Loss:
    return compare(ppo_value_loss, inputs, ("values",), eager_value, oracle.value_loss, **options)


# Hand-worked --------------------------------------------------------------------------------------


def bandit_tokens(*pairs: tuple[float, float]) -> dict[str, Tensor]:
    ratio, advantage = torch.tensor(pairs).T
    return {
        "logprobs": leaf(ratio.log()),
        "old_logprobs": torch.zeros(len(pairs)),
        "advantages": advantage.contiguous(),
    }


P1 = ((1.35, 1.0), (0.65, 1.0), (1.35, -1.0), (0.65, -1.0))


def test_P1_the_four_corners(backend: str) -> None:
    inputs = bandit_tokens(*P1)
    out = ppo_policy_loss(**inputs, clip_range=0.2, aggregate="none")
    assert out.loss.tolist() == pytest.approx([-1.2, -0.65, 1.35, 0.8])
    (g,) = torch.autograd.grad(out.loss.sum(), inputs["logprobs"])
    assert g.tolist() == pytest.approx([0, -0.65, 1.35, 0])
    assert out.stats["clip_fraction"] == 1
    assert out.stats["clip_fraction_active"] == 0.5
    assert out.stats["ratio_mean"].item() == pytest.approx(1.0)
    assert out.stats["ratio_min"].item() == pytest.approx(0.65)
    assert out.stats["ratio_max"].item() == pytest.approx(1.35)
    assert out.stats["policy_loss"].item() == pytest.approx(0.3 / 4)


def test_P1_asymmetric_range_and_dual_clip(backend: str) -> None:
    pairs = ((1.25, 1.0), (0.75, -1.0), (1.5, -1.0), (4.0, -1.0), (4.0, 1.0), (0.5, -2.0))
    inputs = bandit_tokens(*pairs)
    out = ppo_policy_loss(**inputs, clip_range=(0.3, 0.2), dual_clip=3.0, aggregate="none")
    assert out.loss.tolist() == pytest.approx([-1.2, 0.75, 1.5, 3.0, -1.2, 1.4])
    (g,) = torch.autograd.grad(out.loss.sum(), inputs["logprobs"])
    assert g.tolist() == pytest.approx([0, 0.75, 1.5, 0, 0, 0])
    assert out.stats["clip_fraction"].item() == pytest.approx(5 / 6)
    assert out.stats["clip_fraction_active"].item() == pytest.approx(4 / 6)


def test_the_gradient_flows_on_the_edge_itself(backend: str) -> None:
    """A ratio of exactly 1 at a range of nothing."""
    new = leaf(torch.zeros(2))
    out = ppo_policy_loss(new, torch.zeros(2), torch.tensor([1.0, -1.0]), clip_range=0.0)
    (g,) = torch.autograd.grad(out.loss, new)
    assert g.tolist() == [-0.5, 0.5]
    assert out.stats["clip_fraction"] == out.stats["clip_fraction_active"] == 0


def test_P2_old_equals_new(backend: str) -> None:
    new = leaf(-torch.rand(2, 5))
    a = torch.randn(2, 5)
    out = ppo_policy_loss(new, new.detach().clone(), a)
    for name, expected in {
        "ratio_mean": 1,
        "ratio_min": 1,
        "ratio_max": 1,
        "approx_kl_k1": 0,
        "approx_kl_k2": 0,
        "approx_kl_k3": 0,
        "clip_fraction": 0,
        "clip_fraction_active": 0,
    }.items():
        assert out.stats[name] == expected, name
    assert out.loss.item() == pytest.approx(-a.mean().item(), abs=1e-6)
    (g,) = torch.autograd.grad(out.loss, new)
    assert torch.allclose(g, -a / 10)
    (flipped,) = torch.autograd.grad(ppo_policy_loss(new, new.detach(), -a).loss, new)
    assert torch.equal(flipped, -g)
    zero = ppo_policy_loss(new, new.detach(), torch.zeros(2, 5)).loss
    assert zero == 0 and (torch.autograd.grad(zero, new)[0] == 0).all()


def test_P6_one_sample_does_not_see_the_divergence(backend: str) -> None:
    new, old = math.log(0.6), math.log(0.5)
    out = ppo_policy_loss(*(torch.tensor([x]) for x in (new, old, 1.0)))
    d = new - old
    assert out.stats["ratio_mean"].item() == pytest.approx(1.2)
    assert out.stats["approx_kl_k1"].item() == pytest.approx(-d)
    assert out.stats["approx_kl_k2"].item() == pytest.approx(d * d / 2)
    assert out.stats["approx_kl_k3"].item() == pytest.approx(0.2 - d, abs=1e-7)
    assert out.loss.item() == pytest.approx(-1.2)


@pytest.mark.parametrize(
    ("clip", "p", "ratio", "kl"), [(None, 0.9492, 1.8984, 0.8231), (0.2, 0.6097, 1.2193, 0.0246)]
)
def test_P7_two_armed_bandit(
    backend: str, clip: float | None, p: float, ratio: float, kl: float
) -> None:
    theta = torch.zeros((), dtype=torch.float32)
    old, advantages = torch.full((2,), math.log(0.5)), torch.tensor([1.0, -1.0])
    for _ in range(40):
        t = leaf(theta)
        new = torch.nn.functional.logsigmoid(torch.stack([t, -t]))
        out = ppo_policy_loss(
            new, old, advantages, clip_range=(0.99, 1e6) if clip is None else clip
        )
        theta = theta - 0.3 * torch.autograd.grad(out.loss, t)[0]
    got = torch.sigmoid(theta).item()
    assert got == pytest.approx(p, abs=5e-5)
    assert got / 0.5 == pytest.approx(ratio, abs=1e-4)
    assert 0.5 * math.log(0.25 / (got * (1 - got))) == pytest.approx(kl, abs=1e-4)


def test_value_hand_worked(backend: str) -> None:
    """Inside the range; clipped and worse; clipped and better; below."""
    v = leaf(torch.tensor([1.1, 2.0, 2.0, -1.0]))
    old, ret = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([2.0, 3.0, 0.0, -2.0])
    out = ppo_value_loss(v, old, ret, clip_range=0.5, aggregate="none")
    assert out.loss.tolist() == pytest.approx([0.405, 1.125, 2.0, 1.125])
    (g,) = torch.autograd.grad(out.loss.sum(), v)
    assert g.tolist() == pytest.approx([-0.9, 0, 2, 0])
    assert out.stats["value_clip_fraction"] == 0.5
    out = ppo_value_loss(v, old, ret, clip_range=None)
    assert out.loss.item() == pytest.approx((0.81 + 1 + 4 + 1) / 8)
    (g,) = torch.autograd.grad(out.loss, v)
    assert g.tolist() == pytest.approx([-0.225, -0.25, 0.5, 0.25])
    assert "value_clip_fraction" not in out.stats


def test_aggregates_hand_worked(backend: str) -> None:
    """Token losses [1, 2, 3], [4], and a sequence without tokens, at ratio 1."""
    a = -torch.tensor([[1.0, 2, 3], [4, NAN, NAN], [NAN, NAN, NAN]])
    mask, zeros = ~a.isnan(), torch.zeros(3, 3)
    expected = {"token_mean": 2.5, "sequence_mean": 3.0, "sequence_sum": 5.0, "sum": 10.0}
    for how, value in expected.items():
        out = ppo_policy_loss(zeros, zeros, a, mask=mask, aggregate=how)
        assert out.loss.item() == pytest.approx(value), how
        assert out.stats["policy_loss"].item() == pytest.approx(value), how
        assert (out.stats["n_tokens"], out.stats["n_sequences"]) == (4, 2)
    out = ppo_policy_loss(zeros, zeros, a, mask=mask, aggregate="none")
    assert out.loss.tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    assert out.stats["policy_loss"].item() == pytest.approx(2.5)
    for how, value in {
        "token_mean": 10 / 8,
        "sequence_mean": 6 / 8,
        "sequence_sum": 10 / 8,
    }.items():
        for denominator in (8, 8.0, torch.tensor(8), torch.tensor(8.0)):
            out = ppo_policy_loss(
                zeros, zeros, a, mask=mask, aggregate=how, denominator=denominator
            )
            assert out.loss.item() == pytest.approx(value), how
            assert out.stats["policy_loss"].item() == pytest.approx(value), how
            assert out.stats["ratio_mean"] == 1


def test_sequence_ratio_hand_worked(backend: str) -> None:
    d = torch.tensor([[0.3, 0.1, NAN], [-0.6, 0.0, -0.3]])
    new = leaf(d)
    a = torch.tensor([[1.0, -1.0, NAN], [1.0, -1.0, 2.0]])
    out = ppo_policy_loss(
        new, torch.zeros(2, 3), a, mask=~d.isnan(), ratio="sequence", aggregate="none"
    )
    up, down = math.exp(0.2), math.exp(-0.3)
    expected = [-1.2, up, 0, -down, 0.8, -2 * down]
    assert out.loss.flatten().tolist() == pytest.approx(expected)
    (g,) = torch.autograd.grad(out.loss.sum(), new)
    first, second = up / 2, -3 * down / 3  # tokens not on the flat side, over the sequence's length
    assert g.flatten().tolist() == pytest.approx([first, first, 0, second, second, second])
    assert out.stats["ratio_mean"].item() == pytest.approx((2 * up + 3 * down) / 5)
    assert out.stats["clip_fraction"] == 1
    assert out.stats["clip_fraction_active"].item() == pytest.approx(2 / 5)


# Every option and layout --------------------------------------------------------------------------

POLICY: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "plain": lambda s: {},
    "asymmetric": lambda s: {"clip_range": (0.3, 0.2)},
    "dual_clip": lambda s: {"dual_clip": 2.0},
    "weights": lambda s: {"weights": torch.rand(s)},
    "sequence": lambda s: {"ratio": "sequence", "clip_range": 5e-3},
    "all": lambda s: {
        "ratio": "sequence",
        "clip_range": (5e-3, 4e-3),
        "dual_clip": 2.0,
        "weights": torch.rand(s),
        "mask": torch.rand(s) < 0.6,
    },
    "mask": lambda s: {"mask": torch.rand(s) < 0.6},
}


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("options", POLICY)
def test_policy(
    backend: str, dtype: torch.dtype, layout: str, aggregate: str, options: str
) -> None:
    shape, cu = SHAPES[layout]
    check_policy(draw(shape, dtype), aggregate=aggregate, cu_seqlens=cu, **POLICY[options](shape))


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("clip_range", [0.2, None])
@pytest.mark.parametrize("masked", [False, True])
def test_value(
    backend: str,
    dtype: torch.dtype,
    layout: str,
    aggregate: str,
    clip_range: float | None,
    masked: bool,
) -> None:
    shape, cu = SHAPES[layout]
    mask = torch.rand(shape) < 0.6 if masked else None
    check_value(
        draw_values(shape, dtype),
        mask=mask,
        clip_range=clip_range,
        aggregate=aggregate,
        cu_seqlens=cu,
    )


@pytest.mark.parametrize("aggregate", AGGREGATES[:3])
@pytest.mark.parametrize("denominator", [17, 2.5, torch.tensor(9.0)], ids=repr)
def test_denominator(backend: str, aggregate: str, denominator: Any) -> None:
    mask = torch.rand(3, 5) < 0.7
    check_policy(
        draw((3, 5), torch.float32), mask=mask, aggregate=aggregate, denominator=denominator
    )
    check_value(
        draw_values((3, 5), torch.float32), mask=mask, aggregate=aggregate, denominator=denominator
    )


def test_the_last_dimension_is_a_sequence(backend: str) -> None:
    """(B, T) that isn't masked, (B * T) packed, and (B, 1, T) are one thing."""
    inputs = draw((3, 4), torch.float32)
    cu = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    for how in ("sequence_mean", "sequence_sum"):
        kw: dict[str, Any] = {"aggregate": how, "ratio": "sequence"}
        a = ppo_policy_loss(**inputs, **kw).loss
        b = ppo_policy_loss(**{k: x.flatten() for k, x in inputs.items()}, cu_seqlens=cu, **kw).loss
        c = ppo_policy_loss(**{k: x[:, None] for k, x in inputs.items()}, **kw).loss
        assert torch.allclose(a, b) and torch.allclose(a, c)


# The joint loss -----------------------------------------------------------------------------------


def eager_joint(**kw: Any) -> Tensor:
    how, cu, mask = kw.get("aggregate", "token_mean"), kw.get("cu_seqlens"), kw.get("mask")
    denominator = kw.get("denominator")
    names = ("logprobs", "old_logprobs", "advantages", "mask", "clip_range", "dual_clip", "ratio")
    names += ("weights", "cu_seqlens", "log_ratio_limit")
    tokens = eager.policy_tokens(**{k: v for k, v in kw.items() if k in names})
    out = eager.total(tokens, mask, how, denominator, cu)
    value = eager.value_tokens(
        kw["values"], kw["old_values"], kw["returns"], kw.get("value_clip_range", 0.2)
    )
    value_mask = kw["value_mask"] if kw.get("value_mask") is not None else mask
    over = kw.get("value_denominator") or denominator
    out = out + kw.get("value_coef", 0.5) * eager.total(value, value_mask, how, over, cu)
    if kw.get("entropy_coef"):
        out = out - kw["entropy_coef"] * eager.total(
            eager.compute(kw["entropy"]), mask, how, denominator, cu
        )
    if kw.get("kl_coef"):
        kl = eager.kl(kw["logprobs"], kw["ref_logprobs"], kw.get("kl_kind", "k3"))
        out = out + kw["kl_coef"] * eager.total(kl, mask, how, denominator, cu)
    return out


def check_joint(inputs: dict[str, Tensor], **options: Any) -> Loss:
    flows = ("logprobs", "values", *(("entropy",) if options.get("entropy_coef") else ()))
    return compare(ppo_loss, inputs, flows, eager_joint, oracle.ppo_loss, **options)


JOINT: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "plain": lambda s: {"value_coef": 1.0},
    "entropy": lambda s: {"entropy_coef": 0.1, "value_coef": 1.0},
    "kl_k1": lambda s: {"kl_coef": 0.3, "kl_kind": "k1", "value_coef": 1.0},
    "kl_k2": lambda s: {"kl_coef": 0.3, "kl_kind": "k2", "value_coef": 1.0},
    "kl_k3": lambda s: {"kl_coef": 0.3, "value_coef": 1.0},
    "kl_k3+": lambda s: {"kl_coef": 0.3, "kl_kind": "k3+", "value_coef": 1.0},
    "value_mask": lambda s: {
        "mask": torch.rand(s) < 0.6,
        "value_mask": torch.rand(s) < 0.6,
        "value_coef": 1.0,
    },
    "unclipped_value": lambda s: {"value_clip_range": None, "value_coef": 1.0},
    "all": lambda s: {
        "mask": torch.rand(s) < 0.6,
        "value_mask": torch.rand(s) < 0.6,
        "entropy_coef": 0.1,
        "kl_coef": 0.3,
        "value_coef": 1.0,
        "dual_clip": 2.0,
        "weights": torch.rand(s),
        "ratio": "sequence",
        "clip_range": (5e-3, 4e-3),
        "value_clip_range": 0.3,
    },
}


def draw_joint(shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]) -> Any:
    inputs = {**draw(shape, dtype), **draw_values(shape, dtype)}
    if options.get("entropy_coef"):
        inputs["entropy"] = torch.rand(shape).to(dtype)
    if options.get("kl_coef"):
        inputs["ref_logprobs"] = (inputs["old_logprobs"] + 0.3 * torch.randn(shape)).to(dtype)
    return inputs


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("case", JOINT)
def test_joint(backend: str, dtype: torch.dtype, layout: str, aggregate: str, case: str) -> None:
    shape, cu = SHAPES[layout]
    options = JOINT[case](shape)
    inputs = draw_joint(shape, dtype, options)
    check_joint(inputs, aggregate=aggregate, cu_seqlens=cu, **options)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("case", JOINT)
def test_a_token_without_a_dimension(
    backend: str, dtype: torch.dtype, aggregate: str, case: str
) -> None:
    """It is a sequence of one token."""
    options = JOINT[case]((1,))
    inputs = draw_joint((1,), dtype, options)
    results = []
    for shape in ((), (1,)):
        kw = {k: x.view(shape) if isinstance(x, Tensor) else x for k, x in options.items()}
        batch = {k: leaf(x.view(shape)) for k, x in inputs.items()}
        out = ppo_loss(**batch, aggregate=aggregate, **kw)
        assert out.loss.shape == (shape if aggregate == "none" else ())
        flows = torch.autograd.grad(out.loss.sum(), [batch["logprobs"], batch["values"]])
        results.append([x.view(1) for x in (out.loss, *out.stats.values(), *flows)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("value_coef", [0.5, 0.1, 2])
def test_value_coef(backend: str, value_coef: float) -> None:
    inputs = draw_joint((3, 5), torch.float32, {})
    out = ppo_loss(**inputs, value_coef=value_coef)
    policy, value = (
        oracle.policy_loss(**{k: inputs[k] for k in ("logprobs", "old_logprobs", "advantages")}),
        oracle.value_loss(*(inputs[k] for k in ("values", "old_values", "returns"))),
    )
    assert out.loss.item() == pytest.approx((policy[0] + value_coef * value[0]).item(), rel=1e-5)
    default = ppo_loss(**inputs).loss.item()
    assert default == pytest.approx((policy[0] + 0.5 * value[0]).item(), rel=1e-5)


@pytest.mark.parametrize("aggregate", AGGREGATES[:3])
def test_value_denominator(backend: str, aggregate: str) -> None:
    masks = {"mask": torch.rand(3, 5) < 0.6, "value_mask": torch.rand(3, 5) < 0.6}
    inputs = draw_joint((3, 5), torch.float32, {})
    kw: dict[str, Any] = dict(aggregate=aggregate, value_coef=1.0, **masks)
    check_joint(inputs, denominator=7.0, **kw)
    check_joint(inputs, denominator=7.0, value_denominator=11, **kw)
    check_joint(inputs, value_denominator=torch.tensor(5.0), **kw)


def test_the_joint_loss_is_the_sum_of_its_terms(backend: str) -> None:
    inputs = draw_joint((3, 5), torch.float32, {"entropy_coef": 1, "kl_coef": 1})
    mask = torch.rand(3, 5) < 0.6
    joint = ppo_loss(**inputs, mask=mask, entropy_coef=0.1, kl_coef=0.2, value_coef=0.7)
    policy = ppo_policy_loss(
        *(inputs[k] for k in ("logprobs", "old_logprobs", "advantages")), mask=mask
    )
    value = ppo_value_loss(*(inputs[k] for k in ("values", "old_values", "returns")), mask=mask)
    d = inputs["logprobs"] - inputs["ref_logprobs"]
    kl = ((-d).exp() - 1 + d)[mask].mean()
    entropy = inputs["entropy"][mask].mean()
    expected = policy.loss + 0.7 * value.loss - 0.1 * entropy + 0.2 * kl
    assert joint.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert joint.stats["kl"].item() == pytest.approx(kl.item(), rel=1e-5)
    assert joint.stats["entropy"].item() == pytest.approx(entropy.item(), rel=1e-5)
    for name in set(policy.stats):
        assert joint.stats[name].item() == pytest.approx(policy.stats[name].item(), rel=1e-5), name
    assert joint.stats["value_clip_fraction"] == value.stats["value_clip_fraction"]


def test_statistics_that_do_not_apply_are_absent(backend: str) -> None:
    inputs = draw_joint((2, 3), torch.float32, {})
    policy = ppo_policy_loss(*(inputs[k] for k in ("logprobs", "old_logprobs", "advantages")))
    assert not {"value_loss", "value_clip_fraction", "entropy", "kl"} & set(policy.stats)
    value = ppo_value_loss(*(inputs[k] for k in ("values", "old_values", "returns")))
    assert not {"policy_loss", "ratio_mean", "approx_kl_k1", "clip_fraction"} & set(value.stats)
    assert not {"entropy", "kl"} & set(ppo_loss(**inputs).stats)


def test_what_is_off_is_not_read(backend: str) -> None:
    inputs = draw_joint((2, 3), torch.float32, {})
    nothing = torch.full((2, 3), NAN)
    policy = ppo_policy_loss(*(inputs[k] for k in ("logprobs", "old_logprobs", "advantages")))
    for poison in (nothing, nothing.nan_to_num(INF), nothing.nan_to_num(-INF)):
        kw = {k: inputs[k] for k in ("logprobs", "old_logprobs", "advantages")}
        new, v = leaf(kw.pop("logprobs")), leaf(poison)
        out = ppo_loss(
            new,
            **kw,
            values=v,
            old_values=poison,
            returns=poison,
            value_coef=0.0,
            entropy=poison,
            entropy_coef=0.0,
            ref_logprobs=poison,
            kl_coef=0.0,
        )
        assert out.loss.item() == pytest.approx(policy.loss.item())
        g, gv = torch.autograd.grad(out.loss, [new, v], allow_unused=True)
        assert g.isfinite().all()
        assert gv is None or (gv == 0).all()


def test_coefficients_of_zero_given_as_integers(backend: str) -> None:
    inputs = draw_joint((2, 3), torch.float32, {})
    nothing = torch.full((2, 3), NAN)
    out = ppo_loss(**inputs, entropy=nothing, entropy_coef=0, ref_logprobs=nothing, kl_coef=0)
    assert out.loss.isfinite()


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, 200.0, -200.0, -INF, INF])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_P3_masked_positions_are_never_read(
    backend: str, dtype: torch.dtype, aggregate: str, ratio: str, poison: float
) -> None:
    shape = (3, 5)
    inputs = draw_joint(shape, dtype, {"entropy_coef": 1, "kl_coef": 1})
    mask = torch.tensor([[T_, T_, T_, F_, F_], [F_, T_, F_, T_, F_], [F_] * 5])
    options: dict[str, Any] = {
        "mask": mask,
        "entropy_coef": 0.1,
        "kl_coef": 0.2,
        "aggregate": aggregate,
        "ratio": ratio,
    }
    flows, results = ("logprobs", "values", "entropy"), []
    for fill in (None, poison):
        given_in = {k: x if fill is None else x.masked_fill(~mask, fill) for k, x in inputs.items()}
        weights = torch.ones(shape) if fill is None else torch.ones(shape).masked_fill(~mask, fill)
        for k in flows:
            given_in[k] = leaf(given_in[k])
        out = ppo_loss(**given_in, weights=weights, **options)
        incoming = torch.ones(out.loss.shape)
        if fill is not None and aggregate == "none":
            incoming = incoming.masked_fill(~mask, NAN)
        g = grads([out.loss], [given_in[k] for k in flows], [incoming])
        results.append((out.loss, *g, *out.stats.values()))
    for clean, dirty in zip(*results, strict=True):
        assert same_bits(clean, dirty)
    for g in results[1][1:4]:
        assert (g[~mask] == 0).all()


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("denominator", [None, 5])
def test_P4_everything_masked(
    backend: str, aggregate: str, ratio: str, denominator: int | None
) -> None:
    if denominator and aggregate in ("sum", "none"):
        pytest.skip("no denominator there")
    nothing = {
        k: torch.full((2, 3), NAN) for k in ("old_logprobs", "advantages", "old_values", "returns")
    }
    new, v = leaf(torch.full((2, 3), NAN)), leaf(torch.full((2, 3), INF))
    mask = torch.zeros(2, 3, dtype=torch.bool)
    kw: dict[str, Any] = {"mask": mask, "aggregate": aggregate, "denominator": denominator}
    policy = ppo_policy_loss(new, nothing["old_logprobs"], nothing["advantages"], ratio=ratio, **kw)
    value = ppo_value_loss(v, nothing["old_values"], nothing["returns"], **kw)
    joint = ppo_loss(logprobs=new, values=v, ratio=ratio, **nothing, **kw)
    for out, inputs in ((policy, [new]), (value, [v]), (joint, [new, v])):
        assert (out.loss == 0).all()
        for g in torch.autograd.grad(out.loss.sum(), inputs):
            assert (g == 0).all()
        assert all(s == 0 for s in out.stats.values())


@pytest.mark.parametrize(
    ("shape", "cu"),
    [
        ((0,), None),
        ((0, 3), None),
        ((3, 0), None),
        ((0,), torch.tensor([0], dtype=torch.int32)),
        ((0,), torch.tensor([0, 0], dtype=torch.int32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_empty(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], cu: Tensor | None, aggregate: str
) -> None:
    inputs = draw_joint(shape, dtype, {})
    new, v = inputs["logprobs"], inputs["values"] = leaf(inputs["logprobs"]), leaf(inputs["values"])
    out = ppo_loss(**inputs, aggregate=aggregate, cu_seqlens=cu)
    assert out.loss.shape == (shape if aggregate == "none" else ())
    assert (out.loss == 0).all()
    for g, x in zip(torch.autograd.grad(out.loss.sum(), [new, v]), (new, v), strict=True):
        assert g.shape == x.shape
    assert all(s == 0 for s in out.stats.values())


# Limits and values that are not finite ------------------------------------------------------------


def test_log_ratio_limit(backend: str) -> None:
    new = leaf(torch.tensor([30.0, -30.0, 1.0, 30.0]))
    a = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    zeros = torch.zeros(4)
    out = ppo_policy_loss(new, zeros, a, aggregate="none")
    assert out.loss[0].item() == pytest.approx(math.exp(20), rel=1e-5)
    assert out.loss[1].item() == pytest.approx(-math.exp(-20), rel=1e-4)
    (g,) = torch.autograd.grad(out.loss.sum(), new)
    assert g.tolist() == pytest.approx([0, 0, math.e, 0])
    assert out.stats["ratio_max"].item() == pytest.approx(math.exp(20), rel=1e-5)
    assert out.stats["approx_kl_k1"].item() == pytest.approx(-31 / 4)
    assert out.stats["approx_kl_k2"].item() == pytest.approx((3 * 450 + 0.5) / 4)
    assert out.stats["approx_kl_k3"].item() == pytest.approx(2 * math.exp(30) / 4, rel=1e-4)
    out = ppo_policy_loss(new, zeros, a, aggregate="none", log_ratio_limit=None)
    assert out.loss[0].item() == pytest.approx(math.exp(30), rel=1e-5)
    (g,) = torch.autograd.grad(out.loss.sum(), new)
    assert g[0].item() == pytest.approx(math.exp(30), rel=1e-5)
    out = ppo_policy_loss(new, zeros, a, aggregate="none", log_ratio_limit=0.5)
    assert out.loss[2].item() == pytest.approx(math.exp(0.5), rel=1e-5)
    assert torch.autograd.grad(out.loss.sum(), new)[0].tolist() == [0, 0, 0, 0]


def test_log_ratio_limit_of_a_sequence_is_that_of_its_mean(backend: str) -> None:
    new = leaf(torch.tensor([[30.0, -28.0], [30.0, 30.0]]))
    kw: dict[str, Any] = {"ratio": "sequence", "aggregate": "none"}
    out = ppo_policy_loss(new, torch.zeros(2, 2), -torch.ones(2, 2), **kw)
    big = math.exp(20)
    assert out.loss.flatten().tolist() == pytest.approx([math.e, math.e, big, big], rel=1e-5)
    (g,) = torch.autograd.grad(out.loss.sum(), new)
    assert g.flatten().tolist() == pytest.approx([math.e, math.e, 0, 0], rel=1e-5)


@pytest.mark.parametrize("limit", [20.0, None])
def test_a_forbidden_token_has_ratio_zero(backend: str, limit: float | None) -> None:
    new = leaf(torch.tensor([-INF, -INF, -INF, -1.0]))
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0])
    a = torch.tensor([1.0, -1.0, 0.0, 1.0])
    out = ppo_policy_loss(new, old, a, aggregate="none", log_ratio_limit=limit)
    assert out.loss.tolist() == pytest.approx([0, 0.8, 0, -1])
    (g,) = torch.autograd.grad(out.loss.sum(), new)
    assert g.tolist() == pytest.approx([0, 0, 0, -1])
    assert out.stats["ratio_min"] == 0
    out = ppo_policy_loss(new, old, a, log_ratio_limit=limit)
    (g,) = torch.autograd.grad(out.loss, new)
    assert out.loss.item() == pytest.approx((0.8 - 1) / 4) and g.isfinite().all()


def test_a_sequence_with_a_forbidden_token(backend: str) -> None:
    new = leaf(torch.tensor([[-INF, -1.0], [-1.0, -1.0]]))
    out = ppo_policy_loss(
        new, -torch.ones(2, 2), torch.ones(2, 2), ratio="sequence", aggregate="none"
    )
    assert out.loss.flatten().tolist() == pytest.approx([0, 0, -1, -1], abs=1e-8)
    (g,) = torch.autograd.grad(out.loss.sum(), new)
    assert g.flatten().tolist() == pytest.approx([0, 0, -1, -1], abs=1e-8)


BAD = {
    "logprobs": (NAN, INF),
    "old_logprobs": (NAN, INF, -INF),
    "advantages": (NAN, INF, -INF),
    "weights": (NAN, INF, -INF),
    "values": (NAN, INF, -INF),
    "old_values": (NAN, INF, -INF),
    "returns": (NAN, INF, -INF),
    "entropy": (NAN, INF, -INF),
    "ref_logprobs": (NAN, INF, -INF),
}


def with_bad(name: str, value: float, state: str) -> dict[str, Any]:
    """A joint batch with one bad entry, on a token that `state` makes flat or worth nothing."""
    inputs = draw_joint((2, 3), torch.float32, {"entropy_coef": 1, "kl_coef": 1})
    inputs["weights"] = torch.ones(2, 3)
    if state == "zero_advantage":
        inputs["advantages"][1, 2] = 0.0
    elif state == "zero_weight":
        inputs["weights"][1, 2] = 0.0
    elif state == "flat_above":
        inputs["advantages"][1, 2], inputs["logprobs"][1, 2] = 1.0, inputs["old_logprobs"][1, 2] + 1
    elif state == "flat_below":
        inputs["advantages"][1, 2], inputs["logprobs"][1, 2] = (
            -1.0,
            inputs["old_logprobs"][1, 2] - 1,
        )
    inputs[name][1, 2] = value
    return {**inputs, "entropy_coef": 0.1, "kl_coef": 0.2}


@pytest.mark.parametrize(
    "state", ["plain", "zero_advantage", "zero_weight", "flat_above", "flat_below"]
)
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "none"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_non_finite_values_are_not_hidden(
    backend: str, name: str, state: str, aggregate: str, ratio: str
) -> None:
    for value in BAD[name]:
        kw = with_bad(name, value, state)
        loss = ppo_loss(**kw, aggregate=aggregate, ratio=ratio).loss
        assert not (loss[1, 2] if aggregate == "none" else loss).isfinite(), value


@pytest.mark.parametrize("name", BAD)
def test_validation_names_what_is_not_finite(backend: str, name: str, validation: None) -> None:
    for value in BAD[name]:
        with pytest.raises(ValueError, match=rf"{name}.*\(?1, ?2"):
            ppo_loss(**with_bad(name, value, "plain"))


def test_validation_accepts_what_is_right(backend: str, validation: None) -> None:
    kw = with_bad("logprobs", -INF, "plain")  # a forbidden token is no fault
    kw.pop("ref_logprobs"), kw.pop("kl_coef")
    assert ppo_loss(**kw).loss.isfinite()
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[1, 2] = False
    for name in BAD:
        assert ppo_loss(**with_bad(name, NAN, "plain"), mask=mask).loss.isfinite()


@pytest.mark.parametrize("fn", ["policy", "value"])
def test_validation_of_the_single_losses(backend: str, fn: str, validation: None) -> None:
    good, bad = torch.zeros(4), torch.tensor([0.0, 0, NAN, 0])
    if fn == "policy":
        with pytest.raises(ValueError, match=r"old_logprobs.*\b2\b"):
            ppo_policy_loss(good, bad, good)
    else:
        with pytest.raises(ValueError, match=r"returns.*\b2\b"):
            ppo_value_loss(good, good, bad)


# Gradients and strides ----------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("case", ["plain", "entropy", "kl_k1", "kl_k2", "kl_k3", "all"])
def test_gradcheck(aggregate: str, case: str) -> None:
    options = JOINT[case]((2, 3))
    inputs = draw_joint((2, 3), torch.float64, options)
    flows = [k for k in ("logprobs", "values", "entropy") if k in inputs]

    def fn(*xs: Tensor) -> Tensor:
        return ppo_loss(
            **{**inputs, **dict(zip(flows, xs, strict=True))}, aggregate=aggregate, **options
        ).loss

    assert torch.autograd.gradcheck(fn, tuple(leaf(inputs[k]) for k in flows))


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("term", ["policy", "value", "joint"])
def test_second_derivative_is_right_or_an_error(backend: str, term: str, ratio: str) -> None:
    inputs = draw_joint((2, 3), torch.float32, {"kl_coef": 1})
    inputs["ratio"] = ratio
    if term == "policy":
        names, mine, truth = (
            ("logprobs", "old_logprobs", "advantages", "ratio"),
            ppo_policy_loss,
            oracle.policy_loss,
        )
    elif term == "value":
        names, mine, truth = ("values", "old_values", "returns"), ppo_value_loss, oracle.value_loss
    else:
        names, mine, truth = tuple(inputs), ppo_loss, oracle.ppo_loss
    fixed: dict[str, Any] = {k: inputs[k] for k in names[1:]}
    if term == "joint":
        fixed["kl_coef"] = 0.5

    def second(x: Tensor, loss: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad((g**2).sum() + (x**3).sum(), x)[0]

    x, exact_in = leaf(inputs[names[0]]), f64(inputs[names[0]])
    expected = second(exact_in, truth(exact_in, **fixed)[0])
    try:
        got = second(x, mine(x, **fixed).loss)
    except RuntimeError as error:
        assert str(error)
    else:
        assert torch.allclose(got.double(), expected, atol=1e-4)


def test_backward_twice(backend: str) -> None:
    inputs = draw_joint((2, 3), torch.float32, {})
    flows = [leaf(inputs.pop("logprobs")), leaf(inputs.pop("values"))]
    loss = ppo_loss(logprobs=flows[0], values=flows[1], **inputs).loss
    first = torch.autograd.grad(loss, flows, retain_graph=True)
    second = torch.autograd.grad(3 * loss, flows)
    assert all(torch.allclose(3 * a, b) for a, b in zip(first, second, strict=True))


def test_only_the_named_arguments_get_gradients(backend: str) -> None:
    inputs = {
        k: leaf(x)
        for k, x in draw_joint((2, 3), torch.float32, {"entropy_coef": 1, "kl_coef": 1}).items()
    }
    weights, denominator = leaf(torch.ones(2, 3)), leaf(torch.tensor(6.0))
    ppo_loss(
        **inputs, weights=weights, denominator=denominator, entropy_coef=0.1, kl_coef=0.1
    ).loss.backward()
    got = {k for k, x in inputs.items() if x.grad is not None}
    assert got == {"logprobs", "values", "entropy"}
    assert weights.grad is None and denominator.grad is None
    inputs = {k: x.detach() if k in got else x for k, x in inputs.items()}
    assert not ppo_loss(**inputs, weights=weights, entropy_coef=0.1, kl_coef=0.1).loss.requires_grad


@pytest.mark.parametrize("flow", ["logprobs", "values", "entropy"])
def test_each_gradient_alone(backend: str, flow: str) -> None:
    inputs = draw_joint((2, 3), torch.float32, {"entropy_coef": 1, "kl_coef": 1})
    options = {"entropy_coef": 0.1, "kl_coef": 0.2}
    every = {k: leaf(x) if k in ("logprobs", "values", "entropy") else x for k, x in inputs.items()}
    ppo_loss(**every, **options).loss.backward()
    x = leaf(inputs[flow])
    ppo_loss(**{**inputs, flow: x}, **options).loss.backward()
    assert torch.allclose(x.grad, every[flow].grad, atol=1e-7)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_strides_change_nothing(backend: str, aggregate: str) -> None:
    options: dict[str, Any] = {"entropy_coef": 0.1, "kl_coef": 0.2, "aggregate": aggregate}
    dense = draw_joint((6, 8), torch.float32, options)
    mask = torch.rand(6, 8) < 0.7
    views = (
        lambda t: t.T,
        lambda t: t[:, :-1],
        lambda t: t[::2, 1::3],
        lambda t: t[:1].expand(4, 8),
    )
    for view in views:
        results = []
        for make in (view, lambda t, v=view: v(t).contiguous()):
            inputs = {k: make(x) for k, x in dense.items()}
            flows = [inputs[k].detach().requires_grad_() for k in ("logprobs", "values", "entropy")]
            inputs.update(zip(("logprobs", "values", "entropy"), flows, strict=True))
            out = ppo_loss(**inputs, mask=make(mask), **options)
            incoming = torch.tensor(0.7).expand(out.loss.shape)
            results.append((out.loss, *grads([out.loss], flows, [incoming])))
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_mixed_dtypes(backend: str) -> None:
    inputs = draw((2, 3), torch.float32)
    inputs["logprobs"] = inputs["logprobs"].bfloat16()
    inputs["advantages"] = inputs["advantages"].half()
    check_policy(inputs)


def test_float64_beside_float32() -> None:
    inputs = draw((2, 3), torch.float32)
    inputs["old_logprobs"] = inputs["old_logprobs"].double()
    check_policy(inputs)


def test_determinism(backend: str) -> None:
    inputs = draw_joint((200, 300), torch.float32, {})
    mask = torch.rand(200, 300) < 0.7

    def run() -> list[Tensor]:
        flows = [leaf(inputs["logprobs"]), leaf(inputs["values"])]
        out = ppo_loss(**{**inputs, "logprobs": flows[0], "values": flows[1]}, mask=mask)
        return [out.loss, *out.stats.values(), *torch.autograd.grad(out.loss, flows)]

    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


# Properties ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", AGGREGATES[:3])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_P5_micro_batches_add_up(backend: str, aggregate: str, ratio: str) -> None:
    """One of 10 and one of 1,000 tokens, each over the global denominator."""
    shape = (101, 10)
    inputs = draw_joint(shape, torch.float32, {"kl_coef": 1, "entropy_coef": 1})
    mask = torch.rand(shape) < 0.8
    value_mask = torch.rand(shape) < 0.5
    options: dict[str, Any] = {
        "aggregate": aggregate,
        "ratio": ratio,
        "kl_coef": 0.2,
        "entropy_coef": 0.1,
    }
    if aggregate == "token_mean":
        options.update(denominator=mask.sum(), value_denominator=value_mask.sum())
    else:
        options.update(denominator=mask.any(-1).sum(), value_denominator=value_mask.any(-1).sum())
    flows = ("logprobs", "values", "entropy")

    def run(rows: slice, **kw: Any) -> tuple[Tensor, ...]:
        part = {k: leaf(x[rows]) if k in flows else x[rows] for k, x in inputs.items()}
        loss = ppo_loss(**part, mask=mask[rows], value_mask=value_mask[rows], **kw).loss
        return loss, *torch.autograd.grad(loss, [part[k] for k in flows])

    local = {k: v for k, v in options.items() if "denominator" not in k}
    whole = run(slice(None), **local)
    first, second = run(slice(0, 1), **options), run(slice(1, None), **options)
    assert (first[0] + second[0]).item() == pytest.approx(whole[0].item(), rel=1e-5)
    for g, a, b in zip(whole[1:], first[1:], second[1:], strict=True):
        assert torch.allclose(g, torch.cat([a, b]), rtol=1e-5, atol=1e-8)


@given(data=st.data(), seed=st.integers(0, 2**20))
def test_packed_equals_padded(backend: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    width, total = max(lengths) + data.draw(st.integers(0, 2)), sum(lengths)
    options: dict[str, Any] = {
        "aggregate": data.draw(st.sampled_from(AGGREGATES)),
        "ratio": data.draw(st.sampled_from(["token", "sequence"])),
        "dual_clip": data.draw(st.sampled_from([None, 1.5])),
        "kl_coef": 0.2,
    }
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    inputs = draw_joint((total,), torch.float32, options)
    taken = torch.rand(total) < 0.7
    where = torch.zeros(len(lengths), width, dtype=torch.bool)
    for s, n in enumerate(lengths):
        where[s, slice(0, n) if data.draw(st.booleans()) else slice(width - n, width)] = True

    def run(batch: dict[str, Tensor], **kw: Any) -> Any:
        flows = [leaf(batch["logprobs"]), leaf(batch["values"])]
        batch = {**batch, "logprobs": flows[0], "values": flows[1]}
        out = ppo_loss(**batch, **options, **kw)
        return out, torch.autograd.grad(out.loss.sum(), flows)

    packed, packed_grads = run(inputs, mask=taken, cu_seqlens=cu)
    padded_in = {
        k: torch.full(where.shape, NAN).masked_scatter(where, x) for k, x in inputs.items()
    }
    padded, padded_grads = run(padded_in, mask=torch.zeros_like(where).masked_scatter(where, taken))
    loss = padded.loss[where] if options["aggregate"] == "none" else padded.loss
    assert torch.allclose(loss, packed.loss, atol=1e-6)
    for a, b in zip(padded_grads, packed_grads, strict=True):
        assert torch.allclose(a[where], b, atol=1e-6) and (a[~where] == 0).all()
    for name, value in packed.stats.items():
        assert padded.stats[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name


@given(seed=st.integers(0, 2**20))
def test_order_of_the_rows_changes_nothing(backend: str, seed: int) -> None:
    torch.manual_seed(seed)
    inputs, order = draw_joint((5, 4), torch.float32, {}), torch.randperm(5)
    a = ppo_loss(**inputs, ratio="sequence", aggregate="sequence_mean")
    b = ppo_loss(
        **{k: x[order] for k, x in inputs.items()}, ratio="sequence", aggregate="sequence_mean"
    )
    assert torch.allclose(a.loss, b.loss, atol=1e-6)
