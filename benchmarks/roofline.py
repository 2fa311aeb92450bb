"""The least time an op can take on a GPU: ``python -m benchmarks.roofline``.

Bytes and operations are counted from the algorithm (each tensor read or written once), and divided
by the makers' figures of the memory's bandwidth and of the dense bf16 GEMM rate. Nothing here is
measured: a run on a GPU is to be held against it.
"""

from typing import NamedTuple


class Gpu(NamedTuple):
    """What its maker states, of the SXM form."""

    name: str
    bandwidth: float  # TB/s
    gemm: float  # dense bf16, TFLOP/s


class Work(NamedTuple):
    """What an op has to do."""

    name: str
    bytes: float
    flops: float  # of GEMMs


GPUS = (
    Gpu("A100 80GB", 2.04, 312),
    Gpu("H100", 3.35, 989),
    Gpu("H200", 4.8, 989),
    Gpu("B200", 8.0, 2250),
)
N, H, V = 8192, 4096, 151936  # rows, hidden width, vocabulary
BF16, F32 = 2, 4


def work() -> list[Work]:
    """Return the bytes and operations of each op, at the sizes of the goals."""
    logits, gemm = N * V, 2 * N * H * V
    operands = (N * V + V * H + N * H) * BF16  # of each GEMM, two of them read and one written
    tokens, packed = 4096 * 4096, 2**20
    policy = 3 * F32 + 1 + 1  # log-probs, old ones, advantages, the mask twice
    return [
        Work("selected_logprobs, bf16 (8192, 151936)", logits * BF16, 0),
        Work("its backward", 2 * logits * BF16, 0),
        Work("selected_logprobs, bf16 (8, 151936)", 8 * V * BF16, 0),
        Work("linear_ppo_loss, rows: logits to gradient", 2 * logits * BF16, 0),
        Work("linear_ppo_loss, three GEMMs", 3 * operands, 3 * gemm),
        Work("gae (4096, 4096)", tokens * 4 * F32, 0),
        Work("gae, packed, 2^20 tokens, mask", packed * (4 * F32 + 1), 0),
        Work("ppo_policy_loss, 2^20 tokens", packed * (policy + F32), 0),
        Work("ppo_loss with values, 2^20 tokens", packed * (policy + 3 * F32 + 2 * F32), 0),
    ]


def report() -> None:
    """Print the table."""
    print("Least time in microseconds, by bandwidth (TB/s) and bf16 GEMM rate (TFLOP/s):")
    gpus = [f"{g.name} ({g.bandwidth:g}, {g.gemm:g})" for g in GPUS]
    print(f"{'':45} {'MB':>9} {'GFLOP':>8} {' '.join(f'{name:>22}' for name in gpus)}")
    for w in work():
        times = [max(w.bytes / g.bandwidth, w.flops / g.gemm) / 1e6 for g in GPUS]
        line = " ".join(f"{t:22.1f}" for t in times)
        print(f"{w.name:45} {w.bytes / 1e6:9.1f} {w.flops / 1e9:8.0f} {line}")


if __name__ == "__main__":
    report()
