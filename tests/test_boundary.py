"""What the compiled modules and the ops' declarations say of one another."""

from types import ModuleType

import pytest
import torch

from ppokern import _backend, _library
from ppokern.gae.op import Advantages
from ppokern.gae.reference import Inputs as GaeInputs
from ppokern.ppo_loss import kernel_native
from ppokern.ppo_loss.reference import Inputs, Options, Output

MODULES = [m for m in (_backend.native, _backend.cuda) if m is not None]
COMMON = {"sequences", "threads"}
REST = {"ppokern._native": (), "ppokern._cuda": (0, 0)}  # what `gae` takes beside its dict

pytestmark = pytest.mark.skipif(not MODULES, reason="needs the C++ kernels")


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_compiled_functions_take_what_is_declared(module: ModuleType) -> None:
    # a ratio of sequences is told by its slopes, which are then there
    loss = {*Inputs._fields, *Options._fields, *Output._fields} - {"sequence_ratio"}
    assert {*module.fields["ppo_loss"]} == loss | COMMON | {"tokens"}
    gae = {
        *GaeInputs._fields,
        *Advantages._fields,
        "gamma",
        "gamma_lambda",
        "masked_are_steps",
        "steps",
    }
    assert {*module.fields["gae"]} == gae | COMMON
    for name, fields in module.fields.items():
        assert len({*fields}) == len(fields), name


def test_both_modules_take_the_same() -> None:
    if len(MODULES) < 2:
        pytest.skip("needs the CUDA kernels")
    native, cuda = (module.fields for module in MODULES)
    for name in {*native} & {*cuda}:
        assert native[name] == cuda[name]


@pytest.mark.parametrize(
    ("option", "known"),
    [
        ("aggregate", "token_mean, sequence_mean, sequence_sum, sum, none"),
        ("kl_kind", "k1, k2, k3, k3\\+"),
    ],
)
def test_a_name_that_the_compiled_code_does_not_know_is_an_error(option: str, known: str) -> None:
    x = torch.randn(4)
    o = Options(0.2, 0.2, None, False, None, "token_mean", 0.0, 0.0, "k3", None, 1.0)
    wrong = o._replace(**{option: "k4"})
    with pytest.raises(ValueError, match=f"^{option}: expected one of {known}, got k4$"):
        kernel_native.forward(Inputs(logprobs=x, old_logprobs=x, advantages=x), wrong)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_an_argument_that_is_missing_or_of_another_type_is_named(module: ModuleType) -> None:
    with pytest.raises(KeyError, match="rewards: expected a value, got none"):
        module.gae({}, *REST[module.__name__])
    with pytest.raises(TypeError, match=r"^rewards: expected int \| tuple.*, got str$"):
        module.gae({"rewards": "here"}, *REST[module.__name__])


def test_two_arguments_of_one_name_are_refused() -> None:
    def forward(x: GaeInputs, values: torch.Tensor) -> torch.Tensor:
        return values

    with pytest.raises(TypeError, match="two arguments are named values"):
        _library.register("never", forward, forward)
