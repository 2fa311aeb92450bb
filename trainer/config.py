"""Every option of every stage: typed, its unit in its name, checked before anything is loaded.

A stage takes one of these dataclasses. The command line fills it from a YAML file and dotted
overrides; an unknown key is an error there, a value out of range is a `UserError` here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import ceil, inf, isfinite
from typing import ClassVar, Literal, TypeVar, get_args, get_type_hints

from ppokern._install import pip_install

SupervisedStage = TypeVar("SupervisedStage", bound="Supervised")


class UserError(Exception):
    """A mistake that the caller can mend, told in one sentence. Exit code 2."""


class Unwritten(UserError):
    """What the disk did not take. A run that was underway can be gone on with."""


class CheckFailed(Exception):
    """A run would learn from noise, as two things that must agree do not; or has learned nothing.

    Exit code 1.
    """


class Stopped(KeyboardInterrupt):
    """A signal has ended what was going on, as it was to. Exit code: 128 and its number."""

    def __init__(self, signum: int, sentence: str) -> None:
        """Takes what to tell."""
        super().__init__(sentence)
        self.code = 128 + signum


def require(condition: bool, sentence: str) -> None:
    """Raises a `UserError` with `sentence` unless `condition` holds."""
    if not condition:
        raise UserError(sentence)


def _positive(config: object, *names: str) -> None:
    for name in names:
        require(getattr(config, name) > 0, f"{name} must be positive, got {getattr(config, name)}")


def _no_nulls(config: object) -> None:
    """A YAML file's null is taken for an option of any type, and says something of few of them."""
    for name, kind in get_type_hints(type(config)).items():
        null = getattr(config, name) is None and type(None) not in get_args(kind)
        require(not null, f"{name} must have a value: it is null")


def _not_negative(config: object, *names: str) -> None:
    for name in names:
        require(
            getattr(config, name) >= 0, f"{name} must not be negative, got {getattr(config, name)}"
        )


def _check_lora(rank: int | None, alpha: float) -> None:
    require(rank is None or rank > 0, "lora_rank must be positive, or null for none")
    require(alpha > 0, f"lora_alpha must be positive, got {alpha}")
    require(
        rank is not None or alpha == Supervised.lora_alpha,
        "lora_alpha has no effect without a lora_rank",
    )


@dataclass
class Scratch:
    """A small model and its tokenizer, made from scratch."""

    family: Literal["gpt2", "llama"] = "gpt2"
    """Architecture."""
    vocab_size: int = 3072
    """Byte-level BPE tokens, three special ones included."""
    width: int = 128
    """Hidden size."""
    layers: int = 4
    """Transformer blocks."""
    heads: int = 4
    """Attention heads of a block."""
    context_tokens: int = 64
    """Longest sequence that the model can read."""

    def check(self) -> None:
        """Raises a `UserError` for a value out of range."""
        _no_nulls(self)
        _positive(self, "width", "layers", "heads")
        require(self.width % self.heads == 0, "scratch.width must be a multiple of scratch.heads")
        require(
            self.vocab_size >= 259,
            "scratch.vocab_size must be at least 259: 256 bytes and 3 special tokens",
        )
        require(self.context_tokens >= 8, "scratch.context_tokens must be at least 8")


@dataclass
class Stage:
    """What all stages have in common."""

    # without a default that would do, and what each is
    REQUIRED: ClassVar[dict[str, str]] = {
        "run_dir": "the folder that the stage is to write to",
        "train": "the rows to train on",
    }

    run_dir: str = ""
    """Folder that the stage makes and writes to."""
    model: str = ""
    """Folder of the transformers model to start from (local, safetensors)."""
    train: str = ""
    """Rows to train on: a JSONL or Parquet file, or `hub:NAME:SPLIT`, a data set of the hub."""
    seed: int = 0
    """Of initial weights, data order and sampling."""
    max_tokens_per_micro_batch: int = 2048
    """Most tokens in one packed pass; a step adds up as many passes as it needs."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; the norm before is logged."""
    compile: bool = False
    """The trunk's blocks by torch.compile, but for sampling: the first passes wait for it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of products in forward passes; weights, gradients, optimisers, losses stay in float32."""
    gradient_checkpointing: bool = False
    """A block's activations are made again in the backward pass, not kept until then."""
    tensorboard: bool = False
    """Write TensorBoard files beside metrics.jsonl."""
    tracker: Literal["wandb", "trackio"] | None = None
    """Send metrics to one of these as well; null: to none. Needs the extra of its name."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun, each process holds the trained models whole (DDP) or in part (FSDP2)."""
    keep_last_checkpoints: int = 2
    """Older ones are removed, each once a newer one stands."""

    def check(self) -> None:
        """Raises a `UserError` for a value that is missing or out of range."""
        _no_nulls(self)
        missing = {name: what for name, what in self.REQUIRED.items() if not getattr(self, name)}
        told = "; ".join(f"{name} is missing: {what}" for name, what in missing.items())
        require(not missing, told)
        _positive(self, "max_tokens_per_micro_batch", "max_grad_norm", "keep_last_checkpoints")
        in_range = -(2**63) <= self.seed < 2**63
        require(in_range, f"seed must be within 64 bits, -2**63 to 2**63 - 1, got {self.seed}")
        require(
            self.tracker is None or find_spec(self.tracker) is not None,
            f"tracker needs {self.tracker}: {pip_install(self.tracker or '')}",
        )


@dataclass
class Supervised(Stage):
    """What the supervised stages have in common: AdamW, a warm-up, a cosine to a twentieth."""

    heldout: str = ""
    """Rows to measure on, as those of `train`; empty: a tenth of these, drawn by the seed."""
    max_tokens: int = 64
    """Longer sequences are left out and counted."""
    steps: int = 1000
    """Optimiser steps."""
    epochs: float | None = None
    """Passes over the rows, each of which is learned from once in each; instead of `steps`."""
    learning_rate: float = 1e-3
    """At the height of the schedule."""
    warmup_steps: int = 20
    """Steps until then."""
    weight_decay: float = 0.01
    """Of AdamW, on matrices only."""
    lora_rank: int | None = None
    """The trunk learns in adapters of this rank, merged in the end; null: in all weights."""
    lora_alpha: float = 32.0
    """What an adapter adds is weighted by this over its rank."""
    evaluate_every_steps: int | None = None
    """Steps between two measurements on `heldout`; the model of the lowest loss is written. Null:
    the last step alone is measured, and its model written."""
    save_every_steps: int = 200
    """Optimiser steps between two checkpoints; the last step has one too."""

    @property
    def rows_per_step(self) -> int:
        """Sequences, or pairs, of one optimiser step."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises a `UserError` for a value that is missing or out of range."""
        super().check()
        require(self.max_tokens >= 2, "max_tokens must be at least 2")
        _positive(self, "steps", "learning_rate", "save_every_steps")
        _not_negative(self, "warmup_steps", "weight_decay")
        for name in ("epochs", "evaluate_every_steps"):
            value = getattr(self, name)
            require(value is None or 0 < value < inf, f"{name} must be positive, or null for none")
        _check_lora(self.lora_rank, self.lora_alpha)

    def counted(self: SupervisedStage, rows: int) -> SupervisedStage:
        """With the `steps` that `epochs` of so many rows are."""
        if self.epochs is None:
            return self
        steps = max(round(self.epochs * ceil(rows / self.rows_per_step)), 1)
        require(
            self.steps in (Supervised.steps, steps),
            f"steps is {self.steps:,}, but {self.epochs:g} epochs of {rows:,} rows are {steps:,}: "
            "give one of the two",
        )
        return replace(self, steps=steps)

    def finished_after(self, step: int) -> bool:
        """Whether this step is the last."""
        return step >= self.steps

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return step % self.save_every_steps == 0 or self.finished_after(step)

    def evaluates_after(self, step: int) -> bool:
        """Whether the model of this step is measured."""
        every = self.evaluate_every_steps
        return step == self.steps or (every is not None and step % every == 0)


@dataclass
class SFTConfig(Supervised):
    """Supervised fine-tuning on `{"text"}` or `{"prompt", "completion"}`."""

    scratch: Scratch = field(default_factory=Scratch)
    """The model to make where `model` names no folder."""
    sequences_per_step: int = 32
    """Sequences of one optimiser step, alike in length."""

    @property
    def rows_per_step(self) -> int:
        """Sequences of one optimiser step."""
        return self.sequences_per_step

    def check(self) -> None:
        """Raises a `UserError` for a value that is missing or out of range."""
        super().check()
        _positive(self, "sequences_per_step")
        if self.model:
            require(self.scratch == Scratch(), "scratch has no effect beside a model to start from")
        else:
            self.scratch.check()
            require(
                self.lora_rank is None,
                "lora_rank needs a model to start from: what a fresh one has is not worth keeping",
            )
            require(
                self.max_tokens <= self.scratch.context_tokens,
                f"max_tokens is {self.max_tokens}, more than scratch.context_tokens, "
                f"{self.scratch.context_tokens}",
            )


@dataclass
class RewardConfig(Supervised):
    """A reward model from preferences: `{"prompt", "chosen", "rejected"}`."""

    REQUIRED = Supervised.REQUIRED | {
        "model": "the folder of the model that the reward model starts from"
    }

    pairs_per_step: int = 16
    """Pairs of one optimiser step, alike in length."""

    @property
    def rows_per_step(self) -> int:
        """Pairs of one optimiser step."""
        return self.pairs_per_step

    def check(self) -> None:
        """Raises a `UserError` for a value that is missing or out of range."""
        super().check()
        _positive(self, "pairs_per_step")


@dataclass
class PPOConfig(Stage):
    """PPO with four models: policy, critic, frozen reference, frozen reward model or functions."""

    REQUIRED = Stage.REQUIRED | {
        "model": "the folder of the model that policy and reference start from",
        "rewards": "a reward model's folder or a function, with its weight",
    }

    train: dict[str, float] | str = ""
    """Rows of prompts, or several sources, each with its share of an update's prompts as weight."""
    prompt_tokens: int | None = None
    """The prompt is the first so many tokens of a row's `{"text"}`; null: its `{"prompt"}`."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Weight of each part: a reward model's folder, `FILE.py:name` or `module:name`."""
    critic: str = ""
    """Reward model's folder to start the critic from; else the policy's body, a head of zeros."""
    critic_kind: Literal["separate", "head"] = "separate"
    """A model of its own, or a value head on the policy's trunk: one pass for both."""

    offload_frozen: bool = False
    """Reference, reward models and judge are on the GPU only while they score."""
    lora_rank: int | None = None
    """The policy learns in adapters of this rank beside frozen weights; null: in all weights."""
    lora_alpha: float = 32.0
    """What an adapter adds is weighted by this over its rank."""

    updates: int = 60
    """Rounds of sampling and training."""
    episodes_per_update: int = 64
    """Responses of one update."""
    samples_per_prompt: int = 1
    """Responses to each prompt."""
    max_new_tokens: int = 20
    """Longest response."""
    temperature: float = 1.0
    """The same in sampling, training and reference."""
    reward_scaling: Literal["none", "std", "mean_std"] = "none"
    """Score over its running standard deviation, or its running mean taken off first."""
    reward_clip: float | None = None
    """Largest score either way, after scaling and before the penalty; null: none."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a response without an end token."""
    truncation: Literal["terminal", "bootstrap", "drop"] = "terminal"
    """A response cut for length: ends there, goes on with the critic's value, or is left out."""

    ppo_epochs: int = 2
    """Passes over the responses of an update."""
    minibatches: int = 2
    """Optimiser steps of one pass."""
    learning_rate: float = 3e-4
    """Of the policy."""
    critic_learning_rate: float = 1e-3
    """Of the critic."""
    critic_warmup_updates: int = 0
    """First updates, in which only the critic learns."""
    value_coef: float = 0.1
    """Weight of the critic's loss in a trunk that it shares with the policy."""
    objective: Literal["clip", "penalty"] = "clip"
    """What keeps a step small: a clipped ratio, or a penalty on the KL from old to new policy."""
    penalty_coef: float = 1.0
    """First weight of that KL; doubled and halved by what an update has moved."""
    penalty_target_per_token: float = 0.01
    """In nats a token: what that KL is led to at the last step of an update."""
    clip_range: float = 0.2
    """Of the probability ratio, below 1, and above where nothing else is said."""
    clip_range_high: float | None = None
    """Of the ratio above 1; null: as below. A higher one leaves rare tokens room to rise."""
    dual_clip: float | None = None
    """Ratio from which a token with a negative advantage pushes no further; above 1; null: none."""
    ratio: Literal["token", "sequence"] = "token"
    """New to old probability: of each token, or one for a response, the mean of its logarithms."""
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """Policy's loss: mean over tokens; over responses of their means; or of their sums."""
    value_clip_range: float | None = 0.2
    """Of the critic's step; null: none."""
    gamma: float = 1.0
    """Discount of a token."""
    gae_lambda: float = 0.95
    """Of generalised advantage estimation."""
    entropy_coef: float = 0.0
    """Weight of the exact entropy in the policy's loss."""
    target_kl: float | None = None
    """An update ends before the step at which the policy has moved so far, k3, nats a token."""

    kl_coef: float = 0.1
    """Weight of the KL to the reference; where the controller is adaptive, its first value."""
    kl_in: Literal["reward", "loss", "both"] = "reward"
    """Where that KL enters: each token's reward, the policy's loss, or both."""
    kl_kind_in_reward: Literal["k1", "k2", "k3"] = "k1"
    """Estimate in the reward: k1 has the right mean, k2 and k3 are never negative."""
    kl_kind_in_loss: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """Estimate in the loss: the gradient of k2 and k3+ is the KL's, that of k1 is 0 on average."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Adaptive: the coefficient follows one of the two targets."""
    kl_target_per_sequence: float | None = None
    """In nats a response."""
    kl_target_per_token: float | None = None
    """In nats a token."""
    kl_horizon_episodes: int = 10000
    """Responses in which an adaptive coefficient changes by a fifth at most."""

    heldout: str = ""
    """Rows of prompts that nothing is learned from, to evaluate on; empty: none is done."""
    evaluation_prompts: int = 64
    """So many of them, from the top."""
    evaluate_every_updates: int = 10
    """Updates between two evaluations; the last update has one too."""
    judge: str = ""
    """Reward function or model that is none of the rewards: its verdict is `eval/judge`."""
    best_metric: Literal["eval/judge", "eval/score", "eval/rlhf_reward"] | None = None
    """The policy with the highest is kept in run_dir/best; null: none is."""

    check_every: int = 10
    """Updates between two self-checks (the first is before the first step)."""
    sample_every: int = 10
    """Updates between two prints of three samples."""
    save_every_updates: int = 10
    """Updates between two checkpoints; the last update has one too."""

    def check(self) -> None:
        """Raises a `UserError` for a value that is missing or out of range."""
        super().check()
        require(
            all(0 < weight < float("inf") for weight in self.prompt_files().values()),
            "train: the weight of each file must be positive",
        )
        require(
            all(isfinite(weight) for weight in self.rewards.values()),
            "rewards: the weight of each part must be a number, and finite",
        )
        _positive(self, "updates", "episodes_per_update", "samples_per_prompt", "max_new_tokens")
        _positive(self, "ppo_epochs", "minibatches", "check_every", "sample_every")
        _positive(self, "save_every_updates")
        _positive(self, "temperature", "learning_rate", "critic_learning_rate", "clip_range")
        _positive(self, "value_coef")
        _not_negative(self, "kl_coef", "entropy_coef", "missing_eos_penalty")
        _not_negative(self, "critic_warmup_updates")
        for name in ("gamma", "gae_lambda"):
            require(0 <= getattr(self, name) <= 1, f"{name} must be within [0, 1]")
        optional = (
            "prompt_tokens",
            "reward_clip",
            "clip_range_high",
            "value_clip_range",
            "target_kl",
        )
        for name in optional:
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be positive, or null for none")
        require(
            self.episodes_per_update % self.samples_per_prompt == 0,
            "episodes_per_update must be a multiple of samples_per_prompt",
        )
        require(
            self.minibatches <= self.episodes_per_update,
            f"minibatches is {self.minibatches}, more than episodes_per_update, "
            f"{self.episodes_per_update}",
        )
        require(
            self.dual_clip is None or self.dual_clip > 1,
            "dual_clip must be above 1, or null for none",
        )
        require(
            self.critic_warmup_updates < self.updates,
            "critic_warmup_updates must be below updates, else the policy never learns",
        )
        _check_lora(self.lora_rank, self.lora_alpha)
        require(
            not self.offload_frozen or self.lora_rank is None,
            "offload_frozen does not go with lora_rank: the reference has the policy's weights",
        )
        if self.critic_kind == "head":
            require(not self.critic, "critic has no effect where critic_kind is head")
        else:
            require(
                self.value_coef == PPOConfig.value_coef,
                "value_coef has no effect on a critic of its own",
            )
        self._check_objective()
        self._check_evaluation()
        self._check_kl()

    def finished_after(self, step: int) -> bool:
        """Whether this update is the last."""
        return step >= self.updates

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after this update."""
        return step % self.save_every_updates == 0 or self.finished_after(step)

    def prompt_files(self) -> dict[str, float]:
        """The weight of each file of prompts."""
        return self.train if isinstance(self.train, dict) else {self.train: 1.0}

    def longest_prompt(self, context_tokens: int) -> int:
        """What a context leaves for a prompt: a response, and an end token to score, follow it."""
        left = context_tokens - self.max_new_tokens - 1
        require(
            left > 0,
            f"max_new_tokens is {self.max_new_tokens}: too many for a context of {context_tokens}",
        )
        return left

    def _check_objective(self) -> None:
        _positive(self, "penalty_coef", "penalty_target_per_token")
        idle = ("penalty_coef", "penalty_target_per_token")
        if self.objective == "penalty":
            idle = ("clip_range", "clip_range_high", "dual_clip", "ratio", "aggregate", "kl_in")
            require(
                self.ppo_epochs * self.minibatches > 1,
                "objective penalty needs more than one step an update: the first has moved nothing",
            )
        for name in idle:
            require(
                getattr(self, name) == getattr(PPOConfig, name),
                f"{name} has no effect where objective is {self.objective}",
            )

    def _check_evaluation(self) -> None:
        _positive(self, "evaluation_prompts", "evaluate_every_updates")
        for name in ("evaluation_prompts", "evaluate_every_updates", "judge", "best_metric"):
            require(
                bool(self.heldout) or getattr(self, name) == getattr(PPOConfig, name),
                f"{name} has no effect without heldout, a file of prompts to evaluate on",
            )
        require(
            self.heldout not in self.prompt_files(), "heldout is a file that is learned from: train"
        )
        require(self.judge not in self.rewards, "judge is one of the rewards: it must be another")
        require(
            bool(self.judge) or self.best_metric != "eval/judge",
            "best_metric eval/judge needs a judge",
        )

    def _check_kl(self) -> None:
        for place, kind in (("reward", "k1"), ("loss", "k3")):
            name = f"kl_kind_in_{place}"
            require(
                self.kl_in in (place, "both") or getattr(self, name) == kind,
                f"{name} has no effect where kl_in is {self.kl_in}",
            )
        targets = (self.kl_target_per_sequence, self.kl_target_per_token)
        given = [target for target in targets if target is not None]
        require(
            all(target > 0 for target in given),
            "a KL target must be positive: at 0 the coefficient has no end",
        )
        _positive(self, "kl_horizon_episodes")
        if self.kl_controller == "adaptive":
            require(
                len(given) == 1,
                "an adaptive kl_controller needs one target: kl_target_per_sequence or "
                "kl_target_per_token",
            )
            require(
                self.kl_coef > 0, "an adaptive kl_controller needs a kl_coef above 0 to start from"
            )
        else:
            require(not given, "a KL target has no effect with a fixed kl_controller")


OF_THE_DEMO = ("run_dir", "model", "train", "heldout", "seed", "rewards", "critic")


@dataclass
class DemoConfig:
    """The three stages on the embedded default: a tiny model learns to write kindly about films."""

    run_dir: str = "runs/demo"
    """Folder to write to; a demo that is there is kept as FOLDER.previous."""
    text: str = ""
    """Own text: rows with `{"text"}`, or a file with one text a line. Needs `reward`."""
    reward: str = ""
    """Own reward function instead of a reward model: `FILE.py:name` or `module:name`."""
    seed: int = 0
    """Of all stages."""
    evaluation_prompts: int = 256
    """Held-out prompts for the comparison before and after."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    """First stage."""
    reward_model: RewardConfig = field(default_factory=RewardConfig)
    """Second stage, left out where there is a `reward`."""
    ppo: PPOConfig = field(default_factory=lambda: PPOConfig(prompt_tokens=2))
    """Third stage."""

    def check(self) -> None:
        """Raises a `UserError` for a value that is missing or out of range, in any stage."""
        for config in (self, self.sft, self.reward_model, self.ppo):
            _no_nulls(config)
        require(
            bool(self.reward) or not self.text,
            "--text needs --reward FILE.py:name: own text has no preferences to learn from",
        )
        _positive(self, "evaluation_prompts")
        context = self.sft.scratch.context_tokens
        require(
            self.reward_model.max_tokens <= context,
            f"reward_model.max_tokens is {self.reward_model.max_tokens}, the context {context}",
        )
        require(
            0 < (self.ppo.prompt_tokens or 0) < self.ppo.longest_prompt(context),
            "ppo.prompt_tokens must be positive, and leave room for max_new_tokens in the context",
        )
        for given, made in zip((self.sft, self.reward_model, self.ppo), self.stages(), strict=True):
            for name in OF_THE_DEMO:
                same = getattr(given, name, None) == getattr(type(given)(), name, None)
                require(same, f"the demo sets the {name} of its stages itself")
            made.check()

    def stages(self) -> tuple[SFTConfig, RewardConfig, PPOConfig]:
        """The stages with their paths: what one writes, the next reads. PPO's run is the demo's."""
        run_dir, data = self.run_dir, f"{self.run_dir}/data"
        model, reward_model = f"{run_dir}/sft/model", f"{run_dir}/reward/model"
        sft = replace(
            self.sft,
            run_dir=f"{run_dir}/sft",
            train=f"{data}/train.jsonl",
            heldout=f"{data}/heldout.jsonl",
            seed=self.seed,
        )
        reward = replace(
            self.reward_model,
            run_dir=f"{run_dir}/reward",
            model=model,
            train=f"{data}/pairs.jsonl",
            heldout=f"{data}/heldout_pairs.jsonl",
            seed=self.seed,
        )
        ppo = replace(
            self.ppo,
            run_dir=run_dir,
            model=model,
            train=f"{data}/train.jsonl",
            rewards={self.reward or reward_model: 1.0},
            critic="" if self.reward else reward_model,
            seed=self.seed,
        )
        return sft, reward, ppo
