"""Builds the C++ kernels. Everything else about the package is in pyproject.toml.

The extension is pybind11 and a C++17 compiler, no torch: it takes addresses and strides. Where it
cannot be compiled the package is installed without it. PPOKERN_BUILD=1 makes that an error,
PPOKERN_BUILD=0 does not try, PPOKERN_BUILD=sanitize builds with ASan and UBSan, for tests.
"""

import os
import tempfile
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

BUILD = os.environ.get("PPOKERN_BUILD", "auto")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
OPENMP = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"

native = Pybind11Extension(
    "ppokern._native",
    ["csrc/bindings.cpp", *sorted(glob("csrc/*/*_cpu.cpp"))],
    cxx_std=17,
    include_dirs=["csrc"],
    depends=sorted(glob("csrc/**/*.h", recursive=True)),
    # without contraction every instruction set gives the same bits
    extra_compile_args=["-O3", "-ffp-contract=off"],
    optional=BUILD not in ("1", "sanitize"),
)
if BUILD == "sanitize":
    native.extra_compile_args += ["-O1", "-g1", *SANITIZE]
    native.extra_link_args += SANITIZE


class BuildNative(build_ext):
    """Adds OpenMP where the compiler has it, and says so where nothing was built."""

    def build_extensions(self) -> None:
        """Probe the compiler, then build."""
        if self.has_openmp():
            native.extra_compile_args.append("-fopenmp")
            native.extra_link_args.append("-fopenmp")
        super().build_extensions()
        if not Path(self.get_ext_fullpath(native.name)).exists():
            print("ppokern: the C++ kernels could not be compiled; installing without them.")

    def has_openmp(self) -> bool:
        """Return whether a program with OpenMP compiles and links."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(OPENMP)
            try:
                objects = self.compiler.compile([str(source)], folder, extra_postargs=["-fopenmp"])
                self.compiler.link_executable(
                    objects, "probe", folder, extra_postargs=["-fopenmp"], target_lang="c++"
                )
            except (BaseError, CCompilerError):
                return False
        return True


setup(
    packages=[*find_packages(include=["ppokern", "ppokern.*"]), "ppokern.trainer"],
    package_dir={"ppokern.trainer": "trainer"},
    package_data={"ppokern.trainer": ["presets/*.yaml", "presets/*.txt"]},
    ext_modules=[] if BUILD == "0" else [native],
    cmdclass={"build_ext": BuildNative},
)
