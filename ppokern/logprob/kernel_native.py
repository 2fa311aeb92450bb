"""Log-probs of selected tokens on the CPU in C++: turns tensors into addresses and strides.

Both functions equal those of `reference`, and take the same arguments. Logits are read where they
lie; only where their last dimension is strided are they copied.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ppokern import _native
else:
    from ppokern._backend import native as _native  # None where it was not built

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def forward(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    vocab_size: int,
    with_entropy: bool,
    dtype: torch.dtype,
    block: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropy (empty without), and what `backward` needs, ``(..., 4)``."""
    logprobs = torch.empty_like(
        token_ids, dtype=torch.float32, memory_format=torch.contiguous_format
    )
    entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
    found = logprobs.new_empty((*token_ids.shape, 4))
    rows, _rows_data = _rows(logits)
    ids, taken, temperatures = _flat(token_ids), _flat(mask), _per_token(temperature)
    _native.logprob_forward(
        rows,
        _TYPES[logits.dtype],
        _view(ids),
        _view(taken),
        _view(temperatures),
        temperature if isinstance(temperature, float) else 1.0,
        softcap or 0.0,
        token_ids.numel(),
        vocab_size,
        torch.get_num_threads(),
        logprobs.data_ptr(),
        entropy.data_ptr() if with_entropy else 0,
        found.data_ptr(),
    )
    return logprobs, entropy, found


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    vocab_size: int,
    found: Tensor,
    out: Tensor,
    compact: bool = False,
    block: int | None = None,
) -> Tensor:
    """Write the gradient of the logits to `out`, which may be `logits` itself, and return it."""
    if not _rows_are_dense(out):
        dense = out.contiguous()
        backward(
            grad_logprobs, grad_entropy, dense if out is logits else logits, token_ids, mask,
            temperature, softcap, vocab_size, found, dense, compact,
        )  # fmt: skip
        return out.copy_(dense)
    rows, _rows_data = _rows(logits)
    out_rows, _out_data = _rows(out)
    ids, taken, temperatures = _flat(token_ids), _flat(mask), _per_token(temperature)
    in_logprobs = None if grad_logprobs is None else _flat(grad_logprobs.float())
    in_entropy = None if grad_entropy is None else _flat(grad_entropy.float())
    found = found.contiguous()
    _native.logprob_backward(
        rows,
        _TYPES[logits.dtype],
        _view(ids),
        _view(taken),
        _view(temperatures),
        temperature if isinstance(temperature, float) else 1.0,
        softcap or 0.0,
        token_ids.numel(),
        vocab_size,
        torch.get_num_threads(),
        _view(in_logprobs),
        _view(in_entropy),
        found.data_ptr(),
        out_rows,
        out.shape[-1],
        compact,
    )
    return out


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
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(x.shape[:-1], x.stride(), strict=False):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    offsets = offsets.reshape(-1)
    return (x.data_ptr(), offsets.data_ptr(), 0), (x, offsets)


def _per_token(temperature: float | Tensor) -> Tensor | None:
    return _flat(temperature.float()) if isinstance(temperature, Tensor) else None


def _flat(x: Tensor | None) -> Tensor | None:
    """Return a tensor per token so that one stride leads through it."""
    return x if x is None or x.is_contiguous() or x.dim() == 1 else x.reshape(-1)


def _view(x: Tensor | None) -> int | tuple[int, int, int]:
    if x is None:
        return 0
    if x.dim() and x.is_contiguous():
        return x.data_ptr()
    return x.data_ptr(), x.stride(0) if x.dim() else 0, 0
