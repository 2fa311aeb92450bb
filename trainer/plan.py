"""`--dry_run`: what a run would take, in batches and in memory. Nothing is trained or written.

The memory is an estimate for float32: 16 bytes a parameter that is trained (itself, its gradient,
two moments of Adam), 4 a frozen one, and 17 numbers of the model's width that each token leaves in
each layer for the backward pass. The program itself and its texts come on top.
"""

from __future__ import annotations

from math import ceil

from rich.table import Table
from transformers import AutoConfig, PreTrainedConfig

from .config import DemoConfig, PPOConfig, RewardConfig, SFTConfig
from .data import read_prompts
from .metrics import console
from .models import load_tokenizer, parameter_count, require_model, scratch_config

LOGITS_BYTES = 2**28  # ppokern's ops hold no more at a time
Plan = dict[str, str]


def show(config: SFTConfig | RewardConfig | PPOConfig | DemoConfig) -> None:
    """Prints the plan of a stage, or those of the demo's three."""
    config.check()
    if isinstance(config, DemoConfig):
        model = scratch_config(config.sft.scratch)
        longest = 1 + (config.ppo.prompt_tokens or 0)
        for stage in config.stages():
            table(stage.run_dir, plan(stage, model, longest))
        return
    if isinstance(config, SFTConfig) and not config.model:
        model = scratch_config(config.scratch)
    else:
        require_model(config.model)
        model = AutoConfig.from_pretrained(config.model, local_files_only=True)
    longest = 0
    if isinstance(config, PPOConfig):
        room = config.longest_prompt(model.max_position_embeddings)
        tokenizer = load_tokenizer(config.model)
        prompts = read_prompts(config.train, tokenizer, config.prompt_tokens, room)
        longest = max(len(prompt.ids) for prompt in prompts)
    table(config.run_dir, plan(config, model, longest))


def plan(
    config: SFTConfig | RewardConfig | PPOConfig, model: PreTrainedConfig, longest: int
) -> Plan:
    """The arithmetic of a stage; `longest` is that of its prompts, in tokens."""
    if isinstance(config, PPOConfig):
        return _ppo(config, model, longest)
    rows = config.sequences_per_step if isinstance(config, SFTConfig) else 2 * config.pairs_per_step
    return {
        "sequences a step": f"{rows:,}",
        "tokens a step": f"at most {rows * config.max_tokens:,}",
        "micro-batches a step": _cuts(rows, config.max_tokens, config.max_tokens_per_micro_batch),
        "optimiser steps": f"{config.steps:,}",
        "parameters": f"{parameter_count(model):,}",
        "memory": _bytes(
            16 * parameter_count(model) + _passing(model, config.max_tokens_per_micro_batch)
        ),
    }


def _ppo(config: PPOConfig, model: PreTrainedConfig, longest: int) -> Plan:
    episodes, new = config.episodes_per_update, config.max_new_tokens
    minibatch = ceil(episodes / config.minibatches)
    steps = config.ppo_epochs * config.minibatches
    parameters = parameter_count(model)
    frozen = 1 + sum(":" not in source for source in config.rewards)
    cache = episodes * (longest + new) * model.num_hidden_layers * 2 * model.hidden_size * 4
    passing = 2 * _passing(model, config.max_tokens_per_micro_batch)
    return {
        "prompts an update": f"{episodes // config.samples_per_prompt:,}, up to {longest} tokens",
        "episodes an update": f"{episodes:,}, {config.samples_per_prompt} to a prompt",
        "tokens an update": f"at most {episodes * (longest + new):,}, {episodes * new:,} new",
        "minibatches": f"{config.minibatches} of {minibatch} episodes",
        "micro-batches a minibatch": _cuts(
            minibatch, longest + new, config.max_tokens_per_micro_batch
        ),
        "optimiser steps an update": f"{config.ppo_epochs} epochs x {config.minibatches} = {steps}",
        "optimiser steps": f"{steps * config.updates:,} in {config.updates:,} updates",
        "parameters": f"{parameters:,}, in 2 trained and {frozen} frozen models",
        "memory": _bytes((2 * 16 + frozen * 4) * parameters + cache + passing),
    }


def _cuts(rows: int, tokens: int, max_tokens_per_micro_batch: int) -> str:
    return f"at most {ceil(rows / max(max_tokens_per_micro_batch // tokens, 1)):,}"


def _passing(model: PreTrainedConfig, tokens: int) -> int:
    """Bytes that a forward pass leaves for its backward pass."""
    activations = tokens * model.num_hidden_layers * model.hidden_size * 17 * 4
    return activations + min(LOGITS_BYTES, tokens * model.vocab_size * 4)


def _bytes(count: int) -> str:
    return f"about {count / 2**20:,.0f} MiB, and the program itself"


def table(title: str, plan: Plan) -> None:
    """Prints a plan."""
    rows = Table(title=title, title_justify="left", show_header=False)
    for name, value in plan.items():
        rows.add_row(name, value)
    console.print(rows)
