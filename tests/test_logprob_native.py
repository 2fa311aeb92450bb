"""The C++ kernel of the log-probs: widths, alignment, strides, instruction sets, threads, rounding.

What every backend does alike stands in test_logprob.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from measure import CAPABILITIES, on_instruction_set, same_bits
from torch import Tensor

from ppokern import available_backends, cpu_capability
from ppokern.logprob import kernel_native, reference
from ppokern.logprob.reference import Rows

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="no C++ kernels built")

INF, NAN = torch.inf, torch.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# around a vector, a pair, a step, a piece and the rows that are read in four streams, for 4 to 16
# lanes
EDGES = [n + d for n in (4, 8, 16, 32, 64, 128, 256, 4096, 2**16) for d in (-1, 0, 1)]
WIDTHS = sorted({*range(1, 12), *EDGES, 100, 1000, 4095 + 128, 8192, 2**16 + 4096 + 77})


class Call:
    """One call of both passes, with entropy or without, on any kernel."""

    def __init__(self, logits: Tensor, ids: Tensor | None = None, **options: Any) -> None:
        self.logits = logits
        shape = logits.shape[:-1]
        self.vocab_size = options.get("vocab_size", logits.shape[-1])
        self.ids = torch.randint(0, self.vocab_size, shape) if ids is None else ids
        self.mask = options.get("mask")
        self.temperature = torch.as_tensor(options.get("temperature", 1.0))
        self.softcap = options.get("softcap")
        self.entropy = options.get("entropy", False)
        self.grads = torch.randn(2, *shape)

    def rows(self, dtype: torch.dtype) -> Rows:
        logits = self.logits.to(dtype) if dtype == torch.float64 else self.logits
        at = self.temperature.to(dtype)
        return Rows(logits, self.ids, self.mask, at, self.softcap, self.vocab_size)

    def forward(self, kernel: Any = kernel_native, dtype: torch.dtype = torch.float32) -> Any:
        return kernel.forward(self.rows(dtype), self.entropy, dtype)

    def backward(
        self,
        found: Tensor,
        kernel: Any = kernel_native,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        x = self.rows(dtype)
        out = torch.empty(x.logits.shape, dtype=x.logits.dtype) if out is None else out
        grad_entropy = self.grads[1] if self.entropy else None
        return kernel.backward(self.grads[0], grad_entropy, x, found, out, **options)

    def run(self, kernel: Any = kernel_native, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Log-probs, entropy where asked for, gradient."""
        *out, found = self.forward(kernel, dtype)
        return [*out[: 1 + self.entropy], self.backward(found, kernel, dtype)]


def draw(n: int, v: int, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
    return Call((3 * torch.randn(n, v)).to(dtype), **options)


def assert_right(call: Call, out: list[Tensor]) -> None:
    """Against the specification in float64: a few roundings of float32, and that of the dtype."""
    for i, (mine, exact) in enumerate(zip(out, call.run(reference, torch.float64), strict=True)):
        finite = exact.isfinite()
        assert torch.equal(mine[~finite].double(), exact[~finite]), (call.logits.shape, i)
        error = (mine.double() - exact)[finite].abs()
        own = torch.finfo(mine.dtype).eps / 2 * 1.01
        largest = exact[finite].abs().clamp(min=1.0)
        assert (error <= 1e-6 * largest + own * exact[finite].abs()).all(), (
            call.logits.shape, call.logits.dtype, i, error.max(),
        )  # fmt: skip


def battery() -> list[Call]:
    """Return calls through every path of the kernel."""
    torch.manual_seed(0)
    calls = [draw(2, v, dtype, entropy=True) for dtype in DTYPES for v in WIDTHS]
    calls += [draw(2, v, entropy=False) for v in (5, 1000, 70_000)]
    for dtype in DTYPES:
        for v in (9, 777, 5000):
            options = {"softcap": 5.0, "temperature": torch.rand(3) + 0.5, "vocab_size": v - 2}
            calls += [draw(3, v, dtype, entropy=entropy, **options) for entropy in (False, True)]
    for entropy in (False, True):
        allowed = torch.rand(3, 9000) < 0.01
        calls.append(Call((torch.randn(3, 9000)).masked_fill(~allowed, -INF), entropy=entropy))
        rising = torch.linspace(-300, 300, 20_000) + torch.randn(2, 20_000)
        calls += [Call(rising, entropy=entropy), Call(rising.flip(-1), entropy=entropy)]
    return calls


# Widths, instruction sets -------------------------------------------------------------------------


def test_every_path() -> None:
    for call in battery():
        assert_right(call, call.run())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_instruction_set(capability: str, tmp_path: Path) -> None:
    """They differ by rounding alone."""
    results = "[[call.run() for call in t.battery()], t.loaded(), t.stored()]"
    outs, loads, stores = on_instruction_set(capability, "test_logprob_native", results, tmp_path)
    for call, theirs in zip(battery(), outs, strict=True):
        assert_right(call, theirs)
    assert_loads(loads)
    assert_stores(stores, capability)


def test_capability() -> None:
    assert cpu_capability() in CAPABILITIES


# 16-bit types -------------------------------------------------------------------------------------


def patterns(dtype: torch.dtype) -> Tensor:
    """Return every number of a 16-bit type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def loaded() -> list[Tensor]:
    """Return every finite number, as the maximum of a row of it."""
    calls = [Call(patterns(dtype)[:, None], torch.zeros(2**16, dtype=int)) for dtype in DTYPES[1:]]
    return [call.forward()[-1][:, 2] for call in calls]


def assert_loads(loads: list[Tensor]) -> None:
    for mine, dtype in zip(loads, DTYPES[1:], strict=True):
        expected = patterns(dtype).float()
        assert torch.equal(mine[expected.isfinite()], expected[expected.isfinite()])


def test_every_number_is_read() -> None:
    assert_loads(loaded())


def stored() -> list[tuple[Tensor, Tensor]]:
    """Return gradients in each 16-bit type, and those of the same logits in float32.

    Of two equal logits the gradient is half the incoming one: numbers of the type, the middles
    between them, and what lies next to those.
    """
    pairs = []
    for dtype in DTYPES[1:]:
        numbers = patterns(dtype).float()
        numbers = numbers[numbers.abs() < 1e38].sort().values
        middles = (numbers[1:] + numbers[:-1]) / 2
        sides = [middles.nextafter(torch.tensor(side)) for side in (-INF, INF)]
        incoming = 2 * torch.cat([numbers, middles, *sides])
        grads = []
        for kind in (dtype, torch.float32):
            call = Call(torch.zeros(len(incoming), 2, dtype=kind), torch.arange(len(incoming)) % 2)
            call.grads = torch.stack([incoming, incoming])
            grads.append(call.backward(call.forward()[-1]))
        pairs.append((grads[0], grads[1]))
    return pairs


def assert_stores(pairs: list[tuple[Tensor, Tensor]], capability: str) -> None:
    for mine, wide in pairs:
        expected = wide.to(mine.dtype)
        if capability == "avx512_bf16" and mine.dtype == torch.bfloat16:
            lost = (wide.abs() < 2**-126) & (mine == 0)  # the rule of the instruction that rounds
            expected = expected.masked_fill(lost, 0)
        assert torch.equal(mine, expected)
        assert wide.unique().numel() > 2**17  # with the middles


def test_gradients_are_rounded_once_to_the_nearest_even() -> None:
    assert_stores(stored(), str(cpu_capability()))


# Where rows lie -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [1, 3, 7, 31])
def test_alignment_changes_nothing(dtype: torch.dtype, shift: int) -> None:
    call = draw(3, 1100, dtype, entropy=True)
    moved = torch.zeros(3 * 1117 + shift, dtype=dtype)[shift:].view(3, 1117)[:, :1100]
    moved.copy_(call.logits)
    expected = call.run()
    call.logits = moved
    assert all(same_bits(a, b) for a, b in zip(call.run(), expected, strict=True))
    out = torch.empty(3 * 1117 + 1, dtype=dtype)[1:].view(3, 1117)[:, :1100]
    assert torch.equal(call.backward(call.forward()[-1], out=out), expected[-1])


@pytest.mark.parametrize("entropy", [False, True])
def test_64_bit_offsets(entropy: bool) -> None:
    """Rows lie 2**33 logits apart; only one stands in real memory, and is not masked."""
    from ppokern import _native

    n, stride, row = 5, 2**33, 3
    call = draw(1, 300, entropy=entropy)
    (logprobs, _, found), grad = call.forward(), call.run()[-1]
    ids, mask = call.ids.expand(n).contiguous(), torch.arange(n) == row
    grads, offsets = call.grads.expand(2, n).contiguous(), torch.arange(n) * stride
    start = (call.logits.data_ptr() - row * stride * 4) % 2**64

    for logits in ((start, 0, stride), (start, offsets.data_ptr(), 0)):
        out, rows, slope = torch.full((2, n), NAN), torch.full((n, 4), NAN), torch.empty(1, 300)
        values = {
            "logits": logits,
            "type": 0,
            "token_ids": ids.data_ptr(),
            "mask": mask.data_ptr(),
            "temperatures": 0,
            "temperature": 1.0,
            "softcap": 0.0,
            "rows": n,
            "vocab_size": 300,
            "threads": 1,
            "found": rows.data_ptr(),
        }
        places = {"logprobs": out[0].data_ptr(), "entropy": out[1].data_ptr() if entropy else 0}
        _native.logprob_forward(values | places)
        assert torch.equal(out[0][mask], logprobs) and (out[0][~mask] == 0).all()
        assert torch.equal(rows[mask], found) and (rows[~mask] == 0).all()
        assert not entropy or torch.equal(out[1], rows[:, 1])
        values |= {
            "grad_logprobs": grads[0].data_ptr(),
            "grad_entropy": grads[1].data_ptr() if entropy else 0,
            "out": (slope.data_ptr(), 0, stride),
            "width": 300,
            "compact": True,
        }
        _native.logprob_backward(values)
        assert torch.equal(slope, grad)


def test_rows_of_any_leading_strides() -> None:
    call = draw(24, 50, entropy=True)
    expected = call.run()
    lead = (2, 3, 4)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
        there = torch.empty(*(lead[i] for i in order), 50)
        back = [order.index(i) for i in range(3)]
        moved = there.permute(*back, 3)
        moved.copy_(call.logits.view(*lead, 50))
        other = Call(moved, call.ids.view(lead), entropy=True)
        other.grads = call.grads.view(2, *lead)
        for mine, exact in zip(other.run(), expected, strict=True):
            assert same_bits(mine.reshape(exact.shape), exact)
        other.backward(other.forward()[-1], out=moved)
        assert torch.equal(moved.reshape(24, 50), expected[-1])


# Same bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v", [777, 70_000])
def test_a_row_alone_in_a_batch_and_on_threads(dtype: torch.dtype, v: int) -> None:
    n = 200 if v < 1000 else 7
    mask = torch.rand(n) < 0.8
    call = draw(n, v, dtype, entropy=True, mask=mask)
    expected = call.run()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert all(same_bits(a, b) for a, b in zip(call.run(), expected, strict=True))
    for i in range(0, n, 3):
        one = Call(call.logits[i : i + 1], call.ids[i : i + 1], entropy=True, mask=mask[i : i + 1])
        one.grads = call.grads[:, i : i + 1]
        for a, b in zip(one.run(), expected, strict=True):
            assert same_bits(a, b[i : i + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_in_place_and_compact(
    dtype: torch.dtype, entropy: bool, threads: int, inplace: bool
) -> None:
    torch.set_num_threads(threads)
    for share in (0.0, 0.5, 0.9, 1.0):
        mask = torch.rand(130) < share
        call = draw(130, 1003, dtype, entropy=entropy, mask=mask, vocab_size=1001)
        found = call.forward()[-1]
        expected = call.backward(found)
        assert (expected[:, 1001:] == 0).all()
        assert (expected[~mask] == 0).all()
        logits = call.logits
        call.logits = logits.clone()
        out = call.logits if inplace else torch.empty_like(logits)
        assert torch.equal(call.backward(found, out=out), expected)
        call.logits = logits.clone()
        out = call.logits if inplace else torch.empty_like(logits)
        call.backward(found, out=out, compact=True)
        assert torch.equal(out[: mask.sum()], expected[mask])


# Numbers that need care ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows_are_exact_to_a_few_roundings(dtype: torch.dtype) -> None:
    call = draw(4, 152_064, dtype, entropy=True)
    for mine, exact in zip(call.run()[:2], call.run(reference, torch.float64)[:2], strict=True):
        assert (mine - exact).abs().max() < 1.5e-6
    flat = Call(torch.zeros(1, 152_064, dtype=dtype), torch.zeros(1, dtype=torch.int64))
    assert flat.run()[0].item() == pytest.approx(-torch.tensor(152_064.0).log().item(), abs=1e-6)


@pytest.mark.parametrize("v", [1, 7, 130, 4500, 70_000])
def test_certainty_is_exact(v: int) -> None:
    """Wherever the token stands, and however far it lies above what came before it."""
    for height in (30.0, 200.0, 3e38):
        for at in {0, v // 2, v - 1}:
            logits = torch.full((1, v), -INF)
            logits[0, at] = height
            call = Call(logits, torch.tensor([at]), entropy=True)
            logprob, entropy, grad = call.run()
            assert logprob.item() == 0 and entropy.item() == 0
            assert (grad == 0).all()
            if v > 1 and height > 100:
                call.logits = logits.masked_fill(logits == -INF, 0.0)
                assert call.run()[0].item() == 0


@pytest.mark.parametrize("step", [0.01, 1.0, 8.0, 40.0])
def test_the_maximum_may_rise_all_the_way(step: float) -> None:
    v = 20_000
    rising = (torch.arange(v) // 500 * step).unsqueeze(0)
    for logits in (rising, rising.flip(-1)):
        for at in (0, v // 2, v - 1):
            call = Call(logits.contiguous(), torch.tensor([at]), entropy=True)
            assert_right(call, call.run())


@pytest.mark.parametrize("height", [-7.2e5, 1e3, 6e4, 7.2e5, 7.3e5, 1e7, 1e38])
def test_rows_may_lie_high(height: float) -> None:
    """Below and above 2**20 bits, where the distance from the top is another operation."""
    call = Call(torch.randn(3, 5000) + height, entropy=True)
    call.logits[1, :4000] = -abs(height)  # the top rises by far
    call.ids[2] = call.logits[2].argmax()
    assert_right(call, call.run())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v", [1, 5, 300, 4500, 70_000])
def test_nan_is_never_lost(dtype: torch.dtype, v: int) -> None:
    signs = torch.tensor([NAN, -NAN, INF])
    for at in {0, 1, v // 3, v - 2, v - 1} & set(range(v)):
        for others in (None, -INF):
            call = draw(4, v, dtype, entropy=True)
            if others is not None:
                call.logits.fill_(others)
            call.logits[:3, at] = signs.to(dtype)
            logprobs, entropy, grad = call.run()
            assert logprobs[:3].isnan().all() and entropy[:3].isnan().all()
            assert grad[:3].isnan().all()
            assert not logprobs[3].isnan() and not grad[3].isnan().any()


@pytest.mark.parametrize("bad", [-1, -101, 300, 2**40, -(2**63), 2**63 - 1])
def test_a_bad_id_is_a_row_of_nan(bad: int) -> None:
    call = draw(3, 310, entropy=True, vocab_size=300)
    call.ids[:] = torch.tensor([3, bad, 299])
    logprobs, entropy, grad = call.run()
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]
    assert grad[1, :300].isnan().all() and not grad[[0, 2]].isnan().any()


def test_masked_rows_are_not_read() -> None:
    call = draw(3, 50, entropy=True, mask=torch.tensor([True, False, True]))
    call.logits[1] = NAN
    call.ids[1] = 10**9
    call.ids[2] = -100
    call.temperature = torch.tensor([1.0, NAN, NAN])
    call.grads[:, 1:] = NAN
    logprobs, entropy, grad = call.run()
    assert (logprobs[1:] == 0).all() and (entropy[1:] == 0).all() and (grad[1:] == 0).all()
    assert logprobs[0] < 0


def test_tiny_and_huge_temperatures() -> None:
    for temperature in (1e-45, 1e-30, 1e-3, 1e30, 3e38):
        logits = torch.tensor([[1.0, 1.0, 0.5, -INF]])
        call = Call(logits, torch.tensor([0]), temperature=temperature, entropy=True)
        assert_right(call, [*call.run()[:2], call.run(reference, torch.float64)[-1]])
