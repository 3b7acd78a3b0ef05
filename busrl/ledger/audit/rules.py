"""The promises of the ledger, each worked out from one snapshot: lost, trained twice, swapped, too old.

Pure: talks to nothing. Knows nothing of how the snapshot was read, nor of how the learner or the engines count ages.

- History is the newest checkpoint and the records with a later step; older records must be within the checkpoint.
- Age of a group = finished steps - the least step that a member counts from: that of its admission version, or of an
  older one that drew a token that is trained. So no member may count from a later step than its oldest trained token.
- Which step made a version is known from the records: each names the newest version before its step. Versions before
  the first record are judged only where it is the first of the run.
- A group is judged by what was in force while it was in flight (`inforce`), not by the topology of now. Above that it
  is an error; one with tokens that are too old themselves, which `over_age = "wait"` reads but does not train, a note.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from busrl.ledger.audit import readers
from busrl.ledger.audit.inforce import Promise, Timeline
from busrl.ledger.audit.readers import Codes, LoggedSample, LoggedStep, LoggedTerms, TrainStep, Uids
from busrl.ledger.audit.report import Finding, error, note
from busrl.ledger.audit.snapshot import UID_NONE, Slots, Snapshot, State
from busrl.states import ACCIDENTS, FATE_NAMES, TERMINAL, Fate

# -- ages -----


UNKNOWN = -1


class StepOf:
    """The step that made a version; `UNKNOWN` for one from before the log."""

    def __init__(self, log: Sequence[LoggedStep]) -> None:
        self._versions = [step.version for step in log]
        self._steps = [step.step - 1 for step in log]

    def __call__(self, version: int) -> int:
        i = bisect_left(self._versions, version)
        if i == len(self._steps) or (i == 0 and self._steps[0] > 0):
            return UNKNOWN
        return self._steps[i]


class Bounds:
    """The age that a group may have: the largest bound in force from the step that it counts from to its training, as
    starts and people set it, or as the records in between say that it was taken up."""

    def __init__(self, timeline: Timeline, log: Sequence[LoggedStep]) -> None:
        self._timeline, self._steps, self._bounds = timeline, list[int](), list[int | None]()
        for step in log:  # where the bound of the records changes
            if step.terms is not None and (not self._bounds or self._bounds[-1] != step.terms.bound):
                self._steps.append(step.step)
                self._bounds.append(step.terms.bound)

    def of_group(self, first: int, step: int) -> int | None:
        """The bound of a group that counts from step `first` and is trained by step `step`; None for no bound."""
        in_log = self._bounds[max(0, bisect_right(self._steps, first + 1) - 1) : bisect_right(self._steps, step)]
        bounds = [*(promise.bound for promise in self._timeline.during(first, step - 1)), *in_log]
        return None if None in bounds else max(bound for bound in bounds if bound is not None)


def terms_of(step: LoggedStep, timeline: Timeline) -> list[Promise | LoggedTerms]:
    """The terms that a record was made by: its own, else those of the topology of its time."""
    return [*timeline.at(step.step)] if step.terms is None else [step.terms]


def check_ages(snapshot: Snapshot) -> Iterator[Finding]:
    step_of, timeline = StepOf(snapshot.log), snapshot.terms.timeline
    bounds = Bounds(timeline, snapshot.log)
    wrong: list[int] = []
    groups: dict[str, list[int]] = {"old": [], "masked": [], "before": []}
    for step in snapshot.log:
        terms = terms_of(step, timeline)
        wrong += [sample.uid for sample in step.samples if not counts_right(sample, step, step_of, terms)]
        for group, age in ages_of(step).items():
            if kind := _above(step, group, age, bounds, terms, step_of):
                groups[kind].append(group)
    text = "counts its age from a later step than its oldest trained token, or from one that was not finished"
    yield error("wrong_age", wrong, text)
    yield error("too_old", groups["old"], "groups trained above the bound in force (weights.max_staleness)")
    yield note("old_tokens", groups["masked"], "groups trained above the bound, without the tokens that are too old")
    yield note("bound_of_before", groups["before"], "groups trained above a bound that came while they were in flight")


def check_versions(snapshot: Snapshot) -> Iterator[Finding]:
    """No token may be of a version that its model had not published when the record was made."""
    strangers = [
        sample.uid for step in snapshot.log for sample in step.samples
        if sample.whole and sample.versions and int(np.frombuffer(sample.versions, "<u4").max()) > step.version
    ]
    yield error("foreign_version", strangers, "has tokens of a version that its model had not published")


def check_terms(snapshot: Snapshot) -> Iterator[Finding]:
    """No record may claim a bound that neither a topology nor a person ever gave."""
    bounds = {promise.bound for promise in snapshot.terms.timeline.during(0, sys.maxsize)}
    strange = [step.step for step in snapshot.log if step.terms is not None and step.terms.bound not in bounds]
    yield error("unknown_bound", strange, "steps that name a bound on age that was never in force")


def _above(
    step: LoggedStep, group: int, age: int, bounds: Bounds, terms: Sequence[Promise | LoggedTerms], step_of: StepOf
) -> str:
    """Name how a group is above the bound of its step, "" if it is not: it may be for its old tokens, or came before
    it."""
    for term in terms:
        if term.bound is None or age <= term.bound:
            return ""
    if any(term.masks_old and _has_old_token(step, group, step_of, term.bound or 0) for term in terms):
        return "masked"
    bound = bounds.of_group(step.step - 1 - age, step.step)
    return "before" if bound is None or age <= bound else "old"


def oldest_age(log: Sequence[LoggedStep]) -> int:
    """The greatest age of any group of the log; -1 without one."""
    return max((age for step in log for age in ages_of(step).values()), default=-1)


def ages_of(step: LoggedStep) -> dict[int, int]:
    """The age of each group of a record at the time that it was trained."""
    least: dict[int, int] = {}
    for sample in step.samples:
        if sample.step != UNKNOWN:
            least[sample.group] = min(least.get(sample.group, sample.step), sample.step)
    return {group: step.step - 1 - oldest for group, oldest in least.items()}


def counts_right(
    sample: LoggedSample, step: LoggedStep, step_of: StepOf, terms: Sequence[Promise | LoggedTerms]
) -> bool:
    """Check that a sample counts its age, if any, from no later step than that of its oldest trained token."""
    if sample.step == UNKNOWN:
        return True
    if sample.step >= step.step:
        return False
    last_only = any(term.last_segment for term in terms)
    versions = np.frombuffer(sample.last_versions if last_only else sample.versions, "<u4")
    oldest = step_of(int(versions.min())) if versions.size else UNKNOWN
    return oldest == UNKNOWN or sample.step <= oldest


def _has_old_token(step: LoggedStep, group: int, step_of: StepOf, bound: int) -> bool:
    versions = b"".join(sample.versions for sample in step.samples if sample.group == group)
    steps = [step_of(version) for version in np.unique(np.frombuffer(versions, "<u4")).tolist()]
    # A version from before the log is older than the log's first step.
    return any(number == UNKNOWN or step.step - 1 - number > bound for number in steps)


# -- all rules -----


VALIDATE = np.uint64(1 << 62)
D, T, V, U = int(Fate.DISPATCHED), int(Fate.TRAINED), int(Fate.VALIDATED), int(Fate.UNUSED)
NO_UIDS: Uids = np.zeros(0, np.uint64)


@dataclass
class History:
    """The history of training: `uids` (ascending) is the surviving history; `logged` and `steps` run in parallel."""

    saved: Uids  # of the newest checkpoint, ascending
    saved_step: int
    logged: Uids
    steps: npt.NDArray[np.int64]
    uids: Uids


def history_of(snapshot: Snapshot) -> History:
    newest = snapshot.checkpoints[-1] if snapshot.checkpoints else None
    saved = readers.in_bitmap(newest.bitmap) if newest else NO_UIDS
    logged = np.array([sample.uid for step in snapshot.log for sample in step.samples], np.uint64)
    steps = np.repeat([step.step for step in snapshot.log], [len(step.samples) for step in snapshot.log])
    step = newest.meta.step if newest else -1
    return History(saved, step, logged, steps.astype(np.int64), readers.union(saved, logged))


def in_runs(ascending: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Each value once, and how often it stands there."""
    if not ascending.size:
        return ascending, ascending
    starts = np.flatnonzero(np.append(True, ascending[1:] != ascending[:-1]))
    return ascending[starts], np.diff(np.append(starts, ascending.size))


def groups_of(uids: Uids, group_size: int) -> npt.NDArray[np.int64]:
    return np.asarray(uids // np.uint64(2 * group_size)).view(np.int64)


# -- lost, and where the rest is -----


@dataclass
class Dispatched:
    """Samples that are D in the last look, by where they are."""

    in_slot: Uids
    in_open: Uids
    lost: Uids
    unsettled: Uids  # in the history, and still D in a slot or in open.bin: T is stored next


def codes_of(uids: Uids, train: Codes, validate: Codes) -> Codes:
    """The fate of each uid in the table of its class."""
    of_round = (uids & VALIDATE) != 0
    return np.where(of_round, readers.codes_at(validate, uids ^ VALIDATE), readers.codes_at(train, uids))


def dispatched(snapshot: Snapshot, history: History) -> Dispatched:
    seen = snapshot.slots.seen if snapshot.slots is not None else NO_UIDS
    put = snapshot.open if snapshot.open is not None else NO_UIDS
    train = readers.with_code(snapshot.last, D)
    validate = readers.with_code(snapshot.validate_last, D) | VALIDATE
    now = np.concatenate([train, validate])
    before = codes_of(now, snapshot.first, snapshot.validate_first)
    in_slot, in_open, in_history = (readers.is_among(now, those) for those in (seen, np.sort(put), history.uids))
    lost = ~in_slot & ~in_open & ~in_history & (before == D)
    # D only in the last look and in no slot then: dispatched after the ring was read, so it stands in one now.
    fresh = ~in_slot & ~in_open & ~in_history & (before != D)
    unsettled = now[in_history & (in_slot | in_open)]
    return Dispatched(now[(in_slot | fresh) & ~in_history], now[in_open & ~in_slot & ~in_history], now[lost], unsettled)


def check_lost(snapshot: Snapshot, where: Dispatched) -> Iterator[Finding]:
    remedy = {
        "gone": "; there is neither a ring nor an open.bin, and the next start generates them again",
        "finished": " and not in open.bin",
        "damaged": " that can be read: the ring is damaged",
    }.get(snapshot.state, "")
    yield error("lost", where.lost, f"dispatched, without an end, and in no slot{remedy}")
    if snapshot.slots is not None and snapshot.open is not None:
        yield note("open_and_ring", ["open.bin"], "an open.bin beside a ring: a start or an end is under way", 1)


# -- history against the fates -----


def check_history(snapshot: Snapshot, history: History) -> Iterator[Finding]:
    uids, counts = np.unique(history.logged, return_counts=True)
    later = readers.distinct(history.logged[history.steps > history.saved_step])
    twice = np.union1d(uids[counts > 1], later[readers.is_among(later, history.saved)])
    yield error("trained_twice", twice, "in two places of checkpoint plus log")
    dropped = readers.minus(history.logged[history.steps <= history.saved_step], history.saved)
    text = f"in a log record up to step {history.saved_step}, but not in the checkpoint of that step"
    yield error("checkpoint_incomplete", dropped, text)
    for older, newer in pairwise(snapshot.checkpoints):
        gone = readers.bitmap_minus(older.bitmap, newer.bitmap)
        yield error("checkpoint_incomplete", gone, f"in {older.path.name}, but no longer in {newer.path.name}")
    steps = [step.step for step in snapshot.log]
    backward = [after for before, after in pairwise(steps) if after <= before]
    yield error("log_order", backward, "steps of the log that do not come after the step before them")


def check_trained(snapshot: Snapshot, history: History, where: Dispatched) -> Iterator[Finding]:
    wrong = readers.minus(history.uids[readers.codes_at(snapshot.last, history.uids) != T], np.sort(where.unsettled))
    yield error("logged_not_trained", wrong, "in checkpoint or log, but its fate is not T and no slot holds it")
    in_history = readers.mask_of(history.uids, snapshot.first.size)
    missing = np.flatnonzero((snapshot.first == T) & ~in_history).view(np.uint64)
    logged = [line for line in snapshot.train_log if not snapshot.terms.timeline.unlogged(line.step)]
    chosen = any(promise.wal == "off" for promise in snapshot.terms.timeline.during(0, sys.maxsize))
    lost = np.intersect1d(missing, uids_of(logged)) if chosen else missing
    hint = " (with wal = async a power cut can do this)" if snapshot.terms.wal == "async" else ""
    yield error("trained_unlogged", lost, f"fate T, but in no checkpoint and no log{hint}")
    if chosen:
        missing = readers.minus(missing, lost)
        unsaved = unsaved_of(snapshot, missing, history)
        rolled_back = readers.minus(missing, unsaved)
        text = "trained since the newest checkpoint; wal = off, so a death of the learner loses it"
        yield note("unsaved", unsaved, text)
        yield note("rolled_back", rolled_back, "trained, then lost with its learner: wal = off was chosen")


def unsaved_of(snapshot: Snapshot, missing: Uids, history: History) -> Uids:
    """With wal = off: what a living learner has trained since its checkpoint, by its train log."""
    if not snapshot.running:
        return NO_UIDS
    lines = [line for line in surviving(snapshot.train_log) if line.step > history.saved_step]
    return np.intersect1d(missing, uids_of(lines))


def check_payloads(snapshot: Snapshot) -> Iterator[Finding]:
    broken = [sample.uid for step in snapshot.log for sample in step.samples if not sample.whole]
    yield error("bad_payload", broken, "log-probs or versions do not match the tokens, or a log-prob is none")
    yield _routes(snapshot)


def _routes(snapshot: Snapshot) -> Finding:
    """Look for routes that no router of this model can have chosen."""
    shape, faults = [*snapshot.terms.routes], dict[int, str]()
    for sample in (sample for step in snapshot.log for sample in step.samples):
        other = shape and sample.routes_shape not in ([], shape)
        if fault := f"shape {sample.routes_shape}, the model has {shape}" if other else sample.routes_fault:
            faults[sample.uid] = fault
    first = next(iter(faults.values()), "")
    return error("bad_routes", [*faults], f"routes that no router of the model can have chosen: {first}")


# -- groups, re-rolls -----


def check_groups(snapshot: Snapshot, history: History) -> Iterator[Finding]:
    size, terms = snapshot.terms.group_size, snapshot.terms
    trained, counts = in_runs(groups_of(history.uids, size))
    small = trained[counts < terms.g_min(unused_in(snapshot, trained))]
    yield error("group_too_small", small, f"groups trained with fewer than g_min = {terms.g_min()} members")
    pairs = np.unique(np.stack([groups_of(history.logged, size), history.steps], axis=1), axis=0)
    groups, steps = np.unique(pairs[:, 0], return_counts=True)
    yield error("group_split", groups[steps > 1], "groups trained in more than one step")


def unused_in(snapshot: Snapshot, groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The members of each of these groups whose seat was not used, by the first try or by the second."""
    width = 2 * snapshot.terms.group_size
    unused = np.flatnonzero(snapshot.last == U) // width
    known, counts = in_runs(unused)
    at = np.searchsorted(known, groups)
    found = np.append(known, -1)[at] == groups
    return np.where(found, np.append(counts, 0)[at], 0)


def check_rerolls(snapshot: Snapshot) -> Iterator[Finding]:
    size = snapshot.terms.group_size
    whole = np.pad(snapshot.first, (0, -snapshot.first.size % (2 * size))).reshape(-1, 2, size)
    draw, member = np.nonzero(whole[:, 1])
    again = np.asarray((draw * 2 + 1) * size + member, np.uint64)
    parents = readers.codes_at(snapshot.last, again - np.uint64(size))
    wrong = again[~np.isin(parents, list(ACCIDENTS))]
    yield error("reroll_without_accident", wrong, "a second try whose first try did not end by accident")


def check_codes(snapshot: Snapshot) -> Iterator[Finding]:
    all_codes = {*FATE_NAMES}
    tables = (("fates.bin", snapshot.last, all_codes - {V}),
              ("fates.validate.bin", snapshot.validate_last, all_codes - {T}))
    for name, codes, allowed in tables:
        wrong = np.flatnonzero(~readers.is_one_of(codes, allowed))
        yield error("wrong_fate_code", wrong, f"bytes in {name} that are no fate there")


# -- who is who: swaps -----


@dataclass
class Claims:
    """Claims of a file about samples; parallel arrays. `group` and `member` are absent from the train log, `admission`
    from all but the ring and the log."""

    uid: Uids
    crc: npt.NDArray[np.int64]
    group: npt.NDArray[np.int64] | None = None
    member: npt.NDArray[np.int64] | None = None
    admission: npt.NDArray[np.int64] | None = None


def log_claims(log: list[LoggedStep]) -> Iterator[Claims]:
    samples = [sample for step in log for sample in step.samples]
    yield Claims(
        np.array([sample.uid for sample in samples], np.uint64),
        np.array([sample.prompt_crc for sample in samples], np.int64),
        np.array([sample.group for sample in samples], np.int64),
        np.array([sample.member for sample in samples], np.int64),
        np.array([sample.admission for sample in samples], np.int64),
    )


def train_log_claims(lines: list[TrainStep]) -> Iterator[Claims]:
    some: list[TrainStep] = []
    size = 0
    for line in lines:
        some.append(line)
        size += line.samples.size
        if size >= readers.UIDS_AT_ONCE or line is lines[-1]:
            yield Claims(uids_of(some), np.concatenate([step.samples["crc"] for step in some]).astype(np.int64))
            some, size = [], 0


def uids_of(lines: list[TrainStep]) -> Uids:
    return np.concatenate([NO_UIDS, *(line.samples["uid"] for line in lines)])


def slot_claims(slots: Slots) -> Iterator[Claims]:
    """Training samples at rest or at work; a RESERVED slot is still being written."""
    lines = slots.lines[believed(slots)]
    lines = lines[(lines["uid"] & VALIDATE) == 0]
    yield Claims(
        np.array(lines["uid"], np.uint64), lines["prompt_crc"].astype(np.int64), lines["group"].astype(np.int64),
        lines["member"].astype(np.int64), lines["admission"].astype(np.int64),
    )


def believed(slots: Slots) -> npt.NDArray[np.bool_]:
    """Slots whose line can be believed: read whole, and past RESERVED."""
    return np.asarray(slots.stable & (slots.state > State.RESERVED) & (slots.lines["uid"] != UID_NONE))


def check_claims(snapshot: Snapshot) -> Iterator[Finding]:
    places = {"log": log_claims(snapshot.log), "train.jsonl": train_log_claims(snapshot.train_log)}
    if snapshot.slots is not None:
        places["ring"] = slot_claims(snapshot.slots)
    for place, claims in places.items():
        yield from _check_place(snapshot, place, claims)


def _check_place(snapshot: Snapshot, place: str, claims: Iterator[Claims]) -> Iterator[Finding]:
    size, seats, prompts = snapshot.terms.group_size, snapshot.terms.seats, snapshot.prompts
    wrong, swapped, misplaced = [NO_UIDS], [NO_UIDS], [NO_UIDS]
    for some in claims:
        groups = groups_of(some.uid, size)
        if some.group is not None and some.member is not None:
            members = (some.uid % np.uint64(size)).astype(np.int64)
            wrong.append(some.uid[(some.group != groups) | (some.member != members)])
        if some.admission is not None:
            misplaced.append(some.uid[some.admission % seats != groups % seats])
        if prompts is not None and groups.size:
            swapped.append(some.uid[some.crc != prompts.crcs(groups // seats)])
    strangers, others = np.concatenate(wrong), readers.distinct(np.concatenate(swapped))
    yield error("wrong_group", strangers, f"the {place} gives a group or member that is not the one of the uid")
    yield error("swapped_prompt", others, f"the prompt in the {place} is not the one that the draw selects")
    text = f"the admission index in the {place} is not one of the seat that the uid is of"
    yield error("seat_out_of_range", np.concatenate(misplaced), text)


# -- the slots -----


def check_slots(snapshot: Snapshot) -> Iterator[Finding]:
    slots = snapshot.slots
    if slots is None:
        return
    is_believed = believed(slots)
    uids, state = slots.lines["uid"][is_believed], slots.state[is_believed]
    is_validate = (uids & VALIDATE) != 0
    codes = codes_of(uids, snapshot.first, snapshot.validate_first)
    ended = np.isin(codes, list(TERMINAL))
    # T is stored before the slot is freed.
    settled = np.isin(codes, [T, V]) & np.isin(state, [State.REWARDED, State.TRAINING])
    dropped = (state == State.DROPPED) & ((codes == slots.reason[is_believed]) | (codes == T))
    wrong = ended & ~settled & ~dropped
    names = ", ".join(sorted(kind.name for kind in State if kind in state[wrong]))
    yield error("terminal_in_slot", uids[wrong], f"has ended, but a slot still holds it ({names})")
    never = (codes == 0) & (codes_of(uids, snapshot.last, snapshot.validate_last) == 0)
    yield error("slot_without_fate", uids[never], "stands in a slot, but was never dispatched by its fate")
    odd = is_validate != ((slots.lines["cls"][is_believed] & 1) == 1)
    odd |= ~is_validate & (slots.lines["group_size"][is_believed] != snapshot.terms.group_size)
    yield error("wrong_class", uids[odd], "class or group size of the slot is not the one of the uid")
    unique, counts = np.unique(uids[slots.still[is_believed]], return_counts=True)
    yield error("uid_in_two_slots", unique[counts > 1], "stands in two slots at once")


# -- the train log -----


def surviving(lines: list[TrainStep]) -> list[TrainStep]:
    """The lines that stand: a line takes the place of all earlier lines with its step or a later one."""
    standing: list[TrainStep] = []
    for line in lines:
        while standing and standing[-1].step >= line.step:
            standing.pop()
        standing.append(line)
    return standing


def check_train_log(snapshot: Snapshot, history: History) -> Iterator[Finding]:
    steps = surviving([line for line in snapshot.train_log if line.end <= snapshot.train_log_known])
    unlogged = snapshot.terms.timeline.unlogged
    steps = [line for line in steps if line.step <= history.saved_step or not unlogged(line.step)]
    extra = readers.minus(uids_of(steps), history.uids)
    yield error("train_log_disagrees", extra, "in train.jsonl, but in no checkpoint and no log")
    everything = uids_of(surviving(snapshot.train_log))
    everything.sort()
    silent = readers.minus(history.saved, everything)
    del everything
    yield error("train_log_disagrees", silent, "in the checkpoint, but not in train.jsonl")
    lines = {line.step: line.samples for line in surviving(snapshot.train_log)}
    both = [step for step in snapshot.log if step.step in lines]
    differ = [step.step for step in both if _entries(step) != sorted(lines[step.step].tolist())]
    yield error("train_log_disagrees", differ, "steps whose uid, attempt or crc differ between train.jsonl and log")


def _entries(step: LoggedStep) -> list[tuple[int, int, int]]:
    return sorted((sample.uid, sample.attempt, sample.prompt_crc) for sample in step.samples)
