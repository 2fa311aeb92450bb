"""The optimiser steps of all stages: AdamW, its schedule, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from .config import Supervised

Trained = tuple[nn.Module, Optimizer]


def adamw(module: nn.Module, learning_rate: float, weight_decay: float = 0.0) -> AdamW:
    """AdamW with decay on matrices only, in one kernel for all parameters."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=learning_rate, betas=(0.9, 0.99), fused=True)


def schedule(optimizer: Optimizer, config: Supervised, step: int) -> None:
    """Sets the rate of step 1, 2, …: a linear warm-up, then a cosine down to a twentieth."""
    warm = min(1.0, step / (config.warmup_steps + 1))
    cosine = 0.5 * (1 + math.cos(math.pi * (step - 1) / config.steps))
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * warm * (0.05 + 0.95 * cosine)


def steps_taken(optimizer: Optimizer) -> int:
    """How many steps an Adam has taken, by its own count."""
    counts = {int(state["step"]) for state in optimizer.state.values()}
    return max(counts, default=0)


def clipped_step(
    trained: Sequence[Trained], max_grad_norm: float, learned: bool = True
) -> tuple[list[Tensor], bool]:
    """Clips each module's gradients and steps; a norm that is not finite steps none of them.

    Nor does a step that had nothing to learn from: Adam would go on as the steps before it went.

    Returns:
        The norms before clipping, and whether the step was taken.
    """
    norms = [_clipped(module, max_grad_norm) for module, _ in trained]
    taken = learned and all(bool(norm.isfinite()) for norm in norms)
    for _, optimizer in trained:
        if taken:
            optimizer.step()
        optimizer.zero_grad()
    return norms, taken


def _clipped(module: nn.Module, max_grad_norm: float) -> Tensor:
    """The norm over all processes' parts, the same in each, so that they step or skip together."""
    norm = nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
