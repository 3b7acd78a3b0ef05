"""A start whose outputs take nothing: both on a full disk, or closed at the other end."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from busrl.cli import command
from busrl.errors import MachineError
from busrl.quickstart import cache

ROOT = Path(__file__).resolve().parents[2]
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def started(code: str, *arguments: str, out: str = "/dev/full", err: str = "/dev/full") -> int:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(out, "w") as output, open(err, "w") as errors:
        return subprocess.run([sys.executable, "-c", code, *arguments], stdout=output, stderr=errors, env=environment,
                              timeout=120).returncode  # fmt: skip


class Full(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


LAUNCH = """\
import sys
import busrl.launcher
busrl.launcher.launch = lambda *_, **__: 7  # this test is about the way there
from busrl.cli import main
sys.exit(main(["launch", *sys.argv[1:]]))
"""


@FULL
@pytest.mark.parametrize("out", ["/dev/full", "/dev/null"])
def test_a_start_with_warnings_and_no_room_for_them_goes_on(out: str, tmp_path: Path) -> None:
    scripted, warned = str(ROOT / "configs" / "scripted.toml"), "faults.bus=[{drop = 0.3}]"
    assert started(LAUNCH, scripted, "--run-dir", str(tmp_path / "run"), "--set", warned, out=out) == 7


@FULL
def test_an_error_that_nobody_can_read_keeps_its_exit_code() -> None:
    code = 'import sys; from busrl.cli import main; sys.exit(main(["check", "no-such-file.toml"]))'
    assert started(code) == 2


def test_an_error_that_no_output_takes_goes_to_the_system_log(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(command.syslog, "syslog", lambda _, text: logged.append(text))
    monkeypatch.setattr(sys, "stderr", Full())
    assert command.main(["check", "no-such-file.toml"]) == 2
    assert len(logged) == 1 and "no-such-file.toml" in logged[0]


@FULL
def test_the_maker_of_a_model_does_not_depend_on_its_readers(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; from busrl.quickstart import maker, cache\n"
        "def make(name, force):\n"
        "  print('progress', file=sys.stderr, flush=True)\n"
        "  return cache.Paths.within(__import__('pathlib').Path('made'))\n"
        "maker.make = make; sys.argv = ['quickstart', '--force']\n"
        "runpy.run_module('busrl.quickstart', run_name='__main__')"
    )
    assert started(code) == 0


def maker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> str:
    """The message of a quickstart whose maker is this program."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(MachineError) as failure:
        cache.ensure("tiny:sort")
    return str(failure.value)


def test_a_maker_that_was_killed_is_told_as_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = maker(monkeypatch, tmp_path, f"kill -{int(signal.SIGKILL)} $$")
    assert "SIGKILL" in text and "dmesg" in text and "above" not in text


def test_the_words_of_a_maker_that_failed_stand_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = maker(monkeypatch, tmp_path, 'for last; do :; done; printf "no room" > "$last"; exit 2')
    assert "could not be made: no room; try again with" in text
