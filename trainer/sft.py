"""Supervised fine-tuning: a language model learns to go on as the texts do.

    python -m trainer sft --run_dir runs/sft --train texts.jsonl --heldout heldout.jsonl

Without `--model FOLDER` a small model and its tokenizer are made from scratch. What is here is the
loop; rows and batches are in data.py, models in models.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppokern import next_token_targets, position_ids

from . import distributed
from .checkpoint import Checkpoints, save_model, write_json
from .config import SFTConfig, require
from .data import (
    Example,
    length_batches,
    micro_batches,
    packed,
    read_examples,
    read_rows,
    train_tokenizer,
)
from .metrics import Metrics, RunLog
from .models import Policy, equip, load_policy, load_tokenizer, new_policy, pick_device
from .optimise import adamw, clipped_step, schedule
from .running import stage

# ids, cu_seqlens, mask of the tokens before those to learn, whether it is the last
Batch = tuple[Tensor, Tensor, Tensor, bool]
NOTHING = Example([0], 1)  # a token that none follows: nothing to learn


@stage
def run(config: SFTConfig, overwrite: bool = False, resume: bool = False) -> dict[str, float]:
    """Trains, writes the model to `run_dir/model`, and returns the loss on held-out text."""
    tokenizer, policy = _start(config)
    train = read_examples(config.train, tokenizer, config.max_tokens)
    heldout = read_examples(config.heldout, tokenizer, config.max_tokens)
    device = pick_device()
    equip(config, [policy.to(device).eval()])
    policy = distributed.wrap(policy, config.parallel)
    optimizer = adamw(policy, config.learning_rate, config.weight_decay)
    batches = length_batches([len(x.ids) for x in train], config.sequences_per_step, config.seed)

    inputs = {"data": config.train, "held-out data": config.heldout}
    if config.model:
        inputs["model"] = config.model
    parts = {"model": policy, "optimizer": optimizer, "batches": batches}
    checkpoints = Checkpoints(config, inputs, parts)
    done = checkpoints.begin(overwrite, resume)
    run_dir = checkpoints.run_dir
    log = RunLog(run_dir, "sft", config.steps, config.tensorboard, done, config.tracker)
    with closing(log):
        for step, rows in zip(range(done + 1, config.steps + 1), batches, strict=False):
            schedule(optimizer, config, step)
            metrics = Metrics()
            tokens = sum(len(train[row].ids) - train[row].start for row in rows)
            batch = [train[rows[i]] for i in distributed.share(len(rows))]
            cut = _cut(batch, config.max_tokens_per_micro_batch, device)
            for ids, cu_seqlens, mask, last in cut:
                with distributed.step_pass(policy, last):
                    total = -policy(ids, cu_seqlens, mask).sum()  # nats
                    (total / tokens * distributed.size()).backward()
                metrics.add_sum("loss", total.detach(), mask.sum())
            (norm,), stepped = clipped_step([(policy, optimizer)], config.max_grad_norm)
            metrics.add("grad_norm", norm)
            metrics.add("skipped_steps", not stepped)
            metrics.across_processes()
            log.write(step, metrics.means(), f"loss {metrics.mean('loss'):.2f} nats a token")
            checkpoints.after(step, log)

        with distributed.whole(policy):
            result = {"loss": _loss(policy, heldout, config.max_tokens_per_micro_batch, device)}
        log.print(f"sft: held-out loss {result['loss']:.3f} nats a token")
    save_model(run_dir / "model", policy.lm, tokenizer)
    write_json(run_dir / "summary.json", result)
    return result


def _start(config: SFTConfig) -> tuple[PreTrainedTokenizerBase, Policy]:
    if config.model:
        policy = load_policy(config.model)
        room = policy.context_tokens
        require(
            config.max_tokens <= room,
            f"max_tokens is {config.max_tokens}, the model's context {room}",
        )
        return load_tokenizer(config.model), policy
    rows = read_rows(config.train, "text", "prompt completion")
    values = (row.get(key) for row in rows for key in ("text", "prompt", "completion"))
    texts = (value for value in values if isinstance(value, str))
    tokenizer = train_tokenizer(texts, config.scratch.vocab_size)
    torch.manual_seed(config.seed)
    return tokenizer, new_policy(config.scratch, tokenizer)


def _cut(
    batch: Sequence[Example], max_tokens_per_micro_batch: int, device: torch.device
) -> Iterator[Batch]:
    cuts = micro_batches([len(x.ids) for x in batch], max_tokens_per_micro_batch)
    for rows, last in distributed.passes(cuts):
        taken = [batch[row] for row in rows] or [NOTHING]
        ids, cu_seqlens = packed([x.ids for x in taken], device)
        starts = torch.tensor([x.start for x in taken], device=device)  # (s,)
        starts = starts.repeat_interleave(cu_seqlens.diff())
        followed = next_token_targets(ids, cu_seqlens)[1]
        yield ids, cu_seqlens, followed & (position_ids(cu_seqlens) >= starts - 1), last


@torch.inference_mode()
def _loss(
    policy: Policy, examples: list[Example], max_tokens_per_micro_batch: int, device: torch.device
) -> float:
    metrics = Metrics()
    for ids, cu_seqlens, mask, _ in _cut(examples, max_tokens_per_micro_batch, device):
        metrics.add("loss", -policy(ids, cu_seqlens, mask), mask)
    return metrics.mean("loss")
