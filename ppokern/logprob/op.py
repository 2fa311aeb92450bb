"""Log-probs of selected tokens from logits: public functions and their derivatives."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ppokern import _backend, _check, _library
from ppokern.logprob import kernel_native, reference
from ppokern.logprob.reference import Rows

KERNELS = {
    "torch": reference,
    "cpu": kernel_native,
    "cuda": kernel_native.CUDA,
    "triton": "ppokern.logprob.kernel_triton",
}


@_library.loadable
class LogProbs(NamedTuple):
    """Log-probs of the selected tokens and the entropies of their distributions, both in nats."""

    logprobs: Tensor
    entropy: Tensor


def _forward(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    softcap: float | None,
    vocab_size: int,
    with_entropy: bool,
    backend: str,
    inplace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _check.arithmetic(logits, temperatures)
    check_numbers(temperature, softcap, dtype)
    kernel = _backend.select("selected_logprobs", KERNELS, backend, logits.device, dtype)
    scale = temperature if temperatures is None else temperatures
    x = Rows(logits, token_ids, mask, scale, softcap, vocab_size)
    return kernel.forward(x, with_entropy, dtype)


def _forward_fake(
    logits: Tensor, token_ids: Tensor, mask: Any, temperatures: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    dtype = _check.arithmetic(logits, temperatures)
    shape, with_entropy = token_ids.shape, options[3]
    shapes = shape, shape if with_entropy else (0,), (*shape, 4)
    return tuple(logits.new_empty(s, dtype=dtype) for s in shapes)


def _gradient(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    found: Tensor,
    temperature: float,
    softcap: float | None,
    vocab_size: int,
    backend: str,
    inplace: bool = False,
) -> Tensor:
    kernel = _backend.select("selected_logprobs", KERNELS, backend, logits.device, found.dtype)
    inplace = inplace and not _overlaps(logits)
    out = logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
    if inplace:
        torch.autograd.graph.increment_version(logits)
    scale = temperature if temperatures is None else temperatures
    x = Rows(logits, token_ids, mask, scale, softcap, vocab_size)
    return kernel.backward(grad_logprobs, grad_entropy, x, found, out)


def _overlaps(x: Tensor) -> bool:
    """Return whether elements share memory, as in an expanded tensor."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _gradient_fake(grad_logprobs: Any, grad_entropy: Any, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:4], output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.options = inputs[4:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Any, *grads: Any) -> tuple:
    temperature, softcap, vocab_size, with_entropy, backend, inplace = ctx.options
    grad_logprobs, grad_entropy = grads[0], grads[1] if with_entropy else None
    if grad_logprobs is None and grad_entropy is None:
        return (None,)
    return gradient(
        grad_logprobs, grad_entropy, *ctx.saved_tensors, temperature, softcap, vocab_size, backend,
        inplace and not ctx.compiled,  # a compiled graph plans its own memory
    ),  # fmt: skip


_selected_logprobs = _library.register(
    "selected_logprobs",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_backward,
    gradient=_gradient,
    gradient_fake=_gradient_fake,
    learned=1,
)


def checked_temperature(
    temperature: float | Tensor, token_ids: Tensor, mask: Tensor | None, *dtyped: Tensor | None
) -> tuple[float, Tensor | None]:
    """Check a temperature; return a number, and a tensor without a gradient in place of it.

    The tensor is 0-d or of ``token_ids``' shape; ops check the number when they run. `dtyped` are
    the tensors that the dtype of the arithmetic hangs on.
    """
    if not isinstance(temperature, Tensor):
        return _check.number("temperature", temperature), None
    temperature = _check.tensor("temperature", temperature.detach(), _check.NUMBERS)
    shape, device = token_ids.shape, token_ids.device
    if temperature.device != device and (temperature.dim() or temperature.device.type != "cpu"):
        _check.fail("temperature", f"a tensor on {device}", f"one on {temperature.device}")
    dtype = _check.arithmetic(temperature, *dtyped)
    temperature, (low, high) = temperature.to(dtype), _check.range_of(dtype)
    if temperature.dim():
        try:
            temperature = temperature.expand(shape)
        except RuntimeError:
            _check.fail(
                "temperature", f"a shape that fits {tuple(shape)}", tuple(temperature.shape)
            )
    good = (temperature >= low) & (temperature <= high)
    if not _check.values_of(temperature):
        return 1.0, temperature.masked_fill(~good, torch.nan)
    bad = ~good
    if temperature.dim():
        bad = bad & (token_ids != -100) if mask is None else bad & mask & (token_ids != -100)
    if (at := _check.first(bad)) is not None:
        got = f"{temperature.reshape(-1)[at].item()} at {_check.place(at, bad.shape)}"
        _check.fail("temperature", f"positive numbers that {str(dtype)[6:]} holds", got)
    return 1.0, temperature


def checked_softcap(softcap: float | None) -> float | None:
    """Check that a softcap is a number."""
    return None if softcap is None else _check.number("softcap", softcap)


def check_numbers(temperature: float, softcap: float | None, dtype: torch.dtype) -> None:
    """Check the numbers of a call in the dtype that they are used in."""
    _check.positive("temperature", temperature, dtype)
    if softcap is not None:
        _check.positive("softcap", softcap, dtype)


def checked_vocab_size(vocab_size: int | None, width: int) -> int:
    """Check a vocabulary size against the number of columns, which is the default."""
    if vocab_size is None:
        return width
    return _check.integer("vocab_size", vocab_size, 1, width)


def _logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    vocab_size: int | None,
    inplace_backward: bool,
    with_entropy: bool,
) -> LogProbs:
    _check.tensor("logits", logits)
    if logits.dim() == 0:
        _check.fail("logits", "shape (..., V)", "a 0-d tensor")
    _check.like("token_ids", token_ids, logits.shape[:-1], logits.device, _check.INTEGERS)
    _check.mask_like("mask", mask, token_ids.shape, logits.device)
    vocab_size = checked_vocab_size(vocab_size, logits.shape[-1])
    ids = _check.as_int64(token_ids)
    temperature, temperatures = checked_temperature(temperature, ids, mask, logits)
    softcap = checked_softcap(softcap)
    _check.token_ids(ids, mask, vocab_size)
    backend = _backend.asked_for()
    logprobs, entropy, *_ = _selected_logprobs(
        logits, ids, mask, temperatures, temperature, softcap, vocab_size, with_entropy, backend,
        inplace_backward,
    )  # fmt: skip
    return LogProbs(logprobs, entropy)


def selected_logprobs(
    logits: Float[Tensor, "*batch V"],
    token_ids: Integer[Tensor, "*batch"],
    *,
    mask: Bool[Tensor, "*batch"] | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
) -> Float[Tensor, "*batch"]:
    """Log-probs of selected tokens, without a softmax over the vocabulary being kept.

    ``z = logits``, then ``z = softcap * tanh(z / softcap)``, then ``z = z / temperature``; the
    result is ``z[id] - logsumexp(z)``.

    Args:
        logits: ``(..., V)``, float32, bfloat16, float16 or float64, any strides. Position `i`
            scores position `i` of `token_ids`: nothing is shifted.
        token_ids: ``(...)``, any integer dtype. -100 counts as masked.
        mask: ``(...)``, True = take part.
        temperature: above 0; a tensor is broadcast to `token_ids` (one per token). Takes no
            gradient.
        softcap: above 0, in logits; None = none.
        vocab_size: columns from there on are padding: outside the sum, without gradient.
        inplace_backward: let the gradient take the storage of `logits` and raise its version.
            Overlapping logits (expanded ones), and a graph under `torch.compile`, take new storage.

    Returns:
        ``(...)``, nats, float32 (float64 where a tensor is).

    Masking: what stands at a masked position is never read; its log-prob and gradient are 0.

    Numerics: the maximum is subtracted before the temperature divides. A logit of ``-inf`` is a
    forbidden token: log-prob ``-inf``, as for every token of a row of nothing else, whose gradient
    is 0. A bfloat16 gradient below 2^-126 may be 0, where a CPU's own instruction rounds it.

    Raises:
        IndexError: an unmasked id outside ``[0, vocab_size)``, named with its position. On CUDA the
            row is NaN instead unless `set_validation` is on; under `torch.compile` always.
        ValueError: a shape, device or number that does not fit.
        TypeError: a dtype that does not fit.
    """
    return _logprobs(
        logits, token_ids, mask, temperature, softcap, vocab_size, inplace_backward, False
    ).logprobs


def selected_logprobs_with_entropy(
    logits: Float[Tensor, "*batch V"],
    token_ids: Integer[Tensor, "*batch"],
    *,
    mask: Bool[Tensor, "*batch"] | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
) -> LogProbs:
    """Log-probs of selected tokens and the entropy of each distribution, in one pass.

    As `selected_logprobs`, with ``entropy = -sum_j p_j log p_j``, ``p = softmax(z)``. Both outputs
    are differentiable.

    Args:
        logits: see `selected_logprobs`, as for all arguments.
        token_ids: see there.
        mask: see there.
        temperature: see there.
        softcap: see there.
        vocab_size: see there.
        inplace_backward: see there.

    Returns:
        ``LogProbs(logprobs, entropy)``, both ``(...)``, nats.

    Numerics: ``0 log 0 = 0``; a row of nothing but ``-inf`` has entropy 0.

    Raises:
        IndexError, ValueError, TypeError: see `selected_logprobs`.
    """
    return _logprobs(
        logits, token_ids, mask, temperature, softcap, vocab_size, inplace_backward, True
    )
