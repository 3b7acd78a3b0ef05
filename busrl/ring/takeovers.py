"""What was taken back from the dead, in words and by sample: for `errors.jsonl`, where a sample's history is read.

Reads the lines of the slots that a reaper has just moved. Knows nothing of files or of who reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from busrl.ring import UID_NONE, Reaped, Ring, State

Step = tuple[str, int, str, str]  # label and pid of the dead owner, from which state, to which


def taken_back(ring: Ring, reaped: Iterable[Reaped]) -> Iterator[tuple[str, list[int]]]:
    """One text for each dead owner and step, and the samples that it is about.

    A slot that went back to FREE held no sample yet; any other keeps its sample, which may only have moved on since.
    """
    steps: dict[Step, list[int]] = {}
    for one in reaped:
        uid = UID_NONE if one.to == State.FREE else int(ring.line(one.slot)["uid"])
        steps.setdefault((one.label, one.pid, one.frm.name, one.to.name), []).append(uid)
    for (label, pid, before, after), uids in steps.items():
        text = f"{len(uids)} slots of {label} (pid {pid}) went back from {before} to {after}: it died"
        yield text, [uid for uid in uids if uid != UID_NONE]
