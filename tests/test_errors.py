"""Wrong arguments: one sentence that names the argument, what was expected and what came."""

import inspect
import math
import re
from typing import Any

import calls
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import ppokern

NAN, INF = math.nan, math.inf
EVERY, PACKED, PACKING = calls.every(), calls.packed(), calls.packing()


def wrong(name: str, **changes: Any) -> Any:
    """The valid call of an op with some arguments replaced; None takes one away."""
    call = {**EVERY, **PACKING}[name.removesuffix("*")]
    args = dict((PACKED[name[:-1]] if name.endswith("*") else call).args)
    for k, x in changes.items():
        args.pop(k, None)
        if x is not GONE:
            args[k] = x
    return call.fn(**args)


GONE = object()
LOGITS = ("selected_logprobs", "selected_logprobs_with_entropy")
LINEAR = ("linear_selected_logprobs", "linear_selected_logprobs_with_entropy", "linear_ppo_loss")
SCORING = LOGITS + LINEAR
LOSSES = ("ppo_policy_loss", "ppo_loss", "linear_ppo_loss")


def label(value: Any) -> str:
    return re.sub(r"[^0-9a-zA-Z_.-]+", "_", str(value))[:40]


def cases(names: tuple[str, ...] | str, *rows: tuple[str, Any, str]) -> list[Any]:
    """(argument, its wrong value, what the message shows of it) for each of the ops."""
    names = (names,) if isinstance(names, str) else names
    return [
        pytest.param(
            n, arg, value, got, id=f"{n}-{arg}-{re.sub(r'[^0-9a-zA-Z_.-]+', '_', str(value))[:40]}"
        )
        for n in names
        for arg, value, got in rows
    ]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


CU = {
    k: torch.tensor(v, dtype=torch.int32)
    for k, v in {
        "start": [1, 4, 9],
        "end": [0, 4, 8],
        "decreasing": [0, 5, 4, 9],
        "nothing": [],
    }.items()
}


VALUE_ERRORS = [
    # shapes
    *cases(SCORING, ("token_ids", zeros(3, 4, dtype=torch.int64), r"3, 4")),
    *cases(SCORING, ("mask", zeros(5, 3, dtype=torch.bool), r"5, 3")),
    *cases(SCORING, ("mask", zeros(5, dtype=torch.bool), r"5")),  # nothing is broadcast
    *cases(SCORING, ("temperature", zeros(2, 5) + 1, r"2, 5")),
    *cases(LINEAR, ("weight", zeros(calls.V, calls.H + 1), rf"{calls.H + 1}")),
    *cases(LINEAR, ("weight", zeros(calls.H), rf"{calls.H}")),
    *cases(LINEAR, ("bias", zeros(calls.V + 1), rf"{calls.V + 1}")),
    *cases("linear_ppo_loss", ("old_logprobs", zeros(5, 3), "5, 3"), ("advantages", zeros(3), "3")),
    *cases("gae", ("values", zeros(3, 4), "3, 4"), ("mask", zeros(5, dtype=torch.bool), "5")),
    *cases("gae", ("bootstrap", zeros(5, 3, dtype=torch.bool), "5, 3")),
    *cases("gae", ("next_values", zeros(3, 1), "3, 1"), ("last_values", zeros(5), "5")),
    *cases("gae*", ("last_values", zeros(2), "2")),
    *cases("whiten", ("mask", zeros(5, dtype=torch.bool), "5")),
    *cases(
        "kl_estimate",
        ("ref_logprobs", zeros(5), "5"),
        ("mask", zeros(3, 1, dtype=torch.bool), "3, 1"),
    ),
    *cases("shaped_rewards", ("scores", zeros(5), "5"), ("scores", zeros(3, 1), "3, 1")),
    *cases(
        "shaped_rewards", ("ref_logprobs", zeros(5), "5"), ("token_rewards", zeros(3, 1), "3, 1")
    ),
    *cases("shaped_rewards", ("score_mask", zeros(2, dtype=torch.bool), "2")),
    *cases("shaped_rewards*", ("scores", zeros(2), "2")),
    *cases(
        ("ppo_policy_loss", "ppo_loss"),
        ("old_logprobs", zeros(5), "5"),
        ("advantages", zeros(3, 1), "3, 1"),
    ),
    *cases(LOSSES, ("weights", zeros(5), "5"), ("mask", zeros(5, dtype=torch.bool), "5")),
    *cases("ppo_value_loss", ("old_values", zeros(5), "5"), ("returns", zeros(3, 1), "3, 1")),
    *cases("ppo_loss", ("values", zeros(5), "5"), ("entropy", zeros(5), "5")),
    *cases(
        "ppo_loss", ("ref_logprobs", zeros(5), "5"), ("value_mask", zeros(5, dtype=torch.bool), "5")
    ),
    *cases("pack", ("mask", zeros(3, 2, dtype=torch.bool), "3, 2")),
    # numbers
    *cases(
        SCORING, ("temperature", 0.0, "0"), ("temperature", -1.0, "-1"), ("temperature", NAN, "nan")
    ),
    *cases(
        SCORING, ("temperature", torch.tensor(0.0), "0"), ("temperature", zeros(3, 5) - 2, "-2")
    ),
    *cases(SCORING, ("softcap", 0.0, "0"), ("softcap", -3.0, "-3"), ("softcap", NAN, "nan")),
    *cases(SCORING, ("vocab_size", calls.V + 1, str(calls.V + 1)), ("vocab_size", 0, "0")),
    *cases(LINEAR, ("max_logits_bytes", 0, "0"), ("max_logits_bytes", -5, "-5")),
    *cases("gae", ("gamma", 1.1, "1.1"), ("gamma", -0.1, "-0.1"), ("gamma", NAN, "nan")),
    *cases("gae", ("lam", 1.5, "1.5"), ("lam", -1.0, "-1"), ("lam", NAN, "nan")),
    *cases(
        LOSSES,
        ("clip_range", -0.1, "-0.1"),
        ("clip_range", (0.1, -0.2), "-0.2"),
        ("clip_range", NAN, "nan"),
    ),
    *cases("ppo_value_loss", ("clip_range", -0.1, "-0.1")),
    *cases("ppo_loss", ("value_clip_range", -0.1, "-0.1")),
    *cases(LOSSES, ("dual_clip", 1.0, "1"), ("dual_clip", 0.5, "0.5"), ("dual_clip", NAN, "nan")),
    *cases(LOSSES, ("log_ratio_limit", -1.0, "-1"), ("log_ratio_limit", NAN, "nan")),
    *cases("whiten", ("eps", -1.0, "-1"), ("eps", INF, "inf"), ("correction", INF, "inf")),
    *cases((*LOSSES[1:], "shaped_rewards"), ("kl_coef", INF, "inf"), ("kl_coef", NAN, "nan")),
    *cases(
        LOSSES,
        ("denominator", 0, "0"),
        ("denominator", -2.0, "-2"),
        ("denominator", INF, "inf"),
        ("denominator", torch.tensor(0), "0"),
        ("denominator", torch.tensor(-2.0), "-2"),
        ("denominator", torch.tensor(NAN), "nan"),
        ("denominator", torch.tensor(0.0, dtype=torch.float16), "0"),
    ),
    *cases("ppo_loss", ("value_denominator", 0.0, "0"), ("value_denominator", zeros(), "0")),
    # names
    *cases("gae", ("mask_mode", "jump", "jump")),
    *cases(("kl_estimate",), ("kind", "k4", "k4")),
    *cases(("shaped_rewards", "ppo_loss", "linear_ppo_loss"), ("kl_kind", "k0", "k0")),
    *cases(LOSSES, ("ratio", "word", "word"), ("aggregate", "mean", "mean")),
    *cases("ppo_value_loss", ("aggregate", "mean", "mean")),
    *cases("unpack", ("padding_side", "middle", "middle")),
    # packed sequences
    *cases(
        tuple(f"{n}*" for n in calls.PACKED_NAMES),
        ("cu_seqlens", CU["start"], "1"),
        ("cu_seqlens", CU["end"], "8"),
        ("cu_seqlens", CU["decreasing"], "4"),
        ("cu_seqlens", CU["nothing"], "0"),
        ("cu_seqlens", zeros(2, 2, dtype=torch.int32), "2, 2"),
    ),
    *cases(
        ("unpack", "next_token_targets"),
        ("cu_seqlens", CU["end"], "8"),
        ("cu_seqlens", CU["start"], "1"),
    ),
    *cases("unpack", ("length", 2, "2")),
    *cases("position_ids", ("cu_seqlens", CU["start"], "1"), ("cu_seqlens", CU["decreasing"], "4")),
]


@pytest.mark.parametrize(("name", "argument", "value", "got"), VALUE_ERRORS)
def test_value_error(name: str, argument: str, value: Any, got: str) -> None:
    with pytest.raises(ValueError, match=re.escape(argument)) as caught:
        wrong(name, **{argument: value})
    assert re.search(got, str(caught.value)), f"{got!r} is not in {caught.value}"


TYPE_ERRORS = [
    *cases(
        SCORING,
        ("token_ids", zeros(3, 5), "float32"),
        ("mask", zeros(3, 5, dtype=torch.uint8), "uint8"),
    ),
    *cases(
        SCORING, ("token_ids", zeros(3, 5, dtype=torch.bool), "bool"), ("mask", [[True]], "list")
    ),
    *cases(
        SCORING,
        ("temperature", "hot", "str"),
        ("softcap", "no", "str"),
        ("softcap", True, "bool"),
        ("temperature", np.bool_(True), "bool"),
        ("vocab_size", 5.5, "float"),
        ("vocab_size", True, "bool"),
        ("vocab_size", np.float64(5), "float64"),
    ),
    *cases(
        LOGITS, ("logits", zeros(3, 5, 11, dtype=torch.int64), "int64"), ("logits", [[1.0]], "list")
    ),
    *cases(
        LINEAR, ("hidden", zeros(3, 5, 4, dtype=torch.int32), "int32"), ("weight", None, "None")
    ),
    *cases(LINEAR, ("weight", zeros(11, 4, dtype=torch.int8), "int8")),
    *cases("gae", ("rewards", zeros(3, 5, dtype=torch.int64), "int64"), ("values", [0.0], "list")),
    *cases(
        "gae",
        ("mask", zeros(3, 5), "float32"),
        ("bootstrap", zeros(3, 5), "float32"),
        ("gamma", "1", "str"),
    ),
    *cases(
        "whiten", ("x", zeros(3, 5, dtype=torch.int64), "int64"), ("mask", zeros(3, 5), "float32")
    ),
    *cases(
        ("kl_estimate", "ppo_policy_loss", "ppo_loss"),
        ("logprobs", zeros(3, 5, dtype=torch.int64), "int64"),
    ),
    *cases(("kl_estimate", "shaped_rewards"), ("mask", zeros(3, 5), "float32")),
    *cases(
        "shaped_rewards",
        ("scores", 1.0, "float"),
        ("score_mask", zeros(3), "float32"),
        ("kl_coef", "a", "str"),
    ),
    *cases(
        LOSSES,
        ("mask", zeros(3, 5), "float32"),
        ("weights", 1.0, "float"),
        ("clip_range", "wide", "str"),
    ),
    *cases("ppo_loss", ("value_mask", zeros(3, 5), "float32"), ("entropy", 1.0, "float")),
    *cases(
        tuple(f"{n}*" for n in calls.PACKED_NAMES),
        ("cu_seqlens", zeros(4), "float32"),
        ("cu_seqlens", [0, 9], "list"),
    ),
    *cases("pack", ("mask", zeros(3, 3), "float32"), ("x", [1], "list")),
]


@pytest.mark.parametrize(("name", "argument", "value", "got"), TYPE_ERRORS)
def test_type_error(name: str, argument: str, value: Any, got: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(argument)) as caught:
        wrong(name, **{argument: value})
    assert re.search(got, str(caught.value)), f"{got!r} is not in {caught.value}"


@pytest.mark.parametrize("name", [*EVERY, *PACKING])
def test_none_where_a_tensor_is_required(name: str) -> None:
    call = {**EVERY, **PACKING}[name]
    parameters = inspect.signature(call.fn).parameters
    for argument, x in call.args.items():
        if isinstance(x, torch.Tensor) and parameters[argument].default is inspect.Parameter.empty:
            with pytest.raises((TypeError, ValueError), match=f"^{argument}: .*None"):
                wrong(name, **{argument: None})


@pytest.mark.parametrize("name", EVERY)
def test_a_negated_view(name: str) -> None:
    """Its memory holds other values than it has."""
    for argument, x in EVERY[name].args.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            with pytest.raises(TypeError, match=f"^{argument}: .*resolve_neg"):
                wrong(name, **{argument: torch.complex(x, -x).conj().imag})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in dual_level
@pytest.mark.parametrize("name", [name for name, call in EVERY.items() if call.flows])
def test_forward_mode_leaves_no_derivative_out(name: str) -> None:
    with forward_ad.dual_level():
        for argument in EVERY[name].flows:
            x = EVERY[name].args[argument]
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(NotImplementedError, match="forward mode"):
                wrong(name, **{argument: dual})
        wrong(name)  # without a tangent it works there as elsewhere


SMALL, LARGE = 1e-50, 1e39  # what float32 holds as 0 and as infinity


@pytest.mark.parametrize("backend", ppokern.available_backends())
@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        *((n, k, x) for n in SCORING for k in ("temperature", "softcap") for x in (SMALL, LARGE)),
        *((n, "clip_range", x) for n in LOSSES for x in (LARGE, (0.1, LARGE))),
        ("ppo_value_loss", "clip_range", LARGE),
        *((n, "log_ratio_limit", x) for n in LOSSES for x in (SMALL, LARGE)),
        *((n, "denominator", x) for n in LOSSES for x in (SMALL, LARGE)),
        *((n, "dual_clip", LARGE) for n in LOSSES),
        *((n, "kl_coef", x) for n in (*LOSSES[1:], "shaped_rewards") for x in (LARGE, -LARGE)),
        *((n, "entropy_coef", LARGE) for n in LOSSES[1:]),
        *(("ppo_loss", k, LARGE) for k in ("value_coef", "value_clip_range", "value_denominator")),
    ],
    ids=label,
)
def test_numbers_that_float32_does_not_hold(
    backend: str, name: str, argument: str, value: Any
) -> None:
    """An error on every backend, also of a coefficient whose term is 0; float64 holds them."""
    with ppokern.use_backend(backend), pytest.raises(ValueError, match=f"^{argument}: .*float32"):
        wrong(name, **{argument: value})
    args = {**calls.every(torch.float64)[name].args, argument: value}
    assert calls.outputs(EVERY[name].fn(**args))


@pytest.mark.parametrize("name", SCORING)
def test_temperatures_that_float32_does_not_hold(name: str) -> None:
    for bad in (1e-40, INF):
        t = torch.ones(3, 5)
        t[0, 0] = bad
        with pytest.raises(ValueError, match=r"^temperature: .*float32.* at \[0, 0\]"):
            wrong(name, temperature=t)
        with pytest.raises(ValueError, match=r"^temperature: .*float32"):
            wrong(name, temperature=torch.tensor(bad))
    wide = torch.full((3, 5), LARGE, dtype=torch.float64)  # float64 arithmetic
    assert calls.outputs(wrong(name, temperature=wide))[0].dtype == torch.float64


def test_infinity_where_it_means_something() -> None:
    """Nothing is clipped."""
    for name in LOSSES:
        plain = wrong(name, clip_range=INF, dual_clip=INF, log_ratio_limit=None).loss
        assert torch.equal(plain, wrong(name, clip_range=1e30, dual_clip=GONE).loss)
    assert wrong("ppo_value_loss", clip_range=INF).loss.isfinite()


NUMPY = [
    *((n, "temperature", np.float32(0.5)) for n in SCORING),
    *((n, "vocab_size", np.int64(9)) for n in SCORING),
    *((n, "max_logits_bytes", np.int32(500)) for n in LINEAR),
    *((n, "softcap", np.int64(5)) for n in SCORING),
    *(("gae", k, np.float32(0.5)) for k in ("gamma", "lam")),
    *(("whiten", k, x) for k in ("eps", "correction") for x in (np.float32(0.5), np.int64(1))),
    *((n, "kl_coef", np.float16(0.5)) for n in ("shaped_rewards", *LOSSES[1:])),
    *((n, k, np.float32(2.5)) for n in LOSSES for k in ("clip_range", "dual_clip", "denominator")),
    *((n, "log_ratio_limit", np.int64(5)) for n in LOSSES),
    ("ppo_loss", "value_coef", np.float32(0.5)),
    ("gae", "time_dim", np.int64(-1)),
]


@pytest.mark.parametrize(("name", "argument", "value"), NUMPY, ids=label)
def test_numbers_of_numpy_are_numbers(name: str, argument: str, value: Any) -> None:
    theirs, mine = (calls.outputs(wrong(name, **{argument: x})) for x in (value, value.item()))
    assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))


# Arguments that exclude or need each other --------------------------------------------------------


@pytest.mark.parametrize("first", ["terminated", "truncated"])
@pytest.mark.parametrize("second", ["bootstrap", "continues"])
def test_the_pairs_of_flags_exclude_each_other(first: str, second: str) -> None:
    x, flag = torch.zeros(3), torch.zeros(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"(?s)({first}.*{second}|{second}.*{first})"):
        ppokern.gae(x, x, **{first: flag, second: ~flag})


@pytest.mark.parametrize("name", ["ppo_loss", "linear_ppo_loss"])
def test_a_coefficient_needs_its_tensor(name: str) -> None:
    with pytest.raises(ValueError, match="ref_logprobs"):
        wrong(name, ref_logprobs=GONE)
    assert wrong(name, ref_logprobs=GONE, kl_coef=0.0).loss.isfinite()
    if name == "ppo_loss":
        with pytest.raises(ValueError, match="entropy"):
            wrong(name, entropy=GONE)
        with pytest.raises((ValueError, TypeError), match="values"):
            wrong(name, values=None)


@pytest.mark.parametrize("aggregate", ["sum", "none"])
@pytest.mark.parametrize("name", [*LOSSES, "ppo_value_loss"])
def test_a_denominator_needs_a_mean(name: str, aggregate: str) -> None:
    with pytest.raises(ValueError, match=r"denominator|linear_selected_logprobs"):
        wrong(name, aggregate=aggregate, denominator=4.0)
    if name == "ppo_loss":
        with pytest.raises(ValueError, match="value_denominator"):
            wrong(name, aggregate=aggregate, denominator=GONE, value_denominator=4.0)


@pytest.mark.parametrize("name", [*LOSSES, "ppo_value_loss"])
def test_a_denominator_is_one_number(name: str) -> None:
    with pytest.raises((ValueError, TypeError), match="denominator"):
        wrong(name, aggregate="token_mean", denominator=torch.ones(2))
    with pytest.raises((ValueError, TypeError), match="denominator"):
        wrong(name, aggregate="token_mean", denominator="all")


@pytest.mark.parametrize("name", calls.PACKED_NAMES)
def test_cu_seqlens_belongs_to_the_packed_layout(name: str) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        wrong(name, cu_seqlens=torch.tensor([0, 9, 15]))


@pytest.mark.parametrize("total", [4, 7])
def test_total_that_is_not_the_number_of_tokens(total: int) -> None:
    with pytest.raises(ValueError, match=rf"(?s)(total|cu_seqlens).*{total}"):
        wrong("position_ids", total=total)


@pytest.mark.parametrize("time_dim", [2, -3, 5])
def test_time_dim(time_dim: int) -> None:
    with pytest.raises((ValueError, IndexError), match="time_dim"):
        ppokern.gae(torch.zeros(2, 3), torch.zeros(2, 3), time_dim=time_dim)


def test_temperature_names_the_place() -> None:
    t = torch.ones(2, 3)
    t[1, 2] = -1
    with pytest.raises(ValueError, match=r"temperature.*\(?1, ?2"):
        ppokern.selected_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 3).long(), temperature=t)


@pytest.mark.parametrize("name", [*EVERY, *PACKING])
def test_an_unknown_argument(name: str) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        wrong(name, nonsense=1)


POLICY = """dual_clip ratio='token' weights aggregate='token_mean' denominator cu_seqlens
    log_ratio_limit=20.0"""
SCORE = "mask temperature=1.0 softcap vocab_size"
LINEAR_SCORE = f"hidden weight token_ids * bias {SCORE} max_logits_bytes=268435456"
SIGNATURES = {
    "selected_logprobs": f"logits token_ids * {SCORE} inplace_backward=False",
    "selected_logprobs_with_entropy": f"logits token_ids * {SCORE} inplace_backward=False",
    "linear_selected_logprobs": LINEAR_SCORE,
    "linear_selected_logprobs_with_entropy": LINEAR_SCORE,
    "gae": """rewards values * gamma=1.0 lam=0.95 mask terminated truncated bootstrap continues
        next_values last_values mask_mode='skip' time_dim=-1 cu_seqlens""",
    "whiten": "x mask * shift_mean=True eps=1e-08 correction=1 group",
    "kl_estimate": "logprobs ref_logprobs kind='k1' mask",
    "shaped_rewards": """scores logprobs ref_logprobs * kl_coef mask score_mask token_rewards
        kl_kind='k1' cu_seqlens""",
    "ppo_policy_loss": f"logprobs old_logprobs advantages * mask clip_range=0.2 {POLICY}",
    "ppo_value_loss": """values old_values returns * mask clip_range=0.2 aggregate='token_mean'
        denominator cu_seqlens""",
    "ppo_loss": f"""logprobs old_logprobs advantages values old_values returns * mask value_mask
        clip_range=0.2 value_clip_range=0.2 value_coef=0.5 value_denominator entropy
        entropy_coef=0.0 ref_logprobs kl_coef=0.0 kl_kind='k3' {POLICY}""",
    "linear_ppo_loss": f"""hidden weight token_ids old_logprobs advantages * bias {SCORE}
        clip_range=0.2 entropy_coef=0.0 ref_logprobs kl_coef=0.0 kl_kind='k3'
        max_logits_bytes=268435456 entropy_stats=False compact=True {POLICY}""",
    "pack": "x mask",
    "unpack": "values cu_seqlens * length fill=0.0 padding_side='right'",
    "position_ids": "cu_seqlens * total",
    "next_token_targets": "token_ids cu_seqlens",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """Names, order of the positional ones, and defaults are fixed; more keywords may be there."""
    parameters = inspect.signature(getattr(ppokern, name)).parameters
    positional, _, keywords = SIGNATURES[name].partition("*")
    in_order = [p.name for p in parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    expected = [word.partition("=")[0] for word in positional.split()]
    assert in_order[: len(expected)] == expected
    for word in positional.split():
        if "=" in word:
            assert word.endswith(f"={parameters[word.partition('=')[0]].default!r}")
    for word in keywords.split():
        key, has_default, default = word.partition("=")
        assert repr(parameters[key].default) == (default if has_default else "None") or (
            key == "kl_coef" and name == "shaped_rewards"
        )
