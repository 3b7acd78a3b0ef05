"""Builds the C++ core of the slot ring twice: for Python as `busrl._ring`, and for everybody else as libbusrl_ring.so;
`busrl._wire`, which drives pyzmq's libzmq for the bus and links nothing of it; `busrl._blocks` for the weights;
`busrl._fields`, which reads protobuf for services, and `busrl._adapters`, for engines with many adapters.

The library and its header lie together in `busrl/ring/capi`, in a wheel as in a source tree; see docs/c-abi.md.
A wheel has no pages: topologies, header and README name addresses of the site instead.
SANITIZE=address,undefined (or thread) builds with those sanitizers; DEBUG=1 builds without optimisation.
"""

import os
import sys
from copy import copy
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # a build looks for no modules beside this file
from busrl.pages import addressed, published

SANITIZE = os.environ.get("SANITIZE", "")
DEBUG = os.environ.get("DEBUG", "") not in ("", "0")
LIBRARY = "busrl.ring.capi.libbusrl_ring"
HEADER = "csrc/include/busrl_ring.h"
CALLS = ["csrc/capi/ring.cpp", "csrc/capi/slot.cpp"]

compile_args = ["-Wall", "-Wextra", "-O0" if DEBUG else "-O2", *(["-g"] if DEBUG or SANITIZE else ["-g0"])]
link_args = []
if SANITIZE:
    compile_args += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"]
    link_args += [f"-fsanitize={SANITIZE}"]

core = [
    *(f"csrc/include/busrl/{name}" for name in sorted(os.listdir("csrc/include/busrl"))),
    HEADER,
    "csrc/capi/call.hpp",
    "csrc/capi/handle.hpp",
    "csrc/capi/exports.map",
]


CORES = os.cpu_count() or 1
ParallelCompile(default=CORES).install()  # the files of one extension


class Build(build_ext):
    """As pybind11's, but all at once; a library for C has no Python in its name, and its header beside it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or CORES

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.split(".")[-1] == LIBRARY.split(".")[-1]:
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, ext: Extension) -> None:
        one = copy(self)  # other threads build the others
        one.build_temp = os.path.join(self.build_temp, ext.name)  # two compile the calls, each in its own way
        super(Build, one).build_extension(ext)

    def run(self) -> None:
        super().run()
        where = os.path.dirname(self.get_ext_fullpath(LIBRARY))
        text = Path(HEADER).read_text(encoding="utf-8")
        header = Path(where, os.path.basename(HEADER))
        header.write_text(text if self.inplace else addressed(text), encoding="utf-8")


class BuildFiles(build_py):
    """As setuptools', but that pages in the topologies of a wheel are addresses."""

    def run(self) -> None:
        super().run()
        for path in () if self.editable_mode else Path(self.build_lib, "busrl", "configs").glob("*.toml"):
            path.write_text(addressed(path.read_text(encoding="utf-8")), encoding="utf-8")


setup(
    long_description=published(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": Build, "build_py": BuildFiles},
    ext_modules=[
        Pybind11Extension(
            "busrl._ring",
            [*CALLS, "csrc/python/module.cpp", "csrc/python/parts.cpp"],
            include_dirs=["csrc/include"],
            depends=[
                *core,
                *(f"csrc/python/{name}.hpp" for name in ("handle", "hot", "watch")),
                *(f"csrc/python/{name}.cpp" for name in ("arrays", "bulk", "hot", "watch")),
            ],
            define_macros=[("BUSRL_RING_STATIC", None)],
            cxx_std=17,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        ),
        Extension(
            "busrl._wire",
            ["csrc/python/wire.cpp"],
            extra_compile_args=[*compile_args, "-std=c++17"],
            extra_link_args=[*link_args, "-ldl"],
        ),
        *(
            Extension(
                f"busrl._{name}",
                [f"csrc/python/{name}.cpp"],
                extra_compile_args=[*compile_args, "-std=c++17", *([] if DEBUG else ["-O3"])],
                extra_link_args=link_args,
            )
            for name in ("blocks", "adapters")
        ),
        Extension(
            "busrl._fields",
            ["csrc/python/fields.cpp"],
            depends=["csrc/python/fields.hpp"],
            extra_compile_args=[*compile_args, "-std=c++17"],
            extra_link_args=link_args,
        ),
        Extension(
            LIBRARY,
            CALLS,
            include_dirs=["csrc/include"],
            depends=core,
            extra_compile_args=[
                *compile_args, "-std=c++17", "-pthread", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
            ],
            extra_link_args=[
                *link_args, "-pthread", "-Wl,--version-script=csrc/capi/exports.map", "-Wl,-soname,libbusrl_ring.so",
            ],
        ),
    ],
)
