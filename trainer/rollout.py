"""Sampling: token ids in, token ids out; each token's log-prob is taken as it is chosen.

A row that has finished leaves the batch and its cache, so the work shrinks with the rows that are
left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppokern import selected_logprobs

from .data import Prompt, pad
from .models import KeyValueCache, Policy


@dataclass
class Rollouts:
    """Prompts with their responses; a transition `i` is the choice of `ids[:, i + 1]`."""

    prompts: list[Prompt]
    ids: Tensor  # (B, T) prompt, response, padding
    mask: Tensor  # (B, T - 1) bool, True where a transition is the policy's
    logprobs: Tensor  # (B, T - 1) of the chosen tokens at sampling, nats
    lengths: Tensor  # (B,) tokens of prompt and response
    terminated: Tensor  # (B,) bool: ended with a stop token; else truncated for length

    def responses(self) -> list[list[int]]:
        """The ids of each response, its stop token included."""
        rows = zip(self.ids.tolist(), self.prompts, self.lengths.tolist(), strict=True)
        return [ids[len(prompt.ids) : length] for ids, prompt, length in rows]


def generate(
    policy: Policy,
    prompts: Sequence[Prompt],
    stop: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Rollouts:
    """Samples one response to each prompt.

    Args:
        policy: the model to sample from.
        prompts: `B` of them.
        stop: token ids that end a response. Those in a prompt do not count.
        max_new_tokens: longest response.
        temperature: divides the logits, in sampling and in the log-probs.
        generator: the only source of chance.

    Returns:
        The rollouts, on the generator's device.
    """
    chosen, logprobs = _sample(policy, prompts, stop, max_new_tokens, temperature, generator)
    rows = [prompt.ids + response for prompt, response in zip(prompts, chosen, strict=True)]
    starts = torch.tensor([len(prompt.ids) for prompt in prompts])[:, None]  # (B, 1)
    lengths = torch.tensor([len(row) for row in rows])  # (B,)
    ids = pad(rows, fill=stop[0])  # (B, T)
    target = torch.arange(1, ids.shape[1])[
        None
    ]  # (1, T - 1): place of the token that a transition chooses
    mask = (target >= starts) & (target < lengths[:, None])
    placed = torch.zeros(mask.shape)
    placed[mask] = torch.tensor([logprob for row in logprobs for logprob in row])
    terminated = torch.tensor([row[-1] in stop for row in chosen])
    place = generator.device
    return Rollouts(
        list(prompts),
        ids.to(place),
        mask.to(place),
        placed.to(place),
        lengths.to(place),
        terminated.to(place),
    )


@torch.inference_mode()
def _sample(
    policy: Policy,
    prompts: Sequence[Prompt],
    stop: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> tuple[list[list[int]], list[list[float]]]:
    """The response of each prompt and the log-probs of its tokens."""
    device = generator.device
    width = max(len(prompt.ids) for prompt in prompts)
    padding = [width - len(prompt.ids) for prompt in prompts]
    ids = [[stop[0]] * n + prompt.ids for n, prompt in zip(padding, prompts, strict=True)]
    ids = torch.tensor(ids, device=device)  # (B, P), padded on the left: all rows end together
    attended = torch.arange(width, device=device) >= torch.tensor(padding, device=device)[:, None]
    cache = KeyValueCache(attended)
    ends = torch.tensor(stop, device=device)
    rows = torch.arange(
        len(prompts), device=device
    )  # (b,) the prompts that are still being answered
    steps = []
    for _ in range(max_new_tokens):
        logits = policy(ids, cache=cache)  # (b, V)
        chances = torch.softmax(logits.float() / temperature, dim=-1)
        token = torch.multinomial(chances, 1, generator=generator).squeeze(1)  # (b,)
        logprob = selected_logprobs(logits, token, temperature=temperature)  # (b,) nats
        steps.append((rows, token, logprob))
        going_on = (~torch.isin(token, ends)).nonzero().squeeze(1)  # (b',)
        if len(going_on) == 0:
            break
        if len(going_on) < len(rows):
            cache.keep(going_on)
            rows, token = rows[going_on], token[going_on]
        ids = token[:, None]  # (b', 1)
    chosen: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for step in steps:
        for row, token, logprob in zip(*(tensor.tolist() for tensor in step), strict=True):
            chosen[row].append(token)
            logprobs[row].append(logprob)
    return chosen, logprobs
