"""Which backends, ops and dtypes the tests run over."""

import os
from typing import NamedTuple

import torch

OPS = ("logprob", "linear", "gae", "whiten", "ppo_loss", "reward", "packing")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GPU = "cuda" if torch.cuda.is_available() else "cpu"
# kernels for a GPU that a Python interpreter runs, or g++ compiled
TRITON_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else GPU
CUDA_DEVICE = "cpu" if "PPOKERN_CUDA_ON_CPU" in os.environ else GPU


class Can(NamedTuple):
    ops: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    device: str = "cpu"


# What each backend can do. A new one joins every test below with one line.
CAN = {
    "torch": Can(OPS, FLOATS),
    "cpu": Can(("logprob", "linear", "gae", "ppo_loss"), FLOATS[:3]),
    "triton": Can(OPS[:-1], FLOATS[:3], TRITON_DEVICE),
    "cuda": Can(("logprob", "linear", "gae", "ppo_loss"), FLOATS[:3], CUDA_DEVICE),
}
