"""One chunk of logits through a loss's pass, and the tests that all of its kernels share."""

from functools import partial
from typing import Any

import pytest
import torch
from measure import leaf, same_bits
from torch import Tensor

import ppokern
from ppokern.linear import reference
from ppokern.linear.reference import Chunk, Head, Plan
from ppokern.logprob import reference as logprob_reference
from ppokern.ppo_loss.reference import Inputs, Options, TokenSlopes

N = 11
TWO_PASSES = partial(reference.two_passes, logprob_reference)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"compact": False, "valid": torch.arange(N) % 3 != 1},
    "all of the head": {"softcap": 4.0, "temperature": torch.rand(N) + 0.5, "entropy_coef": 0.1},
    "some rows": {"rows": torch.tensor([1, 2, 5, 10]), "kl_coef": 0.3},
}


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


def equals_two_passes(loss_pass: Any, v: int, options: dict[str, Any]) -> None:
    logits, ids, terms = draw(v)
    rows = options.get("rows", slice(0, N))
    exact = run(TWO_PASSES, logits[rows], ids, terms, **options)
    close(run(loss_pass, logits[rows], ids, terms, **options), exact)
    if v > 1 and not options:
        assert 0 < len(exact[2]) < N, "some rows have no slope"


def forbidden_tokens_and_ids_out_of_range(
    loss_pass: Any, v: int, whole_tile: slice, compact: bool = True
) -> None:
    logits, ids, terms = draw(v)
    logits[0, whole_tile] = -torch.inf
    logits[1, : ids[1]], logits[1, ids[1] + 1 :] = -torch.inf, -torch.inf  # it alone is left
    logits[2] = -torch.inf
    logits[3, ids[3]] = -torch.inf
    ids[4], ids[5] = v, -1
    logits[6, 150] = torch.inf
    logits[7, 3] = torch.nan
    logits[8, 64:] *= 1e37
    options: dict[str, Any] = {"temperature": torch.tensor(0.5), "compact": compact}
    options["entropy_coef"] = 0.1
    mine, exact = (run(k, logits, ids, terms, **options) for k in (loss_pass, TWO_PASSES))
    close(mine, exact)
    assert mine[0].isnan().nonzero().flatten().tolist() == [4, 5, 6, 7]


def a_row_alone_and_among_others(loss_pass: Any, v: int, dtype: torch.dtype) -> None:
    logits, ids, terms = draw(v, dtype)
    options: dict[str, Any] = {"entropy_coef": 0.1, "compact": False}
    whole = run(loss_pass, logits, ids, terms, **options)
    for i in range(N):
        rows = slice(i, i + 1)
        alone = run(loss_pass, logits[rows], ids, terms, rows=rows, **options)
        assert same_bits(alone[0][rows], whole[0][rows])
        assert same_bits(alone[1][rows], whole[1][rows])
        assert same_bits(alone[-1], whole[-1][rows])


def the_op_takes_it(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "two_passes", None)
    hidden, weight, x = torch.randn(5, 3), torch.randn(9, 3), torch.randn(5)
    with ppokern.use_backend(backend):
        loss = ppokern.linear_ppo_loss(leaf(hidden), weight, torch.arange(5), x, x).loss
    loss.backward()
    assert loss.isfinite()
