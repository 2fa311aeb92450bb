"""What is installed, what of it runs here, and why not the rest: `ppokern info`."""

import os
import platform
from pathlib import Path

import torch

from ppokern import __version__, _backend, _install
from ppokern._names import BACKENDS
from ppokern.gae import op as gae
from ppokern.linear import loss as linear_loss
from ppokern.linear import op as linear
from ppokern.logprob import op as logprob
from ppokern.ppo_loss import op as ppo_loss
from ppokern.reward import op as reward

KERNELS = {
    "selected_logprobs": logprob.KERNELS,
    "linear_selected_logprobs": linear.KERNELS,
    "linear_ppo_loss": linear_loss.KERNELS,
    "gae": gae.KERNELS,
    "whiten": gae.WHITEN_KERNELS,
    "shaped_rewards": reward.KERNELS,
    "ppo_loss": ppo_loss.KERNELS,
}


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def line() -> str:
    """Return version, backend, instruction set and threads, as a run's first line has them.

    Raises:
        ValueError: PPOKERN_BACKEND names a backend that is not here.
    """
    on_cuda = torch.cuda.is_available()
    name = _backend.asked_for() or taken("ppo_loss", CUDA if on_cuda else CPU)
    kernels = "plain torch" if name == "torch" else f"{name} kernels"
    kernels += f" ({_backend.cpu_capability()})" if name == "cpu" else ""
    threads = torch.get_num_threads()
    place = torch.cuda.get_device_name() if on_cuda else f"{threads} thread{'s'[: threads > 1]}"
    return f"ppokern {__version__}, {kernels}, torch {torch.__version__.split('+')[0]}, {place}"


def taken(op: str, device: torch.device) -> str:
    """Return the backend that an op takes in float32 where none is named."""
    kernels = KERNELS[op]
    name = _backend.choose(op, kernels, "", device, torch.float32)
    return "torch" if kernels[name] is kernels["torch"] else name


def backends() -> dict[str, str]:
    """Return what can be said of each backend: that it is here, or what it lacks."""
    here = _backend.available_backends()
    device = "" if torch.cuda.is_available() else "torch finds no CUDA device"
    triton = "" if _backend.has_triton() else _install.pip_install("triton")
    native, cuda = _backend.UNLOADABLE.get("_native"), _backend.UNLOADABLE.get("_cuda")
    if _backend.cuda is None and cuda is None:
        cuda = "not built: PPOKERN_CUDA=on builds it where nvcc is"
    lacks = {
        "torch": [],
        "cpu": [native or _install.why_unbuilt()[0]],
        "triton": [triton, device],
        "cuda": [cuda, device],
    }
    says = {name: "; ".join(filter(None, lacks[name])) for name in BACKENDS}
    says |= dict.fromkeys(here, "here")
    if "cpu" in here:
        says["cpu"] += f", instruction set {_backend.cpu_capability()}"
    return says


def report() -> str:
    """Return the text of `ppokern info`."""
    kind = "clone" if _install.CLONE else "installed"
    on_cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    named = os.environ.get("PPOKERN_BACKEND")
    rows: list[tuple[str, ...]] = [
        ("ppokern", f"{__version__}, {kind}: {Path(__file__).parent}"),
        ("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {on_cuda}"),
        (),
        ("backends", *([f"PPOKERN_BACKEND={named}"] if named else [])),
        *((f"  {name}", says) for name, says in backends().items()),
        (),
        ("by default", "on CPU", "on CUDA" if torch.cuda.is_available() else "on CUDA (none here)"),
        *((f"  {op}", taken(op, CPU), taken(op, CUDA)) for op in KERNELS),
        ("  kl_estimate, pack, …", "torch", "torch"),
        (),
        ("extras",),
    ]
    extras = _install.extras()
    for extra, missing in extras.items():
        rows.append((f"  {extra}", _install.pip_install(extra) if missing else "installed"))
    if not extras:
        rows.append(("  unknown: the package is not installed",))
    return "\n".join(_aligned(*row) for row in rows)


def _aligned(first: str = "", second: str = "", third: str = "") -> str:
    return f"{first:28}{second:10}{third}".rstrip()
