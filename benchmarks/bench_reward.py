"""Ops that have one form, in plain torch, on every backend: a million tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ppokern

B, T = 1024, 1024


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """As TRL's masked_whiten."""
    mean = (x * mask).sum() / mask.sum()
    var = ((x - mean) ** 2 * mask).sum() / (mask.sum() - 1)
    return (x - mean) * torch.rsqrt(var + 1e-8)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The low-variance estimate."""
    d = ref_logprobs - logprobs
    return d.exp() - 1 - d


def shaped(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The penalty for each token, the score at the last one."""
    rewards = -0.1 * (logprobs - ref_logprobs) * mask
    last = T - 1 - mask.flip(1).int().argmax(1)
    rewards[torch.arange(B), last] += scores
    return rewards


CASES = {
    "whiten": (whiten, ppokern.whiten, ("x", "mask")),
    "kl_estimate": (
        k3,
        lambda **x: ppokern.kl_estimate(**x, kind="k3"),
        ("logprobs", "ref_logprobs"),
    ),
    "shaped_rewards": (
        shaped,
        lambda **x: ppokern.shaped_rewards(**x, kl_coef=0.1),
        ("scores", "logprobs", "ref_logprobs", "mask"),
    ),
}


@pytest.mark.parametrize("form", ["eager", "compile", "torch"])
@pytest.mark.parametrize("op", CASES)
def bench_plain(measure: Callable, op: str, form: str) -> None:
    """Every op beside what a trainer's author writes."""
    eager, ours, names = CASES[op]
    x = {name: torch.randn(B, T) for name in names if name not in ("scores", "mask")}
    x |= {"scores": torch.randn(B)} if "scores" in names else {}
    x |= {"mask": torch.arange(T) < torch.randint(1, T, (B, 1))} if "mask" in names else {}
    call: Any = {"eager": eager, "compile": torch.compile(eager)}.get(form, ours)
    measure(f"{op}, 2**20 tokens", form, lambda: call(**x), rounds=10)
