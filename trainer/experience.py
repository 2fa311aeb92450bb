"""From rollouts to what an update learns from: values, reference, shaped rewards, advantages.

Everything here is fixed for the update. Per-token tensors are packed, `(total,)`: place `i` is the
state that ends with `ids[i]`, and the transition that chose the token behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ppokern import gae, kl_estimate, shaped_rewards, whiten

from . import distributed
from .config import PPOConfig
from .data import select
from .models import Policy, forward_all
from .rollout import Rollouts, logprobs_of


@dataclass
class Experience:
    """What an update learns from; `(total,)` where not said otherwise."""

    ids: Tensor
    cu_seqlens: Tensor  # (S + 1,)
    mask: Tensor  # bool, True where there is something to learn
    logprobs: Tensor  # at sampling, nats
    ref_logprobs: Tensor  # nats
    values: Tensor  # V(s_t), read at the token before the action
    rewards: Tensor  # shaped: the score on the last token, less the KL part of each
    kl: Tensor  # k1 to the reference, nats
    advantages: Tensor  # whitened
    returns: Tensor  # the critic's targets, from the advantages before whitening
    scores: Tensor  # (S,)

    def rows(self, index: Sequence[int]) -> Experience:
        """These sequences alone."""
        places, cu_seqlens = select(self.cu_seqlens, index)
        taken = {item.name: getattr(self, item.name)[places] for item in fields(self)[2:-1]}
        return Experience(
            ids=self.ids[places], cu_seqlens=cu_seqlens, scores=self.scores[index], **taken
        )

    def nothing(self) -> Experience:
        """One token with nothing to learn, for a pass that other processes wait for."""
        rest = {item.name: getattr(self, item.name).new_zeros(1) for item in fields(self)[2:]}
        return Experience(
            ids=self.ids.new_zeros(1),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=self.ids.device),
            **rest,
        )


def make_experience(
    rollouts: Rollouts,
    scores: Tensor,
    reference: Policy,
    critic: Callable[[Tensor, Tensor, Tensor], Tensor],
    config: PPOConfig,
    kl_coef: float,
) -> Experience:
    """Values, reference log-probs, shaped rewards and advantages of rollouts.

    Args:
        rollouts: `S` responses.
        scores: `(S,)`.
        reference: frozen policy.
        critic: its number at a token is the value of the state that ends there; takes ids,
            `cu_seqlens` and a mask of what is read.
        config: temperature, truncation, kl_kind_in_reward, gamma, gae_lambda and
            max_tokens_per_micro_batch are read.
        kl_coef: weight of the KL in the rewards; 0 where it is in the loss.
    """
    ids, cu_seqlens = rollouts.ids, rollouts.cu_seqlens
    tokens = config.max_tokens_per_micro_batch
    mask = rollouts.mask
    if config.truncation == "drop":
        mask = mask & rollouts.terminated.repeat_interleave(rollouts.lengths)
    ref_logprobs = logprobs_of(rollouts, reference, config.temperature, tokens)
    goes_on = ~rollouts.terminated & (config.truncation == "bootstrap")  # (S,)
    last = cu_seqlens[1:] - 1  # (S,)
    values = forward_all(critic, tokens, cu_seqlens, ids, mask.index_put((last,), goes_on))
    after = values[last]

    rewards, _ = shaped_rewards(
        scores,
        rollouts.logprobs,
        ref_logprobs,
        kl_coef=kl_coef,
        kl_kind=config.kl_kind_in_reward,
        mask=mask,
        cu_seqlens=cu_seqlens,
    )
    raw, returns = gae(
        rewards,
        values,
        gamma=config.gamma,
        lam=config.gae_lambda,
        mask=mask,
        last_values=torch.where(goes_on, after, 0.0),
        cu_seqlens=cu_seqlens,
    )
    return Experience(
        ids=ids,
        cu_seqlens=cu_seqlens,
        mask=mask,
        logprobs=rollouts.logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        rewards=rewards,
        kl=kl_estimate(rollouts.logprobs, ref_logprobs, "k1", mask),
        advantages=whiten(raw, mask, group=distributed.group()),
        returns=returns,
        scores=scores,
    )
