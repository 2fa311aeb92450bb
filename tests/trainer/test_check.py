import copy
from typing import Any

import pytest
import torch
from torch import nn

from trainer import check, models, ppo
from trainer.attention import Packed
from trainer.config import CheckFailed, PPOConfig
from trainer.data import Prompt
from trainer.metrics import Metrics
from trainer.models import Policy
from trainer.rollout import Rollouts, generate

PROMPTS = [Prompt(ids, "", {}) for ids in ([1, 20, 30, 40], [1, 99], [1, 30, 20])]


def rolled(policy: Policy, temperature: float = 1.0) -> Rollouts:
    generator = torch.Generator().manual_seed(0)
    return generate(
        policy, PROMPTS, [2], max_new_tokens=9, temperature=temperature, generator=generator
    )


def fails(policy: Policy, rollouts: Rollouts, cause: str) -> None:
    with pytest.raises(
        CheckFailed, match=rf"sampling and training disagree.*likely cause: {cause}"
    ):
        check.check_paths(policy, rollouts, PPOConfig(), Metrics())


def test_T3_temperature_is_named(policy: Policy) -> None:
    fails(
        policy, rolled(policy, temperature=0.7), r"temperature, 0\.7 in sampling and 1 in training"
    )


def test_T5_dropout_is_named(policy: Policy) -> None:
    rollouts = rolled(policy)
    part: Any = policy.lm.base_model
    name = "drop" if hasattr(part, "drop") else "norm"
    setattr(part, name, nn.Sequential(getattr(part, name), nn.Dropout(0.1)))
    policy.train()
    fails(policy, rollouts, "dropout is on")


def test_T4_packing_is_named(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = rolled(policy)
    inner = models._hidden

    def leaking(model: Any, layout: Packed, ids: torch.Tensor) -> torch.Tensor:
        return inner(model, layout, ids) + 0.1 * (len(layout.cu_seqlens) > 2)

    monkeypatch.setattr(models, "_hidden", leaking)
    fails(policy, rollouts, "packing")


def test_precision_is_named(policy: Policy) -> None:
    rollouts = rolled(policy)
    fails(policy.bfloat16(), rollouts, r"precision, the policy is in torch\.bfloat16")


def test_weights_out_of_step_are_named(policy: Policy) -> None:
    rollouts = rolled(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    fails(policy, rollouts, "weights out of step")


def test_nan_is_a_failure(policy: Policy) -> None:
    rollouts = rolled(policy)
    rollouts.logprobs[rollouts.mask.nonzero()[0]] = torch.nan
    fails(policy, rollouts, "weights out of step")


def test_T7_the_reference_must_be_the_start(
    ppo_config: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = ppo.load(ppo_config, torch.device("cpu"))
    with torch.no_grad():
        for parameter in models.reference.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    monkeypatch.setattr(ppo, "load", lambda *_: models)
    with pytest.raises(CheckFailed, match="before the first step the reference differs"):
        ppo.run(ppo_config)


def test_nothing_trained_may_be_frozen_too(ppo_config: PPOConfig) -> None:
    models = ppo.load(ppo_config, torch.device("cpu"))
    check.check_frozen([models.policy, models.critic], models.frozen())
    with pytest.raises(CheckFailed, match="has a parameter that would be trained"):
        check.check_frozen([models.policy], [models.critic])
    frozen = {id(p): nn.Parameter(p.data, False) for p in models.policy.parameters()}
    shared = copy.deepcopy(models.policy, frozen)  # other objects on the same memory
    with pytest.raises(CheckFailed, match="shares a parameter"):
        check.check_frozen([models.policy], [shared])


def test_a_mask_that_does_not_add_up(policy: Policy) -> None:
    rollouts = rolled(policy)
    rollouts.mask[:9] = False
    with pytest.raises(CheckFailed, match="one place for each response token"):
        check.check_sums(rollouts, None, 0.1)  # type: ignore[arg-type]


def test_rewards_that_do_not_add_up(ppo_config: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = ppo.make_experience

    def twice(rollouts: Rollouts, scores: torch.Tensor, *args: Any) -> Any:
        x = inner(rollouts, scores, *args)
        x.rewards = x.rewards * 2
        return x

    monkeypatch.setattr(ppo, "make_experience", twice)
    with pytest.raises(CheckFailed, match="rewards do not add up"):
        ppo.run(ppo_config)
