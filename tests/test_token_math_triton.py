"""The Triton page against the torch page, name by name."""

import importlib
import inspect
import math
import os

import pytest
import torch
from measure import same_bits
from torch import Tensor

from ppokern import token_math as page

triton = pytest.importorskip("triton", reason="no Triton: make triton installs it")
tl = triton.language
twin = importlib.import_module("ppokern.token_math_triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_triton.py runs this interpreted"
)
INF, NAN = math.inf, math.nan
SIZE = 64
NUMBERS = (0.0, 1e-30, 1e-8, 1e-4, 0.01, 0.3, 0.62, 0.63, 0.9, 1.0, 1.1, 3.0, 9.0, 20.0, 80.0)


@triton.jit
def kernel(a, b, c, d, e, out, formula: tl.constexpr, COUNT: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, 64)
    given = (tl.load(a + i), tl.load(b + i), tl.load(c + i), tl.load(d + i), tl.load(e + i))
    result = formula(given[0], KIND) if KIND is not None else formula(*given[:COUNT])
    if isinstance(result, tuple):
        for k in range(len(result)):
            tl.store(out + k * 64 + i, result[k].to(tl.float32))
    else:
        tl.store(out + i, result.to(tl.float32))


@triton.jit
def rounding_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, twin.rounded(tl.load(x + i), tl.bfloat16))


def test_names_and_order() -> None:
    formulas = [n for n, f in vars(page).items() if inspect.isfunction(f)]
    twins = [n for n, f in vars(twin).items() if hasattr(f, "arg_names") or hasattr(f, "fn")]
    own = ["rounded", "tanh", "expm1", "log1p"]
    assert twins[: len(own)] == own
    assert [n for n in twins[len(own) :] if n not in ("kl", "kl_slope")] == formulas


def run(name: str, *arguments: Tensor | float | str | None) -> list[Tensor]:
    """Run a formula of the Triton page on up to SIZE numbers."""
    results = {"clip_surrogate": 3, "clip_value": 3, "value_error": 2}.get(name, 1)
    kind = arguments[-1] if isinstance(arguments[-1], str) else None
    numbers = arguments[:-1] if kind else arguments
    size = max(x.numel() for x in numbers if isinstance(x, Tensor))
    padded = [torch.zeros(SIZE) for _ in range(5)]
    for to, x in zip(padded, numbers, strict=False):
        to[:size] = torch.as_tensor(INF if x is None else x, dtype=torch.float32)
    out = torch.zeros(results, SIZE)
    kernel[(1,)](*padded, out, getattr(twin, name), len(numbers), kind)
    return list(out[:, :size])


def close(mine: Tensor, exact: Tensor, rounding: float = 4.0) -> None:
    mine, exact = mine.double(), exact.double()
    finite = exact.isfinite()
    assert same_bits(mine[~finite], exact[~finite])
    bound = rounding * torch.finfo(torch.float32).eps * exact.abs() + 1e-37
    assert ((mine - exact).abs() <= bound)[finite].all(), (mine, exact)


def grid(*extra: float) -> Tensor:
    return torch.tensor([*NUMBERS, *(-x for x in NUMBERS), *extra])


@pytest.mark.parametrize("name", ["tanh", "expm1", "log1p"])
def test_functions(name: str) -> None:
    x = grid(INF, -INF, NAN)
    if name == "log1p":
        x = x[(x >= 0) & (x < INF)]
    close(run(name, x)[0], getattr(torch, name)(x.double()))


SOFTCAP = 5.0
ROWS = {
    "softcap_logit": (grid(-INF, NAN), SOFTCAP),
    "own_logprob_slope": (-grid().abs(),),
    "kl_k1": (grid(INF, NAN),),
    "kl_k2": (grid(INF, NAN),),
    "kl_k1_slope": (grid(),),
    "kl_k2_slope": (grid(),),
    "kl_k3_slope": (grid(),),
    "value_error": (grid(INF), 0.25),
}


@pytest.mark.parametrize("name", ROWS)
def test_formula(name: str) -> None:
    arguments = ROWS[name]
    exact = getattr(page, name)(*(x.double() if isinstance(x, Tensor) else x for x in arguments))
    exact = exact if isinstance(exact, tuple) else (exact,)
    for mine, theirs in zip(run(name, *arguments), exact, strict=True):
        close(mine, theirs)


def test_formulas_that_cancel() -> None:
    """Their error is that of the terms."""
    d = grid()[grid().abs() < 10]
    assert torch.allclose(run("kl_k3", d)[0], page.kl_k3(d.double()).float(), rtol=1e-6, atol=1e-7)
    z = grid()
    mine = run("softcap_slope", z, SOFTCAP)[0].double()
    assert torch.allclose(mine, page.softcap_slope(z.double(), SOFTCAP), atol=3e-7)
    for kind in page.KL:
        assert same_bits(run("kl", d, kind)[0], run(page.KL[kind].__name__, d)[0])
        assert same_bits(run("kl_slope", d, kind)[0], run(page.KL_SLOPE[kind].__name__, d)[0])


def test_rows() -> None:
    logit = torch.tensor([3e38, -3e38, 1.0, -INF])
    top = torch.tensor([3e38, 3e38, 0.5, 0.0])
    close(run("tempered_logit", logit, top, 2.0)[0], torch.tensor([0.0, -INF, 1.0, -INF]))
    prob, logprob = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([-INF, 0.5, 1.0]).log()
    logprob[0] = -INF
    close(run("entropy_term", prob, logprob)[0], page.entropy_term(prob, logprob))
    close(run("entropy_slope", prob, logprob, 0.7)[0], page.entropy_slope(prob, logprob, 0.7))


def test_advantages() -> None:
    x = torch.randn(4, 9)
    close(run("gae_delta", *x[:3], 0.9)[0], page.gae_delta(*x[:3].double(), 0.9), 40)
    decay, behind = torch.tensor([0.0, 0.5]), torch.tensor([NAN, 2.0])
    close(run("gae_step", torch.ones(2), decay, behind)[0], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("dual", [None, 3.0])
def test_clip_surrogate(dual: float | None) -> None:
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.15, 1.3, 4.0, INF, 0.0, NAN])
    for advantage in (-2.0, 0.0, 1.5):
        arguments = (ratio, torch.full_like(ratio, advantage), 0.25, 0.125, dual)
        mine = run("clip_surrogate", *arguments)
        for a, b in zip(mine, page.clip_surrogate(*arguments), strict=True):
            close(a, b.float())


def test_clip_value() -> None:
    values = torch.tensor([0.5, 0.9, 1.0, 1.15, 2.0, INF, NAN])
    for old in (1.0, NAN, INF):
        for target in (-1.0, 0.9, 3.0):
            arguments = (values, torch.full_like(values, old), torch.full_like(values, target))
            mine = run("clip_value", *arguments, 0.25)
            for a, b in zip(mine, page.clip_value(*arguments, 0.25), strict=True):
                close(a, b.float())


def test_rounding_to_bfloat16() -> None:
    """Numbers, the middles between them, and what lies next to those."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    numbers = numbers[numbers.isfinite() & (numbers.abs() > 1e-37)]  # its subnormals are wrong too
    numbers = torch.cat([numbers.sort().values, torch.tensor([INF])])
    middles = (numbers[1:-1] + numbers[:-2]) / 2
    for x in (numbers, middles, middles.nextafter(torch.tensor(INF)), -middles):
        padded = torch.zeros(2**16)
        padded[: len(x)] = x
        out = torch.zeros(2**16, dtype=torch.bfloat16)
        rounding_kernel[(1,)](padded, out, 2**16)
        assert torch.equal(out, padded.bfloat16())
