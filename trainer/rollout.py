"""Sampling: token ids in, token ids out; each token's log-prob is taken as it is chosen.

A prompt that is asked for several times is read once. A row that has finished leaves the batch and
its cache as soon as a quarter has, so the work shrinks with the rows that are left. Chance is drawn
for each row and step, so what a row samples does not depend on when others leave, nor on which
process samples it. Another engine can take its place, see `Engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ppokern import next_token_targets, position_ids, selected_logprobs

from .attention import KeyValueCache
from .data import Prompt, packed
from .models import LogProbs, NextLogits, Policy, forward_all


@dataclass
class Rollouts:
    """Prompts with their responses, packed; transition `i` is the choice of the token behind it."""

    prompts: list[Prompt]
    ids: Tensor  # (total,) prompt and response, one sequence behind the other
    cu_seqlens: Tensor  # (S + 1,) where each begins and the last ends
    mask: Tensor  # (total,) bool, True where the next token is the policy's choice
    logprobs: Tensor  # (total,) of that token at sampling, nats
    terminated: Tensor  # (S,) bool: ended with a stop token; else truncated for length
    policy_version: int  # optimiser steps that the weights had seen which sampled

    @property
    def lengths(self) -> Tensor:
        """Tokens of prompt and response, `(S,)`."""
        return self.cu_seqlens.diff().long()

    def sequences(self) -> list[list[int]]:
        """The ids of each prompt with its response."""
        return [ids.tolist() for ids in self.ids.split(self.lengths.tolist())]

    def responses(self) -> list[list[int]]:
        """The ids of each response, its stop token included."""
        rows = zip(self.sequences(), self.prompts, strict=True)
        return [ids[len(prompt.ids) :] for ids, prompt in rows]


class Engine(Protocol):
    """What samples for `ppo.run(config, engine=…)`: `generate` here, or a server of your own."""

    def __call__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        stop: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator,
        version: int,
        rows: Sequence[int] | None = None,
    ) -> Rollouts:
        """Takes what `generate` takes; a row's log-probs are of the whole softmax.

        Seeds are to be drawn from `generator`, whose state is in the checkpoint, and for all
        prompts, as every process draws. `rollouts_of` makes the answer.
        """
        ...


def generate(
    policy: Policy,
    prompts: Sequence[Prompt],
    stop: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    version: int = 0,
    rows: Sequence[int] | None = None,
) -> Rollouts:
    """Samples one response to each prompt.

    Args:
        policy: the model to sample from.
        prompts: `B` of them.
        stop: token ids that end a response. Those in a prompt do not count.
        max_new_tokens: longest response.
        temperature: divides the logits, in sampling and in the log-probs.
        generator: the only source of chance.
        version: how many optimiser steps the policy has seen.
        rows: which of the prompts to answer; not given, all. Chance is drawn for all of them.

    Returns:
        The rollouts, on the generator's device.
    """
    shape = (max_new_tokens, len(prompts))
    chance = torch.rand(shape, dtype=torch.float64, device=generator.device, generator=generator)
    if rows is not None:
        prompts, chance = [prompts[row] for row in rows], chance[:, rows]
    inference = torch.inference_mode(policy.precision == "float32")
    # around all steps, so that each weight is cast once: inference mode would cast it in each
    with inference, torch.no_grad(), policy.autocast():
        tokens, logprobs, counts = _sample(policy, prompts, stop, temperature, chance)
    chosen = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
    answered = torch.arange(max_new_tokens, device=counts.device) < counts[:, None]  # (S, N)
    return rollouts_of(prompts, chosen, logprobs[answered], stop, version)


def rollouts_of(
    prompts: Sequence[Prompt],
    responses: Sequence[Sequence[int]],
    logprobs: Tensor,
    stop: Sequence[int],
    version: int,
) -> Rollouts:
    """Puts together what was sampled.

    Args:
        prompts: `S` of them.
        responses: the ids of each, its stop token included.
        logprobs: of all tokens of all responses, one response behind the other, in nats; on the
            device that the rollouts are to be on.
        stop: token ids that end a response.
        version: how many optimiser steps the weights had seen.
    """
    both = list(zip(prompts, responses, strict=True))
    ids, cu_seqlens = packed([[*prompt.ids, *chosen] for prompt, chosen in both], logprobs.device)
    lengths = cu_seqlens.diff().long()
    starts = torch.tensor([len(p.ids) for p in prompts], dtype=torch.long, device=ids.device)
    starts = starts.repeat_interleave(lengths)  # (total,)
    mask = next_token_targets(ids, cu_seqlens)[1] & (position_ids(cu_seqlens) >= starts - 1)
    placed = torch.zeros(len(ids), device=ids.device)
    placed[mask] = logprobs.float()
    ended = [len(chosen) > 0 and chosen[-1] in stop for chosen in responses]
    terminated = torch.tensor(ended, dtype=torch.bool, device=ids.device)
    return Rollouts(list(prompts), ids, cu_seqlens, mask, placed, terminated, version)


def logprobs_of(
    rollouts: Rollouts, policy: Policy, temperature: float, max_tokens_per_micro_batch: int
) -> Tensor:
    """What the training path of a policy gives the sampled tokens: `(total,)`, nats."""

    def path(ids: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
        return policy(LogProbs(ids, cu_seqlens, mask, temperature))

    tokens = rollouts.ids, rollouts.mask
    return forward_all(path, max_tokens_per_micro_batch, rollouts.cu_seqlens, *tokens)


def _sample(
    policy: Policy,
    prompts: Sequence[Prompt],
    stop: Sequence[int],
    temperature: float,
    chance: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of each response and their log-probs, `(S, max_new_tokens)`, and how many, `(S,)`.

    `chance` is `(max_new_tokens, S)`.
    """
    device, (max_new_tokens, count) = chance.device, chance.shape
    places: dict[tuple[int, ...], int] = {}  # of each prompt among those that differ
    asked = [places.setdefault(tuple(prompt.ids), len(places)) for prompt in prompts]
    ids, cu_seqlens = packed(list(places), device)
    answered = torch.tensor(asked, dtype=torch.long, device=device)
    cache = KeyValueCache(cu_seqlens, answered, max_new_tokens)
    ends = torch.tensor(stop, device=device)

    tokens = torch.zeros(count, max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(count, max_new_tokens, device=device)
    counts = torch.full((count,), max_new_tokens, device=device)
    rows = torch.arange(count, device=device)  # (b,) whose cache is still kept
    going_on = torch.ones(count, dtype=torch.bool, device=device)  # (b,)
    for step in range(max_new_tokens if count else 0):
        logits = policy(NextLogits(ids, cache))  # (b, V)
        token = choose(logits, temperature, chance[step, rows])  # (b,)
        tokens[rows, step] = token
        logprobs[rows, step] = selected_logprobs(logits, token, temperature=temperature)  # nats
        ended = going_on & torch.isin(token, ends)
        counts[rows[ended]] = step + 1
        going_on = going_on & ~ended
        left = int(going_on.sum())
        if left == 0:
            break
        if left <= 0.75 * len(rows):
            stay = going_on.nonzero().squeeze(1)
            cache.keep(stay)
            rows, token, going_on = rows[stay], token[stay], going_on[stay]
        ids = token
    return tokens, logprobs, counts


def choose(logits: Tensor, temperature: float, chance: Tensor) -> Tensor:
    """The token at which the running sum of the probabilities passes `chance`, in [0, 1).

    Args:
        logits: `(b, V)`.
        temperature: divides them.
        chance: `(b,)` float64, uniform. The sum is float64 too: rare tokens keep their share.
    """
    sums = torch.softmax(logits.float() / temperature, -1).cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(sums, chance[:, None] * sums[:, -1:], right=True).squeeze(1)
    return token.clamp(max=logits.shape[1] - 1)
