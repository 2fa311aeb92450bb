"""Advantages in C++, on the CPU or on CUDA: turns tensors into addresses, without a copy."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppokern import _launch
from ppokern.gae.reference import Inputs, Options

if TYPE_CHECKING:
    from ppokern import _cuda, _native
else:
    from ppokern._backend import cuda as _cuda  # None where it was not built
    from ppokern._backend import native as _native


def gae(x: Inputs, o: Options, check: bool, on_cuda: bool = False) -> tuple[Tensor, Tensor, bool]:
    """Return advantages, returns, and whether all are finite (True without `check`).

    A transition that continues without bootstrapping, or is cut inside a row without `next_values`,
    comes out as NaN.
    """
    rewards, values, time_dim = x.rewards.float(), x.values.float(), o.time_dim
    next_values = None if x.next_values is None else x.next_values.float()
    last_values = None if x.last_values is None else x.last_values.float()
    advantages = torch.empty_like(rewards, memory_format=torch.contiguous_format)
    returns = torch.empty_like(advantages)
    cu_seqlens = x.cu_seqlens
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
        sequences = cu_seqlens.shape[0] - 1
    else:
        sequences = rewards.shape[1 + time_dim] if rewards.dim() == 2 else 1
    by_row = rewards.dim() == 2

    def steps(x: Tensor | None) -> tuple[int, int, int]:
        if x is None:
            return 0, 0, 0
        return x.data_ptr(), x.stride(1 + time_dim) if by_row else 0, x.stride(time_dim)

    def per_sequence(x: Tensor | None) -> tuple[int, int, int]:
        return (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0) if x.dim() else 0, 0)

    values_of = {
        "rewards": steps(rewards),
        "values": steps(values),
        "mask": steps(x.mask),
        "bootstrap": steps(x.bootstrap),
        "continues": steps(x.bootstrap if x.continues is None else x.continues),
        "next_values": steps(next_values),
        "last_values": per_sequence(last_values),
        "cu_seqlens": per_sequence(cu_seqlens),
        "advantages": steps(advantages),
        "returns": steps(returns),
        "sequences": sequences,
        "steps": rewards.shape[time_dim],
        "gamma": o.gamma,
        "gamma_lambda": o.gamma * o.lam,
        "masked_are_steps": o.masked_are_steps,
        "threads": torch.get_num_threads(),
    }
    if not on_cuda:
        finite = _native.gae(values_of)
        return advantages, returns, finite or not check
    malformed = torch.empty(1, dtype=torch.int32, device=rewards.device)
    with _launch.on_device_of(rewards):
        rest = malformed.data_ptr(), _launch.stream(rewards)
        _cuda.gae(values_of, *rest)
    finite = not check or bool((advantages.isfinite() & returns.isfinite()).all())
    return advantages, returns, finite
