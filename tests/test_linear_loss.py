import math
from typing import Any

import oracle
import pytest
import torch
from measure import grads, leaf, unchanged, usage
from oracle import f64
from torch import Tensor

import ppokern
from ppokern import (
    Loss,
    linear_ppo_loss,
    linear_selected_logprobs_with_entropy,
    ppo_loss,
    ppo_policy_loss,
)

OP = "linear"
H, V = 6, 23
NAN, INF = math.nan, math.inf
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
ONE_ROW, THREE_ROWS, ALL = 1, 3 * V * 4, 2**28
PACKED = torch.tensor([0, 4, 4, 9, 11], dtype=torch.int32)


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, head: torch.dtype | None = None
) -> dict[str, Tensor]:
    """A batch whose ratios lie on both sides of the clip range and away from its edges."""
    hidden = torch.randn(*shape, H).to(dtype)
    weight, ids = torch.randn(V, H).to(head or dtype), torch.randint(0, V - 4, shape)
    lp, _ = oracle.logprobs(hidden.double() @ weight.double().T, ids)
    d = torch.tensor([-0.6, -0.1, 0.1, 0.6])[torch.randint(0, 4, shape)]
    return {
        "hidden": hidden,
        "weight": weight,
        "token_ids": ids,
        "old_logprobs": (lp - d).to(F64 if dtype == F64 else F32),
        "advantages": torch.randn(shape),
    }


LINEAR = ("bias", "mask", "temperature", "softcap", "vocab_size")


def two_ops(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    **options: Any,
) -> Loss:
    """The definition: the policy loss on the linear log-probs."""
    options.pop("max_logits_bytes", None)
    options.pop("entropy_stats", None)
    first = {k: options.pop(k) for k in LINEAR if k in options}
    out = linear_selected_logprobs_with_entropy(hidden, weight, token_ids, **first)
    none = torch.zeros_like(old_logprobs)
    return ppo_loss(
        out.logprobs,
        old_logprobs,
        advantages,
        none,
        none,
        none,
        value_coef=0.0,
        entropy=out.entropy,
        mask=taken(token_ids, first.get("mask")),
        **options,
    )


def taken(ids: Tensor, mask: Tensor | None) -> Tensor:
    return (ids != -100) & (torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)


def exact(batch: dict[str, Tensor], **options: Any) -> Tensor:
    """Float64 oracle, from float64 leaves."""
    options.pop("max_logits_bytes", None)
    first = {k: options.pop(k) for k in LINEAR if k in options}
    bias = first.pop("bias", None)
    logits = batch["hidden"] @ batch["weight"].T
    ids = batch["token_ids"]
    lp, entropy = oracle.logprobs(logits if bias is None else logits + bias, ids, **first)
    zeros = torch.zeros_like(lp)
    return oracle.ppo_loss(
        lp,
        batch["old_logprobs"].double(),
        batch["advantages"].double(),
        zeros,
        zeros,
        zeros,
        value_coef=0.0,
        entropy=entropy,
        mask=taken(ids, first.get("mask")),
        **options,
    )[0]


def check(batch: dict[str, Tensor], **options: Any) -> Loss:
    """Value, statistics and gradients: those of the two-op form, to rounding, against float64."""
    names = ["hidden", "weight", *(["bias"] if "bias" in options else [])]
    bias = options.pop("bias", None)

    def run(fn: Any, make: Any) -> tuple[Any, Any]:
        inputs = {k: make(x) if k in names else x for k, x in batch.items()}
        extra = {} if bias is None else {"bias": make(bias)}
        out = fn(**inputs, **extra, **options)
        loss = out.loss if isinstance(out, Loss) else out
        flows = [{**inputs, **extra}[k] for k in names]
        return out, (loss, *grads([loss], flows, [torch.tensor(1.7)]))

    fixed = [x for x in (*batch.values(), *options.values()) if isinstance(x, Tensor)]
    with unchanged(*fixed):
        out, mine = run(linear_ppo_loss, leaf)
    peer, theirs = run(two_ops, leaf)
    _, truth = run(lambda **kw: exact({k: kw.pop(k) for k in batch}, **kw), f64)
    assert isinstance(out, Loss)
    dtypes = {batch["hidden"].dtype, batch["weight"].dtype}
    narrow = bool(dtypes & {BF16, F16})
    for a, b, c in zip(mine, theirs, truth, strict=True):
        assert a.dtype == b.dtype
        rounding = 1e-12 if a.dtype == F64 else 4e-3 if narrow else 3e-6
        size = max(c.abs().max().item(), 1.0 if c.ndim == 0 else 1e-3)
        error, peer_error = ((x.detach().double() - c).abs().max().item() for x in (a, b))
        assert error <= 2 * peer_error + rounding * size
    tolerance = 3e-2 if narrow else 1e-5
    for name, value in peer.stats.items():
        if "value" in name or (name in ("kl", "entropy") and name not in out.stats):
            continue
        got = out.stats[name]
        assert got.ndim == 0 and not got.requires_grad
        assert got.item() == pytest.approx(value.item(), rel=tolerance, abs=tolerance), name
    return out


OPTIONS: dict[str, Any] = {
    "plain": lambda s: {},
    "temperature_softcap": lambda s: {"temperature": 0.7, "softcap": 6.0},
    "temperature_per_token": lambda s: {"temperature": torch.rand(s) + 0.5},
    "vocab_size": lambda s: {"vocab_size": V - 4},
    "bias": lambda s: {"bias": 0.1 * torch.randn(V)},
    "mask": lambda s: {"mask": torch.rand(s) < 0.6},
    "entropy": lambda s: {"entropy_coef": 0.1},
    "kl_k1": lambda s: {"kl_coef": 0.2, "kl_kind": "k1", "ref_logprobs": -torch.rand(s)},
    "kl_k3": lambda s: {"kl_coef": 0.2, "ref_logprobs": -2 - torch.rand(s)},
    "kl_k3+": lambda s: {"kl_coef": 0.2, "kl_kind": "k3+", "ref_logprobs": -2 - torch.rand(s)},
    "policy": lambda s: {"dual_clip": 1.5, "clip_range": (0.3, 0.25), "weights": torch.rand(s)},
    "limit": lambda s: {"log_ratio_limit": 0.3, "clip_range": 0.5},
    "all": lambda s: {
        "mask": torch.rand(s) < 0.6,
        "temperature": torch.rand(s) + 0.5,
        "softcap": 6.0,
        "vocab_size": V - 4,
        "bias": 0.1 * torch.randn(V),
        "entropy_coef": 0.1,
        "kl_coef": 0.2,
        "kl_kind": "k2",
        "ref_logprobs": -2 - torch.rand(s),
        "dual_clip": 1.5,
        "weights": torch.rand(s),
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("max_logits_bytes", [ONE_ROW, THREE_ROWS, ALL])
def test_every_option(
    backend: str, dtype: torch.dtype, options: str, max_logits_bytes: int
) -> None:
    shape = (3, 4)
    check(draw(shape, dtype), max_logits_bytes=max_logits_bytes, **OPTIONS[options](shape))


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "sequence_sum", "sum"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("layout", ["(N,)", "(B, T)", "(B, K, T)", "packed"])
def test_every_layout(backend: str, layout: str, ratio: str, aggregate: str) -> None:
    shape = {"(N,)": (7,), "(B, T)": (3, 4), "(B, K, T)": (2, 2, 3), "packed": (11,)}[layout]
    options: dict[str, Any] = {
        "ratio": ratio,
        "aggregate": aggregate,
        "cu_seqlens": PACKED if layout == "packed" else None,
        "clip_range": 0.2 if ratio == "token" else 0.01,
    }
    check(draw(shape, F32), **options, max_logits_bytes=THREE_ROWS)
    mask = torch.rand(shape) < 0.6
    check(draw(shape, F32), **options, mask=mask, entropy_coef=0.1, max_logits_bytes=ALL)
    if aggregate != "sum":
        check(draw(shape, F32), **options, mask=mask, denominator=torch.tensor(9))


@pytest.mark.parametrize(("trunk", "head"), [(BF16, F32), (F16, F32), (F32, BF16)], ids=str)
def test_trunk_and_head_of_different_dtypes(trunk: torch.dtype, head: torch.dtype) -> None:
    check(draw((7,), trunk, head), max_logits_bytes=THREE_ROWS, entropy_coef=0.1)


def test_micro_batches_add_up(backend: str) -> None:
    batch = draw((6, 4), F32)
    whole = leaf(batch["weight"])
    expected = torch.autograd.grad(linear_ppo_loss(**{**batch, "weight": whole}).loss, whole)[0]
    parts = leaf(batch["weight"])
    for rows in (slice(0, 1), slice(1, 6)):
        part = {k: x if k == "weight" else x[rows] for k, x in batch.items()}
        linear_ppo_loss(**{**part, "weight": parts}, denominator=24).loss.backward()
    assert torch.allclose(parts.grad, expected, atol=1e-6)


def test_entropy_statistic(backend: str) -> None:
    batch, mask = draw((3, 4), F32), torch.rand(3, 4) < 0.6
    _, entropy = oracle.logprobs(batch["hidden"] @ batch["weight"].T, batch["token_ids"], mask)
    expected = entropy[mask].mean().item()
    out = linear_ppo_loss(**batch, mask=mask, entropy_stats=True)
    assert out.stats["entropy"].item() == pytest.approx(expected, rel=1e-5)
    assert "entropy" not in linear_ppo_loss(**batch, mask=mask).stats
    out = linear_ppo_loss(**batch, mask=mask, entropy_coef=0.1)
    assert out.stats["entropy"].item() == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        out = linear_ppo_loss(**batch, mask=mask, entropy_stats=True)
    assert out.stats["entropy"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("max_logits_bytes", [THREE_ROWS, ALL])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("compact", [True, False])
def test_P3_masked_positions_are_never_read(
    backend: str,
    dtype: torch.dtype,
    poison: float,
    max_logits_bytes: int,
    ratio: str,
    compact: bool,
) -> None:
    batch = draw((3, 4), dtype)
    batch["ref_logprobs"] = -2 - torch.rand(3, 4)
    mask = torch.tensor([[True, True, False, False], [False, True, False, True], [False] * 4])
    results = []
    for dirty in (False, True):
        given_in = dict(batch)
        if dirty:
            for k in ("hidden", "old_logprobs", "advantages", "ref_logprobs"):
                m = mask[..., None] if k == "hidden" else mask
                given_in[k] = batch[k].masked_fill(~m, poison)
            given_in["token_ids"] = batch["token_ids"].masked_fill(~mask, -5)
        flows = [leaf(given_in.pop("hidden")), leaf(given_in.pop("weight"))]
        out = linear_ppo_loss(
            *flows,
            **given_in,
            mask=mask,
            kl_coef=0.1,
            entropy_coef=0.1,
            ratio=ratio,
            max_logits_bytes=max_logits_bytes,
            compact=compact,
        )
        results.append((out.loss, *torch.autograd.grad(out.loss, flows), *out.stats.values()))
    for clean, dirty_result in zip(*results, strict=True):
        assert torch.equal(clean, dirty_result)
    assert (results[1][1][~mask] == 0).all()


def test_an_id_of_minus_100_counts_as_masked(backend: str) -> None:
    batch = draw((3, 4), F32)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    for k, aggregate in (("token", "token_mean"), ("sequence", "sequence_mean")):
        a = linear_ppo_loss(**batch, mask=mask, ratio=k, aggregate=aggregate)
        ids = batch["token_ids"].masked_fill(~mask, -100)
        b = linear_ppo_loss(**{**batch, "token_ids": ids}, ratio=k, aggregate=aggregate)
        assert torch.equal(a.loss, b.loss)
        assert a.stats["n_tokens"] == b.stats["n_tokens"] == 10


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 3)], ids=str)
def test_P4_nothing_unmasked(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], ratio: str
) -> None:
    batch = draw(shape, dtype)
    flows = [leaf(batch.pop("hidden")), leaf(batch.pop("weight"))]
    mask = torch.zeros(shape, dtype=torch.bool)
    out = linear_ppo_loss(*flows, **batch, mask=mask, ratio=ratio)
    assert out.loss == 0
    for g, x in zip(torch.autograd.grad(out.loss, flows), flows, strict=True):
        assert (g == 0).all() and g.shape == x.shape and g.dtype == x.dtype
    assert all(s == 0 for s in out.stats.values())


@pytest.mark.parametrize("most", [4 * 8 * 500, ALL])
@pytest.mark.parametrize("head", [F16, F32], ids=str)
@pytest.mark.parametrize("denominator", [8192.0, 65_536.0, 524_288.0])
def test_float16_behind_a_loss_scale(
    backend: str, denominator: float, head: torch.dtype, most: int
) -> None:
    """As with `torch.amp.GradScaler`: many tokens make the gradient small, and the scale large."""
    n, h, v = 24, 16, 500
    ids, parameters = (
        torch.randint(0, v, (n,)),
        [torch.randn(n, h), torch.randn(v, h) / 4, torch.randn(v)],
    )
    parameters = [leaf(p.to(dtype)) for p, dtype in zip(parameters, (F16, head, head), strict=True)]
    wide = [leaf(p.double()) for p in parameters]
    lp = (wide[0] @ wide[1].T + wide[2]).log_softmax(-1).gather(-1, ids[:, None])[:, 0].detach()
    old, ref = (lp - 0.1 * torch.randn(n)).float(), (lp - 0.1).float()
    options = {"entropy_coef": 0.01, "kl_coef": 0.1, "ref_logprobs": ref}
    terms = (ids, old, torch.randn(n))

    def loss(p: list[Tensor], **more: Any) -> Tensor:
        return linear_ppo_loss(
            p[0], p[1], *terms, bias=p[2], denominator=denominator, **options, **more
        ).loss

    with ppokern.use_backend("torch"):
        exact = torch.autograd.grad(loss(wide), wide)
    mine = torch.autograd.grad(65_536 * loss(parameters, max_logits_bytes=most), parameters)
    for g, p, e in zip(mine, parameters, exact, strict=True):
        assert g.dtype == p.dtype
        assert (g.double() / 65_536 - e).norm() <= 1e-3 * e.norm()


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize(
    "name", ["old_logprobs", "advantages", "weights", "ref_logprobs", "hidden"]
)
def test_non_finite_values_are_not_hidden(backend: str, name: str, ratio: str) -> None:
    for value in (NAN, INF, -INF):
        batch = {
            **draw((2, 3), F32),
            "weights": torch.ones(2, 3),
            "ref_logprobs": -torch.ones(2, 3),
        }
        batch["advantages"][1, 2] = 0.0
        batch[name][1, 2] = value
        out = linear_ppo_loss(**batch, kl_coef=0.1, ratio=ratio)
        assert not out.loss.isfinite(), value


def test_coefficients_of_zero_are_off(backend: str) -> None:
    batch = draw((2, 3), F32)
    clean = linear_ppo_loss(**batch)
    for kl_coef in (0, 0.0):
        out = linear_ppo_loss(**batch, ref_logprobs=torch.full((2, 3), NAN), kl_coef=kl_coef)
        assert torch.equal(out.loss, clean.loss)


def test_bad_id_names_its_position(backend: str) -> None:
    batch = draw((2, 3), F32)
    batch["token_ids"][1, 2] = V
    with pytest.raises(IndexError, match=r"token_ids.*\(?1, ?2"):
        linear_ppo_loss(**batch)


# The backward pass --------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("max_logits_bytes", [THREE_ROWS, ALL])
def test_gradcheck(ratio: str, max_logits_bytes: int) -> None:
    batch, bias = draw((2, 3), F64), torch.randn(V).double()
    names = ("hidden", "weight")

    def fn(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_ppo_loss(
            **{**batch, "hidden": h, "weight": w},
            bias=b,
            ratio=ratio,
            clip_range=0.7,
            entropy_coef=0.1,
            kl_coef=0.1,
            ref_logprobs=-torch.ones(2, 3).double(),
            max_logits_bytes=max_logits_bytes,
        ).loss

    assert torch.autograd.gradcheck(fn, (*(leaf(batch[k]) for k in names), leaf(bias)))


@pytest.mark.parametrize("scale", [1.0, -2.5, 0.0, 1e-4])
def test_backward_scales(backend: str, dtype: torch.dtype, scale: float) -> None:
    batch = draw((5,), dtype)
    flows = [leaf(batch.pop("hidden")), leaf(batch.pop("weight"))]
    loss = linear_ppo_loss(*flows, **batch, max_logits_bytes=THREE_ROWS).loss
    first = torch.autograd.grad(loss, flows, retain_graph=True)
    try:
        second = torch.autograd.grad(scale * loss, flows)
    except RuntimeError as error:
        assert str(error)
    else:
        for a, b in zip(first, second, strict=True):
            expected = scale * a.double()
            tolerance = 1.01 * torch.finfo(a.dtype).eps * expected.abs()
            assert ((b.double() - expected).abs() <= tolerance + 1e-7).all()


def test_loss_scaling_of_small_gradients(backend: str) -> None:
    """A half-precision gradient that would vanish before the scale and doesn't after it."""
    batch = draw((4,), F32)
    x = leaf(batch.pop("hidden"))
    (a,) = torch.autograd.grad(linear_ppo_loss(x, **batch, denominator=1e6).loss * 2**16, x)
    (b,) = torch.autograd.grad(linear_ppo_loss(x, **batch, denominator=1e6 / 2**16).loss, x)
    assert torch.allclose(a, b, rtol=1e-4)


def test_gradients_are_owned_by_the_caller(backend: str) -> None:
    """Gradients that an optimiser changes in place share no memory with the graph."""
    batch = draw((5,), F32)
    flows = [leaf(batch.pop("hidden")), leaf(batch.pop("weight"))]
    loss = linear_ppo_loss(*flows, **batch).loss
    first = torch.autograd.grad(loss, flows, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.mul_(100)
    try:
        second = torch.autograd.grad(loss, flows)
    except RuntimeError as error:
        assert str(error)
    else:
        assert all(torch.allclose(a, b) for a, b in zip(kept, second, strict=True))


def test_second_derivative_is_right_or_an_error(backend: str) -> None:
    batch = draw((3,), F32)

    def second(h: Tensor, w: Tensor, loss: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(loss, w, create_graph=True)
        return torch.autograd.grad((g**2).sum() + (h**3).sum(), h)[0]

    truth = {k: f64(x) if k in ("hidden", "weight") else x for k, x in batch.items()}
    expected = second(truth["hidden"], truth["weight"], exact(truth))
    mine = {k: leaf(x) if k in ("hidden", "weight") else x for k, x in batch.items()}
    try:
        got = second(mine["hidden"], mine["weight"], linear_ppo_loss(**mine).loss)
    except RuntimeError as error:
        assert str(error)
    else:
        assert torch.allclose(got.double(), expected, atol=1e-4)


def test_constants(backend: str) -> None:
    batch = {k: leaf(x) if x.is_floating_point() else x for k, x in draw((4,), F32).items()}
    extra = {"ref_logprobs": leaf(-torch.rand(4)), "weights": leaf(torch.ones(4)), "kl_coef": 0.1}
    temperature = leaf(torch.ones(4))
    linear_ppo_loss(**batch, **extra, temperature=temperature).loss.backward()
    got = {k for k, x in batch.items() if x.grad is not None}
    assert got == {"hidden", "weight"}
    assert extra["ref_logprobs"].grad is None and temperature.grad is None
    batch = {k: x.detach() if k in got else x for k, x in batch.items()}
    assert not linear_ppo_loss(**batch, **extra).loss.requires_grad
    hidden = leaf(batch["hidden"])
    with torch.no_grad():
        assert not linear_ppo_loss(**{**batch, "hidden": hidden}).loss.requires_grad


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_arguments(backend: str, frozen: str) -> None:
    batch = draw((5,), F32)
    every = {k: leaf(x) if k in ("hidden", "weight") else x for k, x in batch.items()}
    linear_ppo_loss(**every).loss.backward()
    kept = "weight" if frozen == "hidden" else "hidden"
    x = leaf(batch[kept])
    linear_ppo_loss(**{**batch, kept: x}).loss.backward()
    assert torch.allclose(x.grad, every[kept].grad, atol=1e-7)


def test_strides_change_nothing(backend: str) -> None:
    batch = draw((4, 3), F32)
    turned = {
        k: x if k == "weight" else x.transpose(0, 1).contiguous().transpose(0, 1)
        for k, x in batch.items()
    }
    turned["weight"] = batch["weight"].T.contiguous().T
    results = []
    for b in (batch, turned):
        b = {
            k: x.detach().requires_grad_() if k in ("hidden", "weight") else x for k, x in b.items()
        }
        out = linear_ppo_loss(**b, max_logits_bytes=THREE_ROWS)
        results.append((out.loss, *torch.autograd.grad(out.loss, [b["hidden"], b["weight"]])))
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(*results, strict=True))


def test_determinism(backend: str) -> None:
    batch = draw((60,), F32)

    def run() -> list[Tensor]:
        b = {k: leaf(x) if k in ("hidden", "weight") else x for k, x in batch.items()}
        out = linear_ppo_loss(**b, max_logits_bytes=7 * V * 4, entropy_coef=0.1)
        grad = torch.autograd.grad(out.loss, [b["hidden"], b["weight"]])
        return [out.loss, *out.stats.values(), *grad]

    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


# Work and memory ----------------------------------------------------------------------------------

BIG_V, BIG_H, BIG_N = 4000, 8, 120


def big(flat: Tensor | None = None, dtype: torch.dtype = F32) -> dict[str, Tensor]:
    """Where `flat`, the ratio is above the range and the advantage positive: no gradient."""
    hidden, weight = torch.randn(BIG_N, BIG_H).to(dtype), torch.randn(BIG_V, BIG_H).to(dtype)
    ids = torch.randint(0, BIG_V, (BIG_N,))
    lp = (hidden.float() @ weight.float().T).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    d = torch.zeros(BIG_N) if flat is None else flat * 0.7
    return {
        "hidden": leaf(hidden),
        "weight": leaf(weight),
        "token_ids": ids,
        "old_logprobs": lp - d,
        "advantages": torch.ones(BIG_N),
    }


def gemm(rows: int) -> int:
    return 2 * rows * BIG_V * BIG_H


def work(batch: dict[str, Tensor], **options: Any) -> int:
    ran = usage(lambda: linear_ppo_loss(**batch, **options).loss)
    if not ran.result.requires_grad:
        return ran.gemm_flops
    inputs = [batch[k] for k in ("hidden", "weight") if batch[k].requires_grad]
    return ran.gemm_flops + usage(lambda: torch.autograd.grad(ran.result, inputs)).gemm_flops


@pytest.mark.parametrize("chunks", [1, 5])
def test_three_gemms(backend: str, chunks: int) -> None:
    limit = BIG_N * BIG_V * 4 // chunks
    n = gemm(BIG_N)
    assert work(big(), max_logits_bytes=limit) == 3 * n
    assert work(big(), max_logits_bytes=limit, entropy_coef=0.1) == 3 * n
    assert work(big(), max_logits_bytes=limit, ratio="sequence") <= 4 * n
    with torch.no_grad():
        assert work(big(), max_logits_bytes=limit) == n
        assert work(big(), max_logits_bytes=limit, ratio="sequence") == n
    for frozen in ("hidden", "weight"):
        batch = big()
        batch[frozen].requires_grad_(False)
        assert work(batch, max_logits_bytes=limit) == 2 * n


@pytest.mark.parametrize("chunks", [1, 5])
def test_rows_without_a_gradient_are_left_out(backend: str, chunks: int) -> None:
    limit = BIG_N * BIG_V * 4 // chunks
    rows = torch.arange(BIG_N)
    flat, mask = rows % 3 == 0, rows % 4 != 0
    seen, active = int(mask.sum()), int((mask & ~flat).sum())
    options: dict[str, Any] = {"mask": mask, "max_logits_bytes": limit}
    assert work(big(flat), **options) == gemm(seen) + 2 * gemm(active)
    assert work(big(flat), **options, entropy_coef=0.1) == 3 * gemm(seen)
    ref = {"kl_coef": 0.1, "ref_logprobs": torch.zeros(BIG_N)}
    assert work(big(flat), **options, **ref) == 3 * gemm(seen)
    assert work(big(torch.ones(BIG_N)), **options) == gemm(seen)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1}, {"ratio": "sequence"}], ids=str)
def test_holds_no_more_logits_than_allowed(
    backend: str, chunks: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    limit = BIG_N * BIG_V * 4 // chunks
    batch = big(dtype=dtype)
    inputs = [batch["hidden"], batch["weight"]]

    def run() -> Any:
        return linear_ppo_loss(**batch, max_logits_bytes=limit, **options).loss

    torch.autograd.grad(run(), inputs)  # first use
    ran = usage(run)
    gradients = sum(x.numel() for x in inputs) * dtype.itemsize
    accumulator = 4 * batch["weight"].numel() if dtype == BF16 and chunks > 1 else 0
    vectors = 100 * BIG_N + 20_000
    assert ran.peak_bytes <= 1.1 * limit + gradients + accumulator + vectors, "forward"
    back = usage(lambda: torch.autograd.grad(ran.result, inputs))
    assert back.peak_bytes <= 1.1 * limit + gradients + accumulator + vectors, "backward"


def test_aggregate_none_names_the_two_op_form(backend: str) -> None:
    with pytest.raises(ValueError, match="linear_selected_logprobs"):
        linear_ppo_loss(**draw((4,), F32), aggregate="none")


def test_equals_the_policy_loss_alone(backend: str) -> None:
    batch = draw((3, 4), F32)
    lp = linear_selected_logprobs_with_entropy(
        batch["hidden"], batch["weight"], batch["token_ids"]
    ).logprobs
    expected = ppo_policy_loss(lp, batch["old_logprobs"], batch["advantages"])
    out = linear_ppo_loss(**batch)
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert out.stats.keys() == expected.stats.keys()
