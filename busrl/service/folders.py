"""Every name of a service in its run directory, and what is saved there under a client's name.

Used by door and tuner. Talks to the file system. Knows nothing of HTTP, bodies or tensors.

- A folder appears whole or not at all: the tuner writes it with `whole_directory` of checkpoints.
- The number of a snapshot is never used again, so a folder of that name is always the same weights.
- A folder's description lists its files with their sizes and checksums. A state that differs from it is set aside, for
  people to look at, and never read again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from busrl.system.files import fault_in

META = "about.json"
STATES_KEPT = 2
DAMAGED = "damaged-"  # begins the name of a state that was set aside


class ServiceFolders:
    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / "service"
        self.requests, self.answers = self.root / "requests", self.root / "answers"
        self.samples = self.root / "samples"  # answers to requests for samples
        self.executing = self.root / "executing"  # what the tuner is at, and how many tuners died of it
        self.models_shown, self.clients_shown = self.root / "models.json", self.root / "clients.json"  # for people
        self.trash = self.root / "trash"  # saved weights on their way out
        self.states, self.snapshots, self.saved = (self.root / name for name in ("states", "snapshots", "saved"))

    def snapshot(self, number: int) -> Path:
        return self.snapshots / str(number)

    def saved_as(self, model: str, kind: str, name: str) -> Path:
        """The folder of a client's saved weights: `kind` is weights, sampler_weights or external_weights."""
        return self.saved / on_disk(model) / kind / name

    def states_of(self, model: str) -> list[tuple[int, Path]]:
        """The whole states of a model, by the number of the last request in it, ascending."""
        folder = self.states / on_disk(model)
        present = folder.iterdir() if folder.is_dir() else ()
        return sorted((int(path.name), path) for path in present if path.name.isdigit())

    def state(self, model: str, number: int) -> Path:
        return self.states / on_disk(model) / str(number)

    def drop_old_states(self, model: str) -> None:
        for _, path in self.states_of(model)[:-STATES_KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def numbers_of_snapshots(self) -> list[int]:
        present = self.snapshots.iterdir() if self.snapshots.is_dir() else ()
        return sorted(int(path.name) for path in present if path.name.isdigit())


def on_disk(name: str) -> str:
    return name.replace(":", "_")


def about(path: Path) -> dict[str, Any] | None:
    """The description of a folder; None if there is no such folder, or its description cannot be read."""
    try:
        described: dict[str, Any] = json.loads((path / META).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return described


def fault_of(path: Path) -> str:
    """Say what is wrong with a folder; "" if it is as it was written."""
    described = about(path)
    if described is None:
        return f"{META} cannot be read"
    return fault_in(path, described.get("files", {})) or ""


def set_aside(path: Path) -> Path:
    """Give a damaged folder another name, under which nobody looks for it."""
    aside = path.with_name(f"{DAMAGED}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
