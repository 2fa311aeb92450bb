"""From rollouts to what an update learns from: values, reference, shaped rewards, advantages.

Everything here is fixed for the update. Per-token tensors are `(B, T - 1)`: place `i` is the
transition that chose `ids[:, i + 1]` in the state that ends with `ids[:, i]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ppokern import gae, shaped_rewards, whiten

from .config import PPOConfig
from .models import Policy, Scorer, forward_all
from .rollout import Rollouts


@dataclass
class Experience:
    """What an update learns from; `(B, T - 1)` where not said otherwise."""

    ids: Tensor  # (B, T)
    lengths: Tensor  # (B,)
    mask: Tensor  # bool, True where there is something to learn
    logprobs: Tensor  # at sampling, nats
    ref_logprobs: Tensor  # nats
    values: Tensor  # V(s_t), read at the token before the action
    rewards: Tensor  # shaped: the score on the last token, less the KL part of each
    kl: Tensor  # k1 to the reference, nats
    advantages: Tensor  # whitened
    returns: Tensor  # the critic's targets, from the advantages before whitening
    scores: Tensor  # (B,)

    def rows(self, index: Sequence[int]) -> Experience:
        """These rows, no wider than the longest of them."""
        width = int(self.lengths[index].max())
        cut = {}
        for item in fields(self):
            tensor = getattr(self, item.name)[index]
            cut[item.name] = (
                tensor if tensor.dim() == 1 else tensor[:, : width - (item.name != "ids")]
            )
        return Experience(**cut)


def make_experience(
    rollouts: Rollouts,
    scores: Tensor,
    reference: Policy,
    critic: Scorer,
    config: PPOConfig,
    kl_coef: float,
) -> Experience:
    """Values, reference log-probs, shaped rewards and advantages of rollouts.

    Args:
        rollouts: `B` responses.
        scores: `(B,)`.
        reference: frozen policy.
        critic: its number at a token is the value of the state that ends there.
        config: temperature, truncation, gamma, gae_lambda and micro_batch_tokens are read.
        kl_coef: weight of the KL in the rewards; 0 where it is in the loss.
    """
    ids, lengths = rollouts.ids, rollouts.lengths
    truncated = ~rollouts.terminated  # (B,)
    mask = rollouts.mask & ~truncated[:, None] if config.truncation == "drop" else rollouts.mask

    ref_logprobs = forward_all(
        lambda ids: reference(ids, temperature=config.temperature),
        ids,
        lengths,
        config.micro_batch_tokens,
    )  # (B, T - 1)
    states = forward_all(
        critic, ids, lengths, config.micro_batch_tokens
    )  # (B, T), after each token
    values = states[:, :-1]  # place i: before ids[:, i + 1] is chosen
    after = states.gather(1, lengths[:, None] - 1).squeeze(1)  # (B,) behind the last token
    goes_on = truncated if config.truncation == "bootstrap" else torch.zeros_like(truncated)

    rewards, kl = shaped_rewards(
        scores, rollouts.logprobs, ref_logprobs, kl_coef=kl_coef, mask=mask
    )
    raw, returns = gae(
        rewards,
        values,
        gamma=config.gamma,
        lam=config.gae_lambda,
        mask=mask,
        last_values=torch.where(goes_on, after, 0.0),
    )
    return Experience(
        ids=ids,
        lengths=lengths,
        mask=mask,
        logprobs=rollouts.logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        rewards=rewards,
        kl=kl,
        advantages=whiten(raw, mask),
        returns=returns,
        scores=scores,
    )
