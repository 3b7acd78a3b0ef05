"""Account of what a run generated and did not train, by cause; and whether long answers are lost more often.

Pure: takes a `RunRecord`, returns a `Waste` or lines for people. Knows nothing of the ring, and so no details of what
is under way.

- Tokens of ended groups are those of groups.jsonl, of validation those of validation.log. The tokens that engines drew
  are known up to the last line of each life in pace/.
- The rest of these was under way, or lost with a process, a ring or a sample that was rolled again. It is counted in
  samples, as no file has its tokens.
- A group counts once. A group whose step was undone (`wal = "off"`) counts as such, not as trained.
- Tokens of a step that are in no loss are tokens of its answers, divided in the shares of its line in metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from busrl.observe.report.files import Groups, Ints, RunRecord, read
from busrl.states import ACCIDENTS, Fate, fate_name
from busrl.status.runfiles import WORDS, fates, number, whole_number
from busrl.status.words import short
from busrl.system.files import as_map

QUARTERS = 4
SHARES = (10, 50, 90, 99)
UNDONE = "trained, and made undone by a return to a checkpoint"
MASKED = {
    "earlier_segments": "in trained answers: segments before the last trained one",
    "too_old": "in trained answers: tokens of weights that are too old",
    "cut": "in trained answers: of answers that the limit cut",
    "untrained": "in trained answers: turns that are not trained",
}
ESS_LOW = 0.3  # where the topology has no learner.ess_alarm


@dataclass(frozen=True)
class Part:
    """A part of the tokens, by what became of them. `tokens` is None if no file has them."""

    name: str
    what: str
    samples: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Lengths:
    """Lengths of a kind of answers: their count, mean and quantiles in tokens."""

    samples: int = 0
    mean: float = 0.0
    quantiles: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Ints) -> Lengths:
        if not len(values):
            return cls()
        values_at = np.percentile(values, SHARES)
        return cls(len(values), float(values.mean()), {f"p{n}": float(value) for n, value in zip(SHARES, values_at)})


@dataclass(frozen=True)
class Quarter:
    """A quarter of the ended groups by mean length: the shares that were trained, flat, or lost otherwise, and the mean
    age of the trained ones."""

    shortest: float
    longest: float
    groups: int
    trained: float
    flat: float
    lost: float
    age: float | None


@dataclass(frozen=True)
class Waste:
    """The account of a run. `sampled` are the tokens that engines sampled, None if not known; `parts` add up to them.
    `ess` has the mean over tokens, median, lowest, and the share of steps below the alarm's limit."""

    sampled: int | None
    trained: int
    parts: tuple[Part, ...]
    counted: tuple[Part, ...]  # parts of "under way or lost", in samples alone
    lengths: dict[str, Lengths]
    quarters: tuple[Quarter, ...]
    ess: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(part.tokens or 0 for part in self.parts)

    @property
    def share(self) -> float | None:
        """The trained share of the tokens that were drawn for training."""
        sampled = self.total - sum(part.tokens or 0 for part in self.parts if part.name == "validation")
        return self.trained / sampled if sampled > 0 else None


def waste_of(record: RunRecord) -> Waste:
    groups = record.groups()
    alive = _standing(groups)
    trained, masked = _of_steps(record, groups, alive)
    parts = [Part("trained", "trained", int(groups.sizes[alive & (groups.fates == Fate.TRAINED)].sum()), trained)]
    parts += [Part(name, MASKED.get(name, name), None, tokens) for name, tokens in masked.items() if tokens]
    parts += _set_aside(groups, alive)
    judged = {row.get("uid"): whole_number(row.get("tokens")) for row in record.validated()}
    parts.append(Part("validation", "validation, which is never trained", len(judged), sum(judged.values())))
    sampled, notes = sampled_by_engines(record), []
    ended = sum(part.tokens or 0 for part in parts)
    if sampled is not None and sampled >= ended:
        parts.append(Part("left", "under way now, or lost before they ended", None, sampled - ended))
    else:
        notes.append("what engines drew is not known in full (pace/): tokens under way or lost are missing here")
    counted = tuple(part for part in _counted(record) if part.samples)
    return Waste(
        sampled if not notes else None, trained, tuple(parts), counted, _lengths(groups, alive),
        tuple(_quarters(groups, alive)), _ess(record), tuple(notes),
    )


def _standing(groups: Groups) -> Any:
    """A flag for each row: whether it counts, as the last one of its draw. A group that was set aside, but whose
    learner died before it was dropped, has two rows; a group that was trained again has an undone one besides, which
    does not count here."""
    rows = np.flatnonzero(~groups.undone)
    _, last = np.unique(groups.draws[rows][::-1], return_index=True)
    alive = np.zeros(len(groups.draws), np.bool_)
    alive[rows[len(rows) - 1 - last]] = True
    return alive


def _of_steps(record: RunRecord, groups: Groups, alive: Any) -> tuple[int, dict[str, int]]:
    """Tokens in the loss of their step, and tokens of its answers that are in no loss, by reason. All tokens of a step
    without a line count as trained. `masked` is a sum over passes, so only its shares are used."""
    trained = alive & (groups.fates == Fate.TRAINED)
    steps, place = np.unique(groups.steps[trained], return_inverse=True)
    tokens = dict(zip(steps.tolist(), np.bincount(place, groups.tokens[trained], len(steps)).tolist()))
    masked: dict[str, float] = {}
    for row in record.steps:
        counts = {name: number(count) or 0.0 for name, count in as_map(row.get("masked")).items()}
        total = (number(row.get("tokens")) or 0.0) + sum(counts.values())
        for name, count in counts.items():
            masked[name] = masked.get(name, 0.0) + tokens.get(row["step"], 0.0) * count / max(1.0, total)
    rounded = {name: round(count) for name, count in masked.items()}
    return int(sum(tokens.values())) - sum(rounded.values()), rounded


def _set_aside(groups: Groups, alive: Any) -> Iterator[Part]:
    tokens = groups.tokens
    for code in np.unique(groups.fates[alive]).tolist():
        rows = alive & (groups.fates == code)
        if code != Fate.TRAINED:
            what = WORDS.get(code, fate_name(code))
            yield Part(fate_name(code), what, int(groups.sizes[rows].sum()), int(tokens[rows].sum()))
    if groups.undone.any():
        yield Part("undone", UNDONE, int(groups.sizes[groups.undone].sum()), int(tokens[groups.undone].sum()))


def sampled_by_engines(record: RunRecord) -> int | None:
    """Tokens that rollout processes drew, over all lives of each; None without a line. A new engine counts from 0
    again, so the last count before each fall is added."""
    if not any(record.pace.values()):
        return None
    total = 0
    for rows in record.pace.values():
        counts = [whole_number(as_map(row.get("engine")).get("tokens")) for row in rows]
        total += sum(count for count, after in zip(counts, [*counts[1:], -1]) if after < count)
    return total


def _counted(record: RunRecord) -> Iterator[Part]:
    """Parts in samples, whose tokens no file has."""
    by_fate = fates(record.paths.fates)
    back = sum(
        len(uids) for row in record.errors()
        if row.get("process") in ("keeper", "launch") and isinstance(uids := row.get("uids"), list)
    )
    for code in ACCIDENTS:
        name = fate_name(code)
        yield Part(name, f"ended by an accident: {name}", by_fate.get(WORDS.get(code, name), 0))
    yield Part("dead", "in the slots of processes that died (those with committed answers lost nothing)", back)
    yield Part("put_back", "put back by a start, and generated again", record.put_back())
    yield Part("open", "without an end so far", by_fate.get(WORDS[Fate.DISPATCHED], 0))


def _lengths(groups: Groups, alive: Any) -> dict[str, Lengths]:
    flat, trained = groups.fates == Fate.FLAT, groups.fates == Fate.TRAINED
    kinds = {"ended": alive, "trained": alive & trained, "flat": alive & flat, "lost": alive & ~trained & ~flat}
    of_sample = groups.of_sample
    return {name: Lengths.of(groups.lengths[rows[of_sample]]) for name, rows in kinds.items()}


def _quarters(groups: Groups, alive: Any) -> Iterator[Quarter]:
    rows = np.flatnonzero(alive & (groups.sizes > 0))
    means = groups.tokens[rows] / np.maximum(1, groups.sizes[rows])
    order = np.argsort(means, kind="stable")
    for part in np.array_split(order, QUARTERS):
        if len(part):
            codes, at = groups.fates[rows[part]], rows[part]
            trained, flat = codes == Fate.TRAINED, codes == Fate.FLAT
            ages = (groups.steps - 1 - groups.born)[at][trained]
            yield Quarter(
                float(means[part[0]]), float(means[part[-1]]), len(part), float(trained.mean()), float(flat.mean()),
                float((~trained & ~flat).mean()), float(ages.mean()) if len(ages) else None,
            )


def _ess(record: RunRecord) -> dict[str, float]:
    ess, tokens = record.column("ess"), record.column("tokens")
    finite = np.isfinite(ess) & (tokens > 0)
    if not finite.any():
        return {}
    alarm = number(as_map(record.topology.get("learner")).get("ess_alarm"))
    limit, values = ESS_LOW if alarm is None else alarm, ess[finite]
    return {
        "mean": float(np.average(values, weights=tokens[finite])), "median": float(np.median(values)),
        "lowest": float(values.min()), "limit": limit, "below": float((values < limit).mean()),
    }


# -- for people -----

def render(waste: Waste) -> str:
    total = waste.total
    lines = [f"what became of {short(total)} generated tokens"]
    for part in waste.parts:
        tokens, samples = part.tokens or 0, "" if part.samples is None else f"{short(part.samples)} samples"
        lines.append(f"  {tokens / max(1, total):>6.1%} {short(tokens):>7}  {samples:<14} {part.what}")
    lines += [f"          among the last: {short(part.samples or 0)} samples {part.what}" for part in waste.counted]
    lines.append("lengths of answers, tokens")
    for name, kind in waste.lengths.items():
        more = "".join(f" · {key} {value:g}" for key, value in kind.quantiles.items())
        lines += [f"  {name:<8} mean {kind.mean:.1f}{more} · {short(kind.samples)} samples"] if kind.samples else []
    lines += ["ended groups by mean length, shortest first"] if waste.quarters else []
    for quarter in waste.quarters:
        age = "" if quarter.age is None else f", age {quarter.age:.2f}"
        shares = f"{quarter.trained:.1%} trained, {quarter.flat:.1%} flat, {quarter.lost:.1%} lost otherwise"
        lines.append(f"  {quarter.shortest:.0f} to {quarter.longest:.0f} tokens: {shares}{age}")
    if ess := waste.ess:
        lines.append(
            f"effective sample size (ess): {ess['mean']:.3f} of the trained tokens, lowest step {ess['lowest']:.3f}, "
            f"{ess['below']:.1%} of the steps below {ess['limit']:g}"
        )
    return "\n".join([*lines, *waste.notes])


def account_of(run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """The account for `busrl audit --waste`: fields of its JSON object, and lines."""
    record = read(run_dir)
    waste, faults = waste_of(record), [f"not counted: {fault}" for fault in record.faults]
    return {"waste": {**asdict(waste), "faults": faults}}, [render(waste), *faults]
