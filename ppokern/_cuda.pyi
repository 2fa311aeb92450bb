"""The CUDA kernels: as those of `_native`, but for what follows the arguments there.

That is, in this order and where it is named here: the address of memory to work in, and that of a
stream of the current device.
"""

from typing import Any

def gae(*fields: Any) -> None: ...  # an int; a stream
def logprob_segments(vocab_size: int, /) -> int: ...
def logprob_forward(*fields: Any) -> None: ...  # (segments, 4) floats for each row; a stream
def logprob_backward(*fields: Any) -> None: ...  # a stream
def linear_loss(*fields: Any) -> None: ...  # those of LinearLossArgs; a stream
def move_up(*fields: Any) -> None: ...  # those of MovedRows; a stream
def ppo_loss_work(sequences: int, tokens: int, /) -> int: ...  # bytes
def ppo_loss(*fields: Any) -> None: ...  # denominators on the device, 0: none; work; a stream
