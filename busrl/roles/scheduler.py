"""The scheduler: chooses which prompt enters the ring next, and when.

    work                        one pass; nothing is left to dispatch then until a message or the next tick
     |- _signs                  has a slot come free, did the learner get on? else the pass ends here
     |- scan -> GroupView       the open groups, from the ring's lines and the fates
     |- SkippedPrompts.look     how the newest groups ended, by groups.jsonl
     |- DispatchFeed.look       what is open and what finished -> Policy.look, Policy.finished
     |                          (with several seats or models: several.opening.Opening.open in place of the next two)
     |- _finish_open            GroupView.todo -> _put -> Ring.dispatch: members of open groups first
     |- _open_new               _room (Admission.room, not_ahead) groups: DispatchFeed.offer -> SkippedPrompts.take
     |                          (Policy.next) -> _open_group -> _put -> Ring.dispatch, then next_admission + 1
     '- _announce               NEW_TASK to the workers that asked, SCHEDULER_STATE, KeptPredictor.keep

    waits for                   unblocked by
    slots                       FREE slots: the learner ends a step, or sets a group aside
    in_flight, round            a publication (header words version, unpublished_groups)
    staleness                   the learner's next steps, which take the oldest group
    ahead                       a rollout that takes a sample (TASK_REQUEST says how many rows there are)
    arrivals                    the clock: the next prompt of an open stream

Talks to the ring (FREE -> RESERVED* -> QUEUED, fates, the header word next_admission), to the prompts, and to the bus
(NEW_TASK to every worker that asked). `busrl.scheduling` makes all decisions; this loop feeds them and carries them
out. Knows nothing of tokens.

- A member of an open group is dispatched before any new group, so that no group stays half open.
- A group is opened only under the group credit and while fewer than B are in flight (`busrl.scheduling.admission`).
- A draw whose prompt is left out by its pass rate is over without being opened.
- With a damaged fate table nothing is dispatched: what would follow from it is wrong.
- All state follows from ring and fates: a successor continues where this process was killed. What the dispatch policy
  learned is lost with the process, which costs order, never a sample.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from busrl import capabilities
from busrl.data import JsonlStream, plain_text, trace, training_stream
from busrl.data.prompts import PromptLine
from busrl.errors import CannotTrain, DiskFull, MachineError, SharedMemoryFull, UserError
from busrl.ledger.skips import SkipLine, skip_lines
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.protocol.codec import is_address
from busrl.ring import Fates, Ring, State, seq_of
from busrl.roles.actor import NO_SPACE, WAVE_TICK_S, Actor, Doorbell
from busrl.scheduling.admission import Admission, Arrivals, Room, Rows, Waves, not_ahead
from busrl.scheduling.dispatch import OpenGroup, Policy
from busrl.scheduling.groups import FinishedAnswers, GroupScanner, GroupView, Lines, in_a_row
from busrl.scheduling.pass_rates import Band, PassRates, PromptFilter
from busrl.scheduling.plan import checkpoint_may_follow, policy_of
from busrl.scheduling.predictor import Candidate, KeptPredictor, NothingKept, Predictor
from busrl.states import Fate, HeaderWord, RunPhase, SampleClass, place_of, uid_of
from busrl.system.files import LineFile, LineFollower
from busrl.topology import Topology
from busrl.topology.sizes import in_flight

log = logging.getLogger("busrl")
RECORDS_A_LINE = 64
TAG_KEY = "tag"
STATE_EVERY_S = 1.0
LOOK_EVERY_S = 0.25
PREDECESSOR_LOOK_S = 0.02
WORKER_FORGOTTEN_S = 10.0
NO_END = 1 << 62


Warn = Callable[[str], None]


# -- in which order ------------------------------------------------------------------------------------------------


def predictor_of(topology: Topology, paths: RunPaths, stream: JsonlStream, warn: Warn) -> KeptPredictor:
    """The predictor that the policy asks; a policy that asks none needs no `busrl.predict`."""
    if not topology.scheduler.predicts:
        return NothingKept()
    predictor: KeptPredictor = capabilities.plug("predict", "kept")(topology, paths, stream, warn)
    return predictor


class DispatchFeed:
    """The dispatch policy of a run with its inputs (prompts, open groups, finished answers) and `scheduler.jsonl`.

    The policy asks `predictor`; `warn` gets what cannot be written. A policy that does not learn is fed nothing, so
    that it costs nothing.
    """

    def __init__(
        self, topology: Topology, paths: RunPaths, stream: JsonlStream, predictor: Predictor, warn: Warn
    ) -> None:
        self.topology, self.paths, self.stream = topology, paths, stream
        self.predictor, self._warn = predictor, warn
        self.policy: Policy = policy_of(topology, self.predictor)
        self._answers = FinishedAnswers()
        self._records: list[OpenGroup] = []

    def look(self, view: GroupView, lines: Lines, rows: int) -> None:
        """Feed the policy what finished since the last look, what is open, and how many rows the workers have."""
        if not self.policy.learns:
            return
        open_draws = view.draws.tolist()
        self.policy.adopt(self._candidates(self.policy.unknown(open_draws)))
        uids, tokens = self._answers.look(lines)
        if len(uids):
            self.policy.finished(place_of(uids, view.group_size)[0].tolist(), tokens.tolist())
        self.policy.look(open_draws, (view.running + view.due).tolist(), rows)
        self.write(self.policy.take_records())

    def offer(self, view: GroupView, groups: int, arrived: int) -> None:
        """Supply the policy with the draws within its horizon that have arrived: those below `arrived`."""
        draws = view.unopened(self.policy.horizon + groups)  # ascending, and up to a hundred thousand
        if missing := self.policy.missing(draws[: np.searchsorted(draws, arrived)]):
            self.policy.offer(self._candidates(missing))

    def _candidates(self, draws: Sequence[int]) -> list[Candidate]:
        prompt_key, limit = self.topology.data.prompt_key, self.topology.generation.max_new_tokens
        records = [(draw, self.stream.record(self.stream.item(draw))) for draw in draws]
        return [
            Candidate(draw, plain_text(record[prompt_key]), limit, str(record.get(TAG_KEY, "")))
            for draw, record in records
        ]

    def metrics(self) -> dict[str, float]:
        """Numbers about policy and predictor, for SCHEDULER_STATE and `scheduler.jsonl`."""
        if not self.policy.learns:
            return {}
        measures = self.predictor.metrics()
        return self.policy.metrics() | {name: value for name, value in measures.items() if math.isfinite(value)}

    def write(self, records: Sequence[OpenGroup], least: int = RECORDS_A_LINE) -> None:
        """Append ended groups to `scheduler.jsonl` once there are `least`: a list per number and line, and how good the
        predictions are."""
        self._records += records
        if len(self._records) < max(1, least):
            return
        columns = ("draw", "wait", "predicted", "actual", "longest", "members")
        line = {name: [round(getattr(record, name), 2) for record in self._records] for name in columns}
        self._records = []
        head = {"time": round(time.time(), 3), "policy": self.policy.name, "predictor": self.predictor.name}
        try:
            with closing(LineFile(self.paths.scheduler_log, keep=self.topology.log.keep)) as file:
                file.append(json.dumps(head | self.metrics() | line).encode())
        except (MachineError, UserError) as problem:
            self._warn(f"{len(line['draw'])} groups are missing from {self.paths.scheduler_log.name}: {problem}")

    def close(self) -> None:
        self.write(self.policy.take_records(), least=1)


# -- which prompts are left out ------------------------------------------------------------------------------------


class GroupRewards(msgspec.Struct):
    """The fields that are read of a line of groups.jsonl."""

    draws: list[int]
    rewards: list[list[float]]


class SkippedPrompts:
    """The prompts that are left out by their pass rates ([data.skip]): the filter, and its record in skips.jsonl.
    `warn` gets what people should know; without [data.skip] nothing happens.

    - A line of skips.jsonl first, then the fates that it is about: a scheduler that is killed in between leaves a line
      by which its successor stores them, so a draw that was left out stays left out.
    - The first sample of a draw that is left out gets the fate `s`, the others none: the draw is over, and was never
      open.
    - A group that cannot be read (a full disk, a damaged line) is not judged by: that leaves a prompt in, never out.
    """

    def __init__(self, topology: Topology, paths: RunPaths, stream: JsonlStream, fates: Fates, warn: Warn) -> None:
        skip, sources = topology.data.skip, topology.derived.sources
        self.on, self._solved, self._warn = skip.on, topology.validation.solved, warn
        self._stream, self._fates, self._size = stream, fates, topology.groups.size
        mixed = len(sources) > 1
        self._names = [source.name for source in sources] if mixed else [Path(topology.data.train).stem]
        sizes = [source.count for source in sources] if mixed else [len(stream)]
        rates = PassRates(Band(skip.min_pass_rate, skip.max_pass_rate, skip.after, skip.rest), sizes)
        self.filter = PromptFilter(rates, stream.place, stream.epochs)
        self.left_out = [0 for _ in sizes]
        self._newest = 0  # draw
        if self.on:
            self._groups = LineFollower(paths.groups, NO_END)
            self._restore(paths.skips)
            self._file = LineFile(paths.skips)

    def _restore(self, path: Path) -> None:
        """Take over what predecessors left out: their fates, their counts, a pass for which they had given up."""
        for line in skip_lines(path):
            self.filter.resume(max(self.filter.given_up, line.given_up))
            self._newest = max([self._newest, *line.draws])
            self._end(line.draws)
            self.left_out = [line.left_out.get(name, 0) for name in self._names]

    def look(self) -> None:
        """Feed the filter the groups that ended since the last look."""
        for text in self._groups.new() if self.on else ():
            try:
                line = msgspec.json.decode(text, type=GroupRewards)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            for draw, rewards in zip(line.draws, line.rewards):
                right = sum(reward >= self._solved for reward in rewards)
                self.filter.rates.ended(draw, self._stream.place(draw), right, len(rewards))

    def take(self, following: Callable[[], Candidate | None], groups: int) -> tuple[list[Candidate], bool]:
        """At most `groups` of the candidates that follow, without those that are left out; and whether one was."""
        wanted: list[Candidate] = []
        out: list[int] = []
        given_up = self.filter.given_up
        while len(wanted) < groups and (candidate := following()) is not None:
            if self.on and self.filter.leaves_out(candidate.draw):
                out.append(candidate.draw)
            else:
                wanted.append(candidate)
        if out or given_up != self.filter.given_up:
            self._leave_out(out, given_up)
        return wanted, bool(out)

    def _leave_out(self, draws: list[int], given_up: int) -> None:
        counts = list(self.left_out)
        for draw in draws:
            counts[self._stream.place(draw).source] += 1
        self._newest = max([self._newest, *draws])
        now = self.filter.given_up if self.filter.given_up != given_up else 0
        line = SkipLine(
            time=round(time.time(), 3), told=self.filter.rates.groups, draws=draws, given_up=now,
            left_out=dict(zip(self._names, counts)), resting=self._resting(),
            prompts=dict(zip(self._names, self.filter.rates.sizes)),
        )
        try:
            self._file.append(msgspec.json.encode(line))
        except MachineError:
            self.filter.resume(given_up)  # decided again, as the draws are
            raise
        self.left_out = counts
        self._end(draws)
        if now:
            self._warn(
                f"every prompt is out of the band of data.skip: none is left out for one pass, up to draw {now}; the "
                "task is learned or out of reach, so end the run, give other prompts, or widen the band"
            )

    def _end(self, draws: list[int]) -> None:
        """Store that these draws were left out, over no fate or over what a predecessor had half stored."""
        for draw in draws:
            uid = uid_of(draw, 0, 0, self._size)
            self._fates.store(uid, Fate.DISPATCHED.letter)
            self._fates.store(uid, Fate.SKIPPED.letter)

    def _resting(self) -> dict[str, int]:
        return dict(zip(self._names, self.filter.rates.resting(self._stream.epochs(self._newest))))

    def metrics(self) -> dict[str, float]:
        """Numbers for SCHEDULER_STATE, in all and by source where there are several."""
        if not self.on:
            return {}
        resting = self._resting()
        values = {"left_out": float(sum(self.left_out)), "resting": float(sum(resting.values()))}
        if len(self._names) > 1:
            values |= {f"left_out/{name}": float(count) for name, count in zip(self._names, self.left_out)}
            values |= {f"resting/{name}": float(count) for name, count in resting.items()}
        return values

    def close(self) -> None:
        if self.on:
            self._file.close()


# -- the role ------------------------------------------------------------------------------------------------------


class Scheduler(Actor):
    role = "scheduler"
    singleton = True
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.TaskRequest, m.LearnerStateUpdate)

    def setup(self) -> None:
        data, derived, limits = self.topology.data, self.topology.derived, self.topology.derived.limits
        self.group_size = self.topology.groups.size
        self.stream = training_stream(self.topology)
        self.scanner = GroupScanner(self.fates.view(), self.group_size, horizon=derived.horizon)
        self.admission = Admission(limits, self.topology.weights.over_age)
        self._order()
        self.rows = Rows(in_flight(self.topology), WORKER_FORGOTTEN_S)
        self.arrivals: Arrivals | None = None
        if data.arrivals:  # an open stream, checked when the run was started
            self.arrivals = Arrivals([task.arrival_s or 0.0 for task in trace.read(data.train, data.prompt_key)])
        self.waves = Waves.of(limits)
        if self.waves is not None:
            self.tick_s = WAVE_TICK_S
        self.bell = Doorbell()
        self.room = Room(0, "starting")
        self.trained = 0  # groups, by the learner's last message
        self._next_state = self._next_look = 0.0
        self._signs_seen: tuple[int, ...] = ()
        self.reap_predecessor(self.ring)
        with self.activity("read what prompts were answered", self.topology.limits.work_s):
            warn = partial(self.warn, "scheduler")
            self.skipped = SkippedPrompts(self.topology, self.paths, self.stream, self.fates, warn)
            self.skipped.look()
        self._unread = False  # draws were left out, and there may be more to open behind them
        repair_next_admission(self.ring)
        several = len(self.topology.seats) > 1 or len(self.topology.trained_tags) > 1
        self.several = capabilities.plug("several", "opening")(self) if several else None

    def _order(self) -> None:
        """Make the policy of dispatch and its predictor."""
        warn = partial(self.warn, "scheduler")
        self.predictor = predictor_of(self.topology, self.paths, self.stream, warn)
        self.predictor.restore()
        self.feed = DispatchFeed(self.topology, self.paths, self.stream, self.predictor.predictor, warn)
        self.policy = self.feed.policy

    def follow(self) -> None:
        if self.policy.name != self.topology.scheduler.policy:
            self.feed.close()
            self.predictor.close()
            self._order()
        self.admission = Admission(self.topology.derived.limits, self.topology.weights.over_age)
        self._signs_seen = ()
        if self.several is not None:
            self.several.follow()

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.TaskRequest):
            self._announced(message)
        elif isinstance(message, m.LearnerStateUpdate) and math.isfinite(message.entropy):
            self.policy.feedback(message.entropy)
            total = message.metrics.get("groups_total", 0.0)
            self.trained = int(total) if math.isfinite(total) and total else self.trained

    def _announced(self, message: m.TaskRequest) -> None:
        """Note a worker; its name must fit a topic, and its rows count up to the number of slots."""
        rows, now = min(max(message.rows, message.capacity), self.ring.n_slots), time.monotonic()
        if not is_address(message.worker_id) or not self.rows.announce(message.worker_id, rows, now):
            text = f"TASK_REQUEST of {message.sender!r} for {message.worker_id!r} is ignored: "
            why = "too many workers" if is_address(message.worker_id) else "no topic can have such a name"
            self.warn("scheduler", text + why, kind="TASK_REQUEST")

    def work(self) -> bool:
        """Dispatch all that may be dispatched now; nothing is left to do then until a message or the next tick."""
        runs = self.ring.header(HeaderWord.RUN_STATE) == RunPhase.RUNNING or (self.several and self.several.running)
        if not runs or self.ring.header(HeaderWord.GENERATION_PAUSE):
            return False
        now = time.monotonic()
        signs = self._signs(now)
        if signs == self._signs_seen and now < self._next_look and not self._unread:
            return False
        self._signs_seen, self._next_look = signs, now + LOOK_EVERY_S
        view = self.scan(self.scanner)
        if self.is_damaged(view, self.paths.fates):
            return False
        self.skipped.look()
        self.feed.look(view, self.lines, self.rows.total(view.generating))
        try:
            if self.several is not None:
                self.room = self.several.open(view, self.lines, self.arrived)
            else:
                self._finish_open(view)
                self._open_new(view)
        except (DiskFull, SharedMemoryFull) as problem:
            self.warn("scheduler", f"dispatch pauses: {problem}", "error", kind="full disk")
            self.shown.usually(NO_SPACE)
            with self.activity(NO_SPACE, math.inf):
                self.idle(1.0)
            return False
        self.shown.waits(self.room.reason, self.room.group)
        self._announce(view)
        return self._unread

    def is_damaged(self, view: GroupView, fates: Path) -> bool:
        """Tell whether samples look as if they were never dispatched, and warn of it; `launch` ends the run."""
        if view.unrecorded:
            text = f"{view.unrecorded} samples in slots have no fate in {fates}: another program changed it"
            self.warn("scheduler", f"dispatch pauses: {text}", "error", kind="no fates")
        return view.unrecorded > 0

    def _signs(self, now: float) -> tuple[int, ...]:
        """Numbers of which one must change before there is anything to dispatch: a slot came free, the learner made
        progress, or, where these hold it back, an engine took a sample, a prompt arrived. Read before the scan, so that
        what happens during it shows at the next pass; LOOK_EVERY_S bounds what a missed change costs."""
        words = (HeaderWord.STEP, HeaderWord.VERSION, HeaderWord.UNPUBLISHED_GROUPS)
        ends: tuple[State, ...] = (State.QUEUED, State.REWARDED) if self.waves is not None else ()
        ends += (State.GENERATING,) if self.topology.scheduler.ahead else ()
        admitted = self.ring.header(HeaderWord.NEXT_ADMISSION)
        self.arrived = NO_END if self.arrivals is None else self.arrivals.count(now, admitted)  # draws below are there
        signs = (*map(self.ring.transitions, (State.FREE, *ends)), self.arrived, *map(self.ring.header, words))
        return signs if self.several is None else (*signs, *self.several.signs())

    # -- dispatch -----------------------------------------------------------------------------------------------

    def _finish_open(self, view: GroupView) -> None:
        """Dispatch members of open groups while a slot is free: missing ones after a crash, re-rolls. The group credit
        keeps slots for them."""
        for todo, members in in_a_row(view.todo):
            # A re-roll of a group whose slots are all gone, and its index with them, shares the newest index: a new one
            # would shift the rounds of `sync`, which are cut by counting.
            newest = max(0, self.ring.header(HeaderWord.NEXT_ADMISSION) - 1)
            index = todo.admission if todo.admission >= 0 else newest
            if self._put(todo.uid, todo.member, members, self.fields_of_group(todo.draw, index)) < members:
                break

    def _open_new(self, view: GroupView) -> None:
        self.room, self._unread = self._room(view), False
        if self.room.groups <= 0:
            return
        self.feed.offer(view, self.room.groups, self.arrived)
        candidates, left_out = self.skipped.take(self.policy.next, self.room.groups)
        self._unread = left_out and len(candidates) < self.room.groups
        if self.arrivals is not None and not candidates:
            self.room = Room(0, "arrivals")
        for candidate in candidates:
            self._open_group(candidate)

    def _room(self, view: GroupView) -> Room:
        lines = self.lines
        wave_over = self.waves is not None and self.waves.over(lines, self.ring.header(HeaderWord.NEXT_ADMISSION))
        return room_of(self.ring, self.topology, self.admission, view, lines, wave_over=wave_over)

    def _open_group(self, candidate: Candidate) -> None:
        """Dispatch all members; the next scan dispatches those that find no slot, before new groups."""
        draw, index = candidate.draw, self.ring.header(HeaderWord.NEXT_ADMISSION)
        if self._put(uid_of(draw, 0, 0, self.group_size), 0, self.group_size, self.fields_of_group(draw, index)):
            # After its members: once the index is counted the whole group is in the ring.
            self.ring.set_header(HeaderWord.NEXT_ADMISSION, index + 1)

    def fields_of_group(self, draw: int, index: int) -> dict[str, Any]:
        """Fields of a slot's line that the members of a group have in common; `index`: its admission index."""
        priority = self.policy.priority(draw, index)
        return fields_of(self.ring, self.topology, self.stream.item(draw), draw, index, priority)

    def _put(self, uid: int, member: int, members: int, fields: dict[str, Any]) -> int:
        """Dispatch `members` of a group, `member` the first of them; how many found a slot."""
        require_fates(self.fates, self.paths.fates, uid + members, self.group_size)
        self.fates.reserve(uid + members)
        done = self.ring.dispatch(uid=uid, member=member, members=members, **fields)
        if done:
            slot, word = done[0]
            self.bell.add(lambda: m.NewTask(worker_id="", slot_id=slot, seq=seq_of(word), uid=uid), len(done))
        return len(done)

    # -- messages -----------------------------------------------------------------------------------------------

    def _announce(self, view: GroupView) -> None:
        """Send one coalesced doorbell to each worker that asked lately; work does not depend on its arrival."""
        now = time.monotonic()
        workers = self.rows.workers(now)
        message = self.bell.take()
        if isinstance(message, m.NewTask):
            for name in workers:
                self.bus.send(msgspec.structs.replace(message, worker_id=name), name)
        if now >= self._next_state:
            self._next_state = now + STATE_EVERY_S
            self._publish_state(view)
        step = self.ring.header(HeaderWord.STEP)
        self.predictor.keep(now, step + 1 if checkpoint_may_follow(self.topology, step, self.trained) else None)

    def _publish_state(self, view: GroupView) -> None:
        waiting = self.room.reason + (f" (group {self.room.group})" if self.room.group is not None else "")
        values = self.feed.metrics()
        if values:
            values["rows"] = self.rows.total(view.generating)
        values |= self.skipped.metrics() | (self.several.metrics() if self.several is not None else {})
        self.bus.send(m.SchedulerState(
            admitted=self.ring.header(HeaderWord.NEXT_ADMISSION), open_groups=len(view), free=view.free_slots,
            credit=max(0, self.room.groups), waiting=waiting, queued=view.queued, values=values,
        ))

    def teardown(self) -> None:
        self.feed.close()
        self.skipped.close()
        self.predictor.close()
        if self.several is not None:
            self.several.close()

    # -- trouble ------------------------------------------------------------------------------------------------

    def reap_predecessor(self, ring: Ring) -> None:
        """Wait until no slot is RESERVED by an earlier scheduler, whose sample might be dispatched a second time: the
        kernel frees its lock a moment before its death is proven (docs/models.md, `a scheduler does not wait`)."""
        with self.activity("reap the predecessor", self.topology.limits.ready_s):
            ring.reap()
            while not self.stopping and (left := self._reserved_by_schedulers(ring)):
                log.info("waits for the death of process %d, which still holds a RESERVED slot", left[0])
                self.idle(PREDECESSOR_LOOK_S)
                ring.reap()

    def _reserved_by_schedulers(self, ring: Ring) -> list[int]:
        """Process ids of other schedulers that own a RESERVED slot."""
        lines = ring.lines()
        owners = set(lines["owner"][lines["state"] == State.RESERVED].tolist()) - {ring.index}
        schedulers = (process for process in ring.processes() if process.role == self.role)
        return [process.pid for process in schedulers if process.index in owners]


# -- one ring ------------------------------------------------------------------------------------------------------


def room_of(
    ring: Ring, topology: Topology, admission: Admission, view: GroupView, lines: Lines, *, wave_over: bool = False
) -> Room:
    """The groups that may be opened in a ring now, by its own header words."""
    validating = int(np.count_nonzero((lines["cls"] == SampleClass.VALIDATE) & (lines["state"] != State.FREE)))
    # The unpublished groups are read after the fates that `scan` read: a group is never missing from both.
    room = admission.room(
        view,
        unpublished=ring.header(HeaderWord.UNPUBLISHED_GROUPS),
        next_admission=ring.header(HeaderWord.NEXT_ADMISSION),
        step=ring.header(HeaderWord.STEP),
        free=view.free_slots,
        reserve=max(0, topology.derived.val_reserve - validating),
        wave_over=wave_over,
    )
    return not_ahead(room, topology.scheduler.ahead, view.queued, view.group_size, len(topology.seats))


def fields_of(
    ring: Ring, topology: Topology, item: PromptLine, group: int, index: int, priority: int
) -> dict[str, Any]:
    """Fields of a slot's line that the members of a group have in common; `item`: the prompt, `index`: the group's
    admission index."""
    generation = topology.generation
    return {
        "group": group, "admission": index, "group_size": topology.groups.size, "cls": SampleClass.TRAIN,
        "task": item.line, "prompt_crc": item.crc, "priority": priority, "max_new_tokens": generation.max_new_tokens,
        "temperature": generation.temperature, "top_p": generation.top_p,
        # The step first: a publication in between makes the sample look too old, never too new.
        "step": ring.header(HeaderWord.VERSION_STEP), "version": ring.header(HeaderWord.VERSION),
    }


def require_fates(fates: Fates, path: Path, samples: int, group_size: int, seats: int = 1) -> None:
    """CannotTrain if a fate table has no place for so many samples."""
    most = fates.capacity
    if samples > most:
        prompts = most // (2 * group_size * seats)
        raise CannotTrain(
            f"{path} is full: a run has at most {most} samples, {prompts} prompts with groups.size = {group_size}, as "
            "each may be tried twice; continue in a new run directory, with learner.start_from = the newest checkpoint"
        )


def repair_next_admission(ring: Ring) -> None:
    """A predecessor may have died between a group's slots and the counter."""
    lines = ring.lines()
    live = lines[(lines["state"] != State.FREE) & (lines["cls"] == SampleClass.TRAIN)]
    if len(live):
        highest = int(live["admission"].max()) + 1
        ring.set_header(HeaderWord.NEXT_ADMISSION, max(ring.header(HeaderWord.NEXT_ADMISSION), highest))
