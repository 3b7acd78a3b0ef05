"""Fenced blocks of pages, and somebody who types the commands of those in `sh` or `console` into a folder of their own.

Knows nothing of what a page needs: its reader is told which files there are, what is another name here, which keys make
a run short, and which commands go on while others are typed.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from busrl.paths import SHM, RunPaths

ROOT = Path(__file__).resolve().parents[2]
REASONS = {  # a command that nobody types here, and why
    r"(python3? -m |\S*/)?pip3? install\b|python3? -m venv ": "asks a registry; `make wheels` installs what it builds",
    r"make (demo|install|test)\b": "installs the repository or runs this suite, for minutes",
    r"busrl (set|validate) \S+ --model ": "of a run of several models: tests/several/test_verbs_in_a_run.py",
    r"make vllm\b|\.venv/vllm/": "vLLM's environment, whose tests are in tests/vllm",
}
LIMIT_S = 120.0
ENDS = {"itself": {0}, "interrupted": {0, 128 + signal.SIGINT}}


@dataclass(frozen=True)
class Block:
    """A fenced block; `file` is the name that stands before it, if one does."""

    file: str
    language: str
    text: str

    def commands(self) -> list[str]:
        """Its lines without comments; none if the block is not for a shell."""
        if self.language not in ("sh", "console"):
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := re.sub(r"\s+#.*|^#.*", "", line).strip())]


def page(name: str) -> str:
    return (ROOT / name if name == "README.md" else ROOT / "docs" / name).read_text()


def blocks(name: str) -> list[Block]:
    fences = re.finditer(r"^(?:`([\w./-]+)`:\n)?```(\w*)\n(.*?)^```", page(name), flags=re.M | re.S)
    return [Block(match[1] or "", match[2], match[3]) for match in fences]


def files_of(name: str) -> dict[str, str]:
    """The files that a page shows under their names."""
    return {block.file: block.text for block in blocks(name) if block.file}


def to_type(name: str) -> Iterator[tuple[Block, list[str]]]:
    """The blocks of a page with those of their commands that are run; a block that came before is not typed again."""
    typed: set[str] = set()
    for block in blocks(name):
        commands = [command for command in block.commands() if not reason(command)]
        if set(commands) - typed:
            typed |= set(commands)
            yield block, commands


def reason(command: str) -> str:
    return next((why for pattern, why in REASONS.items() if re.match(pattern, command)), "")


class Reader:
    """Types commands in `folder`. `other_names`: what a page calls something, and what it is called here;
    `keys`: of a topology, added to each command that takes `--set`."""

    def __init__(self, folder: Path, other_names: Mapping[str, str], keys: Sequence[str]) -> None:
        self.folder, self.other_names, self.keys = folder, other_names, list(keys)
        self.beside: list[tuple[str, subprocess.Popen[str]]] = []

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(self.here(text))

    def here(self, text: str) -> str:
        for there, here in self.other_names.items():
            text = text.replace(there, here)
        return text

    def run(self, command: str) -> str:
        """Output of the command. AssertionError with its output unless it ends with 0."""
        done = subprocess.run(
            self.words(command), cwd=self.folder, env=self.environment(command), capture_output=True, text=True,
            timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def start(self, command: str, until: str) -> None:
        """Leave it running beside the next commands, which begin once the file `until` of the folder has a line."""
        begun, place = time.time(), self.folder / until
        with open(self.folder / f"beside-{len(self.beside)}.out", "w") as output:
            child = subprocess.Popen(
                self.words(command), cwd=self.folder, env=self.environment(command), stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, text=True,
            )
        self.beside.append((command, child))
        end = time.monotonic() + LIMIT_S
        while until and not (place.exists() and place.stat().st_size and place.stat().st_mtime >= begun):
            assert child.poll() is None and time.monotonic() < end, f"no {until}\n{self.printed()}"
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.1)

    def end(self, command: str, how: str) -> None:
        """End the newest process of this command: by "itself" with 0, "interrupted" here, or "stopped" already."""
        child = next(child for text, child in reversed(self.beside) if text == command)
        if how == "interrupted":
            assert child.poll() is None, f"{command} has ended already\n{self.printed()}"
            child.send_signal(signal.SIGINT)
        code = child.wait(LIMIT_S)
        assert how == "stopped" or code in ENDS[how], f"{command}: {code}\n{self.printed()}"

    def leave(self) -> None:
        """Nothing of it stays: neither a process nor shared memory."""
        for _, child in self.beside:
            if child.poll() is None:
                child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(30.0)
                child.kill()
        for run in (self.folder / "runs").glob("*"):
            (SHM / RunPaths.of(run).ring_name).unlink(missing_ok=True)

    def printed(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.folder.glob("beside-*.out")))

    def words(self, command: str) -> list[str]:
        _, words = split(self.here(command))
        program = words[0].removeprefix(".venv/bin/")
        begin = {"busrl": [sys.executable, "-m", "busrl.cli"], "python": [sys.executable]}[program]
        keys = self.keys if takes_keys(words) else []
        return [*begin, *words[1:], *(part for key in keys for part in ("--set", key))]

    def environment(self, command: str) -> dict[str, str]:
        variables, _ = split(command)
        return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **variables}


def split(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables that a command sets for itself, and its words."""
    words = shlex.split(command)
    count = next(index for index, word in enumerate(words) if not re.match(r"\w+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def takes_keys(words: Sequence[str]) -> bool:
    verb = words[1] if len(words) > 1 and words[0].endswith("busrl") else ""
    return verb in ("check", "launch", "quickstart") or (verb == "evaluate" and words[2].endswith(".toml"))

