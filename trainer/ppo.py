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
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ppokern import ppo_value_loss

from . import distributed
from .check import check_answers, check_frozen, check_paths, check_start, check_sums
from .checkpoint import Checkpoints, save_model, write_json
from .config import CheckFailed, PPOConfig
from .controllers import KLController, PenaltyController
from .data import Prompt, micro_batches, mixed, read_prompts, stop_ids, sums
from .evaluation import Evaluation
from .experience import Experience, make_experience
from .lora import adapter_of, add_adapter, save_policy
from .metrics import Metrics, RunLog
from .models import (
    LogProbs,
    Policy,
    PPOLoss,
    Scorer,
    States,
    ValueHead,
    equip,
    lent,
    load_policy,
    load_scorer,
    load_tokenizer,
    new_scorer,
    pick_device,
)
from .observation import derived, line, observe, samples
from .optimise import Trained, adamw, clipped_step, steps_taken
from .rollout import Engine, Rollouts, generate
from .running import stage
from .sample import respond, side_by_side
from .scoring import (
    RewardPart,
    Scaling,
    is_function,
    load_rewards,
    models_of,
    score,
    source_file,
)


@dataclass
class Models:
    """The four models, and the tokenizer they share."""

    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    critic: Scorer | ValueHead
    reference: Policy
    rewards: list[RewardPart]
    shared: bool = False  # the critic is a head on the policy's trunk

    def values(self, ids: Tensor, cu_seqlens: Tensor, mask: Tensor | None = None) -> Tensor:
        """The critic's, `(total,)`, to be read in `mask` only."""
        if self.shared:
            return self.critic(self.policy(States(ids, cu_seqlens, mask)))
        return self.critic(ids, cu_seqlens, mask)

    def frozen(self) -> list[nn.Module]:
        """Those that no step may change."""
        return [self.reference, *models_of(self.rewards)]

    def context_tokens(self) -> int:
        """Longest sequence that all of them can read."""
        scorers = [self.critic, *models_of(self.rewards)]
        scorers = [scorer for scorer in scorers if isinstance(scorer, Scorer)]
        return min(module.context_tokens for module in (self.policy, *scorers))


@dataclass
class Run:
    """What a run holds: its models, data and options, and all state that a checkpoint keeps."""

    config: PPOConfig
    device: torch.device
    models: Models
    prompts: list[Prompt]
    stop: list[int]  # token ids that end a response
    evaluation: Evaluation
    trained: list[Trained]  # policy and critic
    kl: KLController
    penalty: PenaltyController
    scaling: Scaling
    order: Iterator[int]  # of prompts
    sampling: torch.Generator
    minibatches: torch.Generator

    @staticmethod
    def of(config: PPOConfig) -> Run:
        """The run as it stands before its first update."""
        device = pick_device(config.offload_frozen)
        models = load(config, device)
        longest = config.longest_prompt(models.context_tokens())
        files = config.prompt_files()
        read = [read_prompts(x, models.tokenizer, config.prompt_tokens, longest) for x in files]
        evaluation = Evaluation(config, models.tokenizer, device, longest)
        check_frozen([models.policy, models.critic], models.frozen())
        models.policy = distributed.wrap(models.policy, config.parallel)
        models.critic = distributed.wrap(models.critic, config.parallel)
        return Run(
            config,
            device,
            models,
            list(itertools.chain.from_iterable(read)),
            stop_ids(models.tokenizer, models.policy.lm.generation_config),
            evaluation,
            [
                (models.policy, adamw(models.policy, config.learning_rate)),
                (models.critic, adamw(models.critic, config.critic_learning_rate)),
            ],
            KLController.of(config),
            PenaltyController(config.penalty_coef, config.penalty_target_per_token),
            Scaling(config.reward_scaling, config.reward_clip),
            mixed(list(map(len, read)), list(files.values()), config.seed),
            torch.Generator(device).manual_seed(config.seed),
            torch.Generator().manual_seed(config.seed),
        )

    def state(self) -> dict[str, Any]:
        """What changes while the run goes on, under the names that it has in checkpoints."""
        policy = self.models.policy
        return {
            "policy": adapter_of(policy.lm) if self.config.lora_rank else policy,
            "critic": self.models.critic,
            "policy_optimizer": self.trained[0][1],
            "critic_optimizer": self.trained[1][1],
            "kl_controller": self.kl,
            "penalty_controller": self.penalty,
            "reward_scaling": self.scaling,
            "evaluation": self.evaluation,
            "order": self.order,
            "sampling": self.sampling,
            "minibatches": self.minibatches,
        }

    @property
    def away(self) -> list[nn.Module]:
        """Frozen models that wait in the CPU's memory."""
        return self.models.frozen() if self.config.offload_frozen else []


@stage
def run(
    config: PPOConfig,
    overwrite: bool = False,
    resume: bool = False,
    engine: Engine | None = None,
) -> dict[str, float | None]:
    """Trains, writes policy, critic, metrics and samples, and returns the last metrics.

    `engine` samples what is learned from, in place of `generate`; evaluation does not ask it.
    """
    of = Run.of(config)
    models = of.models
    checkpoints = Checkpoints(config, inputs(config), of.state())
    done = checkpoints.begin(overwrite, resume)
    run_dir = checkpoints.run_dir
    log = RunLog(run_dir, "ppo", config.updates, config.tensorboard, done, config.tracker)
    with closing(log):
        for update in range(done + 1, config.updates + 1):
            metrics, kl_coef = Metrics(), of.kl.coef
            in_reward = kl_coef if config.kl_in != "loss" else 0.0
            in_loss = kl_coef if config.kl_in != "reward" else 0.0
            warming = update <= config.critic_warmup_updates

            with metrics.timed("time/rollout"), distributed.whole(models.policy):
                rollouts = sample(of, engine or generate)
            held = distributed.whole(models.policy, models.critic)
            with metrics.timed("time/experience"), held, lent(of.device, *of.away):
                scores, parts = score(
                    models.rewards,
                    rollouts,
                    config.missing_eos_penalty,
                    of.scaling,
                    config.truncation == "drop",
                )
                experience = make_experience(
                    rollouts, scores, models.reference, models.values, config, in_reward
                )
                check(of, update, rollouts, experience, in_reward, metrics)
            with metrics.timed("time/learn"):
                trained = of.trained[1:] if warming else of.trained
                penalty = of.penalty.coef if config.objective == "penalty" else 0.0
                moved = learn(
                    models, experience, config, trained, in_loss, of.minibatches, metrics, penalty
                )

            kind = config.kl_kind_in_reward
            observe(metrics, rollouts, experience, parts, kl_coef, in_reward, kind)
            metrics.across_processes()
            if not warming:  # a policy that stands still tells nothing
                control(of, metrics, moved)
            of.evaluation.after(update, models.policy, models.reference, models.rewards, metrics)
            row = metrics.means() | derived(metrics)
            log.write(update, row, line(row))
            if update % config.sample_every == 0:
                log.print(samples(models.tokenizer, rollouts, experience))
            checkpoints.after(update, log)
        row = log.last()
    write(of, run_dir, row)
    return row


def sample(of: Run, engine: Engine) -> Rollouts:
    """The responses of an update to the prompts that come next, those of this process."""
    config, policy = of.config, of.models.policy
    asked = itertools.islice(of.order, config.episodes_per_update // config.samples_per_prompt)
    batch = [of.prompts[i] for i in asked for _ in range(config.samples_per_prompt)]
    rows, version = distributed.share(len(batch)), steps_taken(of.trained[0][1])
    rollouts = engine(
        policy,
        batch,
        of.stop,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        generator=of.sampling,
        version=version,
        rows=rows,
    )
    check_answers(rollouts, [batch[row] for row in rows], version)
    return rollouts


def check(
    of: Run,
    update: int,
    rollouts: Rollouts,
    experience: Experience,
    kl_in_reward: float,
    metrics: Metrics,
) -> None:
    """Checks, before the first step and every so often, that sampling and training agree."""
    if update == 1 or update % of.config.check_every == 0:
        logprobs = check_paths(of.models.policy, rollouts, of.config, metrics)
        check_sums(rollouts, experience, kl_in_reward, of.config.kl_kind_in_reward)
        if update == 1:
            check_start(logprobs, rollouts, experience)


def control(of: Run, metrics: Metrics, moved: float) -> None:
    """Moves the weights of both KL terms after an update in which the policy moved so far."""
    prompts = of.config.episodes_per_update // of.config.samples_per_prompt
    of.kl.update(metrics, prompts * of.config.samples_per_prompt)
    if of.config.objective == "penalty":
        metrics.add("penalty_coef", of.penalty.coef)
        of.penalty.update(moved)


def write(of: Run, run_dir: Path, row: dict[str, float | None]) -> None:
    """Writes policy, critic, what both policies say to eight prompts, and the last metrics."""
    models = of.models
    with distributed.whole(models.policy), lent(of.device, *of.away):
        said = [
            respond(
                side,
                models.reference,
                models.rewards,
                models.tokenizer,
                of.prompts[:8],
                of.config,
            )
            for side in (models.reference, models.policy)
        ]
    if not models.shared:
        critic: Any = models.critic
        save_model(run_dir / "critic", critic.model, models.tokenizer)
    save_policy(run_dir / "policy", models.policy.lm, models.tokenizer)
    write_json(run_dir / "samples.json", side_by_side(*said))
    write_json(run_dir / "summary.json", row)


def load(config: PPOConfig, device: torch.device) -> Models:
    """The four models as they stand before the first update."""
    tokenizer = load_tokenizer(config.model)
    at_rest = torch.device("cpu") if config.offload_frozen else device
    policy = load_policy(config.model).to(device)
    if config.lora_rank:
        adapter = (config.lora_rank, config.lora_alpha, config.seed)
        reference = add_adapter(policy, config.model, *adapter)
    else:
        reference = load_policy(config.model).requires_grad_(False).to(at_rest)
    if config.critic_kind == "head":
        critic = ValueHead(policy.lm.config.hidden_size)
    else:
        critic = (
            load_scorer(config.critic, tokenizer) if config.critic else new_scorer(config.model)
        )
        critic.model.config.update({"reward_head_trained": False})  # it foresees, it gives none
    models = Models(
        tokenizer,
        policy,
        critic.to(device),
        reference,
        load_rewards(config.rewards, tokenizer, at_rest, config.max_tokens_per_micro_batch),
        shared=config.critic_kind == "head",
    )
    equip(config, [policy, critic], models.frozen())
    return models


def inputs(config: PPOConfig) -> dict[str, Path | str]:
    """What a run reads and does not change."""
    functions = {f"reward {source}": source for source in config.rewards}
    functions |= {"judge": config.judge} if config.judge else {}
    rewards = {
        name: source_file(source) if is_function(source) else Path(source)
        for name, source in functions.items()
    }
    heldout = {"held-out data": config.heldout} if config.heldout else {}
    critic = {"critic": Path(config.critic)} if config.critic else {}
    data = {f"data in {file}": file for file in config.prompt_files()}
    return {"reference": Path(config.model), **data, **heldout, **rewards, **critic}


def learn(
    models: Models,
    experience: Experience,
    config: PPOConfig,
    trained: Sequence[Trained],
    kl_coef: float,
    shuffle: torch.Generator,
    metrics: Metrics,
    penalty_coef: float = 0.0,
) -> float:
    """`ppo_epochs * minibatches` steps on one experience, fewer where `target_kl` ends them.

    `trained` are policy and critic, or the critic alone.

    Returns:
        How far the policy had moved before the last step: k3, nats a token; NaN of none.
    """
    learning = ("policy", "critic")[-len(trained) :]
    before = [steps_taken(optimizer) for _, optimizer in trained]
    taken, moved = 0, 0.0
    for minibatch in minibatches(experience, config, shuffle):
        moved = backward(
            models, minibatch, config, kl_coef, metrics, "policy" in learning, penalty_coef
        )
        if config.target_kl is not None and moved > config.target_kl:
            metrics.add("early_stops", 1.0)
            break
        learned = not math.isnan(moved)
        norms, stepped = clipped_step(trained, config.max_grad_norm, learned)
        taken += stepped
        metrics.add("skipped_steps", not stepped)
        for name, norm in zip(learning, norms, strict=True):
            metrics.add(f"grad_norm/{name}", norm)
    metrics.add("optimizer_steps", taken)
    for (module, optimizer), start in zip(trained, before, strict=True):
        module.zero_grad()
        if steps_taken(optimizer) != start + taken:
            raise CheckFailed(
                f"{taken} optimiser steps were due, {steps_taken(optimizer) - start} were taken"
            )
    return moved


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
    models: Models,
    minibatch: Experience,
    config: PPOConfig,
    kl_coef: float,
    metrics: Metrics,
    policy_learns: bool = True,
    penalty_coef: float = 0.0,
) -> float:
    """Gradients of a minibatch, the same however it is cut, in micro-batches or over processes.

    Returns:
        How far the policy has moved from the one that sampled: k3, nats a token; NaN of none.
    """
    learned = distributed.total(minibatch.mask.sum())
    tokens = learned.clamp(min=1)
    kept = sums(minibatch.mask, minibatch.cu_seqlens) > 0  # (S,)
    responses = distributed.total(kept.sum()).clamp(min=1)
    processes = distributed.size()
    moved = torch.zeros((), device=tokens.device)
    lengths = minibatch.cu_seqlens.diff().tolist()
    cuts = micro_batches(lengths, config.max_tokens_per_micro_batch)
    for rows, last in distributed.passes(cuts):
        batch = minibatch.rows(rows) if rows else minibatch.nothing()
        with distributed.step_pass(models.policy, last), distributed.step_pass(models.critic, last):
            with torch.set_grad_enabled(policy_learns):
                options = {
                    "old_logprobs": batch.logprobs,
                    "dual_clip": config.dual_clip,
                    "ratio": config.ratio,
                    "aggregate": config.aggregate,
                    "entropy_coef": config.entropy_coef,
                    "entropy_stats": True,
                    "denominator": tokens if config.aggregate == "token_mean" else responses,
                    **step_limit(batch, config, kl_coef, penalty_coef),
                }
                of = LogProbs(batch.ids, batch.cu_seqlens, batch.mask, config.temperature)
                policy, states = models.policy(PPOLoss(of, options))
            if models.shared:
                values, loss, coef = models.critic(states), policy.loss, config.value_coef
            else:
                if policy_learns:  # before the critic's pass: its activations take the same room
                    (policy.loss * processes).backward()
                values = models.critic(batch.ids, batch.cu_seqlens, batch.mask)
                loss, coef = 0.0, 1.0
            value = ppo_value_loss(
                values,
                batch.values,
                batch.returns,
                mask=batch.mask,
                clip_range=config.value_clip_range,
                denominator=tokens,
            )
            ((loss + coef * value.loss) * processes).backward()

        count = batch.mask.sum()
        for name, stat in POLICY_STATS.items():
            metrics.add_sum(name, policy.stats[stat] * count, count)
        if config.value_clip_range is not None:
            metrics.add_sum("val/clipfrac_avg", value.stats["value_clip_fraction"] * count, count)
        surplus = penalty_coef * policy.stats["ratio_mean"] * count / tokens  # see step_limit
        metrics.add_sum("loss/policy_avg", policy.stats["policy_loss"] - surplus, 0)
        metrics.add_sum("loss/value_avg", value.stats["value_loss"], 0)
        moved += policy.stats["approx_kl_k3"] * count / tokens
    metrics.add_sum("loss/policy_avg", 0.0, 1 / processes)
    metrics.add_sum("loss/value_avg", 0.0, 1 / processes)
    return distributed.total(moved).item() if learned else math.nan


def step_limit(
    batch: Experience, config: PPOConfig, kl_coef: float, penalty_coef: float
) -> dict[str, Any]:
    """The options of the policy's loss that depend on the objective.

    The penalty is `b * (r - 1 - log r)`, of the KL from old to new policy. It is never
    negative; with `-r * A` before it, that is `-r * (A - b) - b * log r - b`.
    """
    if config.objective == "penalty":
        return {
            "advantages": batch.advantages - penalty_coef,
            "ref_logprobs": batch.logprobs,
            "clip_range": (1.0, math.inf),  # a ratio is never below 0, nor above this
            "kl_coef": -penalty_coef,
            "kl_kind": "k1",
        }
    return {
        "advantages": batch.advantages,
        "ref_logprobs": batch.ref_logprobs,
        "clip_range": (config.clip_range, config.clip_range_high or config.clip_range),
        "kl_coef": kl_coef,
        "kl_kind": config.kl_kind_in_loss,
    }


POLICY_STATS = {
    "policy/entropy_avg": "entropy",  # exact, over the vocabulary
    "policy/approxkl_avg": "approx_kl_k2",
    "policy/approxkl_k1": "approx_kl_k1",
    "policy/approxkl_k3": "approx_kl_k3",
    "policy/clipfrac_avg": "clip_fraction",
    "val/ratio": "ratio_mean",
}
