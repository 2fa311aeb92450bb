"""How everything is measured: ``make bench``, or ``make bench BENCH=benchmarks/bench_gae.py``.

CPU seconds at one thread, the best of several rounds. A benchmark measures one form of an op: plain
torch in one or several ways, torch.compile, or a backend of the package. At the end stands a table
with a line per case: the time of each, how many times slower the best form that is not ours is, and
where the case says what it moves, GB/s and the share of what this machine's memory can do. A form
"floor" is no rival, but what none can do without. A second table says what a call holds at most.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from measure import usage

import ppokern
from benchmarks.ceiling import Moved

BACKENDS = ppokern.available_backends()


class Line(NamedTuple):
    """A line of the table."""

    seconds: dict[str, float]
    peaks: dict[str, int]  # bytes, beyond what was there
    moved: Moved | None


LINES: dict[str, Line] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of torch.compile are not ours; the table below stands for the plugin's own."""
    config.option.benchmark_quiet = True
    config.addinivalue_line("filterwarnings", "ignore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Measure CPU time, which another process on the machine disturbs less than wall time."""
    items[:] = [item for item in items if "triton" not in item.name]  # tensors lie on the CPU
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=time.process_time))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Fixed numbers, one thread, nothing compiled for another benchmark."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield


@pytest.fixture
def measure(benchmark: Any) -> Callable[..., None]:
    """Return a function that measures one form of a case."""

    def run(
        case: str,
        form: str,
        call: Callable[..., object],
        setup: Callable[[], tuple[Any, ...]] = tuple,
        rounds: int = 7,
        repeats: int = 1,
        moved: Moved | None = None,
        peak: bool = False,
    ) -> None:
        """Measure ``call(*setup())``, `repeats` calls a round; with `peak`, memory too."""
        benchmark.group, benchmark.name = case, form

        def repeated(*args: Any) -> None:
            for _ in range(repeats):
                call(*args)

        line = LINES.setdefault(case, Line({}, {}, moved))
        with ppokern.use_backend(form) if form in BACKENDS else nullcontext():
            if peak:  # warms up as well
                line.peaks[form] = benchmark.extra_info["peak"] = usage(call).peak_bytes
            benchmark.pedantic(
                repeated, setup=lambda: (setup(), {}), rounds=rounds, warmup_rounds=int(not peak)
            )
        seconds = line.seconds[form] = benchmark.stats.stats.min / repeats
        if moved:
            share = moved.bytes / seconds / moved.ceiling
            benchmark.extra_info.update(bytes=moved.bytes, share_of_ceiling=share)

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the tables."""
    write = terminalreporter.write_line
    if not LINES:
        return
    write("")
    write(
        f"torch {torch.__version__}, one thread, {ppokern.cpu_capability()}, {_processor()}; "
        "CPU milliseconds; x = best form of torch / ours"
    )
    ours = [name for name in BACKENDS if any(name in line.seconds for line in LINES.values())]
    heads = ["eager", "best torch", "", *(h for name in ours for h in (name, "x"))]
    _row(write, "", [*heads, "GB/s", "share", "/ floor"])
    for case, (seconds, _, moved) in LINES.items():
        plain = {form: s for form, s in seconds.items() if form not in (*ours, "floor")}
        best = min(plain, key=lambda form: plain[form]) if plain else ""
        cells = [_ms(plain.get("eager")), _ms(plain.get(best)), best]
        for name in ours:
            s = seconds.get(name)
            cells += [_ms(s), f"{plain[best] / s:.2f}" if s and plain else ""]
        fastest = min((seconds[name] for name in ours if name in seconds), default=0.0)
        rate = moved.bytes / fastest if moved and fastest else 0.0
        cells += (
            [f"{rate / 1e9:.1f}", f"{rate / moved.ceiling:.0%}"] if moved and rate else ["", ""]
        )
        cells += [f"{fastest / seconds['floor']:.3f}"] if "floor" in seconds and fastest else []
        _row(write, case, cells)
    held = {case: line.peaks for case, line in LINES.items() if line.peaks}
    forms = list(dict.fromkeys(form for peaks in held.values() for form in peaks))
    if held:
        write("MiB held at most, beyond what was there before the call")
        _row(write, "", forms)
    for case, peaks in held.items():
        _row(write, case, [f"{peaks[f] / 2**20:.0f}" if f in peaks else "" for f in forms])


def _row(write: Callable[[str], None], case: str, cells: list[str]) -> None:
    write(
        f"{case:<44}"
        + "".join(
            f"{cell:>{max(11, len(cell) + 2, 22 * (i == 2))}}" for i, cell in enumerate(cells)
        )
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.4g}"


def _processor() -> str:
    if not os.path.exists("/proc/cpuinfo"):
        return "unknown processor"
    with open("/proc/cpuinfo") as lines:
        return next((x.split(": ")[1].strip() for x in lines if x.startswith("model name")), "")
