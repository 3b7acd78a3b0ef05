"""A follower of the tests of a team: `python follower_program.py RANK RANKS SOCKET COLLECTIVE_S SETTINGS(JSON)`.

`WRONG=count` in the environment lets it count one token too many, `WRONG=facts` another version than rank 0's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from busrl.training.team import Follower, TeamSettings, facts
from busrl.training.trainer import Trainer, TrainerSettings

WRONG = os.environ.get("WRONG", "")


def main(rank: int, ranks: int, file: Path, collective_s: float, settings: TrainerSettings) -> None:
    torch.set_num_threads(1)
    known = facts("other" if WRONG == "facts" else "one")
    if WRONG == "count":
        Trainer.counted = property(lambda self: self._tokens + 1)  # type: ignore[method-assign, assignment]
    team = TeamSettings(ranks, file, known, torch.device("cpu"), start_s=60, collective_s=collective_s)
    follower = Follower(team, settings, rank)
    while True:
        message = follower.hear(60)
        if message is not None and not follower.act(message):
            return


if __name__ == "__main__":
    rank, ranks, file, collective_s, settings = sys.argv[1:]
    main(int(rank), int(ranks), Path(file), float(collective_s), TrainerSettings(**json.loads(settings)))
