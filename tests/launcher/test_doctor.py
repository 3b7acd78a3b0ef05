"""`busrl doctor` on this machine, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import py_compile
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl.preflight import doctor

DOCTOR = [sys.executable, "-m", "busrl.cli", "doctor", "--json"]


def run_doctor(**options: object) -> tuple[int, dict[str, dict[str, object]]]:
    done = subprocess.run(DOCTOR, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]
    return done.returncode, {line["part"]: line for line in json.loads(done.stdout)}


def lines_of(part: str) -> Iterator[doctor.Line]:
    """The lines of a part, as they are looked for; the slow look at torch is left out."""
    looks = [look for look in doctor.LOOKS if look.__name__ != "_torch"]
    return (line for look in looks for line in look() if line.part == part)


def line_of(part: str) -> doctor.Line:
    """The first line of a part. Looks behind it are not taken."""
    return next(lines_of(part))


def test_a_machine_that_runs_these_tests_is_fit(tmp_path: Path) -> None:
    code, parts = run_doctor(cwd=tmp_path)
    assert code == 0 and not any(line["bad"] for line in parts.values())
    assert {"busrl", "machine", "/dev/shm", "limits", "folder", "ZeroMQ", "torch", "devices", "code box"} <= set(parts)
    assert str(tmp_path) in str(parts["folder"]["found"])
    assert parts["code box"]["remedy"] or str(parts["code box"]["found"]).startswith("works")


@pytest.mark.parametrize("name", ["busrl._ring", "zmq"])
def test_what_cannot_be_imported_is_said_and_the_rest_is_looked_at(tmp_path: Path, name: str) -> None:
    program = f"import sys; sys.modules[{name!r}] = None; from busrl.cli import main; sys.exit(main({DOCTOR[3:]}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    lines = json.loads(done.stdout)
    assert done.returncode == 1 and any(line["bad"] and name in line["found"] for line in lines)
    assert {"machine", "/dev/shm", "torch"} <= {line["part"] for line in lines}


def test_few_open_files_and_an_unimportable_torch_get_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libfoo.so is missing')\n")

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, parts = run_doctor(cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, preexec_fn=few)
    assert code == 0 and "ulimit -n" in str(parts["limits"]["remedy"])
    assert "libfoo.so is missing" in str(parts["torch"]["found"]) and "pip install" in str(parts["torch"]["remedy"])


def test_a_full_shared_memory_is_bad_and_the_container_default_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrl.preflight.machine.shm_free", lambda: 64 << 20)
    line = line_of("/dev/shm")
    assert "--shm-size" in line.remedy and not line.bad
    monkeypatch.setattr("busrl.preflight.machine.shm_free", lambda: 0)
    line = line_of("/dev/shm")
    assert line.bad


def test_libraries_that_each_start_compiles_are_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "large" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "LARGE", ("large", "not_here"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    line = line_of("bytecode")
    assert "none of large, and" in line.found and f"compileall -q {tmp_path}" in line.remedy and not line.bad
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # the next import writes it
    assert not list(lines_of("bytecode"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    py_compile.compile(str(package))
    assert not list(lines_of("bytecode"))


def test_a_package_of_another_version_is_named_with_the_wanted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.1" if name == "pyzmq" else version(name))
    line = line_of("pyzmq")
    assert line.found == "0.1" and "pyzmq>=25" in line.remedy
