"""Checks that the parts of a PPO run agree; a failure stops the run and names the likely cause.

Sampling and training compute the same log-probs in two ways (step by step with a cache, all at once
without). Where they differ, the ratio of the first step is not 1 and PPO learns from noise, in
silence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ppokern import kl_estimate
from ppokern._names import KLKind

from . import distributed
from .config import CheckFailed, PPOConfig
from .data import Prompt, select, sums
from .experience import Experience
from .metrics import Metrics
from .models import LogProbs, Policy, dropout_of
from .rollout import Rollouts, logprobs_of

# Between sampling and training: largest |ratio - 1|, and the log-prob's change on average, nats.
# float32 leaves some 1e-5 and 1e-6; bfloat16 .05 and .007 in a fresh Llama of 7 M parameters, .33
# and .034 in SmolLM2-135M, where a temperature off by a tenth is .7 and .07 to .18.
LIMITS = {"float32": (1e-3, 1e-3), "bfloat16": (0.5, 0.06)}
KL_LIMIT = 1e-4  # nats a token, between policy and reference before the first step


def check_frozen(trained: Sequence[nn.Module], frozen: Sequence[nn.Module]) -> None:
    """Nothing that is trained is part of a frozen model, and nothing drops anything."""
    for module in (*trained, *frozen):
        if names := dropout_of(module):
            raise CheckFailed(f"dropout is on in {type(module).__name__}: {', '.join(names)}")
    if any(parameter.requires_grad for module in frozen for parameter in module.parameters()):
        raise CheckFailed("reference or reward model has a parameter that would be trained")
    addresses = [
        {p.data_ptr() for module in group for p in module.parameters() if p.requires_grad in which}
        for group, which in ((trained, {True}), (frozen, {True, False}))
    ]
    if addresses[0] & addresses[1]:
        raise CheckFailed("reference or reward model shares a parameter with policy or critic")


def check_answers(rollouts: Rollouts, asked: Sequence[Prompt], version: int) -> None:
    """What an engine returned was sampled for these prompts by the weights that are trained."""
    if rollouts.policy_version != version:
        raise CheckFailed(
            f"stale rollouts: sampled by policy version {rollouts.policy_version}, the policy is "
            f"at {version}; the likely cause: weights out of step, the engine has not taken over "
            "the last ones"
        )
    starts = [ids[: len(p.ids)] for ids, p in zip(rollouts.sequences(), asked, strict=False)]
    if starts != [prompt.ids for prompt in asked] or len(rollouts.prompts) != len(asked):
        raise CheckFailed(
            "the rollouts do not begin with the prompts that were asked for, in their order; the "
            "likely cause: the engine encodes prompts anew, or returns responses as they end"
        )


def check_paths(policy: Policy, rollouts: Rollouts, config: PPOConfig, metrics: Metrics) -> Tensor:
    """Sampling and training give a token the same log-prob.

    Returns:
        The log-probs on the training path, `(total,)`.
    """
    temperature = config.temperature
    again = logprobs_of(rollouts, policy, temperature, config.max_tokens_per_micro_batch)
    change = (again - rollouts.logprobs)[rollouts.mask].double()  # nats
    ratio, mean = _apart(change)
    metrics.add("consistency/ratio_error_max", distributed.largest(ratio))
    metrics.add("consistency/logprob_difference", change.abs())
    if not _alike(change, config.precision):
        raise CheckFailed(
            f"sampling and training disagree: |ratio - 1| is up to {ratio:.2g}, log-probs differ "
            f"by {mean:.2g} nats on average; the likely cause: "
            f"{likely_cause(policy, rollouts, config)}"
        )
    return again


def _apart(change: Tensor) -> tuple[float, float]:
    """Largest |ratio - 1|, and the mean change of a log-prob in nats."""
    if len(change) == 0:
        return 0.0, 0.0
    return change.expm1().abs().max().item(), change.abs().mean().item()


def _alike(change: Tensor, precision: str) -> bool:
    return all(x <= limit for x, limit in zip(_apart(change), LIMITS[precision], strict=True))


def check_start(logprobs: Tensor, rollouts: Rollouts, experience: Experience) -> None:
    """Before the first step the policy is its reference."""
    distances = (logprobs - experience.ref_logprobs)[rollouts.mask].abs()
    distance = distances.max().item() if len(distances) else 0.0
    if not distance <= KL_LIMIT:
        raise CheckFailed(
            f"before the first step the reference differs from the policy by up to {distance:.2g} "
            "nats a token; the likely cause: weights out of step, the reference is not the model "
            "that the policy starts from"
        )


def check_sums(
    rollouts: Rollouts, experience: Experience, kl_coef: float, kl_kind: KLKind = "k1"
) -> None:
    """Every response token is a transition; a response's rewards add up to its score less KL."""
    starts = rollouts.lengths.new_tensor([len(prompt.ids) for prompt in rollouts.prompts])
    chosen = rollouts.lengths - starts  # (S,)
    if not torch.equal(sums(rollouts.mask, rollouts.cu_seqlens).long(), chosen):
        raise CheckFailed(
            "the mask does not have one place for each response token; the likely cause: packing"
        )
    x = experience
    penalty = kl_estimate(rollouts.logprobs, x.ref_logprobs, kl_kind, x.mask)
    kept, kl, rewards = (sums(y, x.cu_seqlens) for y in (x.mask, penalty, x.rewards))  # (S,)
    total = (x.scores - kl_coef * kl).where(kept > 0, 0.0)
    if not torch.allclose(rewards, total, rtol=1e-4, atol=1e-3):
        raise CheckFailed(
            "rewards do not add up to score less KL; the likely cause: the mask, or a score put "
            "twice"
        )


@torch.no_grad()
def likely_cause(policy: Policy, rollouts: Rollouts, config: PPOConfig) -> str:
    """Tries what could make sampling and training differ until one of them explains it."""
    temperature = config.temperature
    alone = [select(rollouts.cu_seqlens, [row]) for row in range(min(4, len(rollouts.prompts)))]

    def explained(temperature: float) -> bool:
        """Whether sequences alone give what sampling gave."""
        changes = [
            policy(LogProbs(rollouts.ids[places], ends, mask, temperature))[mask]
            - rollouts.logprobs[places][mask]
            for places, ends in alone
            for mask in [rollouts.mask[places]]
        ]
        return _alike(torch.cat(changes).double(), config.precision)

    if policy.training and dropout_of(policy):
        return "dropout is on"
    if explained(temperature):
        return "packing changes what a sequence's tokens are given"
    for tried in (step / 20 for step in range(2, 61)):
        if explained(tried):
            return f"temperature, {tried:g} in sampling and {temperature:g} in training"
    if next(policy.parameters()).dtype != torch.float32:
        return f"precision, the policy is in {next(policy.parameters()).dtype}"
    return "weights out of step, sampling used others than training does"
