"""The files of a run, each read from its bytes by readers that share no code with the writers, and sets of their uids.

Talks to one run directory, read-only, also while the run is alive. Knows nothing of the rules; what cannot be read
becomes a finding, and the reading goes on.

- A file that vanishes between listing and reading was removed by the run, and counts as not there.
- Sets of uids are sorted arrays, bitmaps and tables of codes, made for millions of samples: a question takes one block
  of memory beside its arguments and its answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.ledger.audit.report import Finding, error, note

# -- sets of uids -----


Uids = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
UIDS_AT_ONCE = 1 << 18  # uids
T = TypeVar("T")
BITMAP_BLOCK = 1 << 17  # bytes


def blocks(size: int, at_once: int = 0) -> Iterator[slice]:
    """The parts of an array, `UIDS_AT_ONCE` long where nothing is said."""
    block = at_once or UIDS_AT_ONCE
    return (slice(start, start + block) for start in range(0, size, block))


def distinct(values: Uids) -> Uids:
    """Each value once, ascending (sorting beats numpy's hashing of uids several times over)."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if ordered.size else ordered


def is_among(values: Uids, ascending: Uids) -> Mask:
    mask = np.zeros(values.size, np.bool_)
    for part in blocks(values.size if ascending.size else 0):
        places = np.minimum(np.searchsorted(ascending, values[part]), ascending.size - 1)
        mask[part] = ascending[places] == values[part]
    return mask


def minus(values: Uids, ascending: Uids) -> Uids:
    """The distinct values that are not among the others."""
    return distinct(values[~is_among(values, ascending)])


def union(ascending: Uids, values: Uids) -> Uids:
    """Both, each value once, ascending; the first itself where the second adds nothing."""
    new = minus(values, ascending)
    return np.insert(ascending, np.searchsorted(ascending, new), new) if new.size else ascending


def codes_at(codes: Codes, uids: Uids) -> Codes:
    """The fate of each uid; 0 beyond the table's end."""
    result = np.zeros(uids.size, np.uint8)
    for part in blocks(uids.size if codes.size else 0):
        inside = uids[part] < np.uint64(codes.size)
        result[part] = np.where(inside, codes[np.where(inside, uids[part], 0).astype(np.int64)], 0)
    return result


def with_code(codes: Codes, code: int) -> Uids:
    return np.flatnonzero(codes == code).view(np.uint64)


def is_one_of(codes: Codes, some: Iterable[int]) -> Mask:
    table = np.zeros(256, np.bool_)
    table[list(some)] = True
    mask = np.zeros(codes.shape, np.bool_)
    for part in blocks(codes.size):
        mask[part] = table[codes[part]]
    return mask


def mask_of(uids: Uids, size: int) -> Mask:
    """Mark which of the first `size` uids are among these: a byte each, where a sorted difference takes many."""
    mask = np.zeros(size, np.bool_)
    for part in blocks(uids.size):
        some = uids[part]
        mask[some[some < np.uint64(size)].astype(np.int64)] = True
    return mask


def in_bitmap(bitmap: Codes) -> Uids:
    """The uids of a bitmap (uid % 8 from the lowest bit of byte uid // 8), ascending."""
    uids, end = np.empty(int.from_bytes(bitmap.tobytes(), "little").bit_count(), np.uint64), 0
    for part in blocks(bitmap.size, BITMAP_BLOCK):
        some = np.flatnonzero(np.unpackbits(bitmap[part], bitorder="little")) + 8 * part.start
        uids[end : end + some.size] = some
        end += some.size
    return uids


def bitmap_minus(bitmap: Codes, other: Codes) -> Uids:
    left = bitmap.copy()
    both = min(left.size, other.size)
    left[:both] &= ~other[:both]
    return in_bitmap(left)


# -- the files -----


BLOCK = 4 << 20
CHECKPOINT_LOOKS = 10
ENTRY = np.dtype([("uid", "<u8"), ("attempt", "<u4"), ("crc", "<u4")])
WAL_HEAD = struct.Struct("<8sII")
WAL_LAYOUTS = (3, 4, 5)
WAL_FRAME = struct.Struct("<4sII")
TRAINED_HEAD = struct.Struct("<8sIIQQ")
OPEN_HEAD = struct.Struct("<8sIIII")
FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


class LoggedSample(msgspec.Struct):
    """The fields of a sample in a log record that the audit needs."""

    uid: int
    group: int
    member: int
    attempt: int
    prompt_crc: int
    token_ids: bytes
    logprobs: bytes
    admission: int
    versions: bytes  # looked at: each once; half a number at the end, which `bad_payload` names, is left out
    step: int = -1  # that its age counts from
    segments: list[int] = []  # tokens of each, where there are several
    seqs: list[int] = []  # of an episode: lengths of its sequences,
    turns: list[int] = []  # and of each turn: sequence, begin, end, 2 x call + 1 where it is trained
    turn_rewards: list[float] = []
    keys: list[str] = []
    routes: bytes = b""  # of a mixture of experts, compressed; left out where the log keeps none
    prompt_routes: bytes = b""
    routes_shape: list[int] = []  # layers, experts of a token, experts
    prompt_ids: bytes = b""
    last_versions: bytes = b""  # of the tokens of the last segment, each once
    whole: bool = True  # its log-probs and versions match its tokens, its turns lie in its sequences
    routes_fault: str = ""


class LoggedTerms(msgspec.Struct, frozen=True):
    """The terms by which a record says that its groups were taken."""

    bound: int | None = None  # steps that a group may be old; None: any
    masks_old: bool = False
    last_segment: bool = False


class LoggedStep(msgspec.Struct):
    """A record of the write-ahead log."""

    step: int
    version: int
    samples: list[LoggedSample]
    terms: LoggedTerms | None = None  # not there in logs of before


class _TrainLine(msgspec.Struct):
    """A line of train.jsonl as it is written."""

    step: int
    samples: list[tuple[int, int, int]]  # uid, attempt, crc


@dataclass
class TrainStep:
    """A line of train.jsonl, and where in the file it ends. A long run has a hundred thousand."""

    step: int
    samples: npt.NDArray[np.void]  # of `ENTRY`
    end: int


class DrawsLine(msgspec.Struct):
    """A line of draws.log."""

    uids: list[int]


class CheckpointMeta(msgspec.Struct):
    """meta.json of a checkpoint."""

    step: int
    samples: int
    seed: int | None = None
    uids: str = "trained.bin"


@dataclass
class Checkpoint:
    """A checkpoint that could be read."""

    path: Path
    meta: CheckpointMeta
    bitmap: Codes  # of the trained uids: many checkpoints of many millions of them fit in memory


def read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is not there or is none."""
    data = read_bytes(path)
    try:
        value = msgspec.json.decode(data or b"{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def is_locked(path: Path) -> bool:
    """Check whether any process holds an OFD lock on the file, without taking it."""
    question = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with open(path, "rb") as file:
            return bool(FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, question))[0] != fcntl.F_UNLCK)
    except (FileNotFoundError, IsADirectoryError):
        return False


def read_fates(path: Path) -> npt.NDArray[np.uint8]:
    """Read a byte per uid up to the last that is not 0; empty without a file."""
    try:
        with open(path, "rb", buffering=0) as file:
            blocks = [np.frombuffer(block, np.uint8) for block in _blocks(file.fileno())]
    except FileNotFoundError:
        return np.zeros(0, np.uint8)
    while blocks and not blocks[-1].any():
        blocks.pop()
    if not blocks:
        return np.zeros(0, np.uint8)
    codes = np.concatenate(blocks)
    return codes[: codes.size - int(np.argmax(codes[::-1] != 0))]


def _blocks(fd: int) -> Iterator[bytes]:
    """The file up to the end of its last data, in blocks (the tail of the table is usually a hole)."""
    offset = 0
    while True:
        try:
            os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole follows; a file system without holes says so at the end
            return
        if not (block := os.pread(fd, BLOCK, offset)):
            return
        yield block
        offset += len(block)


# -- write-ahead log -----


def read_log(directory: Path, findings: list[Finding]) -> list[LoggedStep]:
    """All whole records in the order of the segments; damage and a torn end become findings."""
    paths = sorted(directory.glob("*.wal"), key=lambda path: path.name)
    steps: list[LoggedStep] = []
    for path in paths:
        data = read_bytes(path)
        if data is not None:
            steps += _read_segment(path, data, path == paths[-1], findings)
    return steps


def _read_segment(path: Path, data: bytes, newest: bool, findings: list[Finding]) -> Iterator[LoggedStep]:
    if newest and len(data) < WAL_HEAD.size:
        return
    magic, layout, crc = WAL_HEAD.unpack_from(data) if len(data) >= WAL_HEAD.size else (b"", 0, 0)
    if (magic, crc) != (b"BUSRLWAL", zlib.crc32(data[:12])) or layout not in WAL_LAYOUTS:
        findings.append(error("log_damaged", [path.name], "a log segment does not begin as one"))
        return
    offset = WAL_HEAD.size
    while offset < len(data):
        payload = _frame(data, offset)
        if payload is None:
            offset = _skip_damage(path, data, offset, newest, findings)
            continue
        offset += WAL_FRAME.size + len(payload)
        try:
            yield _without_payload(msgspec.msgpack.decode(payload, type=LoggedStep))
        except msgspec.DecodeError as exc:
            text = f"a record with a good checksum cannot be decoded: {exc}"
            findings.append(error("log_damaged", [path.name], text))


def _without_payload(step: LoggedStep) -> LoggedStep:
    """Looked at, the tokens of a sample are let go: two checkpoints' worth of steps may be more than fits in memory."""
    for sample in step.samples:
        sample.whole = _whole(sample)
        sample.routes_fault = _routes_fault(sample) if sample.whole else ""
        versions = np.frombuffer(sample.versions[: len(sample.versions) // 4 * 4], "<u4")
        if sample.turns and sample.whole:
            versions = versions[_trained(sample)]
        sample.token_ids = sample.logprobs = sample.prompt_ids = sample.routes = sample.prompt_routes = b""
        sample.seqs = sample.turns = []
        sample.keys = []
        sample.last_versions = np.unique(versions[sum(sample.segments[:-1]) :]).tobytes()
        sample.versions = np.unique(versions).tobytes()
    return step


def _trained(sample: LoggedSample) -> npt.NDArray[np.bool_]:
    """Mark each sampled id of an episode whose turn is trained."""
    turns = np.array(sample.turns).reshape(-1, 4)
    return np.repeat(turns[:, 3] % 2 == 1, turns[:, 2] - turns[:, 1])


def _sampled(sample: LoggedSample) -> int:
    """Count the sampled ids; -1 where the turns of an episode do not lie in its sequences, in their order."""
    if not sample.seqs and not sample.turns:
        return -1 if len(sample.token_ids) % 4 else len(sample.token_ids) // 4
    if len(sample.turns) % 4 or not sample.turns or 4 * sum(sample.seqs) != len(sample.token_ids):
        return -1
    turns = [sample.turns[at : at + 4] for at in range(0, len(sample.turns), 4)]
    before = (-1, 0)  # sequence of the turn before, and its end
    for sequence, begin, end, _ in turns:
        least = before[1] if sequence == before[0] else 1
        if not (before[0] <= sequence < len(sample.seqs) and max(1, least) <= begin < end <= sample.seqs[sequence]):
            return -1
        before = (sequence, end)
    if {len(sample.turn_rewards), len(sample.keys)} - {0, len(turns)}:
        return -1
    return sum(end - begin for _, begin, end, _ in turns)


def _whole(sample: LoggedSample) -> bool:
    if not 4 * _sampled(sample) == len(sample.logprobs) == len(sample.versions):
        return False
    logprobs = np.frombuffer(sample.logprobs, "<f4")
    return bool(np.isfinite(logprobs).all() and (logprobs <= 1e-3).all())


def _routes_fault(sample: LoggedSample) -> str:
    """The rule that the routes of a sound sample break; "" if none, as where it has none."""
    if not sample.routes and not sample.prompt_routes:
        return ""
    if len(sample.routes_shape) != 3 or min(sample.routes_shape) < 1:
        return f"routes of the shape {sample.routes_shape}"
    rows = {"routes": len(sample.logprobs) // 4, "prompt_routes": max(0, len(sample.prompt_ids) // 4 - 1)}
    if sample.turns:
        ends = {sequence: end for sequence, _, end, _ in np.array(sample.turns).reshape(-1, 4).tolist()}
        rows = {"routes": sum(end - 1 for end in ends.values()), "prompt_routes": 0}
    for name, count in rows.items():
        data = getattr(sample, name)
        if (data or name == "routes") and (fault := _fault_of_ids(data, count, *sample.routes_shape)):
            return f"{name}: {fault}"
    return ""


def _fault_of_ids(data: bytes, rows: int, layers: int, chosen: int, experts: int) -> str:
    try:
        plain = zlib.decompress(data) if data else b""
    except zlib.error:
        return "they cannot be decompressed"
    kind = np.dtype("u1" if experts <= 256 else "<u2")
    if len(plain) != rows * layers * chosen * kind.itemsize:
        return f"{len(plain)} bytes for {rows} positions"
    ids = np.sort(np.frombuffer(plain, kind).reshape(-1, chosen), axis=1)
    if ids.size and int(ids.max()) >= experts:
        return f"expert {int(ids.max())} of {experts}"
    return "an expert twice in one layer" if (ids[:, 1:] == ids[:, :-1]).any() else ""


def _frame(data: bytes, offset: int) -> bytes | None:
    """The payload of the whole record that begins at `offset`."""
    if offset + WAL_FRAME.size > len(data):
        return None
    mark, length, crc = WAL_FRAME.unpack_from(data, offset)
    payload = data[offset + WAL_FRAME.size : offset + WAL_FRAME.size + length]
    good = mark == b"WREC" and len(payload) == length and zlib.crc32(data[offset + 4 : offset + 8] + payload) == crc
    return payload if good else None


def _skip_damage(path: Path, data: bytes, offset: int, newest: bool, findings: list[Finding]) -> int:
    """The offset of the next whole record, or the end."""
    following = offset
    while (following := data.find(b"WREC", following + 1)) >= 0 and _frame(data, following) is None:
        pass
    place = f"{path.name}+{offset}"
    if following >= 0 or not newest:
        text = "a log record does not match its checksum, and records follow it"
        findings.append(error("log_damaged", [place], text))
    else:
        torn = f"{len(data) - offset} bytes of half a record end the log: its writer was killed, or writes it now"
        findings.append(note("torn_tail", [place], torn))
    return following if following >= 0 else len(data)


# -- checkpoints -----


def read_checkpoints(directory: Path, findings: list[Finding]) -> list[Checkpoint]:
    """All checkpoints that can be read, oldest step first. Read again if a newer one came meanwhile, since the run may
    then have removed the one that was being read."""
    for _ in range(CHECKPOINT_LOOKS):
        attempt, paths = list[Finding](), _checkpoint_paths(directory)
        result = [_read_checkpoint(path, path == paths[-1], attempt) for path in paths]
        if paths[-1:] == _checkpoint_paths(directory)[-1:]:
            break
    findings += attempt
    return [checkpoint for checkpoint in result if checkpoint is not None]


def _checkpoint_paths(directory: Path) -> list[Path]:
    matches = [(re.fullmatch(r"global_step_(\d+)", path.name), path) for path in directory.glob("*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def _read_checkpoint(path: Path, newest: bool, findings: list[Finding]) -> Checkpoint | None:
    try:
        meta = msgspec.json.decode((path / "meta.json").read_bytes(), type=CheckpointMeta)
        bitmap, count = unpack_trained((path / meta.uids).read_bytes())
    except (OSError, ValueError, zlib.error, struct.error) as exc:
        if newest:
            findings.append(error("checkpoint_damaged", [path.name], f"the newest checkpoint cannot be read: {exc}"))
        elif not isinstance(exc, FileNotFoundError):  # older ones are removed file by file
            findings.append(note("old_checkpoint_damaged", [path.name], f"an older checkpoint cannot be read: {exc}"))
        return None
    if meta.samples != count:
        text = f"meta.json says {meta.samples} samples, {meta.uids} holds {count}"
        findings.append(error("checkpoint_damaged", [path.name], text))
    return Checkpoint(path, meta, bitmap)


def unpack_trained(data: bytes) -> tuple[Codes, int]:
    """The bitmap of a trained.bin and how many uids are in it; ValueError if its bytes are not what was written."""
    magic, layout, crc, count, size = TRAINED_HEAD.unpack_from(data)
    body = data[TRAINED_HEAD.size :]
    if (magic, layout) != (b"BUSRLTRD", 1) or zlib.crc32(body) != crc:
        raise ValueError("the trained set does not match its checksum")
    bitmap = zlib.decompress(body)
    set_bits = int.from_bytes(bitmap, "little").bit_count()
    if (len(bitmap), set_bits) != (size, count):
        raise ValueError(f"the trained set holds {set_bits} uids, its head says {count}")
    return np.frombuffer(bitmap, np.uint8), set_bits


# -- smaller files -----


def read_open(path: Path, findings: list[Finding]) -> Uids | None:
    data = read_bytes(path)
    if data is None:
        return None
    body = data[OPEN_HEAD.size :]
    magic, layout, count, crc, _ = OPEN_HEAD.unpack_from(data) if len(data) >= OPEN_HEAD.size else (b"", 0, 0, 0, 0)
    if (magic, layout, crc) != (b"BUSRLOPN", 1, zlib.crc32(body)) or len(body) != 16 * count:
        text = "open.bin does not match its checksum; nothing in it is believed"
        findings.append(error("open_damaged", [path.name], text))
        return np.zeros(0, np.uint64)
    uids: Uids = np.frombuffer(body, np.uint64)[::2]  # each is followed by the slot's state and index
    return uids


def read_train_log(path: Path, findings: list[Finding]) -> list[TrainStep]:
    steps: list[TrainStep] = []
    decoder, offset = msgspec.json.Decoder(_TrainLine), 0
    for line in _lines(path):
        offset += len(line)
        try:
            entry = decoder.decode(line)
            steps.append(TrainStep(entry.step, np.array(entry.samples, ENTRY), offset))
        except (ValueError, OverflowError) as exc:  # msgspec's errors are the former
            place = f"byte {offset - len(line)}"
            findings.append(error("train_log_disagrees", [place], f"a line is not what it must be: {exc}"))
    return steps


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, one at a time: it may be larger than what a machine can spare."""
    try:
        with open(path, "rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))
    except (FileNotFoundError, NotADirectoryError):
        return


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """The lines that are what they must be; what is damaged is left out."""
    for line in _lines(path):
        with contextlib.suppress(ValueError, RecursionError):
            yield msgspec.json.decode(line, type=kind)


def read_put_backs(path: Path) -> int:
    """Count the samples that draws.log put back, each time counted."""
    return sum(len(line.uids) for line in read_lines(path, DrawsLine))
