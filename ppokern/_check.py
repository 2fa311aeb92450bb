"""The checks of arguments, and the one wording of their errors: ``name: expected …, got …``.

Each public function calls these once; what lies below trusts its arguments.
"""

import math
import numbers
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ppokern import _address
from ppokern._backend import native

Struct = TypeVar("Struct", bound=tuple)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
NUMBERS = FLOATS + INTEGERS
_validation = os.environ.get("PPOKERN_VALIDATE", "0") not in ("", "0")


def set_validation(enabled: bool) -> None:
    """Switch the checks of tensor values on or off where they would cost time.

    They are: on CUDA token ids, `cu_seqlens`, flags, temperatures and finiteness (each check
    synchronises); on the CPU the finiteness of what goes into a loss. ``PPOKERN_VALIDATE=1`` in the
    environment is the same from the start.
    """
    global _validation
    _validation = bool(enabled)


def validating() -> bool:
    """Return whether `set_validation` is on; never while compiling."""
    return _validation and not torch.compiler.is_compiling()


def values_of(x: Tensor) -> bool:
    """Return whether the values of `x` may be looked at in order to check them."""
    if torch.compiler.is_compiling() or not (x.is_cpu or _validation):
        return False
    return not _address.stands_for_another(x)


def fail(name: str, expected: object, got: object, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise the error of an argument."""
    raise kind(f"{name}: expected {expected}, got {got}")


def place(flat: int, shape: Sequence[int]) -> str:
    """Return the position of a flat index in a tensor of `shape`, as ``[1, 4]``."""
    return str(
        [int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), tuple(shape))]
    )


def first(where: Tensor) -> int | None:
    """Return the flat index of the first True, None without one."""
    return int(where.reshape(-1).nonzero()[0]) if bool(where.any()) else None


def plain(name: str, x: object) -> Tensor:
    """Check that `x` is a tensor that kernels can read."""
    if not isinstance(x, Tensor):
        fail(name, "a tensor", type(x).__name__, TypeError)
    compiling = torch.compiler.is_compiling()  # then only a wrapper can be told from a tensor
    if found := _address.wrapped(x) if compiling else _address.obstacle(x):
        fail(name, "a plain tensor", found, TypeError)
    return x


def tensor(name: str, x: object, dtypes: Sequence[torch.dtype] = FLOATS) -> Tensor:
    """Check that `x` is a tensor that kernels can read, of one of `dtypes`."""
    x = plain(name, x)
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        fail(name, f"dtype {names}", str(x.dtype).removeprefix("torch."), TypeError)
    return x


def like(
    name: str,
    x: object,
    shape: Sequence[int],
    device: torch.device,
    dtypes: Sequence[torch.dtype] = FLOATS,
    optional: bool = False,
) -> None:
    """Check an argument's type, dtype, shape and device; None passes where it is `optional`."""
    if x is None and optional:
        return
    x = tensor(name, x, dtypes)
    if x.shape != tuple(shape):
        fail(name, f"shape {tuple(shape)}", tuple(x.shape))
    if x.device != device:
        fail(name, f"a tensor on {device}", f"one on {x.device}")


def mask_like(name: str, x: object, shape: Sequence[int], device: torch.device) -> None:
    """Check a bool tensor; None passes."""
    if x is None:
        return
    like(name, x, shape, device, (torch.bool,))


def number(name: str, x: Any) -> float:
    """Check that `x` is a number and return it as a float; whether it fits is looked at in use."""
    try:
        if isinstance(x, float) or (isinstance(x, numbers.Real) and not isinstance(x, bool)):
            return float(x)
        if _is_numpy_in_graph(x):
            return float(x.item())
    except OverflowError:  # of an integer
        fail(name, "a number that a float holds", x)
    fail(name, "a number", type(x).__name__, TypeError)


def _is_numpy_in_graph(x: Any) -> bool:
    """Return whether `x` is a number of numpy's as a graph knows it: an array without dimensions.

    Its value is not there to be looked at.
    """
    return torch.compiler.is_compiling() and type(x).__name__ == "ndarray" and x.ndim == 0


def within(name: str, x: float, low: float, high: float) -> None:
    """Check that a number is in ``[low, high]``; NaN never is."""
    if not low <= x <= high:
        fail(name, f"a number in [{low:g}, {high:g}]", x)


# the least and the largest positive number in full precision
_RANGES = {t: (torch.finfo(t).tiny, torch.finfo(t).max) for t in (torch.float32, torch.float64)}


def range_of(dtype: torch.dtype) -> tuple[float, float]:
    """Return the least and the largest positive number that arithmetic in `dtype` holds."""
    return _RANGES[dtype]


def positive(name: str, x: float, dtype: torch.dtype) -> None:
    """Check that arithmetic in `dtype` holds a number above 0: neither as 0 nor as infinity."""
    low, high = _RANGES[dtype]
    if not low <= x <= high:
        fail(name, f"a positive number that {str(dtype)[6:]} holds", x)


def finite_number(name: str, x: float, dtype: torch.dtype) -> None:
    """Check that arithmetic in `dtype` holds a number."""
    if not abs(x) <= _RANGES[dtype][1]:
        fail(name, f"a finite number that {str(dtype)[6:]} holds", x)


def limit(name: str, x: float, low: float, dtype: torch.dtype) -> None:
    """Check a bound that is not below `low`: infinity, or what arithmetic in `dtype` holds."""
    if not low <= x <= _RANGES[dtype][1] and x != math.inf:
        fail(name, f"a number from {low:g} on that {str(dtype)[6:]} holds, or inf", x)


def integer(name: str, x: Any, low: int = -sys.maxsize, high: int = sys.maxsize) -> int:
    """Check that `x` is an integer in ``[low, high]`` and return it."""
    if isinstance(x, numbers.Integral) and not isinstance(x, bool):
        n = int(x)
        if not low <= n <= high:
            fail(name, f"an integer in [{low}, {high}]", n)
    elif _is_numpy_in_graph(x):
        n = int(x.item())
        torch._check(n >= low)
        torch._check(n <= high)
    else:
        fail(name, "an integer", type(x).__name__, TypeError)
    return n


def choice(name: str, x: object, options: Sequence[str]) -> None:
    """Check that `x` is one of `options`."""
    if x not in options:
        fail(name, f"one of {tuple(options)}", repr(x))


def cu_seqlens(x: Tensor, shape: Sequence[int] | None, device: torch.device | None = None) -> None:
    """Check the boundaries of packed sequences against the packed shape ``(total, …)``."""
    tensor("cu_seqlens", x, (torch.int32, torch.int64))
    if x.dim() != 1 or x.shape[0] == 0:
        fail("cu_seqlens", "shape (S + 1,)", tuple(x.shape))
    if device is not None and x.device != device:
        fail("cu_seqlens", f"a tensor on {device}", f"one on {x.device}")
    if shape is not None and len(shape) != 1:
        fail("cu_seqlens", "packed tensors of shape (total,) with it", tuple(shape))
    boundaries(x, None if shape is None else shape[0])


def boundaries(x: Tensor, total: int | None) -> None:
    """Check the values of `cu_seqlens`, on the CPU, on CUDA under validation."""
    if not values_of(x):
        return
    if int(x[0]) != 0:
        fail("cu_seqlens", "0 at the start", int(x[0]))
    if (at := first(x[1:] < x[:-1])) is not None:
        fail(
            "cu_seqlens",
            "non-decreasing values",
            f"{int(x[at + 1])} after {int(x[at])} at {at + 1}",
        )
    if total is not None and int(x[-1]) != total:
        fail("cu_seqlens", f"{total} (the number of tokens) at the end", int(x[-1]))


def as_int64(ids: Tensor) -> Tensor:
    """Return ids as int64, themselves where they are: in `torch.func` a result has no address."""
    return ids if ids.dtype == torch.int64 else ids.long()


def token_ids(ids: Tensor, mask: Tensor | None, limit: int) -> None:
    """Check that unmasked ids lie in ``[0, limit)`` or are -100, where values may be looked at."""
    if not values_of(ids):
        return
    if native and ids.is_cpu and ids.is_contiguous() and (mask is None or mask.is_contiguous()):
        values = {
            "token_ids": ids.data_ptr(),
            "mask": 0 if mask is None else mask.data_ptr(),
            "rows": ids.numel(),
            "vocab_size": limit,
        }
        if native.token_ids_fit(values):
            return
    bad = ((ids < 0) & (ids != -100)) | (ids >= limit)
    if (at := first(bad if mask is None else bad & mask)) is not None:
        where = place(at, ids.shape)
        fail(
            "token_ids",
            f"ids in [0, {limit})",
            f"{int(ids.reshape(-1)[at])} at {where}",
            IndexError,
        )


def finite(name: str, x: Tensor | None, mask: Tensor | None) -> None:
    """Check that the unmasked values of `x` are finite; the caller asks `values_of` first."""
    if x is None:
        return
    bad = ~x.isfinite()
    if (at := first(bad if mask is None else bad & mask)) is not None:
        value = float(x.reshape(-1)[at])
        fail(name, "finite values", f"{value} at {place(at, x.shape)}")


def constant(x: Tensor | None) -> Tensor | None:
    """Return `x` without its gradient."""
    return x if x is None or not x.requires_grad else x.detach()


def constants(x: Struct) -> Struct:
    """Return a NamedTuple of tensors without their gradients."""
    given: Iterable[Tensor | None] = x
    return type(x)(*[t if t is None or not t.requires_grad else t.detach() for t in given])  # type: ignore[arg-type]


def arithmetic(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype of a call's arithmetic: float64 where a tensor is float64, else float32."""
    for x in tensors:
        if x is not None and x.dtype == torch.float64:
            return torch.float64
    return torch.float32
