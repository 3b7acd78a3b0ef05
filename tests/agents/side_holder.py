"""A holder of episodes that plays nothing: it claims sides, notes them in a file, and commits or drops them at once.

    python side_holder.py NOTES LABEL GROUP_SIZE ACCIDENTS SEED RING=FATES=SEATS...
"""

from __future__ import annotations

import os
import random
import sys

from side_scene import ledger_of

from busrl.agents.sides import Sides
from busrl.ring import Fates, Ring, State
from busrl.roles.ledgers import Ledger
from busrl.states import Fate, HeaderWord, RunPhase


def attached(name: str, fates: str, seats: str, label: str, size: int) -> Ledger:
    ring, table = Ring.attach(name), Fates(fates)
    ring.register("agent", label)
    ring.bind_fates(table, None)
    ring.set_ready()
    return ledger_of(ring, table, tuple(seats.split(",")), size)


def main() -> None:
    notes, label, size, accidents, seed, *ledgers = sys.argv[1:]
    chance = random.Random(int(seed))
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    sides = Sides([attached(*ledger.split("="), label, int(size)) for ledger in ledgers])
    ring, seen = sides.rings[0], 0
    while ring.header(HeaderWord.RUN_STATE) != RunPhase.STOPPING:
        for sample in sides.take(chance.randint(1, 4)):
            names = ",".join(sorted([sample.seat, *sample.siblings]))
            os.write(file, f"{sample.number} {names} {int(sample.alone)}\n".encode())
            fate = Fate.REWARD_RAISED if chance.random() < float(accidents) else None
            for side in sample.ending():
                assert side.ring is not None
                if fate is not None:
                    side.ring.drop(side.slot, side.word, fate)
                elif chance.random() < 0.1 and side is not sample:
                    side.ring.drop(side.slot, side.word, Fate.UNUSED)
                else:
                    side.ring.commit_segment(side.slot, side.word, True)
        seen = ring.wait(State.QUEUED, seen, 0.05)


if __name__ == "__main__":
    main()
