"""Naive float64 oracles: plain loops and explicit ifs, obviously right, independent of ppokern.

A differentiable oracle takes and returns float64 tensors, so that autograd gives the exact
gradients. It looks at one row, one sequence or one token at a time, never at what is masked.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

Segments = list[list[int]]


def f64(x: Tensor) -> Tensor:
    """A float64 leaf of the same values that asks for a gradient."""
    return x.detach().double().clone().requires_grad_()


def segments(shape: Sequence[int], cu_seqlens: Tensor | None = None) -> Segments:
    """The flat positions of every sequence: a segment, or a row of the last dimension."""
    if cu_seqlens is not None:
        return [list(range(a, b)) for a, b in pairwise(cu_seqlens.tolist())]
    total, length = math.prod(shape), shape[-1] if len(shape) else 1
    return [list(range(s, s + length)) for s in range(0, total, length)] if length else []


def flags(mask: Tensor | None, like: Tensor) -> list[bool]:
    return [True] * like.numel() if mask is None else mask.reshape(-1).tolist()


def gather_rows(rows: list[Tensor], shape: Sequence[int]) -> Tensor:
    return (
        torch.stack(rows).reshape(tuple(shape))
        if rows
        else torch.zeros(tuple(shape), dtype=torch.float64)
    )


# Log-probs ----------------------------------------------------------------------------------------


def row_logprob(
    z: Tensor, token: int, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Log-prob of one token and the entropy of one row, over the allowed tokens only."""
    zero = z.new_zeros(())
    allowed = (z != -math.inf).nonzero().flatten()
    if allowed.numel() == 0:
        return zero - math.inf, zero
    s = z[allowed]
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = (s - s.max().detach()) / temperature
    logp = s - s.exp().sum().log()
    seen = logp[logp > -700]
    entropy = -(seen.exp() * seen).sum()
    chosen = logp[allowed == token]
    return (chosen[0] if chosen.numel() else zero - math.inf), entropy


def logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    shape, v = token_ids.shape, logits.shape[-1]
    rows = logits.reshape(-1, v)[:, : vocab_size or v]
    temps = torch.broadcast_to(torch.as_tensor(temperature).double(), shape).reshape(-1).tolist()
    ids, out = token_ids.long().reshape(-1).tolist(), []
    for i, take in enumerate(flags(mask, token_ids)):
        if take and ids[i] != -100:
            out.append(row_logprob(rows[i].double(), ids[i], temps[i], softcap))
        else:
            out.append((logits.new_zeros((), dtype=torch.float64),) * 2)
    return gather_rows([o[0] for o in out], shape), gather_rows([o[1] for o in out], shape)


# Advantages ---------------------------------------------------------------------------------------


def gae(
    rewards: Sequence[float],
    values: Sequence[float],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    mask: Sequence[bool] | None = None,
    bootstrap: Sequence[bool] | None = None,
    continues: Sequence[bool] | None = None,
    next_values: Sequence[float] | None = None,
    last_value: float = 0.0,
    mask_mode: str = "skip",
    scalar: Callable[[Any], Any] = float,
) -> tuple[list[float], list[float]]:
    """One sequence. `scalar=np.float32` is the same in float32: the peer of the tolerance rule."""
    n = len(rewards)
    taken = [t for t in range(n) if mask is None or mask[t]]
    advantages, returns = [0.0] * n, [0.0] * n
    if not taken:
        return advantages, returns
    steps = taken if mask_mode == "skip" else list(range(taken[0], taken[-1] + 1))
    value_after, advantage_after = scalar(0), scalar(0)
    g, gl = scalar(gamma), scalar(gamma * lam)
    for t in reversed(steps):
        if t not in taken:
            r, v, boot, goes_on = scalar(0), scalar(0), True, True
        else:
            r, v = scalar(rewards[t]), scalar(values[t])
            boot = True if bootstrap is None else bootstrap[t]
            goes_on = boot if continues is None else continues[t]
        if t == steps[-1]:
            goes_on, value_after = False, scalar(last_value) if boot and next_values is None else 0
        following = value_after
        if next_values is not None and t in taken:
            following = scalar(next_values[t]) if boot else 0
        advantage = r - v
        if boot:
            advantage = advantage + g * following
        if goes_on:
            advantage = advantage + gl * advantage_after
        if t in taken:
            advantages[t], returns[t] = float(advantage), float(advantage + v)
        value_after, advantage_after = v, advantage
    return advantages, returns


def gae_rows(
    rewards: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
    continues: Tensor | None = None,
    next_values: Tensor | None = None,
    last_values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Every sequence of (B, T), (T,) or a packed (total,)."""
    if last_values is not None and next_values is not None:
        last_values = None
    out = torch.zeros(2, rewards.numel(), dtype=torch.float64)
    last = None if last_values is None else last_values.reshape(-1).tolist()
    flat = {
        k: None if x is None else x.reshape(-1).tolist()
        for k, x in dict(
            rewards=rewards,
            values=values,
            mask=mask,
            bootstrap=bootstrap,
            continues=continues,
            next_values=next_values,
        ).items()
    }
    for s, where in enumerate(segments(rewards.shape, cu_seqlens)):
        if where:
            part = {k: None if x is None else [x[i] for i in where] for k, x in flat.items()}
            tail = {} if last is None else {"last_value": last[s]}
            out[:, where] = torch.tensor(gae(**part, **tail, **options), dtype=torch.float64)
    return out[0].reshape(rewards.shape), out[1].reshape(rewards.shape)


def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    correction: int = 1,
) -> Tensor:
    flat, take = x.double().reshape(-1).tolist(), flags(mask, x)
    kept = [v for v, m in zip(flat, take, strict=True) if m]
    mean = math.fsum(kept) / max(len(kept), 1)
    scale = 1.0
    if len(kept) > correction and len(set(kept)) > 1:
        var = math.fsum((v - mean) ** 2 for v in kept) / (len(kept) - correction)
        scale = math.sqrt(var + eps)
    back = 0.0 if shift_mean else mean
    out = [(v - mean) / scale + back if m else 0.0 for v, m in zip(flat, take, strict=True)]
    return torch.tensor(out, dtype=torch.float64).reshape(x.shape)


# Rewards and KL -----------------------------------------------------------------------------------


def kl_token(d: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    k3 = torch.expm1(-d) + d
    if kind == "k3":
        return k3
    assert kind == "k3+"
    of_k2 = d * d / 2
    return k3.detach() + (of_k2 - of_k2.detach())


def kl(logprobs: Tensor, ref: Tensor, kind: str = "k1", mask: Tensor | None = None) -> Tensor:
    a, b = logprobs.reshape(-1).double(), ref.detach().reshape(-1).double()
    out = [
        kl_token(a[i] - b[i], kind) if m else a.new_zeros(())
        for i, m in enumerate(flags(mask, logprobs))
    ]
    return gather_rows(out, logprobs.shape)


def shaped_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref: Tensor,
    *,
    kl_coef: float,
    mask: Tensor | None = None,
    score_mask: Tensor | None = None,
    token_rewards: Tensor | None = None,
    kl_kind: str = "k1",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    take, cost = flags(mask, logprobs), kl(logprobs, ref, kl_kind, mask)
    out = [0.0] * logprobs.numel()
    flat_cost, given = cost.reshape(-1).tolist(), flags(score_mask, scores)
    extra = None if token_rewards is None else token_rewards.double().reshape(-1).tolist()
    for i, m in enumerate(take):
        if m:
            out[i] = (0.0 if kl_coef == 0 else -kl_coef * flat_cost[i]) + (extra[i] if extra else 0)
    for s, where in enumerate(segments(logprobs.shape, cu_seqlens)):
        kept = [i for i in where if take[i]]
        if kept and given[s]:
            out[kept[-1]] += scores.double().reshape(-1)[s].item()
    return torch.tensor(out, dtype=torch.float64).reshape(logprobs.shape), cost


# Losses -------------------------------------------------------------------------------------------


class PolicyToken(NamedTuple):
    loss: Tensor
    ratio: float
    clipped: bool
    flat: bool


def policy_token(
    log_ratio: Tensor,
    advantage: float,
    *,
    low: float,
    high: float,
    dual: float | None,
    limit: float | None,
    weight: float,
) -> PolicyToken:
    if log_ratio.item() == -math.inf:
        ratio = log_ratio.new_zeros(())
    elif limit is not None and abs(log_ratio.item()) > limit:
        ratio = log_ratio.new_tensor(math.exp(math.copysign(limit, log_ratio.item())))
    else:
        ratio = log_ratio.exp()
    r, flat = ratio.item(), True
    if advantage > 0 and r > 1 + high:
        objective = ratio.new_tensor((1 + high) * advantage)
    elif advantage < 0 and r < 1 - low:
        objective = ratio.new_tensor((1 - low) * advantage)
    elif advantage < 0 and dual is not None and r > dual:
        objective = ratio.new_tensor(dual * advantage)
    else:
        objective, flat = ratio * advantage, False
    return PolicyToken(-weight * objective, r, r < 1 - low or r > 1 + high, flat)


def reduce_tokens(
    tokens: list[Tensor],
    take: list[bool],
    shape: Sequence[int],
    how: str,
    denominator: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    kept = [[tokens[i] for i in s if take[i]] for s in segments(shape, cu_seqlens)]
    kept = [s for s in kept if s]
    zero = torch.zeros((), dtype=torch.float64)
    if how == "none":
        return gather_rows([t if m else zero for t, m in zip(tokens, take, strict=True)], shape)
    if not kept:
        return zero
    if how == "sum":
        return torch.stack([t for s in kept for t in s]).sum()
    if how == "token_mean":
        every = [t for s in kept for t in s]
        return torch.stack(every).sum() / (len(every) if denominator is None else denominator)
    parts = [
        torch.stack(s).mean() if how == "sequence_mean" else torch.stack(s).sum() for s in kept
    ]
    assert how in ("sequence_mean", "sequence_sum")
    return torch.stack(parts).sum() / (len(parts) if denominator is None else denominator)


def mean(xs: Sequence[float]) -> float:
    return sum(xs) / len(xs) if len(xs) else 0.0


def pair(clip_range: float | tuple[float, float]) -> tuple[float, float]:
    return clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)


def exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    clip_range: float | tuple[float, float] = 0.2,
    dual_clip: float | None = None,
    ratio: str = "token",
    weights: Tensor | None = None,
    aggregate: str = "token_mean",
    denominator: float | None = None,
    cu_seqlens: Tensor | None = None,
    log_ratio_limit: float | None = 20.0,
) -> tuple[Tensor, dict[str, float]]:
    shape, take = logprobs.shape, flags(mask, logprobs)
    new, old, adv = (x.reshape(-1).double() for x in (logprobs, old_logprobs.detach(), advantages))
    scale = [1.0] * new.numel() if weights is None else weights.double().reshape(-1).tolist()
    low, high = pair(clip_range)
    places = segments(shape, cu_seqlens)
    own = {i: new[i] - old[i] for i in range(new.numel()) if take[i]}
    used = dict(own)
    if ratio == "sequence":
        for s in places:
            kept = [i for i in s if take[i]]
            for i in kept:
                used[i] = torch.stack([own[j] for j in kept]).mean()
    zero = torch.zeros((), dtype=torch.float64)
    tokens = {
        i: policy_token(
            used[i],
            adv[i].item(),
            low=low,
            high=high,
            dual=dual_clip,
            limit=log_ratio_limit,
            weight=scale[i],
        )
        for i in own
    }
    per_token = [tokens[i].loss if i in tokens else zero for i in range(new.numel())]
    loss = reduce_tokens(per_token, take, shape, aggregate, denominator, cu_seqlens)
    kept, d = list(tokens.values()), [x.item() for x in own.values()]
    stats = {
        "policy_loss": mean([t.loss.item() for t in kept]) if aggregate == "none" else loss.item(),
        "ratio_mean": mean([t.ratio for t in kept]),
        "ratio_min": min([t.ratio for t in kept], default=0.0),
        "ratio_max": max([t.ratio for t in kept], default=0.0),
        "approx_kl_k1": mean([-x for x in d]),
        "approx_kl_k2": mean([x * x / 2 for x in d]),
        "approx_kl_k3": mean([exp(x) - 1 - x for x in d]),
        "clip_fraction": mean([float(t.clipped) for t in kept]),
        "clip_fraction_active": mean([float(t.flat) for t in kept]),
        "n_tokens": float(sum(take)),
        "n_sequences": float(sum(any(take[i] for i in s) for s in places)),
    }
    return loss, stats


def value_token(v: Tensor, old: float, ret: float, e: float | None) -> tuple[Tensor, bool]:
    error = (v - ret) ** 2
    if e is None:
        return error / 2, False
    if v.item() > old + e:
        clipped = v.new_tensor(old + e)
    elif v.item() < old - e:
        clipped = v.new_tensor(old - e)
    else:
        clipped = v
    other = (clipped - ret) ** 2
    return (other / 2, True) if other.item() > error.item() else (error / 2, False)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    mask: Tensor | None = None,
    clip_range: float | None = 0.2,
    aggregate: str = "token_mean",
    denominator: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    shape, take = values.shape, flags(mask, values)
    v, old, ret = (x.reshape(-1).double() for x in (values, old_values, returns))
    zero = torch.zeros((), dtype=torch.float64)
    out = [
        value_token(v[i], old[i].item(), ret[i].item(), clip_range) if m else (zero, False)
        for i, m in enumerate(take)
    ]
    loss = reduce_tokens([o[0] for o in out], take, shape, aggregate, denominator, cu_seqlens)
    kept = [o for o, m in zip(out, take, strict=True) if m]
    stats = {
        "value_loss": mean([o[0].item() for o in kept]) if aggregate == "none" else loss.item(),
        "n_tokens": float(sum(take)),
        "n_sequences": float(sum(any(take[i] for i in s) for s in segments(shape, cu_seqlens))),
    }
    if clip_range is not None:
        stats["value_clip_fraction"] = mean([float(o[1]) for o in kept])
    return loss, stats


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    mask: Tensor | None = None,
    value_mask: Tensor | None = None,
    value_clip_range: float | None = 0.2,
    value_coef: float = 0.5,
    value_denominator: float | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
    **policy: Any,
) -> tuple[Tensor, dict[str, float]]:
    how = policy.get("aggregate", "token_mean")
    denominator, cu = policy.get("denominator"), policy.get("cu_seqlens")
    loss, stats = policy_loss(logprobs, old_logprobs, advantages, mask=mask, **policy)
    take = flags(mask, logprobs)

    def term(tokens: Tensor) -> tuple[Tensor, float]:
        flat = list(tokens.reshape(-1).double())
        kept = [t.item() for t, m in zip(flat, take, strict=True) if m]
        total = reduce_tokens(flat, take, logprobs.shape, how, denominator, cu)
        return total, mean(kept)

    if value_coef != 0:
        value, value_stats = value_loss(
            values,
            old_values,
            returns,
            mask=mask if value_mask is None else value_mask,
            clip_range=value_clip_range,
            aggregate=how,
            denominator=denominator if value_denominator is None else value_denominator,
            cu_seqlens=cu,
        )
        loss, stats = loss + value_coef * value, {**value_stats, **stats}
    if entropy_coef != 0:
        assert entropy is not None
        total, stats["entropy"] = term(entropy)
        loss = loss - entropy_coef * total
    if kl_coef != 0:
        assert ref_logprobs is not None
        total, stats["kl"] = term(kl(logprobs, ref_logprobs, kl_kind, mask))
        loss = loss + kl_coef * total
    return loss, stats


# Packing ------------------------------------------------------------------------------------------


def pack(x: Tensor, mask: Tensor) -> tuple[list[Tensor], list[int], int]:
    rows = [[x[b, t] for t in range(x.shape[1]) if mask[b, t]] for b in range(x.shape[0])]
    cu = [0]
    for row in rows:
        cu.append(cu[-1] + len(row))
    return [v for row in rows for v in row], cu, max(map(len, rows), default=0)


def unpack(
    values: Tensor, cu: Sequence[int], length: int, fill: float, padding_side: str
) -> Tensor:
    out = torch.full((len(cu) - 1, length, *values.shape[1:]), fill, dtype=torch.float64)
    for s, (a, b) in enumerate(pairwise(cu)):
        for k in range(b - a):
            out[s, k if padding_side == "right" else length - (b - a) + k] = values[a + k].double()
    return out


# The tolerance rule -------------------------------------------------------------------------------


def assert_within_rule(actual: Tensor, eager: Tensor, exact: Tensor, *, unit: float = 1.0) -> None:
    """The op's error is at most twice eager's plus a tiny constant, both against float64.

    The constant is eight roundings, in the op's arithmetic, of the largest result (of `unit` where
    that is larger: the size of what the op adds up). Infinities have to agree.
    """
    assert actual.shape == exact.shape, (
        f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    )
    a, e, x = (t.detach().double().cpu() for t in (actual, eager, exact))
    if x.numel() == 0:
        return
    finite = x.isfinite()
    assert torch.equal(a[~finite], x[~finite]), f"{a[~finite]}, expected {x[~finite]}"
    a, e, x = a[finite], e[finite], x[finite]
    assert a.isfinite().all(), f"not finite: {a}, expected {x}"
    if x.numel() == 0:
        return
    arithmetic = torch.float64 if actual.dtype == torch.float64 else torch.float32
    tiny = 8 * torch.finfo(arithmetic).eps * max(x.abs().max().item(), unit)
    peer = e[e.isfinite()] - x[e.isfinite()]
    bound = 2 * (peer.abs().max().item() if peer.numel() else 0.0) + tiny
    error = (a - x).abs()
    worst = int(error.argmax())
    assert error.max().item() <= bound, (
        f"error {error.max().item():.3g} > {bound:.3g} at flat position {worst}: "
        f"{a[worst].item()}, expected {x[worst].item()}, eager {e[worst].item()}"
    )
