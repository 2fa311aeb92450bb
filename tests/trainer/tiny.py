"""A corpus, a model and rollouts small enough to be worked out by hand."""

import random
from collections.abc import Callable, Sequence

import torch

from trainer.config import Scratch
from trainer.data import Prompt, packed
from trainer.models import LogProbs, Policy, Scorer
from trainer.rollout import Rollouts

KIND, UNKIND = ("good", "lovely", "fine"), ("bad", "awful", "dull")
TINY = Scratch(vocab_size=280, width=16, layers=2, heads=2, context_tokens=48)


def sentences(words: Sequence[str], count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    nouns, ends = ("film", "plot", "cast"), ("", " indeed", " to me")
    return [
        f"the {draw.choice(nouns)} is {draw.choice(words)}{draw.choice(ends)}" for _ in range(count)
    ]


def numbers_of(module: Policy | Scorer) -> Callable[..., torch.Tensor]:
    """What gives a number for each token: a policy's log-probs, a scorer's scores."""
    return module if isinstance(module, Scorer) else lambda *asked: module(LogProbs(*asked))


def make_rollouts(
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    terminated: Sequence[bool],
    logprob: float = -1.0,
) -> Rollouts:
    """Rollouts with given ids: prompts of so many tokens, and what follows them."""
    ids, cu_seqlens = packed(rows)
    places = zip(rows, starts, strict=True)
    mask = torch.tensor([n <= i + 1 < len(row) for row, n in places for i in range(len(row))])
    prompts = [Prompt(list(row[:n]), "", {}) for row, n in zip(rows, starts, strict=True)]
    logprobs = torch.where(mask, logprob, 0.0)
    return Rollouts(prompts, ids, cu_seqlens, mask, logprobs, torch.tensor(terminated), 0)
