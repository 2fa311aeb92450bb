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
from transformers import PreTrainedTokenizerBase

from ppokern import kl_estimate, ppo_value_loss
from ppokern._names import KLKind

from . import distributed
from .check import check_answers, check_frozen, check_paths, check_start, check_sums
from .checkpoint import Checkpoints, save_model, write_json
from .config import CheckFailed, PPOConfig
from .data import micro_batches, mixed, read_prompts, stop_ids, sums
from .evaluation import Evaluation
from .experience import Experience, make_experience
from .lora import adapter_of, add_adapter, save_policy
from .metrics import Metrics, RunLog, distinct, repeated
from .models import (
    Policy,
    Scorer,
    ValueHead,
    equip,
    lent,
    load_policy,
    load_scorer,
    load_tokenizer,
    new_scorer,
    pick_device,
)
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
            return self.critic(self.policy(ids, cu_seqlens, mask, states=True))
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


@dataclass
class PenaltyController:
    """The weight of the KL from old to new policy, where that is what keeps a step small.

    Halved where the KL is below `target / 1.5`, doubled above `1.5 * target` (Schulman et al. 2017,
    section 4).
    """

    coef: float
    target: float

    def update(self, moved: float) -> None:
        """Moves the weight after an update that has come so far; NaN tells nothing."""
        if moved < self.target / 1.5:
            self.coef /= 2
        elif moved > self.target * 1.5:
            self.coef *= 2

    def state_dict(self) -> dict[str, Any]:
        """What changes while a run goes on."""
        return {"coef": self.coef}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Goes on from there."""
        self.coef = state_dict["coef"]


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
    device = pick_device(config.offload_frozen)
    models = load(config, device)
    longest = config.longest_prompt(models.context_tokens())
    files = config.prompt_files()
    read = [read_prompts(x, models.tokenizer, config.prompt_tokens, longest) for x in files]
    prompts = list(itertools.chain.from_iterable(read))
    evaluation = Evaluation(config, models.tokenizer, device, longest)
    check_frozen([models.policy, models.critic], models.frozen())
    away = models.frozen() if config.offload_frozen else []

    models.policy = distributed.wrap(models.policy, config.parallel)
    models.critic = distributed.wrap(models.critic, config.parallel)
    trained = [
        (models.policy, adamw(models.policy, config.learning_rate)),
        (models.critic, adamw(models.critic, config.critic_learning_rate)),
    ]
    controller = KLController.of(config)
    penalty = PenaltyController(config.penalty_coef, config.penalty_target_per_token)
    scaling = Scaling(config.reward_scaling, config.reward_clip)
    stop = stop_ids(models.tokenizer, models.policy.lm.generation_config)
    order = mixed(list(map(len, read)), list(files.values()), config.seed)
    chance = torch.Generator(device).manual_seed(config.seed)  # of sampling
    shuffle = torch.Generator().manual_seed(config.seed)  # of minibatches

    parts = {
        "policy": adapter_of(models.policy.lm) if config.lora_rank else models.policy,
        "critic": models.critic,
        "policy_optimizer": trained[0][1],
        "critic_optimizer": trained[1][1],
        "kl_controller": controller,
        "penalty_controller": penalty,
        "reward_scaling": scaling,
        "evaluation": evaluation,
        "order": order,
        "sampling": chance,
        "minibatches": shuffle,
    }
    checkpoints = Checkpoints(config, inputs(config), parts)
    done = checkpoints.begin(overwrite, resume)
    run_dir = checkpoints.run_dir
    log = RunLog(run_dir, "ppo", config.updates, config.tensorboard, done, config.tracker)
    with closing(log):
        for update in range(done + 1, config.updates + 1):
            metrics = Metrics()
            kl_coef = controller.coef
            kl_in_reward = kl_coef if config.kl_in != "loss" else 0.0
            kl_in_loss = kl_coef if config.kl_in != "reward" else 0.0

            asked = itertools.islice(order, config.episodes_per_update // config.samples_per_prompt)
            batch = [prompts[i] for i in asked for _ in range(config.samples_per_prompt)]
            rows, version = distributed.share(len(batch)), steps_taken(trained[0][1])
            with metrics.timed("time/rollout"), distributed.whole(models.policy):
                rollouts = (engine or generate)(
                    models.policy,
                    batch,
                    stop,
                    max_new_tokens=config.max_new_tokens,
                    temperature=config.temperature,
                    generator=chance,
                    version=version,
                    rows=rows,
                )
            check_answers(rollouts, [batch[row] for row in rows], version)
            sides = (models.policy, models.critic)
            held = distributed.whole(*sides)
            with metrics.timed("time/experience"), held, lent(device, *away):
                scores, parts = score(  # (S,)
                    models.rewards,
                    rollouts,
                    config.missing_eos_penalty,
                    scaling,
                    config.truncation == "drop",
                )
                experience = make_experience(
                    rollouts, scores, models.reference, models.values, config, kl_in_reward
                )
                if update == 1 or update % config.check_every == 0:
                    logprobs = check_paths(models.policy, rollouts, config, metrics)
                    check_sums(rollouts, experience, kl_in_reward, config.kl_kind_in_reward)
                    if update == 1:
                        check_start(logprobs, rollouts, experience)
            with metrics.timed("time/learn"):
                warming = update <= config.critic_warmup_updates
                learning = trained[1:] if warming else trained
                moved = learn(
                    models,
                    experience,
                    config,
                    learning,
                    kl_in_loss,
                    shuffle,
                    metrics,
                    penalty.coef * (config.objective == "penalty"),
                )

            kind = config.kl_kind_in_reward
            observe(metrics, rollouts, experience, parts, kl_coef, kl_in_reward, kind)
            metrics.across_processes()
            if not warming:  # else the KL stands still
                controller.update(metrics, len(batch))
                if config.objective == "penalty":
                    metrics.add("penalty_coef", penalty.coef)
                    penalty.update(moved)
            evaluation.after(update, models.policy, models.reference, models.rewards, metrics)
            row = metrics.means() | derived(metrics)
            log.write(update, row, line(row))
            if update % config.sample_every == 0:
                log.print(samples(models.tokenizer, rollouts, experience))
            checkpoints.after(update, log)
        row = log.last()

    sides = (models.reference, models.policy)
    with distributed.whole(models.policy), lent(device, *away):
        written = [
            respond(side, models.reference, models.rewards, models.tokenizer, prompts[:8], config)
            for side in sides
        ]
    if not models.shared:
        critic: Any = models.critic
        save_model(run_dir / "critic", critic.model, models.tokenizer)
    save_policy(run_dir / "policy", models.policy.lm, models.tokenizer)
    write_json(run_dir / "samples.json", side_by_side(*written))
    write_json(run_dir / "summary.json", row)
    return row


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
                policy, states = models.policy(
                    batch.ids,
                    batch.cu_seqlens,
                    batch.mask,
                    states=True,
                    temperature=config.temperature,
                    old_logprobs=batch.logprobs,
                    dual_clip=config.dual_clip,
                    ratio=config.ratio,
                    aggregate=config.aggregate,
                    entropy_coef=config.entropy_coef,
                    entropy_stats=True,
                    denominator=tokens if config.aggregate == "token_mean" else responses,
                    **step_limit(batch, config, kl_coef, penalty_coef),
                )
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


def observe(
    metrics: Metrics,
    rollouts: Rollouts,
    experience: Experience,
    parts: dict[str, Tensor],
    kl_coef: float,
    kl_in_reward: float,
    kl_kind: KLKind = "k1",
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
    penalty = kl_estimate(rollouts.logprobs, experience.ref_logprobs, kl_kind, mask)
    penalty = kl_in_reward * sums(penalty, ends)[kept]
    metrics.add("objective/non_score_reward", -penalty)
    metrics.add("objective/rlhf_reward", scores - penalty)
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
