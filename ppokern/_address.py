"""Which tensors a kernel can read: decided here, for arguments and for incoming gradients.

A kernel takes addresses. A fake or functional tensor has none; behind a sparse, nested or wrapped
one lies something else; a negated view shows other numbers than those in memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._C import _disabled_torch_dispatch_impl as _NO_DISPATCH
from torch._C import _dispatch_tls_is_dispatch_key_included as _is_in_force
from torch._C import _get_dispatch_mode as _mode
from torch._C import _get_tracing_state as _jit_traces
from torch._C import _len_torch_dispatch_stack as _count_of_modes
from torch._C import _TorchDispatchModeKey as _Modes

_ORDINARY = (Tensor, nn.Parameter)
_TRACED = ("FakeTensor", "FunctionalTensor")  # stand for tensors while a graph is made
_COMMON = {Tensor, nn.Parameter, type(None), bool, int, float, str}  # types of most arguments
_PRE_DISPATCH = DispatchKey.PreDispatch
_TRACING_MODES = _Modes.FAKE, _Modes.FUNCTIONAL, _Modes.PROXY
_WAYS_OUT = {
    "DTensor": "gather it first: full_tensor()",
    "AsyncCollectiveTensor": "wait for it first: wait()",
    "MaskedTensor": "pass get_data(), and get_mask() as the mask",
    "functorch tensor": "functorch transforms, torch.func.vmap and grad among them, and "
    "is_grads_batched are not supported",
    "nested tensor": "pass values(), and offsets() as cu_seqlens",
    "negated view": "resolve_neg() makes one",
    "tensor without storage": "it was freed, or is one of autograd's zeros: clone() it in time",
}


def obstacle(x: Tensor) -> str | None:
    """Return why a kernel cannot read `x`, as ``what it is (what to do)``; None where it can."""
    try:
        if type(x) in _ORDINARY and not x.is_neg() and not x.is_nested and x.data_ptr():
            return None
    except RuntimeError:  # no storage to ask for
        pass
    return None if (kind := _kind(x)) is None else _described(kind)


def wrapped(x: Tensor) -> str | None:
    """Return the same of a DTensor, which `torch.compile` knows too; None for all else."""
    return _described("DTensor") if type(x).__name__ == "DTensor" else None


def _described(kind: str) -> str:
    return f"a {kind} ({_WAYS_OUT.get(kind, 'make a plain tensor of it first')})"


def _kind(x: Tensor) -> str | None:
    if type(x).__name__ in _TRACED:
        return None
    if x.is_nested:
        return "nested tensor"
    if getattr(type(x), "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH:
        return type(x).__name__
    if x.layout is not torch.strided:
        return f"{x.layout} tensor".replace("torch.", "")
    if x.is_neg():
        return "negated view"
    try:
        return (
            "tensor without storage" if x.numel() and not x.is_meta and not x.data_ptr() else None
        )
    except RuntimeError:
        return "functorch tensor"


def gradient(op: str, grad: Tensor | None) -> Tensor | None:
    """Return an incoming gradient as a kernel can read it: a negated view becomes a tensor."""
    if grad is None or (found := obstacle(grad)) is None:
        return grad
    if _kind(grad) == "negated view":
        return grad.resolve_neg()
    raise TypeError(f"the gradient that comes to {op}: expected a plain tensor, got {found}")


def tracing(args: Sequence[Any]) -> bool:
    """Return whether a call on these arguments makes a graph, or only finds out shapes.

    So it does with fake, functional and meta tensors, under `make_fx` and `torch.jit.trace`.
    `torch.compile` has its own word for it, `torch.compiler.is_compiling`.
    """
    if not _COMMON.issuperset(map(type, args)) and any(type(x).__name__ in _TRACED for x in args):
        return True
    for x in args:
        if isinstance(x, Tensor):  # all are on one device
            return x.is_meta or _traced_now()
    return _traced_now()


def stands_for_another(x: Tensor) -> bool:
    """Return whether a tensor of the CPU or of CUDA has no values: a graph is being made."""
    return (type(x) not in _ORDINARY and type(x).__name__ in _TRACED) or _traced_now()


def _traced_now() -> bool:
    if _count_of_modes() and any(_mode(key) is not None for key in _TRACING_MODES):
        return True
    return _jit_traces() is not None or _is_in_force(_PRE_DISPATCH)
