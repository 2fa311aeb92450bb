"""KL estimates and shaped rewards in plain torch: the specification."""

import torch
from torch import Tensor

from ppokern import _check
from ppokern import token_math as tm
from ppokern._sequences import Sequences, spoil


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str, mask: Tensor | None) -> Tensor:
    """Return the estimate per token, 0 where masked."""
    dtype = _check.arithmetic(logprobs, ref_logprobs)
    kl = tm.KL[kind](logprobs.to(dtype) - ref_logprobs.to(dtype))
    return (kl if mask is None else torch.where(mask, kl, 0.0)).contiguous()


def kl_gradient(
    grad: Tensor, logprobs: Tensor, ref_logprobs: Tensor, kind: str, mask: Tensor | None
) -> Tensor:
    """Return the gradient in `logprobs`, 0 where masked."""
    dtype = _check.arithmetic(logprobs, ref_logprobs)
    slope = grad * tm.KL_SLOPE[kind](logprobs.to(dtype) - ref_logprobs.to(dtype))
    slope = slope if mask is None else torch.where(mask, slope, 0.0)
    return slope.to(logprobs.dtype)


def shaped_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    score_mask: Tensor | None,
    token_rewards: Tensor | None,
    cu_seqlens: Tensor | None,
    kl_coef: float,
    kl_kind: str,
) -> tuple[Tensor, Tensor]:
    """Return rewards and KL, both per token."""
    dtype = _check.arithmetic(scores, logprobs, ref_logprobs, token_rewards)
    valid = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    kl = kl_estimate(logprobs.to(dtype), ref_logprobs, kl_kind, valid)
    rewards = torch.zeros_like(kl) if kl_coef == 0 else -kl_coef * kl
    if token_rewards is not None:
        rewards = rewards + torch.where(valid, token_rewards.to(dtype), 0.0)
    sequences = Sequences(logprobs.shape, cu_seqlens)
    last, counts = sequences.last(valid)
    if score_mask is not None:
        counts = counts & score_mask
    if rewards.numel():
        scores = torch.where(counts, scores.to(dtype), 0.0).reshape(-1)
        rewards = rewards.reshape(-1).index_add(0, last.reshape(-1), scores).view(kl.shape)
    spoil(cu_seqlens, sequences.length, rewards, kl)
    return rewards, kl
