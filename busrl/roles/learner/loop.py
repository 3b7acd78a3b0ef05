"""The learner: claims resolved groups, trains on them, publishes policy versions.

Talks to the ring (REWARDED -> TRAINING* -> FREE, fates), the write-ahead log, `busrl.training`, the weight plane and
the bus (LEARNER_STATE_UPDATE). `busrl.scheduling` decides what to claim and when to fire. Knows nothing of prompts as
text or of engines.

    reward: ring.commit            learner: one pass of `work`                               rollout, scheduler
    REWARDED slots ---> claims.look -> plan.decide --+--> SetAside: claims.drop -----------> slots free, fate f, o, i
                                                     +--> Claim:    claims.take              (TRAINING)
                                                     +--> Wait:     training.accumulate      (micro-batches)
                                                     +--> Fire:     history.append  (commit point: write-ahead log)
                                                                    claims.end -------------> slots free, fate T
                                                                    training.finish | training.train
                                                                    publisher.publish ------> new version, group credit
                                                                    checkpoints.write

| the learner waits for | declared as | unblocked by |
|---|---|---|
| groups with rewards | `waits: groups`, `window`, `round` (`idle`) | the reward of its last member (REWARDED) |
| admission of new groups | `waits: admission` | its own publication, which returns credit (`publication_is_due`) |
| engines that answer probes | `waits: parity` | PROBE_DRAWN of each engine, or `learner.parity.wait_s` |
| a validation that holds the version | `held by validation` | its last answer, or `limits.work_s` without any |
| disk space | `waiting for disk space` | room for the record, the version or the checkpoint |
| other ranks | `waits for its ranks`, any collective | each rank; a rank that is missing is named |

- Append to the log, then fates and slots, then the optimiser: wherever a learner dies in between, the surviving history
  trains each sample exactly once.
- Groups count as unpublished before their slots are freed, until their version is published.
- Micro-batches run while the step fills up (streaming); the weights do not change in between.
- A pass attends to all else; it looks at the groups only when `Looks` says that it is worth the cost.
- Long work is declared as an activity, and moves the progress counter with each micro-batch, tensor or file.
"""

from __future__ import annotations

import contextlib
import logging
import time
import urllib.parse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from busrl import capabilities
from busrl.data.pretrained import import_classes
from busrl.errors import CannotTrain, FateRefused
from busrl.ledger.wal import Record, SampleRecord
from busrl.protocol import messages as m
from busrl.ring import Fates
from busrl.roles.actor import ACTIVITY_BYTES, Actor, WorkDeadline
from busrl.roles.learner.excerpts import Excerpts, gap_of
from busrl.roles.learner.groups import (
    LOOK_MOST_S,
    Claimed,
    Claims,
    Looks,
    Malformed,
    context_at,
    parts_of,
    tag_at,
)
from busrl.roles.learner.history import Checkpoints, History
from busrl.roles.learner.metrics import StepMetrics
from busrl.roles.learner.models import Read
from busrl.roles.learner.observers import ComingStep, FinishedStep, LearnerParts, Observers, RestingGroup
from busrl.roles.learner.publish import Publisher, UpdateFence, join_engine
from busrl.roles.learner.samples import terms_of
from busrl.roles.learner.step import TrainingStep
from busrl.scheduling.admission import Waves
from busrl.scheduling.groups import GroupScanner, GroupView
from busrl.scheduling.plan import checkpoint_is_due, make_plan
from busrl.scheduling.trigger import Action, Claim, Fire, SetAside, Wait, publication_is_due
from busrl.states import PAUSE_STARTING, HeaderWord, RunPhase
from busrl.system.clocks import PausedClock
from busrl.topology import Topology
from busrl.training.custom import Metrics
from busrl.training.forward import COMPILE_S
from busrl.training.model import load
from busrl.training.step_stats import StepStats
from busrl.training.trainer import Team
from busrl.weights.factory import import_transport

log = logging.getLogger("busrl")
PACE_SLICE_S = 0.5  # between two signs of progress


def import_all(topology: Topology, name: str) -> None:
    """Import what `setup` imports: the model's class, the transport."""
    import_classes(topology.model.path)
    import_transport(topology.weights.transport)


class Learner(Actor):
    role = "learner"
    warm = staticmethod(import_all)
    singleton = True
    tick_s = 0.02
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.ProbeDrawn,)
    read: Read = staticmethod(load)

    # -- start --------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        topology = self.topology
        self.config, self.waves = topology.learner, Waves.of(topology.derived.limits)
        self.scanner = GroupScanner(self.fates.view(), topology.groups.size, horizon=topology.derived.horizon)
        self.team = self._gathered() if topology.ranks > 1 else None
        self.deadline = deadline_of(topology)
        self.fence, on_progress = UpdateFence(), Progress(self.deadline, self.shown.progress)
        pace = scripted_pace(topology.mock.learner_s_per_token, on_progress)
        with contextlib.ExitStack() as declared:
            if (start := long_start(topology)) is not None:
                declared.enter_context(self.activity(*start))
            self.training = TrainingStep(
                topology, self.team, on_progress, self.fence, pace, self.paths.root, self.read)
        self.plan = make_plan(topology, streamable=self.training.models.streamable)
        with contextlib.suppress(FateRefused):  # the keeper meets it too, and reports it
            self.ring.finish_drops()  # so that the fates of groups that a predecessor set aside are complete
        own_metrics = Metrics(self.config.metrics, topology.base_dir)
        begun = partial(has_fate, self.fates, topology.groups.size)
        self.metrics = StepMetrics(self.paths, begun, own_metrics, topology.validation.solved, topology.log.keep)
        self.excerpts = Excerpts(topology, self.whole.sides)
        self.claims = Claims(self.ring, topology, self.training.fault)
        parts = LearnerParts(topology, self.paths, self.training, self.plan, self.warn)
        self.observers = Observers(parts, self.metrics, own_metrics)
        self.parity, self.clock, self.looks = self.observers.parity, PausedClock(), Looks(self.ring)
        self._recover()
        if self.history.leaves_log:
            self.checkpoints.hold(self.history.step)
            self.history.leave_log()
        self.checkpoints.as_asked()

    def _gathered(self) -> Team:
        """Wait for the other ranks, and return the team of all."""
        team: Team = capabilities.plug("ranks", "team")(
            self.topology, self.paths, self.activity, self.awaited, lambda text: self.warn("learner", text),
            self.shown.progress,
        )
        return team

    def _recover(self) -> None:
        """Load the newest checkpoint, train the log's records after it again, and finish what a predecessor began."""
        self.deadline.begin()
        models, work_s = self.training.models, self.topology.limits.work_s
        with self.activity("recover", max(work_s, COMPILE_S) if self.config.memory.compile else work_s):
            self.history = History(self.paths, self.topology)
            self.history.load(self.training, self.observers.load)
            if models.changed:
                self.warn("learner", f"the topology's values are used from here on: {', '.join(models.changed)}")
            self.history.report(self.warn)
            replayed = self._replay()
            self.metrics.resume(self.history.step)
            self.observers.start()
            self.history.store_fates(self.fates)
            self.publisher = Publisher(self, self.history.highest_version, models.write)
            self.checkpoints = Checkpoints(
                self, self.history, self.training, self.publisher, self.observers, self.metrics, self.deadline)
            if models.shared and not join_engine(self.publisher, models, self.fence, lambda: self.history.step):
                return  # stopped meanwhile
            if self.history.step or self.publisher.version or models.from_elsewhere:
                log.info("resumed at step %d (%d of them trained again from the log)", self.history.step, replayed)
                self._publish()
            else:
                self.publisher.start_fresh(self.training.weights)
                self.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, 0)
        self.begun_at = self.history.step
        self.ring.set_header(HeaderWord.STEP, self.history.step)
        pause = self.ring.header(HeaderWord.GENERATION_PAUSE)
        if pause & PAUSE_STARTING:  # afterwards the word is launch's
            self.ring.set_header(HeaderWord.GENERATION_PAUSE, pause & ~PAUSE_STARTING)
        self.plan.trigger.step_ended(self._now())

    def _replay(self) -> int:
        """Train the records of the log after the checkpoint again, and return their number."""
        replayed = 0
        for record in self.history.to_replay():
            self.training.stale.at(record.version, record.step - 1)
            with self.history.blames():
                stats = self.training.replay(record)
            self.observers.replayed(record, stats)
            self.history.finished(record)
            self.metrics.replayed(record, stats)
            self.shown.progress()
            replayed += 1
        return replayed

    def follow(self) -> None:
        """Use a topology that was changed in flight. Steps by the rates of before go into a checkpoint first, since a
        replay of the log uses the present ones. Claimed groups, partly trained already, keep their terms up to the end
        of the step."""
        before, self.config = self.config, self.topology.learner
        if (before.lr, before.trigger.n_min) != (self.config.lr, self.config.trigger.n_min):
            self.checkpoints.hold(self.history.step)
        self.training.follow(self.topology)
        if not self.claims.held:
            self.training.train_by(terms_of(self.topology))
        trigger = self.plan.trigger
        self.plan = make_plan(self.topology, streamable=self.training.models.streamable)
        self.plan.trigger.follow(trigger)
        self.excerpts.follow(self.topology)
        self.claims.follow(self.topology)
        self.looks.again()
        self.observers.follow(self.plan)
        self.checkpoints.as_asked()

    # -- the loop -----------------------------------------------------------------------------------------------

    def work(self) -> bool:
        if self._is_over():
            self._finish()
            return True
        begun = time.monotonic_ns()
        self._attend()
        if not self.looks.due():
            return False
        cpu_s = time.thread_time()
        view = self.scan(self.scanner, self.claims.look(self.history.trained))
        actions = self._actions(view)
        moved = self._carry_out(view, actions, time.thread_time() - cpu_s)
        if moved:
            self.ring.add(busy_ns=time.monotonic_ns() - begun)
        return moved

    def _carry_out(self, view: GroupView, actions: Sequence[Action], cost_s: float) -> bool:
        """Carry out the actions of a plan, and set the time of the next look, after one that took `cost_s` of CPU. True
        if something was done."""
        asides = [action for action in actions if isinstance(action, SetAside)]
        self._set_aside(view, asides)
        moved = bool(asides)
        # A wave ends when engines put samples back into the queue, without a reward.
        most_s = LOOK_MOST_S if self.waves is None else self.tick_s
        for action in actions[len(asides) :]:
            match action:
                case Claim():
                    if not self._claim(view, action):
                        self.looks.again()  # a slot moved
                        return True
                    moved = True
                case Fire() if self.parity.gate.holds(self.publisher.present(self.history.step)):
                    self.shown.waits("parity")
                    most_s = self.tick_s
                case Fire():
                    self._step(view, action)
                    self.looks.again()
                    return True
                case Wait():
                    moved |= self._while_waiting(action)
        now = self._now()
        missing = self.plan.missing(view, len(self.claims.held), now, self.metrics.ended.groups)
        worth = min(self.config.micro_batch_min_samples, missing)
        self.looks.within(self.plan.trigger.sleep_s(most_s, now), worth, cost_s)
        return moved

    def _step(self, view: GroupView, action: Fire) -> None:
        """Make a step: commit to the log, end the slots, train, publish, report, write a checkpoint."""
        with self.activity("step", self.deadline.begin()):
            if not self.checkpoints.history_stands():
                return
            groups = [self.claims.held[draw] for draw in action.draws]
            version = self.publisher.present(self.history.step)
            record = Record(
                step=self.history.step + 1, version=self.publisher.version, cause=action.cause.value,
                groups=list(action.draws), samples=samples_of(groups), terms=self.training.terms,
            )
            self.observers.before(ComingStep(record, view, version))
            if not self._commit(record):
                return
            excerpts = self._end_slots(groups)
            stats = self._train(record, groups)
            self.history.finished(record)
            self.ring.set_header(HeaderWord.STEP, self.history.step)
            published_s = self._publish() if self.history.step % self.topology.publish_every == 0 else 0.0
            self._write_lines(FinishedStep(record, stats, version), view, excerpts, published_s)
            due = checkpoint_is_due(self.topology, self.history.step, self.history.groups, len(groups))
            if due and not self._is_over():
                self.checkpoints.write()
            self.training.train_by(terms_of(self.topology))
        self.plan.trigger.step_ended(self._now())

    def _is_over(self) -> bool:
        """Tell whether all is done, or was before a death: that the task is solved is known from groups alone."""
        run = self.topology.run
        ended = self.observers.idle.solved or self.ring.header(HeaderWord.RUN_STATE) == RunPhase.FINISHING
        return ended or self.history.step >= run.max_steps or 0 < run.max_groups <= self.history.groups

    def _attend(self) -> None:
        """Look at everything but the groups, which costs little: weights, ranks, checkpoints, probes."""
        self.publisher.sender.check()  # WeightsOwnerLost if the weights lie in the memory of a process that is gone
        if self.team is not None:
            self.team.look()
        self.publisher.announce()
        self.checkpoints.commit()
        self.parity.warn_of(self.parity.gate.look(self.publisher.present(self.history.step)))

    def _actions(self, view: GroupView) -> Sequence[Action]:
        """Actions that the plan decides on; CannotTrain if groups end all the time and none can be trained."""
        admission, wave_over = self.ring.header(HeaderWord.NEXT_ADMISSION), None
        if self.waves is not None:  # in rounds of segments a wave is over when no member is still to be dispatched
            wave_over = not view.due.any() and self.waves.over(self.lines, admission)
        actions = self.plan.decide(
            view, list(self.claims.held), step=self.history.step, now=self._now(), next_admission=admission,
            aside=self.metrics.ended.groups, wave_over=wave_over,
        )
        asides = [action.draw for action in actions if isinstance(action, SetAside)]
        try:
            self.observers.idle.look(view, asides, self.history.step, self.publisher.version)
        except CannotTrain:
            self.claims.give_back()
            if self.history.step > self.begun_at:
                self.checkpoints.write(wait=True)
            raise
        return actions

    def idle(self, timeout_s: float) -> None:
        """Sleep until the rewards that are committed are worth a look, or the time is over."""
        begun = time.monotonic_ns()
        self.looks.wait(timeout_s)
        waited = time.monotonic_ns() - begun
        self.metrics.waited(waited / 1e9)
        self.ring.add(idle_ns=waited)

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.ProbeDrawn):
            self.parity.gate.take(message)

    # -- actions ------------------------------------------------------------------------------------------------

    def _set_aside(self, view: GroupView, actions: Sequence[SetAside]) -> None:
        groups = [view.slots_of(action.draw) for action in actions]
        for action, slots, lines in zip(actions, groups, self.claims.lines_of(groups)):
            parts, tag = parts_of(self.ring, slots), tag_at(self.ring, slots[0], self.topology.validation.tag_key)
            self.metrics.set_aside(lines, action.fate, self.history.step + 1, parts, tag)
            sample = partial(self.excerpts.glimpse, self.ring, slots[0], lines[0])
            self.observers.set_aside(RestingGroup(action.draw, action.fate, lines, sample))
            self.claims.drop(slots, action.draw, action.fate)

    def _claim(self, view: GroupView, action: Claim) -> bool:
        claimed = self.claims.take(view, action.draws)
        if isinstance(claimed, Malformed):
            self.warn("learner", f"{claimed}; dropped as malformed, its group is looked at again", "error")
        if not isinstance(claimed, list):
            return False
        self.metrics.first_claim()
        return True

    def _while_waiting(self, action: Wait) -> bool:
        """Use the time: run a micro-batch on claimed groups, or publish weights that are still unpublished."""
        self.metrics.waiting(action.reason, action.group)
        self.shown.waits(action.reason, action.group)
        few = self.claims.pending_samples < self.config.micro_batch_min_samples
        if self.plan.streaming and self.claims.pending and not few:
            self._accumulate()
            return True
        due = publication_is_due(
            self.ring.header(HeaderWord.UNPUBLISHED_GROUPS), self.history.step,
            n_min=self.plan.trigger.n_min + self.plan.limits.seats - 1, admitted=self.plan.limits.B,
            publish_every=self.topology.publish_every,
        )
        if due:
            self._publish()
        return due

    def _accumulate(self) -> None:
        groups = self.claims.take_pending()
        self.training.stale.at(self.publisher.version, self.history.step)
        self.training.trainer.tally.watch(self.excerpts.watched(groups))
        with self.activity("accumulate", self.deadline.begin()), self.history.blames():
            self.training.accumulate(samples_of(groups), self.publisher.present(self.history.step))

    # -- a step -------------------------------------------------------------------------------------------------

    def _commit(self, record: Record) -> bool:
        """Append to the log: the commit point. While the disk is full, wait, and report the wait."""
        self.keep_lock()
        waiting = self.ring.header(HeaderWord.UNPUBLISHED_GROUPS)
        self.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, waiting + len(record.groups))
        return self.write_or_wait("training", lambda: self.history.append(record))

    def _end_slots(self, groups: Sequence[Claimed]) -> list[dict[str, Any]]:
        """Copy excerpts and figures of a committed step for people, then give its slots back."""
        excerpts = self.excerpts.of_step(self.ring, groups)
        for group in groups:
            slots, key = [slot for slot, _ in group.slots], self.topology.validation.tag_key
            self.metrics.trained(group.group, parts_of(self.ring, slots), tag_at(self.ring, slots[0], key))
            self.metrics.context(context_at(self.ring, group))
        self.claims.end(groups)
        return excerpts

    def _train(self, record: Record, groups: Sequence[Claimed]) -> StepStats:
        if self.plan.streaming:
            self._accumulate()
            with self.history.blames():
                return self.training.finish(len(groups))
        self.claims.take_pending()
        self.training.stale.at(record.version, self.history.step)
        self.training.trainer.tally.watch(self.excerpts.watched(groups))
        with self.history.blames():
            return self.training.train(record.samples, len(groups), self.publisher.present(self.history.step))

    def _publish(self, wait: bool = True) -> float:
        """Make the present weights the next version. Returns the seconds it took; `wait`: see `Publisher.publish`."""
        seconds = self.publisher.publish(self.history.step, self.training.weights(), wait)
        if (version := self.publisher.present(self.history.step)) is not None:
            self.observers.published(version)
        return seconds

    def _write_lines(
        self, step: FinishedStep, view: GroupView, excerpts: Sequence[dict[str, Any]], published_s: float
    ) -> None:
        """Write the lines of a step, give its warnings, and send its numbers on the bus."""
        gaps, groups = self.training.trainer.tally.gaps(), len(step.record.groups)
        more = {
            "groups_total": self.history.groups, "queue": max(0, int(view.usable.sum()) - groups),
            **self.observers.numbers(),
        }
        row = self.metrics.step(
            step.record, step.stats, [excerpt | gap_of(gaps.get(excerpt["uid"])) for excerpt in excerpts],
            self.publisher.version, published_s, more,
        )
        self.observers.after(step, row)
        update = self.metrics.update(self.observers.state())
        self.bus.send(m.LearnerStateUpdate(**update, model=m.of_model(self.topology.beside)))

    def _now(self) -> float:
        """The time of the trigger: it stands still while the run is paused."""
        return self.clock.time(time.monotonic(), self.paused)

    # -- end ----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """End the run: give back groups that were claimed early, write the last checkpoint, set the ring's phase."""
        self.claims.give_back()
        if self.ring.header(HeaderWord.UNPUBLISHED_GROUPS):
            self._publish()
        if not self.checkpoints.write_or_wait("the last checkpoint"):
            return
        self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
        self.stop("nothing is left to learn" if self.observers.idle.solved else "all steps are done")

    def teardown(self) -> None:
        if self.ring.header(HeaderWord.RUN_STATE) != RunPhase.FINISHING:
            self.claims.give_back()
            self.checkpoints.write(wait=True)
        self.publisher.sender.close()
        self.observers.close()
        self.metrics.close()
        self.history.close()
        if self.team is not None:
            self.team.close()


# -- parts of a learner ---------------------------------------------------------------


class Progress:
    """Called after each micro-batch and each part of a checkpoint: moves the progress counter, ends a piece of work."""

    def __init__(self, deadline: WorkDeadline, moved: Callable[[], None]) -> None:
        self._deadline, self._moved = deadline, moved

    def __call__(self) -> None:
        self._deadline.ended()
        self._moved()


def deadline_of(topology: Topology) -> WorkDeadline:
    """The time that a micro-batch may take. With compilation, one of a new shape may be compiled at any time; with
    several ranks it may wait for another one."""
    limits, learner = topology.limits, topology.learner
    waits_s = learner.parallel.collective_timeout_s if topology.ranks > 1 else 0.0
    least_s = limits.work_s if learner.memory.compile else limits.progress_s
    return WorkDeadline(least_s + waits_s, limits.work_s + waits_s)


def long_start(topology: Topology) -> tuple[str, float] | None:
    """The work that makes the start of a learner longer than others, and its seconds; None for none: a compilation, or
    a wait for teachers that are not up yet, which have their own patience."""
    learner = topology.learner
    asked = [row for row in learner.teacher if row.base_url]
    compile_s = COMPILE_S if learner.memory.compile else 0.0
    if not asked:
        return ("compile", compile_s) if compile_s else None
    where = urllib.parse.urlsplit(asked[0].base_url).netloc
    return f"teacher {where}"[:ACTIVITY_BYTES], max(compile_s, *(row.patience_s + row.timeout_s for row in asked))


def scripted_pace(token_s: float, on_progress: Callable[[], None]) -> Callable[[float, int], None]:
    """In a scripted run: wait until an accumulation took `token_s` per token, as with a larger model."""

    def pace(begun: float, tokens: int) -> None:
        end = begun + token_s * tokens
        while token_s and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, PACE_SLICE_S))
            on_progress()

    return pace


def has_fate(fates: Fates, size: int, draw: int, fate: str) -> bool:
    """True if any sample of the group has that fate."""
    return bool((fates.view()[2 * size * draw : 2 * size * (draw + 1)] == ord(fate)).any())


def samples_of(groups: Sequence[Claimed]) -> list[SampleRecord]:
    return [record for group in groups for record in group.records]
