"""PPO losses: ``python -m benchmarks.bench_ppo_loss [--compile] [N …]``.

`ppo_loss` with policy, value term, mask and all statistics, forward and backward, in float32 at one
thread. Columns: CPU microseconds, best of several, of the `cpu` backend and of plain torch that
makes the same loss and statistics; then their ratio, and the ratio to torch.compile of that.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import ppokern
from benchmarks.measure import seconds


def eager(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss as most write it."""
    count = mask.sum()

    def mean(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0.0).sum() / count

    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.clamp(-20, 20).exp()
    unclipped, clipped = -ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages
    policy = mean(torch.maximum(unclipped, clipped))
    error = (values - returns).square()
    other = (torch.clamp(values, old_values - 0.2, old_values + 0.2) - returns).square()
    value = 0.5 * mean(torch.maximum(error, other))
    with torch.no_grad():
        stats = {
            "policy_loss": policy.detach(),
            "value_loss": value.detach(),
            "ratio_mean": mean(ratio),
            "ratio_min": ratio.masked_fill(~mask, torch.inf).min(),
            "ratio_max": ratio.masked_fill(~mask, -torch.inf).max(),
            "approx_kl_k1": mean(-log_ratio),
            "approx_kl_k2": mean(log_ratio.square() / 2),
            "approx_kl_k3": mean(log_ratio.expm1() - log_ratio),
            "clip_fraction": mean(((ratio - 1).abs() > 0.2).float()),
            "clip_fraction_active": mean((clipped > unclipped).float()),
            "value_clip_fraction": mean((other > error).float()),
            "n_tokens": count.float(),
            "n_sequences": mask.any(-1).sum().float(),
        }
    return policy + 0.5 * value, stats


def measure(form: Callable, batch: dict[str, Tensor], train: bool) -> float:
    """Seconds of a call, with the backward pass or under no_grad."""
    flows = [batch["logprobs"], batch["values"]]

    def call() -> None:
        with torch.set_grad_enabled(train):
            loss = form(**batch)[0]
        if train:
            torch.autograd.grad(loss, flows)

    call()
    return seconds(call, max(10, 2**21 // batch["mask"].numel()))


def main() -> None:
    """Print a line per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", nargs="*", type=int, default=[64, 2**14, 2**20])
    parser.add_argument("--compile", action="store_true", help="time torch.compile too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = ("logprobs", "old_logprobs", "advantages", "values", "old_values", "returns")
    compiled = torch.compile(eager) if args.compile else None
    print(f"torch {torch.__version__}, one thread, {ppokern.cpu_capability()}; CPU microseconds")
    head = ("tokens", "pass", "cpu", "eager", "eager/cpu", "compile/cpu")
    print(*(f"{cell:>11}" for cell in head))
    for n in args.tokens:
        batch = {name: 0.3 * torch.randn(n // 64, 64) for name in names}
        batch["mask"] = torch.rand(n // 64, 64) < 0.8
        for name in ("logprobs", "values"):
            batch[name].requires_grad_()
        for train in (False, True):
            ours, plain = (measure(form, batch, train) for form in (ppokern.ppo_loss, eager))
            cells = [n, "both" if train else "forward", f"{1e6 * ours:.1f}", f"{1e6 * plain:.1f}"]
            cells.append(f"{plain / ours:.1f}")
            if compiled:
                cells.append(f"{measure(compiled, batch, train) / ours:.1f}")
            print(*(f"{cell:>11}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
