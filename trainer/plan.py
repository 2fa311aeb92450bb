"""`--dry_run`: what a run would take, in batches and in memory. Nothing is trained or written.

The data are read, but for the demo's, whose stages write for each other: mistakes in them show, and
how many rows are left out.

The memory is an estimate, measured on the CPU: 16 bytes a parameter that is trained (itself, its
gradient, two moments of Adam), 4 a frozen one, what the tokens of a micro-batch leave for its
backward pass, and somewhat more again for holes in the heap: no two micro-batches are alike.
The program itself and its texts come on top. With `gradient_checkpointing` or `precision: bfloat16`
it is within a quarter for a Llama; a GPT-2's SFT took 38 % more than that, and 26 % less.
"""

from __future__ import annotations

from itertools import chain
from math import ceil

from rich.table import Table
from transformers import AutoConfig, PreTrainedConfig

from . import sft
from .config import DemoConfig, PPOConfig, RewardConfig, SFTConfig, Stage
from .data import read_examples, read_pairs, read_prompts
from .metrics import console
from .models import (
    from_folder,
    load_tokenizer,
    parameter_count,
    parameter_names,
    pick_device,
    require_model,
    scratch_config,
)
from .scoring import is_function
from .supervised import require_room, rows_of

LOGITS_BYTES = 2**28  # ppokern's ops hold no more at a time
HOLES = 2.1  # of the heap; measured: 1.5 to 2.5 times what is in use at once
MIB = 2**20
Plan = dict[str, str]


def show(config: SFTConfig | RewardConfig | PPOConfig | DemoConfig) -> None:
    """Prints the plan of a stage, or those of the demo's three."""
    config.check()
    if isinstance(config, DemoConfig):
        model = scratch_config(config.sft.scratch)
        longest = 1 + (config.ppo.prompt_tokens or 0)
        for stage in config.stages():
            known = longest if isinstance(stage, PPOConfig) else 0
            table(stage.run_dir, plan(stage, model, known))
        return
    if not isinstance(config, PPOConfig):
        _show_supervised(config)
        return
    require_model(config.model)
    model = from_folder(AutoConfig, config.model)
    room = config.longest_prompt(model.max_position_embeddings)
    tokenizer = load_tokenizer(config.model)
    longest = max(
        len(prompt.ids)
        for file in config.prompt_files()
        for prompt in read_prompts(file, tokenizer, config.prompt_tokens, room)
    )
    table(config.run_dir, plan(config, model, longest))


def _show_supervised(config: SFTConfig | RewardConfig) -> None:
    if isinstance(config, SFTConfig) and not config.model:
        tokenizer = sft.new_tokenizer(config)
        model = scratch_config(config.scratch, tokenizer)
    else:
        require_model(config.model)
        model, tokenizer = from_folder(AutoConfig, config.model), load_tokenizer(config.model)
        require_room(config, model.max_position_embeddings)

    def read(path: str) -> list[list[int]]:
        """Tokens of each sequence of each row."""
        if isinstance(config, SFTConfig):
            return [[len(row.ids)] for row in read_examples(path, tokenizer, config.max_tokens)]
        return [list(map(len, pair)) for pair in read_pairs(path, tokenizer, config.max_tokens)]

    train, heldout = rows_of(config, read)
    config = config.counted(len(train))
    steps = ceil(len(train) / config.rows_per_step)
    lengths = list(chain.from_iterable(train))
    data = {
        "rows": f"{len(train):,} to learn from, {len(heldout):,} to measure on",
        "tokens": f"{sum(lengths):,} to learn from, {max(lengths):,} in the longest sequence",
        "steps an epoch": f"{steps:,}, so {config.steps / steps:,.1f} epochs",
    }
    table(config.run_dir, data | plan(config, model, max(lengths)))


def plan(
    config: SFTConfig | RewardConfig | PPOConfig, model: PreTrainedConfig, longest: int = 0
) -> Plan:
    """The arithmetic of a stage.

    `longest` is that of PPO's prompts, or of the sequences to learn from where they are known (0:
    they are not), in tokens.
    """
    if isinstance(config, PPOConfig):
        return _ppo(config, model, longest)
    rows = config.rows_per_step * (1 if isinstance(config, SFTConfig) else 2)
    longest = longest or config.max_tokens
    return {
        "sequences a step": f"{rows:,}",
        "tokens a step": f"at most {rows * longest:,}",
        "micro-batches a step": _cuts(rows, longest, config.max_tokens_per_micro_batch),
        "optimiser steps": f"{config.steps:,}",
        "parameters": f"{parameter_count(model):,}{_adapters(config)}",
        "memory": f"about {memory(config, model, longest) / MIB:,.0f} MiB, and the program itself",
    }


def _adapters(config: SFTConfig | RewardConfig) -> str:
    return f", frozen beside adapters of rank {config.lora_rank}" if config.lora_rank else ""


def _ppo(config: PPOConfig, model: PreTrainedConfig, longest: int) -> Plan:
    pick_device(config.offload_frozen)  # refuses what a run would refuse
    episodes, new = config.episodes_per_update, config.max_new_tokens
    minibatch = ceil(episodes / config.minibatches)
    steps = config.ppo_epochs * config.minibatches
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
        "parameters": f"{parameter_count(model):,}, in {_trained(config)} trained, "
        f"{_frozen(config)} frozen models",
        "memory": f"about {memory(config, model, longest) / MIB:,.0f} MiB, and the program itself",
    }


def _trained(config: PPOConfig) -> int:
    """Whole models: adapters are small, and stand beside the weights of the reference."""
    return (config.lora_rank is None) + (config.critic_kind == "separate")


def _frozen(config: PPOConfig) -> int:
    sources = [*config.rewards, *([config.judge] if config.judge else [])]
    return 1 + sum(not is_function(source) for source in sources)


def _cuts(rows: int, tokens: int, most: int) -> str:
    return f"at most {ceil(rows / max(most // tokens, 1)):,}"


def memory(
    config: SFTConfig | RewardConfig | PPOConfig, model: PreTrainedConfig, longest: int = 0
) -> int:
    """Bytes that a stage takes at most, the program itself apart."""
    if isinstance(config, PPOConfig):
        rows = ceil(config.episodes_per_update / config.minibatches)
        longest += config.max_new_tokens
        cache = config.episodes_per_update * longest * model.num_hidden_layers * model.hidden_size
        models, frozen = 16 * _trained(config), 4 * _frozen(config)  # bytes a parameter
    else:
        rows = config.rows_per_step
        longest = (longest or config.max_tokens) * (1 if isinstance(config, SFTConfig) else 2)
        best = 4 * (config.evaluate_every_steps is not None)  # a copy of what was the best
        models, frozen = (0, 4) if config.lora_rank else (16 + best, 0)
        cache = 0
    fitting = max(config.max_tokens_per_micro_batch // longest, 1)  # rows in a micro-batch
    tokens = ceil(rows / ceil(rows / fitting)) * longest  # micro-batches are equally full
    vocabulary = 0 if isinstance(config, RewardConfig) else model.vocab_size
    logits = min(LOGITS_BYTES, tokens * vocabulary * 4)
    passing = tokens * activations(model, config) * 4 + logits
    scoring, learning, weights = 2 * 4 * cache, round(HOLES * passing), parameter_count(model)
    if isinstance(config, PPOConfig) and config.offload_frozen:  # not there while others learn
        return models * weights + max(frozen * weights + scoring, learning)
    return (models + frozen) * weights + max(scoring, learning)


def activations(model: PreTrainedConfig, config: Stage) -> int:
    """Numbers in float32 that a token leaves in all layers for the backward pass.

    In a layer nine of the model's width (norms, queries, keys, values, attention, residuals) and
    two of the MLP's; with a gate, and the norms that go with it, twelve and four. Where they are
    made again, what goes into each, and those of one layer with their gradients. In bfloat16 what
    goes from layer to layer stays in float32, and casts stand beside it: measured, seven tenths.
    """
    inner = getattr(model, "intermediate_size", None) or 4 * model.hidden_size
    gated = any("gate_proj" in name for name in parameter_names(model))
    outer, of_inner = (12, 4) if gated else (9, 2)
    layer = outer * model.hidden_size + of_inner * inner
    if config.gradient_checkpointing:
        return model.num_hidden_layers * model.hidden_size + 2 * layer
    whole = model.num_hidden_layers * layer
    return whole if config.precision == "float32" else whole * 7 // 10


def table(title: str, plan: Plan) -> None:
    """Prints a plan."""
    rows = Table(title=title, title_justify="left", show_header=False)
    for name, value in plan.items():
        rows.add_row(name, value)
    console.print(rows)
