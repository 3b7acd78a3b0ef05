"""What a user can get wrong is one message with place, value, rule and remedy, before anything is started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import own
import pytest
from commands import busrl
from harness import ROOT, Run

from busrl.cli import main

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything in order; each case spoils a copy of it."""
    return own.make_all(tmp_path_factory.mktemp("good") / "mine", "gpt2").parent


def replaced(old: str, new: str, name: str = "own.toml") -> Change:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def line_seven(text: str) -> Change:
    def change(folder: Path) -> None:
        lines = (folder / "prompts.jsonl").read_text().splitlines()
        lines[6] = text
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")

    return change


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


LONG = json.dumps({"question": "q" * 5000, "wanted": ""})
SYNC = 'n_min = 8\nt_max_s = 0.1\n[weights]\nmode = "sync"'
CASES: dict[str, tuple[Change, list[str]]] = {
    "a wrong type": (
        replaced("n_min = 8", 'n_min = "many"'), ["own.toml:19:", "n_min", '"many"', "a whole number", "default is 32"]
    ),
    "an unknown key": (
        replaced("policy", "polcy"), ["own.toml:15:", "polcy: unknown key in [scheduler]; did you mean policy?"]
    ),
    "an impossible combination": (
        replaced("n_min = 8", SYNC), ["own.toml:20:", "t_max_s = 0.1", 'mode = "sync"', "not by time", "t_max_s = inf"]
    ),
    "no model folder": (
        lambda folder: shutil.rmtree(folder / "model"), ["own.toml:5:", "mine/model", "no such folder", "hf download"]
    ),
    "a reward that can not be imported": (
        replaced("def score", "import nothing_of_the_kind\n\n\ndef score", "judge.py"),
        ["own.toml:22:", "reward.function", "No module named 'nothing_of_the_kind'", "judge.py:5"],
    ),
    "a reward that is not there": (
        replaced("judge.py:score", "judge.py:scor"), ["own.toml:22:", "has no 'scor'", "it has score"]
    ),
    "a prompt longer than its slot": (
        both(line_seven(LONG), replaced("[groups]", "[ring]\nslot_bytes = 4096\n[groups]")),
        ["prompts.jsonl:7:", "5030 bytes", "ring.slot_bytes = 4096", "own.toml:15:", "1 of the 64 prompts"],
    ),
    "a broken line of the prompts": (
        line_seven('{"question": "abc'), ["prompts.jsonl:7:", '{"question": "abc', "not JSON", "one complete JSON"]
    ),
    "a line without the prompt's key": (
        line_seven('{"text": "abc"}'), ["prompts.jsonl:7:", "keys ['text']", "'question' is missing (data.prompt_key)"]
    ),
    "half a topology": (replaced("size = 4", "size = = 4"), ["own.toml:10:", "size = = 4", "not TOML"]),
    "a model that can not be read": (
        lambda folder: (folder / "model" / "config.json").write_text("{"), ["config.json:", "not a JSON object"]
    ),
}


def cut_weights(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def from_source(folder: Path, name: str, more: str = "") -> None:
    text = (folder / "own.toml").read_text().replace('train = "prompts.jsonl"\n', "")
    (folder / "own.toml").write_text(f'{text}[[data.source]]\npath = "{name}"\n{more}')


def damaged_parquet(folder: Path) -> None:
    """Prompts in a Parquet file of two groups of rows, the second of which is damaged."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    path = folder / "prompts.parquet"
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=32, compression="none")
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    data, begin = bytearray(path.read_bytes()), column.dictionary_page_offset or column.data_page_offset
    data[begin : begin + 24] = bytes(range(200, 224))
    path.write_bytes(data)
    from_source(folder, "prompts.parquet")


CASES |= {
    "weights that were cut": (cut_weights, ["model.safetensors: it has ", "bytes, and its header says", "copy the"]),
    "a damaged group of rows": (damaged_parquet, ["prompts.parquet: row 33: rows 33 to 64 cannot be read", "copy the"]),
    "a hostile condition": (
        lambda folder: from_source(folder, "prompts.jsonl", "where = '__import__(\"os\").abort()'"),
        ["is not understood: conditions are COLUMN"],
    ),
}


def arguments(verb: str, folder: Path) -> list[str]:
    return [verb, str(folder / "own.toml"), *(["--run-dir", str(folder / "run")] if verb == "launch" else [])]


def refused(done: subprocess.CompletedProcess[str], texts: list[str]) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("busrl: ") == 1, done.stderr
    assert done.stdout == ""
    for text in texts:
        assert text in done.stderr, done.stderr


def spoilt(good: Path, tmp_path: Path, case: str) -> Path:
    folder = tmp_path / "mine"
    shutil.copytree(good, folder)
    CASES[case][0](folder)
    return folder


@pytest.mark.parametrize("verb", ["check", "launch"])
@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_starts(
    case: str, verb: str, good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line in this process: a start of Python for each of these costs more than all that is tested."""
    folder = spoilt(good, tmp_path, case)
    monkeypatch.chdir(ROOT)
    code = main(arguments(verb, folder))
    said = capfd.readouterr()
    refused(subprocess.CompletedProcess([], code, said.out, said.err), CASES[case][1])
    assert not (folder / "run").exists() and Run(folder / "run").leftovers() == []


@pytest.mark.parametrize("verb", ["check", "launch"])
def test_a_process_of_its_own_refuses_the_same_way(verb: str, good: Path, tmp_path: Path) -> None:
    case = "a reward that can not be imported"
    folder = spoilt(good, tmp_path, case)
    command = [sys.executable, "-m", "busrl.cli", *arguments(verb, folder)]
    refused(subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=90), CASES[case][1])
    assert not (folder / "run").exists() and Run(folder / "run").leftovers() == []


def test_a_run_directory_that_is_a_file_is_refused(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(good, folder)
    (folder / "run").write_text("mine")
    refused(busrl(*arguments("launch", folder), cwd=ROOT), ["--run-dir", "File exists", "give a path"])
    assert (folder / "run").read_text() == "mine"


def test_a_socket_directory_with_too_long_a_name_is_refused(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(good, folder)
    long = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / ("d" * 100))}
    done = busrl(*arguments("launch", folder), cwd=ROOT, env=long)
    refused(done, ["pub.sock", "the kernel allows 107", "set XDG_RUNTIME_DIR"])
    assert Run(folder / "run").leftovers() == []
