"""The loss's pass over a chunk of logits in Triton: one kernel from logits to their gradient.

Bytes moved per logit: one read and one write of memory, and a read from the L2 cache; compact, a
second read and write of rows that move. Everything else is per row.

A program takes one row at a time, or several narrow ones: it reduces it, computes its token's
slope, and goes through the row again, from its end, while that is still in the cache. A lane adds
up every 2048th logit (in long rows every 4096th) with a running maximum of its own; one tree
combines the lanes. So nobody waits for anybody within the first pass, and a row's bits hang on
nothing but itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppokern import _launch
from ppokern import token_math_triton as tm
from ppokern.linear import reference
from ppokern.linear.reference import Chunk, Head, Plan
from ppokern.logprob import kernel_triton as passes
from ppokern.logprob.reference import Rows
from ppokern.ppo_loss import kernel_triton as losses
from ppokern.ppo_loss.reference import TokenSlopes

_AMD = torch.version.hip is not None
# Logits of a tile (8 a thread, in 16 bits one vector), warps, programs of a multiprocessor: two
# where their rows stay in the cache, so that one reads while the other adds up its lanes.
SHORT, LONG = (2048, 8, 2), (4096, 8 if _AMD else 16, 1)  # AMD's warps have 64 lanes
# Registers of a thread that let those programs fit: asked for by itself, the compiler spills some.
REGISTERS = {} if _AMD else {"maxnreg": 128}  # a word that AMD's does not know
TILES = 4  # read at a time, so that enough is under way while few rows are


@triton.jit
def _slopes(
    logprob, number, valid, scales, old_logprobs, advantages, weights, ref_logprobs,
    low, high, dual_clip, limit, kl_coef, KL: tl.constexpr,
):  # fmt: skip
    """Return a token's scale, and the loss's slope in its log-prob."""
    scale = losses.read(scales, number, valid)
    old_logprob = losses.read(old_logprobs, number, valid)
    advantage = losses.read(advantages, number, valid)
    _, slope, _, _ = losses.surrogate(
        logprob - old_logprob, logprob, old_logprob, advantage, weights, number, valid,
        low, high, dual_clip, limit,
    )  # fmt: skip
    slope *= scale
    if ref_logprobs is not None:
        log_ratio = logprob - losses.read(ref_logprobs, number, valid)
        slope += losses.scaled(tm.kl_slope(log_ratio, KL), kl_coef * scale, valid)
    return scale, tl.where(valid, slope, 0.0)


_NUMBERS = ["row_stride", "id_stride", "mask_stride", "temperature_stride", "softcap", "tokens"]
_NUMBERS += ["vocab_size", "temperature", "first", "rows", "low", "high", "dual_clip", "limit"]
_NUMBERS += ["entropy_coef", "kl_coef"]
_VECTORS = ["row_offsets", "token_ids", "mask", "temperatures", "numbers", "scales"]
_VECTORS += ["old_logprobs", "advantages", "weights", "ref_logprobs", "logprobs", "entropies"]


@triton.jit(do_not_specialize=[*_NUMBERS, *_VECTORS, "used"])
def loss_kernel(
    logits,  # (rows, vocab_size), overwritten
    row_offsets,
    row_stride: tl.int64,
    token_ids,  # of the call, as all per token
    id_stride: tl.int64,
    mask,
    mask_stride: tl.int64,
    temperature: tl.float32,
    temperatures,
    temperature_stride: tl.int64,
    softcap: tl.float32,
    tokens: tl.int64,
    vocab_size: tl.int32,
    numbers,  # the rows' numbers in the call, None: they count up from `first`
    first: tl.int64,
    rows: tl.int32,
    scales,
    old_logprobs,
    advantages,
    weights,
    ref_logprobs,
    low: tl.float32,
    high: tl.float32,
    dual_clip: tl.float32,
    limit: tl.float32,
    entropy_coef: tl.float32,
    kl_coef: tl.float32,
    logprobs,
    entropies,  # None: not wanted
    used,  # which rows have a slope; None: the others become 0
    SOFTCAP: tl.constexpr,
    BONUS: tl.constexpr,  # whether the loss has a slope in the entropies
    KL: tl.constexpr,  # the kind of KL
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,  # more than one where a row has fewer logits than a tile
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Turn ROWS rows of logits after the others into their gradient."""
    ENTROPY: tl.constexpr = entropies is not None
    tile = tl.arange(0, TILES)[None, :, None] * COLUMNS
    lane = tile + tl.arange(0, COLUMNS)[None, None, :]
    for item in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = item * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = row < rows
        number = first + row
        if numbers is not None:
            number = tl.load(numbers + row, inside, other=0)
        token_id, valid = passes.valid_of(
            token_ids, id_stride, mask, mask_stride, number, inside & (number < tokens)
        )
        start = passes.row_start(row, row_offsets, row_stride, inside, ALIGNED)
        inverse = passes.inverse_of(temperature, temperatures, temperature_stride, number, valid)
        known = valid & (token_id >= 0) & (token_id < vocab_size)
        own = tl.load(logits + start + token_id, known, other=float("-inf")).to(tl.float32)
        if SOFTCAP:
            own = tm.softcap_logit(own, softcap)
        tl.debug_barrier()  # all threads have read it, and it may be overwritten
        own_column = tl.where(known, token_id, -1).to(tl.int32)

        # of each lane: maximum, sum, entropy sum
        in_bits = inverse * passes.LOG2_E
        tops = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
        sums, terms = tl.zeros(tops.shape, tl.float32), tl.zeros(tops.shape, tl.float32)
        width = tl.max(tl.where(valid, vocab_size, 0), 0)
        for begin in range(0, width, TILES * COLUMNS):
            column = begin + lane
            z = passes.read(
                logits, start[:, None, None], column, valid[:, None, None], vocab_size, ALIGNED
            )
            if SOFTCAP:
                z = tm.softcap_logit(z, softcap)
            z = tl.where(column == own_column[:, None, None], float("-inf"), z)
            top = tl.maximum(tops, tl.max(z, 1))
            base = passes.finite(top)
            sums, terms = passes.from_other_maximum(
                tops, sums, terms, base, in_bits[:, None], ENTROPY
            )
            bits = tm.tempered_logit(z, base[:, None, :], in_bits[:, None, None])
            weight = tl.exp2(bits)
            sums += tl.sum(weight, 1)
            if ENTROPY:
                terms += tl.sum(tm.entropy_term(weight, bits), 1)
            tops = top
        logprob, entropy, row_max, log_sum = passes.combine(
            tops, sums, terms, own, inverse, valid, known, ENTROPY
        )
        tl.store(logprobs + number, logprob, inside)
        if ENTROPY:
            tl.store(entropies + number, entropy, inside)

        scale, of_logprob = _slopes(
            logprob, number, valid, scales, old_logprobs, advantages, weights, ref_logprobs,
            low, high, dual_clip, limit, kl_coef, KL,
        )  # fmt: skip
        live = valid & (of_logprob != 0.0)
        of_entropy = None
        if BONUS:
            of_entropy = (-entropy_coef * scale)[:, None]
            live = live | (valid & (entropy_coef * scale != 0.0))
        width = tl.max(tl.where(live, vocab_size, 0), 0)
        if used is None:
            width = vocab_size
        else:
            tl.store(used + row, live, inside)
        for behind in range(0, tl.cdiv(width, COLUMNS)):  # the last to be read is read first
            column = (tl.cdiv(width, COLUMNS) - 1 - behind) * COLUMNS
            column = column + tl.arange(0, COLUMNS)[None, :]
            raw = passes.read(logits, start[:, None], column, live[:, None], vocab_size, ALIGNED)
            grad = passes.gradient(
                raw, column == own_column[:, None], row_max[:, None], log_sum[:, None],
                inverse[:, None], logprob[:, None], entropy[:, None], of_logprob[:, None],
                of_entropy, softcap, SOFTCAP,
            )  # fmt: skip
            grad = tl.where(live[:, None] & (column < vocab_size), grad, 0.0)
            where = inside[:, None] & passes.whole(column, vocab_size, ALIGNED)
            at = logits + start[:, None] + column
            tl.store(at, tm.rounded(grad, logits.dtype.element_ty), where)


def loss_pass(
    chunk: Chunk,
    head: Head,
    how: Plan,
    token_ids: Tensor,
    slopes: TokenSlopes,
    logprobs: Tensor,
    entropy: Tensor | None,
) -> Tensor | None:
    """Overwrite a chunk's logits with their gradient, see `reference.two_passes`.

    Fewer long rows than a device has multiprocessors would leave the others idle: these go through
    the two passes of the log-probs, which share a row out; so do rows of no logits.
    """
    (rows, width), device = chunk.logits.shape, chunk.logits.device
    if width == 0 or (rows < _launch.resident(device, 1) and width > SHORT[0]):
        return reference.two_passes(passes, chunk, head, how, token_ids, slopes, logprobs, entropy)
    fit = _launch.rows_in_cache(chunk.logits) >= _launch.resident(device, SHORT[2])
    tile, warps, programs = SHORT if fit else LONG
    columns = min(tile, triton.next_power_of_2(width))
    tile_rows, programs = tile // columns, _launch.resident(device, programs)
    tiles = TILES if head.softcap is None else TILES // 2  # what its formula needs of registers
    tiles = min(tiles, triton.next_power_of_2(triton.cdiv(width, columns)))
    if isinstance(chunk.rows, slice):
        numbers, first = None, chunk.rows.start
    else:
        numbers, first = chunk.rows, 0
    used = how.valid.new_empty(rows) if how.compact else None
    o = slopes.options
    x = Rows(chunk.logits, token_ids, how.valid, head.temperature, head.softcap, width)
    with _launch.on_device_of(chunk.logits):
        loss_kernel[(min(triton.cdiv(rows, tile_rows), programs),)](
            *passes.tokens_of(x, chunk.logits), numbers, first, rows, slopes.scale,
            slopes.old_logprobs, slopes.advantages, slopes.weights, slopes.ref_logprobs,
            o.low, o.high,
            torch.inf if o.dual_clip is None else o.dual_clip,
            torch.inf if o.log_ratio_limit is None else o.log_ratio_limit,
            o.entropy_coef, o.kl_coef, logprobs, entropy, used, SOFTCAP=head.softcap is not None,
            BONUS=o.entropy_coef != 0, KL=o.kl_kind, ALIGNED=passes.aligned(chunk.logits),
            ROWS=tile_rows, TILES=tiles, COLUMNS=columns, num_warps=warps, **REGISTERS,
        )  # fmt: skip
    kept = None if used is None else reference.kept_rows(used)
    if used is not None and kept is not None:
        passes.move_up(chunk.logits, used)
    return kept
