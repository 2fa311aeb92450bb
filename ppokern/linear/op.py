"""Log-probs of selected tokens from hidden states: public functions and their derivatives."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ppokern import _backend, _check, _library
from ppokern.linear import reference
from ppokern.linear.reference import Head
from ppokern.logprob.op import (
    KERNELS,
    LogProbs,
    check_numbers,
    checked_softcap,
    checked_temperature,
    checked_vocab_size,
)


def taken(token_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return, flat, which tokens take part."""
    valid = token_ids.reshape(-1) != -100
    return valid if mask is None else valid & mask.reshape(-1)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    softcap: float | None,
    vocab_size: int,
    with_entropy: bool,
    max_logits_bytes: int,
    compact: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _check.arithmetic(hidden, weight, bias, temperatures)
    check_numbers(temperature, softcap, dtype)
    kernel = _backend.select("linear_selected_logprobs", KERNELS, backend, hidden.device, dtype)
    scale = temperature if temperatures is None else temperatures
    head = Head(weight, bias, scale, softcap, vocab_size, dtype)
    valid = taken(token_ids, mask)
    how = reference.plan(hidden, head, valid, compact, max_logits_bytes)
    return reference.forward(hidden, head, token_ids, how, with_entropy, kernel)


def _forward_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    dtype = _check.arithmetic(hidden, weight, bias, temperatures)
    shape = token_ids.shape
    return tuple(hidden.new_empty(s, dtype=dtype) for s in (shape, shape, (*shape, 4)))


def _gradient(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    found: Tensor,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    temperature: float,
    softcap: float | None,
    vocab_size: int,
    max_logits_bytes: int,
    compact: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = found.dtype
    kernel = _backend.select("linear_selected_logprobs", KERNELS, backend, hidden.device, dtype)
    scale = temperature if temperatures is None else temperatures
    head = Head(weight, bias, scale, softcap, vocab_size, dtype)
    valid = taken(token_ids, mask)
    how = reference.plan(hidden, head, valid, compact, max_logits_bytes)
    return reference.backward(
        grad_logprobs, grad_entropy, hidden, head, token_ids, how,
        found, (need_hidden, need_weight, need_bias), kernel,
    )  # fmt: skip


def _gradient_fake(*args: Any) -> tuple[Tensor, ...]:
    return gradients_like(args[2:5], args[9:12])


def gradients_like(
    parameters: Sequence[Tensor | None],
    needed: Sequence[bool],
    result_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> tuple[Tensor, ...]:
    """Return what has the shapes of the gradients that a kernel returns: empty where not needed."""
    new_empty = next(p for p in parameters if p is not None).new_empty
    return tuple(
        p.new_empty(p.shape, dtype=result_dtype(p.dtype))
        if p is not None and need
        else new_empty(0)
        for p, need in zip(parameters, needed, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *numbers, ctx.with_entropy, max_logits_bytes, compact, backend = inputs[6:]
    ctx.options = *numbers, max_logits_bytes, compact, backend
    ctx.save_for_backward(*inputs[:6], output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Any, *grads: Any) -> tuple:
    grad_logprobs, grad_entropy = grads[0], grads[1] if ctx.with_entropy else None
    needed = ctx.needs_input_grad[:3]
    result: tuple = (None,) * 3
    if grad_logprobs is not None or grad_entropy is not None:
        result = gradient(grad_logprobs, grad_entropy, *ctx.saved_tensors, *needed, *ctx.options)
    return tuple(g if need else None for g, need in zip(result, needed, strict=True))


_linear_op = _library.register(
    "linear_selected_logprobs",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_backward,
    gradient=_gradient,
    gradient_fake=_gradient_fake,
    learned=3,
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
) -> tuple[Tensor, Tensor | None, float, float | None, int, int]:
    """Check what all linear ops take.

    Returns int64 ids, temperatures, temperature, softcap, vocabulary size, bytes of logits.
    """
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
    temperature, temperatures = checked_temperature(temperature, ids, mask, hidden, weight, bias)
    _check.token_ids(ids, mask, size)
    return ids, temperatures, temperature, checked_softcap(softcap), size, max_logits_bytes


def flat_temperatures(temperatures: Tensor | None) -> Tensor | None:
    """Return temperatures per token flat."""
    return (
        temperatures.reshape(-1)
        if temperatures is not None and temperatures.dim()
        else temperatures
    )


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    vocab_size: int | None,
    max_logits_bytes: int,
    compact: bool,
    with_entropy: bool,
) -> LogProbs:
    """Run the op; its entropy is 0 where none was asked for."""
    ids, temperatures, temperature, softcap, size, most = checked_head(
        hidden, weight, bias, token_ids, mask, temperature, softcap, vocab_size, max_logits_bytes
    )
    backend = _backend.asked_for()
    shape = ids.shape
    logprobs, entropy, _ = _linear_op(
        hidden.reshape(ids.numel(), hidden.shape[-1]),
        weight,
        bias,
        ids.reshape(-1),
        None if mask is None else mask.reshape(-1),
        flat_temperatures(temperatures),
        temperature,
        softcap,
        size,
        with_entropy,
        most,
        compact,
        backend,
    )
    return LogProbs(logprobs.view(shape), entropy.view(shape))


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
    return linear_logprobs(
        hidden, weight, token_ids, bias, mask, temperature, softcap, vocab_size, max_logits_bytes,
        compact, False,
    ).logprobs  # fmt: skip


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
    return linear_logprobs(
        hidden, weight, token_ids, bias, mask, temperature, softcap, vocab_size, max_logits_bytes,
        compact, True,
    )  # fmt: skip
