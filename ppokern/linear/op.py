"""Log-probs of selected tokens from hidden states: public functions and their derivatives."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ppokern import _backend, _check, _library
from ppokern.linear import reference
from ppokern.linear.reference import Head, HeadGradients, HeadInputs, HeadOptions, Plan
from ppokern.logprob.op import (
    KERNELS,
    LogProbs,
    check_numbers,
    checked_softcap,
    checked_temperature,
    checked_vocab_size,
)


def valid_tokens(token_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return, flat, which tokens take part."""
    valid = token_ids.reshape(-1) != -100
    return valid if mask is None else valid & mask.reshape(-1)


def arithmetic(h: HeadInputs) -> torch.dtype:
    """Return the dtype of a call's arithmetic."""
    return _check.arithmetic(h.hidden, h.weight, h.bias, h.temperatures)


def laid_out(
    h: HeadInputs, how: HeadOptions, valid: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Head, Plan]:
    """Return hidden states and ids per row, the head, and how the call is cut."""
    scale = how.temperature
    if h.temperatures is not None:
        scale = h.temperatures.reshape(-1) if h.temperatures.dim() else h.temperatures
    head = Head(h.weight, h.bias, scale, how.softcap, how.vocab_size, dtype)
    hidden = h.hidden.reshape(len(valid), h.hidden.shape[-1])
    plan = reference.plan(hidden, head, valid, how.compact, how.max_logits_bytes)
    return hidden, h.token_ids.reshape(-1), head, plan


def gradients_like(
    h: HeadInputs,
    needed: tuple,
    result_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> HeadGradients:
    """Return what has the shapes of the gradients that a kernel returns: empty where not needed."""
    new_empty = h.hidden.new_empty
    return HeadGradients(
        *(
            p.new_empty(p.shape, dtype=result_dtype(p.dtype))
            if p is not None and need
            else new_empty(0)
            for p, need in zip((h.hidden, h.weight, h.bias), needed, strict=True)
        )
    )


class _Output(NamedTuple):
    logprobs: Tensor
    entropy: Tensor  # 0 where it was not asked for
    found: Tensor  # see `reference.forward` of the log-probs


def _forward(h: HeadInputs, mask: Tensor | None, how: HeadOptions, backend: str) -> _Output:
    dtype, device, shape = arithmetic(h), h.hidden.device, h.token_ids.shape
    check_numbers(how.temperature, how.softcap, dtype)
    kernel = _backend.select("linear_selected_logprobs", KERNELS, backend, device, dtype)
    hidden, ids, head, plan = laid_out(h, how, valid_tokens(h.token_ids, mask), dtype)
    logprobs, entropy, found = reference.forward(hidden, head, ids, plan, how.with_entropy, kernel)
    return _Output(logprobs.view(shape), entropy.view(shape), found.view(*shape, 4))


def _forward_fake(h: HeadInputs, mask: Tensor | None, how: HeadOptions, backend: str) -> _Output:
    dtype, shape = arithmetic(h), h.token_ids.shape
    return _Output(*(h.hidden.new_empty(s, dtype=dtype) for s in (shape, shape, (*shape, 4))))


def _keep(
    h: HeadInputs, mask: Tensor | None, how: HeadOptions, backend: str, out: _Output
) -> tuple:
    return h, mask, out.found, how, backend


def _backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    needed: tuple,
    h: HeadInputs,
    mask: Tensor | None,
    found: Tensor,
    how: HeadOptions,
    backend: str,
) -> HeadGradients:
    dtype, device = found.dtype, h.hidden.device
    kernel = _backend.select("linear_selected_logprobs", KERNELS, backend, device, dtype)
    hidden, ids, head, plan = laid_out(h, how, valid_tokens(h.token_ids, mask), dtype)
    in_logprobs = None if grad_logprobs is None else grad_logprobs.reshape(-1)
    in_entropy = None
    if grad_entropy is not None and how.with_entropy:
        in_entropy = grad_entropy.reshape(-1)
    gradients = reference.backward(
        in_logprobs, in_entropy, hidden, head, ids, plan, found.view(-1, 4), needed, kernel
    )
    if needed[0]:
        gradients = gradients._replace(hidden=gradients.hidden.view(h.hidden.shape))
    return gradients


def _backward_fake(
    grad_logprobs: Any, grad_entropy: Any, needed: tuple, h: HeadInputs, *rest: Any
) -> HeadGradients:
    return gradients_like(h, needed)


_linear_op = _library.register(
    "linear_selected_logprobs",
    _forward,
    _forward_fake,
    trained=HeadGradients._fields,
    differentiable=2,
    keep=_keep,
    backward=_backward,
    backward_fake=_backward_fake,
)


def checked_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    vocab_size: int | None,
    max_logits_bytes: int,
    compact: bool,
    with_entropy: bool,
) -> tuple[HeadInputs, HeadOptions]:
    """Check what all linear ops take."""
    _check.tensor("hidden", hidden)
    if hidden.dim() == 0:
        _check.fail("hidden", "shape (..., H)", "a 0-d tensor")
    _check.tensor("weight", weight)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        _check.fail("weight", f"shape (V, {hidden.shape[-1]})", tuple(weight.shape))
    if weight.device != hidden.device:
        _check.fail("weight", f"a tensor on {hidden.device}", f"one on {weight.device}")
    _check.like("bias", bias, weight.shape[:1], hidden.device, optional=True)
    _check.like("token_ids", token_ids, hidden.shape[:-1], hidden.device, _check.INTEGERS)
    _check.mask_like("mask", mask, token_ids.shape, hidden.device)
    max_logits_bytes = _check.integer("max_logits_bytes", max_logits_bytes, 1)
    size = checked_vocab_size(vocab_size, weight.shape[0])
    ids = _check.as_int64(token_ids)
    number, temperatures = checked_temperature(temperature, ids, mask, hidden, weight, bias)
    _check.token_ids(ids, mask, size)
    cap = checked_softcap(softcap)
    how = HeadOptions(number, cap, size, max_logits_bytes, compact, with_entropy)
    return HeadInputs(hidden, weight, bias, ids, temperatures), how


def linear_logprobs(h: HeadInputs, mask: Tensor | None, how: HeadOptions) -> LogProbs:
    """Run the op on checked arguments; its entropy is 0 where none was asked for."""
    out = _linear_op(h, mask, how, _backend.asked_for())
    return LogProbs(out.logprobs, out.entropy)


def linear_selected_logprobs(
    hidden: Float[Tensor, "*batch H"],
    weight: Float[Tensor, "V H"],
    token_ids: Integer[Tensor, "*batch"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    mask: Bool[Tensor, "*batch"] | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    max_logits_bytes: int = 2**28,
    compact: bool = True,
) -> Float[Tensor, "*batch"]:
    """Log-probs of selected tokens straight from hidden states: the logits are never all there.

    Equals `selected_logprobs` on ``hidden @ weight.T + bias``. The logits are made chunk by chunk,
    again in the backward pass, for unmasked rows alone. The GEMMs are those of the tensors' own
    dtypes, inside autocast too.

    Args:
        hidden: ``(..., H)``, float32, bfloat16, float16 or float64. Position `i` scores position
            `i` of `token_ids`.
        weight: ``(V, H)``, of the head; its dtype may differ from that of `hidden`.
        token_ids: ``(...)``, any integer dtype. -100 counts as masked.
        bias: ``(V,)``.
        mask: ``(...)``, True = take part.
        temperature: above 0; a tensor is broadcast to `token_ids`.
        softcap: above 0, in logits; None = none.
        vocab_size: rows of `weight` from there on are padding.
        max_logits_bytes: bound of the logits held at a time, forward and backward; at least a row,
            and of a head in 16 bits, or of another dtype than `hidden`, 512 rows in float32.
        compact: leave masked rows out of the GEMMs; on CUDA that reads their count back, once.

    Returns:
        ``(...)``, nats, float32 (float64 where a tensor is).

    Masking, Numerics: see `selected_logprobs`. A row's bits follow from its logits, which torch's
    GEMM may round in another way where a chunk has few rows (seen in float32, below 16). The
    gradient of the weight is accumulated in float32; a frozen input costs no GEMM.

    Raises:
        IndexError, ValueError, TypeError: see `selected_logprobs`.
    """
    h, how = checked_head(
        hidden, weight, bias, token_ids, mask, temperature, softcap, vocab_size, max_logits_bytes,
        compact, with_entropy=False,
    )  # fmt: skip
    return linear_logprobs(h, mask, how).logprobs


def linear_selected_logprobs_with_entropy(
    hidden: Float[Tensor, "*batch H"],
    weight: Float[Tensor, "V H"],
    token_ids: Integer[Tensor, "*batch"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    mask: Bool[Tensor, "*batch"] | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    max_logits_bytes: int = 2**28,
    compact: bool = True,
) -> LogProbs:
    """Log-probs of selected tokens and entropies, straight from hidden states.

    Equals `selected_logprobs_with_entropy` on ``hidden @ weight.T + bias``; see
    `linear_selected_logprobs`.

    Args:
        hidden: see `linear_selected_logprobs`, as for all arguments.
        weight: see there.
        token_ids: see there.
        bias: see there.
        mask: see there.
        temperature: see there.
        softcap: see there.
        vocab_size: see there.
        max_logits_bytes: see there.
        compact: see there.

    Returns:
        ``LogProbs(logprobs, entropy)``, both ``(...)``, nats.

    Raises:
        IndexError, ValueError, TypeError: see `selected_logprobs`.
    """
    h, how = checked_head(
        hidden, weight, bias, token_ids, mask, temperature, softcap, vocab_size, max_logits_bytes,
        compact, with_entropy=True,
    )  # fmt: skip
    return linear_logprobs(h, mask, how)
