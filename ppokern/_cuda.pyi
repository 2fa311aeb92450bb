"""The CUDA kernels: as those of `_native`, with addresses behind the arguments.

These are of memory to work in, where it is named here, and of a stream of the current device.
"""

from typing import Any

fields: dict[str, tuple[str, ...]]

def gae(values: dict[str, Any], malformed: int, stream: int, /) -> None: ...  # of an int
def logprob_segments(vocab_size: int, /) -> int: ...
def logprob_forward(values: dict[str, Any], partials: int, stream: int, /) -> None: ...
def logprob_backward(values: dict[str, Any], stream: int, /) -> None: ...
def linear_loss(values: dict[str, Any], stream: int, /) -> None: ...
def move_up(values: dict[str, Any], stream: int, /) -> None: ...
def ppo_loss_work(sequences: int, tokens: int, /) -> int: ...  # bytes
def ppo_loss(
    values: dict[str, Any],
    denominator: int,  # on the device, 0: none
    value_denominator: int,
    work: int,
    stream: int,
    /,
) -> None: ...
