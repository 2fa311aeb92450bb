"""Advantages and their whitening: the public functions, and the words for what was wrong."""

from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from ppokern import _backend, _check, _library
from ppokern._names import MASK_MODES, MaskMode
from ppokern._sequences import Sequences
from ppokern.gae import kernel_native, reference
from ppokern.gae.reference import Inputs, Options

KERNELS = {
    "torch": reference.gae,
    "cpu": kernel_native.gae,
    "cuda": partial(kernel_native.gae, on_cuda=True),
    "triton": "ppokern.gae.kernel_triton:gae",
}
WHITEN_KERNELS = {
    "torch": reference.whiten,
    "cpu": reference.whiten,  # torch's own reductions are at the memory's speed
    "triton": "ppokern.gae.kernel_triton:whiten",
}
MOST = torch.finfo(torch.float64).max


@_library.loadable
class Advantages(NamedTuple):
    """Advantages and the value targets ``advantages + values``; neither carries a gradient."""

    advantages: Tensor
    returns: Tensor


def _gae(x: Inputs, o: Options, backend: str) -> Advantages:
    _check.within("gamma", o.gamma, 0, 1)
    _check.within("lam", o.lam, 0, 1)
    kernel = _backend.select("gae", KERNELS, backend, x.rewards.device, reference.arithmetic(x))
    check = _check.values_of(x.rewards)
    advantages, returns, finite = kernel(x, o, check)
    if check and not finite:
        _raise_fault(x, o, ~(advantages.isfinite() & returns.isfinite()))
    return Advantages(advantages, returns)


def _gae_fake(x: Inputs, o: Options, backend: str) -> Advantages:
    new, dtype = x.rewards.new_empty, reference.arithmetic(x)
    return Advantages(new(x.rewards.shape, dtype=dtype), new(x.rewards.shape, dtype=dtype))


_gae_op = _library.register("gae", _gae, _gae_fake)


def _raise_fault(x: Inputs, o: Options, overflow: Tensor) -> NoReturn:
    """Name what made a result that is not finite, and where."""
    next_values, last_values = x.next_values, x.last_values
    time_major = o.time_dim == 0 and x.rewards.dim() == 2
    valid = torch.ones_like(x.rewards, dtype=torch.bool) if x.mask is None else x.mask
    boot = torch.ones_like(valid) if x.bootstrap is None else x.bootstrap
    goes_on = boot if x.continues is None else x.continues
    time_last = valid.t() if time_major else valid
    sequences = Sequences(time_last.shape, x.cu_seqlens)
    last_of_time = sequences.is_last(time_last)
    last = last_of_time.t() if time_major else last_of_time

    def look(name: str, bad: Tensor, expected: str, found: Tensor | str) -> None:
        if (at := _check.first(bad)) is not None:
            got = found if isinstance(found, str) else found.reshape(-1)[at].item()
            _check.fail(name, expected, f"{got} at {_check.place(at, bad.shape)}")

    look("rewards", valid & ~x.rewards.isfinite(), "finite values", x.rewards)
    look("values", valid & ~x.values.isfinite(), "finite values", x.values)
    bootstrapped = "finite values where they are bootstrapped from"
    if next_values is not None:
        look("next_values", valid & boot & ~next_values.isfinite(), bootstrapped, next_values)
    elif last_values is not None:
        used = last_of_time & (boot.t() if time_major else boot)
        reached = sequences.sum(used.float()) > 0
        look("last_values", reached & ~last_values.isfinite(), bootstrapped, last_values)
    inside = valid & ~last
    name = "bootstrap" if x.continues is None else "continues"
    look(name, inside & goes_on & ~boot, "no continuation without bootstrapping", "one")
    if next_values is None:
        look("next_values", inside & boot & ~goes_on, "a tensor, as trajectories are cut", "a cut")
    at = _check.place(_check.first(overflow) or 0, overflow.shape)
    _check.fail("rewards, values", "results within the dtype's range", f"an overflow at {at}")


def gae(
    rewards: Float[Tensor, "*layout"],
    values: Float[Tensor, "*layout"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    mask: Bool[Tensor, "*layout"] | None = None,
    terminated: Bool[Tensor, "*layout"] | None = None,
    truncated: Bool[Tensor, "*layout"] | None = None,
    bootstrap: Bool[Tensor, "*layout"] | None = None,
    continues: Bool[Tensor, "*layout"] | None = None,
    next_values: Float[Tensor, "*layout"] | None = None,
    last_values: Float[Tensor, "*sequences"] | None = None,
    mask_mode: MaskMode = "skip",
    time_dim: int = -1,
    cu_seqlens: Integer[Tensor, " boundaries"] | None = None,
) -> Advantages:
    """Generalised advantage estimation, backwards in time, masked, for every layout.

    ``delta_t = r_t + gamma * bootstrap_t * V(next_t) - V_t``,
    ``A_t = delta_t + gamma * lam * continue_t * A_{t+1}``, ``returns = advantages + values``.
    ``V(next_t)`` is ``next_values[t]`` where given, else the next transition's value, and for the
    last transition of a sequence its `last_values`.

    Args:
        rewards: ``(B, T)``, ``(T, B)`` with ``time_dim=0``, ``(T,)``, or packed ``(total,)`` with
            `cu_seqlens`; float32, bfloat16, float16 or float64, any strides.
        values: ``V(s_t)``, the critic's prediction before action `t`.
        gamma: discount of a step, in ``[0, 1]``.
        lam: lambda, in ``[0, 1]``.
        mask: True = a transition.
        terminated: the episode ended here: no bootstrap, no continuation.
        truncated: it was cut here: bootstrap, no continuation. Both = terminated.
        bootstrap: in place of the two above, whether ``V(next_t)`` counts; by default True.
        continues: whether ``A_{t+1}`` counts; by default `bootstrap`. Not read at the last
            transition of a sequence, which never continues.
        next_values: ``V`` of the state behind each transition. Required where a trajectory is cut
            inside a row, since the neighbour belongs to another episode.
        last_values: one per sequence: ``(B,)``, 0-d for ``(T,)``, ``(S,)`` packed; by default 0.
            Not used with `next_values`.
        mask_mode: ``"skip"``: a masked position is passed over, to the next unmasked one.
            ``"decay"``: one between unmasked positions is a step with reward 0 and value 0.
            Positions before the first and behind the last unmasked one are padding in both.
        time_dim: -1 or 0.
        cu_seqlens: ``(S + 1,)``, int32 or int64.

    Returns:
        ``Advantages(advantages, returns)`` of the same layout, float32 or float64, constant.

    Masking: advantages and returns are 0 at masked positions; nothing there is read.

    Numerics: values that are not bootstrapped from are never read.

    Raises:
        ValueError: a shape, number or option that does not fit; and on the CPU, or under
            validation, with its place: a value that is not finite, a transition that continues
            without bootstrapping, a cut without `next_values`, an overflow. On CUDA these are NaN.
        TypeError: a dtype that does not fit.

    Source: Schulman et al. 2016 (arXiv 1506.02438), equations 10 to 16.
    """
    gamma, lam = _check.number("gamma", gamma), _check.number("lam", lam)
    _check.choice("mask_mode", mask_mode, MASK_MODES)
    _check.tensor("rewards", rewards)
    shape, device = rewards.shape, rewards.device
    time_dim = _check.integer("time_dim", time_dim, -1, 0)
    if rewards.dim() not in (1, 2):
        _check.fail("rewards", "shape (B, T), (T, B), (T,) or (total,)", tuple(shape))
    _check.like("values", values, shape, device)
    _check.like("next_values", next_values, shape, device, optional=True)
    flags = {
        "mask": mask,
        "terminated": terminated,
        "truncated": truncated,
        "bootstrap": bootstrap,
        "continues": continues,
    }
    for name, x in flags.items():
        _check.mask_like(name, x, shape, device)
    if cu_seqlens is not None:
        _check.cu_seqlens(cu_seqlens, shape, device)
        per_sequence: tuple[int, ...] = (cu_seqlens.shape[0] - 1,)
    else:
        per_sequence = tuple(shape[1:] if time_dim == 0 else shape[:-1])
    _check.like("last_values", last_values, per_sequence, device, optional=True)
    if terminated is not None or truncated is not None:
        if bootstrap is not None or continues is not None:
            _check.fail("bootstrap, continues", "None with terminated or truncated", "both pairs")
        bootstrap = None if terminated is None else ~terminated
        if truncated is not None:
            continues = ~truncated if bootstrap is None else bootstrap & ~truncated
    x = Inputs(rewards, values, mask, bootstrap, continues, next_values, last_values, cu_seqlens)
    return _gae_op(
        _check.constants(x),
        Options(gamma, lam, mask_mode == "decay", time_dim),
        _backend.asked_for(),
    )


def _whiten(
    x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float, correction: float, backend: str
) -> Tensor:
    check_moments(eps, correction)
    kernel = _backend.select("whiten", WHITEN_KERNELS, backend, x.device, _check.arithmetic(x))
    return kernel(x, mask, shift_mean, eps, correction, None)


def check_moments(eps: float, correction: float) -> None:
    """Check the numbers of `whiten`, which are used in float64."""
    _check.within("eps", eps, 0, MOST)
    _check.within("correction", correction, 0, MOST)


def _whiten_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=_check.arithmetic(x))


_whiten_op = _library.register("whiten", _whiten, _whiten_fake)


def whiten(
    x: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"] | None = None,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    correction: float = 1,
    group: "dist.ProcessGroup | None" = None,
) -> Float[Tensor, "*batch"]:
    """Scale to variance 1 and, with `shift_mean`, shift to mean 0, over unmasked positions.

    ``(x - mean) / sqrt(var + eps)``, with ``var = sum((x - mean)^2) / (count - correction)``.

    Args:
        x: ``(...)``.
        mask: ``(...)``, True = take part.
        shift_mean: False adds the mean back.
        eps: added to the variance; finite, not below 0.
        correction: taken from the count; 1 = the sample variance. Finite, not below 0.
        group: take mean and variance over all ranks of this process group; each rank must call, one
            without unmasked positions takes part with zeros. None = this process alone.

    Returns:
        ``(...)``, float32 or float64, constant.

    Masking: masked positions are 0.

    Numerics: sums are taken in float64, and the mean is as exact as the values are close. With
    ``count <= correction``, or where all values are equal, the result is ``x - mean`` (`x` without
    `shift_mean`): never NaN.

    Raises:
        ValueError: a shape or number that does not fit.
        TypeError: a dtype that does not fit.
    """
    _check.tensor("x", x)
    _check.mask_like("mask", mask, x.shape, x.device)
    eps, correction = _check.number("eps", eps), _check.number("correction", correction)
    options = bool(shift_mean), eps, correction
    backend = _backend.asked_for()
    if group is None:
        return _whiten_op(x.detach(), mask, *options, backend)
    check_moments(eps, correction)
    if torch.compiler.is_compiling():  # a schema has no process groups; it knows collectives
        return reference.whiten(x.detach(), mask, *options, group)
    kernel = _backend.select("whiten", WHITEN_KERNELS, backend, x.device, _check.arithmetic(x))
    return kernel(x.detach(), mask, *options, group)
