"""The loss's pass over a chunk of logits on CUDA in C++: turns tensors into addresses."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppokern import _launch
from ppokern.linear import reference
from ppokern.linear.reference import Chunk, Head, Plan
from ppokern.logprob import kernel_native as passes
from ppokern.logprob.reference import Rows
from ppokern.ppo_loss.reference import TokenSlopes

if TYPE_CHECKING:
    from ppokern import _cuda
else:
    from ppokern._backend import cuda as _cuda  # None where it was not built

SHARED = 2**13  # logits of a row that is worth more than one block


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
    logits, (rows, width), device = chunk.logits, chunk.logits.shape, chunk.logits.device
    if width == 0 or (rows < _launch.resident(device, 1) and width > SHARED):
        return reference.two_passes(
            passes.CUDA, chunk, head, how, token_ids, slopes, logprobs, entropy
        )
    # two blocks a multiprocessor, if their rows stay in the cache
    blocks = _launch.resident(device, 2)
    if _launch.rows_in_cache(logits) < blocks:
        blocks = _launch.resident(device, 1)
    numbers = None if isinstance(chunk.rows, slice) else chunk.rows
    first = chunk.rows.start if isinstance(chunk.rows, slice) else 0
    used = how.valid.new_empty(rows) if how.compact else None
    o = slopes.options
    x = Rows(logits, token_ids, how.valid, head.temperature, head.softcap, width)
    values, _memory = passes.tokens_of(x, rows)
    values |= o._asdict()
    values |= {
        "numbers": _address(numbers),
        "first": first,
        "scales": _address(slopes.scale),
        "old_logprobs": _address(slopes.old_logprobs),
        "advantages": _address(slopes.advantages),
        "weights": _address(slopes.weights),
        "ref_logprobs": _address(slopes.ref_logprobs),
        "dual_clip": torch.inf if o.dual_clip is None else o.dual_clip,
        "log_ratio_limit": torch.inf if o.log_ratio_limit is None else o.log_ratio_limit,
        "blocks": blocks,
        "logprobs": _address(logprobs),
        "entropy": _address(entropy),
        "used": _address(used),
        "width": width,
    }
    with _launch.on_device_of(logits):
        _cuda.linear_loss(values, _launch.stream(logits))
        kept = None if used is None else reference.kept_rows(used)
        if kept is not None:
            _cuda.move_up(values, _launch.stream(logits))
    return kept


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
