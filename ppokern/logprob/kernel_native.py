"""Log-probs of selected tokens on the CPU in C++: turns tensors into addresses and strides.

Both functions equal those of `reference`, and take the same arguments. Logits are read where they
lie; only where their last dimension is strided are they copied.
"""

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ABSENT = (0, 0, 0)


def forward(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperature: Tensor,
    softcap: float | None,
    vocab_size: int,
    with_entropy: bool,
    dtype: torch.dtype,
    block: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs, entropy (empty without), row maxima and log-sums, shaped as `token_ids`."""
    from ppokern import _native  # absent where the C++ kernels were not built

    logprobs = torch.empty(token_ids.shape, dtype=torch.float32)
    maxima, log_sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
    entropy = torch.empty_like(logprobs) if with_entropy else torch.empty(0)
    logits = logits if _last_is_dense(logits) else logits.contiguous()
    rows, _offsets = _rows(logits)
    ids, taken, scale = _flat(token_ids.long()), _flat(mask), _flat(temperature.float())
    _native.logprob_forward(
        rows,
        _TYPES[logits.dtype],
        _view(ids),
        _view(taken),
        _view(scale),
        softcap or 0.0,
        token_ids.numel(),
        vocab_size,
        torch.get_num_threads(),
        _view(logprobs),
        _view(entropy) if with_entropy else _ABSENT,
        _view(maxima),
        _view(log_sums),
    )
    return logprobs, entropy, maxima, log_sums


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperature: Tensor,
    softcap: float | None,
    vocab_size: int,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    compact: bool = False,
    block: int | None = None,
) -> Tensor:
    """Write the gradient of the logits to `out`, which may be `logits` itself, and return it."""
    from ppokern import _native

    if not _last_is_dense(out):
        dense = out.contiguous()
        backward(
            grad_logprobs, grad_entropy, dense if out is logits else logits, token_ids, mask,
            temperature, softcap, vocab_size, saved, dense, compact,
        )  # fmt: skip
        return out.copy_(dense)
    logits = logits if _last_is_dense(logits) else logits.contiguous()
    rows, _offsets = _rows(logits)
    out_rows, _out_offsets = _rows(out)
    ids, taken, scale = _flat(token_ids.long()), _flat(mask), _flat(temperature.float())
    logprobs, entropy, maxima, log_sums = (_flat(x) for x in saved)
    grad_logprobs, grad_entropy = (
        None if g is None else _flat(g.float()) for g in (grad_logprobs, grad_entropy)
    )
    _native.logprob_backward(
        rows,
        _TYPES[logits.dtype],
        _view(ids),
        _view(taken),
        _view(scale),
        softcap or 0.0,
        token_ids.numel(),
        vocab_size,
        torch.get_num_threads(),
        _view(grad_logprobs),
        _view(grad_entropy),
        _view(logprobs),
        _view(entropy),
        _view(maxima),
        _view(log_sums),
        out_rows,
        out.shape[-1],
        compact,
    )
    return out


def _last_is_dense(x: Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def _rows(x: Tensor) -> tuple[tuple[int, int, int], Tensor | None]:
    """Return address, row offsets' address and row stride of ``(..., V)``, and the offsets."""
    if x.dim() == 2:
        return (x.data_ptr(), 0, x.stride(0)), None
    if x.is_contiguous():
        return (x.data_ptr(), 0, x.shape[-1]), None
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(x.shape[:-1], x.stride(), strict=False):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    offsets = offsets.reshape(-1)
    return (x.data_ptr(), offsets.data_ptr(), 0), offsets


def _flat(x: Tensor | None) -> Tensor | None:
    """Return a tensor per token so that one stride leads through it."""
    return x if x is None or x.dim() <= 1 or x.is_contiguous() else x.reshape(-1)


def _view(x: Tensor | None) -> tuple[int, int, int]:
    if x is None:
        return _ABSENT
    return x.data_ptr(), x.stride(0) if x.dim() == 1 else min(x.dim(), 1), 0
