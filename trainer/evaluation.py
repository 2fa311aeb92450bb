"""What the policy writes to held-out prompts on the way, judged by what it does not learn from.

A policy that learns to please its reward does so ever better, whether or not it writes better; so
the best one is kept only by a metric that was named, and a judge that is none of the rewards is
asked beside them. The prompts and the chance are the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from . import distributed
from .config import PPOConfig
from .data import read_prompts, stop_ids, sums
from .lora import save_policy
from .metrics import Metrics
from .models import Policy, lent, set_precision
from .rollout import generate, logprobs_of
from .scoring import RewardPart, load_rewards, models_of, score


class Evaluation:
    """Measures the policy every few updates, and keeps the best; its state is how good that was."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        longest_prompt: int,
    ) -> None:
        """Reads the prompts and loads the judge, where there are any."""
        self.config, self.tokenizer, self.device = config, tokenizer, device
        self.best: float | None = None
        weights = {config.judge: 1.0} if config.judge else {}
        at_rest = torch.device("cpu") if config.offload_frozen else device
        self.judges = load_rewards(weights, tokenizer, at_rest, config.max_tokens_per_micro_batch)
        judges = models_of(self.judges)
        set_precision(config.precision, *judges)
        rooms = [config.longest_prompt(judge.context_tokens) for judge in judges]
        read = (config.heldout, tokenizer, config.prompt_tokens, min([longest_prompt, *rooms]))
        self.prompts = read_prompts(*read)[: config.evaluation_prompts] if config.heldout else []

    def after(
        self,
        update: int,
        policy: Policy,
        reference: Policy,
        rewards: Sequence[RewardPart],
        metrics: Metrics,
    ) -> None:
        """Measures where it is due, and writes the policy to `run_dir/best` if it is better."""
        config = self.config
        due = update % config.evaluate_every_updates == 0 or update == config.updates
        if not (self.prompts and due):
            return
        frozen = [reference, *models_of([*rewards, *self.judges])]
        away = lent(self.device, *frozen if config.offload_frozen else ())
        found = Metrics()
        with metrics.timed("time/evaluation"), distributed.whole(policy), away:
            self.measure(policy, reference, rewards, found)
        found.across_processes()  # so that all of them find it better, or none
        metrics.take(found)
        if config.best_metric is None:
            return
        value = metrics.mean(config.best_metric)
        if math.isfinite(value) and (self.best is None or value > self.best):
            self.best = value
            save_policy(Path(config.run_dir, "best"), policy.lm, self.tokenizer)
        if self.best is not None:
            metrics.add("eval/best", self.best)

    def measure(
        self, policy: Policy, reference: Policy, rewards: Sequence[RewardPart], metrics: Metrics
    ) -> None:
        """One response to each of this process's prompts: score, KL to the reference, verdict."""
        config = self.config
        rollouts = generate(
            policy,
            self.prompts,
            stop_ids(self.tokenizer, policy.lm.generation_config),
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            generator=torch.Generator(self.device).manual_seed(config.seed),
            rows=distributed.share(len(self.prompts)),
        )
        ends, tokens = rollouts.cu_seqlens, config.max_tokens_per_micro_batch
        ref_logprobs = logprobs_of(rollouts, reference, config.temperature, tokens)
        scores, _ = score(rewards, rollouts, config.missing_eos_penalty)  # (S,)
        kl = sums(rollouts.logprobs - ref_logprobs, ends)  # (S,)
        metrics.add("eval/score", scores)
        metrics.add("eval/kl", kl)
        metrics.add("eval/rlhf_reward", scores - config.kl_coef * kl)
        metrics.add("eval/length", sums(rollouts.mask, ends))
        for judge in self.judges:
            metrics.add("eval/judge", judge.score(rollouts))

    def state_dict(self) -> dict[str, Any]:
        """What changes while a run goes on."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Goes on from there."""
        self.best = state_dict["best"]
