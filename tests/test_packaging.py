"""The packages that users install, tried away from the checkout, which would shadow them."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("build", reason="the packaging tests need the extra `dev`")

ROOT = Path(__file__).parent.parent
LEFTOVERS = (".*", "build", "dist", "runs", "*.egg-info", "*.so", "__pycache__")
SMOKE = """
import importlib.metadata, ppokern, sys, torch
assert ppokern.__version__ == importlib.metadata.version("ppokern")
assert ppokern.__file__.startswith(sys.prefix), ppokern.__file__
rewards, values, ended = torch.tensor([[0.0, 1.0], [0.4, 0.7], [0, 1]])
out = ppokern.gae(rewards, values, gamma=0.9, terminated=ended > 0)
torch.testing.assert_close(out.advantages, torch.tensor([0.4865, 0.3]))
torch.testing.assert_close(out.returns, torch.tensor([0.8865, 1.0]))
print(*ppokern.available_backends())
"""


def call(*command: object, check: bool = True, cwd: Path = Path("/"), **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compilers that do not optimise: how a wheel is made shows without it."""
    compiler = tmp_path_factory.mktemp("quick") / "c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    compiler.chmod(0o755)
    return {
        "CC": str(compiler),
        "CXX": str(compiler),
        "NVCC_APPEND_FLAGS": "-Xptxas=-O0 -Xcicc=-O0",
    }


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, quick: dict[str, str]) -> Path:
    """A folder with the sdist, and the wheel built from it, each in isolation."""
    work = tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, work / "checkout", ignore=shutil.ignore_patterns(*LEFTOVERS))
    build = [sys.executable, "-m", "build", "--outdir", work, work / "checkout"]
    call(*build, PPOKERN_BUILD="1", PPOKERN_CUDA="off", **quick)
    return work


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A fresh virtual environment that borrows torch and the rest from this one."""
    call(sys.executable, "-m", "venv", tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return tmp_path / "venv" / "bin"


def wheel(dist: Path, out: Path, environment: dict[str, str], check: bool = True) -> str:
    """Build a wheel from the sdist under other circumstances, and return what the build says."""
    (sdist,) = dist.glob("*.tar.gz")
    build = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir"]
    return call(*build, "-w", out, sdist, check=check, **{"PPOKERN_CUDA": "off"} | environment)


def smoke(environment: Path, folder: Path) -> list[str]:
    """Install the wheel in `folder` and try it; return the backends that it has."""
    (wheel,) = folder.glob("*.whl")
    call(environment / "pip", "install", "--no-deps", wheel)
    return call(environment / "python", "-W", "error", "-c", SMOKE).split()


def test_sdist_has_what_the_wheel_is_made_from(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.*")}
    assert sources | {"LICENSE", "README.md", "setup.py", "trainer/presets/demo.yaml"} <= names
    assert "ppokern/py.typed" in names


def test_wheel_has_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ppokern"}
    sources = [*ROOT.glob("ppokern/**/*.py"), *ROOT.glob("trainer/**/*.*")]
    for path in sources:
        name = str(path.relative_to(ROOT))
        if "__pycache__" not in name:
            assert name.replace("trainer/", "ppokern/trainer/", 1) in names
    assert any(name.endswith(".so") for name in names)
    assert {"ppokern/py.typed", "ppokern/_native.pyi"} <= set(names)


IMPORTED = """
import ppokern
print(*ppokern.available_backends(), ppokern.__file__)
"""


def test_wheel_works_and_a_clone_that_hides_it_is_told_of(dist: Path, environment: Path) -> None:
    assert smoke(environment, dist) == ["torch", "cpu"]
    assert "sft" in call(environment / "ppokern", "--help")
    said = call(environment / "ppokern", "sft", check=False)
    assert said.startswith("error: run_dir is missing") and said.count("\n") == 1
    says = call(environment / "ppokern", "info")
    assert "installed: " in says and "here, instruction set" in says
    # Python takes the folder it starts in first, and nothing was built there
    clone = dist / "checkout"
    said = call(environment / "python", "-c", IMPORTED, cwd=clone)
    assert f"torch {clone}/ppokern/__init__.py" in said
    assert said.count("RuntimeWarning: ops run in plain torch, the C++ kernels are not built") == 1
    assert f"in {clone}: `pip install -e .` there builds them" in said
    meant = call(environment / "python", "-c", IMPORTED, cwd=clone, PPOKERN_BACKEND="torch")
    assert meant == f"torch {clone}/ppokern/__init__.py\n"
    says = call(environment / "python", "-m", "ppokern", cwd=clone, PPOKERN_BACKEND="torch")
    assert f"clone: {clone}/ppokern" in says and "pip install -e ." in says


def test_pure_python(dist: Path, environment: Path, tmp_path: Path) -> None:
    wheel(dist, tmp_path, {"PPOKERN_BUILD": "0"})
    assert [path.name for path in tmp_path.glob("*-py3-none-any.whl")]
    assert smoke(environment, tmp_path) == ["torch"]


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler(dist: Path, tmp_path: Path, compiler: str) -> None:
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"  # which takes a minute
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexit 1\n")
    nvcc.chmod(0o755)
    broken = {"CC": compiler, "CXX": compiler}
    with_nvcc = {"PPOKERN_CUDA": "auto", "CUDA_HOME": str(tmp_path / "cuda")}
    output = wheel(dist, tmp_path, broken | with_nvcc)
    assert not (tmp_path / "asked").exists()
    assert "ppokern: the C++ kernels could not be compiled; installing without them." in output
    (made,) = tmp_path.glob("*.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(made).namelist())
    made.unlink()
    wheel(dist, tmp_path, broken | {"PPOKERN_BUILD": "1"}, check=False)  # asked for: an error
    assert not list(tmp_path.glob("*.whl"))


def test_a_compiler_without_openmp(dist: Path, environment: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase " $* " in *" -fopenmp "*) exit 1; esac\nexec c++ "$@" -O0\n'
    )
    compiler.chmod(0o755)
    wheel(dist, tmp_path, {"CC": str(compiler), "CXX": str(compiler), "PPOKERN_BUILD": "1"})
    assert smoke(environment, tmp_path) == ["torch", "cpu"]


ON_A_GPU_THAT_IS_ABSENT = """
import torch
from ppokern.logprob import kernel_native
from ppokern.logprob.reference import Rows
try:
    x = Rows(torch.zeros(1, 4), torch.tensor([1]), None, 1.0, None, 4)
    kernel_native.CUDA.forward(x, False, torch.float32)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_with_cuda(dist: Path, environment: Path, tmp_path: Path, quick: dict[str, str]) -> None:
    """It is built and loads where there is no driver; a kernel then says so in CUDA's words."""
    archs = {"PPOKERN_CUDA_ARCHS": "90;999"}
    output = wheel(dist, tmp_path, {"PPOKERN_CUDA": "on"} | archs | quick)
    assert "this nvcc does not know sm_999; compiling without it." in output
    (made,) = tmp_path.glob("*.whl")
    assert any("/_cuda." in name for name in zipfile.ZipFile(made).namelist())
    backends = smoke(environment, tmp_path)
    if "cuda" not in backends:
        assert backends == ["torch", "cpu"]
        said = call(environment / "python", "-c", ON_A_GPU_THAT_IS_ABSENT, CUDA_VISIBLE_DEVICES="")
        assert said.startswith("CUDA error ")


def test_cuda_without_nvcc(dist: Path, tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "CUDA_HOME": ""}
    output = wheel(dist, tmp_path, nowhere | {"PPOKERN_CUDA": "on"}, check=False)
    assert "PPOKERN_CUDA=on: there is no nvcc in CUDA_HOME/bin nor on PATH" in output
    output = wheel(dist, tmp_path, nowhere | {"PPOKERN_CUDA": "yes"}, check=False)
    assert "PPOKERN_CUDA: expected auto, on or off, got 'yes'" in output
    assert not list(tmp_path.glob("*.whl"))


def test_cuda_that_does_not_compile(dist: Path, tmp_path: Path, quick: dict[str, str]) -> None:
    broken = tmp_path / "bin" / "nvcc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with_nvcc = {"PPOKERN_CUDA": "auto", "CUDA_HOME": str(tmp_path)}
    output = wheel(dist, tmp_path, quick | with_nvcc)
    assert "ppokern: the CUDA kernels could not be compiled; installing without them." in output
    (made,) = tmp_path.glob("*.whl")
    assert sum(name.endswith(".so") for name in zipfile.ZipFile(made).namelist()) == 1
