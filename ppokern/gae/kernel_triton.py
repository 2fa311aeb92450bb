"""Advantages and their whitening in Triton.

Advantages, for every layout without a copy. Bytes moved per transition: 8 read and 8 written in
float32, one more for each of mask and flags, four for next values; with a mask each value is read
twice, the second time from cache.

The recursion is a composition of affine maps, so a tile of sequences is one associative scan along
time, from the end backwards; a second one, where there is a mask, carries the next unmasked value
to where it is needed. Long sequences take several tiles, each with what the one behind it left.
The scan runs in float64, since it adds up what the recursion does not: nothing overflows that would
not there, and the tree leaves no trace in float32.

Whitening. Bytes moved per value, in float32: 4 read for count, mean and squares, 4 read and 4
written to apply them; twice one more with a mask. A lane adds up differences from its first value,
in float64, so that a large mean takes nothing from a small spread; lanes, programs and ranks then
combine what they have about the mean of all, in one order.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from ppokern import _launch
from ppokern import token_math_triton as tm
from ppokern._sequences import spoil
from ppokern.gae.reference import Inputs, Options

SHORT, LONG = (16, 64), (1, 1024)  # sequences and steps of a tile: 4 transitions a thread
WARPS = 8
BLOCK = 512  # values that are whitened at a time: 2 a thread, with three sums for each
RESIDENT = 4  # programs of a multiprocessor that do so
PARTIALS = 64  # read at a time to finish


@triton.jit
def _compose(decay_behind, delta_behind, decay, delta):
    """Return the map of some steps after that of the steps behind them."""
    return decay_behind * decay, tm.gae_step(delta, decay, delta_behind)


@triton.jit
def _nearest(has_behind, value_behind, has, value):
    """Return the nearer of two values, where there is one."""
    return has_behind | has, tl.where(has != 0, value, value_behind)


@triton.jit
def _load(x, row_stride, step_stride, row, step, where):
    return tl.load(x + row * row_stride + step.to(tl.int64) * step_stride, where, other=0)


@triton.jit
def _at(x, lane, which, AXIS: tl.constexpr):
    """Return one lane of a tile."""
    return tl.sum(tl.where(lane == which, x, tl.zeros_like(x)), AXIS, keep_dims=True)


_TENSORS = ["rewards", "values", "mask", "bootstrap", "continues", "next_values", "last_values"]
_TENSORS += ["advantages", "returns", "cu_seqlens"]
_STRIDES = [f"{x}_{of}" for x in (*_TENSORS[:6], "out") for of in ("row", "step")]


@triton.jit(do_not_specialize=[*_TENSORS, *_STRIDES, "last_stride", "sequences", "length"])
def gae_kernel(
    rewards,
    rewards_row: tl.int64,
    rewards_step: tl.int64,
    values,
    values_row: tl.int64,
    values_step: tl.int64,
    mask,
    mask_row: tl.int64,
    mask_step: tl.int64,
    bootstrap,
    bootstrap_row: tl.int64,
    bootstrap_step: tl.int64,
    continues,
    continues_row: tl.int64,
    continues_step: tl.int64,
    next_values,
    next_values_row: tl.int64,
    next_values_step: tl.int64,
    last_values,
    last_stride: tl.int64,
    advantages,
    returns,
    out_row: tl.int64,
    out_step: tl.int64,
    cu_seqlens,
    sequences: tl.int64,
    length: tl.int64,  # of every sequence, packed: of all together
    gamma: tl.float64,
    gamma_lambda: tl.float64,
    COUNT_MASKED: tl.constexpr,  # whether a masked position is a step
    TIME_MAJOR: tl.constexpr,  # whether neighbours in memory belong to neighbouring sequences
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Go through ROWS sequences in tiles of STEPS steps, from the ends backwards."""
    AXIS: tl.constexpr = 0 if TIME_MAJOR else 1  # that of time
    row = tl.expand_dims(tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64), AXIS)
    lane = tl.expand_dims(tl.arange(0, STEPS), 1 - AXIS)
    there = row < sequences
    behind_end = tl.zeros(row.shape, tl.float32)
    if last_values is not None:
        behind_end = tl.load(last_values + row * last_stride, there, other=0).to(tl.float32)
    steps = tl.where(there, length, 0)
    if cu_seqlens is not None:  # a sequence's row is its first token
        end = tl.load(cu_seqlens + row + 1, there, other=0)
        row = tl.load(cu_seqlens + row, there, other=0)
        steps = tl.where((row >= 0) & (end <= length), end - row, 0)
    steps = steps.to(tl.int32)

    has_behind = tl.zeros(row.shape, tl.int32)  # whether anything behind the tile is unmasked
    value_behind = tl.zeros(row.shape, tl.float32)
    advantage_behind = tl.zeros(row.shape, tl.float64)
    for tile in range(0, tl.cdiv(tl.max(tl.max(steps, 0), 0), STEPS)):
        back = tile * STEPS + lane  # steps behind this one
        step = steps - 1 - back
        inside = step >= 0
        valid = inside
        follows = inside & (back > 0)
        if mask is not None:
            valid &= _load(mask, mask_row, mask_step, row, step, inside) != 0
            follows &= _load(mask, mask_row, mask_step, row, step + 1, follows) != 0
        reward = _load(rewards, rewards_row, rewards_step, row, step, valid).to(tl.float32)
        value = _load(values, values_row, values_step, row, step, valid).to(tl.float32)
        neighbour = _load(values, values_row, values_step, row, step + 1, follows).to(tl.float32)

        has, follower = follows.to(tl.int32), neighbour
        if mask is not None:
            has, follower = tl.associative_scan((has, follower), AXIS, _nearest)
            follower = tl.where(has != 0, follower, value_behind)
            has = has | has_behind
            has_behind = has_behind | tl.max(valid.to(tl.int32), AXIS, keep_dims=True)
            value_behind = _at(follower, lane, STEPS - 1, AXIS)
        if COUNT_MASKED:
            follower = neighbour
        last = valid & (has == 0)

        boots = tl.full(inside.shape, True, tl.int1)
        if bootstrap is not None:
            given = _load(bootstrap, bootstrap_row, bootstrap_step, row, step, valid)
            boots = (given != 0) | ~valid
        goes_on = boots
        if continues is not None:
            given = _load(continues, continues_row, continues_step, row, step, valid)
            goes_on = (given != 0) | ~valid
        wrong = valid & ~last & goes_on & ~boots
        if next_values is not None:
            reads = valid & boots
            x = _load(next_values, next_values_row, next_values_step, row, step, reads)
            follower = tl.where(valid, x.to(tl.float32), follower)
        else:
            follower = tl.where(last, behind_end, follower)
            wrong |= valid & ~last & boots & ~goes_on
        follower = tl.where(boots, follower, 0.0).to(tl.float64)
        delta = tm.gae_delta(reward.to(tl.float64), value.to(tl.float64), follower, gamma)
        delta = tl.where(wrong, float("nan"), delta)
        carry = tl.where(goes_on & ~last, gamma_lambda, 0.0).to(tl.float64)
        if not COUNT_MASKED:
            delta, carry = tl.where(valid, delta, 0.0), tl.where(valid, carry, 1.0)

        carry, delta = tl.associative_scan((carry, delta), AXIS, _compose)
        advantage = tm.gae_step(delta, carry, advantage_behind)
        advantage_behind = _at(advantage, lane, STEPS - 1, AXIS)
        at = row * out_row + step.to(tl.int64) * out_step
        result = tl.where(valid, advantage, 0.0)
        tl.store(advantages + at, result.to(tl.float32), inside)
        tl.store(
            returns + at, tl.where(valid, result + value.to(tl.float64), 0.0).to(tl.float32), inside
        )


def gae(x: Inputs, o: Options, check: bool) -> tuple[Tensor, Tensor, bool]:
    """Return advantages, returns, and whether all are finite (looked at only under `check`).

    A transition that continues without bootstrapping, or is cut inside a row without `next_values`,
    comes out as NaN.
    """
    rewards, time_dim, cu_seqlens = x.rewards, o.time_dim, x.cu_seqlens
    advantages, returns = (
        torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device) for _ in range(2)
    )
    if rewards.numel() == 0:
        return advantages, returns, True
    length = rewards.shape[time_dim]
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
        sequences = cu_seqlens.shape[0] - 1
    else:
        sequences = rewards.numel() // length

    def strides(t: Tensor | None) -> tuple[int, int]:
        if t is None:
            return 0, 0
        return t.stride(1 + time_dim) if t.dim() == 2 else t.stride(0), t.stride(time_dim)

    per_step = rewards, x.values, x.mask, x.bootstrap, x.continues, x.next_values
    last, (row_stride, step_stride) = x.last_values, strides(rewards)
    time_major = 0 < row_stride < step_stride
    rows, steps = SHORT if time_major or length <= SHORT[1] else LONG
    with _launch.on_device_of(rewards):
        gae_kernel[(triton.cdiv(sequences, rows),)](
            *(each for t in per_step for each in (t, *strides(t))),
            last, last.stride(0) if last is not None and sequences > 1 else 0,
            advantages, returns, *strides(advantages), cu_seqlens, sequences, length,
            o.gamma, o.gamma * o.lam, COUNT_MASKED=o.masked_are_steps and x.mask is not None,
            TIME_MAJOR=time_major, ROWS=rows, STEPS=steps, num_warps=WARPS,
        )  # fmt: skip
    spoil(cu_seqlens, length, advantages, returns)
    finite = not check or bool((advantages.isfinite() & returns.isfinite()).all())
    return advantages, returns, finite


@triton.jit
def _valid(mask, at, values):
    """Return which positions are there and unmasked."""
    valid = at < values
    if mask is not None:
        valid &= tl.load(mask + at, valid, other=0) != 0
    return valid


@triton.jit
def _combined(count, mean, squares):
    """Return count, mean and squares about it of parts, ``(n,)`` each, taken together.

    Means are added up as what they differ by from one of them: of equal ones that is nothing.
    """
    total = tl.sum(count, 0)
    one = tl.max(tl.where(count > 0.0, mean, float("-inf")), 0)
    one = tl.where(total > 0.0, one, 0.0)
    middle = one + tl.sum(tl.where(count > 0.0, count * (mean - one), 0.0), 0) / tl.maximum(
        total, 1.0
    )
    away = mean - middle
    return total, middle, tl.sum(squares + count * away * away, 0)


@triton.jit
def _store_moments(moments, count, mean, squares):
    tl.store(moments, count)
    tl.store(moments + 1, mean)
    tl.store(moments + 2, squares)


@triton.jit(do_not_specialize=["x", "mask", "values", "partials"])
def moments_kernel(x, mask, values: tl.int64, partials, BLOCK: tl.constexpr):
    """Write count, mean and squares of a program's values."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    sums, squares = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for begin in range(start, values, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        valid = _valid(mask, at, values)
        value = tl.load(x + at, valid, other=0.0).to(tl.float32)
        first = tl.where(count == 0, value, first)
        away = tl.where(valid, value.to(tl.float64) - first.to(tl.float64), 0.0)
        sums += away
        squares += away * away
        count += valid.to(tl.int32)
    counts = count.to(tl.float64)
    mean = sums / tl.maximum(counts, 1.0)
    squares -= sums * mean
    squares = tl.where(squares < 0.0, 0.0, squares)  # NaN stays
    at = partials + 3 * tl.program_id(0)
    _store_moments(at, *_combined(counts, first.to(tl.float64) + mean, squares))


@triton.jit(do_not_specialize=["partials", "programs", "moments"])
def finish_kernel(partials, programs: tl.int32, moments, BLOCK: tl.constexpr):
    """Combine the programs' moments."""
    count, mean = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, programs, BLOCK):
        program = begin + tl.arange(0, BLOCK)
        at, there = partials + 3 * program, program < programs
        more, middle = tl.load(at, there, other=0.0), tl.load(at + 1, there, other=0.0)
        total, away = count + more, middle - mean
        share = more / tl.maximum(total, 1.0)
        squares += tl.load(at + 2, there, other=0.0) + away * away * count * share
        mean += away * share
        count = total
    _store_moments(moments, *_combined(count, mean, squares))


@triton.jit(do_not_specialize=["x", "mask", "values", "moments", "out"])
def whiten_kernel(
    x,
    mask,
    values: tl.int64,
    moments,
    eps: tl.float64,
    correction: tl.float64,
    out,
    SHIFT_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whiten one block after the other: `reference.whiten` from the mean on."""
    count, mean64, squares = tl.load(moments), tl.load(moments + 1), tl.load(moments + 2)
    mean = mean64.to(tl.float32)
    rest = (mean64 - mean.to(tl.float64)).to(tl.float32)
    variance = squares / tl.maximum(count - correction, 1.0)
    flat = (squares == 0.0) | (count <= correction)
    spread = tl.where(flat, 1.0, variance + eps)
    scale = (1.0 / tl.sqrt(spread)).to(tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for begin in range(start, values, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        valid = _valid(mask, at, values)
        value = tl.load(x + at, valid, other=0.0).to(tl.float32)
        white = (value - mean - rest) * scale
        if not SHIFT_MEAN:
            white = tl.where(flat, value, white + rest + mean)
        tl.store(out + at, tl.where(valid, white, 0.0), at < values)


def whiten(
    x: Tensor,
    mask: Tensor | None,
    shift_mean: bool,
    eps: float,
    correction: float,
    group: "dist.ProcessGroup | None",
) -> Tensor:
    """Whiten over unmasked positions and all ranks of `group`."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    values = x.numel()
    if values == 0 and group is None:
        return out
    x, mask = x.contiguous(), None if mask is None else mask.contiguous()
    programs = max(1, min(triton.cdiv(values, BLOCK), _launch.resident(x.device, RESIDENT)))
    partials = torch.empty((programs, 3), dtype=torch.float64, device=x.device)
    moments = partials.new_empty(3)
    with _launch.on_device_of(x):
        moments_kernel[(programs,)](x, mask, values, partials, BLOCK=BLOCK, num_warps=WARPS)
        finish_kernel[(1,)](partials, programs, moments, BLOCK=PARTIALS, num_warps=2)
        if group is not None:
            moments = _of_all_ranks(moments, group)
        whiten_kernel[(programs,)](
            x, mask, values, moments, eps, correction, out, SHIFT_MEAN=shift_mean,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def _of_all_ranks(moments: Tensor, group: dist.ProcessGroup) -> Tensor:
    count, mean, squares = moments.unbind()
    one = torch.where(count > 0, mean, -torch.inf)  # see `_combined`
    dist.all_reduce(one, dist.ReduceOp.MAX, group=group)
    sums = torch.stack([count, torch.where(count > 0, count * (mean - one), 0.0)])
    dist.all_reduce(sums, group=group)
    middle = torch.where(sums[0] > 0, one + sums[1] / sums[0], 0.0)
    squares = squares + count * (mean - middle).square()
    dist.all_reduce(squares, group=group)
    return torch.stack([sums[0], middle, squares])
