"""Builds the C++ and CUDA kernels. Everything else about the package is in pyproject.toml.

The extensions are pybind11 and a C++17 compiler, no torch: they take addresses and strides. Where
one cannot be compiled the package is installed without it. PPOKERN_BUILD=1 makes that an error,
PPOKERN_BUILD=0 does not try, PPOKERN_BUILD=sanitize builds with ASan and UBSan, for tests.

PPOKERN_CUDA=auto compiles the CUDA kernels where nvcc is (12.0 or later, in CUDA_HOME or on PATH),
GPU or not; =on makes its absence or failure an error, =off does not try. PPOKERN_CUDA_ARCHS names
the architectures, by default "80;90;100", of which the last goes in as PTX too.
"""

import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

BUILD = os.environ.get("PPOKERN_BUILD", "auto")
CUDA = os.environ.get("PPOKERN_CUDA", "auto")
ARCHS = os.environ.get("PPOKERN_CUDA_ARCHS", "80;90;100").split(";")
CUDA_HOME = os.environ.get("CUDA_HOME")
NVCC = (CUDA_HOME and shutil.which("nvcc", path=f"{CUDA_HOME}/bin")) or shutil.which("nvcc")
KERNELS = sorted(glob("csrc/*/*_cuda.cu"))
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
OPENMP = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
NOTHING = "int main() { return 0; }\n"

if CUDA not in ("auto", "on", "off"):
    raise SystemExit(f"PPOKERN_CUDA: expected auto, on or off, got {CUDA!r}")
if CUDA == "on" and NVCC is None:
    raise SystemExit("PPOKERN_CUDA=on: there is no nvcc in CUDA_HOME/bin nor on PATH")


def extension(name: str, sources: list[str], required: bool) -> Pybind11Extension:
    """Return a module of the package that is made from files in csrc."""
    return Pybind11Extension(
        f"ppokern.{name}",
        sources,
        cxx_std=17,
        include_dirs=["csrc"],
        depends=sorted(glob("csrc/**/*.*", recursive=True)),
        # without contraction every instruction set gives the same bits
        extra_compile_args=["-O3", "-ffp-contract=off"],
        optional=not required,
    )


sources = ["csrc/bindings.cpp", *sorted(glob("csrc/*/*_cpu.cpp"))]
native = extension("_native", sources, BUILD in ("1", "sanitize"))
cuda = extension("_cuda", ["csrc/bindings_cuda.cpp"], CUDA == "on")
if BUILD == "sanitize":
    native.extra_compile_args += ["-O1", "-g1", *SANITIZE]
    native.extra_link_args += SANITIZE
extensions = [native]
if CUDA != "off" and NVCC and BUILD != "sanitize":
    extensions.append(cuda)


def nvcc(*arguments: str) -> str:
    """Run nvcc and return what it prints."""
    done = subprocess.run(
        [str(NVCC), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise CompileError(f"nvcc {' '.join(arguments)} failed:\n{done.stdout}")
    return done.stdout


class BuildNative(build_ext):
    """Adds OpenMP where the compiler has it, and says so where something was not built."""

    def build_extensions(self) -> None:
        """Probe the compiler, then build: nvcc takes a minute, and is of no use without it."""
        if self.compiles(OPENMP, "-fopenmp"):
            native.extra_compile_args.append("-fopenmp")
            native.extra_link_args.append("-fopenmp")
        elif cuda in self.extensions and not self.compiles(NOTHING):
            if CUDA == "on":
                raise CompileError("PPOKERN_CUDA=on: there is no C++ compiler that works")
            self.extensions = [native]
        super().build_extensions()
        for made, kernels in ((native, "C++"), (cuda, "CUDA")):
            if made in extensions and not Path(self.get_ext_fullpath(made.name)).exists():
                what = f"the {kernels} kernels could not be compiled"
                print(f"ppokern: {what}; installing without them.")

    def build_extension(self, ext: Pybind11Extension) -> None:
        """Compile the CUDA kernels before what calls them."""
        if ext is cuda:
            known = re.findall(r"compute_(\w+)", nvcc("--list-gpu-arch"))
            archs = [arch for arch in ARCHS if arch in known]
            for arch in set(ARCHS) - set(archs):
                print(f"ppokern: this nvcc does not know sm_{arch}; compiling without it.")
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                ext.extra_objects = list(pool.map(partial(self.kernel_object, archs), KERNELS))
            # the runtime is linked in, so that the module loads where there is no driver
            folders = re.findall(r'"-L(.*?)"', nvcc("--dryrun", "none.cu"))
            ext.extra_link_args += [*(f"-L{folder}" for folder in folders), "-lcudart_static"]
            ext.extra_link_args += ["-lpthread", "-ldl", "-lrt"]
        super().build_extension(ext)

    def kernel_object(self, archs: list[str], source: str) -> str:
        """Compile a file of CUDA kernels and return its object's path."""
        to = Path(self.build_temp, source).with_suffix(".o")
        to.parent.mkdir(parents=True, exist_ok=True)
        codes = [f"arch=compute_{arch},code=sm_{arch}" for arch in archs]
        codes += [f"arch=compute_{arch},code=compute_{arch}" for arch in archs[-1:]]
        flags = ["-std=c++17", "-O3", "-Icsrc", "--expt-relaxed-constexpr", "-t2"]
        flags.append("-Xfatbin=-compress-all")  # a third of the size
        flags += ["-Xcompiler=-fPIC,-fvisibility=hidden", *(f"-gencode={code}" for code in codes)]
        nvcc(*flags, "-c", source, "-o", str(to))
        return str(to)

    def compiles(self, program: str, *flags: str) -> bool:
        """Return whether a program compiles and links."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(program)
            try:
                objects = self.compiler.compile([str(source)], folder, extra_postargs=[*flags])
                self.compiler.link_executable(
                    objects, "probe", folder, extra_postargs=[*flags], target_lang="c++"
                )
            except (BaseError, CCompilerError):
                return False
        return True


setup(
    packages=[*find_packages(include=["ppokern", "ppokern.*"]), "ppokern.trainer"],
    package_dir={"ppokern.trainer": "trainer"},
    package_data={"ppokern.trainer": ["presets/*.yaml", "presets/*.txt"]},
    ext_modules=[] if BUILD == "0" else extensions,
    cmdclass={"build_ext": BuildNative},
)
