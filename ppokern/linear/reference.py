"""Log-probs and the PPO loss from hidden states: one loop over chunks of logits, GEMMs by torch.

A chunk's logits stand in one buffer that is used again; its row passes are those of `logprob`,
which overwrite it with its gradient. The weight's gradient is accumulated in float32.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ppokern.logprob.reference import Rows
from ppokern.ppo_loss.reference import TokenSlopes

_ROW_COPIES = 8  # float copies of a logit that a row pass holds for the block it works on
_COLUMNS = 512  # the fewest of a slice, whatever the limit: a GEMM of fewer takes as long


class HeadInputs(NamedTuple):
    """What makes the logits of a call: its tensors, but for the mask."""

    hidden: Tensor  # (..., H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    token_ids: Tensor  # (...), int64
    temperatures: Tensor | None  # 0-d or (...), in place of the number


class HeadOptions(NamedTuple):
    """How they are made."""

    temperature: float
    softcap: float | None
    vocab_size: int
    max_logits_bytes: int
    compact: bool
    with_entropy: bool


class HeadGradients(NamedTuple):
    """Gradients of what is trained, empty where not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


class Head(NamedTuple):
    """What turns hidden states into tempered logits, but for the hidden states."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    temperature: float | Tensor  # a number, 0-d or (N,)
    softcap: float | None
    vocab_size: int
    dtype: torch.dtype  # of the arithmetic from the logits on


class Plan(NamedTuple):
    """How a call is cut, so that it holds `max_logits_bytes` and a few percent more."""

    rows: Tensor | None  # numbers of the rows to compute; None: all, which no index then copies
    valid: Tensor  # (N,) which rows are unmasked
    compact: bool  # whether `rows` leaves masked rows out
    dtype: torch.dtype  # of the GEMMs: that of hidden states and weight together
    chunk: int  # rows of a chunk
    block: int  # logits that a row pass looks at in one go
    columns: int  # of a slice of the weight, where it is cast or accumulated slice by slice
    single: bool  # whether one chunk is all


class Chunk(NamedTuple):
    """Some rows of a call, with their logits in the buffer."""

    rows: Tensor | slice  # (n,) their numbers
    hidden: Tensor  # (n, H), in the GEMM's dtype
    logits: Tensor  # (n, vocab_size), in the GEMM's dtype; overwritten by their gradient
    temperature: float | Tensor  # a number, 0-d or (n,)


LossPass = Callable[
    [Chunk, Head, Plan, Tensor, TokenSlopes, Tensor, Tensor | None], Tensor | None
]  # from logits to their gradient, see `two_passes`


def plan(hidden: Tensor, head: Head, valid: Tensor, compact: bool, max_logits_bytes: int) -> Plan:
    """Cut a call into few, equal chunks of at most `max_logits_bytes`, at least a row.

    Leaving masked rows out reads their count back from the device.
    """
    rows = valid.nonzero().squeeze(-1) if compact else None
    if rows is not None and len(rows) == len(valid):
        rows = None
    count = len(valid if rows is None else rows)
    wide = head.dtype == torch.float64
    dtype = head.dtype if wide else torch.promote_types(hidden.dtype, head.weight.dtype)
    width, states = max(1, head.vocab_size), max(1, hidden.shape[1])
    row = width * dtype.itemsize
    most = max_logits_bytes // row
    # what a row needs beside its logits: its states and their gradient; and a block's float copies
    copies = _ROW_COPIES * width * head.dtype.itemsize
    spare = int(1.05 * max_logits_bytes) - copies
    if dtype.itemsize == 2 or dtype != head.weight.dtype:  # slices of a wide head are not small
        slices = _COLUMNS * 2 * states * head.dtype.itemsize - max_logits_bytes // 32
        spare -= min(max(0, slices), max_logits_bytes // 2)
    most = max(1, min(most, spare // (row + 3 * states * head.dtype.itemsize)))
    chunks = max(1, -(-count // most))
    chunk = max(1, -(-count // chunks))
    cache = 2**18 if hidden.device.type == "cpu" else 2**26
    block = min(cache, max_logits_bytes // (24 * copies // width))
    columns = max_logits_bytes // 32 // (head.dtype.itemsize * (2 * states + chunk))
    columns = max(_COLUMNS, columns)
    return Plan(rows, valid, compact, dtype, chunk, max(width, block), columns, chunks == 1)


def chunks(hidden: Tensor, head: Head, how: Plan) -> Iterator[Chunk]:
    """Yield rows of hidden states ``(N, H)`` in chunks, with their logits in the one buffer."""
    buffer = hidden.new_empty((how.chunk, head.vocab_size), dtype=how.dtype)
    count, size = len(how.valid), how.chunk
    parts = (slice(i, i + size) for i in range(0, count, size))
    for part in parts if how.rows is None else how.rows.split(size):
        states = hidden[part].to(how.dtype)
        if not how.compact:  # a GEMM reads masked rows, and 0 * NaN is NaN
            states = states.masked_fill(~how.valid[part].unsqueeze(-1), 0.0)
        logits = _project(states, head, how, buffer[: len(states)])
        temperature = head.temperature
        if isinstance(temperature, Tensor) and temperature.dim():
            temperature = temperature[part]
        yield Chunk(part, states, logits, temperature)


def forward(
    hidden: Tensor,
    head: Head,
    token_ids: Tensor,
    how: Plan,
    with_entropy: bool,
    kernel: ModuleType,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropy, and what `kernel`'s backward needs; `kernel` passes rows."""
    found = hidden.new_zeros((len(token_ids), 4), dtype=head.dtype)
    for chunk in chunks(hidden, head, how):
        x = _rows_of(chunk, head, how, token_ids)
        found[chunk.rows] = kernel.forward(x, with_entropy, head.dtype)[2]
    return found[:, 0].clone(), found[:, 1].clone(), found


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    head: Head,
    token_ids: Tensor,
    how: Plan,
    found: Tensor,
    needed: tuple[bool, bool, bool],
    kernel: ModuleType,
) -> HeadGradients:
    """Return the gradients of hidden states, weight and bias; those not `needed` are empty."""
    gradients = Gradients(hidden, head, needed, how)
    for chunk in chunks(hidden, head, how):
        part = chunk.rows
        kernel.backward(
            None if grad_logprobs is None else grad_logprobs[part],
            None if grad_entropy is None else grad_entropy[part],
            _rows_of(chunk, head, how, token_ids), found[part], chunk.logits,
        )  # fmt: skip
        gradients.add(part, chunk.logits, chunk.hidden)
    return gradients.result()


def loss_gradients(
    hidden: Tensor,
    head: Head,
    token_ids: Tensor,
    how: Plan,
    slopes: TokenSlopes,
    with_entropy: bool,
    needed: tuple[bool, bool, bool],
    loss_pass: LossPass,
) -> tuple[Tensor, Tensor | None, HeadGradients]:
    """Return log-probs and entropies ``(N,)`` and the gradients of a loss of them, in three GEMMs.

    Gradients of a mean over many tokens are too small for float16: it holds those of logits times a
    power of two, and those of its parameters are float32 (until the backward pass has scaled them).

    Args:
        hidden: ``(N, H)``.
        head: see `Head`.
        token_ids: ``(N,)``.
        how: see `Plan`; a compact one leaves rows without slope out of the last two GEMMs too.
        slopes: of the loss in the log-probs and entropies of its tokens.
        with_entropy: whether entropies are made.
        needed: whether hidden states, weight and bias want a gradient.
        loss_pass: turns a chunk's logits into their gradient, see `two_passes`.
    """
    logprobs = hidden.new_zeros(len(token_ids), dtype=head.dtype)
    entropy = torch.zeros_like(logprobs) if with_entropy else None
    power = slopes.raise_to_one() if how.dtype == torch.float16 else None
    gradients = Gradients(hidden, head, needed, how, held_dtype)
    for chunk in chunks(hidden, head, how):
        kept, part = loss_pass(chunk, head, how, token_ids, slopes, logprobs, entropy), chunk.rows
        if kept is None:
            gradients.add(part, chunk.logits, chunk.hidden)
        else:
            of_call = kept + part.start if isinstance(part, slice) else part[kept]
            gradients.add(of_call, chunk.logits[: len(kept)], chunk.hidden[kept])
    return logprobs, entropy, gradients.result(power)


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a loss's gradient of a parameter of `dtype` has before it is scaled."""
    return torch.float32 if dtype == torch.float16 else dtype


def two_passes(
    kernel: ModuleType,
    chunk: Chunk,
    head: Head,
    how: Plan,
    token_ids: Tensor,
    slopes: TokenSlopes,
    logprobs: Tensor,
    entropy: Tensor | None,
) -> Tensor | None:
    """Overwrite a chunk's logits with their gradient: both passes of `kernel`, slopes in between.

    Args:
        kernel: of the log-probs.
        chunk: its logits are overwritten; under a compact plan rows without slope are left out.
        head: see `Head`.
        how: see `Plan`.
        token_ids: ``(N,)``, of the call.
        slopes: of the call.
        logprobs: ``(N,)``, of the call; those of the chunk's rows are written.
        entropy: the same, None without.

    Returns:
        Which of the chunk's rows are left, in front of the others; None for all.
    """
    part, x = chunk.rows, _rows_of(chunk, head, how, token_ids)
    own_logprobs, own_entropy, found = kernel.forward(x, entropy is not None, head.dtype)
    logprobs[part] = own_logprobs
    if entropy is not None:
        entropy[part] = own_entropy
    in_logprobs, in_entropy = slopes(own_logprobs, part)
    kept = None
    if how.compact:
        slope = in_logprobs if in_entropy is None else in_logprobs.abs() + in_entropy.abs()
        use = how.valid[part] & (slope != 0)
        x, kept = x._replace(mask=use), kept_rows(use)
    compact = kept is not None
    kernel.backward(in_logprobs, in_entropy, x, found, chunk.logits, compact=compact)
    return kept


def kept_rows(used: Tensor) -> Tensor | None:
    """Return the numbers of the rows that are used, None for all; reads their count back."""
    kept = used.nonzero().squeeze(-1)
    return None if len(kept) == len(used) else kept


class Gradients:
    """The gradients of hidden states, weight and bias, added up chunk by chunk."""

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        needed: tuple[bool, bool, bool],
        how: Plan,
        result_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    ) -> None:
        """Allocate the gradients that are `needed`; the others stay empty."""
        self._head, self._needed, self._how = head, needed, how
        weight, empty, bias = head.weight, hidden.new_empty, head.bias
        self._weight_dtype = result_dtype(weight.dtype)
        self._bias_dtype = None if bias is None else result_dtype(bias.dtype)
        # rounded once: in a single chunk as it is added, else at the end
        self._sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        dtype = self._weight_dtype if how.single else self._sum_dtype
        self._hidden = (
            hidden.new_zeros(hidden.shape, dtype=result_dtype(hidden.dtype))
            if needed[0]
            else empty(0)
        )
        # its rows below vocab_size are written by the first chunk: zeros would be one more pass
        self._weight = weight.new_empty(weight.shape, dtype=dtype) if needed[1] else empty(0)
        self._weight[head.vocab_size :] = 0
        self._begun = False
        self._bias = (
            weight.new_zeros(weight.shape[0], dtype=self._sum_dtype) if needed[2] else empty(0)
        )

    def add(self, rows: Tensor | slice, logits_grad: Tensor, hidden: Tensor) -> None:
        """Add a chunk: logits' gradient ``(n, vocab_size)`` and its hidden states ``(n, H)``."""
        need_hidden, need_weight, need_bias = self._needed
        width = self._head.vocab_size
        if need_hidden:
            grad = _times_weight(logits_grad, self._head.weight[:width], self._how)
            self._hidden[rows] = grad.to(self._hidden.dtype)
        if need_weight:
            _add_outer(
                self._weight[:width], logits_grad, hidden, self._sum_dtype, self._how, self._begun
            )
            self._begun = True
        if need_bias:
            self._bias[:width] += logits_grad.sum(0, dtype=self._sum_dtype)

    def result(self, power: Tensor | None = None) -> HeadGradients:
        """Return the gradients in their dtypes, divided by `power`."""
        if not self._begun:
            self._weight.zero_()
        hidden, weight, bias = self._hidden, self._weight, self._bias
        if power is not None:
            hidden, weight, bias = (x.div_(power) for x in (hidden, weight, bias))
        if self._needed[1]:
            weight = weight.to(self._weight_dtype)
        if self._needed[2] and self._bias_dtype is not None:
            bias = bias.to(self._bias_dtype)
        return HeadGradients(hidden, weight, bias)


def _rows_of(chunk: Chunk, head: Head, how: Plan, token_ids: Tensor) -> Rows:
    """Return what the passes over a chunk's logits take."""
    ids, valid = token_ids[chunk.rows], how.valid[chunk.rows]
    return Rows(
        chunk.logits, ids, valid, chunk.temperature, head.softcap, head.vocab_size, how.block
    )


def _slices(weight: Tensor, how: Plan) -> Iterator[slice]:
    return (slice(i, i + how.columns) for i in range(0, weight.shape[0], how.columns))


def _project(hidden: Tensor, head: Head, how: Plan, out: Tensor) -> Tensor:
    """Write ``hidden @ weight.T + bias`` to `out`; a weight of another dtype is cast in slices."""
    weight = head.weight[: head.vocab_size]
    bias = None if head.bias is None else head.bias[: head.vocab_size].to(how.dtype)
    for part in [slice(None)] if weight.dtype == how.dtype else _slices(weight, how):
        columns = weight[part].to(how.dtype).t()
        if bias is None:
            torch.mm(hidden, columns, out=out[:, part])
        else:
            torch.addmm(bias[part], hidden, columns, out=out[:, part])
    return out


def _times_weight(logits_grad: Tensor, weight: Tensor, how: Plan) -> Tensor:
    if weight.dtype == how.dtype:
        return logits_grad @ weight
    grad = logits_grad.new_zeros(logits_grad.shape[0], weight.shape[1])
    for part in _slices(weight, how):
        grad.addmm_(logits_grad[:, part], weight[part].to(how.dtype))
    return grad


def _add_outer(
    total: Tensor,
    logits_grad: Tensor,
    hidden: Tensor,
    dtype: torch.dtype,
    how: Plan,
    begun: bool,
) -> None:
    """Add ``logits_grad.T @ hidden`` to `total`, with no rounding below `dtype` but the last.

    What stands in a total that has not `begun` is not read.
    """
    if total.dtype == logits_grad.dtype:
        total.addmm_(logits_grad.t(), hidden, beta=int(begun))
        return
    wide = hidden.to(dtype)
    for part in _slices(total, how):
        grad = logits_grad[:, part].to(dtype).t()
        if total.dtype == dtype:
            total[part].addmm_(grad, wide, beta=int(begun))
        else:  # a single chunk
            total[part] = (grad @ wide).to(total.dtype)
