"""The policy loss from hidden states and head weight, forward and backward.

Its floor is that of any method which keeps no logits: three matrix products, their outputs
allocated in the call. `linear_cross_entropy` is PyTorch's own chunked op of a simpler loss, in
chunks as large as ours.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ppokern

SHAPES = [(4096, 256, 8_192), (2048, 512, 32_768), (1024, 1024, 151_936)]
CASES = pytest.mark.parametrize("shape", SHAPES, ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LIMIT = 2**28  # bytes of logits that ours holds at a time
FORMS = ("floor", "eager", "compile", "linear_cross_entropy", *ppokern.available_backends())


def eager(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, old_logprobs: Tensor, advantages: Tensor
) -> Tensor:
    """As most write it."""
    logits = (hidden @ weight.t()).float()
    logprobs = logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def cross_entropy(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, old_logprobs: Tensor, advantages: Tensor
) -> Tensor:
    """PyTorch's op, in chunks as large as ours."""
    rows = max(1, LIMIT // (weight.shape[0] * weight.itemsize))
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=min(rows, len(hidden)), chunking_method=None
    )
    return F.linear_cross_entropy(hidden, weight, token_ids, options=options)


@functools.lru_cache(maxsize=1)
def data(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a call's tensors; every token has a gradient."""
    n, h, v = shape
    hidden, weight = torch.randn(n, h).to(dtype), (torch.randn(v, h) / h**0.5).to(dtype)
    ids = torch.randint(0, v, (n,))
    old = ppokern.linear_selected_logprobs(hidden, weight, ids)
    x = {"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_(), "token_ids": ids}
    return x | {"old_logprobs": old, "advantages": torch.randn(n)}


def call_of(form: str, x: dict[str, Tensor], limit: int = LIMIT) -> Callable[[], object]:
    """Return a call that makes both gradients."""
    ours = functools.partial(ppokern.linear_ppo_loss, max_logits_bytes=limit)
    forms = {"eager": eager, "compile": torch.compile(eager), "linear_cross_entropy": cross_entropy}
    call: Any = forms.get(form, ours)
    hidden, weight = x["hidden"], x["weight"]

    def products() -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            logits = torch.mm(hidden, weight.t())
            return logits, torch.mm(logits, weight), torch.mm(logits.t(), hidden)

    def gradients() -> tuple[Tensor, ...]:
        out = call(**x)
        return torch.autograd.grad(out[0] if isinstance(out, tuple) else out, (hidden, weight))

    return products if form == "floor" else gradients


@pytest.mark.parametrize("form", FORMS)
@DTYPES
@CASES
def bench_linear(
    measure: Callable, shape: tuple[int, int, int], dtype: torch.dtype, form: str
) -> None:
    """At most 256 MiB of logits at a time; and what that holds."""
    call = call_of(form, data(shape, dtype))
    measure(f"linear_ppo_loss {shape} {dtype}", form, call, rounds=2, peak=True)


@pytest.mark.parametrize("form", ["floor", "cpu"])
@DTYPES
@CASES
def bench_sixth(
    measure: Callable, shape: tuple[int, int, int], dtype: torch.dtype, form: str
) -> None:
    """In less than a sixth of the memory of plain torch, which holds three copies in float32."""
    call = call_of(form, data(shape, dtype), limit=3 * 4 * shape[0] * shape[2] // 8)
    measure(f"the same in an eighth {shape} {dtype}", form, call, rounds=2, peak=True)


@pytest.mark.parametrize("form", ["floor", "cpu"])
@DTYPES
def bench_one_chunk(measure: Callable, dtype: torch.dtype, form: str) -> None:
    """The widest vocabulary, all of its logits at a time."""
    call = call_of(form, data(SHAPES[-1], dtype), limit=2**30)
    measure(f"the same in one chunk {SHAPES[-1]} {dtype}", form, call, rounds=2)


@pytest.mark.parametrize("form", ["floor", "cpu"])
@DTYPES
@CASES
def bench_flat_tokens(
    measure: Callable, shape: tuple[int, int, int], dtype: torch.dtype, form: str
) -> None:
    """40 % of the tokens on the flat side of the clip range: without a gradient."""
    x = dict(data(shape, dtype))
    flat = torch.arange(shape[0]) % 5 < 2
    x["old_logprobs"] = torch.where(flat, x["old_logprobs"] - 1, x["old_logprobs"])
    x["advantages"] = torch.where(flat, x["advantages"].abs(), x["advantages"])
    call = call_of(form, x)
    measure(f"the same, 40 % flat {shape} {dtype}", form, call, rounds=2)
