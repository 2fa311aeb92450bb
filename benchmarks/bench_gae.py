"""Advantages of 512 sequences of up to 1,024 tokens.

No column for torch.compile: of a loop over time it makes a graph as long as the sequence, which
takes longer to compile than anyone waits.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ppokern
from benchmarks.ceiling import Moved, bytes_per_second

B, T = 512, 1024
GAMMA, LAM = 0.99, 0.95


def loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The loop over time that trainers have; right padding."""
    advantages = torch.zeros_like(rewards)
    last = next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        taken = mask[:, t]
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        last = torch.where(taken, delta + GAMMA * LAM * last, 0.0)
        next_value = torch.where(taken, values[:, t], 0.0)
        advantages[:, t] = last
    return advantages, torch.where(mask, advantages + values, 0.0)


@functools.cache
def data() -> dict[str, dict[str, Any]]:
    """Return arguments by layout: full rows, padded ones, time-major, the same tokens packed."""
    rewards, values = torch.randn(B, T), torch.randn(B, T)
    lengths = torch.randint(T // 4, T + 1, (B, 1))
    mask = torch.arange(T) < lengths
    cu_seqlens = torch.cat([torch.zeros(1, 1), lengths]).cumsum(0)[:, 0].int()
    return {
        "full": {"rewards": rewards, "values": values},
        "padded": {"rewards": rewards, "values": values, "mask": mask},
        "time-major": {
            "rewards": rewards.T.contiguous(),
            "values": values.T.contiguous(),
            "mask": mask.T.contiguous(),
            "time_dim": 0,
        },
        "packed": {
            "rewards": rewards[mask],
            "values": values[mask],
            "cu_seqlens": cu_seqlens,
        },
    }


@pytest.mark.parametrize("form", ["eager", *ppokern.available_backends()])
@pytest.mark.parametrize("layout", ["full", "padded", "time-major", "packed"])
def bench_gae(measure: Callable, layout: str, form: str) -> None:
    """All layouts; the loop of plain torch knows rows only."""
    arguments = data()[layout]
    rows = {
        "mask": torch.ones(B, T, dtype=torch.bool),
        **data()["full" if layout == "full" else "padded"],
    }
    call = functools.partial(ppokern.gae, **arguments, gamma=GAMMA, lam=LAM)
    if form == "eager":
        call = functools.partial(loop, **rows)
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    moved = 2 * arguments["rewards"].nbytes + sum(x.nbytes for x in tensors)
    ceiling = bytes_per_second(data()["full"]["rewards"])
    rounds = 3 if form in ("eager", "torch") else 20
    measure(f"gae {layout}", form, call, rounds=rounds, moved=Moved(moved, ceiling))
