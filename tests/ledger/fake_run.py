"""Builds run directories by hand: fates, log, checkpoints, train log, open.bin, prompts and a ring of raw bytes."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from busrl.ledger.audit import AuditReport, audit
from busrl.ledger.audit.snapshot import BOOT_ID, crc32c
from busrl.ledger.openbin import OpenSlot, write_open
from busrl.ledger.trained import TrainedSet, TrainLine
from busrl.ledger.wal import Record, SampleRecord, Wal
from busrl.system.files import LineFile

LINE_OFF = 0x4000
NAMES = ["FREE", "RESERVED", "QUEUED", "GENERATING", "GENERATED", "REWARDING", "REWARDED", "TRAINING", "DROPPED"]
STATES = {name: number for number, name in enumerate(NAMES)}
VALIDATE = 1 << 62


class FakeRun:
    """A run directory under construction. Every writer can be told to lie."""

    def __init__(
        self, root: Path, *, group_size: int = 4, wal: str = "sync", slots: int = 16, prompts: int = 7,
        seats: int = 1,
    ) -> None:
        self.root, self.size, self.wal_mode, self.slots, self.seats = root, group_size, wal, slots, seats
        self.seed, self.uuid = 3, bytes(range(16))
        self.fates: dict[int, str] = {}
        self.validate_fates: dict[int, str] = {}
        self.lines = [json.dumps({"prompt": f"item {i}", "answer": str(i)}).encode() for i in range(prompts)]
        self.history: list[int] = []
        self.ring: bytearray | None = None
        root.mkdir(exist_ok=True)
        (root / "train_prompts.jsonl").write_bytes(b"\n".join(self.lines) + b"\n")
        self.topology()

    def topology(self) -> None:
        content: dict[str, dict[str, object]] = {
            "run": {"name": "fake", "seed": self.seed},
            "data": {"train": str(self.root / "train_prompts.jsonl"), "shuffle": True},
            "groups": {"size": self.size},
            "learner": {"wal": self.wal_mode},
        }
        if self.seats > 1:
            content["model"] = {"seats": [f"seat-{number}" for number in range(self.seats)]}
        (self.root / "topology.json").write_text(json.dumps(content))
        (self.root / "run.json").write_text(json.dumps({"ring": str(self.root / "ring.bin"), "uuid": self.uuid.hex()}))

    # ------------------------------------------------------------------------------------------------ who is who

    def uid(self, draw: int, member: int, again: int = 0) -> int:
        """With several seats, of a group."""
        return (draw * 2 + again) * self.size + member

    def group(self, draw: int) -> list[int]:
        return [self.uid(draw, member) for member in range(self.size)]

    def crc(self, uid: int) -> int:
        epoch, place = divmod(uid // self.size // 2 // self.seats, len(self.lines))
        order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.lines))
        return zlib.crc32(self.lines[int(order[place])])

    def sample(self, uid: int, tokens: int = 3, **lies: object) -> SampleRecord:
        group, member = uid // self.size // 2, uid % self.size
        fields: dict[str, object] = {
            "uid": uid, "group": group, "admission": group % self.seats, "member": member, "attempt": 0,
            "prompt_crc": self.crc(uid), "reward": 1.0, "temperature": 1.0, "version": 0, "step": 0, "finish": 1,
            "prompt_ids": np.arange(4, dtype="<i4").tobytes(), "token_ids": np.arange(tokens, dtype="<i4").tobytes(),
            "logprobs": np.full(tokens, -0.5, "<f4").tobytes(), "versions": np.zeros(tokens, "<u4").tobytes(),
        }
        return SampleRecord(**{**fields, **lies})  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------- the files

    def record(self, step: int, uids: Iterable[int], lies: dict[int, dict[str, object]] | None = None) -> Record:
        samples = [self.sample(uid, **(lies or {}).get(uid, {})) for uid in uids]
        groups = sorted({sample.group for sample in samples})
        return Record(step=step, version=step - 1, cause="count", groups=groups, samples=samples)

    def step(self, step: int, uids: Iterable[int], *, lies: dict[int, dict[str, object]] | None = None,
             fate: str = "T", log: bool = True, line: bool = True) -> Record:
        """Leave what a learner leaves of one training step; each part can be left out."""
        record = self.record(step, uids, lies)
        if log:
            with Wal(self.root / "wal", sync=False) as wal:
                wal.append(record)
        for sample in record.samples:
            self.fates[sample.uid] = fate
        if line:
            train_log = LineFile(self.root / "train.jsonl")
            train_log.append(msgspec.json.encode(TrainLine.of(record)))
            train_log.close()
        self.history += [sample.uid for sample in record.samples]
        return record

    def checkpoint(self, step: int, uids: Iterable[int] | None = None, *, samples: int | None = None) -> Path:
        path = self.root / "checkpoints" / f"global_step_{step}"
        path.mkdir(parents=True)
        trained = TrainedSet(self.history if uids is None else uids)
        trained.save(path / "trained.bin")
        count = len(trained) if samples is None else samples
        meta = {"step": step, "version": step, "groups": 0, "samples": count, "seed": self.seed, "uids": "trained.bin"}
        (path / "meta.json").write_text(json.dumps(meta))
        return path

    def open(self, *uids: int, state: str = "QUEUED") -> None:
        write_open(self.root / "open.bin", [OpenSlot(uid, STATES[state], slot) for slot, uid in enumerate(uids)])

    def slot(self, slot: int, uid: int, state: str = "QUEUED", *, seq: int = 5, owner: int = 0, **lies: int) -> None:
        """Write one control line. The first call makes the ring."""
        if self.ring is None:
            self.empty_ring()
        assert self.ring is not None
        index, check = uid & ~VALIDATE, uid >= VALIDATE
        line = {"group": index // self.size // 2, "member": index % self.size, "size": self.size, "claim": seq}
        line["admission"] = line["group"]
        line.update({"crc": 0 if check else self.crc(uid), "cls": int(check), **lies})
        at = LINE_OFF + slot * 128
        struct.pack_into("<QQQ", self.ring, at, STATES[state] << 58 | owner << 44 | seq, uid, line["group"])
        struct.pack_into("<Q", self.ring, at + 0x18, line["admission"])
        struct.pack_into("<Q", self.ring, at + 0x28, line["claim"])
        struct.pack_into("<I", self.ring, at + 0x48, line["cls"])
        struct.pack_into("<HH", self.ring, at + 0x50, line["member"], line["size"])
        struct.pack_into("<I", self.ring, at + 0x70, line["crc"])

    def empty_ring(self) -> None:
        self.ring = bytearray(LINE_OFF + self.slots * 128)
        struct.pack_into("<8sIIQ", self.ring, 0, b"BUSRLRG1", 3, 0, len(self.ring))
        self.ring[0x18:0x28] = self.uuid
        struct.pack_into("<II", self.ring, 0x40, self.slots, 64)
        struct.pack_into("<Q", self.ring, 0x50, LINE_OFF)
        self.ring[0x28:0x38] = bytes.fromhex(BOOT_ID.read_text().replace("-", ""))
        struct.pack_into("<II", self.ring, 0x78, crc32c(bytes(self.ring[:0x78])), 1)
        for slot in range(self.slots):
            struct.pack_into("<QQ", self.ring, LINE_OFF + slot * 128, 0, (1 << 64) - 1)

    def dispatch(self, *uids: int) -> None:
        """These are D, in slots that hold them."""
        taken = sum(fate == "D" for fate in self.fates.values())
        for slot, uid in enumerate(uids, taken):
            self.fates[uid] = "D"
            self.slot(slot, uid)

    def save(self) -> None:
        for name, fates in (("fates.bin", self.fates), ("fates.validate.bin", self.validate_fates)):
            table = bytearray(max(fates, default=0) + 1)
            for uid, fate in fates.items():
                table[uid] = ord(fate)
            (self.root / name).write_bytes(bytes(table).ljust(1 << 16, b"\0"))
        if self.ring is not None:
            (self.root / "ring.bin").write_bytes(self.ring)

    def audit(self) -> AuditReport:
        self.save()
        return audit(self.root)
