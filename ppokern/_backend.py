"""Which backends exist, and which one a call takes.

A room names its kernels in a table ``{backend name: kernel}``; `select` picks one of them, or says
why it cannot. Nothing below an op's public function asks which backend it is on. A kernel that
needs Triton stands in the table by its path, and is imported when it is first used.
"""

import importlib
import importlib.util
import os
import pkgutil
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, TypeVar

import torch

from ppokern import _install
from ppokern._names import BACKENDS, Backend

Kernel = TypeVar("Kernel")

_FAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# For each op the default for CUDA tensors, the first that is there. Unmeasured: no run on a GPU has
# compared them yet.
ON_CUDA = {
    "selected_logprobs": ("triton", "cuda"),
    "linear_selected_logprobs": ("triton", "cuda"),
    "linear_ppo_loss": ("triton", "cuda"),
    "gae": ("triton", "cuda"),
    "whiten": ("triton",),
    "shaped_rewards": ("triton",),
    "ppo_loss": ("triton", "cuda"),
}
UNLOADABLE: dict[str, str] = {}  # modules that were built, and what their loading said


def _load(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"ppokern.{name}")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        UNLOADABLE[name] = f"built, and cannot be loaded: {error}"
        return None


def _say_what_is_missing() -> None:
    """Warn where there are no C++ kernels and nobody said that this is meant."""
    why, is_mistake = _install.why_unbuilt()
    if (is_mistake or "_native" in UNLOADABLE) and os.environ.get("PPOKERN_BACKEND") != "torch":
        why = UNLOADABLE.get("_native", why)
        meant = "PPOKERN_BACKEND=torch says that this is meant"
        warnings.warn(
            f"ops run in plain torch, the C++ kernels are {why} ({meant})",
            RuntimeWarning,
            stacklevel=2,
        )


# in tests, a folder with the CUDA kernels as g++ compiles them, which run on CPU tensors
_CUDA_ON_CPU = os.environ.get("PPOKERN_CUDA_ON_CPU", "")
if _CUDA_ON_CPU:
    if PathFinder.find_spec("ppokern._cuda", [_CUDA_ON_CPU]) is None:
        raise ValueError(
            f"PPOKERN_CUDA_ON_CPU: expected a folder with the module _cuda, got {_CUDA_ON_CPU!r}"
        )
    sys.modules["ppokern"].__path__.insert(0, _CUDA_ON_CPU)
native = _load("_native")  # the C++ kernels, None where they were not built
cuda = _load("_cuda")  # the CUDA kernels, None where they were not built
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it once too
# os.environ raises an error and catches it where there is no such variable: 4 us
_environment = os.environ.get if native is None else native.getenv
_WHEN_RUN = "when run"  # in a compiled graph, whichever name there is when it runs
_named: ContextVar[str | None] = ContextVar("ppokern_backend", default=None)
if native is None:
    _say_what_is_missing()


def available_backends() -> tuple[Backend, ...]:
    """Return the names of the backends that this installation can run, `torch` first."""
    cpu = ("cpu",) if native is not None else ()
    on_cuda = torch.cuda.is_available()
    triton = ("triton",) if has_triton() and (_INTERPRETED or on_cuda) else ()
    compiled = ("cuda",) if cuda is not None and (_CUDA_ON_CPU or on_cuda) else ()
    return ("torch", *cpu, *triton, *compiled)


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def cpu_capability() -> str | None:
    """Return the instruction set of the C++ kernels, None where they were not built.

    ``"avx512_bf16"``, ``"avx512"``, ``"avx2"`` or ``"default"``: the machine's best, or the one
    that ``PPOKERN_CPU_CAPABILITY`` names.
    """
    return None if native is None else native.cpu_capability()


def _check_name(source: str, name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}: expected one of {BACKENDS}, got {name!r}")
    if name not in available_backends():
        needs = {
            "triton": " (it needs Triton and CUDA, or TRITON_INTERPRET=1 from the start)",
            "cuda": " (it needs CUDA, and a package that was built where nvcc was)",
        }
        raise ValueError(
            f"{source}: backend {name!r} is not available here{needs.get(name, '')}; "
            f"available: {available_backends()}"
        )
    return name


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Run every op in the block on the backend `name`; a call that it cannot do is a `ValueError`.

    Without it the environment variable ``PPOKERN_BACKEND`` names the backend; without that each op
    takes its fastest one. What counts is the block that the forward pass runs in. The graphs of
    `torch.compile` bear no name: they look for it whenever they run, their backward passes too,
    which on CUDA torch runs in threads of its own, where the environment variable alone counts.

    Args:
        name: one of `available_backends()`.

    Raises:
        ValueError: the name is unknown, or that backend is absent.
    """
    token = _named.set(_check_name("use_backend", name))
    try:
        yield
    finally:
        _named.reset(token)


def asked_for() -> str:
    """Return what an op passes on to `select`, in its forward and its backward pass."""
    return _WHEN_RUN if torch.compiler.is_compiling() else _name_now()


def _name_now() -> str:
    """Return the backend asked for by name, or an empty string."""
    name = _named.get()
    if name is None and (name := _environment("PPOKERN_BACKEND")):
        _check_name("PPOKERN_BACKEND", name)
    return name or ""


def select(
    op: str,
    kernels: Mapping[str, Kernel | str],
    name: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Kernel:
    """Return the kernel of `op` for a device and an arithmetic dtype.

    Args:
        op: the public name.
        kernels: the room's table; a path, as of `pkgutil.resolve_name`, stands for what is there.
        name: what `asked_for` returned: the backend asked for, empty for the default.
        device: where the tensors are.
        dtype: the dtype of the arithmetic.

    Raises:
        ValueError: the backend asked for cannot do this call.
    """
    kernel: Any = kernels[choose(op, kernels, name, device, dtype)]
    return _at_path(kernel) if isinstance(kernel, str) else kernel


_at_path = cache(pkgutil.resolve_name)


def choose(
    op: str, kernels: Collection[str], name: str, device: torch.device, dtype: torch.dtype
) -> str:
    """Return the backend that `select` takes a kernel of."""
    name = _name_now() if name == _WHEN_RUN else name
    able = ["torch"]
    if dtype in _FAST_DTYPES:
        if device.type == "cpu" and native and "cpu" in kernels:
            able.append("cpu")
        if "cuda" in kernels and cuda and _runs(device, name, "cuda", bool(_CUDA_ON_CPU)):
            able.append("cuda")
        if "triton" in kernels and has_triton() and _runs(device, name, "triton", _INTERPRETED):
            able.append("triton")
    if not name:
        best = ON_CUDA[op] if device.type == "cuda" else ("cpu",)
        name = next((n for n in best if n in able), "torch")
    if name not in able:
        raise ValueError(
            f"{op}: backend {name!r} cannot do {dtype} on {device.type}; can: {', '.join(able)}"
        )
    return name


def _runs(device: torch.device, name: str, backend: str, on_cpu: bool) -> bool:
    """Return whether kernels for CUDA run there: on the CPU slowly, in tests, so by name only."""
    return (on_cpu and name == backend) if device.type == "cpu" else device.type == "cuda"
