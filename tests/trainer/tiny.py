"""A corpus, a model and rollouts small enough to be worked out by hand."""

import random
from collections.abc import Sequence

import torch

from trainer.config import Scratch
from trainer.data import Prompt
from trainer.rollout import Rollouts

KIND, UNKIND = ("good", "lovely", "fine"), ("bad", "awful", "dull")
TINY = Scratch(vocab_size=280, width=16, layers=2, heads=2, context_tokens=48)


def sentences(words: Sequence[str], count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    nouns, ends = ("film", "plot", "cast"), ("", " indeed", " to me")
    return [
        f"the {draw.choice(nouns)} is {draw.choice(words)}{draw.choice(ends)}" for _ in range(count)
    ]


def make_rollouts(
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    terminated: Sequence[bool],
    width: int | None = None,
    logprob: float = -1.0,
) -> Rollouts:
    """Rollouts with given ids, padded to `width`."""
    lengths = torch.tensor([len(row) for row in rows])
    width = width or int(lengths.max())
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    target = torch.arange(1, width)
    mask = (target >= torch.tensor(starts)[:, None]) & (target < lengths[:, None])
    prompts = [Prompt(list(row[:n]), "", {}) for row, n in zip(rows, starts, strict=True)]
    logprobs = torch.full(mask.shape, logprob).where(mask, torch.tensor(0.0))
    return Rollouts(prompts, ids, mask, logprobs, lengths, torch.tensor(terminated))
