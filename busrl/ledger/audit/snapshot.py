"""One look at a run, taken in an order that can not accuse a run that is going on of something it did not do.

Talks to the run directory and the ring file, read-only. Knows nothing of the rules.

The order is: fates, size of the train log, log, checkpoints, train log, ring, open.bin, fates again. It leans on the
order in which the run itself acts:
- uid into a slot -> D -> ... -> terminal fate -> slot FREE: who is D in both looks at the fates was in its slot between
  them, when the ring was read. Else it is lost.
- record -> T; checkpoint in place -> records dropped: who is T in the first look is in the log, or in a checkpoint
  that was there before the record went, and checkpoints are read after the log.
- record -> T -> slot FREE: who is in the log, and not T in the last look, was in its slot when the ring was read.
- record -> line of the train log -> checkpoint: lines that were there before the log was read have their record or a
  checkpoint; uids of a checkpoint have their line, and the train log is read after the checkpoints.
- open.bin written -> ring unlinked: without a ring, open.bin is there when it is read next.
If a ring, its open.bin or the prompts' topology came or went meanwhile, the look is taken again.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from typing import Any

from busrl.errors import NoSuchRun
from busrl.ledger.audit import readers
from busrl.ledger.audit.prompts import Prompts
from busrl.ledger.audit.report import Finding, error, note
from busrl.ledger.audit.ring import NotARing, Slots, read_ring
from busrl.ledger.audit.sets import Codes, Uids

LOOKS = 5
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Terms:
    """What the rules need of the topology."""

    group_size: int
    seed: int
    shuffle: bool
    wal: str
    train: str
    bound: int | None = None  # steps that a trained group may be old; None = nothing is promised
    masks_old: bool = False  # a group above the bound is trained without its tokens that are too old
    last_segment: bool = False  # only the last segment of an answer is trained

    @property
    def g_min(self) -> int:
        return max(2, math.ceil(0.75 * self.group_size))


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
    """Where the run's ring lies: as run.json says, else by the rule for its name."""
    named = readers.read_json(run_dir / "run.json").get("ring")
    if isinstance(named, str) and named:
        return SHARED / named  # an absolute path replaces the directory
    key = sha1(str(run_dir.resolve()).encode()).hexdigest()[:12]
    return SHARED / f"busrl.{os.getuid()}.{key}.ring"


def _identity(run_dir: Path) -> tuple[tuple[int, int] | None, ...]:
    """Changes when the ring or open.bin is made, replaced or removed."""
    return tuple(_file_id(path) for path in (ring_file(run_dir), run_dir / "open.bin"))


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def _look(run_dir: Path, prompts: Path | None) -> Snapshot:
    found = readers.Findings()
    terms = read_terms(run_dir)
    first = readers.read_fates(run_dir / "fates.bin")
    validate_first = readers.read_fates(run_dir / "fates.validate.bin")
    known = _size(run_dir / "train.jsonl")
    log = readers.read_log(run_dir / "wal", found)
    checkpoints = readers.read_checkpoints(run_dir / "checkpoints", found)
    train_log = readers.read_train_log(run_dir / "train.jsonl", found)
    slots, damaged = _slots(run_dir, found)
    open_uids = readers.read_open(run_dir / "open.bin", found)
    last = readers.read_fates(run_dir / "fates.bin")
    validate_last = readers.read_fates(run_dir / "fates.validate.bin")
    return Snapshot(
        terms=terms,
        state=_state(run_dir, slots, damaged, open_uids),
        first=first,
        last=last,
        validate_first=validate_first,
        validate_last=validate_last,
        log=log,
        checkpoints=checkpoints,
        train_log=train_log,
        train_log_known=known,
        slots=slots,
        open=open_uids,
        put_back=readers.read_put_backs(run_dir / "draws.log"),
        prompts=_prompts(run_dir, terms, prompts, found),
        problems=found.items,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _state(run_dir: Path, slots: Slots | None, damaged: bool, open_uids: Uids | None) -> str:
    if readers.is_locked(run_dir / "run.lock"):
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
            train=str(data["train"]),
            **_age_terms(topology),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise NoSuchRun(
            f"{run_dir}: topology.json is missing or lacks {exc}: only the directory of a run that was started can be "
            "audited; name the directory that holds fates.bin"
        ) from exc


def _age_terms(topology: dict[str, Any]) -> dict[str, Any]:
    """What is promised of ages; nothing where the topology does not say, or asks for them (`forced_age`)."""
    weights, segments = topology.get("weights", {}), topology.get("segments", {})
    by_mode = {"batch-async": weights.get("max_staleness"), "sync": _waves(segments) - 1}
    forced = {**topology["learner"], **topology.get("experiments", {})}.get("forced_age", 0)  # an older run: [learner]
    return {
        "bound": None if forced else by_mode.get(weights.get("mode")),
        "masks_old": weights.get("mode") == "batch-async" and weights.get("over_age") == "wait",
        "last_segment": segments.get("loss") == "last_segment",
    }


def _waves(segments: dict[str, Any]) -> int:
    """Rounds that an answer may take in mode sync."""
    in_waves = segments.get("length") and segments.get("rounds") == "segments"
    return int(segments.get("max_segments", 1)) if in_waves else 1


def _slots(run_dir: Path, found: readers.Findings) -> tuple[Slots | None, bool]:
    """The slots of the run's own ring, and whether a ring is there that nobody can use."""
    try:
        slots = read_ring(ring_file(run_dir))
    except NotARing as exc:
        found.add(
            error("bad_ring", [], f"the ring can not be read, so dispatched samples are not found in it: {exc}", 1)
        )
        return None, True
    uuid = readers.read_json(run_dir / "run.json").get("uuid")
    if slots is not None and isinstance(uuid, str) and uuid.replace("-", "").lower() not in ("", slots.uuid.hex()):
        found.add(
            note("foreign_ring", [slots.uuid.hex()], f"the ring is not the one of this run ({uuid}); it is left out")
        )
        return None, False
    return slots, False


def _prompts(run_dir: Path, terms: Terms, given: Path | None, found: readers.Findings) -> Prompts | None:
    path = given or Path(str(readers.read_json(run_dir / "run.json").get("prompts") or terms.train))
    try:
        prompts = Prompts(path, terms.seed, terms.shuffle)
    except OSError as exc:
        found.add(
            note("prompts_unchecked", [str(path)], f"no prompt file, so nobody checked which prompt is whose: {exc}")
        )
        return None
    return prompts if len(prompts) else None
