"""The PPO losses in C++, on the CPU or on CUDA: turns tensors into addresses."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ppokern import _launch
from ppokern.ppo_loss import reference
from ppokern.ppo_loss.reference import Inputs, Options, Output

if TYPE_CHECKING:
    from ppokern import _cuda, _native
else:
    from ppokern._backend import cuda as _cuda  # None where it was not built
    from ppokern._backend import native as _native


def forward(x: Inputs, o: Options, on_cuda: bool = False) -> Output:
    """Return what `reference.forward` does; float32 that is contiguous is read where it lies."""
    like = next(t for t in x if t is not None)
    if not like.numel():
        return reference.forward(x, o)
    if o.value_clip_range is None:
        x = x._replace(old_values=None)
    floats = [None if t is None else t.float().contiguous() for t in x[:9]]
    masks = [x.mask, x.mask if x.value_mask is None else x.value_mask]
    masks = [None if t is None else t.contiguous() for t in masks]
    cu_seqlens = None if x.cu_seqlens is None else x.cu_seqlens.to(torch.int64).contiguous()
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
    else:
        sequences = like.numel() // like.shape[-1] if like.dim() else 1
    out = reference.empty_output(x, o)
    denominators = x[-2:]
    args: list[Any] = [
        *(_address(t) for t in (*floats, *masks, cu_seqlens)),
        *(float(t) if t is not None and t.is_cpu else None for t in denominators),
        sequences,
        like.numel(),
        o.low,
        o.high,
        torch.inf if o.dual_clip is None else o.dual_clip,
        torch.inf if o.log_ratio_limit is None else o.log_ratio_limit,
        o.aggregate,
        o.entropy_coef,
        o.kl_coef,
        o.kl_kind,
        o.value_clip_range or 0.0,
        o.value_coef,
        torch.get_num_threads(),
        *(_address(t) for t in out),
    ]
    if not on_cuda:
        _native.ppo_loss(*args)
        return out
    on_device = [None if t is None or t.is_cpu else t.float() for t in denominators]
    size = _cuda.ppo_loss_work(sequences, like.numel())
    work = like.new_empty(size, dtype=torch.uint8)
    with _launch.on_device_of(like):
        _cuda.ppo_loss(
            *args, *(_address(t) for t in on_device), work.data_ptr(), _launch.stream(like)
        )
    return out


def _address(x: Tensor | None) -> int:
    return x.data_ptr() if x is not None and x.numel() else 0
