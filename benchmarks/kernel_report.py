"""What the Triton kernels compile to: ``python -m benchmarks.kernel_report [--arch 90]``.

Needs Triton and no GPU. The ops' own launches are recorded, not run, over options that lead to
different code; each is compiled, and the table says what a multiprocessor can hold of it: registers
a thread, bytes of stack (spilled registers), shared memory, programs that fit at a time, and how
many of the loads and stores of logits are 16 bytes wide.
"""

# pyright: reportMissingImports=false

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

from benchmarks import cuda_report, roofline
from ppokern.gae import kernel_triton as gae
from ppokern.linear import kernel_triton as linear
from ppokern.linear.reference import Chunk, Head, Plan
from ppokern.logprob import kernel_triton as logprob
from ppokern.ppo_loss import kernel_triton as ppo_loss
from ppokern.ppo_loss.reference import Inputs, Options, TokenSlopes
from ppokern.reward import kernel_triton as reward

ARCHS = (80, 90, 100)
AMD = "gfx942"  # MI300
FIELDS = (r"\.vgpr_count", r"\.private_segment_fixed_size")  # of its assembly
OPTIONS = ("num_warps", "maxnreg")
TOOLS = Path(str(triton.__file__)).parent / "backends/nvidia/bin"
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32  # of a multiprocessor
SHARED = {
    80: 164,
    90: 228,
    100: 228,
}  # KiB of it, of which each program takes one more than its own


class Launch(NamedTuple):
    """A kernel with what its code depends on."""

    kernel: Any
    specialization: tuple
    constants: tuple
    warps: int
    most_registers: int | None

    @property
    def name(self) -> str:
        """Room and name of the kernel."""
        return f"{self.kernel.fn.__module__.split('.')[1]}.{self.kernel.fn.__name__}"


class Compiled(NamedTuple):
    """What a kernel became."""

    registers: int
    stack: int
    shared: int
    resident: int  # programs that a multiprocessor holds
    wide: int  # loads and stores of 16 bytes
    narrow: int
    ptx: str


@cache
def _backend(arch: int | str) -> Any:
    return make_backend(_target(arch))


def _target(arch: int | str) -> GPUTarget:
    on_amd = isinstance(arch, str)
    return GPUTarget("hip", arch, 64) if on_amd else GPUTarget("cuda", arch, 32)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record the launches of the block in place of running them."""
    launches: list[Launch] = []
    original = jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = jit.create_function_from_signature(self.signature, self.params, _backend(90))
        bound, specialization, options = bind(*args, **kwargs)
        values = [
            value if kind == "constexpr" else None
            for value, (kind, *_) in zip(bound.values(), specialization, strict=True)
        ]
        kinds = tuple(tuple(x) for x in specialization)
        launches.append(Launch(self, kinds, tuple(values), *map(options.get, OPTIONS)))

    jit.JITFunction.run = run
    try:
        yield launches
    finally:
        jit.JITFunction.run = original


def _compile(launch: Launch, arch: int | str) -> Any:
    names = [p.name for p in launch.kernel.params]
    kinds = [kind for kind, _ in launch.specialization]
    constants = {(i,): launch.constants[i] for i, k in enumerate(kinds) if k == "constexpr"}
    hints = {
        (i,): _backend(arch).parse_attr(hint)
        for i, (_, hint) in enumerate(launch.specialization)
        if isinstance(hint, str)
    }
    source = ASTSource(launch.kernel, dict(zip(names, kinds, strict=True)), constants, hints)
    options = dict(zip(OPTIONS, launch[-2:], strict=True))
    if arch == AMD:
        options["num_warps"] = min(launch.warps, 8)  # of 64 lanes, as the launchers have them there
    return triton.compile(source, target=_target(arch), options=options)


def compiled_for_amd(launch: Launch) -> tuple[int, int, int]:
    """Compile a launch for an AMD GPU; return registers, bytes of stack and shared memory."""
    result = _compile(launch, AMD)
    code = result.asm["amdgcn"]
    found = (re.search(rf"{field}: +(\d+)", code) for field in FIELDS)
    registers, stack = (int(match[1]) if match else -1 for match in found)
    return registers, stack, result.metadata.shared


def compiled(launch: Launch, arch: int) -> Compiled:
    """Compile a launch for an architecture and look at what came out."""
    result = _compile(launch, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage, code = (_tool("cuobjdump", option, file.name) for option in ("-res-usage", "-sass"))
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    registers, stack = int(match[1]), int(match[2])
    moves = re.findall(r"\b(?:LDG|STG)\.\S+", code)
    wide = sum(".128" in move for move in moves)
    threads = 32 * launch.warps
    resident = min(
        REGISTERS // (-(-registers // 8) * 8 * threads),
        THREADS // threads,
        SHARED[arch] * 1024 // (result.metadata.shared + 1024),
        PROGRAMS,
    )
    return Compiled(
        registers, stack, result.metadata.shared, resident, wide, len(moves) - wide,
        result.asm["ptx"],
    )  # fmt: skip


def _tool(name: str, *arguments: str) -> str:
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def logprob_calls(n: int = 3, v: int = 8192, temperature: float = 0.7) -> dict[str, Callable]:
    """Calls of both passes, from the least that they can be asked for to all of it."""

    def call(dtype: torch.dtype, width: int, what: str) -> None:
        everything = what == "all"
        logits, ids = torch.zeros(n, width, dtype=dtype), torch.zeros(n, dtype=torch.int64)
        if what == "in blocks":  # rows have no common stride
            logits = torch.zeros(2, n, width, dtype=dtype).transpose(0, 1)
            ids = torch.zeros(n, 2, dtype=torch.int64)
        softcap = 30.0 if everything else None
        mask = torch.ones(n, dtype=torch.bool) if what in ("all", "masked") else None
        at = torch.ones(n) if everything else temperature
        x = logprob.Rows(logits, ids, mask, at, softcap, width)
        *_, found = logprob.forward(x, everything, torch.float32)
        in_entropy = torch.ones(n) if everything else None
        in_logprobs = torch.ones(ids.shape)
        logprob.backward(in_logprobs, in_entropy, x, found, logits, compact=everything)

    wanted = [(dtype, v, "all") for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for dtype in (torch.float32, torch.bfloat16):
        wanted += [(dtype, v, what) for what in ("", "masked", "in blocks")]
        wanted += [(dtype, v + 1, ""), (dtype, v + 1, "all"), (dtype, 64, "all")]
    wanted += [(torch.bfloat16, 151_936, "all")]
    return {
        f"{str(dtype)[6:]} V={width} {what}".rstrip(): (
            lambda d=dtype, w=width, e=what: call(d, w, e)
        )
        for dtype, width, what in wanted
    }


def linear_calls(n: int = 3, v: int = 5 * 4096, coef: float = 0.1) -> dict[str, Callable]:
    """Calls of the loss's pass over logits, from the least to all that can be asked for."""

    def call(dtype: torch.dtype, width: int, everything: bool, softcap: float | None) -> None:
        x, mask = torch.zeros(n), torch.ones(n, dtype=torch.bool)
        terms = {"old_logprobs": x, "advantages": x}
        terms |= {"weights": x, "ref_logprobs": x} if everything else {}
        own = coef if everything else 0.0
        options = Options(coef, coef, None, False, 20.0, "sum", own, own, "k3", None, 1.0)
        slopes = TokenSlopes(Inputs(**terms), options, mask, torch.float32)
        weight, at = torch.zeros(width, 1, dtype=dtype), torch.ones(n if everything else ())
        head = Head(weight, None, at, softcap, width, torch.float32)
        how = Plan(None, mask, everything, dtype, n, width, width, True)
        logits = torch.zeros(n, width, dtype=dtype)
        rows = torch.arange(n) if everything else slice(0, n)
        # nothing runs, so nothing says which rows have a slope: not all
        with patch("ppokern.linear.reference.kept_rows", lambda used: used[:0]):
            linear.loss_pass(
                Chunk(rows, weight, logits, at), head, how, torch.zeros(n, dtype=torch.int64),
                slopes, x, x if everything else None,
            )  # fmt: skip

    softcaps = {"": None, " entropy": None, " all": 30.0}
    return {
        f"{str(dtype)[6:]} {word}{more}": (
            lambda d=dtype, w=width, m=more: call(d, w, m != "", softcaps[m])
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for word, width in {"aligned": v, "odd": v + 1, "long": 8 * v, "narrow": 64}.items()
        for more in softcaps
        if more or word != "narrow"
        if dtype != torch.float16 or (more == " all" and word == "aligned")
    }


def gae_calls(b: int = 3, t: int = 200, gamma: float = 0.99) -> dict[str, Callable]:
    """Calls in every layout, for short and long sequences."""

    def call(shape: tuple[int, ...], time_dim: int, what: str, packed: bool = False) -> None:
        everything, dtype = what != "", torch.bfloat16 if "bfloat16" in what else torch.float32
        flag, extra = torch.ones(shape, dtype=torch.bool), torch.ones(shape, dtype=dtype)
        x = gae.Inputs(extra, extra)
        if everything:
            x = gae.Inputs(extra, extra, flag, flag, flag, extra)
        if packed:
            x = x._replace(cu_seqlens=torch.tensor([0, 5, shape[0]]))
        gae.gae(x, gae.Options(gamma, 0.95 * gamma, "decay" in what, time_dim), check=False)

    calls: dict[str, Callable] = {}
    for what in ("", "all", "all, decay, bfloat16"):
        word = f" {what}".rstrip()
        calls[f"short{word}"] = lambda e=what: call((b, 40), -1, e)
        calls[f"long{word}"] = lambda e=what: call((b, t), -1, e)
        calls[f"time-major{word}"] = lambda e=what: call((t, b), 0, e)
        calls[f"packed{word}"] = lambda e=what: call((b * t,), -1, e, True)
    return calls


def ppo_loss_calls(b: int = 3, t: int = 200, number: float = 0.2) -> dict[str, Callable]:
    """Calls of the policy loss, the value loss and both with all that can be asked for."""

    def call(
        fields: tuple[str, ...], flags: tuple[str, ...], ratio: bool, how: str, kind: str = "k3",
        dtype: torch.dtype = torch.float32, packed: bool = False,
    ) -> None:  # fmt: skip
        shape = (b * t,) if packed else (b, t)
        x = {name: torch.ones(shape, dtype=dtype) for name in fields}
        x |= {name: torch.ones(shape, dtype=torch.bool) for name in flags}
        if packed:
            x["cu_seqlens"] = torch.tensor([0, 5, b * t])
        coef = number if "entropy" in fields else 0.0
        value_clip = number if "old_values" in fields else None
        limits = (number, number, 2 + number, ratio, 20 * number)
        ppo_loss.forward(Inputs(**x), Options(*limits, how, coef, coef, kind, value_clip, number))

    policy = ("logprobs", "old_logprobs", "advantages")
    values, rest = ("values", "old_values", "returns"), ("entropy", "weights", "ref_logprobs")
    both, masks = (*policy, *values, *rest), ("mask", "value_mask")
    half = torch.bfloat16
    return {
        "policy": lambda: call(policy, (), False, "token_mean"),
        "values": lambda: call(values, ("mask",), False, "token_mean"),
        "all": lambda: call(both, masks, False, "token_mean"),
        "all, k1, bfloat16": lambda: call(both, masks, False, "token_mean", "k1", half),
        "all, per token": lambda: call(both, ("mask",), False, "none"),
        "all, by sequence": lambda: call(both, ("mask",), True, "sequence_mean"),
        "all, packed, k2": lambda: call(both, masks, True, "sequence_mean", "k2", packed=True),
    }


def whiten_calls(b: int = 3, t: int = 200, eps: float = 1e-8) -> dict[str, Callable]:
    """Calls with and without a mask."""

    def call(masked: bool) -> None:
        x, mask = torch.zeros(b, t), torch.ones(b, t, dtype=torch.bool)
        gae.whiten(x, mask if masked else None, not masked, eps, 1.0, None)

    return {"whiten": lambda: call(False), "whiten all": lambda: call(True)}


def reward_calls(b: int = 3, t: int = 200, kl_coef: float = 0.1) -> dict[str, Callable]:
    """Calls for short, long and packed sequences."""

    def call(length: int, everything: bool, packed: bool = False) -> None:
        x, scores = torch.zeros(b, length), torch.zeros(b)
        mask = torch.ones(b, length, dtype=torch.bool)
        given = torch.ones(b, dtype=torch.bool) if everything else None
        offsets = torch.arange(b + 1) * length if packed else None
        if packed:
            x, mask = x.view(-1), mask.view(-1)
        tensors = reward.Inputs(
            scores, x, x, mask if everything else None, given, x if everything else None, offsets
        )
        reward.shaped_rewards(tensors, reward.Options(kl_coef, "k3"))

    return {
        "short": lambda: call(40, False),
        "long": lambda: call(t, False),
        "long all": lambda: call(t, True),
        "packed all": lambda: call(t, True, True),
    }


def configurations() -> dict[tuple[str, str], Launch]:
    """Return every different launch, by kernel and the first call that made it."""
    found: dict[Launch, tuple[str, str]] = {}
    rooms = (logprob_calls, linear_calls, gae_calls, whiten_calls, ppo_loss_calls, reward_calls)
    for calls in rooms:
        for label, call in calls().items():
            with recorded() as launches:
                call()
            for launch in launches:
                found.setdefault(launch, (launch.name, label))
    return {key: launch for launch, key in found.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=[*map(str, ARCHS), AMD], action="append")
    wanted = parser.parse_args().arch
    print(f"triton {triton.__version__}")
    titles = ("registers", "stack", "shared", "resident", "wide", "narrow")
    print(f"{'kernel':26} {'first call':24} {'':6} {' '.join(f'{t:>9}' for t in titles)}")
    for (name, label), launch in configurations().items():
        for arch in (*ARCHS, AMD):
            if wanted and str(arch) not in wanted:
                continue
            on_amd = isinstance(arch, str)
            numbers = compiled_for_amd(launch) if on_amd else compiled(launch, arch)[:-1]
            print(f"{name:26} {label:24} {arch:<6} {' '.join(f'{x:9}' for x in numbers)}")
    cuda_report.report([arch for arch in ARCHS if not wanted or str(arch) in wanted])
    roofline.report()


if __name__ == "__main__":
    main()
