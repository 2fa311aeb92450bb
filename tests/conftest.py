import importlib
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext

import hypothesis
import pytest
import torch
from matrix import CAN, FLOATS, INTERPRETED

import ppokern

hypothesis.settings.register_profile(
    "ppokern",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=10 if INTERPRETED else 25,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("ppokern")


if INTERPRETED and "triton" in ppokern.available_backends():
    importlib.import_module("interpreter").prepare()

# Interpreted, an operation takes as long on few numbers as on many.
SIZES = {
    ("ppokern.logprob.kernel_triton", "TILE"): 2**15,
    ("ppokern.gae.kernel_triton", "SHORT"): (16, 8),
    ("ppokern.gae.kernel_triton", "LONG"): (16, 512),
    ("ppokern.gae.kernel_triton", "PARTIALS"): 1,
    ("ppokern.linear.kernel_triton", "SHORT"): (2**15, 8, 2),
    ("ppokern.linear.kernel_triton", "LONG"): (2**15, 8, 1),
    ("ppokern.reward.kernel_triton", "SHORT"): (4, 4),
    ("ppokern.reward.kernel_triton", "LONG"): (1, 4),
}


if "PPOKERN_CUDA_ON_CPU" in os.environ and "cuda" not in ppokern.available_backends():
    raise ImportError("PPOKERN_CUDA_ON_CPU: no module in that folder can be loaded")


SAMPLE_SEED = "PPOKERN_SAMPLE_SEED"  # in the environment, from which other processes take it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        type=int,
        metavar="N",
        help="N cases of each test, or a twentieth, if more; a quarter of the files of slow tests",
    )
    seed = os.environ.setdefault(SAMPLE_SEED, str(random.SystemRandom().randrange(10**6)))
    parser.addoption(
        "--sample-seed", type=int, metavar="S", default=int(seed), help="draws the same cases again"
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.sample is None:
        return None
    sample, seed = config.option.sample, config.option.sample_seed
    return f"of each test some cases are drawn: --sample {sample} --sample-seed {seed}"


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs on CUDA; with ``--sample`` keep the cases that are drawn."""
    for item in items:
        name = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
        if name in CAN and CAN[name].device == "cuda":
            item.add_marker("gpu")
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)  # no process ends with a long one
    if (least := config.option.sample) is None:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    drawn = random.Random(config.option.sample_seed)
    slow = [test for test, all_ in cases.items() if all_[0].get_closest_marker("slow")]
    files = sorted({test.split("::")[0] for test in slow})  # whose tests share what is slow
    left_out = drawn.sample(files, len(files) * 3 // 4)
    kept = set()  # of each case, a twentieth of the draws has it at least
    for test, all_ in cases.items():
        if test not in slow or test.split("::")[0] not in left_out:
            share = -(-len(all_) // (5 if test in slow else 20))
            kept |= {*drawn.sample(all_, min(len(all_), max(least, share)))}
    items[:] = [item for item in items if item in kept]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`backend` and `dtype` of a test: all that are there and can do the module's OP."""
    op, names = getattr(metafunc.module, "OP", None), set(metafunc.fixturenames)
    for mark in metafunc.definition.iter_markers("parametrize"):
        names.discard(mark.args[0])
    if "backend" in names:
        able = [
            (name, dtype)
            for name in ppokern.available_backends()
            if name in CAN and op in CAN[name].ops
            for dtype in CAN[name].dtypes
        ]
        if "dtype" in names:
            ids = [f"{name}-{str(dtype)[6:]}" for name, dtype in able]
            metafunc.parametrize(("backend", "dtype"), able, ids=ids, indirect=["backend"])
        else:
            metafunc.parametrize("backend", dict.fromkeys(name for name, _ in able), indirect=True)
    elif "dtype" in names:
        metafunc.parametrize("dtype", FLOATS, ids=[str(d)[6:] for d in FLOATS])


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    device = CAN[request.param].device
    if request.param == "triton" and device == "cpu":
        for (module, name), value in SIZES.items():
            monkeypatch.setattr(importlib.import_module(module), name, value)
    where = nullcontext() if device == "cpu" else torch.device(device)
    ppokern.set_validation(device != "cpu")  # the same errors as on the CPU
    with ppokern.use_backend(request.param), where:
        yield request.param
    ppokern.set_validation(False)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Fixed numbers, and one thread: nothing waits for a core that another process has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def validation() -> Iterator[None]:
    ppokern.set_validation(True)
    yield
    ppokern.set_validation(False)
