"""Triton's interpreter, ten times as fast, and nearer to a GPU where that is easily had.

conftest.py calls `prepare` where kernels are interpreted. It replaces private parts of Triton
3.7; kernels run as they are written. What is still unlike a GPU is listed in test_triton.py.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

BUILDER, SEMANTIC = interpreter.InterpreterBuilder, interpreter.TritonSemantic
LOG2_E = np.float32(1.4426950408889634)


def prepare() -> None:
    """Patch the interpreter, for the life of the process."""
    _patch_the_language_once()
    _remember_types()
    _stay_inside_the_arguments()
    interpreter.ScanOps.generic_scan = _scan
    # Of a NaN and a number a GPU takes the number; numpy's maximum is NaN.
    BUILDER.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    BUILDER.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    BUILDER.create_exp = _exp


def _patch_the_language_once() -> None:
    """Its own functions take the place of tl's: it does so at each call, of helpers too."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)


def _remember_types() -> None:
    """Each operation makes the types of its blocks anew, and a table to look dtypes up."""
    np_dtype, dtypes = interpreter._get_np_dtype, {}
    block, blocks = tl.core.block_type.__init__, {}
    tensor, tensors = tl.core.tensor.__init__, {}
    broadcast = SEMANTIC.broadcast_impl_value

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = np_dtype(dtype.scalar)
        return dtypes[name]

    def init_block_type(self: Any, element_ty: Any, shape: Iterable[Any]) -> None:
        key = (element_ty.name, *(getattr(n, "value", n) for n in shape))
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = vars(self)
        vars(self).update(blocks[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = (type.scalar.name, *(type.shape.values if type.is_block() else ()))
        if key not in tensors:
            tensor(self, handle, type)
            tensors[key] = dict(vars(self))
        vars(self).update(tensors[key], handle=handle)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        same = blocks and lhs.type.shape.values == rhs.type.shape.values
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    interpreter._get_np_dtype = get_np_dtype
    tl.core.block_type.__init__ = init_block_type
    tl.core.tensor.__init__ = init_tensor
    SEMANTIC.broadcast_impl_value = broadcast_impl_value


def _stay_inside_the_arguments() -> None:
    """A load or store outside the memory of the launch's arguments is an error."""
    init, load, store = (
        interpreter.GridExecutor._init_args_hst,
        BUILDER.create_masked_load,
        BUILDER.create_masked_store,
    )
    spans: set[tuple[int, int]] = set()

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        spans.clear()
        for x in (*args, *kwargs.values()):
            if hasattr(x, "untyped_storage"):
                start = x.untyped_storage().data_ptr()
                spans.add((start, start + x.untyped_storage().nbytes()))
        return init(self, args, kwargs)

    def check(pointers: Any, mask: Any) -> None:
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if at.size:
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            first, end = int(at.min()), int(at.max()) + size
            if not any(a <= first and end <= b for a, b in spans):
                raise IndexError("an address outside of all arguments")

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    interpreter.GridExecutor._init_args_hst = init_args
    BUILDER.create_masked_load, BUILDER.create_masked_store = masked_load, masked_store


def _scan(self: Any, given: Iterable[Any]) -> list[Any]:
    """Scan in a tree, as a GPU does, with shifts by 1, 2, 4, …: not one element at a time."""
    given, axis = list(given), self.axis
    shape = given[0].handle.data.shape
    rest = [i for i in range(len(shape)) if i != axis % len(shape)]
    at, step = np.expand_dims(np.arange(shape[axis]), rest), 1
    while step < shape[axis]:
        behind = [self.to_tensor(np.roll(x.handle.data, step, axis), x.dtype) for x in given]
        got = self.combine_fn.fn(*behind, *given)
        got = got if isinstance(got, tuple) else (got,)
        given = [
            self.to_tensor(np.where(at >= step, new.handle.data, x.handle.data), x.dtype)
            for x, new in zip(given, got, strict=True)
        ]
        step *= 2
    return given


def _exp(self: Any, x: Any) -> Any:
    """``2 ** (x * log2(e))`` in float32: the product's rounding grows with x, as on a GPU."""
    if x.data.dtype != np.float32:
        return self.unary_op(x, np.exp)
    with np.errstate(over="ignore"):  # infinite there too
        return self.unary_op(x, lambda data: np.exp2(data * LOG2_E))


@contextmanager
def reversed_programs() -> Iterator[list[int]]:
    """Run each grid's last program first; the list gets the sizes of the grids."""
    original, grids = BUILDER.set_grid_idx, []

    def last_first(self: Any, x: int, y: int, z: int) -> None:
        grids.append(self.grid_dim[0])
        original(self, self.grid_dim[0] - 1 - x, y, z)

    BUILDER.set_grid_idx = last_first
    try:
        yield grids
    finally:
        BUILDER.set_grid_idx = original
