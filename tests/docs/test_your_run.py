"""The user's guide is followed to the letter: its files are written, its commands and snippets run, on a tiny model."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from busrl.cli.command import main
from busrl.ledger.trained import step_lines
from busrl.paths import SHM, RunPaths
from busrl.system.files import read_map

pytestmark = pytest.mark.long  # a whole run

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "your-run.md").read_text()
# Only what makes a run of a tiny model short; no key that the page is about.
SHORT = ["learner.trigger.n_min=2", "generation.max_new_tokens=8", "validation.samples=4", "limits.idle_groups=0"]
STEPS = {"200": "2", "300": "3"}  # of the page, and of the test
LIMIT_S = 150.0


def blocks(language: str) -> list[str]:
    """Fenced blocks without a file's name before them."""
    return [text for name, kind, text in fences() if kind == language and not name]


def fences() -> Iterator[tuple[str, str, str]]:
    for match in re.finditer(r"(?:`([\w.-]+)`:\n)?```(\w*)\n(.*?)```", PAGE, re.S):
        yield match[1] or "", match[2], match[3]


class Follower:
    """Somebody who does what the page says, in a folder of his own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        for name, _, text in fences():
            if name:
                (folder / name).write_text(self.own(text))

    def own(self, text: str) -> str:
        """The page's model and numbers of steps as they are here."""
        text = text.replace("/models/my-model", str(self.model))
        for page, here in STEPS.items():
            text = re.sub(rf"(max_steps ?= ?|global_step_){page}\b", rf"\g<1>{here}", text)
        return text

    def run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def busrl(self, line: str) -> str:
        words = shlex.split(self.own(line))
        assert words[0] == "busrl"
        takes_keys = words[1] in ("check", "launch") or (words[1] == "evaluate" and words[2].endswith(".toml"))
        more = [part for key in SHORT for part in ("--set", key)] if takes_keys else []
        if words[1] == "launch":
            return self.run([sys.executable, "-m", "busrl.cli", *words[1:], *more])
        told = io.StringIO()  # the others in this process, which has loaded what they need
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            with redirect_stdout(told):
                assert main([*words[1:], *more]) == 0, f"{line}\n{told.getvalue()}"
        finally:
            os.chdir(before)
        return told.getvalue()

    def python(self, text: str) -> str:
        return self.run([sys.executable, "-c", text])


@pytest.fixture(scope="module")
def followed(
    tmp_path_factory: pytest.TempPathFactory, chat_folder: Callable[..., Path]
) -> Iterator[tuple[Follower, dict[str, str]]]:
    """Every command of the page in its order, with what it printed."""
    someone = Follower(tmp_path_factory.mktemp("your-run"), chat_folder("chatml"))
    told = {}
    try:
        for line in "".join(blocks("sh")).splitlines():
            told[line] = someone.busrl(line)
        yield someone, told
    finally:
        paths = RunPaths.of(someone.folder / "runs" / "my")
        with suppress(OSError):
            (SHM / paths.ring_name).unlink()


def test_every_command_of_the_page_works_and_its_run_goes_on(followed: tuple[Follower, dict[str, str]]) -> None:
    someone, told = followed
    text = "\n".join(told.values())
    assert "finished, the learner has reached the goal" in text
    assert "changed since the last start: run.max_steps 2 → 3" in text
    assert "continues after step 2 of 3" in text and text.count("mean reward") == 3
    paths = RunPaths.of(someone.folder / "runs" / "my")
    assert read_map(paths.summary)["steps"] == 3 and not read_map(paths.summary)["audit"]["findings"]
    assert (paths.checkpoints / "global_step_3" / "model" / "tokenizer.json").is_file()


def test_the_snippets_of_the_page_work(followed: tuple[Follower, dict[str, str]]) -> None:
    someone, _ = followed
    reward, table = blocks("python")
    assert someone.python(reward).strip() == "{'right': 1.0, 'shape': 0.1} {'right': 0.0, 'shape': 0.0}"
    someone.python(table)
    head, *rows = (someone.folder / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3 and {"step", "reward", "entropy", "seconds"} <= set(head.split(","))


def test_the_ten_numbers_stand_in_the_files(followed: tuple[Follower, dict[str, str]]) -> None:
    someone, _ = followed
    paths = RunPaths.of(someone.folder / "runs" / "my")
    section = PAGE[PAGE.index("## Ten numbers") : PAGE.index("## Stopping, continuing, changing")]
    named = re.findall(r"^\| `([\w/]+)`", section, re.M)
    assert len(named) == 10
    rows = step_lines(paths.metrics)
    rounds = json.loads(paths.validation.read_text().splitlines()[0])
    assert {name for name in named if "/" not in name} <= set(rows[0]) and {n for n in named if "/" in n} <= set(rounds)


@pytest.mark.parametrize("name", ["your-run", "prompts", "memory", "ranks"])
def test_every_key_of_a_page_is_one(name: str) -> None:
    reference = "\n".join(path.read_text() for path in (Path(__file__).parents[2] / "configs").glob("reference*.toml"))
    sections = set(re.findall(r"^#?\[+([\w.]+)\]", reference, re.M))
    known = {f"{section}.{key}" for section, key in _keys(reference)}
    for key in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)(?: =[^`]*)?`", (DOCS / f"{name}.md").read_text()):
        section = key.rpartition(".")[0]
        if section in sections and not key.endswith((".json", ".jsonl")):
            assert key in known, key


def _keys(text: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in text.splitlines():
        if match := re.match(r"#?\[+([\w.]+)\]", line):
            section = match[1]
        elif match := re.match(r"#?(\w+) = ", line):
            yield section, match[1]
