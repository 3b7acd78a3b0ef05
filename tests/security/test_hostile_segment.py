"""A segment that somebody changed: every refusal names what was expected and found, and a bad slot costs that slot."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from busrl.errors import BadTensor, FateRefused, RingMismatch, SlotTooSmall
from busrl.ring import LAYOUT, Fates, Ring, State

HEADER, SLOTS, SLOT_BYTES, PROCESSES = 0x2000, 2, 256, 4
CRC_AT = 0x78
FIELD = {"total_bytes": 0x10, "n_slots": 0x40, "proc_off": 0x48, "line_off": 0x50, "table_off": 0x58, "data_off": 0x60}


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class Segment:
    """The file of a ring, written past the library; the ring itself stays attached."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ring"
        self.ring = Ring.create(str(self.path), slots=SLOTS, slot_bytes=SLOT_BYTES, processes=PROCESSES, uuid=bytes(16))
        self.ring.register("test", "test")
        head = self.path.read_bytes()[:HEADER]
        self.lines, self.tables = (int.from_bytes(head[at : at + 8], "little") for at in (0x50, 0x58))
        self.fates = Fates(str(folder / "fates"), create=True, capacity=1 << 16)
        self.ring.bind_fates(self.fates, self.fates)

    def write(self, at: int, data: bytes, repair: bool = False) -> None:
        with open(self.path, "r+b") as file:
            file.seek(at)
            file.write(data)
            if repair:
                file.seek(0)
                head = file.read(CRC_AT)
                file.seek(CRC_AT)
                file.write(struct.pack("<I", crc32c(head)))

    def dispatch(self, uid: int) -> tuple[int, int]:
        [held] = self.ring.dispatch(
            uid=uid, group=uid, admission=uid, member=0, group_size=1, cls=0, task=b"t", prompt_crc=0,
            max_new_tokens=1, temperature=1.0,
        )
        return held

    def refusal(self) -> str:
        with pytest.raises(RingMismatch) as caught:
            Ring.attach(str(self.path))
        assert str(self.path) in str(caught.value)
        return str(caught.value)


@pytest.fixture
def segment() -> Iterator[Segment]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="busrl.test.") as folder:
        segment = Segment(Path(folder))
        yield segment
        segment.ring.close()


def test_another_magic_is_named_with_the_expected_one_and_the_remedy(segment):
    segment.write(0, b"NOTARING", repair=True)
    said = segment.refusal()
    assert b"NOTARING".hex() in said and b"BUSRLRG1".hex() in said and "busrl ring list" in said


def test_another_layout_version_is_named_with_the_one_that_is_read(segment):
    segment.write(8, struct.pack("<I", 77), repair=True)
    said = segment.refusal()
    assert f"layout version 77, this library reads {LAYOUT[0]};" in said and "use the busrl that made it" in said


def test_a_wrong_checksum_is_named_with_the_right_one(segment):
    head = segment.path.read_bytes()[:CRC_AT]
    segment.write(CRC_AT, bytes.fromhex("deadbeef"))
    said = segment.refusal()
    assert "says deadbeef" in said and struct.pack("<I", crc32c(head)).hex() in said and "busrl ring clean" in said


def test_a_wrong_size_is_named_beside_that_of_the_file(segment):
    size = segment.path.stat().st_size
    segment.write(FIELD["total_bytes"], struct.pack("<Q", size + 4096), repair=True)
    said = segment.refusal()
    assert f"says {size + 4096} bytes, the file has {size}" in said


@pytest.mark.parametrize("field", ["proc_off", "line_off", "table_off", "data_off"])
def test_an_offset_that_does_not_follow_from_the_counts_is_named(segment, field):
    segment.write(FIELD[field], struct.pack("<Q", 1 << 50), repair=True)
    said = segment.refusal()
    assert f"{field} is {1 << 50}, expected " in said


def test_counts_that_no_ring_has_are_refused(segment):
    segment.write(FIELD["n_slots"], struct.pack("<I", 0xFFFFFFFF), repair=True)
    assert "slots must be 1 .. 1048576, got 4294967295" in segment.refusal()


def test_a_ring_of_an_earlier_boot_is_named_as_that(segment):
    segment.write(0x28, b"\xab" * 16, repair=True)
    assert "made before the last boot" in segment.refusal() and "ab" * 16 in segment.refusal()


def test_a_ring_that_others_may_open_is_refused(segment):
    assert segment.path.stat().st_mode & 0o777 == 0o600
    segment.path.chmod(0o660)
    said = segment.refusal()
    assert "its mode is 0660, expected 0600" in said and "chmod 600" in said


def test_a_ring_is_made_for_its_owner_alone_whatever_the_umask(segment):
    before = os.umask(0)
    try:
        Ring.create(f"{segment.path}.open", slots=1, slot_bytes=64, processes=2, uuid=bytes(16)).close()
    finally:
        os.umask(before)
    assert Path(f"{segment.path}.open").stat().st_mode & 0o777 == 0o600


def test_a_file_with_holes_is_refused_before_it_is_mapped(segment):
    content = segment.path.read_bytes()
    segment.path.unlink()
    descriptor = os.open(segment.path, os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(descriptor, content[:HEADER], 0)
    os.ftruncate(descriptor, len(content))
    os.close(descriptor)
    assert "it has holes" in segment.refusal()


def entry(**changes: int | bytes) -> bytes:
    """A descriptor of 16 bytes at offset 0, changed."""
    part = {"name": b"x", "segment": 255, "code": 1, "bits": 8, "ndim": 1, "crc": 0, "offset": 0, "nbytes": 16,
            "shape0": 16, "shape1": 0, "shape2": 0, "shape3": 0, "capacity": 16, "flags": 1}
    part.update(changes)  # type: ignore[arg-type]
    return struct.pack("<32sBBBBI7QQ16xQ", *(part[k] for k in part if k != "flags"), 0, part["flags"])


BAD = [
    ({"code": 9}, "number type"),
    ({"bits": 24}, "number type"),
    ({"ndim": 5}, "more than 4 dimensions"),
    ({"offset": 8}, "multiple of 64"),
    ({"offset": 256}, "reaches beyond its slot"),
    ({"offset": (1 << 64) - 64, "nbytes": 128, "shape0": 128, "capacity": 128}, "reaches beyond its slot"),
    ({"nbytes": 257, "shape0": 257, "capacity": 257}, "reaches beyond its slot"),
    ({"capacity": 15}, "room set aside"),
    ({"capacity": 1 << 63}, "room set aside"),
    ({"shape0": 15}, "size does not follow from its shape"),
    ({"ndim": 2, "shape0": 1 << 32, "shape1": 1 << 32}, "shape is impossible"),
    ({"ndim": 4, "shape0": 1 << 33, "shape1": 1 << 33, "shape2": 1 << 33, "shape3": 1 << 33}, "shape is impossible"),
    ({"ndim": 2, "shape0": 0, "shape1": (1 << 64) - 1, "nbytes": 0}, "shape is impossible"),
]


@pytest.mark.parametrize(("changes", "why"), BAD, ids=[f"{list(changes)}" for changes, _ in BAD])
def test_a_bad_descriptor_names_slot_tensor_and_rule(segment, changes, why):
    for slot, content in ((0, entry(**changes)), (1, entry())):
        segment.write(segment.tables + slot * (128 + 48 * 128), struct.pack("<I", 1))
        segment.write(segment.tables + slot * (128 + 48 * 128) + 128, content)
    for read in (lambda: segment.ring.get(0, "x"), lambda: segment.ring.tensors(0)):
        with pytest.raises(BadTensor, match=rf"slot 0: tensor x: .*{why}"):
            read()
    assert segment.ring.get(1, "x").shape == (16,)


def test_more_entries_than_a_table_has_are_never_looked_at(segment):
    segment.write(segment.tables, struct.pack("<I", 0xFFFFFFFF))
    assert segment.ring.tensors(0) == {}


def test_an_array_whose_shape_no_reader_accepts_is_not_written(segment):
    slot, word = segment.dispatch(1)
    word = segment.ring.claim(slot, word, State.GENERATING)
    with pytest.raises(SlotTooSmall):
        segment.ring.alloc(slot, word, "a", np.uint8, (0, 1 << 40, 1 << 40))
    assert segment.ring.alloc(slot, word, "b", np.uint8, (0, 1 << 20)).size == 0


def test_a_sample_that_cannot_be_recorded_keeps_no_others(segment):
    for uid in (1, 2):
        segment.dispatch(uid)
    words = segment.ring.words()
    for slot in (0, 1):
        dropped = 8 << 58 | ord("M") << 44 | int(words[slot]) & ((1 << 36) - 1)
        segment.write(segment.lines + slot * 128, struct.pack("<Q", dropped))
    segment.write(segment.lines + 8, struct.pack("<Q", 1 << 40))  # the uid of slot 0 names no sample
    with pytest.raises(FateRefused, match=r"slot 0: .*maps 65536 samples"):
        segment.ring.finish_drops()
    assert segment.fates.get(2) == ord("M")
    assert segment.ring.stats().occupancy["FREE"] == 1 and segment.ring.stats().occupancy["DROPPED"] == 1


TOUCH = """
import os, sys
from busrl.ring import Ring
ring = Ring.attach(sys.argv[1], read_only=True)
os.truncate(sys.argv[1], 4096)
ring.lines()
print("still here")
"""


def test_a_file_cut_while_mapped_ends_its_reader(segment):
    copy = segment.path.with_name("copy")
    copy.touch(0o600)
    copy.write_bytes(segment.path.read_bytes())
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", TOUCH, str(copy)], env=env, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGBUS and b"still here" not in done.stdout
    with pytest.raises(RingMismatch, match=r"has 4096 bytes, a ring has at least 8192"):
        Ring.attach(str(copy))
