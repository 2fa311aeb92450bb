"""Everything that only a GPU can tell, in under eight minutes: ``python -m benchmarks.gpu_check``.

Needs an NVIDIA GPU and torch 2.9 or later with its own Triton; downloads and installs nothing. In
this order: the CUDA kernels built in place, where nvcc and pybind11 are; every op on the backends
`triton` and `cuda` against float64, beside eager PyTorch; `linear_ppo_loss` against three bare
GEMMs, with its peak memory; the kernels' share of the bandwidth of a copy, and what a call costs
the host; eager, torch.compile and, where installed, Liger in the same run; small cases under
compute-sanitizer, where it is; the op tests with the marker `gpu`, where pytest is there. Prints
one table and writes it to ``runs/gpu_check.json``. Ends with 1 where anything is wrong, failed or
missing.

A line that fails says so and the next one runs: the machine may not be there a second time. So each
part is a process of its own, that is ended when its time is over, and keeps the lines it has.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs"
if importlib.util.find_spec("jaxtyping") is None:  # annotations alone; none is checked here
    shapes = types.ModuleType("jaxtyping")
    shapes.__dict__.update(dict.fromkeys(("Bool", "Float", "Integer"), dict))
    sys.modules["jaxtyping"] = shapes

import ppokern  # noqa: E402
from ppokern._names import Backend  # noqa: E402

SECONDS = 470  # of all parts together
ROOMS = ("logprob", "linear", "linear_loss", "gae", "whiten", "ppo_loss", "reward")
OPS = {"selected": "logprob", "linear": "linear", "gae": "gae", "whiten": "whiten"}
OPS |= {"shaped": "reward", "ppo": "ppo_loss"}  # the room of an op, by its first word
HERE = ppokern.available_backends()
KERNELS: list[Backend] = [name for name in HERE if name in ("triton", "cuda")]


class Report:
    """Lines of a part, printed and kept in a file as they come."""

    def __init__(self, path: Path, quick: bool = False) -> None:
        """Write to `path`, a line of JSON each."""
        self.path, self.quick = path, quick

    def line(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure and print a line, or why there is none."""
        begun = time.monotonic()
        try:
            cells = measure()
        except Exception as error:  # see the module's docstring
            cells = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.add({"name": name, **cells, "took": time.monotonic() - begun})

    def add(self, line: dict[str, Any]) -> None:
        """Print a line and keep it."""
        cells = {k: x for k, x in line.items() if k not in ("name", "took")}
        shown = (f"{k} {x:.4g}" if isinstance(x, float) else f"{k} {x}" for k, x in cells.items())
        print(f"{line['name']:48} {'  '.join(shown)}", flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def run_part(name: str, command: list[str], seconds: float, path: Path) -> None:
    """Run a part until it ends or its time is over; if it did not end well a line says so."""
    part = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = part.wait(seconds)
        failed = f"ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        os.killpg(part.pid, signal.SIGKILL)  # what it started too
        part.wait()
        failed = f"no end after {seconds:.0f} s"
    if failed:
        Report(path).add({"name": f"the part {name}", "failed": failed})


def milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Return the median of several calls, after one that compiles; nothing is left in the cache."""
    call()
    times, flush = [], torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def build(report: Report) -> None:
    """Build the CUDA kernels in place, for this GPU alone."""
    absent = [x for x in ("setuptools", "pybind11") if importlib.util.find_spec(x) is None]
    absent += [] if shutil.which("nvcc") or os.environ.get("CUDA_HOME") else ["nvcc"]

    def measure() -> dict[str, Any]:
        if absent:
            return {"skipped": f"without {', '.join(absent)}"}
        arch = "{}{}".format(*torch.cuda.get_device_capability())
        env = os.environ | {"PPOKERN_CUDA": "on", "PPOKERN_CUDA_ARCHS": arch}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        return {} if done.returncode == 0 else {"failed": done.stderr[-200:]}

    report.line("CUDA kernels built", measure)


# Right or wrong -----------------------------------------------------------------------------------


def against_float64(report: Report) -> None:
    """Every op's outputs and gradients: errors beside that of plain torch in the same dtype."""
    sys.path.insert(0, str(ROOT / "tests"))
    calls: Any = importlib.import_module("calls")
    able: Any = importlib.import_module("matrix").CAN

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    def errors(kind: str, name: str, dtype: torch.dtype) -> dict[str, Any]:
        torch.manual_seed(0)
        with torch.device("cuda"):
            table = calls.packed() if kind == "packed" else calls.every(dtype)
            call = table[name]
            results = {}
            room = OPS[name.split("_")[0]]
            for backend in HERE:
                if backend == "cpu" or room not in able[backend].ops:
                    continue
                with ppokern.use_backend(backend):
                    results[backend] = call.run(call.leaves())
            exact = call._replace(args={k: wide(x) for k, x in call.args.items()})
            with ppokern.use_backend("torch"):
                truth = exact.run(exact.leaves())

        def worst(mine: list[Tensor]) -> float:
            pairs = zip(mine, truth, strict=True)
            return max((a.double() - b).abs().max().item() for a, b in pairs)

        found = {backend: worst(mine) for backend, mine in results.items()}
        size = max(1.0, *(t.abs().max().item() for t in truth))
        return found | {"right": max(found.values()) <= 2 * found["torch"] + 1e-6 * size}

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes[:1] if report.quick else dtypes:
        for name in calls.NAMES:
            if name.split("_")[0] in OPS:
                label = f"{name} {str(dtype)[6:]}"
                report.line(label, lambda n=name, d=dtype: errors("batch", n, d))
    for name in calls.PACKED_NAMES:
        if name.split("_")[0] in OPS:
            report.line(f"{name} packed", lambda n=name: errors("packed", n, torch.float32))


def sanitized(report: Report) -> None:
    """Small cases of every op under compute-sanitizer."""
    program = shutil.which("compute-sanitizer")
    part = [sys.executable, "-m", "benchmarks.gpu_check", "--quick", "--part", "right"]

    def measure(tool: str) -> dict[str, Any]:
        if program is None:
            return {"skipped": "without compute-sanitizer"}
        path = RUNS / f"gpu_check_{tool}.txt"
        with path.open("w") as file:
            command = [program, "--tool", tool, "--error-exitcode", "9", *part]
            command += ["--out", str(path.with_suffix(".json"))]
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, check=False)
        return {"right": done.returncode == 0, "last": path.read_text().strip().split("\n")[-1]}

    for tool in ("memcheck", "racecheck"):
        report.line(tool, partial(measure, tool))


def op_tests() -> dict[str, Any]:
    """Run the op tests on the GPU."""
    absent = [x for x in ("pytest", "hypothesis", "numpy") if importlib.util.find_spec(x) is None]
    if absent:
        return {"skipped": f"without {', '.join(absent)}"}
    files = [f"tests/test_{room}.py" for room in ROOMS]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--sample", "6", *files]
    path = RUNS / "gpu_check_tests.txt"
    with path.open("w") as file:  # there even if they are ended
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, check=False)
    return {"right": done.returncode == 0, "last": path.read_text().strip().split("\n")[-1]}


# Fast or slow -------------------------------------------------------------------------------------


def copy_rate(report: Report) -> float:
    """Bytes per second that a copy reads and writes together."""
    rate = [float("nan")]

    def measure() -> dict[str, Any]:
        x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        y = torch.empty_like(x)
        rate[0] = 2 * x.nbytes / milliseconds(lambda: y.copy_(x)) * 1e3
        return {"GB/s": rate[0] / 1e9}

    report.line("copy of 1 GiB", measure)
    return rate[0]


def beside(
    moved: int,
    ceiling: float,
    mine: Callable[[], Callable[[], object]],
    **others: Callable[[], object],
) -> dict[str, Any]:
    """Milliseconds of each backend's call, which `mine` makes, with its share of a copy's rate."""
    cells: dict[str, Any] = {}
    for backend in KERNELS:
        with ppokern.use_backend(backend):
            own = milliseconds(mine())
        cells |= {f"{backend} ms": own, f"{backend} of copy": moved / own * 1e3 / ceiling}
    for name, call in others.items():
        try:
            cells[name] = milliseconds(call, 5)
        except Exception as error:  # a peer that fails is no reason to lose the line
            cells[name] = type(error).__name__
    return cells


def row_kernels(report: Report, ceiling: float) -> None:
    """Log-probs, their entropy, and the gradient in place."""

    def plain(logits: Tensor, ids: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]

    def measure(n: int, v: int, dtype: torch.dtype, op: str) -> dict[str, Any]:
        logits = torch.randn(n, v, dtype=dtype, device="cuda")
        ids = torch.randint(0, v, (n,), device="cuda")
        compiled = torch.compile(plain)
        if op == "backward":
            logits.requires_grad_()
            ones = torch.ones(n, device="cuda")

            def gradient(of: Callable[..., Tensor]) -> Callable[[], object]:
                kept = of(logits, ids)
                return lambda: torch.autograd.grad(kept, logits, ones, retain_graph=True)

            mine = partial(gradient, ppokern.selected_logprobs)
            return beside(2 * logits.nbytes, ceiling, mine, compile=gradient(compiled))
        if op == "entropy":
            mine = partial(ppokern.selected_logprobs_with_entropy, logits, ids)
            return beside(logits.nbytes, ceiling, lambda: mine)
        return beside(
            logits.nbytes,
            ceiling,
            lambda: partial(ppokern.selected_logprobs, logits, ids),
            eager=lambda: plain(logits, ids),
            compile=lambda: compiled(logits, ids),
        )

    sizes = [(8192, 151_936), (8, 151_936), (8192, 32_000), (8192, 50_257)]
    for n, v in sizes[: 2 if report.quick else 4]:
        for dtype in (torch.bfloat16, torch.float32):
            for op in ("forward", "entropy", "backward"):
                label = f"{op} {n} x {v} {str(dtype)[6:]}"
                report.line(label, lambda n=n, v=v, d=dtype, o=op: measure(n, v, d, o))


def small_kernels(report: Report, ceiling: float) -> None:
    """Advantages and the PPO loss."""

    def advantages(shape: tuple[int, int], **options: Any) -> dict[str, Any]:
        r, v = torch.randn(2, *shape, device="cuda")
        mask = torch.rand(shape, device="cuda") < 0.9
        moved = 17 * r.numel()
        return beside(moved, ceiling, lambda: partial(ppokern.gae, r, v, mask=mask, **options))

    def packed(total: int, length: int) -> dict[str, Any]:
        r, v = torch.randn(2, total, device="cuda")
        cu = torch.arange(0, total + 1, length, device="cuda", dtype=torch.int32)
        return beside(16 * total, ceiling, lambda: partial(ppokern.gae, r, v, cu_seqlens=cu))

    report.line("gae (B, T) = (4096, 4096)", lambda: advantages((4096, 4096)))
    report.line("gae (B, T) = (512, 2048)", lambda: advantages((512, 2048)))
    report.line("gae (B, T) = (65536, 64)", lambda: advantages((65536, 64)))
    report.line("gae (T, B) = (128, 8192)", lambda: advantages((128, 8192), time_dim=0))
    report.line("gae (B, T) = (1, 1048576)", lambda: advantages((1, 2**20)))
    report.line("gae packed, 1024 of 1024", lambda: packed(2**20, 1024))

    def loss(aggregate: str) -> dict[str, Any]:
        x = [torch.randn(512, 2048, device="cuda") for _ in range(6)]
        mask = torch.rand(512, 2048, device="cuda") < 0.9
        options: Any = {"mask": mask, "aggregate": aggregate}

        def run() -> None:
            ppokern.ppo_loss(*x, **options)  # type: ignore[arg-type]

        def eager() -> None:
            with ppokern.use_backend("torch"):
                run()

        return beside(26 * mask.numel(), ceiling, lambda: run, torch=eager)

    for aggregate in ("token_mean", "sequence_mean"):
        report.line(f"ppo_loss {aggregate} (512, 2048)", lambda a=aggregate: loss(a))

    def launches(call: Callable[[], object], count: int = 200) -> dict[str, Any]:
        cells: dict[str, Any] = {}
        for backend in KERNELS:
            with ppokern.use_backend(backend):
                call()
                torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(count):
                    call()
                cells[f"{backend} us"] = 1e6 * (time.perf_counter() - begun) / count
                torch.cuda.synchronize()
        return cells

    logits, ids = torch.randn(8, 1000, device="cuda"), torch.zeros(8, device="cuda").long()
    x = list(torch.randn(6, 8, 16, device="cuda"))
    report.line(
        "host, selected_logprobs", lambda: launches(lambda: ppokern.selected_logprobs(logits, ids))
    )
    report.line("host, gae", lambda: launches(lambda: ppokern.gae(x[0], x[1])))
    report.line("host, ppo_loss", lambda: launches(lambda: ppokern.ppo_loss(*x)))


def linear(report: Report) -> None:
    """The loss from hidden states beside the three GEMMs that it cannot do without."""
    n, h, v = 8192, 4096, 151_936

    def peak(call: Callable[[], object]) -> float:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    def measure(limit: int, beside_others: bool) -> dict[str, Any]:
        hidden = torch.randn(n, h, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(v, h, dtype=torch.bfloat16, device="cuda") / h**0.5
        ids = torch.randint(0, v, (n,), device="cuda")
        old, advantages = torch.full((n,), -12.0, device="cuda"), torch.randn(n, device="cuda")

        def gemms() -> None:
            logits = hidden @ weight.t()
            _ = logits @ weight
            _ = logits.t() @ hidden

        floor = milliseconds(gemms, 5)
        torch.cuda.empty_cache()
        hidden.requires_grad_()
        weight.requires_grad_()

        def mine() -> None:
            loss = ppokern.linear_ppo_loss(
                hidden, weight, ids, old, advantages, max_logits_bytes=limit
            ).loss
            torch.autograd.grad(loss, (hidden, weight))

        def plain(hidden: Tensor, weight: Tensor) -> Tensor:
            logprobs = (hidden @ weight.t()).float().log_softmax(-1).gather(-1, ids[:, None])
            ratio = (logprobs[:, 0] - old).exp()
            return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

        def gradients(of: Callable[[Tensor, Tensor], Tensor]) -> None:
            torch.autograd.grad(of(hidden, weight), (hidden, weight))

        cells: dict[str, Any] = {"GEMMs": floor}
        for backend in KERNELS:
            with ppokern.use_backend(backend):
                own = milliseconds(mine, 5)
                cells |= {f"{backend} ms": own, f"{backend} ratio": own / floor}
                cells[f"{backend} GiB"] = peak(mine)
        others = {"eager": lambda: gradients(plain), "liger": liger(hidden, weight, ids)}
        compiled = torch.compile(plain)
        others["compile"] = lambda: gradients(compiled)
        for name, call in others.items() if beside_others else ():
            if call is not None:
                try:
                    cells |= {name: milliseconds(call, 3), f"{name} GiB": peak(call)}
                except Exception as error:  # out of memory, most likely
                    cells[name] = type(error).__name__
        return cells

    name = f"linear_ppo_loss {n} x {h} x {v} bfloat16"
    report.line(f"{name}, 256 MiB", lambda: measure(2**28, True))
    report.line(f"{name}, 1 GiB", lambda: measure(2**30, False))


def liger(hidden: Tensor, weight: Tensor, ids: Tensor) -> Callable[[], object] | None:
    """Liger's fused linear cross-entropy, the nearest peer, where it is installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    module = importlib.import_module("liger_kernel.transformers")
    fused = module.LigerFusedLinearCrossEntropyLoss()
    return lambda: torch.autograd.grad(fused(weight, hidden, ids), (hidden, weight))


def row_part(report: Report) -> None:
    """The row kernels beside a copy."""
    row_kernels(report, copy_rate(report))


def small_part(report: Report) -> None:
    """Advantages and losses beside a copy, and launches."""
    small_kernels(report, copy_rate(report))


def test_part(report: Report) -> None:
    """The op tests."""
    if not report.quick:
        report.line("tests with the marker gpu", op_tests)


PARTS: dict[str, tuple[Callable[[Report], None], float]] = {  # with their seconds
    "build": (build, 60),
    "right": (against_float64, 90),
    "linear": (linear, 70),
    "rows": (row_part, 80),
    "small": (small_part, 50),
    "sanitized": (sanitized, 60),
    "tests": (test_part, 120),
}


def main() -> None:
    """Run it all, or one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, no tests")
    parser.add_argument("--out", type=Path, default=RUNS / "gpu_check.json")
    parser.add_argument("--part", choices=PARTS, help="this one alone, in this process")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_check: no CUDA device")
    if importlib.util.find_spec("triton") is None:
        raise SystemExit("gpu_check: no Triton beside this torch")
    RUNS.mkdir(exist_ok=True)
    path = options.out.with_suffix(".jsonl")
    if options.part:
        PARTS[options.part][0](Report(path, options.quick))
        return
    begun = time.monotonic()
    path.unlink(missing_ok=True)
    triton = importlib.import_module("triton").__version__
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton}"
    print(machine, ppokern.available_backends(), sep="\n")
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(options.out)]
    command += ["--quick"] if options.quick else []
    for name, (_, seconds) in PARTS.items():
        left = SECONDS - (time.monotonic() - begun)
        run_part(name, [*command, "--part", name], max(1.0, min(seconds, left)), path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    options.out.write_text(json.dumps({"machine": machine, "lines": lines}, indent=1))
    wrong = [x["name"] for x in lines if "failed" in x or x.get("right") is False]
    print(f"{time.monotonic() - begun:.0f} s; not right: {wrong or 'nothing'}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
