"""A keeper's desk on a real ring, and the requests of two workers that take one sample from QUEUED to REWARDED.

Run as a program (`python on_a_ring.py FOLDER`) it is a keeper that a test may kill at a crash point.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from in_memory import answer_to, batch_of, settings

from busrl.hosts import messages as g
from busrl.hosts.desk import Desk
from busrl.hosts.ledgers import EpisodeBounds, RingLedger
from busrl.protocol import messages as m
from busrl.ring import Fates, Ring
from busrl.roles.answers import SegmentCuts
from busrl.scheduling.admission import SegmentPlan
from busrl.system.clocks import Tally

LEASE_S = 10.0
CUTS = SegmentCuts(SegmentPlan(3, 3, 8))


class Keeper:
    """One life of a keeper; `bells` are the doorbells that it rang."""

    def __init__(self, folder: Path, episodes: EpisodeBounds | None = None) -> None:
        self.ring = Ring.attach(str(folder / "ring"))
        self.ring.register("keeper", "keeper")
        self.fates = [Fates(str(folder / name), create=True, capacity=1 << 16) for name in ("f.bin", "v.bin")]
        self.ring.bind_fates(*self.fates)
        self.bells: list[m.Message] = []
        self.ledger = RingLedger(self.ring, self.bells.append, CUTS, 16, 0, episodes)
        self.desk = Desk(self.ledger, Tally(), 0.0, **settings(LEASE_S))
        self.now = 0.0

    def ask(self, sender: str, message: g.Remote) -> list[m.Message]:
        message.sender = sender
        return self.desk.handle(message, self.now)

    def claim(self, sender: str, **fields: object) -> list[g.Task]:
        answers = self.ask(sender, g.RemoteClaim(life=1, **{"capacity": 1, **fields}))  # type: ignore[arg-type]
        return [task for answer in answers for task in answer.tasks]  # type: ignore[attr-defined]

    def pass_lease(self) -> list[str]:
        """Let a lease pass in which no worker extends; returns the tasks that were taken back."""
        back = []
        for _ in range(int(LEASE_S) + 1):
            self.now += 1.0
            back += [lease.claim.task for lease in self.desk.tick(self.now)]
        return back

    def close(self) -> None:
        self.ring.close()


def play(keeper: Keeper) -> list[str]:
    """All requests of both workers, as they would send them again after a keeper's death; the codes of results."""
    codes = []
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    for task in keeper.claim("gen"):
        [answer] = keeper.ask("gen", answer_to(task.task))
        codes.append(answer.code)  # type: ignore[attr-defined]
    keeper.ask("judge", g.RemoteJoin(life=1, role="reward"))
    for task in keeper.claim("judge"):
        [answer] = keeper.ask("judge", g.RemoteRewarded(life=1, task=task.task, reward=0.5, parts={"half": 0.5}))
        codes.append(answer.code)  # type: ignore[attr-defined]
    for name in ("gen", "judge"):
        keeper.ask(name, g.RemoteLeave(life=1))
    return codes


def play_host(keeper: Keeper) -> list[str]:
    """The same by a host that generates and judges; what became of each task."""
    keeper.ask("gpu-0", g.RemoteJoin(life=1, role="host"))
    tasks = [task.task for task in keeper.claim("gpu-0", capacity=4)]
    if not tasks:
        return []
    rewards, parts = [0.5] * len(tasks), [{"half": 0.5}] * len(tasks)
    settled, _ = keeper.ask("gpu-0", batch_of(tasks, rewards=rewards, parts=parts, capacity=1))
    return ["done"] * len(settled.done) + ["late"] * len(settled.late)  # type: ignore[attr-defined]


def play_full(folder: Path) -> None:
    """A host and a worker send answers while a /dev/shm of this process's own is full, and again when there is room."""
    Ring.create(str(folder / "ring"), slots=4, slot_bytes=1 << 18, processes=8, uuid=bytes(16))
    keeper = Keeper(folder)
    for uid in range(3):
        assert keeper.ring.dispatch(
            uid=uid, group=0, admission=0, member=uid, group_size=3, cls=0, task=b"{}", prompt_crc=uid,
            max_new_tokens=8, temperature=1.0, version=0, step=0,
        )
    keeper.ask("gpu-0", g.RemoteJoin(life=1, role="host"))
    tasks = [task.task for task in keeper.claim("gpu-0", capacity=2)]
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    [alone] = keeper.claim("gen", capacity=1)
    long, filler = "x" * 100_000, Path("/dev/shm/filler")
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    for _ in range(2):
        [settled] = keeper.ask("gpu-0", batch_of(tasks, texts=[long, long]))
        assert not (settled.done or settled.late or settled.refused), settled  # type: ignore[attr-defined]
        assert "/dev/shm" in keeper.desk.paused, keeper.desk.paused
        assert keeper.ask("gen", answer_to(alone.task, text=long)) == [] and keeper.desk.paused
        [renewed] = keeper.ask("gen", g.RemoteExtend(life=1, holding=[alone.task]))
        assert not renewed.lost, "it is still claimed"  # type: ignore[attr-defined]
    filler.unlink()
    assert keeper.ask("gen", answer_to(alone.task, text=long))[0].code == "done"  # type: ignore[attr-defined]
    [settled] = keeper.ask("gpu-0", batch_of(tasks, texts=[long, long]))
    assert settled.done == tasks and not keeper.desk.paused, settled  # type: ignore[attr-defined]
    assert keeper.desk.tally.workers["gpu-0"]["paused"] == 4


if __name__ == "__main__":
    if sys.argv[2] == "full":
        play_full(Path(sys.argv[1]))
    else:
        {"workers": play, "host": play_host}[sys.argv[2]](Keeper(Path(sys.argv[1])))
