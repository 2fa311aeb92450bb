"""What tests share to observe a call: gradients, side effects, memory, matrix products."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

GEMMS = {f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv")}


def grads(outputs: Sequence[Tensor], inputs: Sequence[Tensor], incoming: Sequence[Tensor]) -> Any:
    """Gradients, zeros for what an output doesn't depend on (an oracle skips what is masked)."""
    kept = [(o, g) for o, g in zip(outputs, incoming, strict=True) if o.requires_grad]
    if not kept:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(
        [o for o, _ in kept],
        inputs,
        [g.to(o.dtype) for o, g in kept],
        allow_unused=True,
        materialize_grads=True,
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN to NaN."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7))
    )


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@contextmanager
def unchanged(*tensors: Tensor | None) -> Iterator[None]:
    kept = [t for t in tensors if isinstance(t, Tensor)]
    before = [(t.detach().clone(), t._version) for t in kept]
    yield
    for t, (copy, version) in zip(kept, before, strict=True):
        assert t._version == version, "an argument was written in place"
        same = (
            torch.equal(t.nan_to_num(7e7), copy.nan_to_num(7e7)) if t.is_floating_point() else None
        )
        assert same if same is not None else torch.equal(t, copy), "an argument changed"


PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import {module} as t
from ppokern import cpu_capability
torch.save([cpu_capability(), {results}], sys.argv[2])
"""


CAPABILITIES = ("default", "avx2", "avx512", "avx512_bf16")


def on_instruction_set(capability: str, module: str, results: str, folder: Path) -> Any:
    """What an expression, of the test module `t`, gives on an instruction set; skips without it."""
    program, out = PROGRAM.format(module=module, results=results), folder / "out.pt"
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(out)]
    subprocess.run(command, check=True, env=os.environ | {"PPOKERN_CPU_CAPABILITY": capability})
    used, result = torch.load(out)
    if used != capability:
        import pytest  # benchmarks/gpu_check.py runs where it may be absent

        pytest.skip(f"this machine has no {capability}")
    return result


class Usage(NamedTuple):
    result: Any
    peak_bytes: int
    gemm_flops: int


def usage(call: Callable[[], Any]) -> Usage:
    """Runs the call: the most bytes it held at a time beyond what was there, its GEMM flops."""
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True
    ) as prof:
        result = call()
    assert prof.profiler is not None and prof.profiler.kineto_results is not None
    events = prof.profiler.kineto_results.events()
    held = peak = 0
    for e in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += e.nbytes()
        peak = max(peak, held)
    flops = 0
    for e in events:
        if e.name() in GEMMS:
            shapes = [s for s in e.shapes() if s]
            if "add" in e.name():  # the first one is what is added to
                shapes = shapes[1:]
            left, right = shapes[:2]
            flops += 2 * math.prod(left) * (right[-1] if len(right) == len(left) else 1)
    return Usage(result, peak, flops)
