"""A follower of the tests of a team: `python follower_program.py RANK RANKS SOCKET COLLECTIVE_S SETTINGS MORE` (JSON).

`SMALL` in the environment is the size below which adamw8bit keeps float32 states, `WRONG=count` in it lets it count one
token too many, `WRONG=facts` another version than rank 0's.
`WRONG=fails`: it fails with any samples; `WRONG=updates`: in any update. With `there` in MORE, a folder, it is on
another host, which has its copies there. `endpoint` in it: address of a teacher, and the trained model's folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from busrl.algorithms.gae import ValueSettings
from busrl.ranks.builder import TeamSettings, facts
from busrl.ranks.follower import Follower
from busrl.ranks.meeting import Away, Place
from busrl.ranks.mesh import Layout
from busrl.system import files
from busrl.teachers.base import Teacher
from busrl.teachers.endpoint import Endpoint
from busrl.teachers.several import Teachers
from busrl.topology.learner import TeacherRow
from busrl.training import optimizers
from busrl.training.model import LoraSettings
from busrl.training.settings import TrainerSettings
from busrl.training.step_stats import Tally
from busrl.training.trainer import Trainer

TEACHER_K = 3
WRONG = os.environ.get("WRONG", "")


def main(rank: int, ranks: int, file: Path, collective_s: float, settings: TrainerSettings, more: Any) -> None:
    torch.set_num_threads(1)
    optimizers.SMALL = int(os.environ.get("SMALL", optimizers.SMALL))
    known = facts("other" if WRONG == "facts" else "one")
    if WRONG == "count":
        add = Tally.add

        def miscount(tally: Tally, *micro_batch: Any) -> None:
            add(tally, *micro_batch)
            tally.tokens += 1

        Tally.add = miscount  # type: ignore[method-assign]
    if WRONG in ("fails", "updates"):
        def fail(*_: object) -> None:
            raise MemoryError(f"no memory for what {WRONG}")

        setattr(Trainer, "micro_batch" if WRONG == "fails" else "update", fail)
    team = TeamSettings(ranks, file, known, torch.device("cpu"), start_s=60, collective_s=collective_s,
                        lora=LoraSettings(**more["lora"]) if more["lora"] else None, refers=more["refers"],
                        reference=Path(more["reference"]) if more["reference"] else None,
                        layout=Layout(ranks, tensor=more["tensor"]),
                        taught=bool(more["teacher"] or more["endpoint"]), teachers=behind(*more["endpoint"]),
                        teacher=Path(more["teacher"]) if more["teacher"] else None, teacher_k=TEACHER_K)
    away = Away("gpu-0", lambda: place(file.with_suffix(".json")), Path(more["there"])) if more["there"] else None
    follower = Follower(team, settings, rank, away=away)
    while True:
        message = follower.receive(60)
        if message is not None and not follower.act(message):
            return


def behind(url: str = "", folder: str = "") -> Any:
    """A maker of the teacher at an address; None without one."""

    def made(read: Any, trained: Any, words: int, on_progress: Any, together: bool = False) -> Teachers:
        row = TeacherRow(base_url=url, patience_s=20.0, timeout_s=30.0)
        teacher: Teacher = Endpoint(row, folder, TEACHER_K, words, on_progress)
        return Teachers([("", teacher)], lambda group: "", None, together)

    return made if url else None


def place(note: Path) -> Place | None:
    """Where rank 0 is, as home's relay would say."""
    entry = files.read_map(note)
    return Place(**entry) if entry else None


if __name__ == "__main__":
    rank, ranks, file, collective_s, settings, more = sys.argv[1:]
    values = json.loads(settings)
    value = {"value": ValueSettings(**values.pop("value"))} if values.get("value") else {}
    own = TrainerSettings(**values, **value)
    main(int(rank), int(ranks), Path(file), float(collective_s), own, json.loads(more))
