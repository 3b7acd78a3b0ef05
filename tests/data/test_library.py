"""Kept answers of transformers about tokenizers: what they depend on, what is read for them, and how they are replaced.

A package in the place of transformers answers at once, and counts how often it is asked; the processes are real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from busrl.data.library import KEPT_BYTES, READ_BYTES

ROOT = Path(__file__).parents[2]
STUB = """
import json
from pathlib import Path

class AutoTokenizer:
    @staticmethod
    def from_pretrained(folder, local_files_only):
        with open(Path(__file__).parent.parent / "asked", "a") as file:
            file.write("x")
        return AutoTokenizer()

    backend_tokenizer = property(lambda self: self)

    def to_str(self):
        return json.dumps({"answer": "so"})
"""
ASKING = """
import os, sys
from pathlib import Path
from busrl.data.library import library_tokenizer
opened = set()
sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
print(library_tokenizer(Path(sys.argv[1])), sorted(os.path.basename(p) for p in opened if p.startswith(sys.argv[1])))
"""
ANSWER, TOKENIZER = '{"answer": "so"}', "['tokenizer.json']"


class Place:
    """A model folder, a cache, and an installation with transformers in it."""

    def __init__(self, root: Path) -> None:
        self.folder, self.packages, self.cache = root / "model", root / "packages", root / "cache"
        self.library = self.packages / "transformers"
        for folder in (self.folder, self.library):
            folder.mkdir(parents=True)
        (self.folder / "tokenizer.json").write_text("{}")
        (self.library / "__init__.py").write_text(STUB)
        (self.library / "tokenization_base.py").write_text("")
        self.install("transformers", "9.0.dev0")

    def install(self, name: str, version: str) -> Path:
        (about := self.packages / f"{name}-{version}.dist-info").mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return about

    @property
    def kept(self) -> list[Path]:
        return sorted((self.cache / "busrl" / "tokenizers").glob("*"))

    def ask(self) -> tuple[str, str, int]:
        """The answer in a new process, the files of the folder that it opened, and how often transformers was asked."""
        (count := self.packages / "asked").write_text("")
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.cache), "PYTHONPATH": f"{self.packages}:{ROOT}"}
        done = subprocess.run([sys.executable, "-c", ASKING, str(self.folder)], capture_output=True, text=True,
                              timeout=60, env=environment)
        assert done.returncode == 0, done.stderr
        answer, _, opened = done.stdout.strip().partition("} ")
        return answer + "}", opened, len(count.read_text())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def sparse(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


def test_weights_of_any_name_are_not_read_for_a_tokenizer(place: Place) -> None:
    for name in ("rust_model.ot", "model.safetensors.part", "state.distcp", "weights"):
        sparse(place.folder / name, 1 << 20)
    assert [place.ask(), place.ask()] == [(ANSWER, TOKENIZER, 1), (ANSWER, TOKENIZER, 0)]


def test_a_folder_of_too_many_bytes_is_asked_each_time(place: Place) -> None:
    sparse(place.folder / "words.txt", READ_BYTES)
    assert [place.ask(), place.ask()] == [(ANSWER, "[]", 1)] * 2 and not place.kept


def test_a_damaged_answer_is_asked_again_and_replaced(place: Place) -> None:
    place.ask()
    (kept,) = place.kept
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-3], whole.replace(b"so", b"no"), whole.partition(b"\n")[2]):
        kept.write_bytes(damaged)
        assert place.ask() == (ANSWER, TOKENIZER, 1) and kept.read_bytes() == whole


@pytest.mark.parametrize("name", ["sentencepiece", "tiktoken", "mistral_common"])
def test_a_package_that_tokenizers_are_made_with_makes_the_answer_another(place: Place, name: str) -> None:
    place.ask()
    place.install(name, "77.1")
    assert [place.ask()[2], place.ask()[2]] == [1, 0]


def test_an_editable_transformers_is_asked_again_when_its_code_changes(place: Place) -> None:
    about = place.packages / "transformers-9.0.dev0.dist-info"
    (about / "direct_url.json").write_text('{"url": "file:///clone", "dir_info": {"editable": true}}')
    assert [place.ask()[2], place.ask()[2]] == [1, 0]
    os.utime(place.library / "tokenization_base.py", (1, 1))
    assert [place.ask()[2], place.ask()[2]] == [1, 0]


def test_the_answer_used_longest_ago_makes_room_and_dead_drafts_go(place: Place) -> None:
    place.ask()
    (used,) = place.kept
    os.utime(used, (2, 2))
    sparse(idle := used.with_name("idle.kept"), KEPT_BYTES - 100)
    os.utime(idle, (3, 3))
    (draft := used.with_name("other.kept.0123.new")).write_text("half")
    os.utime(draft, (4, 4))
    (draft_of_now := used.with_name("other.kept.4567.new")).write_text("half")
    assert place.ask()[2] == 0, "it is used now, after the idle one"
    (place.folder / "tokenizer.json").write_text("{ }")
    assert place.ask()[2] == 1
    assert {used, draft_of_now} < set(place.kept) and len(place.kept) == 3
