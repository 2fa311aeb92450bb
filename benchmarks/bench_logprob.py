"""Log-probs from logits, of 256 MiB of them."""

import functools
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ppokern
from benchmarks.ceiling import Moved, reading, rewriting

SIZES = pytest.mark.parametrize("v", [32_768, 151_936])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
MIB = 256


def softmax_form(logits: Tensor, ids: Tensor) -> Tensor:
    """As most write it."""
    return logits.log_softmax(-1, dtype=torch.float32).gather(-1, ids[:, None])[:, 0]


def logsumexp_form(logits: Tensor, ids: Tensor) -> Tensor:
    """With less memory."""
    logits = logits.float()
    return logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(-1)


def entropy_form(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """With entropy."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids[:, None])[:, 0], entropy


def in_blocks(form: Callable, rows: int) -> Callable:
    """A form on blocks of rows, which keeps its temporaries in the cache."""

    def run(logits: Tensor, ids: Tensor) -> Tensor:
        parts = zip(logits.split(rows), ids.split(rows), strict=True)
        return torch.cat([form(part, part_ids) for part, part_ids in parts])

    return run


PLAIN = {"eager": softmax_form, "logsumexp": logsumexp_form}
BLOCKS = {
    f"{name} by {rows} rows": in_blocks(form, rows)
    for name, form in PLAIN.items()
    for rows in (1, 4, 16)
}


@functools.lru_cache(maxsize=1)
def data(v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Moved, Moved]:
    """Return logits, ids, and the ceilings of a read and of a read and write."""
    rows = MIB * 2**20 // (v * dtype.itemsize)
    logits = (3 * torch.randn(rows, v)).to(dtype)
    return logits, torch.randint(0, v, (rows,)), reading(logits), rewriting(logits)


@pytest.mark.parametrize("form", [*PLAIN, *BLOCKS, "compile", *ppokern.available_backends()])
@DTYPES
@SIZES
def bench_forward(measure: Callable, v: int, dtype: torch.dtype, form: str) -> None:
    """Forward pass without a gradient."""
    logits, ids, moved, _ = data(v, dtype)
    forms = {**PLAIN, **BLOCKS, "compile": torch.compile(softmax_form)}
    call = forms.get(form, ppokern.selected_logprobs)
    measure(f"forward {v} {dtype}", form, lambda: call(logits, ids), moved=moved, peak=True)


@pytest.mark.parametrize("form", ["eager", "compile", *ppokern.available_backends()])
@DTYPES
@SIZES
def bench_entropy(measure: Callable, v: int, dtype: torch.dtype, form: str) -> None:
    """Forward pass with entropy."""
    logits, ids, moved, _ = data(v, dtype)
    forms = {"eager": entropy_form, "compile": torch.compile(entropy_form)}
    call = forms.get(form, ppokern.selected_logprobs_with_entropy)
    measure(f"with entropy {v} {dtype}", form, lambda: call(logits, ids), moved=moved)


@pytest.mark.parametrize("form", ["eager", "compile", *ppokern.available_backends()])
@DTYPES
@SIZES
def bench_backward(measure: Callable, v: int, dtype: torch.dtype, form: str) -> None:
    """Backward pass alone; ours in place."""
    logits, ids, _, moved = data(v, dtype)
    forms = {"eager": softmax_form, "compile": torch.compile(softmax_form)}
    inplace = functools.partial(ppokern.selected_logprobs, inplace_backward=True)
    call, logits = forms.get(form, inplace), logits.clone()

    def forward() -> tuple[Tensor]:
        source = logits.detach().requires_grad_()
        return (call(source.view_as(source), ids).sum(),)

    measure(f"backward {v} {dtype}", form, lambda x: x.backward(), forward, moved=moved)


@pytest.mark.benchmark(timer=time.perf_counter)
@pytest.mark.parametrize("form", ["eager", *ppokern.available_backends()])
@pytest.mark.parametrize("threads", [1, 2])
@DTYPES
def bench_threads(measure: Callable, dtype: torch.dtype, threads: int, form: str) -> None:
    """Forward pass on one and on two threads, by the clock on the wall."""
    logits, ids, _, _ = data(32_768, dtype)
    torch.set_num_threads(threads)
    call = {"eager": softmax_form}.get(form, ppokern.selected_logprobs)
    measure(f"forward 32768 {dtype}, wall, {threads} threads", form, lambda: call(logits, ids))
