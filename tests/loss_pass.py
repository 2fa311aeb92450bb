"""One chunk of logits through a loss's pass, for the tests of its kernels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppokern.linear import reference
from ppokern.linear.reference import Chunk, Head, Plan
from ppokern.logprob import reference as logprob_reference
from ppokern.ppo_loss.reference import Inputs, Options, TokenSlopes

N = 11
TWO_PASSES = partial(reference.two_passes, logprob_reference)


def draw(v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, ids, and terms of tokens on both sides of the clip range, away from its edges."""
    logits, ids = (3 * torch.randn(N, v)).to(dtype), torch.randint(0, v, (N,))
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    terms = {
        "old_logprobs": logprobs - torch.tensor([-0.6, -0.1, 0.1, 0.6])[torch.arange(N) % 4],
        "advantages": torch.randn(N),
        "weights": torch.rand(N),
        "ref_logprobs": logprobs - torch.rand(N),
    }
    return logits, ids, terms


def run(loss_pass: Any, logits: Tensor, ids: Tensor, terms: dict[str, Tensor], **given: Any) -> Any:
    """Log-probs, entropies, which rows are left, and their gradients."""
    wide = loss_pass is TWO_PASSES
    dtype = torch.float64 if wide else torch.float32
    logits = logits.double() if wide else logits.clone()
    n, v = logits.shape
    valid, compact = given.get("valid", torch.ones(N, dtype=torch.bool)), given.get("compact", True)
    entropy_coef, kl_coef = given.get("entropy_coef", 0.0), given.get("kl_coef", 0.0)
    o = Options(0.2, 0.2, None, False, 20.0, "sum", entropy_coef, kl_coef, "k3", None, 1.0)
    at, rows = given.get("temperature", torch.ones(())), given.get("rows", slice(0, n))
    head = Head(logits.new_empty(v, 1), None, at, given.get("softcap"), v, dtype)
    how = Plan(None, valid, compact, logits.dtype, n, n * v, v, True)
    chunk = Chunk(rows, logits.new_empty(n, 1), logits, at if at.dim() == 0 else at[rows])
    logprobs, entropy = torch.zeros(N, dtype=dtype), torch.zeros(N, dtype=dtype)
    slopes = TokenSlopes(Inputs(**terms), o, valid, dtype)
    kept = loss_pass(chunk, head, how, ids, slopes, logprobs, entropy)
    kept = torch.arange(n) if kept is None else kept
    return logprobs, entropy, kept, logits[: len(kept)]


def close(mine: Any, exact: Any) -> None:
    assert torch.equal(mine[2], exact[2])
    for a, b in zip(mine, exact, strict=True):
        assert torch.allclose(a.double(), b.double(), atol=4e-6, rtol=4e-6, equal_nan=True)
