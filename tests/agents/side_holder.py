"""A holder of episodes that plays nothing: it claims sides, notes them in a file, and commits or drops them at once.

    python side_holder.py RING FATES NOTES LABEL SEATS GROUP_SIZE ACCIDENTS SEED
"""

from __future__ import annotations

import os
import random
import sys

from busrl.agents.sides import ClaimedSample, Ledger, Sides
from busrl.ring import Fates, Ring, State
from busrl.states import Fate, HeaderWord, RunPhase


def main() -> None:
    name, fates, notes, label, seats, size, accidents, seed = sys.argv[1:]
    ring, chance = Ring.attach(name), random.Random(int(seed))
    table = Fates(fates)
    ring.register("agent", label)
    ring.bind_fates(table, None)
    ring.set_ready()
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    alone = list[ClaimedSample]()
    sides = Sides([Ledger(ring, table.view, tuple(seats.split(",")), int(size))], alone.append)
    seen = 0
    while ring.header(HeaderWord.RUN_STATE) == RunPhase.RUNNING:
        for sample in sides.take(chance.randint(1, 4)):
            names = ",".join(sorted([sample.seat, *sample.siblings]))
            os.write(file, f"{sample.number} {names} {int(sample in alone)}\n".encode())
            fate = Fate.REWARD_RAISED if chance.random() < float(accidents) else None
            for side in sample.ending():
                if fate is not None:
                    ring.drop(side.slot, side.word, fate)
                elif chance.random() < 0.1 and side is not sample:
                    ring.drop(side.slot, side.word, Fate.UNUSED)
                else:
                    ring.commit_segment(side.slot, side.word, True)
        seen = ring.wait(State.QUEUED, seen, 0.05)


if __name__ == "__main__":
    main()
