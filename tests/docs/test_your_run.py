"""The user's guide is followed to the letter: its files are written, its commands and snippets run, on a tiny model."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout

import pytest
from chat_folders import make
from command_blocks import ROOT, Reader, blocks, files_of, page, to_type

from busrl.cli.command import main
from busrl.ledger.trained import step_lines
from busrl.paths import RunPaths
from busrl.system.files import read_map

pytestmark = pytest.mark.long  # a whole run

NAME = "your-run.md"
PAGE = page(NAME)
# Only what makes a run of a tiny model short; no key that the page is about.
SHORT = ["learner.trigger.n_min=2", "generation.max_new_tokens=8", "validation.samples=4", "limits.idle_groups=0"]
STEPS = {"max_steps = 200": "max_steps = 2", "max_steps=300": "max_steps=3", "global_step_300": "global_step_3"}


class Follower(Reader):
    """Types all but `launch` in this process, which has loaded what they need."""

    def run(self, command: str) -> str:
        words = self.words(command)[3:]
        if words[0] == "launch":
            return super().run(command)
        told = io.StringIO()
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            with redirect_stdout(told):
                assert main(words) == 0, f"{command}\n{told.getvalue()}"
        finally:
            os.chdir(before)
        return told.getvalue()

    def python(self, text: str) -> str:
        command = [sys.executable, "-c", text]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Follower, dict[str, str]]]:
    """Every command of the page in its order, with what it printed."""
    folder = tmp_path_factory.mktemp("your-run")
    model = make(folder / "model", positions=2048)  # the prompts of `busrl init` are long
    someone = Follower(folder, {"/models/my-model": str(model), **STEPS}, SHORT)
    someone.write(files_of(NAME))
    try:
        yield someone, {command: someone.run(command) for _, commands in to_type(NAME) for command in commands}
    finally:
        someone.leave()


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
    reward, table = (block.text for block in blocks(NAME) if block.language == "python" and not block.file)
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
    reference = "\n".join(path.read_text() for path in (ROOT / "configs").glob("reference*.toml"))
    sections = set(re.findall(r"^#?\[+([\w.]+)\]", reference, re.M))
    known = {f"{section}.{key}" for section, key in _keys(reference)}
    for key in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)(?: =[^`]*)?`", page(f"{name}.md")):
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
