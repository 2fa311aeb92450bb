"""Log-probs of selected tokens in plain torch: the specification, in every dtype, on any device.

The rows are worked through in blocks that stay in cache, so nothing of the size of the logits is
made but their gradient. A row's sum runs over fixed segments: its bits depend on the row alone.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ppokern import token_math as tm

_SEGMENT = 1024  # tokens that are summed in one go
_BLOCK = {"cpu": 2**18, "cuda": 2**26}  # logits of a block


class Inputs(NamedTuple):
    """The tensors of a call."""

    logits: Tensor  # (..., V)
    token_ids: Tensor  # (...), int64
    mask: Tensor | None  # (...)
    temperatures: Tensor | None  # 0-d or (...), in place of the number


class Options(NamedTuple):
    """The numbers of a call."""

    temperature: float
    softcap: float | None
    vocab_size: int
    with_entropy: bool


class Rows(NamedTuple):
    """What both passes take, of every backend."""

    logits: Tensor  # (..., V)
    token_ids: Tensor  # (...)
    mask: Tensor | None  # (...)
    temperature: float | Tensor  # a number, 0-d or (...)
    softcap: float | None
    vocab_size: int
    block: int | None = None  # logits that plain torch holds copies of; by default, of the cache


def forward(x: Rows, with_entropy: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropy (empty without), and what `backward` needs, ``(..., 4)``.

    That is, of each row, log-prob, entropy, maximum and log-sum, where ``logsumexp(z) =
    max / temperature + log_sum``.
    """
    shape, logits = x.token_ids.shape, _rows_of(x.logits)
    softcap, vocab_size = x.softcap, x.vocab_size
    temperature = _scale(x.temperature, dtype)
    found = torch.zeros(x.token_ids.numel(), 4, dtype=dtype, device=logits.device)
    logprobs, entropy, maxima, log_sums = found.unbind(-1)
    ids, valid, bad = _selected(x)
    for rows in _blocks(valid, logits.shape[-1], x.block):
        raw = _read(logits, rows)[:, :vocab_size].to(dtype)  # (n, V)
        z, row_max = _tempered(raw, None, _at(temperature, rows), softcap)
        target = z.gather(-1, ids[rows].unsqueeze(-1)).squeeze(-1)
        exp = z.exp()
        row_sum = _row_sum(exp)
        log_sum = row_sum.log()
        forbidden = row_max == -torch.inf  # a row of nothing but -inf
        logprobs[rows] = torch.where(forbidden, -torch.inf, target - log_sum)
        maxima[rows], log_sums[rows] = row_max, log_sum
        if with_entropy:
            mean = _row_sum(tm.entropy_term(exp, z)) / row_sum
            entropy[rows] = torch.where(forbidden, 0.0, log_sum + mean)
    if logits.device.type != "cpu" or bool(bad.any()):
        for each in (logprobs, entropy, log_sums):
            each.copy_(torch.where(valid, torch.where(bad, torch.nan, each), 0.0))
    entropy = entropy.clone().view(shape) if with_entropy else entropy.new_empty(0)
    return logprobs.clone().view(shape), entropy, found.view(*shape, 4)


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    x: Rows,
    found: Tensor,
    out: Tensor,
    compact: bool = False,
) -> Tensor:
    """Write the gradient of the logits to `out`, which may be `logits` itself, and return it.

    Args:
        grad_logprobs: incoming gradients, of ``token_ids``' shape, or None.
        grad_entropy: the same for the entropy.
        x: as in `forward`.
        found: what `forward` returned last.
        out: of ``logits``' shape; rows that are masked become 0.
        compact: write the gradients of the unmasked rows to the first rows of `out`, and leave the
            others.
    """
    logprobs, entropy, maxima, log_sums = found.reshape(-1, 4).unbind(-1)
    dtype, logits, result, out = logprobs.dtype, _rows_of(x.logits), out, _rows_of(out)
    temperature = _scale(x.temperature, dtype)
    softcap, vocab_size = x.softcap, x.vocab_size
    grad_logprobs, grad_entropy = (
        None if g is None else g.reshape(-1).to(dtype) for g in (grad_logprobs, grad_entropy)
    )
    ids, valid, _ = _selected(x)
    done = 0
    for rows in _blocks(valid, logits.shape[-1], x.block):
        raw = _read(logits, rows)[:, :vocab_size].to(dtype)  # (n, V)
        at_rows = _at(temperature, rows)
        z, _ = _tempered(raw, maxima[rows], at_rows, softcap)
        row_logprobs = z - log_sums[rows].unsqueeze(-1)
        prob = row_logprobs.exp()
        grad = torch.zeros_like(prob)
        if grad_logprobs is not None:
            incoming = grad_logprobs[rows].unsqueeze(-1)
            grad = -incoming * prob
            own = incoming * tm.own_logprob_slope(logprobs[rows]).unsqueeze(-1)
            grad.scatter_(-1, ids[rows].unsqueeze(-1), own)
        if grad_entropy is not None:
            slope = tm.entropy_slope(prob, row_logprobs, entropy[rows].unsqueeze(-1))
            grad += grad_entropy[rows].unsqueeze(-1) * slope
        grad /= at_rows if at_rows.dim() == 0 else at_rows.unsqueeze(-1)
        if softcap is not None:
            grad *= tm.softcap_slope(raw, softcap)
        dead = ~valid[rows] | (maxima[rows] == -torch.inf)
        grad.masked_fill_(dead.unsqueeze(-1), 0.0)
        to = torch.arange(done, done + len(rows), device=rows.device) if compact else rows
        _write(out, to, grad, vocab_size)
        done += len(rows)
    if not compact and done < valid.numel():
        out.masked_fill_(~valid.view(*out.shape[:-1], 1), 0.0)
    return result


def _selected(x: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids that are safe to gather with, which tokens take part, and which are bad."""
    ids = x.token_ids.reshape(-1).long()
    valid = ids != -100
    if x.mask is not None:
        valid = valid & x.mask.reshape(-1)
    bad = valid & ((ids < 0) | (ids >= x.vocab_size))
    return torch.where(valid & ~bad, ids, 0), valid, bad


def _rows_of(x: Tensor) -> Tensor:
    """Return ``(..., V)`` as a view ``(N, V)``, or as it is where its strides allow none."""
    try:
        return x.view(x.shape[:-1].numel(), x.shape[-1])
    except RuntimeError:
        return x


def _blocks(valid: Tensor, width: int, block: int | None) -> Iterator[Tensor]:
    """Yield the row numbers of one block after the other.

    On the CPU masked rows are left out; elsewhere that would have to be read back.
    """
    rows = torch.arange(valid.numel(), device=valid.device)
    if valid.device.type == "cpu":
        rows = rows[valid]
    size = block or _BLOCK.get(valid.device.type, _BLOCK["cuda"])
    return iter(rows.split(max(1, size // max(1, width)))) if len(rows) and width else iter(())


def _read(logits: Tensor, rows: Tensor) -> Tensor:
    """Return a copy of some rows of ``(..., V)``, whatever its strides; nothing else is copied."""
    if logits.dim() == 2:
        return logits.index_select(0, rows)
    return logits[torch.unravel_index(rows, logits.shape[:-1])]


def _write(out: Tensor, rows: Tensor, values: Tensor, vocab_size: int) -> None:
    where = (rows,) if out.dim() == 2 else torch.unravel_index(rows, out.shape[:-1])
    out[..., :vocab_size][where] = values.to(out.dtype)
    if vocab_size < out.shape[-1]:
        out[..., vocab_size:][where] = 0.0


def _scale(temperature: float | Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.to(dtype)
    return torch.tensor(temperature, dtype=dtype, device="cpu")  # any device reads it


def _at(per_token: Tensor, rows: Tensor) -> Tensor:
    return per_token if per_token.dim() == 0 else per_token.reshape(-1)[rows]


def _tempered(
    raw: Tensor, row_max: Tensor | None, temperature: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return ``(z - max) / temperature`` with ``z`` softcapped, and the maximum."""
    z = raw if softcap is None else tm.softcap_logit(raw, softcap)
    row_max = z.amax(-1) if row_max is None else row_max
    top = torch.where(row_max == -torch.inf, 0.0, row_max).unsqueeze(-1)
    scale = temperature if temperature.dim() == 0 else temperature.unsqueeze(-1)
    return tm.tempered_logit(z, top, scale.to(z.dtype)), row_max


def _row_sum(x: Tensor) -> Tensor:
    """Return the sums of rows, over the same segments in the same order for any number of rows."""
    whole = x.shape[-1] // _SEGMENT * _SEGMENT
    tail = x[:, whole:].sum(-1)
    return tail + x[:, :whole].unflatten(-1, (-1, _SEGMENT)).sum(-1).sum(-1) if whole else tail
