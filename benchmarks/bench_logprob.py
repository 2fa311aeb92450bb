"""Log-probs from logits: ``python -m benchmarks.bench_logprob [--mib 256] [V …]``.

Columns: CPU milliseconds at one thread, best of several; the best plain torch form is the fastest
of log_softmax + gather and gather - logsumexp, on the whole or in blocks of rows. GB/s and the
share of what four streams read (backward: read and write) are those of the `cpu` backend.
"""

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import ppokern
from benchmarks.measure import Ceiling, seconds

BLOCKS = (1, 4, 16, 64)


def softmax_form(logits: Tensor, ids: Tensor) -> Tensor:
    """Eager, as most write it."""
    return logits.log_softmax(-1, dtype=torch.float32).gather(-1, ids[:, None])[:, 0]


def logsumexp_form(logits: Tensor, ids: Tensor) -> Tensor:
    """Eager, with less memory."""
    logits = logits.float()
    return logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(-1)


def entropy_form(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Eager, with entropy."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids[:, None])[:, 0], entropy


def in_blocks(form: Callable, logits: Tensor, ids: Tensor, rows: int) -> None:
    """A form on blocks of rows."""
    for part, part_ids in zip(logits.split(rows), ids.split(rows), strict=True):
        form(part, part_ids)


def backend(name: str, call: Callable[[], object], repeats: int) -> float:
    """Seconds on a backend."""
    with ppokern.use_backend(name):
        call()
        return seconds(call, repeats)


def backward(forward: Callable[[Tensor], Tensor], logits: Tensor, repeats: int) -> float:
    """Seconds of the backward pass alone; the forward pass is made anew each time."""
    best = float("inf")
    for _ in range(repeats):
        source = logits.detach().requires_grad_()
        out = forward(source.view_as(source)).sum()
        best = min(best, seconds(out.backward, 1))
        source.grad = None
    return best


def line(*cells: object) -> None:
    """Print a line of the table."""
    widths = (9, 8, 9, 9, 9, 9, 9, 9, 7, 6)
    print(" ".join(f"{cell!s:>{w}}" for cell, w in zip(cells, widths, strict=True)), flush=True)


def row(op: str, logits: Tensor, times: dict[str, float], moved: int, ceiling: float) -> None:
    """Print an op's line."""
    milliseconds = [f"{1e3 * times[k]:.1f}" if k in times else "-" for k in COLUMNS]
    rate = moved / times["cpu"]
    cells = (op, logits.shape[1], str(logits.dtype)[6:], *milliseconds)
    line(*cells, f"{rate / 1e9:.1f}", f"{rate / ceiling:.0%}")


COLUMNS = ("eager", "best", "compile", "torch", "cpu")


def bench(v: int, dtype: torch.dtype, mib: int, ceiling: Ceiling) -> None:
    """Measure every op at one width and dtype."""
    n = max(1, mib * 2**20 // (v * dtype.itemsize))
    logits = (3 * torch.randn(n, v)).to(dtype)
    ids = torch.randint(0, v, (n,))
    size = logits.nbytes

    times = {"eager": seconds(lambda: softmax_form(logits, ids), 2)}
    forms = (softmax_form, logsumexp_form)
    blocks = [(f, b) for f in forms for b in (*BLOCKS, n) if b <= n]
    times["best"] = min(seconds(lambda: in_blocks(f, logits, ids, b), 3) for f, b in blocks)  # noqa: B023
    compiled = torch.compile(softmax_form)
    compiled(logits, ids)
    times["compile"] = seconds(lambda: compiled(logits, ids), 3)

    def forward() -> object:
        return ppokern.selected_logprobs(logits, ids)

    times |= {name: backend(name, forward, 5) for name in ("torch", "cpu")}
    row("forward", logits, times, size, ceiling(logits))

    times = {"eager": seconds(lambda: entropy_form(logits, ids), 2)}
    compiled = torch.compile(entropy_form)
    compiled(logits, ids)
    times["compile"] = seconds(lambda: compiled(logits, ids), 3)

    def with_entropy() -> object:
        return ppokern.selected_logprobs_with_entropy(logits, ids)

    times |= {name: backend(name, with_entropy, 5) for name in ("torch", "cpu")}
    row("+ entropy", logits, times, size, ceiling(logits))

    def inplace(x: Tensor) -> Tensor:
        return ppokern.selected_logprobs(x, ids, inplace_backward=True)

    compiled = torch.compile(softmax_form)
    times = {
        "eager": backward(lambda x: softmax_form(x, ids), logits, 2),
        "compile": backward(lambda x: compiled(x, ids), logits, 3),
    }
    for name in ("torch", "cpu"):
        with ppokern.use_backend(name):
            times[name] = backward(inplace, logits.clone(), 5)
    row("backward", logits, times, 2 * size, ceiling(logits, write=True))


def small(v: int = 1000) -> None:
    """Microseconds of a call on few rows, log-probs alone."""
    print(f"\nmicroseconds at V = {v}: rows; eager, cpu; with a graph: same; with backward: same")
    for n in (1, 8, 64):
        logits, ids = torch.randn(n, v), torch.randint(0, v, (n,))
        leaf = logits.clone().requires_grad_()
        numbers = []
        grad = torch.ones(n)
        for x, learn in ((logits, False), (leaf, False), (leaf, True)):
            for form in (softmax_form, ppokern.selected_logprobs):

                def many(x: Tensor = x, learn: bool = learn, form: Callable = form) -> None:
                    for _ in range(300):
                        out = form(x, ids)  # noqa: B023
                        if learn:
                            torch.autograd.grad(out, x, grad)  # noqa: B023

                numbers.append(f"{seconds(many, 20) / 300 * 1e6:.1f}")
        print(f"{n:>4} {' '.join(numbers)}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("widths", nargs="*", type=int, default=[1000, 32_000, 152_064])
    parser.add_argument("--mib", type=int, default=256, help="size of the logits")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ceiling = Ceiling()
    print(f"torch {torch.__version__}, one thread, {ppokern.cpu_capability()}; CPU milliseconds")
    line("", "V", "dtype", *COLUMNS, "GB/s", "share")
    for v in options.widths:
        for dtype in (torch.float32, torch.bfloat16):
            bench(v, dtype, options.mib, ceiling)
    small()


if __name__ == "__main__":
    main()
