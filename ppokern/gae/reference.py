"""Generalised advantage estimation and whitening in plain torch: the specification.

The recursion ``A_t = delta_t + decay_t * A_{t+1}`` is linear, so it is solved by doubling: after
`k` rounds each position has taken in the next ``2**k``. A position that is passed over has
``delta = 0`` and ``decay = 1``; one that does not continue has ``decay = 0``. So every layout is
one array of steps, and nothing is read back from the device. It runs in float64: doubling adds up
what the recursion does not, and must not overflow where that does not.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppokern import _check
from ppokern import token_math as tm
from ppokern._sequences import Sequences, spoil


class Inputs(NamedTuple):
    """The tensors of a call, as in the public `gae`; None = not given."""

    rewards: Tensor
    values: Tensor
    mask: Tensor | None = None
    bootstrap: Tensor | None = None
    continues: Tensor | None = None
    next_values: Tensor | None = None
    last_values: Tensor | None = None
    cu_seqlens: Tensor | None = None


class Options(NamedTuple):
    """The numbers of a call."""

    gamma: float
    lam: float
    masked_are_steps: bool  # those between unmasked ones, of reward 0 and value 0
    time_dim: int


def arithmetic(x: Inputs) -> torch.dtype:
    """Return the dtype of a call's arithmetic."""
    return _check.arithmetic(x.rewards, x.values, x.next_values, x.last_values)


def gae(x: Inputs, o: Options, check: bool) -> tuple[Tensor, Tensor, bool]:
    """Return advantages, returns, and whether all are finite (looked at only under `check`).

    A transition that continues without bootstrapping, or is cut inside a row without `next_values`,
    comes out as NaN.
    """
    dtype, time_major = arithmetic(x), o.time_dim == 0 and x.rewards.dim() == 2
    if time_major:
        steps = ("rewards", "values", "mask", "bootstrap", "continues", "next_values")
        given = {name: t for name in steps if (t := getattr(x, name)) is not None}
        x = x._replace(**{name: t.t() for name, t in given.items()})
    rewards, values, mask, bootstrap, continues, next_values, last_values, cu_seqlens = x
    sequences = Sequences(rewards.shape, cu_seqlens)
    valid = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    last = sequences.is_last(valid)
    reward = torch.where(valid, rewards.double(), 0.0)
    value = torch.where(valid, values.double(), 0.0)

    # V(next_t): the caller's, else the neighbour's, else behind the end the caller's or 0
    if o.masked_are_steps:
        follower = _later(value, 1, 0.0)
    else:
        behind = sequences.next_unmasked(valid).clamp(max=max(sequences.length - 1, 0))
        follower = value.gather(-1, behind)
    if next_values is not None:
        follower = torch.where(valid, next_values.double(), follower)
    else:
        end = 0.0 if last_values is None else sequences.spread(last_values.double())
        follower = torch.where(last, end, follower)

    yes = torch.ones_like(valid)
    bootstraps = yes if bootstrap is None else bootstrap | ~valid
    goes_on = bootstraps if continues is None else continues | ~valid
    cut = bootstraps & ~goes_on if next_values is None else ~yes
    wrong = valid & ~last & ((goes_on & ~bootstraps) | cut)

    delta = tm.gae_delta(reward, value, torch.where(bootstraps, follower, 0.0), o.gamma)
    delta = torch.where(wrong, torch.nan, delta)
    carry = torch.where(goes_on & ~last, o.gamma * o.lam, torch.zeros_like(delta))
    if not o.masked_are_steps:
        delta, carry = torch.where(valid, delta, 0.0), torch.where(valid, carry, 1.0)

    reach = 1
    while reach < sequences.length:
        delta = tm.gae_step(delta, carry, _later(delta, reach, 0.0))
        carry = carry * _later(carry, reach, 1.0)
        reach *= 2

    advantages = torch.where(valid, delta, 0.0).to(dtype)
    returns = torch.where(valid, delta + value, 0.0).to(dtype)
    spoil(cu_seqlens, sequences.length, advantages, returns)
    finite = not check or bool((advantages.isfinite() & returns.isfinite()).all())
    if time_major:
        advantages, returns = advantages.t(), returns.t()
    return advantages.contiguous(), returns.contiguous(), finite


def whiten(
    x: Tensor,
    mask: Tensor | None,
    shift_mean: bool,
    eps: float,
    correction: float,
    group: "dist.ProcessGroup | None" = None,
) -> Tensor:
    """Whiten over unmasked positions and all ranks of `group`; sums are taken in float64.

    The mean is taken twice, the second time of what is left, which is exact where values are close:
    so equal values leave nothing, and the last bits of others stay.
    """
    dtype = _check.arithmetic(x)
    valid = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    x = torch.where(valid, x.to(dtype), 0.0)

    def of_all_ranks(sums: Tensor) -> Tensor:
        if group is not None:
            dist.all_reduce(sums, group=group)
        return sums

    sums = of_all_ranks(torch.stack([valid.sum().double(), x.sum(dtype=torch.float64)]))
    count = sums[0].clamp(min=1)
    mean = (sums[1] / count).to(dtype)
    shifted = torch.where(valid, x - mean, 0.0)
    rest = (of_all_ranks(shifted.sum(dtype=torch.float64)) / count).to(dtype)
    shifted = torch.where(valid, shifted - rest, 0.0)
    squares = of_all_ranks(torch.linalg.vector_norm(shifted, dtype=torch.float64).square())
    variance = squares / (sums[0] - correction).clamp(min=1)
    flat = (squares == 0) | (sums[0] <= correction)
    scale = torch.where(flat, 1.0, (variance + eps).rsqrt()).to(dtype)
    if shift_mean:
        return (shifted * scale).contiguous()
    white = torch.where(valid, shifted * scale + rest + mean, 0.0)
    return torch.where(flat, x, white).contiguous()


def _later(x: Tensor, distance: int, filler: float) -> Tensor:
    """Return ``x[t + distance]`` along the last dimension, `filler` behind the end."""
    tail = torch.full_like(x[..., :distance], filler)
    return torch.cat([x[..., distance:], tail], -1)
