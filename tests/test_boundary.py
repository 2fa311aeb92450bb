"""What the compiled modules and the ops' declarations say of one another."""

import ast
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ppokern
from ppokern import _backend, _launch, _library
from ppokern.gae.op import Advantages
from ppokern.gae.reference import Inputs as GaeInputs
from ppokern.ppo_loss import kernel_native
from ppokern.ppo_loss.reference import Inputs, Options, Output

MODULES = [m for m in (_backend.native, _backend.cuda) if m is not None]
COMMON = {"sequences", "threads"}

pytestmark = pytest.mark.skipif(not MODULES, reason="needs the C++ kernels")


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_compiled_functions_take_what_is_declared(module: ModuleType) -> None:
    # a ratio of sequences is told by its slopes, which are then there
    loss = {*Inputs._fields, *Options._fields, *Output._fields} - {"sequence_ratio"}
    assert {*module.fields["ppo_loss"]} == loss | COMMON | {"tokens"}
    gae = {*GaeInputs._fields, *Advantages._fields, "gamma", "decay", "masked_are_steps", "steps"}
    assert {*module.fields["gae"]} == gae | COMMON
    for name, fields in module.fields.items():
        assert len({*fields}) == len(fields), name


def test_both_modules_take_the_same() -> None:
    if len(MODULES) < 2:
        pytest.skip("needs the CUDA kernels")
    native, cuda = (module.fields for module in MODULES)
    for name in {*native} & {*cuda}:
        assert native[name] == cuda[name]


def test_the_stub_of_the_compiled_module_lists_its_arguments() -> None:
    if _backend.native is None:
        pytest.skip("needs the C++ kernels")
    stub = ast.parse(Path(ppokern.__file__).with_name("_native.pyi").read_text())
    listed = {
        function.name: tuple(argument.arg for argument in function.args.posonlyargs)
        for function in stub.body
        if isinstance(function, ast.FunctionDef)
    }
    assert {name: listed[name] for name in _backend.native.fields} == _backend.native.fields


@pytest.mark.parametrize(
    ("option", "known"),
    [
        ("aggregate", "token_mean, sequence_mean, sequence_sum, sum, none"),
        ("kl_kind", "k1, k2, k3"),
    ],
)
def test_a_name_that_the_compiled_code_does_not_know_is_an_error(
    option: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _launch.run

    def wrong(module: ModuleType, name: str, values: dict, *rest: object) -> object:
        return run(module, name, values | {option: "k4"}, *rest)

    monkeypatch.setattr(_launch, "run", wrong)
    x = torch.randn(4)
    o = Options(0.2, 0.2, None, False, None, "token_mean", 0.0, 0.0, "k3", None, 1.0)
    with pytest.raises(ValueError, match=f"^{option}: expected one of {known}, got k4$"):
        kernel_native.forward(Inputs(logprobs=x, old_logprobs=x, advantages=x), o)


def test_two_arguments_of_one_name_are_refused() -> None:
    def forward(x: GaeInputs, values: torch.Tensor) -> torch.Tensor:
        return values

    with pytest.raises(TypeError, match="two arguments are named values"):
        _library.register("never", forward, forward)
