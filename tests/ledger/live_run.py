"""A run in one process, as fast as it can: dispatches, drops, re-rolls, trains, checkpoints and frees slots in the
order that the ledger prescribes, on a ring of raw bytes. Started by a test as `python live_run.py RUN_DIR`; it ends
when its standard input does."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import random
import select
import shutil
import struct
import sys
from pathlib import Path

import msgspec
import numpy as np
from fake_run import LINE_OFF, STATES, FakeRun

from busrl.ledger.trained import TrainedSet, TrainLine
from busrl.ledger.wal import Wal
from busrl.system.files import LineFile

LINE = np.dtype(
    {
        "names": ["word", "uid", "group", "claim", "cls", "member", "size", "crc"],
        "formats": ["<u8", "<u8", "<u8", "<u8", "<u4", "<u2", "<u2", "<u4"],
        "offsets": [0, 8, 16, 0x28, 0x48, 0x50, 0x52, 0x70],
        "itemsize": 128,
    }
)


class LiveRun:
    """Every store is one aligned write into a shared mapping, in program order."""

    def __init__(self, root: Path) -> None:
        self.run = FakeRun(root, slots=24, prompts=5)
        self.run.empty_ring()
        self.run.save()
        self.random = random.Random(7)
        self.ring = np.frombuffer(self._map(root / "ring.bin"), LINE, self.run.slots, LINE_OFF)
        self.fates = np.frombuffer(self._map(root / "fates.bin", 1 << 22), np.uint8)
        self.wal, self.train_log = Wal(root / "wal", sync=False, segment_bytes=20_000), LineFile(root / "train.jsonl")
        self.trained = TrainedSet()
        self.draw = self.step = 0
        self.groups: dict[int, dict[int, int]] = {}  # draw -> member's uid -> slot; a dropped member's slot is -1

    def _map(self, path: Path, size: int = 0) -> mmap.mmap:
        with path.open("r+b") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), 0)

    def move(self, slot: int, state: str, *, new_seq: bool = False, owner: int = 0) -> None:
        seq = (int(self.ring["word"][slot]) & (1 << 36) - 1) + new_seq
        self.ring["word"][slot] = STATES[state] << 58 | owner << 44 | seq

    def dispatch(self, uid: int) -> int:
        slot = int(np.flatnonzero(self.ring["word"] >> np.uint64(58) == 0)[0])
        self.move(slot, "RESERVED", new_seq=True, owner=1)
        self.ring["uid"][slot] = (1 << 64) - 1
        for name, value in (
            ("group", uid // self.run.size // 2), ("member", uid % self.run.size), ("size", self.run.size),
            ("cls", 0), ("crc", self.run.crc(uid)), ("claim", int(self.ring["word"][slot]) & (1 << 36) - 1),
        ):
            self.ring[name][slot] = value
        self.ring["uid"][slot] = uid
        self.fates[uid] = ord("D")
        self.move(slot, "QUEUED")
        return slot

    def free(self) -> int:
        return int((self.ring["word"] >> np.uint64(58) == 0).sum())

    def open_group(self) -> None:
        self.groups[self.draw] = {uid: self.dispatch(uid) for uid in self.run.group(self.draw)}
        self.draw += 1

    def advance(self, slot: int) -> None:
        order = ["QUEUED", "GENERATING", "GENERATED", "REWARDING", "REWARDED"]
        state = order.index(next(name for name, code in STATES.items() if code == int(self.ring["word"][slot]) >> 58))
        if state < 4:
            self.move(slot, order[state + 1], new_seq=state % 2 == 0, owner=(state % 2 == 0) * 2)

    def drop(self, draw: int, uid: int, reason: str) -> None:
        slot = self.groups[draw][uid]
        self.move(slot, "DROPPED", owner=ord(reason))
        self.fates[uid] = ord(reason)
        self.move(slot, "FREE", new_seq=True)
        del self.groups[draw][uid]
        if reason == "P" and uid // self.run.size % 2 == 0:
            self.groups[draw][uid + self.run.size] = self.dispatch(uid + self.run.size)

    def ready(self) -> list[int]:
        done = STATES["REWARDED"]
        return [
            d
            for d, group in self.groups.items()
            if all(int(self.ring["word"][s]) >> 58 == done for s in group.values())
        ]

    def train(self, draws: list[int]) -> None:
        slots = {uid: slot for draw in draws for uid, slot in self.groups.pop(draw).items()}
        self.step += 1
        for slot in slots.values():
            self.move(slot, "TRAINING", new_seq=True, owner=3)
        record = self.run.record(self.step, slots)
        self.wal.append(record)
        for uid, slot in slots.items():
            self.fates[uid] = ord("T")
            self.move(slot, "FREE", new_seq=True)
        self.trained.add(slots)
        self.train_log.append(msgspec.json.encode(TrainLine.of(record)))
        if self.step % 5 == 0:
            self.checkpoint()

    def checkpoint(self) -> None:
        folder = self.run.root / "checkpoints"
        temporary = folder / "next"
        temporary.mkdir(parents=True)
        self.trained.save(temporary / "trained.bin")
        (temporary / "meta.json").write_text(json.dumps({"step": self.step, "samples": len(self.trained)}))
        temporary.rename(folder / f"global_step_{self.step}")
        self.wal.drop_before(self.step + 1)
        shutil.rmtree(folder / f"global_step_{self.step - 10}", ignore_errors=True)

    def turn(self) -> None:
        if self.free() >= 2 * self.run.size:
            self.open_group()
        draw = self.random.choice(list(self.groups))
        uid, slot = self.random.choice(list(self.groups[draw].items()))
        luck = self.random.random()
        first_try = uid // self.run.size % 2 == 0
        resting = int(self.ring["word"][slot]) >> 58 in (STATES["QUEUED"], STATES["GENERATED"])
        if luck < 0.03 and first_try and resting and self.free():
            return self.drop(draw, uid, "P")
        if len(ready := self.ready()) >= 2:
            if luck < 0.2:
                for uid in list(self.groups[ready[0]]):
                    self.drop(ready[0], uid, "f")
                del self.groups[ready[0]]
            else:
                self.train(ready[:2])
            return None
        return self.advance(slot)


def main() -> None:
    root = Path(sys.argv[1])
    lock = os.open(root / "run.lock", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0))
    live = LiveRun(root)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(20):
            live.turn()


if __name__ == "__main__":
    main()
