"""The C++ kernels. A tensor is (address, sequence stride, step stride), an absent one (0, 0, 0)."""

View = tuple[int, int, int]

def cpu_capability() -> str: ...
def gae(
    rewards: View,
    values: View,
    mask: View,
    bootstrap: View,
    continues: View,
    next_values: View,
    last_values: View,
    advantages: View,
    returns: View,
    cu_seqlens: View,
    sequences: int,
    steps: int,
    gamma: float,
    decay: float,
    masked_are_steps: bool,
    threads: int,
    /,
) -> bool: ...
