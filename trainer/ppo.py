"""PPO: sample, score, shape, learn; again.

    python -m trainer ppo --run_dir runs/ppo --model runs/sft/model --train prompts.jsonl \
        --rewards '{runs/reward/model: 1}'

Four models: the policy learns to write, the critic to foresee the score, the reference is the
policy as it was, and the reward model (or a function) scores. Sampling is in rollout.py, scores in
scoring.py, the way from scores to advantages in experience.py, the checks that sampling and
training agree in check.py, and the losses are `ppokern`'s.

Source: Schulman et al. 2017 (PPO), 2016 (GAE); Ziegler et al. 2019 (KL to a reference, adaptive
coefficient).
"""

from __future__ import annotations

import itertools
import math
import resource
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from ppokern import kl_estimate, ppo_value_loss

from . import distributed
from .check import check_frozen, check_paths, check_start, check_sums
from .checkpoint import Checkpoints, save_model, write_json
from .config import CheckFailed, PPOConfig
from .data import micro_batches, read_prompts, shuffled, stop_ids, sums
from .experience import Experience, make_experience
from .metrics import Metrics, RunLog, distinct, repeated
from .models import (
    Policy,
    Scorer,
    load_policy,
    load_scorer,
    load_tokenizer,
    new_scorer,
    pick_device,
)
from .optimise import Trained, adamw, clipped_step
from .rollout import Rollouts, generate
from .sample import respond, side_by_side
from .scoring import RewardPart, load_rewards, score, source_file


@dataclass
class Models:
    """The four models, and the tokenizer they share."""

    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    critic: Scorer
    reference: Policy
    rewards: list[RewardPart]

    def frozen(self) -> list[nn.Module]:
        """Those that no step may change."""
        return [self.reference, *(part.model for part in self.rewards if part.model)]

    def context_tokens(self) -> int:
        """Longest sequence that all of them can read."""
        scorers = [self.critic, *(part.model for part in self.rewards if part.model)]
        return min(module.context_tokens for module in (self.policy, *scorers))


@dataclass
class KLController:
    """The weight of the KL to the reference: fixed, or led to a target.

    `coef *= 1 + clip(kl / target - 1, -.2, .2) * episodes / horizon` (Ziegler et al. 2019, section
    2.2).
    """

    coef: float
    target: float | None
    measure: str  # the metric that the target is one of
    horizon_episodes: int

    @staticmethod
    def of(config: PPOConfig) -> KLController:
        """The controller that a configuration asks for."""
        if config.kl_target_per_token is not None:
            target, measure = config.kl_target_per_token, "objective/kl_per_token"
        else:
            target, measure = config.kl_target_per_sequence, "objective/kl"
        return KLController(config.kl_coef, target, measure, config.kl_horizon_episodes)

    def update(self, metrics: Metrics, episodes: int) -> None:
        """Moves the coefficient after an update of so many episodes."""
        if self.target is not None:
            error = metrics.mean(self.measure) / self.target - 1
            if math.isfinite(error):  # nothing to go by where every response was left out
                self.coef *= 1 + min(max(error, -0.2), 0.2) * episodes / self.horizon_episodes

    def state_dict(self) -> dict[str, Any]:
        """What changes while a run goes on."""
        return {"coef": self.coef}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Goes on from there."""
        self.coef = state_dict["coef"]


def run(
    config: PPOConfig, overwrite: bool = False, resume: bool = False
) -> dict[str, float | None]:
    """Trains, writes policy, critic, metrics and samples, and returns the last metrics."""
    config.check()
    device = pick_device()
    models = load(config, device)
    longest = config.longest_prompt(models.context_tokens())
    prompts = read_prompts(config.train, models.tokenizer, config.prompt_tokens, longest)
    check_frozen([models.policy, models.critic], models.frozen())

    models.policy = distributed.wrap(models.policy, config.parallel)
    models.critic = distributed.wrap(models.critic, config.parallel)
    trained = [
        (models.policy, adamw(models.policy, config.learning_rate)),
        (models.critic, adamw(models.critic, config.critic_learning_rate)),
    ]
    controller = KLController.of(config)
    stop = stop_ids(models.tokenizer, models.policy.lm.generation_config)
    order = shuffled(len(prompts), config.seed)
    chance = torch.Generator(device).manual_seed(config.seed)  # of sampling
    shuffle = torch.Generator().manual_seed(config.seed)  # of minibatches

    parts = {
        "policy": models.policy,
        "critic": models.critic,
        "policy_optimizer": trained[0][1],
        "critic_optimizer": trained[1][1],
        "kl_controller": controller,
        "order": order,
        "sampling": chance,
        "minibatches": shuffle,
    }
    checkpoints = Checkpoints(config, inputs(config), parts)
    done = checkpoints.begin(overwrite, resume)
    run_dir = checkpoints.run_dir
    with closing(RunLog(run_dir, "ppo", config.updates, config.tensorboard, done)) as log:
        for update in range(done + 1, config.updates + 1):
            metrics = Metrics()
            kl_coef = controller.coef
            kl_in_reward = kl_coef if config.kl_in != "loss" else 0.0
            kl_in_loss = kl_coef if config.kl_in != "reward" else 0.0

            asked = itertools.islice(order, config.episodes_per_update // config.samples_per_prompt)
            batch = [prompts[i] for i in asked for _ in range(config.samples_per_prompt)]
            with metrics.timed("time/rollout"), distributed.whole(models.policy):
                rollouts = generate(
                    models.policy,
                    batch,
                    stop,
                    max_new_tokens=config.max_new_tokens,
                    temperature=config.temperature,
                    generator=chance,
                    rows=distributed.share(len(batch)),
                )
            sides = (models.policy, models.critic)
            with metrics.timed("time/experience"), distributed.whole(*sides):
                scores, parts = score(models.rewards, rollouts, config.missing_eos_penalty)  # (S,)
                experience = make_experience(
                    rollouts, scores, models.reference, models.critic, config, kl_in_reward
                )
                if update == 1 or update % config.check_every == 0:
                    logprobs = check_paths(models.policy, rollouts, config, metrics)
                    check_sums(rollouts, experience, kl_in_reward)
                    if update == 1:
                        check_start(logprobs, rollouts, experience)
            with metrics.timed("time/learn"):
                learn(models, experience, config, trained, kl_in_loss, shuffle, metrics)

            observe(metrics, rollouts, experience, parts, kl_coef, kl_in_reward)
            metrics.across_processes()
            controller.update(metrics, len(batch))
            row = metrics.means() | derived(metrics)
            log.write(update, row, line(row))
            if update % config.sample_every == 0:
                log.print(samples(models.tokenizer, rollouts, experience))
            checkpoints.after(update, log)
        row = log.last()

    sides = (models.reference, models.policy)
    with distributed.whole(models.policy):
        written = [
            respond(side, models.reference, models.rewards, models.tokenizer, prompts[:8], config)
            for side in sides
        ]
    save_model(run_dir / "critic", models.critic.model, models.tokenizer)
    save_model(run_dir / "policy", models.policy.lm, models.tokenizer)
    write_json(run_dir / "samples.json", side_by_side(*written))
    write_json(run_dir / "summary.json", row)
    return row


def load(config: PPOConfig, device: torch.device) -> Models:
    """The four models as they stand before the first update."""
    tokenizer = load_tokenizer(config.model)
    critic = load_scorer(config.critic) if config.critic else new_scorer(config.model)
    critic.model.config.update({"reward_head_trained": False})  # it foresees scores, it gives none
    return Models(
        tokenizer,
        load_policy(config.model).to(device),
        critic.to(device),
        load_policy(config.model).requires_grad_(False).to(device),
        load_rewards(config.rewards, tokenizer, device, config.max_tokens_per_micro_batch),
    )


def inputs(config: PPOConfig) -> dict[str, Path]:
    """What a run reads and does not change."""
    rewards = {
        f"reward {source}": source_file(source) if ":" in source else Path(source)
        for source in config.rewards
    }
    critic = {"critic": Path(config.critic)} if config.critic else {}
    return {"reference": Path(config.model), "data": Path(config.train), **rewards, **critic}


def learn(
    models: Models,
    experience: Experience,
    config: PPOConfig,
    trained: Sequence[Trained],
    kl_coef: float,
    shuffle: torch.Generator,
    metrics: Metrics,
) -> None:
    """`ppo_epochs * minibatches` steps on one experience, fewer where `target_kl` ends them."""
    before = [steps_taken(optimizer) for _, optimizer in trained]
    taken = 0
    for minibatch in minibatches(experience, config, shuffle):
        moved = backward(models, minibatch, config, kl_coef, metrics)
        if config.target_kl is not None and moved > config.target_kl:
            metrics.add("early_stops", 1.0)
            break
        norms, stepped = clipped_step(trained, config.max_grad_norm)
        taken += stepped
        metrics.add("skipped_steps", not stepped)
        metrics.add("grad_norm/policy", norms[0])
        metrics.add("grad_norm/critic", norms[1])
    metrics.add("optimizer_steps", taken)
    for (module, optimizer), start in zip(trained, before, strict=True):
        module.zero_grad()
        if steps_taken(optimizer) != start + taken:
            raise CheckFailed(
                f"{taken} optimiser steps were due, {steps_taken(optimizer) - start} were taken"
            )


def minibatches(
    experience: Experience, config: PPOConfig, shuffle: torch.Generator
) -> Iterator[Experience]:
    """Each pass over all processes' experience in an order of its own; what is this one's of it."""
    counts = distributed.gathered(len(experience.scores))
    before, mine = sum(counts[: distributed.rank()]), counts[distributed.rank()]
    for _ in range(config.ppo_epochs):
        order = torch.randperm(sum(counts), generator=shuffle) - before
        for rows in order.tensor_split(config.minibatches):
            yield experience.rows(rows[(rows >= 0) & (rows < mine)].tolist())


def backward(
    models: Models, minibatch: Experience, config: PPOConfig, kl_coef: float, metrics: Metrics
) -> float:
    """Gradients of a minibatch, the same however it is cut, in micro-batches or over processes.

    Returns:
        How far the policy has moved from the one that sampled: k3, nats a token.
    """
    tokens = distributed.total(minibatch.mask.sum()).clamp(min=1)
    processes = distributed.size()
    moved = torch.zeros((), device=tokens.device)
    lengths = minibatch.cu_seqlens.diff().tolist()
    cuts = micro_batches(lengths, config.max_tokens_per_micro_batch)
    for rows, last in distributed.passes(cuts):
        batch = minibatch.rows(rows) if rows else minibatch.nothing()
        with distributed.step_pass(models.policy, last):
            policy = models.policy(
                batch.ids,
                batch.cu_seqlens,
                batch.mask,
                temperature=config.temperature,
                old_logprobs=batch.logprobs,
                advantages=batch.advantages,
                ref_logprobs=batch.ref_logprobs,
                clip_range=config.clip_range,
                entropy_coef=config.entropy_coef,
                entropy_stats=True,
                kl_coef=kl_coef,
                denominator=tokens,
            )
            # before the critic's pass: its activations take the same room
            (policy.loss * processes).backward()
        with distributed.step_pass(models.critic, last):
            value = ppo_value_loss(
                models.critic(batch.ids, batch.cu_seqlens),
                batch.values,
                batch.returns,
                mask=batch.mask,
                clip_range=config.value_clip_range,
                denominator=tokens,
            )
            (value.loss * processes).backward()

        count = batch.mask.sum()
        for name, stat in POLICY_STATS.items():
            metrics.add_sum(name, policy.stats[stat] * count, count)
        if config.value_clip_range is not None:
            metrics.add_sum("val/clipfrac_avg", value.stats["value_clip_fraction"] * count, count)
        metrics.add_sum("loss/policy_avg", policy.stats["policy_loss"], 0)
        metrics.add_sum("loss/value_avg", value.stats["value_loss"], 0)
        moved += policy.stats["approx_kl_k3"] * count / tokens
    metrics.add_sum("loss/policy_avg", 0.0, 1 / processes)
    metrics.add_sum("loss/value_avg", 0.0, 1 / processes)
    return distributed.total(moved).item()


POLICY_STATS = {
    "policy/entropy_avg": "entropy",  # exact, over the vocabulary
    "policy/approxkl_avg": "approx_kl_k2",
    "policy/approxkl_k1": "approx_kl_k1",
    "policy/approxkl_k3": "approx_kl_k3",
    "policy/clipfrac_avg": "clip_fraction",
    "val/ratio": "ratio_mean",
}


def steps_taken(optimizer: Optimizer) -> int:
    """How many steps an Adam has taken, by its own count."""
    counts = {int(state["step"]) for state in optimizer.state.values()}
    return max(counts, default=0)


def observe(
    metrics: Metrics,
    rollouts: Rollouts,
    experience: Experience,
    parts: dict[str, Tensor],
    kl_coef: float,
    kl_in_reward: float,
) -> None:
    """What there is to say of an update's episodes, in the names that TRL's users know."""
    mask, ends = experience.mask, experience.cu_seqlens
    kept = sums(mask, ends) > 0  # (S,) those that learn
    scores, kl = experience.scores[kept], sums(experience.kl, ends)[kept]
    metrics.add("objective/scores", scores)
    for name, part in parts.items():
        metrics.add(f"objective/scores/{name}", part[kept])
    metrics.add_sum("objective/unscored", (~kept).sum(), 1 / distributed.size())
    metrics.add("objective/kl", kl)
    metrics.add("objective/kl_per_token", experience.kl, mask)
    k3 = kl_estimate(rollouts.logprobs, experience.ref_logprobs, "k3", mask)
    metrics.add("objective/kl_k3", sums(k3, ends)[kept])
    sampled = -sums(rollouts.logprobs, ends)[kept]  # nats: a proxy; policy/entropy_avg is exact
    metrics.add("objective/entropy", sampled)
    metrics.add("objective/non_score_reward", -kl_in_reward * kl)
    metrics.add("objective/rlhf_reward", scores - kl_in_reward * kl)
    metrics.add("objective/shaped_reward", experience.rewards, mask)
    metrics.add("objective/advantage", experience.returns - experience.values, mask)
    metrics.add("objective/whitened_advantage_abs", experience.advantages.abs(), mask)
    metrics.add("kl_coef", kl_coef)

    responses = rollouts.responses()
    lengths = sums(rollouts.mask, ends)  # (S,)
    metrics.add("response/length", lengths)
    metrics.add("response/truncated", ~rollouts.terminated)
    metrics.add_sum("val/num_eos_tokens", rollouts.terminated.sum(), 1 / distributed.size())
    metrics.add_sum("response/repetition", *repeated(responses))
    everyone = [ids for part in distributed.gathered(responses) for ids in part]
    for n in (1, 2):
        metrics.add_sum(f"response/distinct_{n}", *distinct(everyone, n))
    metrics.add_pairs("score_length", experience.scores, lengths, kept)
    metrics.add_pairs("value", experience.values, experience.returns, mask)


def derived(metrics: Metrics) -> dict[str, float]:
    """What is made of other metrics once they are whole."""
    seconds = sum(metrics.mean(f"time/{part}") for part in ("rollout", "experience", "learn"))
    return {
        "response/score_length_correlation": metrics.correlation("score_length"),
        "val/explained_variance": metrics.explained("value"),
        "time/tokens_per_second": metrics.total("response/length") / seconds,
        "memory/peak_bytes": peak_memory(),
    }


def peak_memory() -> float:
    """Most memory held so far: of the GPU if there is one, else of the process."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def line(row: dict[str, float]) -> str:
    """What the progress line says of an update."""
    return (
        f"score {row['objective/scores']:+.2f}, KL {round(row['objective/kl'], 1) + 0:.1f} nats, "
        f"{row['response/length']:.0f} tokens, {row['time/tokens_per_second']:.0f} tokens/s"
    )


def samples(tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts, experience: Experience) -> str:
    """Three responses of an update, each with its score and KL."""
    texts = tokenizer.batch_decode(rollouts.sequences()[:3], skip_special_tokens=True)
    kls = sums(experience.kl, experience.cu_seqlens).tolist()
    numbers = zip(experience.scores.tolist(), kls, texts, strict=False)
    return "\n".join(f"  [score {score:+.2f}, KL {kl:.1f}] {text}" for score, kl, text in numbers)
