"""Log-probs of selected tokens in C++, on the CPU or on CUDA: turns tensors into addresses.

Both functions equal those of `reference`, and take the same arguments. Logits are read where they
lie; only where their last dimension is strided are they copied.
"""

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ppokern import _launch
from ppokern.logprob import reference
from ppokern.logprob.reference import Rows

if TYPE_CHECKING:
    from ppokern import _cuda, _native
else:
    from ppokern._backend import cuda as _cuda  # None where it was not built
    from ppokern._backend import native as _native

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def forward(
    x: Rows, with_entropy: bool, dtype: torch.dtype, on_cuda: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropy (empty without), and what `backward` needs, ``(..., 4)``."""
    if on_cuda and not x.logits.numel():
        return reference.forward(x, with_entropy, dtype)
    logprobs = torch.empty_like(
        x.token_ids, dtype=torch.float32, memory_format=torch.contiguous_format
    )
    entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
    found = logprobs.new_empty((*logprobs.shape, 4))
    rows = logprobs.numel()
    values, _memory = tokens_of(x, rows)
    values["logprobs"] = logprobs.data_ptr()
    values["entropy"] = entropy.data_ptr() if with_entropy else 0
    values["found"] = found.data_ptr()
    if not on_cuda:
        _native.logprob_forward(values)
        return logprobs, entropy, found
    segments = _cuda.logprob_segments(x.vocab_size)
    partials = found.new_empty((rows, segments, 4))
    with _launch.on_device_of(found):
        rest = partials.data_ptr(), _launch.stream(found)
        _cuda.logprob_forward(values, *rest)
    return logprobs, entropy, found


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    x: Rows,
    found: Tensor,
    out: Tensor,
    compact: bool = False,
    on_cuda: bool = False,
) -> Tensor:
    """Write the gradient of the logits to `out`, which may be `logits` itself, and return it."""
    if not out.numel():
        return out
    if not _rows_are_dense(out):
        dense = out.contiguous()
        x = x._replace(logits=dense) if out is x.logits else x
        backward(grad_logprobs, grad_entropy, x, found, dense, compact, on_cuda=on_cuda)
        return out.copy_(dense)
    values, _memory = tokens_of(x, x.token_ids.numel())
    values["out"], _out_memory = _rows(out)
    values["width"], values["compact"] = out.shape[-1], compact
    in_logprobs = None if grad_logprobs is None else _flat(grad_logprobs.float())
    in_entropy = None if grad_entropy is None else _flat(grad_entropy.float())
    values["grad_logprobs"], values["grad_entropy"] = _view(in_logprobs), _view(in_entropy)
    found = found.contiguous()
    values["found"] = found.data_ptr()
    if not on_cuda:
        _native.logprob_backward(values)
        return out
    with _launch.on_device_of(out):
        _cuda.logprob_backward(values, _launch.stream(out))
    return out


CUDA: Any = SimpleNamespace(
    forward=partial(forward, on_cuda=True), backward=partial(backward, on_cuda=True)
)


def tokens_of(x: Rows, rows: int) -> tuple[dict[str, Any], object]:
    """Return what every kernel takes, by name, and what keeps the memory that it is in."""
    place, memory = _rows(x.logits)
    ids, mask, temperatures = _flat(x.token_ids), _flat(x.mask), None
    number = 1.0
    if not isinstance(x.temperature, Tensor):
        number = x.temperature
    elif x.temperature.dim() == 0 and x.temperature.is_cpu:
        number = float(x.temperature)
    else:
        temperatures = _flat(x.temperature.float())
    values = {
        "logits": place,
        "type": _TYPES[x.logits.dtype],
        "token_ids": _view(ids),
        "mask": _view(mask),
        "temperatures": _view(temperatures),
        "temperature": number,
        "softcap": x.softcap or 0.0,
        "rows": rows,
        "vocab_size": x.vocab_size,
        "threads": torch.get_num_threads(),
    }
    return values, (memory, ids, mask, temperatures)


def _rows_are_dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.stride(-1) == 1 or x.shape[-1] <= 1


def _rows(x: Tensor) -> tuple[tuple[int, int, int], object]:
    """Return address, row offsets' address and row stride of ``(..., V)``, and what they are of."""
    if not _rows_are_dense(x):
        x = x.contiguous()
    if x.is_contiguous():
        return (x.data_ptr(), 0, x.shape[-1]), x
    if x.dim() == 2:
        return (x.data_ptr(), 0, x.stride(0)), x
    offsets = torch.zeros((), dtype=torch.int64, device=x.device)
    for size, stride in zip(x.shape[:-1], x.stride(), strict=False):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device=x.device) * stride
    offsets = offsets.reshape(-1)
    return (x.data_ptr(), offsets.data_ptr(), 0), (x, offsets)


def _flat(x: Tensor | None) -> Tensor | None:
    """Return a tensor per token so that one stride leads through it."""
    return x if x is None or x.is_contiguous() or x.dim() == 1 else x.reshape(-1)


def _view(x: Tensor | None) -> int | tuple[int, int, int]:
    if x is None:
        return 0
    if x.dim() and x.is_contiguous():
        return x.data_ptr()
    return x.data_ptr(), x.stride(0) if x.dim() else 0, 0
