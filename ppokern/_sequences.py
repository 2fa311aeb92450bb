"""Sequences of a batch in plain torch: rows of ``(..., T)``, or segments of ``(total,)``."""

import torch
from torch import Tensor

from ppokern import _check


def well_formed(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return, without reading it back, whether the boundaries are valid."""
    rising = (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    return rising & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total)


def spoil(cu_seqlens: Tensor | None, total: int, *results: Tensor) -> None:
    """Turn results into NaN if `cu_seqlens` is malformed; where it may be looked at, raise."""
    if cu_seqlens is None:
        return
    _check.boundaries(cu_seqlens, total)
    if not _check.values_of(cu_seqlens):
        malformed = ~well_formed(cu_seqlens, total)
        for result in results:
            result.masked_fill_(malformed, torch.nan)


class Sequences:
    """What ops need to know of the sequences of a batch: sums over each, values spread back, ends.

    Nothing here reads a value back from the device.
    """

    def __init__(self, shape: torch.Size, cu_seqlens: Tensor | None) -> None:
        """Take the shape of the per-token tensors, and `cu_seqlens` where they are packed."""
        self._tokens = shape
        self.length = shape[-1] if len(shape) else 1
        self._cu_seqlens = cu_seqlens
        if cu_seqlens is None:
            self.shape: torch.Size = shape[:-1]
        else:
            self.shape = torch.Size((cu_seqlens.shape[0] - 1,))
            _check.boundaries(cu_seqlens, self.length)  # a graph's are looked at when it runs
            # on a GPU they may be unchecked; no address may follow from what they are
            offsets = cu_seqlens.long().clamp(0, self.length)
            self._offsets = offsets.cummax(0).values if len(offsets) else offsets
            positions = torch.arange(self.length, device=cu_seqlens.device)
            # a token's segment
            segment = torch.searchsorted(self._offsets[1:], positions, right=True)
            self._segment = segment.clamp(max=max(self.shape[0] - 1, 0))

    def end(self) -> Tensor | int:
        """Return, for each token, the position behind its sequence."""
        return self.length if self._cu_seqlens is None else self._offsets[1:][self._segment]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over each sequence."""
        if self._cu_seqlens is None:
            return x.sum(-1) if x.dim() else x
        sums = torch.segment_reduce(
            x.double(), "sum", offsets=self._offsets, unsafe=True, initial=0
        )
        return sums.to(x.dtype)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Return each token's sequence's value."""
        if self._cu_seqlens is not None:
            return per_sequence[self._segment]
        return per_sequence.unsqueeze(-1).expand(self._tokens) if self._tokens else per_sequence

    def next_unmasked(self, mask: Tensor) -> Tensor:
        """Return, for each position, the next unmasked one behind it, `length` without one."""
        positions = torch.arange(self.length, device=mask.device).expand(mask.shape)
        here = torch.where(mask, positions, self.length)
        nearest = here.flip(-1).cummin(-1).values.flip(-1)
        return torch.cat([nearest[..., 1:], torch.full_like(nearest[..., :1], self.length)], -1)

    def last(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each sequence the flat index of its last unmasked token, and if it has one."""
        ends = torch.where(mask, torch.arange(1, self.length + 1, device=mask.device), 0)
        if self._cu_seqlens is None:
            last = ends.amax(-1) if self.length else mask.new_zeros(self.shape, dtype=torch.int64)
            starts = torch.arange(last.numel(), device=mask.device).view(last.shape) * self.length
        else:
            last = ends.new_zeros(self.shape).scatter_reduce(0, self._segment, ends, "amax")
            starts = 0
        return (starts + last - 1).clamp(min=0), last > 0

    def is_last(self, mask: Tensor) -> Tensor:
        """Return where a sequence's last unmasked token stands."""
        return mask & (self.next_unmasked(mask) >= self.end())
