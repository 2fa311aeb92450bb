"""Eager PyTorch as anyone would write it, in float32 or float64: the peer of the tolerance rule."""

import math
from typing import Any

import oracle
import torch
from torch import Tensor


def compute(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    ids = token_ids.long()
    take = (ids != -100) & (torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)
    z = compute(logits)[..., :vocab_size].masked_fill(~take[..., None], 0.0)
    forbidden = z == -math.inf
    if softcap is not None:
        z = (softcap * torch.tanh(z / softcap)).masked_fill(forbidden, -math.inf)
    z = z / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    logp = z.log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(forbidden, 0.0)).sum(-1)
    chosen = logp.gather(-1, ids.masked_fill(~take, 0)[..., None])[..., 0]
    return chosen.masked_fill(~take, 0.0), entropy.masked_fill(~take, 0.0)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The matrix product is in the dtype of its operands, as anyone would write it."""
    wide = torch.promote_types(hidden.dtype, weight.dtype)
    bias = None if bias is None else bias.to(wide)
    logits = torch.nn.functional.linear(hidden.to(wide), weight.to(wide), bias)
    return logprobs(logits, token_ids, **options)


def shares(mask: Tensor, how: str, denominator: Any, cu_seqlens: Tensor | None) -> Tensor:
    """What each token counts in the aggregated loss, float64; zero where masked."""
    flat = mask.reshape(-1).double()
    out = torch.zeros_like(flat)
    places = oracle.segments(mask.shape, cu_seqlens)
    n_sequences = sum(bool(flat[s].any()) for s in places)
    for s in places:
        n = flat[s].sum().clamp(min=1)
        if how in ("sum", "none"):
            out[s] = flat[s]
        elif how == "token_mean":
            out[s] = flat[s] / (flat.sum() if denominator is None else denominator)
        else:
            share = flat[s] / (n if how == "sequence_mean" else 1)
            out[s] = share / (n_sequences if denominator is None else denominator)
    return out.reshape(mask.shape)


def sequence_mean(x: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    flat, out = (x * mask).reshape(-1), torch.zeros_like(x).reshape(-1)
    for s in oracle.segments(x.shape, cu_seqlens):
        if s:
            mean = flat[s].sum() / mask.reshape(-1)[s].sum().clamp(min=1)
            out = out.index_put((torch.tensor(s),), mean.expand(len(s)))
    return out.reshape(x.shape)


def policy_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    clip_range: float | tuple[float, float] = 0.2,
    dual_clip: float | None = None,
    ratio: str = "token",
    weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    log_ratio_limit: float | None = 20.0,
) -> Tensor:
    low, high = oracle.pair(clip_range)
    d = compute(logprobs) - compute(old_logprobs)
    adv = compute(advantages)
    if ratio == "sequence":
        take = torch.ones_like(d, dtype=torch.bool) if mask is None else mask
        d = sequence_mean(d, take, cu_seqlens)
    if log_ratio_limit is not None:
        d = d.clamp(-log_ratio_limit, log_ratio_limit)
    r = d.exp()
    objective = torch.minimum(r * adv, r.clamp(1 - low, 1 + high) * adv)
    if dual_clip is not None:
        objective = torch.where(adv < 0, torch.maximum(objective, dual_clip * adv), objective)
    return -objective if weights is None else -objective * compute(weights)


def value_tokens(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None = 0.2
) -> Tensor:
    v, old, ret = compute(values), compute(old_values), compute(returns)
    error = (v - ret) ** 2
    if clip_range is not None:
        clipped = torch.minimum(torch.maximum(v, old - clip_range), old + clip_range)
        error = torch.maximum(error, (clipped - ret) ** 2)
    return 0.5 * error


def total(
    tokens: Tensor,
    mask: Tensor | None,
    how: str = "token_mean",
    denominator: Any = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    take = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    out = tokens.masked_fill(~take, 0.0) * shares(take, how, denominator, cu_seqlens).to(
        tokens.dtype
    )
    return out if how == "none" else out.sum()


def kl(logprobs: Tensor, ref: Tensor, kind: str) -> Tensor:
    d = compute(logprobs) - compute(ref)
    if kind == "k1":
        return d
    k2, k3 = d**2 / 2, torch.exp(-d) - 1 + d
    return {"k2": k2, "k3": k3, "k3+": k3.detach() + (k2 - k2.detach())}[kind]
