"""What a trained policy writes, beside what it wrote before.

python -m trainer sample runs/demo --prompt "the film"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from .checkpoint import read_config, result_of
from .config import PPOConfig, UserError, require
from .data import Encoder, Prompt, read_rows, said, stop_ids, sums
from .lora import load_trained
from .metrics import console, plain
from .models import (
    Policy,
    load_policy,
    load_tokenizer,
    pick_device,
    set_precision,
)
from .rollout import generate, logprobs_of
from .scoring import RewardPart, load_rewards, models_of, score


@dataclass
class Sample:
    """A response and what is known of it."""

    prompt: str
    text: str  # the response alone
    score: float
    kl: float  # of the policy that wrote it to the reference, over the response, nats
    ref_logprob: float  # of the response under the reference, nats
    ids: list[int]  # of the response, its stop token included


def respond(
    policy: Policy,
    reference: Policy,
    rewards: Sequence[RewardPart],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: PPOConfig,
) -> list[Sample]:
    """One response of `policy` to each prompt, sampled as in training."""
    device = next(policy.parameters()).device
    rollouts = generate(
        policy,
        prompts,
        stop_ids(tokenizer, policy.lm.generation_config),
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        generator=torch.Generator(device).manual_seed(config.seed),
    )
    tokens, ends = config.max_tokens_per_micro_batch, rollouts.cu_seqlens
    ref_logprobs = logprobs_of(rollouts, reference, config.temperature, tokens)  # (total,)
    scores, _ = score(rewards, rollouts, config.missing_eos_penalty)  # (S,)
    kl = sums(rollouts.logprobs - ref_logprobs, ends)  # (S,)
    responses = rollouts.responses()
    columns = {
        "prompt": tokenizer.batch_decode([p.ids for p in prompts], skip_special_tokens=True),
        "text": tokenizer.batch_decode(responses, skip_special_tokens=True),
        "score": scores.tolist(),
        "kl": kl.tolist(),
        "ref_logprob": sums(ref_logprobs, ends).tolist(),
        "ids": responses,
    }
    rows = zip(*columns.values(), strict=True)
    return [Sample(**dict(zip(columns, row, strict=True))) for row in rows]


def side_by_side(before: Sequence[Sample], after: Sequence[Sample]) -> list[dict[str, Any]]:
    """Two responses to each prompt as JSON."""
    return [
        {"before": asdict(old), "after": asdict(new)}
        for old, new in zip(before, after, strict=True)
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints pairs side by side; what a model wrote is never read as markup."""
    table = Table(show_lines=True)
    for heading in ("prompt", "before", "after"):
        table.add_column(heading)
    for row in rows:
        before, after = row["before"], row["after"]
        old = f"{before['text']}\n[score {before['score']:+.2f}]"
        new = f"{after['text']}\n[score {after['score']:+.2f}, KL {after['kl']:.1f} nats]"
        table.add_row(*(plain(cell) for cell in (before["prompt"], old, new)))
    console.print(table)


def run(run_dir: str, prompt: str) -> None:
    """Prints what a run's policy answers to a prompt, beside what it answered before the run."""
    config = read_config(run_dir)
    if not isinstance(config, PPOConfig):
        raise UserError(f"{run_dir} is not the folder of a PPO run but of another stage's")
    written = str(result_of(run_dir, "policy"))
    tokenizer, device = load_tokenizer(written), pick_device()
    policy = load_trained(written).to(device)
    reference = load_policy(config.model).to(device)
    rewards = load_rewards(config.rewards, tokenizer, device, config.max_tokens_per_micro_batch)
    set_precision(config.precision, policy, reference, *models_of(rewards))
    value = said("user", prompt) if asks_in_messages(config) else prompt
    asked = [Prompt(Encoder(tokenizer, [{"prompt": value}], "prompt").start(value), value)]
    room, tokens = config.longest_prompt(policy.context_tokens), len(asked[0].ids)
    require(tokens <= room, f"the prompt has {tokens} tokens, there is room for {room}")
    sides = [
        respond(model, reference, rewards, tokenizer, asked, config)
        for model in (reference, policy)
    ]
    show(side_by_side(*sides))


def asks_in_messages(config: PPOConfig) -> bool:
    """Whether the prompts that a run trains on are chat messages."""
    first = next(iter(config.prompt_files()))
    return config.prompt_tokens is None and isinstance(
        read_rows(first, "prompt")[0]["prompt"], list
    )
