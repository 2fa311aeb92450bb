"""The C++ kernels. A tensor is (address, sequence stride, step stride), an absent one (0, 0, 0)."""

View = tuple[int, int, int]
Rows = tuple[int, int, int]  # address, address of the rows' offsets or 0, row stride

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
def logprob_forward(
    logits: Rows,
    type: int,
    token_ids: View,
    mask: View,
    temperature: View,
    softcap: float,
    rows: int,
    vocab_size: int,
    threads: int,
    logprobs: View,
    entropy: View,
    maxima: View,
    log_sums: View,
    /,
) -> None: ...
def logprob_backward(
    logits: Rows,
    type: int,
    token_ids: View,
    mask: View,
    temperature: View,
    softcap: float,
    rows: int,
    vocab_size: int,
    threads: int,
    grad_logprobs: View,
    grad_entropy: View,
    logprobs: View,
    entropy: View,
    maxima: View,
    log_sums: View,
    out: Rows,
    width: int,
    compact: bool,
    /,
) -> None: ...
