"""The PPO losses in C++, on the CPU or on CUDA: turns tensors into addresses."""

from typing import TYPE_CHECKING

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
    if x.value_mask is None:
        x = x._replace(value_mask=x.mask)
    x = Inputs(*(None if t is None else _dense(t) for t in x))
    if x.cu_seqlens is not None:
        sequences = x.cu_seqlens.shape[0] - 1
    else:
        sequences = like.numel() // like.shape[-1] if like.dim() else 1
    out = reference.empty_output(x, o)
    denominators = x.denominator, x.value_denominator
    own, of_values = (float(t) if t is not None and t.is_cpu else None for t in denominators)
    values = {
        **dict(zip(Inputs._fields, map(_address, x), strict=True)),
        "denominator": own,
        "value_denominator": of_values,
        "sequences": sequences,
        "tokens": like.numel(),
        "threads": torch.get_num_threads(),
        **o._asdict(),
        "dual_clip": torch.inf if o.dual_clip is None else o.dual_clip,
        "log_ratio_limit": torch.inf if o.log_ratio_limit is None else o.log_ratio_limit,
        "value_clip_range": o.value_clip_range or 0.0,
        **dict(zip(Output._fields, map(_address, out), strict=True)),
    }
    if not on_cuda:
        _native.ppo_loss(values)
        return out
    on_device = [None if t is None or t.is_cpu else t for t in denominators]
    size = _cuda.ppo_loss_work(sequences, like.numel())
    work = like.new_empty(size, dtype=torch.uint8)
    with _launch.on_device_of(like):
        own, of_values = map(_address, on_device)
        _cuda.ppo_loss(values, own, of_values, work.data_ptr(), _launch.stream(like))
    return out


def _dense(x: Tensor) -> Tensor:
    """Return a tensor as the kernel reads it: contiguous; float32, int64 or bool."""
    if x.is_floating_point():
        x = x.float()
    elif x.dtype != torch.bool:
        x = x.long()
    return x.contiguous()


def _address(x: Tensor | None) -> int:
    return x.data_ptr() if x is not None and x.numel() else 0
