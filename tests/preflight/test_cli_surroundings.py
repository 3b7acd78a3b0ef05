"""What a shell or a container hands to `busrl`: closed streams, other encodings, names that are no UTF-8, no home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from busrl import curve
from busrl.cli import main, rings
from busrl.errors import UserError
from busrl.hosts.joining import scratch_of
from busrl.quickstart import cache
from busrl.status.reader import newest_run

BAD = os.fsdecode(b"bad\xff")
PYTHON = f"{sys.executable} -c 'import sys; from busrl.cli import main; sys.exit(main(sys.argv[1:]))'"


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command line of `busrl`, run by a shell that closes its streams."""
    text = command.replace("busrl", PYTHON, 1)
    return subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60, env={**os.environ, **env})


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("verb", ["recipes", "schema", "ring list"])
def test_a_closed_stream_is_no_error(verb: str, closed: str) -> None:
    done = shell(f"busrl {verb} {closed}")
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_a_ring_that_goes_while_rings_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rings, "SHM", tmp_path)
    for name, target in (("gone", "nothing"), ("kept", __file__)):
        (tmp_path / f"busrl.{os.getuid()}.{name}.ring").symlink_to(target)
    assert main(["ring", "list"]) == 0
    assert [line.split(".")[2] for line in capsys.readouterr().out.splitlines()] == ["kept"]


def test_a_run_that_goes_while_runs_are_compared_is_left_out(tmp_path: Path) -> None:
    for name, target in (("gone", "nothing"), ("kept", __file__)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").symlink_to(target)
    assert newest_run(tmp_path).name == "kept"


def test_an_error_ends_with_its_code_where_both_outputs_are_closed() -> None:
    assert shell("busrl status /nowhere >&- 2>&-").returncode == 2


PLACES = """
import os, sys
from busrl.cli import main
assert main(["recipes"]) == 0
taken = os.open("/dev/zero", os.O_RDONLY)  # as the next file that a verb opens
places = [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1)]
os.write(2, f"{places} {os.get_inheritable(1)} {taken > 2}".encode())
"""


def test_no_file_takes_the_place_of_a_closed_stream() -> None:
    command = ["sh", "-c", f"exec {sys.executable} -c '{PLACES}' <&- >&-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == "['/dev/null', '/dev/null'] True True", done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_spelt_out(encoding: str) -> None:
    print_it = "import sys; from busrl.cli import main; main(['recipes', 'grpo']); print('\\u2026')"
    done = subprocess.run([sys.executable, "-c", print_it], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONIOENCODING": encoding})
    assert done.stdout.endswith("\\u2026\n"), done


@pytest.mark.parametrize("words", [
    ["check", f"{BAD}/t.toml"], ["launch", f"{BAD}/t.toml"], ["launch", "t.toml", "--run-dir", BAD],
    ["launch", "t.toml", "--set", f"model.path={BAD}"], ["status", BAD], ["logs", BAD], ["audit", BAD],
    ["report", "run", BAD], ["report", "run", "-o", BAD], ["trace", BAD], ["ring", "inspect", BAD],
    ["ring", "clean", BAD], ["keys", "init", "--dir", BAD], ["keys", "try", "tcp://127.0.0.1:9", BAD],
    ["simulate", BAD], ["monitor", BAD], ["record", BAD, "-o", "r"], ["replay", BAD], ["evaluate", BAD],
    ["export", "run", "--out", BAD], ["stop", BAD], ["validate", BAD], ["pause", BAD], ["host", "-", "--scratch", BAD],
    ["launch", "link/t.toml"],
])
def test_a_name_that_is_no_utf_8_is_named(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / BAD).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / BAD)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert r"bad\udcff" in (printed := capsys.readouterr().err) and "the name is no UTF-8" in printed


def test_a_current_directory_without_utf_8_or_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / BAD).mkdir()
    monkeypatch.chdir(tmp_path / BAD)
    assert main(["recipes"]) == 2 and "the name is no UTF-8" in capsys.readouterr().err
    (tmp_path / BAD).rmdir()
    assert main(["recipes"]) == 2 and "does not exist any more; change to another one" in capsys.readouterr().err


def test_a_home_that_cannot_be_written_is_named_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/dev/null/home")
    assert main(["keys", "init"]) == 2
    assert "/dev/null/home/.config/busrl: the folder cannot be made: Not a directory; " in capsys.readouterr().err
    with pytest.raises(UserError, match="set XDG_CACHE_HOME to a folder that can be written"):
        cache.ensure("tiny:sort")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    for asked, variable in ((curve.default_directory, "XDG_CONFIG_HOME"),
                            (lambda: cache.paths("tiny:sort"), "XDG_CACHE_HOME"),
                            (lambda: scratch_of(b"x", "a"), "XDG_CACHE_HOME")):
        with pytest.raises(UserError, match=f"no home directory; set {variable}"):
            asked()


def test_a_file_that_a_verb_cannot_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(options: object) -> int:
        raise OSError(30, "Read-only file system", "/data/table.json")

    monkeypatch.setattr("busrl.cli.run.recipes", read_only)
    assert main(["recipes"]) == 2
    assert capsys.readouterr().err == (
        "busrl: /data/table.json: Read-only file system; give a place that `busrl recipes` can use\n"
    )


DEEP = 5_000


@pytest.mark.parametrize(("words", "says"), [
    (["evaluate", "run", "--k", "10000000000000000000000"], "expected a whole number from 1 to"),
    (["evaluate", "run", "--samples", "99999999"], "expected a whole number from 1 to"),
    (["evaluate", "run", "--temperature", "1e9"], "expected a number from 0 (greedy) to 10"),
    (["evaluate", "run", "--temperature", "-1"], "expected a number from 0 (greedy) to 10"),
    (["quickstart", "--copy", "file"], "it is there, and no folder"),
    (["init", "own", "--model", "model", "--data", "d.jsonl", "--out", "file"], "it is there, and no folder"),
    (["init", "gpus", "--model", "model", "--data", "d.jsonl", "--gpus", "999999999"], "64 at most"),
    (["host", "tcp://127.0.0.1:1", "--keys", "a.key_secret", "--name", "a b"], "expected a name as `busrl keys add`"),
    (["check", "deep.toml"], "nested too deeply to be read"),
    (["check", "d.toml", "--set", "data.train=pipe"], "is a pipe or a device"),
    (["check", "d.toml", "--set", "data.train=/dev/zero"], "is a pipe or a device"),
    (["check", "d.toml", "--set", "data.train=deep.jsonl"], "nested too deeply to be read"),
])
def test_what_no_verb_can_use_is_named_at_once(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    os.mkfifo("pipe")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("deep.jsonl").write_text(f'{{"prompt": {"[" * DEEP}{"]" * DEEP}}}\n')
    Path("deep.toml").write_text(f"a = {'[' * DEEP}{']' * DEEP}\n")
    Path("d.toml").write_text('[model]\npath = "tiny:sort"\n[data]\ntrain = "tiny:sort"\n')
    try:
        code = main(words)
    except SystemExit as ended:  # by the parser of options
        code = int(ended.code or 0)
    assert code == 2 and says in capsys.readouterr().err
