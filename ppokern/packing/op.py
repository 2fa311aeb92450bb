"""Packing of padded sequences and back. Plain indexing, which no kernel would make faster."""

from math import inf
from numbers import Complex, Real
from typing import NamedTuple

import torch
from jaxtyping import Bool, Integer, Num, Shaped
from torch import Tensor

from ppokern import _check, _library
from ppokern._names import PADDING_SIDES, PaddingSide
from ppokern._sequences import Sequences, well_formed


@_library.loadable
class Packed(NamedTuple):
    """Tokens of all sequences in one row, as in flash-attn's variable-length layout."""

    values: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


def pack(x: Shaped[Tensor, "*batch_and_features"], mask: Bool[Tensor, "*batch"]) -> Packed:
    """Put the unmasked tokens of all sequences into one row.

    Args:
        x: ``(B, T, ...)``, any dtype; its leading dimensions are those of `mask`. Takes a gradient.
        mask: ``(B, T)``, True = take part; of another shape, its last dimension is time and each
            row a sequence.

    Returns:
        ``Packed(values, cu_seqlens, max_seqlen)``: ``(total, ...)``, int32 ``(S + 1,)`` and an int.
        A row without unmasked tokens is a sequence of length 0. Reads the count back from the
        device.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: a mask that is not bool.
    """
    _check.tensor("mask", mask, (torch.bool,))
    _check.plain("x", x)
    if mask.dim() == 0:
        _check.fail("mask", "shape (B, T)", "a 0-d tensor")
    if x.shape[: mask.dim()] != mask.shape:
        _check.fail("x", f"shape {tuple(mask.shape)} + (...), the mask's", tuple(x.shape))
    if x.device != mask.device:
        _check.fail("mask", f"a tensor on {x.device}", f"one on {mask.device}")
    lengths = mask.sum(-1).reshape(-1)
    ends = lengths.cumsum(0).to(torch.int32)
    cu_seqlens = torch.cat([ends.new_zeros(1), ends])
    return Packed(x[mask], cu_seqlens, int(lengths.max()) if lengths.numel() else 0)


def unpack(
    values: Shaped[Tensor, " packed *features"],
    cu_seqlens: Integer[Tensor, " boundaries"],
    *,
    length: int | None = None,
    fill: float = 0.0,
    padding_side: PaddingSide = "right",
) -> Shaped[Tensor, "S length *features"]:
    """Spread a packed row over padded rows, one per sequence.

    Args:
        values: ``(total, ...)``, any dtype. Takes a gradient.
        cu_seqlens: ``(S + 1,)``, int32 or int64.
        length: of the rows; by default the longest sequence's, which reads it back from the device.
        fill: of the padding.
        padding_side: ``"right"`` or ``"left"``.

    Returns:
        ``(S, length, ...)``.

    Raises:
        ValueError: a side, shape or `cu_seqlens` that does not fit; a `fill` that the dtype does
            not hold; a `length` below the longest sequence (on CUDA without validation the result
            is NaN, of floating-point values, instead).
        TypeError: what is no tensor or no integer, or a `cu_seqlens` of another dtype.
    """
    _check.plain("values", values)
    _check.choice("padding_side", padding_side, PADDING_SIDES)
    if values.dim() == 0:
        _check.fail("values", "shape (total, ...)", "a 0-d tensor")
    _check.cu_seqlens(cu_seqlens, values.shape[:1], values.device)
    total = len(values)
    filler = _filler(fill, values)
    lengths = cu_seqlens.diff().long()
    if length is None:
        length = int(lengths.max()) if lengths.numel() else 0
    elif _check.integer("length", length) < 0 or (
        _check.values_of(lengths) and bool((lengths > length).any())
    ):
        longest = int(lengths.max()) if lengths.numel() else 0
        _check.fail("length", f"at least {longest}, the longest sequence", length)
    column = torch.arange(length, device=values.device)
    offset = column.expand(len(lengths), length)
    if padding_side == "left":
        offset = offset - (length - lengths).unsqueeze(-1)
    inside = (offset >= 0) & (offset < lengths.unsqueeze(-1))
    source = cu_seqlens[:-1].long().unsqueeze(-1) + offset
    extra = (1,) * (values.dim() - 1)
    if values.shape[0] == 0:  # a row to index, from which nothing is taken
        values = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
    rows = values[source.clamp(0, values.shape[0] - 1)]
    rows = torch.where(inside.view(*inside.shape, *extra), rows, filler)
    if not _check.values_of(lengths) and values.is_floating_point():
        good = well_formed(cu_seqlens, total) & (lengths <= length).all()
        rows = torch.where(good, rows, torch.nan)
    return rows


def position_ids(
    cu_seqlens: Integer[Tensor, " boundaries"], *, total: int | None = None
) -> Integer[Tensor, " total"]:
    """Return the position of each packed token in its sequence, from 0.

    Args:
        cu_seqlens: ``(S + 1,)``, int32 or int64.
        total: the number of tokens; by default read back from the device.

    Returns:
        ``(total,)``, int64.

    Raises:
        ValueError: a `cu_seqlens` that does not fit, or does not end with `total`.
        TypeError: a `cu_seqlens` of another dtype, a `total` that is no integer.
    """
    if total is not None:
        _check.integer("total", total)
    _check.cu_seqlens(cu_seqlens, None if total is None else (total,))
    total = int(cu_seqlens[-1]) if total is None else total
    starts = Sequences(torch.Size((total,)), cu_seqlens).spread(cu_seqlens[:-1].long())
    return torch.arange(total, device=cu_seqlens.device) - starts


def next_token_targets(
    token_ids: Num[Tensor, " total"], cu_seqlens: Integer[Tensor, " boundaries"]
) -> tuple[Num[Tensor, " total"], Bool[Tensor, " total"]]:
    """Return what each packed token is to predict: the next one of its own sequence.

    Args:
        token_ids: ``(total,)``, any integer dtype.
        cu_seqlens: ``(S + 1,)``, int32 or int64.

    Returns:
        ``(targets, mask)``, both ``(total,)``. The last token of each sequence has no next one: its
        mask is False, its target -100 (0 in an unsigned dtype).

    Raises:
        ValueError: shapes or `cu_seqlens` that do not fit.
        TypeError: ids that are not integers.
    """
    _check.tensor("token_ids", token_ids, _check.INTEGERS)
    _check.cu_seqlens(cu_seqlens, token_ids.shape, token_ids.device)
    total = token_ids.shape[0]
    end = Sequences(token_ids.shape, cu_seqlens).end()
    mask = torch.arange(1, total + 1, device=token_ids.device) < end
    nothing = -100 if token_ids.dtype.is_signed else 0
    return torch.where(mask, token_ids.roll(-1), _scalar(nothing, token_ids)), mask


def _filler(fill: float, values: Tensor) -> Tensor:
    """Return what fills padding, in the dtype of `values`, which has to hold it."""
    dtype = values.dtype
    if not isinstance(fill, Complex if dtype.is_complex else Real):
        _check.fail("fill", "a number", type(fill).__name__, TypeError)
    if dtype.is_complex:
        return _scalar(fill, values)
    if dtype.is_floating_point:
        held = fill != fill or abs(fill) == inf or abs(fill) <= torch.finfo(dtype).max
    elif dtype == torch.bool:
        held = fill in (0, 1)
    else:
        held = torch.iinfo(dtype).min <= fill <= torch.iinfo(dtype).max and fill == int(fill)
    if not held:
        _check.fail("fill", f"a number that {dtype} holds, as the values are", fill)
    return _scalar(float(fill) if dtype.is_floating_point else int(fill), values)


def _scalar(value: complex, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)
