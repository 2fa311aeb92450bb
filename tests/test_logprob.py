import math
from collections.abc import Callable
from typing import Any

import eager
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure import grads, leaf, same_bits, unchanged, usage
from oracle import assert_within_rule, f64
from torch import Tensor

from ppokern import LogProbs, selected_logprobs, selected_logprobs_with_entropy, set_validation

OP = "logprob"
V = 33
INF, NAN = math.inf, math.nan
IDS = [getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)]

OPTIONS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "plain": lambda ids: {},
    "temperature": lambda ids: {"temperature": 0.7},
    "temperature_0d": lambda ids: {"temperature": torch.tensor(1.3)},
    "temperature_per_token": lambda ids: {"temperature": torch.rand(ids.shape) + 0.5},
    "softcap": lambda ids: {"softcap": 2.0},
    "softcap_temperature": lambda ids: {"softcap": 5.0, "temperature": 0.5},
    "vocab_size": lambda ids: {"vocab_size": V - 4},
    "mask": lambda ids: {"mask": torch.rand(ids.shape) < 0.6},
    "all": lambda ids: {
        "softcap": 4.0,
        "temperature": torch.rand(ids.shape) + 0.5,
        "vocab_size": V - 4,
        "mask": torch.rand(ids.shape) < 0.6,
    },
}


def draw(shape: tuple[int, ...], v: int, dtype: torch.dtype, top: int | None = None) -> Any:
    return (3 * torch.randn(*shape, v)).to(dtype), torch.randint(0, top or v, shape)


def check(logits: Tensor, ids: Tensor, **options: Any) -> LogProbs:
    """Both outputs and the gradient of both, against float64 and under the rule."""
    x = logits if logits.requires_grad else leaf(logits)
    incoming = torch.randn(2, *ids.shape)
    out = selected_logprobs_with_entropy(x, ids, **options)
    (grad,) = grads(out, [x], list(incoming))
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    assert isinstance(out, LogProbs)
    assert out.logprobs.dtype == out.entropy.dtype == wide
    assert grad.dtype == logits.dtype

    exact_in, peer_in = f64(logits), leaf(logits)
    exact = oracle.logprobs(exact_in, ids, **options)
    peer = eager.logprobs(peer_in, ids, **options)
    for mine, theirs, truth in zip(out, peer, exact, strict=True):
        assert_within_rule(mine, theirs, truth)
    assert_within_rule(
        grad,
        grads(peer, [peer_in], list(incoming))[0],
        grads(exact, [exact_in], list(incoming))[0],
        unit=incoming.abs().max().item() if ids.numel() else 1.0,
    )
    alone = selected_logprobs(logits.detach(), ids, **options)
    assert_within_rule(alone, peer[0], exact[0])
    return out


# Values and gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_and_layout(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], options: str
) -> None:
    logits, ids = draw(shape, V, dtype, V - 4)
    check(logits, ids, **OPTIONS[options](ids))


@pytest.mark.parametrize("v", [1, 2, 3, 7, 16, 31, 65, 1000, 1023, 4097])
def test_every_width(backend: str, dtype: torch.dtype, v: int) -> None:
    check(*draw((3,), v, dtype))


@pytest.mark.parametrize("v", [50_257, 152_064])
def test_L10_wide_vocabularies_are_summed_in_float32(
    backend: str, dtype: torch.dtype, v: int
) -> None:
    logits, ids = draw((2,), v, dtype)
    out = check(logits, ids)
    exact = oracle.logprobs(logits, ids)
    assert (out.logprobs - exact[0]).abs().max() < 2e-5  # a bfloat16 log-softmax is off by .1


def test_hand_worked(backend: str) -> None:
    logits = leaf(torch.tensor([[0.5, 0.25, 0.25]]).log())
    out = selected_logprobs_with_entropy(logits, torch.tensor([1]))
    assert out.logprobs.item() == pytest.approx(math.log(0.25), abs=1e-6)
    assert out.entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)
    (g,) = torch.autograd.grad(out.logprobs, logits, retain_graph=True)
    assert g[0].tolist() == pytest.approx([-0.5, 0.75, -0.25], abs=1e-6)
    (g,) = torch.autograd.grad(out.entropy, logits)
    h = 1.5 * math.log(2)  # d entropy / d z = -p (log p + entropy)
    expected = [-p * (math.log(p) + h) for p in (0.5, 0.25, 0.25)]
    assert g[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_no_hidden_shift(backend: str) -> None:
    logits = torch.eye(4) * 50
    ids = torch.arange(4)
    assert selected_logprobs(logits, ids).abs().max() < 1e-6
    assert (selected_logprobs(logits, ids.roll(1)) < -49).all()


def test_only_one_output_used(backend: str) -> None:
    logits, ids = draw((4,), 9, torch.float32)
    for k in (0, 1):
        x, exact_in = leaf(logits), f64(logits)
        (g,) = torch.autograd.grad(selected_logprobs_with_entropy(x, ids)[k].sum(), x)
        (e,) = torch.autograd.grad(oracle.logprobs(exact_in, ids)[k].sum(), exact_in)
        assert torch.allclose(g.double(), e, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("ids_dtype", IDS, ids=[str(d)[6:] for d in IDS])
def test_ids_of_every_integer_dtype(backend: str, ids_dtype: torch.dtype) -> None:
    logits, ids = draw((2, 5), 120, torch.float32)
    out = selected_logprobs(logits, ids.to(ids_dtype))
    assert same_bits(out, selected_logprobs(logits, ids))


@pytest.mark.parametrize("temperature", [1, 1.0, 2, torch.tensor(2), torch.tensor(2.0)], ids=repr)
def test_L11_temperature_of_any_kind(backend: str, temperature: Any) -> None:
    logits, ids = draw((3,), 9, torch.float32)
    exact = oracle.logprobs(logits, ids, temperature=float(temperature))[0]
    out = selected_logprobs(logits, ids, temperature=temperature)
    assert torch.allclose(out.double(), exact, atol=2e-6)


def test_L11_temperature_broadcasts(backend: str) -> None:
    logits, ids = draw((2, 3), 9, torch.float32)
    column = torch.tensor([[0.5], [2.0]])
    dense = selected_logprobs(logits, ids, temperature=column.expand(2, 3).contiguous())
    assert same_bits(selected_logprobs(logits, ids, temperature=column), dense)
    assert same_bits(selected_logprobs(logits, ids, temperature=column.expand(2, 3)), dense)


def test_L12_softcap_then_temperature(backend: str) -> None:
    x, cap, t = leaf(torch.tensor([[124.0, 0.0]])), 30.0, 0.7
    lp = selected_logprobs(x, torch.tensor([0]), softcap=cap, temperature=t)
    z = cap * math.tanh(124 / cap) / t
    assert lp.item() == pytest.approx(-math.log1p(math.exp(-z)), rel=1e-5, abs=1e-18)
    lp = selected_logprobs(x, torch.tensor([1]), softcap=cap, temperature=t)
    assert lp.item() == pytest.approx(-z, rel=1e-6)
    (g,) = torch.autograd.grad(lp, x)
    slope = (1 - math.tanh(124 / cap) ** 2) / t
    assert g[0].tolist() == pytest.approx([-slope, 1 / t], rel=1e-3)


# Nearly certain tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("height", [0.0, 100.0, 3000.0, -3000.0])
@pytest.mark.parametrize("v", [2, 17, 4096])
def test_nearly_certain_token(backend: str, dtype: torch.dtype, height: float, v: int) -> None:
    """p = .9999: log-prob and its own gradient are right to .5 %, or to twice eager's error."""
    row = torch.full((1, v), height - math.log(1e4 * (v - 1)))
    row[0, 0] = height
    logits, ids = row.to(dtype), torch.tensor([0])
    x, peer, exact = leaf(logits), leaf(logits), f64(logits)
    lp, lp_peer = selected_logprobs(x, ids), eager.logprobs(peer, ids)[0]
    lp_exact = oracle.logprobs(exact, ids)[0]
    g, g_peer, g_exact = (
        torch.autograd.grad(o.sum(), i)[0][0, 0].item()
        for o, i in ((lp, x), (lp_peer, peer), (lp_exact, exact))
    )
    assert lp.item() <= 0
    for mine, theirs, truth in (
        (lp.item(), lp_peer.item(), lp_exact.item()),
        (g, g_peer, g_exact),
    ):
        allowed = max(0.005 * abs(truth), 2 * abs(theirs - truth))
        assert abs(mine - truth) <= allowed


@pytest.mark.parametrize("v", [152_064, 50_257, 7, 1])
def test_L2_logprob_is_never_positive(backend: str, dtype: torch.dtype, v: int) -> None:
    logits = torch.full((1, v), -15.0)
    logits[0, v // 2] = 3.0
    ids = torch.tensor([v // 2])
    out = selected_logprobs_with_entropy(logits.to(dtype), ids)
    exact = -math.log1p((v - 1) * math.exp(-18.0))
    peer = eager.logprobs(logits.to(dtype), ids)[0].item()
    assert out.logprobs.item() <= 0
    assert abs(out.logprobs.item() - exact) <= max(0.005 * abs(exact), 2 * abs(peer - exact))
    assert out.entropy.item() >= 0


# Infinities and extremes --------------------------------------------------------------------------


def test_L1_first_tile_all_forbidden(backend: str, dtype: torch.dtype) -> None:
    logits = torch.full((1, 100_000), -INF, dtype=dtype)
    logits[0, 50_000] = 10
    x = leaf(logits)
    out = selected_logprobs_with_entropy(x, torch.tensor([50_000]))
    assert out.logprobs.item() == 0
    assert out.entropy.item() == 0
    (g,) = grads(out, [x], [torch.ones(1), torch.ones(1)])
    assert (g == 0).all()


@pytest.mark.parametrize("options", ["plain", "temperature", "softcap", "vocab_size"])
def test_L3_entropy_over_the_support(backend: str, dtype: torch.dtype, options: str) -> None:
    logits, ids = draw((6,), V, dtype, V - 4)
    forbidden = torch.rand(6, V) < 0.7
    forbidden[torch.arange(6), ids] = False
    out = check(logits.masked_fill(forbidden, -INF), ids, **OPTIONS[options](ids))
    assert out.logprobs.isfinite().all()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_forbidden_token(backend: str, dtype: torch.dtype, softcap: float | None) -> None:
    """Its log-prob is -inf; the entropy and the other rows are what they were."""
    logits, ids = draw((3,), V, dtype)
    clean = selected_logprobs_with_entropy(logits, ids, softcap=softcap)
    logits[1, ids[1]] = -INF
    x = leaf(logits)
    out = selected_logprobs_with_entropy(x, ids, softcap=softcap)
    (g,) = grads(out, [x], [torch.ones(3)] * 2)
    assert out.logprobs[1] == -INF and g.isfinite().all()
    assert torch.equal(out.logprobs[::2], clean.logprobs[::2])
    exact = oracle.logprobs(logits, ids, softcap=softcap)[1]
    assert torch.allclose(out.entropy.double(), exact, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("v", [1, 5, 3000])
def test_row_of_nothing_but_forbidden(
    backend: str, dtype: torch.dtype, v: int, softcap: float | None
) -> None:
    logits, ids = draw((3,), v, dtype)
    logits[1] = -INF
    x = leaf(logits)
    out = selected_logprobs_with_entropy(x, ids, softcap=softcap)
    assert out.logprobs[1] == -INF
    assert out.entropy[1] == 0
    (g,) = grads(out, [x], [torch.ones(3), torch.ones(3)])
    assert g.isfinite().all()


def test_extreme_logits_are_exact(backend: str) -> None:
    """The maximum is subtracted before the division: 3e38 at T = .5 doesn't overflow."""
    x = leaf(torch.tensor([[3e38, 3e38, -3e38], [1e38, 3e38, -INF], [-3e38, -3e38, -INF]]))
    out = selected_logprobs_with_entropy(x, torch.tensor([0, 1, 0]), temperature=0.5)
    log2 = math.log(2)
    assert out.logprobs.tolist() == pytest.approx([-log2, 0, -log2], abs=1e-6)
    assert out.entropy.tolist() == pytest.approx([log2, 0, log2], abs=1e-6)
    (g,) = grads(out, [x], [torch.ones(3), torch.ones(3)])
    expected = torch.tensor([[1.0, -1, 0], [0, 0, 0], [1, -1, 0]])
    assert torch.allclose(g, expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1e3, torch.tensor([1e-3, 1e-4, 1e3])], ids=str)
def test_extreme_temperatures(backend: str, temperature: Any) -> None:
    logits, ids = draw((3,), 19, torch.float32)
    check(logits, ids, temperature=temperature)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_and_plus_infinity_are_not_hidden(backend: str, bad: float) -> None:
    logits, ids = draw((3,), 4000, torch.float32)
    logits[1, 3700] = bad
    out = selected_logprobs_with_entropy(logits, ids)
    assert not out.logprobs[1].isfinite()
    assert not out.entropy[1].isfinite()
    assert out.logprobs[[0, 2]].isfinite().all()


# Masks and ids ------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("options", ["plain", "softcap_temperature", "vocab_size"])
def test_masked_positions_are_never_read(
    backend: str, dtype: torch.dtype, options: str, poison: float
) -> None:
    logits, ids = draw((2, 5), V, dtype, V - 4)
    mask = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
    extra = OPTIONS[options](ids)
    clean = check(logits, ids, mask=mask, **extra)
    dirty_ids = ids.masked_fill(~mask, 10**9)
    dirty_ids[0, 1] = -100
    dirty_ids[0, 4] = -1
    x = leaf(logits.masked_fill(~mask[..., None], poison))
    dirty = selected_logprobs_with_entropy(x, dirty_ids, mask=mask, **extra)
    assert all(same_bits(a, b.detach()) for a, b in zip(clean, dirty, strict=True))
    assert (dirty.logprobs[~mask] == 0).all() and (dirty.entropy[~mask] == 0).all()
    (g,) = grads(dirty, [x], [torch.full((2, 5), NAN).masked_fill(mask, 1.0)] * 2)
    assert g.isfinite().all() and (g[~mask] == 0).all()


@pytest.mark.parametrize("with_mask", [False, True])
def test_id_of_minus_100_counts_as_masked(backend: str, with_mask: bool) -> None:
    logits, ids = draw((6,), 9, torch.float32)
    mask = torch.tensor([True, True, True, True, False, True])
    taken = mask.clone() if with_mask else torch.ones(6, dtype=torch.bool)
    ids[2] = -100
    logits[2] = NAN
    taken[2] = False
    x = leaf(logits)
    out = selected_logprobs_with_entropy(x, ids, mask=mask if with_mask else None)
    (g,) = grads(out, [x], [torch.ones(6)] * 2)
    assert (out.logprobs[~taken] == 0).all() and (out.entropy[~taken] == 0).all()
    assert (out.logprobs[taken] < 0).all()
    assert (g[~taken] == 0).all() and g.isfinite().all()


@pytest.mark.parametrize("bad", [-1, -99, -101, 9, 10**6, 2**40, -(2**40), -(2**32) + 1])
def test_bad_id_names_its_position(backend: str, bad: int) -> None:
    logits, ids = draw((2, 3), 9, torch.float32)
    ids[1, 2] = bad
    with pytest.raises(IndexError, match=r"token_ids.*\(?1, ?2"):
        selected_logprobs(logits, ids)


def test_bad_id_in_the_padding_of_the_vocabulary(backend: str) -> None:
    logits, ids = draw((4,), 9, torch.float32, 6)
    ids[3] = 6
    with pytest.raises(IndexError, match=r"token_ids.*\b3\b"):
        selected_logprobs_with_entropy(logits, ids, vocab_size=6)


def test_padding_of_the_vocabulary_is_not_read(backend: str) -> None:
    logits, ids = draw((4,), 9, torch.float32, 6)
    clean = selected_logprobs_with_entropy(logits[:, :6], ids)
    x = leaf(torch.cat([logits[:, :6], torch.full((4, 3), NAN)], 1))
    out = selected_logprobs_with_entropy(x, ids, vocab_size=6)
    (g,) = grads(out, [x], [torch.ones(4)] * 2)
    assert torch.allclose(out.logprobs, clean.logprobs, atol=1e-6)
    assert torch.allclose(out.entropy, clean.entropy, atol=1e-6)
    assert (g[:, 6:] == 0).all() and g.isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)], ids=str)
def test_empty(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = leaf(torch.empty(*shape, 7, dtype=dtype))
    ids = torch.empty(shape, dtype=torch.int64)
    out = selected_logprobs_with_entropy(x, ids, mask=torch.empty(shape, dtype=torch.bool))
    assert out.logprobs.shape == out.entropy.shape == shape
    assert selected_logprobs(x, ids).shape == shape
    (g,) = grads(out, [x], [torch.empty(shape)] * 2)
    assert g.shape == x.shape and g.dtype == dtype


def test_no_vocabulary(backend: str, dtype: torch.dtype) -> None:
    x, ids = leaf(torch.empty(2, 3, 0, dtype=dtype)), torch.full((2, 3), -100)
    out = selected_logprobs_with_entropy(x, ids)
    (g,) = torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), x)
    assert (out.logprobs == 0).all() and (out.entropy == 0).all() and g.shape == x.shape


def test_everything_masked(backend: str) -> None:
    x, ids = leaf(torch.full((2, 3, 5), NAN)), torch.full((2, 3), -100)
    out = selected_logprobs_with_entropy(x, ids)
    (g,) = torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), x)
    assert (out.logprobs == 0).all() and (out.entropy == 0).all() and (g == 0).all()


# Strides ------------------------------------------------------------------------------------------


def strided(kind: str) -> tuple[Tensor, Tensor]:
    """Logits of shape (3, 4, 37), ids (3, 4), neither contiguous."""
    ids = torch.randint(0, 37, (4, 3)).T
    if kind == "transposed":
        return torch.randn(4, 3, 37).transpose(0, 1), ids
    if kind == "sliced":
        return torch.randn(3, 5, 37)[:, :-1], torch.randint(0, 37, (3, 5))[:, 1:]
    if kind == "stepped":
        return torch.randn(6, 4, 40)[::2, :, :37], torch.randint(0, 37, (3, 8))[:, ::2]
    if kind == "expanded":
        return torch.randn(1, 4, 37).expand(3, 4, 37), torch.randint(0, 37, (3, 1)).expand(3, 4)
    if kind == "last_strided":
        return torch.randn(3, 37, 4).transpose(1, 2), ids
    assert kind == "last_stepped"
    return torch.randn(3, 4, 74)[..., ::2], ids


@pytest.mark.parametrize(
    "kind", ["transposed", "sliced", "stepped", "expanded", "last_strided", "last_stepped"]
)
@pytest.mark.parametrize("incoming", ["dense", "expanded", "transposed"])
def test_L6_strides_change_nothing(backend: str, kind: str, incoming: str) -> None:
    logits, ids = strided(kind)
    gs = [torch.tensor(1.5).expand(3, 4), torch.tensor(-0.5).expand(3, 4)]
    if incoming == "transposed":
        gs = [torch.randn(4, 3).T, torch.randn(4, 3).T]
    if incoming == "dense":
        gs = [torch.randn(3, 4), torch.randn(3, 4)]
    mask = (torch.rand(4, 3) < 0.7).T
    dense_in, x = leaf(logits.contiguous()), logits.requires_grad_()
    with unchanged(logits, ids, mask, *gs):
        out = selected_logprobs_with_entropy(x, ids, mask=mask)
        (g,) = grads(out, [x], gs)
    dense = selected_logprobs_with_entropy(dense_in, ids.contiguous(), mask=mask.contiguous())
    (g_dense,) = grads(dense, [dense_in], [t.contiguous() for t in gs])
    assert all(same_bits(a, b) for a, b in zip(out, dense, strict=True))
    assert torch.equal(g, g_dense)


def test_L5_expanded_incoming_gradient(backend: str) -> None:
    logits, ids = draw((3, 4), 11, torch.float32)
    a, b = leaf(logits), leaf(logits)
    selected_logprobs(a, ids).sum().backward()
    selected_logprobs(b, ids).backward(torch.ones(3, 4))
    assert torch.equal(a.grad, b.grad)


def test_rows_are_read_where_they_lie(backend: str) -> None:
    """Strided rows are not copied, but for the few that are worked on."""
    logits = torch.randn(128, 32, 4096).transpose(0, 1)
    ids = torch.zeros(32, 128, dtype=torch.int64)
    used = usage(lambda: selected_logprobs_with_entropy(logits, ids))
    assert used.peak_bytes < logits.numel() * 4 / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_L7_offsets_are_64_bit(dtype: torch.dtype) -> None:
    """Rows more than 2**31 elements apart; the pages between them are never touched."""
    stride, n = 2**31 + 1000, 50
    base = torch.empty(stride + n, dtype=dtype)
    logits = base.as_strided((2, n), (stride, 1))
    dense = torch.randn(2, n).to(dtype)
    logits.copy_(dense)
    ids = torch.tensor([3, 44])
    out = selected_logprobs_with_entropy(logits, ids)
    expected = selected_logprobs_with_entropy(dense, ids)
    assert all(same_bits(a, b) for a, b in zip(out, expected, strict=True))
    a, b = logits.requires_grad_(), leaf(dense)
    (g,) = torch.autograd.grad(selected_logprobs(a, ids).sum(), a)
    (g_dense,) = torch.autograd.grad(selected_logprobs(b, ids).sum(), b)
    assert torch.equal(g, g_dense)
    lp = selected_logprobs(logits, ids, inplace_backward=True)
    (g,) = torch.autograd.grad(lp.sum(), logits)
    assert torch.equal(g, g_dense)


def test_L7_more_than_2_to_the_31_elements() -> None:
    """14,200 x 151,936, three rows unmasked: right to the last; the masked ones cost nothing."""
    v = 151_936
    row = torch.randn(1, v, dtype=torch.bfloat16)
    expected = selected_logprobs_with_entropy(row, torch.tensor([v - 1]))

    def run(n: int) -> LogProbs:
        ids, mask = torch.full((n,), v - 1), torch.zeros(n, dtype=torch.bool)
        mask[[0, n // 2, n - 1]] = True
        return selected_logprobs_with_entropy(row.expand(n, v), ids, mask=mask)

    probe = usage(lambda: run(200))
    assert probe.peak_bytes < 200 * v, "masked rows cost memory: the full size is not tried"
    out = run(14_200)
    for mine, truth in zip(out, expected, strict=True):
        assert torch.equal(mine.nonzero().flatten(), torch.tensor([0, 7_100, 14_199]))
        assert (mine[[0, 7_100, 14_199]] == truth).all()


# Determinism --------------------------------------------------------------------------------------


def forward_backward(logits: Tensor, ids: Tensor, **options: Any) -> tuple[Tensor, ...]:
    x = leaf(logits)
    out = selected_logprobs_with_entropy(x, ids, **options)
    (g,) = grads(out, [x], [torch.full(ids.shape, 0.7), torch.full(ids.shape, -0.3)])
    return (*(o.detach() for o in out), g)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("v", [5, 1000, 70_001])
def test_a_row_does_not_depend_on_the_others(
    backend: str, dtype: torch.dtype, v: int, threads: int
) -> None:
    """Alone, in a chunk, permuted, or among masked rows: the same bits."""
    torch.set_num_threads(threads)
    n = 9 if v > 10_000 else 40
    logits, ids = draw((n,), v, dtype)
    whole = forward_backward(logits, ids)
    again = forward_backward(logits, ids)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    for rows in ([0], [n - 1], [2, 5, 7], list(range(n))[::-1], list(range(3))):
        part = forward_backward(logits[rows], ids[rows])
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True)), rows
    mask = torch.arange(n) % 3 == 1
    masked = forward_backward(logits, ids, mask=mask)
    assert all(torch.equal(a[mask], b[mask]) for a, b in zip(masked, whole, strict=True))


# In place -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("entropy", [False, True])
def test_inplace_backward_takes_the_storage(
    backend: str, dtype: torch.dtype, options: str, entropy: bool
) -> None:
    source, ids = draw((3, 5), V, dtype, V - 4)
    extra = OPTIONS[options](ids)
    fn = selected_logprobs_with_entropy if entropy else selected_logprobs
    a = leaf(source)
    (expected,) = torch.autograd.grad(sum(o.sum() for o in _both(fn(a, ids, **extra))), a)
    logits = leaf(source) * 1
    version = logits._version
    out = fn(logits, ids, inplace_backward=True, **extra)
    assert logits._version == version, "the forward pass changes nothing"
    assert torch.equal(logits, source)
    (g,) = torch.autograd.grad(sum(o.sum() for o in _both(out)), logits)
    assert torch.equal(g, expected)
    assert g.data_ptr() == logits.data_ptr()
    assert logits._version > version


def _both(out: Any) -> tuple[Tensor, ...]:
    return tuple(out) if isinstance(out, tuple) else (out,)


def test_inplace_backward_is_seen_by_other_users_of_the_logits(backend: str) -> None:
    logits = leaf(torch.randn(3, 7)) * 1
    lp = selected_logprobs(logits, torch.tensor([0, 1, 2]), inplace_backward=True)
    other = (logits**2).sum()
    lp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_inplace_backward_reaches_leaves(backend: str) -> None:
    source, ids = draw((3,), 7, torch.float32)
    a, b = leaf(source), leaf(source)
    selected_logprobs(a, ids).sum().backward()
    selected_logprobs(b * 1, ids, inplace_backward=True).sum().backward()
    assert torch.equal(a.grad, b.grad)
    assert torch.equal(b, source)


def test_inplace_backward_twice_is_right_or_an_error(backend: str) -> None:
    source, ids = draw((3,), 7, torch.float32)
    a = leaf(source)
    (expected,) = torch.autograd.grad(selected_logprobs(a, ids).sum(), a)
    logits = leaf(source) * 1
    lp = selected_logprobs(logits, ids, inplace_backward=True)
    (first,) = torch.autograd.grad(lp.sum(), logits, retain_graph=True)
    assert torch.equal(first, expected)
    try:
        (second,) = torch.autograd.grad(lp.sum(), logits)
    except RuntimeError as error:
        assert str(error)
    else:
        assert torch.equal(second, expected)


def test_inplace_backward_of_a_slice_leaves_the_rest(backend: str) -> None:
    base = leaf(torch.randn(2, 4, 7)) * 1
    kept = base[:, -1].detach().clone()
    ids = torch.randint(0, 7, (2, 3))
    view = base[:, :-1]
    (expected,) = torch.autograd.grad(selected_logprobs(v := leaf(view), ids).sum(), v)
    (g,) = torch.autograd.grad(selected_logprobs(view, ids, inplace_backward=True).sum(), view)
    assert torch.equal(g, expected)
    assert torch.equal(base[:, -1], kept)


@pytest.mark.parametrize("kind", ["expanded", "overlapping"])
def test_inplace_backward_of_rows_that_share_memory(backend: str, kind: str) -> None:
    """Refused, or a storage of their own: what two rows share can't hold a gradient for each."""
    size, stride = ((3, 7), (0, 1)) if kind == "expanded" else ((3, 7), (2, 1))
    source, ids = torch.randn(11), torch.tensor([1, 2, 3])
    dense = leaf(source.as_strided(size, stride))
    (expected,) = torch.autograd.grad(selected_logprobs(dense, ids).sum(), dense)
    logits = (leaf(source) * 1).as_strided(size, stride)
    try:
        lp = selected_logprobs(logits, ids, inplace_backward=True)
        (g,) = torch.autograd.grad(lp.sum(), logits)
    except (ValueError, RuntimeError) as error:
        assert "inplace_backward" in str(error)
    else:
        assert torch.equal(g, expected)


# Autograd -----------------------------------------------------------------------------------------


def test_L8_logits_with_a_second_use(backend: str) -> None:
    source, ids = draw((4,), 9, torch.float32)
    x, exact_in = leaf(source), f64(source)
    loss = selected_logprobs(x, ids).sum() + (x**2).sum()
    exact = oracle.logprobs(exact_in, ids)[0].sum() + (exact_in**2).sum()
    with unchanged(x):
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    assert torch.allclose(first.double(), torch.autograd.grad(exact, exact_in)[0], atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options: str) -> None:
    logits, ids = draw((2, 2), V, torch.float64, V - 4)
    extra = OPTIONS[options](ids)
    assert torch.autograd.gradcheck(
        lambda x: tuple(selected_logprobs_with_entropy(x, ids, **extra)), leaf(logits)
    )


def test_gradcheck_with_forbidden_tokens() -> None:
    logits, _ = draw((3,), 6, torch.float64)
    logits[:, ::2] = -INF
    allowed = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        full = logits.clone()
        full[:, 1::2] = x
        return tuple(selected_logprobs_with_entropy(full, torch.tensor([1, 3, 5])))

    assert torch.autograd.gradcheck(fn, allowed)


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("inplace", [False, True])
def test_second_derivative_is_right_or_an_error(backend: str, output: int, inplace: bool) -> None:
    source, ids = draw((3,), 5, torch.float32)

    def second(x: Tensor, out: Tensor, z: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(
            out.sum(), z, create_graph=True
        )  # the incoming gradient is constant
        return torch.autograd.grad((g**2).sum() + (x**3).sum(), x)[0]

    exact_in = f64(source)
    expected = second(exact_in, oracle.logprobs(exact_in, ids)[output], exact_in)
    x = leaf(source)
    z = x * 1
    try:
        out = selected_logprobs_with_entropy(z, ids, inplace_backward=inplace)[output]
        mine = second(x, out, z)
    except RuntimeError as error:
        assert str(error)
    else:
        assert torch.allclose(mine.double(), expected, atol=1e-4)


def test_temperature_is_a_constant(backend: str) -> None:
    x, t = leaf(torch.randn(3, 5)), leaf(torch.ones(3))
    out = selected_logprobs_with_entropy(x, torch.tensor([0, 1, 2]), temperature=t)
    (out.logprobs.sum() + out.entropy.sum()).backward()
    assert t.grad is None and x.grad is not None
    out = selected_logprobs(x.detach(), torch.tensor([0, 1, 2]), temperature=t)
    assert not out.requires_grad


def test_temperature_is_not_read_at_masked_positions(backend: str) -> None:
    logits, ids = draw((3,), 5, torch.float32)
    mask = torch.tensor([True, False, True])
    t = torch.tensor([0.5, NAN, 2.0])
    out = selected_logprobs(logits, ids, mask=mask, temperature=t)
    clean = selected_logprobs(logits, ids, mask=mask, temperature=t.nan_to_num(1.0))
    assert same_bits(out, clean)
    selected_logprobs(logits, ids, mask=mask, temperature=torch.tensor([0.5, -1.0, 2.0]))


def test_mixed_dtypes(backend: str) -> None:
    logits, ids = draw((3,), 5, torch.bfloat16)
    out = selected_logprobs(logits, ids, temperature=torch.full((3,), 2.0, dtype=torch.bfloat16))
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), oracle.logprobs(logits, ids, temperature=2.0)[0], atol=1e-5)


def test_validation_mode_gives_the_same(backend: str, validation: None) -> None:
    logits, ids = draw((3,), 5, torch.float32)
    on = selected_logprobs(logits, ids)
    set_validation(False)
    assert same_bits(on, selected_logprobs(logits, ids))


# Properties ---------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(0, 2**20))
def test_any_mask_any_ids(backend: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    v = data.draw(st.integers(1, 70))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    logits, ids = draw(shape, v, dtype)
    keep = torch.rand(*shape, v) < data.draw(st.sampled_from([0.1, 0.9, 1.0]))
    logits = logits.masked_fill(~keep, -INF)
    ids = torch.where(torch.rand(shape) < 0.2, -100, ids)
    mask = torch.rand(shape) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    options: dict[str, Any] = {"mask": mask}
    if data.draw(st.booleans()):
        options["temperature"] = torch.rand(shape) + 0.3
    if data.draw(st.booleans()):
        options["softcap"] = data.draw(st.sampled_from([1.0, 30.0]))
    out = selected_logprobs_with_entropy(logits, ids, **options)
    exact, peer = oracle.logprobs(logits, ids, **options), eager.logprobs(logits, ids, **options)
    for mine, theirs, truth in zip(out, peer, exact, strict=True):
        assert_within_rule(mine, theirs.nan_to_num(0.0), truth)
    assert (out.logprobs <= 0).all() and (out.entropy >= -1e-6).all()
