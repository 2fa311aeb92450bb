"""Advantages on the CPU in C++: turns tensors into addresses and strides, without a copy."""

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None,
    bootstrap: Tensor | None,
    continues: Tensor | None,
    next_values: Tensor | None,
    last_values: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
    decay: bool,
    time_dim: int,
    check: bool,
) -> tuple[Tensor, Tensor, bool]:
    """Return advantages, returns, and whether all are finite (True without `check`).

    A transition that continues without bootstrapping, or is cut inside a row without `next_values`,
    comes out as NaN.
    """
    from ppokern import _native  # absent where the C++ kernels were not built

    rewards, values = rewards.float(), values.float()
    next_values = None if next_values is None else next_values.float()
    last_values = None if last_values is None else last_values.float()
    continues = bootstrap if continues is None else continues
    advantages = torch.empty_like(rewards, memory_format=torch.contiguous_format)
    returns = torch.empty_like(advantages)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
        sequences = cu_seqlens.shape[0] - 1
    else:
        sequences = rewards.shape[1 + time_dim] if rewards.dim() == 2 else 1

    def steps(x: Tensor | None) -> tuple[int, int, int]:
        if x is None:
            return 0, 0, 0
        return x.data_ptr(), x.stride(1 + time_dim) if x.dim() == 2 else 0, x.stride(time_dim)

    def per_sequence(x: Tensor | None) -> tuple[int, int, int]:
        return (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0) if x.dim() else 0, 0)

    finite = _native.gae(
        steps(rewards),
        steps(values),
        steps(mask),
        steps(bootstrap),
        steps(continues),
        steps(next_values),
        per_sequence(last_values),
        steps(advantages),
        steps(returns),
        per_sequence(cu_seqlens),
        sequences,
        rewards.shape[time_dim],
        gamma,
        gamma * lam,
        decay,
        torch.get_num_threads(),
    )
    return advantages, returns, finite or not check
