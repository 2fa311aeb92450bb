"""Which backends exist, and which one a call takes.

A room names its kernels in a table ``{backend name: kernel}``; `select` picks one of them, or says
why it cannot. Nothing below an op's public function asks which backend it is on.
"""

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import TypeVar

import torch

Kernel = TypeVar("Kernel")

NAMES = ("torch", "cpu", "triton", "cuda")
_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _load_native() -> ModuleType | None:
    try:
        return importlib.import_module("ppokern._native")
    except ImportError:
        return None


native = _load_native()  # the C++ kernels, None where they were not built
# os.environ raises an error and catches it where there is no such variable: 4 us
_environment = os.environ.get if native is None else native.getenv
_named: ContextVar[str | None] = ContextVar("ppokern_backend", default=None)


def available_backends() -> tuple[str, ...]:
    """Return the names of the backends that this installation can run, `torch` first."""
    return ("torch", "cpu") if native is not None else ("torch",)


def cpu_capability() -> str | None:
    """Return the instruction set of the C++ kernels, None where they were not built.

    ``"avx512_bf16"``, ``"avx512"``, ``"avx2"`` or ``"default"``: the machine's best, or the one
    that ``PPOKERN_CPU_CAPABILITY`` names.
    """
    return None if native is None else native.cpu_capability()


def _check_name(source: str, name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source}: expected one of {NAMES}, got {name!r}")
    if name not in available_backends():
        raise ValueError(
            f"{source}: backend {name!r} is not available here; available: {available_backends()}"
        )
    return name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every op in the block on the backend `name`; a call that it cannot do is a `ValueError`.

    Without it the environment variable ``PPOKERN_BACKEND`` names the backend; without that each op
    takes its fastest one. Under `torch.compile` the backend is looked up when the compiled code
    runs.

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


def named() -> str:
    """Return the backend asked for by name, or an empty string."""
    name = _named.get()
    if name is None and (name := _environment("PPOKERN_BACKEND")):
        _check_name("PPOKERN_BACKEND", name)
    return name or ""


def select(
    op: str, kernels: Mapping[str, Kernel], name: str, device: torch.device, dtype: torch.dtype
) -> Kernel:
    """Return the kernel of `op` for a device and an arithmetic dtype.

    Args:
        op: the public name, for the message.
        kernels: the room's table.
        name: the backend asked for, empty for the default.
        device: where the tensors are.
        dtype: the dtype of the arithmetic.

    Raises:
        ValueError: the backend asked for cannot do this call.
    """
    able = ["torch"]
    if "cpu" in kernels and native and dtype in _NATIVE_DTYPES and device.type == "cpu":
        able.append("cpu")
    name = name or able[-1]  # in the order of speed
    if name not in able:
        raise ValueError(
            f"{op}: backend {name!r} cannot do {dtype} on {device.type}; can: {', '.join(able)}"
        )
    return kernels[name]
