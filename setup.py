"""Builds `busrl._ring`, the C++ core of the slot ring; everything else about the package is in pyproject.toml.

SANITIZE=address,undefined (or thread) builds with those sanitizers; DEBUG=1 builds without optimisation.
"""

import os

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

SANITIZE = os.environ.get("SANITIZE", "")
DEBUG = os.environ.get("DEBUG", "") not in ("", "0")

compile_args = ["-Wall", "-Wextra", "-O0" if DEBUG else "-O2", *(["-g"] if DEBUG or SANITIZE else ["-g0"])]
link_args = []
if SANITIZE:
    compile_args += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"]
    link_args += [f"-fsanitize={SANITIZE}"]

setup(
    ext_modules=[
        Pybind11Extension(
            "busrl._ring",
            [f"csrc/python/{name}.cpp" for name in ("arrays", "hot", "module", "watch")],
            include_dirs=["csrc/include"],
            depends=[
                *(f"csrc/include/busrl/{name}" for name in sorted(os.listdir("csrc/include/busrl"))),
                "csrc/python/handle.hpp",
                "csrc/python/hot.hpp",
                "csrc/python/watch.hpp",
            ],
            cxx_std=17,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
    ],
)
