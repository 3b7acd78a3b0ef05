"""A reader of the ring, written from docs/ring.md and its neighbours alone: `struct`, `mmap`, nothing of busrl.

The ring that it reads is made and worked on by real processes of busrl in children; the reader is on its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# -- from the page -------------------------------------------------------------------------------------------------

STATES = ["FREE", "RESERVED", "QUEUED", "GENERATING", "GENERATED", "REWARDING", "REWARDED", "TRAINING", "DROPPED"]
WORKING = {"RESERVED", "GENERATING", "REWARDING", "TRAINING"}
ELEMENT = {(0, 8): "b", (0, 16): "h", (0, 32): "i", (0, 64): "q", (1, 8): "B", (1, 16): "H", (1, 32): "I", (1, 64): "Q"}
ELEMENT |= {(2, 16): "e", (2, 32): "f", (2, 64): "d", (4, 16): "H", (6, 8): "?"}
WORDS = [
    "version", "version_step", "next_admission", "unpublished_groups", "hold", "step", "run_state", "generation_pause"
]


class Damaged(Exception):
    """The segment says something that it may not."""


def up(value: int, to: int) -> int:
    return -(-value // to) * to


def bitmap(bits: int) -> int:
    return up(bits, 1024) // 8


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Line:
    state: str
    owner: int
    segs: int
    seq: int
    word: int
    uid: int
    reward: float
    group_size: int
    priority: int
    temperature: float


class Reader:
    """A ring, read and never written."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        size = os.fstat(self.fd).st_size
        if size < 0x2000:
            raise Damaged("shorter than a header")
        fixed, crc, ready = struct.unpack("<120sII", os.pread(self.fd, 0x80, 0))
        magic, major, _minor, total, self.uuid, self.boot, _pid_ns = struct.unpack_from("<8sIIQ16s16sQ", fixed)
        self.slots, self.procs, *offsets, self.stride, self.bytes = struct.unpack_from("<IIQQQQQQ", fixed, 0x40)
        self.proc_off, self.line_off, self.table_off, self.data_off = offsets
        if magic != b"BUSRLRG1" or major != 3 or crc != crc32c(fixed) or ready != 1 or total != size:
            raise Damaged("its header is not one")
        line_off = up(0x2000 + 256 * self.procs, 4096)
        hint_off = up(line_off + 128 * self.slots, 4096)
        table_off = up(hint_off + 4 * (bitmap(self.slots) + bitmap(-(-self.slots // 64))), 4096)
        data_off = up(table_off + 6272 * self.slots, 4096)
        if offsets != [0x2000, line_off, table_off, data_off] or self.stride != up(self.bytes, 256):
            raise Damaged("its offsets do not follow from its numbers")
        if total != up(data_off + self.slots * self.stride, 4096):
            raise Damaged("its offsets do not follow from its numbers")
        self.hint_off = hint_off
        self.map = mmap.mmap(self.fd, size, access=mmap.ACCESS_READ)

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)

    def u64(self, at: int) -> int:
        return struct.unpack_from("<Q", self.map, at)[0]

    def word_of_run(self, name: str) -> int:
        return self.u64(0x80 + 8 * WORDS.index(name))

    def transitions(self, state: str) -> int:
        return self.u64(0x100 + 128 * STATES.index(state))

    def hinted(self, state: str) -> list[int]:
        """Slots that may be in the state."""
        leaf, top = bitmap(self.slots), bitmap(-(-self.slots // 64))
        at = self.hint_off + ["FREE", "QUEUED", "GENERATED", "REWARDED"].index(state) * (leaf + top)
        words = [w for w in range(-(-self.slots // 64)) if self.u64(at + leaf + 8 * (w // 64)) >> w % 64 & 1]
        return [slot for w in words for slot in range(64 * w, 64 * w + 64) if self.u64(at + 8 * w) >> slot % 64 & 1]

    def processes(self) -> dict[int, dict[str, Any]]:
        """Live entries: those that hold their byte of the lock."""
        by_index = {}
        for index in range(1, self.procs):
            at = self.proc_off + 256 * index
            ident = self.u64(at)
            if ident & 1:
                role, label = struct.unpack_from("<16s40s", self.map, at + 0x28)
                by_index[index] = {
                    "pid": ident >> 32,
                    "epoch": ident >> 8 & 0xFFFFFF,
                    "role": role.rstrip(b"\0").decode(),
                    "label": label.rstrip(b"\0").decode(),
                    "activity": self.map[at + 0x80 : at + 0xA0].rstrip(b"\0").decode(),
                    "progress": self.u64(at + 0x60),
                    "ready": struct.unpack_from("<I", self.map, at + 0x20)[0],
                    "locked": self.is_locked(index),
                }
        return by_index

    def is_locked(self, index: int) -> bool:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
        got = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked)
        return struct.unpack("hhqqi4x", got)[0] != fcntl.F_UNLCK

    def line(self, slot: int) -> Line:
        at = self.line_off + 128 * slot
        while True:
            raw = self.map[at : at + 128]
            word = struct.unpack_from("<Q", raw)[0]
            if self.u64(at) == word:
                break
        state = word >> 58
        if state >= len(STATES):
            raise Damaged(f"slot {slot} is in state {state}")
        owner = word >> 44 & 0x3FFF
        if STATES[state] != "DROPPED" and not (0 < owner < self.procs if STATES[state] in WORKING else owner == 0):
            raise Damaged(f"slot {slot} is {STATES[state]} of process {owner}")
        get = struct.unpack_from
        return Line(
            state=STATES[state],
            owner=owner,
            segs=word >> 36 & 0xFF,
            seq=word & (1 << 36) - 1,
            word=word,
            uid=get("<Q", raw, 0x08)[0],
            reward=get("<d", raw, 0x40)[0],
            group_size=get("<H", raw, 0x52)[0],
            priority=get("<i", raw, 0x58)[0],
            temperature=get("<f", raw, 0x68)[0],
        )

    def tensors(self, slot: int) -> dict[tuple[str, int], tuple[tuple[int, ...], list[Any]]]:
        """(name, segment) -> (shape, elements) of the entries that count."""
        line, by_key = self.line(slot), {}
        table = self.table_off + 6272 * slot
        used = min(struct.unpack_from("<I", self.map, table)[0], 48)
        for i in range(used):
            entry = self.map[table + 128 * (i + 1) : table + 128 * (i + 2)]
            (flags,) = struct.unpack_from("<Q", entry, 0x78)
            name, segment, code, bits, ndim, crc, offset, nbytes = struct.unpack_from("<32sBBBBIQQ", entry)
            (capacity,) = struct.unpack_from("<Q", entry, 0x58)
            if not flags & 1 or (segment != 255 and segment >= line.segs):
                continue
            if (code, bits) not in ELEMENT or ndim > 4:
                raise Damaged(f"slot {slot}: entry {i} is of no known type")
            shape = struct.unpack_from("<4Q", entry, 0x38)[:ndim]
            count = 1
            for length in shape:
                count *= length
            sound = offset % 64 == 0 and nbytes <= capacity <= self.bytes - offset and count * bits // 8 == nbytes
            if offset > self.bytes or not sound:
                raise Damaged(f"slot {slot}: entry {i} reaches outside its slot")
            at = self.data_off + slot * self.stride + offset
            data = self.map[at : at + nbytes]
            if flags & 2 and crc32c(data) != crc:
                raise Damaged(f"slot {slot}: the checksum of entry {i} is wrong")
            key = name.rstrip(b"\0").decode(), segment
            by_key[key] = shape, list(struct.unpack(f"<{count}{ELEMENT[code, bits]}", data))
        return by_key


# -- a real ring ---------------------------------------------------------------------------------------------------

MAKER = """
import os, sys
import numpy as np
from busrl.ring import Fates, Ring, State
folder = sys.argv[1]
ring = Ring.create(folder + "/ring", slots=5, slot_bytes=1000, processes=7, uuid=bytes(range(16)))
ring.bind_fates(Fates(folder + "/fates.bin", create=True), Fates(folder + "/fates.validate.bin", create=True))
ring.register("rollout", "rollout/0")
ring.activity("compile ß", 600.0)
ring.set_ready()
ring.set_header("version", 12)
ring.set_header("generation_pause", 1)
for uid in (6, 7, 2**62 + 5):
    ring.dispatch(uid=uid, group=3, admission=4, member=uid % 2, group_size=2, cls=uid >> 62,
                  task=b'{"prompt": "%d"}' % uid, prompt_crc=9, priority=-4, max_new_tokens=64, temperature=0.5)
for slot, word in ring.take(State.QUEUED, State.GENERATING, cls=0, limit=9):
    ring.put(slot, word, "prompt_ids", np.arange(5, dtype=np.int32))
    ring.put(slot, word, "tokens", np.array([[1, -2], [3, 4]], np.int32), 0)
    ring.put(slot, word, "logprobs", np.array([-0.5, -1.25], np.float32), 0, checksum=True)
    if slot == 0:
        word = ring.commit_segment(slot, word, True)
        word = ring.claim(slot, word, State.REWARDING)
        ring.set(slot, word, reward=0.75)
        ring.release(slot, word, State.REWARDED)
print("ready", flush=True)
sys.stdin.readline()
ring.drop(2, int(ring.words()[2]), "e")
print("dropped", flush=True)
sys.stdin.readline()
"""


class Maker:
    def __init__(self, folder: Path) -> None:
        code = textwrap.dedent(MAKER)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.path = folder / "ring"
        self.hear("ready")

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def maker() -> Iterator[Maker]:
    folder = Path(tempfile.mkdtemp(prefix="busrl.test.", dir="/dev/shm"))
    started = Maker(folder)
    yield started
    started.process.kill()
    started.process.communicate(timeout=30)
    shutil.rmtree(folder)


@pytest.fixture
def reader(maker) -> Iterator[Reader]:
    mapped = Reader(maker.path)
    yield mapped
    mapped.close()


def test_a_stranger_reads_the_header_and_the_words_of_the_run(reader):
    assert (reader.slots, reader.procs, reader.bytes, reader.stride) == (5, 7, 1024, 1024)
    assert reader.uuid == bytes(range(16))
    assert reader.boot.hex() == Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    assert reader.word_of_run("version") == 12 and reader.word_of_run("generation_pause") == 1


def test_a_stranger_reads_who_is_registered_and_sees_a_death(reader, maker):
    expected = {"pid": maker.process.pid, "role": "rollout", "label": "rollout/0", "activity": "compile ß", "ready": 1}
    (index,) = reader.processes()
    seen = reader.processes()[index]
    assert {key: seen[key] for key in expected} == expected
    assert seen["locked"] and seen["epoch"] == 1 and seen["progress"] >= 1
    maker.process.kill()
    maker.process.wait(30)
    assert not reader.processes()[index]["locked"]


def test_a_stranger_reads_states_owners_and_the_fields_of_a_sample(reader):
    (index,) = reader.processes()
    lines = [reader.line(slot) for slot in range(reader.slots)]
    assert [line.state for line in lines] == ["REWARDED", "GENERATING", "QUEUED", "FREE", "FREE"]
    assert [line.owner for line in lines] == [0, index, 0, 0, 0]
    assert [line.segs for line in lines] == [1, 0, 0, 0, 0]
    assert [line.seq for line in lines] == [4, 3, 2, 1, 1]
    assert [line.uid for line in lines] == [6, 7, 2**62 + 5, 2**64 - 1, 2**64 - 1]
    assert (lines[0].reward, lines[0].group_size, lines[0].priority, lines[0].temperature) == (0.75, 2, -4, 0.5)
    assert reader.transitions("QUEUED") == 3 and reader.transitions("DROPPED") == 0


def test_a_stranger_finds_every_slot_at_rest_by_its_hint(reader):
    for state in ("FREE", "QUEUED", "GENERATED", "REWARDED"):
        there = {slot for slot in range(reader.slots) if reader.line(slot).state == state}
        assert there <= set(reader.hinted(state)) <= set(range(reader.slots))


def test_a_stranger_reads_committed_tensors_and_not_those_of_an_unfinished_segment(reader):
    whole, unfinished = reader.tensors(0), reader.tensors(1)
    assert whole[("tokens", 0)] == ((2, 2), [1, -2, 3, 4])
    assert whole[("logprobs", 0)] == ((2,), [-0.5, -1.25])
    assert bytes(whole[("task", 255)][1]) == b'{"prompt": "6"}'
    assert set(unfinished) == {("task", 255), ("prompt_ids", 255)}


def test_a_stranger_follows_a_drop_to_its_fate(reader, maker):
    before = reader.line(2)
    maker.go_on()
    maker.hear("dropped")
    after = reader.line(2)
    assert (after.state, after.seq, reader.transitions("DROPPED")) == ("FREE", before.seq + 1, 1)
    fates = (maker.path.parent / "fates.validate.bin").read_bytes()
    assert fates[5:6] == b"e" and len(fates) == 65_536
    assert (maker.path.parent / "fates.bin").read_bytes()[6:8] == b"DD"


def test_a_stranger_refuses_a_header_of_which_one_byte_is_wrong(maker, tmp_path):
    whole = maker.path.read_bytes()
    for at in (0x00, 0x08, 0x10, 0x40, 0x48, 0x70, 0x78, 0x7C):
        copy = tmp_path / "copy"
        copy.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(Damaged):
            Reader(copy)


def test_the_reader_knows_nothing_of_busrl():
    program = Path(__file__).read_text().split("MAKER = ")[0]
    assert not [line for line in program.splitlines() if line.lstrip().startswith(("import busrl", "from busrl"))]
