"""A look at a run: its ring's slots from raw bytes, its prompts and its files, in an order that accuses no live run.

Maps the ring's file read-only and uses the documented offsets, with no code of the ring itself. Talks to the run
directory, the ring's file and one prompt file; to no process. Knows nothing of the rules.

The ring:
- The head is believed only as an adoption believes it: finished, with its own checksum, size and boot.
- A slot's line is believed only if its control word was the same before, in and after the copy (`stable`).
- `seen` holds every uid that stood in a slot that was not FREE at any of the looks: a sample that stayed in its slot
  for the whole reading is in it, however often the slot's state changed meanwhile.
- A RESERVED slot holds the uid of an earlier sample until the seq of its own claim stands in last_commit_seq.

The prompts: the line is proven, that is the bytes of a draw's task. What an engine made of it is not: chat template,
system prompt and tokenizer are not applied again here.

The order is: fates, size of the train log, log, checkpoints, train log, ring, open.bin, fates again. It follows from
the order in which the run itself acts:
- uid into a slot -> D -> ... -> terminal fate -> slot FREE: a sample that is D in both looks at the fates was in its
  slot between them, when the ring was read. Else it is lost.
- record -> T; checkpoint in place -> records dropped: a sample that is T in the first look is in the log, or in a
  checkpoint that was there before the record went, and checkpoints are read after the log.
- record -> T -> slot FREE: a sample that is in the log, and not T in the last look, was in its slot when the ring was
  read.
- record -> line of the train log -> checkpoint: lines that were there before the log was read have their record or a
  checkpoint; uids of a checkpoint have their line, and the train log is read after the checkpoints.
- open.bin written -> ring unlinked: without a ring, open.bin is there when it is read next.
If a ring, its open.bin or the prompts' topology came or went meanwhile, the look is taken again.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha1
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.errors import NoSuchRun
from busrl.ledger.audit import readers
from busrl.ledger.audit.inforce import Timeline, timeline_of
from busrl.ledger.audit.readers import Codes, Uids
from busrl.ledger.audit.report import Finding, error, note

# -- the ring -----


MAGIC = b"BUSRLRG1"
MAJORS = (2, 3)  # their lines are the same
FIXED_BYTES = 0x78  # of the header, written once, which the checksum covers
CASTAGNOLI = 0x82F63B78
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
HEADER_BYTES = 0x2000
LINE_BYTES = 128
RING_LOOKS = 64
State = IntEnum("State", "FREE RESERVED QUEUED GENERATING GENERATED REWARDING REWARDED TRAINING DROPPED", start=0)
UID_NONE = (1 << 64) - 1
SEQ_MASK = np.uint64((1 << 36) - 1)
LINE = np.dtype(
    {
        "names": ["word", "uid", "group", "admission", "claim_seq", "cls", "member", "group_size", "prompt_crc"],
        "formats": ["<u8", "<u8", "<u8", "<u8", "<u8", "<u4", "<u2", "<u2", "<u4"],
        "offsets": [0x00, 0x08, 0x10, 0x18, 0x28, 0x48, 0x50, 0x52, 0x70],
        "itemsize": LINE_BYTES,
    }
)


class NotARing(Exception):
    """The file is not a ring that this layout describes; the message says what is wrong."""


@dataclass(frozen=True)
class Slots:
    """All slots of one reading; the arrays have one entry per slot."""

    uuid: bytes
    lines: npt.NDArray[np.void]
    stable: npt.NDArray[np.bool_]
    seen: npt.NDArray[np.uint64]  # sorted
    still: npt.NDArray[np.bool_]  # the word was the same again after all slots had been read

    @property
    def state(self) -> npt.NDArray[np.uint64]:
        return state_of(self.lines["word"])

    @property
    def reason(self) -> npt.NDArray[np.uint64]:
        """The content of the owner field: a reason's byte in DROPPED."""
        return np.asarray((self.lines["word"] >> np.uint64(44)) & np.uint64(0x3FFF), np.uint64)


def state_of(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return np.asarray(words >> np.uint64(58), np.uint64)


def _unwritten(lines: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """RESERVED slots whose uid was not written under the claim that they are in."""
    words = lines["word"]
    return np.asarray((state_of(words) == State.RESERVED) & ((words & SEQ_MASK) != lines["claim_seq"]))


def read_ring(path: Path) -> Slots | None:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = _header(file.read(HEADER_BYTES), size, path)
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as segment:
                return _read_slots(segment, *head)
    except FileNotFoundError:
        return None


def _header(data: bytes, size: int, path: Path) -> tuple[bytes, int, int]:
    """uuid, slots, offset of the control lines."""
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        raise NotARing(f"{path}: {size} bytes that do not begin with {MAGIC!r}")
    (major,) = struct.unpack_from("<I", data, 0x08)
    (n_slots,) = struct.unpack_from("<I", data, 0x40)
    (line_off,) = struct.unpack_from("<Q", data, 0x50)
    if major not in MAJORS:
        raise NotARing(f"{path}: layout {major}, this audit reads {' and '.join(map(str, MAJORS))}")
    if (damage := _damage(data, size)) or line_off + n_slots * LINE_BYTES > size or line_off % 8:
        raise NotARing(f"{path}: {damage or f'{n_slots} slots at {line_off} in {size} bytes'}")
    return data[0x18:0x28], n_slots, line_off


def _damage(data: bytes, size: int) -> str:
    """The reason why no start would adopt a ring with this head; empty if its head is whole."""
    crc, ready = struct.unpack_from("<II", data, FIXED_BYTES)
    checksum, (total,) = crc32c(data[:FIXED_BYTES]), struct.unpack_from("<Q", data, 0x10)
    if crc != checksum:
        return f"its header checksum is wrong: it says {crc:08x}, its bytes give {checksum:08x}"
    if ready != 1:
        return f"it was never finished: ready is {ready}"
    if total != size:
        return f"its header says {total} bytes, the file has {size}"
    if data[0x28:0x38] != bytes.fromhex(BOOT_ID.read_text().replace("-", "")):
        return "it was made before the last boot of this machine"
    return ""


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum, bit by bit: it is taken of 120 bytes once."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (CASTAGNOLI if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _read_slots(segment: mmap.mmap, uuid: bytes, n_slots: int, line_off: int) -> Slots:
    view = np.frombuffer(segment, LINE, n_slots, line_off)
    try:
        lines, seen, stable = np.zeros(n_slots, LINE), [np.zeros(0, np.uint64)], np.zeros(n_slots, np.bool_)
        todo = np.arange(n_slots)
        for _ in range(RING_LOOKS):
            before, copy, after = view["word"][todo], view[todo], view["word"][todo]
            busy = np.any([state_of(word) != State.FREE for word in (before, copy["word"], after)], axis=0)
            same = (before == copy["word"]) & (copy["word"] == after)
            seen.append(copy["uid"][busy & ~(same & _unwritten(copy))])
            lines[todo] = copy
            stable[todo] = same
            todo = np.flatnonzero(~stable)
            if not todo.size:
                break
        still = view["word"] == lines["word"]
    finally:
        del view  # the mapping can only be closed when no array looks into it
    uids = np.unique(np.concatenate(seen))
    return Slots(uuid, lines, stable, uids[uids != np.uint64(UID_NONE)], still)


# -- prompts -----


UNREAD = -1  # no crc yet
DRAWS_MIXED = 1000  # draws in which each source has its share


class Prompts:
    """Lines of the prompt file in the order of a run; `sources`: first line, lines and share of each, where several
    are mixed."""

    def __init__(self, path: Path, seed: int, shuffle: bool, sources: Sequence[tuple[int, int, int]] = ()) -> None:
        self.seed, self.shuffle = seed, shuffle
        self.sources = tuple(sources) if len(sources) > 1 else ()
        starts, ends = array("q"), array("q")  # a file may have millions of lines
        self._path = path
        offset = last = 0
        with path.open("rb") as file:
            for line in file:
                starts.append(offset)
                offset += len(line)
                ends.append(offset - line.endswith(b"\n"))
                last = len(ends) if line.strip(b" \t\r\n\v\f\xef\xbb\xbf") else last
        self._starts, self._ends = starts[:last], ends[:last]  # empty lines at the end are no prompts
        with path.open("rb") as file:
            if self._starts and file.read(3) == b"\xef\xbb\xbf":  # a byte order mark
                self._starts[0] = 3
        self._crcs = np.full(last, UNREAD, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def crcs(self, draws: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The crc32 of the line that each draw selects."""
        distinct, back = np.unique(draws, return_inverse=True)
        items = self._items(distinct)
        self._read(np.unique(items[self._crcs[items] == UNREAD]))
        return self._crcs[items][back]

    def _items(self, draws: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Line numbers of ascending draws."""
        if not self.sources:
            return self._epochs(draws, len(self))
        lines = np.zeros_like(draws)
        blocks, places = np.divmod(draws, DRAWS_MIXED)
        kinds, order_in_source = self._mixed(blocks, places)
        for kind, (first, count, share) in enumerate(self.sources):
            of_kind = kinds == kind
            lines[of_kind] = first + self._epochs(blocks[of_kind] * share + order_in_source[of_kind], count, kind + 1)
        return lines

    def _mixed(
        self, blocks: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The source of each draw, and how many draws of its block went to that source before it."""
        kinds, before = np.zeros_like(blocks), np.zeros_like(blocks)
        labels = np.repeat(np.arange(len(self.sources)), [share for _, _, share in self.sources])
        for block in np.unique(blocks):
            row = labels[np.random.Generator(np.random.PCG64([self.seed, int(block)])).permutation(DRAWS_MIXED)]
            rank = np.zeros(DRAWS_MIXED, np.int64)
            for kind in range(len(self.sources)):
                rank[row == kind] = np.arange(np.count_nonzero(row == kind))
            here = blocks == block
            kinds[here], before[here] = row[places[here]], rank[places[here]]
        return kinds, before

    def _epochs(self, draws: npt.NDArray[np.int64], size: int, *words: int) -> npt.NDArray[np.int64]:
        """Compute which of `size` lines each of ascending draws takes, epoch by epoch."""
        epochs, items = np.divmod(draws, size)
        if self.shuffle and draws.size:
            starts = np.append(0, np.flatnonzero(np.diff(epochs)) + 1)
            for start, end in zip(starts, [*starts[1:], draws.size]):
                generator = np.random.Generator(np.random.PCG64([self.seed, int(epochs[start]), *words]))
                items[start:end] = generator.permutation(size)[items[start:end]]
        return items

    def _read(self, items: npt.NDArray[np.int64]) -> None:
        if not items.size:
            return
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for item in items.tolist():
                self._crcs[item] = zlib.crc32(data[self._starts[item] : self._ends[item]])


# -- the look -----


LOOKS = 5
SHARED = Path("/dev/shm")
MODELS = "models"  # of a run directory: a folder for each model but the lead
FATES = ("fates.bin", "fates.validate.bin")


@dataclass(frozen=True)
class Terms:
    """Terms of the topology that the rules need."""

    group_size: int
    seed: int
    shuffle: bool
    wal: str
    train: str
    seats: int = 1  # groups of a draw
    sources: tuple[tuple[int, int, int], ...] = ()  # first line, lines and share of 1000 draws of each
    timeline: Timeline = field(default_factory=Timeline)  # what was promised when
    routes: tuple[int, ...] = ()  # of a mixture of experts: layers that have some, experts of a token, experts

    def g_min(self, unused: npt.NDArray[np.int64] | int = 0) -> npt.NDArray[np.int64]:
        """Members that must be trained of a group of which so many seats were not used."""
        took_part = self.group_size - np.asarray(unused, np.int64)
        needed = np.minimum(took_part, np.maximum(2, np.ceil(0.75 * took_part).astype(np.int64)))
        return np.asarray(np.maximum(needed, min(2, self.group_size)))


@dataclass
class Snapshot:
    """Everything read in one look; `first` and `last` are the two readings of a fate table."""

    terms: Terms
    state: str
    first: Codes
    last: Codes
    validate_first: Codes
    validate_last: Codes
    log: list[readers.LoggedStep]
    checkpoints: list[readers.Checkpoint]
    train_log: list[readers.TrainStep]
    train_log_known: int  # bytes of the train log that were there before the log was read
    slots: Slots | None
    open: Uids | None
    put_back: int
    prompts: Prompts | None
    problems: list[Finding] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.state == "running"


def take(run_dir: Path, prompts: Path | None) -> Snapshot:
    """Look until nothing structural changed during the look; the last look counts in any case."""
    for _ in range(LOOKS):
        before = _identity(run_dir)
        snapshot = _look(run_dir, prompts)
        if before == _identity(run_dir):
            break
    return snapshot


def ring_file(run_dir: Path) -> Path:
    """The path of the run's ring: as run.json says, else by the rule for its name."""
    name = readers.read_json(run_dir / "run.json").get("ring")
    if isinstance(name, str) and name:
        return SHARED / name  # an absolute path replaces the directory
    key = sha1(str(run_dir.resolve()).encode()).hexdigest()[:12]
    return SHARED / f"busrl.{os.getuid()}.{key}.ring"


def run_of(run_dir: Path) -> Path:
    """The directory of the run, of which a model beside the lead has a folder of its own."""
    above = run_dir.parent.parent
    return above if run_dir.parent.name == MODELS and (above / "topology.json").is_file() else run_dir


def _identity(run_dir: Path) -> tuple[tuple[int, ...], ...]:
    """Changes when the ring or open.bin is made, replaced or removed."""
    return tuple((_info(path) or ())[:2] for path in (ring_file(run_dir), run_dir / "open.bin"))


def _info(path: Path) -> tuple[int, int, int] | None:
    """Device, inode and bytes of a file; None without one."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size


def _look(run_dir: Path, prompts: Path | None) -> Snapshot:
    findings: list[Finding] = []
    terms = read_terms(run_dir)
    first, validate_first = (readers.read_fates(run_dir / name) for name in FATES)
    train_log_bytes = (_info(run_dir / "train.jsonl") or (0, 0, 0))[2]
    log = readers.read_log(run_dir / "wal", findings)
    checkpoints = readers.read_checkpoints(run_dir / "checkpoints", findings)
    train_log = readers.read_train_log(run_dir / "train.jsonl", findings)
    slots, damaged = _slots(run_dir, findings)
    open_uids = readers.read_open(run_dir / "open.bin", findings)
    last, validate_last = (readers.read_fates(run_dir / name) for name in FATES)
    return Snapshot(
        terms, _state(run_dir, slots, damaged, open_uids), first, last, validate_first, validate_last, log, checkpoints,
        train_log, train_log_bytes, slots, open_uids, put_back=readers.read_put_backs(run_dir / "draws.log"),
        prompts=_prompts(run_dir, terms, prompts, findings), problems=findings,
    )


def _state(run_dir: Path, slots: Slots | None, damaged: bool, open_uids: Uids | None) -> str:
    if readers.is_locked(run_of(run_dir) / "run.lock"):
        return "running"
    if damaged:
        return "damaged"
    if slots is not None:
        return "killed"
    return "finished" if open_uids is not None else "gone"


def read_terms(run_dir: Path) -> Terms:
    """The few keys of topology.json that the rules need."""
    topology: dict[str, Any] = readers.read_json(run_dir / "topology.json")
    try:
        data = topology["data"]
        return Terms(
            group_size=int(topology["groups"]["size"]),
            seed=int(topology["run"]["seed"]),
            shuffle=bool(data["shuffle"]),
            wal=str(topology["learner"]["wal"]),
            seats=max(1, len(topology.get("model", {}).get("seats", ()))),
            train=str(data["train"]),
            sources=tuple(
                (int(source["start"]), int(source["count"]), int(source["share"]))
                for source in topology.get("derived", {}).get("sources", ())
            ),
            timeline=timeline_of(run_dir, topology),
            routes=_shape_of(topology.get("derived", {}).get("routing")),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise NoSuchRun(
            f"{run_dir}: topology.json is missing or lacks {exc}: only the directory of a run that was started can be "
            "audited; name the directory that holds fates.bin"
        ) from exc


def _shape_of(routing: Any) -> tuple[int, ...]:
    if not routing:
        return ()
    return len(routing["layers"]), int(routing["top_k"]), int(routing["experts"])


def _slots(run_dir: Path, findings: list[Finding]) -> tuple[Slots | None, bool]:
    """The slots of the run's own ring, and whether a ring is there that nobody can use."""
    try:
        slots = read_ring(ring_file(run_dir))
    except NotARing as exc:
        text = f"the ring cannot be read, so dispatched samples are not found in it: {exc}"
        findings.append(error("bad_ring", [], text, 1))
        return None, True
    uuid = readers.read_json(run_dir / "run.json").get("uuid")
    if slots is not None and isinstance(uuid, str) and uuid.replace("-", "").lower() not in ("", slots.uuid.hex()):
        text = f"the ring is not the one of this run ({uuid}); it is left out"
        findings.append(note("foreign_ring", [slots.uuid.hex()], text))
        return None, False
    return slots, False


def _prompts(run_dir: Path, terms: Terms, file: Path | None, findings: list[Finding]) -> Prompts | None:
    path = file or Path(terms.train)
    if terms.sources:  # made for the run, and wherever its directory is now
        path = run_of(run_dir) / "data" / path.name
    try:
        prompts = Prompts(path, terms.seed, terms.shuffle, terms.sources)
    except OSError as exc:
        findings.append(note("prompts_unchecked", [str(path)], f"no prompt file, so prompts were not checked: {exc}"))
        return None
    return prompts if len(prompts) else None
