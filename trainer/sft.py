"""Supervised fine-tuning: a language model learns to go on as the texts do.

    python -m trainer sft --run_dir runs/sft --train texts.jsonl --heldout heldout.jsonl

Without `--model FOLDER` a small model and its tokenizer are made from scratch. What is here is the
loop; rows and batches are in data.py, models in models.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppokern import next_token_targets, position_ids

from . import distributed
from .config import SFTConfig
from .data import Example, micro_batches, packed, read_examples, read_rows, train_tokenizer
from .metrics import Metrics
from .models import LogProbs, Policy, load_policy, load_tokenizer, new_policy
from .running import stage
from .supervised import Training, require_room, rows_of

# ids, cu_seqlens, mask of the tokens before those to learn, whether it is the last
Batch = tuple[Tensor, Tensor, Tensor, bool]
NOTHING = Example([0], 1)  # a token that none follows: nothing to learn


@stage
def run(config: SFTConfig, overwrite: bool = False, resume: bool = False) -> dict[str, float]:
    """Trains, writes the model to `run_dir/model`, and returns the loss on held-out text."""
    tokenizer, policy = _start(config)
    read = partial(read_examples, tokenizer=tokenizer, max_tokens=config.max_tokens)
    train, heldout = rows_of(config, read)
    lengths = [len(row.ids) for row in train]
    training = Training("sft", config, policy, tokenizer, lengths, overwrite, resume)
    policy, device, most = training.model, training.device, config.max_tokens_per_micro_batch
    measure = partial(_measure, policy, heldout, most, device)
    with closing(training.log):
        for step, rows in training.steps():
            metrics = Metrics()
            tokens = sum(len(train[row].ids) - train[row].start for row in rows)
            batch = [train[rows[i]] for i in distributed.share(len(rows))]
            for ids, cu_seqlens, mask, last in _cut(batch, most, device):
                with distributed.step_pass(policy, last):
                    total = -policy(LogProbs(ids, cu_seqlens, mask)).sum()  # nats
                    (total / tokens * distributed.size()).backward()
                metrics.add_sum("loss", total.detach(), mask.sum())
            training.step(metrics)
            line = f"loss {metrics.mean('loss'):.2f} nats a token"
            training.end(step, metrics, line, measure)

        result = training.save()
        training.log.print(f"sft: held-out loss {result['loss']:.3f} nats a token")
    return result


def _start(config: SFTConfig) -> tuple[PreTrainedTokenizerBase, Policy]:
    if config.model:
        policy = load_policy(config.model)
        require_room(config, policy.context_tokens)
        return load_tokenizer(config.model), policy
    tokenizer = new_tokenizer(config)
    torch.manual_seed(config.seed)
    return tokenizer, new_policy(config.scratch, tokenizer)


def new_tokenizer(config: SFTConfig) -> PreTrainedTokenizerBase:
    """A tokenizer of the texts to learn from."""
    rows = read_rows(config.train, "text", "prompt completion")
    values = (row.get(key) for row in rows for key in ("text", "prompt", "completion"))
    texts = (value for value in values if isinstance(value, str))
    return train_tokenizer(texts, config.scratch.vocab_size)


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
def _measure(
    policy: Policy, examples: list[Example], max_tokens_per_micro_batch: int, device: torch.device
) -> dict[str, float]:
    """The loss on held-out text, of which each process measures a share."""
    metrics, mine = Metrics(), [examples[i] for i in distributed.share(len(examples))]
    for ids, cu_seqlens, mask, _ in _cut(mine, max_tokens_per_micro_batch, device):
        metrics.add("loss", -policy(LogProbs(ids, cu_seqlens, mask)), mask)
    metrics.across_processes()
    return {"loss": metrics.mean("loss")}
