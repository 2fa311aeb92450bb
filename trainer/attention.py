"""Attention inside packed sequences, and of a sampled token on those before it.

transformers hands keyword arguments of a trunk down to its attention function. So a pass brings a
layout, `Packed` or `KeyValueCache`, which knows what each token may see; nothing is global. What a
model asks of attention and a layout does not know is refused by name: peers that pass over it are
off by whole nats.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available

from ppokern import position_ids, unpack

from .config import UserError, require
from .data import packed

NAME = "ppokern_packed"
NO_MATTER = {
    "position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits",
    "is_causal",
}  # fmt: skip


class Packed:
    """Sequences one behind the other in one row; none sees another, and no padding is computed.

    Neighbours of equal length share a call of SDPA, so sequences are best sorted by length.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        """Takes where each sequence begins and the last ends, `(S + 1,)`."""
        self.cu_seqlens = cu_seqlens.to(torch.int32)
        lengths = [length for length in cu_seqlens.diff().tolist() if length]
        self.longest = max(lengths, default=0)
        self.total = sum(lengths)
        self.runs = [(len(list(run)), length) for length, run in itertools.groupby(lengths)]

    def inputs(self, ids: Tensor) -> dict[str, Any]:
        """What the trunk is told of tokens `(total,)`."""
        positions = position_ids(self.cu_seqlens, total=self.total)
        return {"input_ids": ids[None], "position_ids": positions[None], "layout": self}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """`(1, heads, total, D)` to `(1, total, heads, D)`; keys may have fewer heads."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (total, heads, D)
        if query.is_cuda and query.element_size() == 2 and is_flash_attn_2_available():
            return self._flash(query, key, value, scale)[None]
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        sizes = [rows * length for rows, length in self.runs]
        # split, and not a slice each: its backward pass is one concatenation
        parts = zip(self.runs, *(x.split(sizes) for x in (query, key, value)), strict=True)
        attended = [
            scaled_dot_product_attention(
                *(x.unflatten(0, run).transpose(1, 2) for x in tensors), is_causal=True, scale=scale
            )
            .transpose(1, 2)
            .flatten(0, 1)
            for run, *tensors in parts
        ]
        return torch.cat(attended)[None]

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        ends, longest = self.cu_seqlens, self.longest
        return flash_attn_varlen_func(
            query, key, value, ends, ends, longest, longest, softmax_scale=scale, causal=True
        )


class KeyValueCache:
    """Keys and values of the rows that are being sampled, in buffers that are made once.

    The first pass is over the prompts, packed, each of them once. Their keys are set down for every
    row that answers them, padded on the left: all rows end in one column, so a step writes one.
    """

    def __init__(self, cu_seqlens: Tensor, rows: Tensor, room: int) -> None:
        """Begins with nothing.

        Args:
            cu_seqlens: `(S + 1,)` of the packed prompts.
            rows: `(b,)` the prompt that each row answers.
            room: most tokens that may follow a prompt.
        """
        self.prompts, self.rows, self.room = Packed(cu_seqlens), rows, room
        self.filled = 0  # columns
        self.positions = cu_seqlens.diff()[rows].long()  # (b,) of the next token
        padding = self.prompts.longest - self.positions  # (b,)
        columns = torch.arange(self.prompts.longest + room, device=rows.device)
        seen = columns >= padding[:, None]  # (b, columns)
        self.seen = seen[:, None, None] if bool(padding.any()) else None
        self.buffers: dict[nn.Module, list[Tensor]] = {}  # (b, columns, heads, D)

    def inputs(self, ids: Tensor) -> dict[str, Any]:
        """What the trunk is told: of the packed prompts at first, then of a token a row `(b,)`."""
        if self.filled == 0:
            self.filled = self.prompts.longest
            return self.prompts.inputs(ids) | {"layout": self}
        told = {"input_ids": ids[:, None], "position_ids": self.positions[:, None], "layout": self}
        self.filled, self.positions = self.filled + 1, self.positions + 1
        return told

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """The prompts' own attention, or `(b, heads, 1, D)` to `(b, 1, heads, D)`."""
        if module not in self.buffers:
            self.buffers[module] = [self._set_down(x) for x in (key, value)]
            return self.prompts.attend(module, query, key, value, scale)
        for buffer, new in zip(self.buffers[module], (key, value), strict=True):
            buffer[:, self.filled - 1] = new[:, :, 0]
        past = [x[:, : self.filled].transpose(1, 2) for x in self.buffers[module]]
        # heads that share a key stand as queries side by side: no key is repeated
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        seen = self.seen if self.seen is None else self.seen[..., : self.filled]
        attended = scaled_dot_product_attention(grouped, *past, attn_mask=seen, scale=scale)
        return attended.flatten(1, 2)[:, None]

    def _set_down(self, x: Tensor) -> Tensor:
        prompts, longest = self.prompts.cu_seqlens, self.prompts.longest
        padded = unpack(x[0].transpose(0, 1), prompts, length=longest, padding_side="left")
        buffer = x.new_empty(len(self.rows), longest + self.room, *padded.shape[2:])
        buffer[:, :longest] = padded[self.rows]
        return buffer

    def last(self, hidden: Tensor) -> Tensor:
        """What a pass made of the last token of each row: `(tokens, H)` to `(b, H)`."""
        if self.filled > self.prompts.longest:
            return hidden
        return hidden[self.prompts.cu_seqlens[1:] - 1][self.rows]

    def keep(self, rows: Tensor) -> None:
        """Leaves out all rows but these, `(b',)` indices; the buffers are used on."""
        self.positions = self.positions[rows]
        self.seen = self.seen if self.seen is None else self.seen[rows]
        for pair in self.buffers.values():
            for i, buffer in enumerate(pair):
                pair[i] = buffer[: len(rows)]
                pair[i][:, : self.filled] = buffer[rows, : self.filled]


@torch.compiler.disable  # its shapes are those of the batch's sequences
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Packed | KeyValueCache | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: the attention of one block, in the pass's own layout."""
    if layout is None:
        raise UserError(
            f"{type(module).__name__} is told nothing of the pass it is in, so it cannot be packed"
        )
    asked = {name for name, value in options.items() if value is not None} - NO_MATTER
    asked |= {"dropout"} if dropout else set()
    asked |= {"a mask of its own"} if attention_mask is not None else set()
    asked |= {"attention to what follows"} if not getattr(module, "is_causal", True) else set()
    for name in sorted(asked):
        raise UserError(f"{type(module).__name__} asks for {name}, which packing does not know")
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotated in float32 under autocast
    return layout.attend(module, query, key, value, scaling), None


AttentionInterface.register(NAME, attend)  # without a mask function: transformers makes no mask


@torch.no_grad()
def use_packed(model: PreTrainedModel) -> None:
    """Sets a model's attention to `attend`, or says by name what stands against it.

    What no option of a model tells shows in its numbers: packed, they must be those of its own
    attention on each sequence alone.
    """
    config, kind = model.config, model.config.model_type
    if config._attn_implementation == NAME:
        return
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    names = ("attn_logit_softcapping", "alibi", "attention_chunk_size")
    for name in [*sorted(kinds), *(name for name in names if getattr(config, name, None))]:
        raise UserError(f"{kind}: packing does not know {name}")
    require(
        not getattr(config, "output_router_logits", False),
        f"{kind}: output_router_logits asks for a loss of the router, which no stage adds: "
        "config.json is to say false",
    )
    rows = [list(range(7)), [3, 1, 4, 1, 5]]
    trunk = model.base_model
    try:
        alone = [
            trunk(input_ids=torch.tensor([row], device=model.device), use_cache=False)[0]
            for row in rows
        ]
        model.set_attn_implementation(NAME)
        require(
            config._attn_implementation == NAME,
            f"{kind}: transformers lets no other attention into this model, so it cannot be packed",
        )
        ids, cu_seqlens = packed(rows, model.device)
        together = trunk(**Packed(cu_seqlens).inputs(ids), use_cache=False)[0]
    except UserError:
        raise
    except Exception as error:  # whatever a family makes of a pass that it was not written for
        raise UserError(f"{kind} cannot be packed: {type(error).__name__}: {error}") from error
    apart = (together - torch.cat(alone, 1)).abs().max().item()
    require(
        apart <= 1e-3 * together.abs().max().item(),
        f"{kind}: packed sequences differ by {apart:.2g} from each alone: its attention or its "
        "positions do something that packing does not know",
    )
