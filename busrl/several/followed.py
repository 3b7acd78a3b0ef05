"""The weights of a model that follows another tag: that tag's checkpoints, taken as an engine takes any folder.

Talks to the folder of checkpoints of the followed tag and to one of this process. Knows nothing of engines, episodes or
of what a checkpoint is worth. Imports torch only for a checkpoint in shards.

- A version is a step: the newest checkpoint whose step is a multiple of `every`, less `back` of them. While there are
  too few there is no version, and the engine keeps the model that it began with.
- The files are linked before they are looked at: a learner that removes the checkpoint changes nothing that is used.
- One that is torn, or gone before it is linked, is refused by name; the one before stays in use.
- The folder is looked at once a second at most.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from busrl.errors import WeightsRefused, WeightsTimeout
from busrl.ledger.trained import checkpoints_of, step_of
from busrl.paths import CHECKPOINT, RunPaths
from busrl.system.files import fault_in
from busrl.weights.base import NOTHING, FileReceiver, alive

if TYPE_CHECKING:
    from busrl.topology.schema import Follow, Topology

LOOK_S = 1.0
LISTED = "files.json"  # of a checkpoint: the size and the checksum of each of its files
MODEL, SHARDS, META = "model", "shards", "meta.json"
DRAFT = ".draft"


def receiver(topology: Topology, paths: RunPaths, name: str) -> FollowedCheckpoints:
    """The receiver of a process of a tag that follows another; `paths`: those of the tag."""
    (follow,), beside = topology.follows, paths.of_tag(topology.follows[0].model)
    led = beside if beside.root.is_dir() else RunPaths(paths.home)  # the lead has no folder among the models
    return FollowedCheckpoints(led.checkpoints, paths.followed, name, follow, more_back=topology.place_of(name))


def wanted(steps: list[int], every: int, back: int) -> int:
    """The step to play of these, newest first: a multiple of `every`, less `back` of them; -1 while there is none."""
    fitting = [step for step in steps if step and step % every == 0]
    return fitting[back] if back < len(fitting) else NOTHING[0]


class FollowedCheckpoints(FileReceiver):
    """Takes checkpoints out of `root` into a folder of the process `name` below `room`, and keeps the last."""

    kind: Literal["folder"] = "folder"

    def __init__(
        self, root: Path, room: Path, name: str, follow: Follow, *, more_back: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`more_back`: checkpoints further back than `follow` says, for one of several processes of the tag."""
        self.root, self._follow, self._back, self._clock = root, follow, follow.back + more_back, clock
        self._mine = room / f"{name.replace('/', '-')}.{os.getpid()}"
        self._seen, self._look_at = NOTHING[0], -LOOK_S
        self._last: tuple[int, int, Path] | None = None

    def newest(self) -> tuple[int, int]:
        if (now := self._clock()) >= self._look_at + LOOK_S:
            self._look_at = now
            steps = [step_of(path) for path in checkpoints_of(self.root)]
            self._seen = max(self._seen, wanted(steps, self._follow.every, self._back))
        return self._seen, self._seen

    def take(self) -> tuple[int, int, Path]:
        """The version, its step, and a folder of the model or the adapter. WeightsRefused names a checkpoint that is
        torn or gone; WeightsTimeout if there is none."""
        step, _ = self.newest()
        if step < 0:
            raise WeightsTimeout(f"{self._writer()}: no checkpoint that is a multiple of {self._follow.every} steps")
        if self._last is None or self._last[0] < step:
            self._last = step, step, self._adopt(self.root / f"{CHECKPOINT}{step}")
        return self._last

    def close(self) -> None:
        shutil.rmtree(self._mine, ignore_errors=True)

    def _writer(self) -> str:
        return f"{self.root} (of {self._follow.model})"

    def _adopt(self, checkpoint: Path) -> Path:
        """Link the files of the model, check the links, and put them in the place of those of before."""
        self._make_room()
        draft, final = self._mine / DRAFT, self._mine / checkpoint.name
        shutil.rmtree(draft, ignore_errors=True)
        try:
            listed = _linked(checkpoint, draft)
            self._reached("linked")
            if fault := fault_in(draft, listed):
                raise WeightsRefused(f"{checkpoint} is damaged: {fault}")
            if (draft / SHARDS).is_dir():
                _put_together(draft)
        except (OSError, ValueError, TypeError, AttributeError) as problem:
            shutil.rmtree(draft, ignore_errors=True)
            text = f"it cannot be read: {problem}"
            if not checkpoint.is_dir():
                text = "it was removed before it was read; learner.keep_last says how many are kept"
            raise WeightsRefused(f"{checkpoint} of {self._follow.model} is not played: {text}") from problem
        shutil.rmtree(final, ignore_errors=True)
        os.rename(draft, final)
        for other in self._mine.iterdir():
            if other != final:
                shutil.rmtree(other, ignore_errors=True)
        return final / MODEL

    def _make_room(self) -> None:
        """Make this process's folder, and remove those of its predecessors that died."""
        if self._mine.is_dir():
            return
        self._mine.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._mine.parent.glob(f"{self._mine.stem}.*"):
            if alive(path.name.rpartition(".")[2]) == "dead":
                shutil.rmtree(path, ignore_errors=True)
        self._mine.mkdir(mode=0o700)


def _linked(checkpoint: Path, draft: Path) -> dict[str, list[int]]:
    """Give the files of a checkpoint's model second names below `draft`; returns their sizes and checksums."""
    every: dict[str, list[int]] = json.loads((checkpoint / LISTED).read_bytes())
    listed = {name: entry for name, entry in every.items() if name == META or name.split("/")[0] in (MODEL, SHARDS)}
    for name in listed:
        (draft / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.link(checkpoint / name, draft / name)
        except FileNotFoundError:
            raise
        except OSError:  # no hard links
            shutil.copyfile(checkpoint / name, draft / name)
    return listed


def _put_together(draft: Path) -> None:
    """Write the model of a checkpoint in shards in the place of its shell."""
    from busrl.training.checkpoint import export_checkpoint

    whole = draft / "whole"
    whole.mkdir()
    export_checkpoint(draft, whole)
    shutil.rmtree(draft / MODEL)
    whole.rename(draft / MODEL)
    shutil.rmtree(draft / SHARDS)
