"""Log-probs of selected tokens in Triton.

Both functions equal those of `reference`, and take the same arguments.

Bytes moved per logit: forward one read, with entropy too; backward one read and one write, and
compact once more those of rows that move. Beyond these a row costs 16 to 24 bytes per segment.

A row is reduced over segments of 4096 logits, fewer where V is, each to a maximum, a sum and an
entropy sum; a second, small kernel combines them. So few rows fill the device as many do, and who
reduces a segment changes no bit. The token's own logit is left out of the sums and added
last, so that a nearly certain token's log-prob is ``-log1p(rest)``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppokern import _launch
from ppokern import token_math_triton as tm
from ppokern.logprob import reference
from ppokern.logprob.reference import Rows

TILE = 4096  # logits of a tile: 16 a thread
WARPS = 8
RESIDENT = 4  # programs that a multiprocessor holds: their tiles in flight cover the latency
MOVED_ROWS, MOVED_COLUMNS = 16, 512

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(2e38)  # its product with log2(e) is finite


@triton.jit
def valid_of(token_ids, id_stride, mask, mask_stride, row, inside):
    """Return the ids of rows and which rows take part."""
    token_id = tl.load(token_ids + row * id_stride, inside, other=-100)
    valid = token_id != -100
    if mask is not None:
        valid = valid & (tl.load(mask + row * mask_stride, inside, other=0) != 0)
    return token_id, valid


@triton.jit
def row_start(row, row_offsets, row_stride, inside, ALIGNED: tl.constexpr):
    """Return where rows start, in elements from the first."""
    if row_offsets is not None:
        start = tl.load(row_offsets + row, inside, other=0)
    else:
        start = row * row_stride
    return tl.multiple_of(start, 16) if ALIGNED else start


@triton.jit
def inverse_of(temperature, temperatures, temperature_stride, row, valid):
    """Return ``1 / temperature`` of rows, finite where the temperature is above 0."""
    if temperatures is not None:
        each = tl.load(temperatures + row * temperature_stride, valid, other=1).to(tl.float32)
    else:
        each = tl.full(row.shape, temperature, tl.float32)
    inverse = tl.div_rn(tl.full(row.shape, 1.0, tl.float32), each)
    return tl.where(inverse > LARGEST, LARGEST, inverse)


@triton.jit
def whole(column, width, ALIGNED: tl.constexpr):
    """Return which columns are below `width`, or in its last vector.

    A bound that may lie inside a vector would split all of them.
    """
    return column < (width + 15) // 16 * 16 if ALIGNED else column < width


@triton.jit
def read(logits, start, column, where, vocab_size, ALIGNED: tl.constexpr):
    """Return a tile of logits, ``-inf`` outside; all arguments have two dimensions."""
    where = where & whole(column, vocab_size, ALIGNED)
    raw = tl.load(logits + start + column, where, other=float("-inf"))
    return tl.where(column < vocab_size, raw.to(tl.float32), float("-inf"))


@triton.jit
def finite(row_max):
    """Return maxima that can be subtracted from ``-inf``."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def from_other_maximum(tops, sums, terms, base, in_bits, ENTROPY: tl.constexpr):
    """Return sums and entropy sums that count from `base`, where they did from `tops`."""
    fall = tm.tempered_logit(tops, base, in_bits)  # bits, at most 0
    weight = tl.exp2(fall)
    if ENTROPY:
        terms = tl.where(weight == 0.0, 0.0, weight * terms)
        terms += tm.entropy_term(weight, fall) * tl.where(weight == 0.0, 0.0, sums)
    return weight * sums, terms


@triton.jit
def combine(tops, sums, terms, own, inverse, valid, known, ENTROPY: tl.constexpr):
    """Return log-prob, entropy, maximum and log-sum of rows, from parts of them and the tokens.

    Maxima, sums and entropy sums of the parts, ``(rows, parts)``, are added in one tree.
    """
    row_max = tl.maximum(tl.max(tops, 1), own)
    base, in_bits = finite(row_max), inverse * LOG2_E
    sums, terms = from_other_maximum(tops, sums, terms, base[:, None], in_bits[:, None], ENTROPY)
    rest, own_bits = tl.sum(sums, 1), tm.tempered_logit(own, base, in_bits)
    own_weight = tl.exp2(own_bits)
    log_sum = tl.where(own_weight == 1.0, tm.log1p(rest), tl.log(rest + own_weight))
    forbidden = rest + own_weight == 0.0  # a row of nothing but -inf
    logprob = tm.tempered_logit(own, base, inverse) - log_sum

    bad = valid & ~known
    logprob = tl.where(bad, float("nan"), tl.where(forbidden, float("-inf"), logprob))
    log_sum = tl.where(bad, float("nan"), log_sum)
    entropy = tl.zeros(own.shape, tl.float32)
    if ENTROPY:
        mean = LN_2 * (tl.sum(terms, 1) + tm.entropy_term(own_weight, own_bits))
        entropy = tl.where(valid & ~forbidden, log_sum + mean / (rest + own_weight), 0.0)
        entropy = tl.where(bad, float("nan"), entropy)
    return (
        tl.where(valid, logprob, 0.0),
        entropy,
        tl.where(valid, row_max, 0.0),
        tl.where(valid, log_sum, 0.0),
    )


@triton.jit
def gradient(
    raw, is_own, row_max, log_sum, inverse, logprob, entropy, of_logprob, of_entropy, softcap,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a tile of logits; what is of its rows is ``(rows, 1)``.

    `of_logprob` and `of_entropy` are the slopes in these, None where there is none.
    """
    z = tm.softcap_logit(raw, softcap) if SOFTCAP else raw
    bits = tm.tempered_logit(z, finite(row_max), inverse * LOG2_E) - log_sum * LOG2_E
    prob = tl.exp2(bits)
    grad = tl.zeros(raw.shape, tl.float32)
    if of_logprob is not None:
        own = of_logprob * tm.own_logprob_slope(logprob)
        grad = tl.where(is_own, own, -of_logprob * prob)
    if of_entropy is not None:
        grad += of_entropy * tm.entropy_slope(prob, bits * LN_2, entropy)
    grad *= inverse
    if SOFTCAP:
        grad *= tm.softcap_slope(raw, softcap)
    return tl.where(row_max != float("-inf"), grad, 0.0)  # of a row of -inf, no logit has a slope


_NUMBERS = ["row_stride", "id_stride", "mask_stride", "temperature_stride", "softcap", "rows"]
_NUMBERS += ["vocab_size", "temperature"]
_VECTORS = ["row_offsets", "token_ids", "mask", "temperatures"]


@triton.jit(do_not_specialize=[*_NUMBERS, *_VECTORS, "segments", "items", "partials"])
def reduce_kernel(
    logits,
    row_offsets,
    row_stride: tl.int64,
    token_ids,
    id_stride: tl.int64,
    mask,
    mask_stride: tl.int64,
    temperature: tl.float32,
    temperatures,
    temperature_stride: tl.int64,
    softcap: tl.float32,
    rows: tl.int64,
    vocab_size: tl.int32,
    segments: tl.int32,
    items: tl.int32,
    partials,  # (2 or 3, rows, segments)
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Reduce one segment of ROWS rows after the other."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        segment = item % segments
        row = (item // segments).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = segment * COLUMNS + tl.arange(0, COLUMNS)
        token_id, valid = valid_of(token_ids, id_stride, mask, mask_stride, row, row < rows)
        if tl.max(valid.to(tl.int32), 0) != 0:
            start = row_start(row, row_offsets, row_stride, row < rows, ALIGNED)
            inverse = inverse_of(temperature, temperatures, temperature_stride, row, valid)
            z = read(logits, start[:, None], column[None, :], valid[:, None], vocab_size, ALIGNED)
            if SOFTCAP:
                z = tm.softcap_logit(z, softcap)
            z = tl.where(column[None, :] == token_id.to(tl.int32)[:, None], float("-inf"), z)
            top = tl.max(z, 1)
            bits = tm.tempered_logit(z, finite(top)[:, None], (inverse * LOG2_E)[:, None])
            weight = tl.exp2(bits)
            at = partials + row * segments + segment
            tl.store(at, top, valid)
            tl.store(at + rows * segments, tl.sum(weight, 1), valid)
            if ENTROPY:
                tl.store(at + 2 * rows * segments, tl.sum(tm.entropy_term(weight, bits), 1), valid)


_RESULTS = ["partials", "logprobs", "entropy", "found"]


@triton.jit(do_not_specialize=[*_NUMBERS, *_VECTORS, *_RESULTS, "segments", "logits"])
def finish_kernel(
    logits,
    row_offsets,
    row_stride: tl.int64,
    token_ids,
    id_stride: tl.int64,
    mask,
    mask_stride: tl.int64,
    temperature: tl.float32,
    temperatures,
    temperature_stride: tl.int64,
    softcap: tl.float32,
    rows: tl.int64,
    vocab_size: tl.int32,
    segments: tl.int32,
    partials,
    logprobs,
    entropy,
    found,  # (rows, 4): log-prob, entropy, maximum, log-sum
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,  # the power of two from `segments` on
):
    """Combine the segments of rows, always in the same tree, and add the tokens themselves."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token_id, valid = valid_of(token_ids, id_stride, mask, mask_stride, row, inside)
    known = valid & (token_id >= 0) & (token_id < vocab_size)
    start = row_start(row, row_offsets, row_stride, inside, False)
    inverse = inverse_of(temperature, temperatures, temperature_stride, row, valid)
    own = tl.load(logits + start + token_id, known, other=float("-inf")).to(tl.float32)
    if SOFTCAP:
        own = tm.softcap_logit(own, softcap)

    segment = tl.arange(0, SEGMENTS)
    where = valid[:, None] & (segment < segments)[None, :]
    at = partials + row[:, None] * segments + segment[None, :]
    tops = tl.load(at, where, other=float("-inf"))
    sums = tl.load(at + rows * segments, where, other=0.0)
    terms = tl.zeros(tops.shape, tl.float32)
    if ENTROPY:
        terms = tl.load(at + 2 * rows * segments, where, other=0.0)
    logprob, mean_entropy, row_max, log_sum = combine(
        tops, sums, terms, own, inverse, valid, known, ENTROPY
    )
    if ENTROPY:
        tl.store(entropy + row, mean_entropy, inside)
    tl.store(logprobs + row, logprob, inside)
    tl.store(found + 4 * row, logprob, inside)
    tl.store(found + 4 * row + 1, mean_entropy, inside)
    tl.store(found + 4 * row + 2, row_max, inside)
    tl.store(found + 4 * row + 3, log_sum, inside)


_SLOPES = ["grad_logprobs", "grad_entropy", "grad_logprob_stride", "grad_entropy_stride"]
_OUT = ["out_offsets", "out_stride", "width", "blocks", "items"]


@triton.jit(do_not_specialize=[*_NUMBERS, *_VECTORS, "found", *_SLOPES, *_OUT])
def gradient_kernel(
    logits,
    row_offsets,
    row_stride: tl.int64,
    token_ids,
    id_stride: tl.int64,
    mask,
    mask_stride: tl.int64,
    temperature: tl.float32,
    temperatures,
    temperature_stride: tl.int64,
    softcap: tl.float32,
    rows: tl.int64,
    vocab_size: tl.int32,
    grad_logprobs,
    grad_logprob_stride: tl.int64,
    grad_entropy,
    grad_entropy_stride: tl.int64,
    found,  # (rows, 4), see `finish_kernel`
    out,
    out_offsets,
    out_stride: tl.int64,
    width: tl.int32,
    blocks: tl.int32,
    items: tl.int32,
    SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Turn one tile of logits after the other into a tile of gradient; masked rows become 0."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = (item // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = (item % blocks) * COLUMNS + tl.arange(0, COLUMNS)
        inside = row < rows
        token_id, valid = valid_of(token_ids, id_stride, mask, mask_stride, row, inside)
        grad = tl.zeros([ROWS, COLUMNS], tl.float32)
        if tl.max(valid.to(tl.int32), 0) != 0:
            start = row_start(row, row_offsets, row_stride, inside, ALIGNED)
            inverse = inverse_of(temperature, temperatures, temperature_stride, row, valid)
            raw = read(logits, start[:, None], column[None, :], valid[:, None], vocab_size, ALIGNED)
            of_logprob, of_entropy = None, None
            if grad_logprobs is not None:
                of_logprob = tl.load(grad_logprobs + row * grad_logprob_stride, valid, other=0.0)
                of_logprob = of_logprob.to(tl.float32)[:, None]
            if grad_entropy is not None:
                of_entropy = tl.load(grad_entropy + row * grad_entropy_stride, valid, other=0.0)
                of_entropy = of_entropy.to(tl.float32)[:, None]
            at = found + 4 * row
            logprob, entropy = tl.load(at, valid, other=0.0), tl.load(at + 1, valid, other=0.0)
            row_max, log_sum = tl.load(at + 2, valid, other=0.0), tl.load(at + 3, valid, other=0.0)
            grad = gradient(
                raw, column[None, :] == token_id.to(tl.int32)[:, None], row_max[:, None],
                log_sum[:, None], inverse[:, None], logprob[:, None], entropy[:, None],
                of_logprob, of_entropy, softcap, SOFTCAP,
            )  # fmt: skip
            grad = tl.where(valid[:, None] & (column < vocab_size)[None, :], grad, 0.0)
        to = row_start(row, out_offsets, out_stride, inside, ALIGNED)
        where = inside[:, None] & whole(column, width, ALIGNED)[None, :]
        at = out + to[:, None] + column[None, :]
        tl.store(at, tm.rounded(grad, out.dtype.element_ty), where)


@triton.jit(do_not_specialize=["destinations", "rows", *_OUT])
def move_up_kernel(
    out,
    out_offsets,
    out_stride: tl.int64,
    destinations,
    rows: tl.int64,
    width: tl.int32,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Move rows up to their destinations, -1 for none, in one block of columns, top to bottom.

    A destination lies above its row, and those rise with the rows: so no row is overwritten before
    it is read.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    where = whole(column, width, ALIGNED)[None, :]
    for tile in range(0, tl.cdiv(rows, ROWS)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        to = tl.load(destinations + row, row < rows, other=-1)
        moves = (to >= 0) & (to < row)
        start = row_start(row, out_offsets, out_stride, moves, ALIGNED)
        x = tl.load(out + start[:, None] + column[None, :], where & moves[:, None])
        tl.debug_barrier()  # the tile's rows are read, and may be written
        end = row_start(tl.where(moves, to, 0), out_offsets, out_stride, moves, ALIGNED)
        tl.store(out + end[:, None] + column[None, :], x, where & moves[:, None])


def forward(x: Rows, with_entropy: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropy (empty without), and what `backward` needs, ``(..., 4)``."""
    if not x.logits.numel():
        return reference.forward(x, with_entropy, dtype)
    shape, rows, new = x.token_ids.shape, x.token_ids.numel(), x.logits.new_empty
    logprobs = new(shape, dtype=torch.float32)
    entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
    found = logprobs.new_empty((*shape, 4))
    logits = _dense(x.logits)
    tokens = tokens_of(x, logits)
    columns = min(TILE, triton.next_power_of_2(x.vocab_size))
    segments, tile_rows = triton.cdiv(x.vocab_size, columns), TILE // columns
    items = triton.cdiv(rows, tile_rows) * segments
    partials = new((3 if with_entropy else 2, rows, segments), dtype=torch.float32)
    switches = {"SOFTCAP": x.softcap is not None, "ENTROPY": with_entropy}
    wide = triton.next_power_of_2(segments)
    finish_rows = max(1, 256 // wide)
    programs = min(items, _launch.resident(logits.device, RESIDENT))
    with _launch.on_device_of(logits):
        reduce_kernel[(programs,)](
            *tokens, segments, items, partials, **switches, ALIGNED=aligned(logits),
            ROWS=tile_rows, COLUMNS=columns, num_warps=WARPS,
        )  # fmt: skip
        finish_kernel[(triton.cdiv(rows, finish_rows),)](
            *tokens, segments, partials, logprobs, entropy, found, **switches,
            ROWS=finish_rows, SEGMENTS=wide, num_warps=4,
        )  # fmt: skip
    return logprobs, entropy, found


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    x: Rows,
    found: Tensor,
    out: Tensor,
    compact: bool = False,
) -> Tensor:
    """Write the gradient of the logits to `out`, which may be `logits` itself, and return it."""
    rows, width = x.token_ids.numel(), out.shape[-1]
    if not out.numel():
        return out
    if not _is_dense(out):
        dense = out.contiguous()
        x = x._replace(logits=dense) if out is x.logits else x
        backward(grad_logprobs, grad_entropy, x, found, dense, compact)
        return out.copy_(dense)
    logits = _dense(x.logits)
    columns = min(TILE, triton.next_power_of_2(width))
    blocks, tile_rows = triton.cdiv(width, columns), TILE // columns
    items = triton.cdiv(rows, tile_rows) * blocks
    programs = min(items, _launch.resident(logits.device, RESIDENT))
    with _launch.on_device_of(logits):
        gradient_kernel[(programs,)](
            *tokens_of(x, logits), *_flat(grad_logprobs), *_flat(grad_entropy), found.contiguous(),
            out, *_rows(out), width, blocks, items,
            SOFTCAP=x.softcap is not None, ALIGNED=aligned(out) and aligned(logits),
            ROWS=tile_rows, COLUMNS=columns, num_warps=WARPS,
        )  # fmt: skip
        if compact:
            valid = x.token_ids.reshape(-1) != -100
            move_up(out, valid if x.mask is None else valid & x.mask.reshape(-1))
    return out


def move_up(out: Tensor, valid: Tensor) -> None:
    """Move the rows ``(N,)`` that are valid to the first ones of `out`."""
    width = out.shape[-1]
    columns = min(MOVED_COLUMNS, triton.next_power_of_2(width))
    destinations = torch.where(valid, valid.cumsum(0) - 1, -1)
    with _launch.on_device_of(out):
        move_up_kernel[(triton.cdiv(width, columns),)](
            out, *_rows(out), destinations, len(valid), width,
            ALIGNED=aligned(out), ROWS=MOVED_ROWS, COLUMNS=columns, num_warps=WARPS,
        )  # fmt: skip


def tokens_of(x: Rows, logits: Tensor) -> tuple:
    """Return what every kernel takes first; `logits` are those of `x`, dense."""
    temperature = x.temperature
    on_host = not isinstance(temperature, Tensor) or (temperature.dim() == 0 and temperature.is_cpu)
    number, per_token = (float(temperature), None) if on_host else (1.0, temperature)
    return (
        logits, *_rows(logits), *_flat(x.token_ids), *_flat(x.mask), number, *_flat(per_token),
        x.softcap or 0.0, x.token_ids.numel(), x.vocab_size,
    )  # fmt: skip


def _is_dense(x: Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def _dense(x: Tensor) -> Tensor:
    return x if _is_dense(x) else x.contiguous()


def _rows(x: Tensor) -> tuple[Tensor | None, int]:
    """Return where the rows of ``(..., V)`` start: their offsets, or None and their stride."""
    try:
        return None, x.view(-1, x.shape[-1]).stride(0)
    except RuntimeError:
        offsets = torch.zeros((), dtype=torch.int64, device=x.device)
        for size, stride in zip(x.shape[:-1], x.stride(), strict=False):
            steps = torch.arange(size, device=x.device) * stride
            offsets = offsets.unsqueeze(-1) + steps
        return offsets.reshape(-1), 0


def aligned(x: Tensor) -> bool:
    """Return whether all rows of ``(..., V)`` start and end at whole vectors, as the first does."""
    return all(n % 16 == 0 for n in (x.shape[-1], *x.stride()[:-1]))


def _flat(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Return a tensor per token and its stride."""
    if x is None:
        return None, 0
    x = x if x.dim() <= 1 else x.reshape(-1)
    return x, x.stride(0) if x.dim() else 0
