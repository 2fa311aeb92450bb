"""Log-probs of selected tokens from logits: public functions and their derivatives."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ppokern import _backend, _check, _library
from ppokern.logprob import kernel_native, reference
from ppokern.logprob.reference import Inputs, Options, Rows

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


class _Output(NamedTuple):
    logprobs: Tensor
    entropy: Tensor  # empty where it was not asked for
    found: Tensor  # see `reference.forward`


def _rows(x: Inputs, o: Options) -> Rows:
    scale = o.temperature if x.temperatures is None else x.temperatures
    return Rows(x.logits, x.token_ids, x.mask, scale, o.softcap, o.vocab_size)


def _forward(x: Inputs, o: Options, inplace: bool, backend: str) -> _Output:
    dtype = _check.arithmetic(x.logits, x.temperatures)
    check_numbers(o.temperature, o.softcap, dtype)
    kernel = _backend.select("selected_logprobs", KERNELS, backend, x.logits.device, dtype)
    return _Output(*kernel.forward(_rows(x, o), o.with_entropy, dtype))


def _forward_fake(x: Inputs, o: Options, inplace: bool, backend: str) -> _Output:
    dtype, shape = _check.arithmetic(x.logits, x.temperatures), x.token_ids.shape
    shapes = shape, shape if o.with_entropy else (0,), (*shape, 4)
    return _Output(*(x.logits.new_empty(s, dtype=dtype) for s in shapes))


def _keep(x: Inputs, o: Options, inplace: bool, backend: str, out: _Output) -> tuple:
    return x, out.found, o, inplace, backend


def _backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    needed: tuple,
    x: Inputs,
    found: Tensor,
    o: Options,
    inplace: bool,
    backend: str,
) -> Tensor:
    logits = x.logits
    kernel = _backend.select("selected_logprobs", KERNELS, backend, logits.device, found.dtype)
    inplace = inplace and not _overlaps(logits)
    out = logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
    if inplace:
        torch.autograd.graph.increment_version(logits)
    grad_entropy = grad_entropy if o.with_entropy else None
    return kernel.backward(grad_logprobs, grad_entropy, _rows(x, o), found, out)


def _overlaps(x: Tensor) -> bool:
    """Return whether elements share memory, as in an expanded tensor."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _backward_fake(
    grad_logprobs: Any, grad_entropy: Any, needed: Any, x: Inputs, *rest: Any
) -> Tensor:
    return torch.empty_like(x.logits, memory_format=torch.contiguous_format)


_selected_logprobs = _library.register(
    "selected_logprobs",
    _forward,
    _forward_fake,
    trained=("logits",),
    differentiable=2,
    keep=_keep,
    backward=_backward,
    backward_fake=_backward_fake,
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
    x = Inputs(logits, ids, mask, temperatures)
    o = Options(temperature, softcap, vocab_size, with_entropy)
    # a graph plans its own memory
    inplace = inplace_backward and not _library.makes_graph(x)
    out = _selected_logprobs(x, o, inplace, _backend.asked_for())
    return LogProbs(out.logprobs, out.entropy)


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
