"""KL estimates and shaped rewards in plain torch: the specification."""

from typing import NamedTuple

import torch
from torch import Tensor

from ppokern import _check
from ppokern import token_math as tm
from ppokern._sequences import Sequences, spoil


class Inputs(NamedTuple):
    """The tensors of a call of `shaped_rewards`."""

    scores: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    mask: Tensor | None
    score_mask: Tensor | None
    token_rewards: Tensor | None
    cu_seqlens: Tensor | None


class Options(NamedTuple):
    """Its numbers."""

    kl_coef: float
    kl_kind: str


def arithmetic(x: Inputs) -> torch.dtype:
    """Return the dtype of a call's arithmetic."""
    return _check.arithmetic(x.scores, x.logprobs, x.ref_logprobs, x.token_rewards)


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


def shaped_rewards(x: Inputs, o: Options) -> tuple[Tensor, Tensor]:
    """Return rewards and KL, both per token."""
    dtype = arithmetic(x)
    valid = torch.ones_like(x.logprobs, dtype=torch.bool) if x.mask is None else x.mask
    kl = kl_estimate(x.logprobs.to(dtype), x.ref_logprobs, o.kl_kind, valid)
    rewards = torch.zeros_like(kl) if o.kl_coef == 0 else -o.kl_coef * kl
    if x.token_rewards is not None:
        rewards = rewards + torch.where(valid, x.token_rewards.to(dtype), 0.0)
    sequences = Sequences(x.logprobs.shape, x.cu_seqlens)
    last, counts = sequences.last(valid)
    if x.score_mask is not None:
        counts = counts & x.score_mask
    if rewards.numel():
        scores = torch.where(counts, x.scores.to(dtype), 0.0).reshape(-1)
        rewards = rewards.reshape(-1).index_add(0, last.reshape(-1), scores).view(kl.shape)
    spoil(x.cu_seqlens, sequences.length, rewards, kl)
    return rewards, kl
