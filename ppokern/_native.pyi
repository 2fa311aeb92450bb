"""The C++ kernels. A tensor is (address, sequence stride, step stride), an absent one (0, 0, 0).

A dense one may be its address alone, an absent one then is 0.
"""

View = int | tuple[int, int, int]
Dense = int
Rows = tuple[int, int, int]  # address, address of the rows' offsets or 0, row stride

fields: dict[str, tuple[str, ...]]  # of each function's arguments, in order

def cpu_capability() -> str: ...
def getenv(name: str, /) -> str | None: ...
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
def token_ids_fit(token_ids: View, mask: View, rows: int, vocab_size: int, /) -> bool: ...
def logprob_forward(
    logits: Rows,
    type: int,
    token_ids: View,
    mask: View,
    temperatures: View,
    temperature: float,
    softcap: float,
    rows: int,
    vocab_size: int,
    threads: int,
    logprobs: View,
    entropy: View,
    found: View,
    /,
) -> None: ...
def logprob_backward(
    logits: Rows,
    type: int,
    token_ids: View,
    mask: View,
    temperatures: View,
    temperature: float,
    softcap: float,
    rows: int,
    vocab_size: int,
    threads: int,
    grad_logprobs: View,
    grad_entropy: View,
    found: View,
    out: Rows,
    width: int,
    compact: bool,
    /,
) -> None: ...
def ppo_loss(
    logprobs: Dense,
    entropy: Dense,
    values: Dense,
    old_logprobs: Dense,
    advantages: Dense,
    weights: Dense,
    ref_logprobs: Dense,
    old_values: Dense,
    returns: Dense,
    mask: Dense,
    value_mask: Dense,
    cu_seqlens: Dense,
    denominator: float | None,
    value_denominator: float | None,
    sequences: int,
    tokens: int,
    low: float,
    high: float,
    dual_clip: float,
    log_ratio_limit: float,
    aggregate: str,
    entropy_coef: float,
    kl_coef: float,
    kl_kind: str,
    value_clip_range: float,
    value_coef: float,
    threads: int,
    loss: Dense,
    stats: Dense,
    logprob_slopes: Dense,
    ratio_slopes: Dense,
    entropy_slopes: Dense,
    value_slopes: Dense,
    /,
) -> None: ...
