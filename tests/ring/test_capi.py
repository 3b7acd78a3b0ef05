"""The C ABI as it is shipped: what the library shows, where it is found, and a stranger who uses it by ctypes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from busrl import pages
from busrl.ring import State, capi

ROOT = Path(__file__).resolve().parents[2]
STRANGER = Path(__file__).parent / "capi_stranger.py"


def done(*command: str | Path, cwd: Path | None = None) -> str:
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600, cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def declared() -> set[str]:
    """The calls of the header, comments left out."""
    text = re.sub(r"/\*.*?\*/", "", capi.HEADER.read_text(), flags=re.DOTALL)
    return set(re.findall(r"\b(busrl_ring_\w+)\(", text))


def test_a_stranger_without_busrl_takes_and_commits_a_sample_through_the_library(world) -> None:
    world.dispatch(3)
    slot, word, imported = done(sys.executable, "-I", STRANGER, capi.LIBRARY, world.path).split()
    line = world.ring.line(int(slot))
    assert imported == "False" and line["word"] == int(word) and line["state"] == State.GENERATED
    assert line["uid"] == 3 and line["segs"] == 1
    assert world.ring.get(int(slot), "text", 0).tobytes() == b'{"PROMPT": "3"}'
    assert [process.label for process in world.ring.processes()] == ["parent"]


def test_an_error_of_the_library_has_a_code_and_a_text(world) -> None:
    missing = subprocess.run(
        [sys.executable, "-I", str(STRANGER), str(capi.LIBRARY), world.path + ".gone"], capture_output=True, text=True
    )
    assert missing.returncode == 1 and "No such file" in missing.stderr and "(-2)" in missing.stderr


def test_the_library_shows_the_calls_of_its_header_and_nothing_else() -> None:
    shown = {line.split()[-1] for line in done("nm", "-D", "--defined-only", capi.LIBRARY).splitlines()}
    assert shown == declared() and len(shown) == 28


def test_the_built_header_is_the_source_and_every_code_is_documented() -> None:
    source = (ROOT / "csrc" / "include" / "busrl_ring.h").read_text()
    assert capi.HEADER.read_text() == (source if pages.IS_CLONE else pages.addressed(source))
    page = (ROOT / "docs" / "c-abi.md").read_text()
    codes = set(re.findall(r"\b(BUSRL_E_\w+) = ", capi.HEADER.read_text()))
    assert len(codes) == 22
    assert [name for name in sorted(declared() | codes) if name not in page] == []


@pytest.mark.parametrize(("compiler", "standard"), [("gcc", "c99"), ("gcc", "c11"), ("g++", "c++11"), ("g++", "c++17")])
def test_the_header_is_plain_c_and_valid_cpp(compiler: str, standard: str, tmp_path: Path) -> None:
    source = tmp_path / ("use.c" if compiler == "gcc" else "use.cpp")
    source.write_text('#include <busrl_ring.h>\nint main(void) { return busrl_ring_abi() != BUSRL_RING_ABI; }\n')
    flags = shlex.split(done(sys.executable, "-m", "busrl.ring.capi", "--flags"))
    strict = [f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    done(compiler, *strict, source, "-o", tmp_path / "use", *flags)
    done(tmp_path / "use")


def test_a_user_is_told_where_header_and_library_are() -> None:
    assert done(sys.executable, "-m", "busrl.ring.capi", "--include").strip() == str(capi.HEADER.parent)
    assert done(sys.executable, "-m", "busrl.ring.capi", "--lib").strip() == str(capi.LIBRARY)


@pytest.mark.slow
def test_a_wheel_brings_header_library_and_the_page_of_the_monitor(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("busrl", "csrc"):
        done("cp", "-r", ROOT / folder, tmp_path / folder)
    for built in (tmp_path / "busrl" / "ring" / "capi").glob("*busrl_ring.*"):
        built.unlink()  # what lies in the source tree must not stand in for what is built
    done(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "out", ".", cwd=tmp_path)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"busrl/ring/capi/libbusrl_ring.so", "busrl/ring/capi/busrl_ring.h"} <= set(names)
    files = ("page.html", "page.css", "page.js", "draw.js", "uplot.LICENSE")
    page = {f"busrl/observe/monitor/web/{name}" for name in files}
    assert page <= set(names)
