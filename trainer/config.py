"""Every option of every stage: typed, its unit in its name, checked before anything is loaded.

A stage takes one of these dataclasses. The command line fills it from a YAML file and dotted
overrides; an unknown key is an error there, a value out of range is a `UserError` here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal


class UserError(Exception):
    """A mistake that the caller can mend, told in one sentence. Exit code 2."""


class CheckFailed(Exception):
    """Two things that must agree do not, so that a run would learn from noise. Exit code 1."""


def require(condition: bool, sentence: str) -> None:
    """Raises a `UserError` with `sentence` unless `condition` holds."""
    if not condition:
        raise UserError(sentence)


def _positive(config: object, *names: str) -> None:
    for name in names:
        require(getattr(config, name) > 0, f"{name} must be positive, got {getattr(config, name)}")


def _not_negative(config: object, *names: str) -> None:
    for name in names:
        require(
            getattr(config, name) >= 0, f"{name} must not be negative, got {getattr(config, name)}"
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

    run_dir: str = ""
    """Folder that the stage makes and writes to."""
    model: str = ""
    """Folder of the transformers model to start from (local, safetensors)."""
    train: str = ""
    """JSONL file to train on."""
    seed: int = 0
    """Of initial weights, data order and sampling."""
    max_tokens_per_micro_batch: int = 2048
    """Most tokens in one packed pass; a step adds up as many passes as it needs."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; the norm before is logged."""
    tensorboard: bool = False
    """Write TensorBoard files beside metrics.jsonl."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun, each process holds the trained models whole (DDP) or in part (FSDP2)."""
    keep_last_checkpoints: int = 2
    """Older ones are removed, each once a newer one stands."""

    def check(self) -> None:
        """Raises a `UserError` for a value that is missing or out of range."""
        require(bool(self.run_dir), "run_dir is missing: the folder that the stage is to write to")
        require(bool(self.train), "train is missing: the JSONL file to train on")
        _positive(self, "max_tokens_per_micro_batch", "max_grad_norm", "keep_last_checkpoints")


@dataclass
class Supervised(Stage):
    """What the supervised stages have in common: AdamW, a warm-up, a cosine to a twentieth."""

    heldout: str = ""
    """JSONL file to measure on."""
    max_tokens: int = 64
    """Longer sequences are left out and counted."""
    steps: int = 1000
    """Optimiser steps."""
    learning_rate: float = 1e-3
    """At the height of the schedule."""
    warmup_steps: int = 20
    """Steps until then."""
    weight_decay: float = 0.01
    """Of AdamW, on matrices only."""
    save_every_steps: int = 200
    """Optimiser steps between two checkpoints; the last step has one too."""

    def check(self) -> None:
        """Raises a `UserError` for a value that is missing or out of range."""
        super().check()
        require(bool(self.heldout), "heldout is missing: the JSONL file to measure on")
        require(self.max_tokens >= 2, "max_tokens must be at least 2")
        _positive(self, "steps", "learning_rate", "save_every_steps")
        _not_negative(self, "warmup_steps", "weight_decay")

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return step % self.save_every_steps == 0 or step == self.steps


@dataclass
class SFTConfig(Supervised):
    """Supervised fine-tuning on `{"text"}` or `{"prompt", "completion"}`."""

    scratch: Scratch = field(default_factory=Scratch)
    """The model to make where `model` names no folder."""
    sequences_per_step: int = 32
    """Sequences of one optimiser step, alike in length."""

    def check(self) -> None:
        """Raises a `UserError` for a value that is missing or out of range."""
        super().check()
        _positive(self, "sequences_per_step")
        if self.model:
            require(self.scratch == Scratch(), "scratch has no effect beside a model to start from")
        else:
            self.scratch.check()
            require(
                self.max_tokens <= self.scratch.context_tokens,
                f"max_tokens is {self.max_tokens}, more than scratch.context_tokens, "
                f"{self.scratch.context_tokens}",
            )


@dataclass
class RewardConfig(Supervised):
    """A reward model from preferences: `{"prompt", "chosen", "rejected"}`."""

    pairs_per_step: int = 16
    """Pairs of one optimiser step, alike in length."""

    def check(self) -> None:
        """Raises a `UserError` for a value that is missing or out of range."""
        super().check()
        require(
            bool(self.model),
            "model is missing: the folder of the model that the reward model starts from",
        )
        _positive(self, "pairs_per_step")


@dataclass
class PPOConfig(Stage):
    """PPO with four models: policy, critic, frozen reference, frozen reward model or functions."""

    prompt_tokens: int | None = None
    """The prompt is the first so many tokens of a row's `{"text"}`; null: its `{"prompt"}`."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Weight of each part: a reward model's folder, `FILE.py:name` or `module:name`."""
    critic: str = ""
    """Reward model's folder to start the critic from; else the policy's body, a head of zeros."""

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
    clip_range: float = 0.2
    """Of the probability ratio."""
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
    """Where that KL enters: each token's reward (k1), the policy's loss (k3), or both."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Adaptive: the coefficient follows one of the two targets."""
    kl_target_per_sequence: float | None = None
    """In nats a response."""
    kl_target_per_token: float | None = None
    """In nats a token."""
    kl_horizon_episodes: int = 10000
    """Responses in which an adaptive coefficient changes by a fifth at most."""

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
            bool(self.model),
            "model is missing: the folder of the model that policy and reference start from",
        )
        require(bool(self.rewards), "rewards is empty: name a reward model's folder or a function")
        _positive(self, "updates", "episodes_per_update", "samples_per_prompt", "max_new_tokens")
        _positive(self, "ppo_epochs", "minibatches", "check_every", "sample_every")
        _positive(self, "save_every_updates")
        _positive(self, "temperature", "learning_rate", "critic_learning_rate", "clip_range")
        _not_negative(self, "kl_coef", "entropy_coef", "missing_eos_penalty")
        for name in ("gamma", "gae_lambda"):
            require(0 <= getattr(self, name) <= 1, f"{name} must be within [0, 1]")
        for name in ("prompt_tokens", "value_clip_range", "target_kl"):
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
        self._check_kl()

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after this update."""
        return step % self.save_every_updates == 0 or step == self.updates

    def longest_prompt(self, context_tokens: int) -> int:
        """What a context leaves for a prompt: a response, and an end token to score, follow it."""
        left = context_tokens - self.max_new_tokens - 1
        require(
            left > 0,
            f"max_new_tokens is {self.max_new_tokens}: too many for a context of {context_tokens}",
        )
        return left

    def _check_kl(self) -> None:
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
    """Own text: JSONL with `{"text"}`, or a file with one text a line. Needs `reward`."""
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
