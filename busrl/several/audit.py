"""`busrl audit` of a run of several models or seats: each ledger by all rules, and which episodes lost a side.

Reads the files of the run directory and of the folders of its models. Shares no code with the run but the names of
states and fates. Knows nothing of how an episode is played.

- The sides of an episode have the same draw, try and member. What a death or an accident left half is played again for
  the sides that are left: that is no error, and counted as `unpaired` with its cause.
- An episode with a side that is still dispatched is not over, and counts as nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from busrl.data.pretrained import task_prompts
from busrl.ledger import audit as auditing
from busrl.ledger.audit import AuditReport, readers
from busrl.ledger.audit.readers import Codes
from busrl.ledger.audit.snapshot import FATES, MODELS, read_terms
from busrl.states import ACCIDENTS, RULES, Fate
from busrl.system.files import as_map, read_map

DRAWS_AT_ONCE = 1 << 14
ENDED = [*RULES, Fate.TRAINED]
CAUSES = {
    "accident": "a side ended by accident, and was played again without the others",
    "alone": "a side was played after the others were over, as one that holds them was killed or a ring was lost",
    "finished": "the model of a side had made all of its steps",
}


class Sides(NamedTuple):
    """The sides that one model plays: their number, the members of a group, and the fates of all of its samples."""

    seats: int
    size: int
    codes: Codes

    @property
    def draws(self) -> int:
        """Draws up to the last one of which a sample was dispatched."""
        used = np.flatnonzero(self.codes)
        return int(used[-1]) // (2 * self.size * self.seats) + 1 if used.size else 0

    def of(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """The fates of some draws, as [seat, draw, try x member]."""
        width = 2 * self.size * self.seats
        codes = self.codes[first * width : (first + count) * width]
        whole = np.pad(codes, (0, count * width - codes.size))
        return np.asarray(whole.reshape(count, self.seats, 2 * self.size).transpose(1, 0, 2))


def unpaired(ledgers: Sequence[Sides]) -> dict[str, int]:
    """Episodes of which some sides have ended and others never will, by cause."""
    ends = [ledger.draws for ledger in ledgers]
    found = Counter[str]()
    for first in range(0, max(ends, default=0), DRAWS_AT_ONCE):
        count = min(DRAWS_AT_ONCE, max(ends) - first)
        codes = np.concatenate([ledger.of(first, count) for ledger in ledgers])
        beyond = np.repeat(ends, [ledger.seats for ledger in ledgers])[:, None] <= np.arange(first, first + count)
        found.update(_causes(codes, np.broadcast_to(beyond[:, :, None], codes.shape)))
    return {cause: found[cause] for cause in CAUSES if found[cause]}


def _causes(codes: npt.NDArray[np.uint8], beyond: npt.NDArray[np.bool_]) -> dict[str, int]:
    """`codes`: by side first; `beyond`: the side's model opened no draw from this one on."""
    ended, accident = np.isin(codes, ENDED), np.isin(codes, [*ACCIDENTS])
    half = ended.any(0) & ~ended.all(0) & ~(codes == Fate.DISPATCHED).any(0)
    by_accident, finished = accident.any(0), (beyond & ~ended).any(0)
    return {
        "accident": int((half & by_accident).sum()),
        "finished": int((half & ~by_accident & finished).sum()),
        "alone": int((half & ~by_accident & ~finished).sum()),
    }


@dataclass(frozen=True)
class Audited:
    """The outcome: the report of each model beside the lead, and the episodes that lost a side, by cause."""

    models: dict[str, dict[str, object]]
    unpaired: dict[str, int]
    reports: tuple[AuditReport, ...]
    beside: ClassVar[bool] = True  # the run's own report stands before it

    @property
    def errors(self) -> list[str]:
        return [f"{Path(report.run_dir).name}: {kind}" for report in self.reports for kind in sorted(report.kinds)]

    def _asdict(self) -> dict[str, Any]:
        return {"models": self.models, "unpaired": self.unpaired}

    def lines(self) -> Iterator[str]:
        for report in self.reports:
            yield auditing.render(report)
        for cause, count in self.unpaired.items():
            yield f"  NOTE unpaired x {count:,}: {CAUSES[cause]}"


def audit_models(run_dir: Path) -> dict[str, AuditReport]:
    """The reports of the models beside the lead that are trained, by tag."""
    folders = sorted(path.parent for path in (run_dir / MODELS).glob(f"*/{FATES[0]}"))
    return {folder.name: auditing.audit(folder, prompts=_prompts_of(folder)) for folder in folders}


def _prompts_of(folder: Path) -> Path | None:
    train = as_map(read_map(folder / "topology.json").get("data")).get("train")
    return task_prompts(str(train))


def sides_of(folder: Path) -> Sides:
    terms = read_terms(folder)
    return Sides(terms.seats, terms.group_size, readers.read_fates(folder / FATES[0]))


def audit(run_dir: str | Path, waste: bool = False) -> Audited | None:
    """The reports beside the lead's, and the unpaired episodes; None for a run of one model with one seat."""
    root = Path(run_dir).resolve()
    reports = audit_models(root)
    if not reports and read_terms(root).seats == 1:
        return None
    ledgers = [sides_of(root), *(sides_of(root / MODELS / tag) for tag in reports)]
    told = {tag: report.to_json() for tag, report in reports.items()}
    return Audited(told, unpaired(ledgers), tuple(reports.values()))
