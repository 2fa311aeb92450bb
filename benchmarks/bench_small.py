"""What a call costs beside its work: a few rows of V = 1,000, forward and backward."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ppokern
from benchmarks import bench_gae, bench_logprob, bench_ppo_loss

V = 1000


def call_of(op: str, rows: int, form: str) -> Callable[[], Any]:
    """Return a call of an op, or of what stands for it in plain torch."""
    plain = form == "eager"
    if op == "gae":
        x = {"rewards": torch.randn(rows, 1), "values": torch.randn(rows, 1)}
        x["mask"] = torch.ones(rows, 1, dtype=torch.bool)
        return functools.partial(bench_gae.loop if plain else ppokern.gae, **x)
    if op == "ppo_loss":
        x = {name: t.detach()[:rows] for name, t in bench_ppo_loss.data().items()}
        x |= {name: x[name].clone().requires_grad_() for name in ("logprobs", "values")}
        return functools.partial(bench_ppo_loss.eager if plain else ppokern.ppo_loss, **x)
    logits, ids = torch.randn(rows, V, requires_grad=True), torch.randint(0, V, (rows,))
    if op == "selected_logprobs":
        return functools.partial(
            bench_logprob.softmax_form if plain else ppokern.selected_logprobs, logits, ids
        )
    with_entropy = ppokern.selected_logprobs_with_entropy
    return functools.partial(bench_logprob.entropy_form if plain else with_entropy, logits, ids)


OPS = ("selected_logprobs", "selected_logprobs_with_entropy", "gae", "ppo_loss")


@pytest.mark.parametrize("form", ["eager", *ppokern.available_backends()])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("passes", ["no_grad", "forward + backward"])
@pytest.mark.parametrize("op", OPS)
def bench_small(measure: Callable, op: str, passes: str, rows: int, form: str) -> None:
    """Thousands of calls in a row."""
    call = call_of(op, rows, form)

    def forward() -> None:
        with torch.no_grad():
            call()

    def both() -> None:
        out = call()
        (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()

    if passes != "no_grad" and op == "gae":
        pytest.skip("advantages carry no gradient")
    measure(
        f"{op}, {rows} rows, {passes}", form, forward if passes == "no_grad" else both, repeats=300
    )
