"""The PPO losses on a million tokens: forward, with all statistics, and backward."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ppokern

N = 2**20
CLIP, VALUE_COEF = 0.2, 0.5


def eager(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the statistics as a trainer's author writes them."""
    count = mask.sum()

    def mean(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0.0).sum() / count

    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy = mean(-torch.minimum(ratio * advantages, clipped * advantages))
    near = torch.clamp(values, old_values - CLIP, old_values + CLIP)
    errors, near_errors = (values - returns).square(), (near - returns).square()
    value = mean(0.5 * torch.maximum(errors, near_errors))
    with torch.no_grad():
        stats = {
            "policy_loss": policy,
            "value_loss": value,
            "ratio_mean": mean(ratio),
            "ratio_min": torch.where(mask, ratio, torch.inf).min(),
            "ratio_max": torch.where(mask, ratio, -torch.inf).max(),
            "approx_kl_k1": mean(-log_ratio),
            "approx_kl_k2": mean(log_ratio.square() / 2),
            "approx_kl_k3": mean(torch.expm1(log_ratio) - log_ratio),
            "clip_fraction": mean(((ratio - 1).abs() > CLIP).float()),
            "clip_fraction_active": mean((clipped * advantages < ratio * advantages).float()),
            "value_clip_fraction": mean((near_errors > errors).float()),
            "n_tokens": count,
        }
    return policy + VALUE_COEF * value, stats


@functools.cache
def data() -> dict[str, Tensor]:
    """Return a call's tensors, a quarter of them masked."""
    names = ("old_logprobs", "advantages", "old_values", "returns")
    x = {name: torch.randn(N) for name in names}
    x["logprobs"] = (x["old_logprobs"] + 0.2 * torch.randn(N)).requires_grad_()
    x["values"] = (x["old_values"] + 0.2 * torch.randn(N)).requires_grad_()
    return x | {"mask": torch.rand(N) < 0.75}


@pytest.mark.parametrize("form", ["eager", "compile", *ppokern.available_backends()])
@pytest.mark.parametrize("passes", ["forward", "forward + backward"])
def bench_ppo_loss(measure: Callable, passes: str, form: str) -> None:
    """`ppo_loss`; its forward pass makes the gradient too where one is wanted."""
    x = data()
    if passes == "forward":
        x = {name: t.detach() for name, t in x.items()}
    call: Any = {"eager": eager, "compile": torch.compile(eager)}.get(form, ppokern.ppo_loss)

    def run() -> None:
        loss, _ = call(**x)
        if passes != "forward":
            torch.autograd.grad(loss, (x["logprobs"], x["values"]))

    measure(f"ppo_loss, 2**20 tokens, {passes}", form, run, rounds=10)
