"""The learner: claims resolved groups, trains on them, publishes policy versions.

Talks to the ring (REWARDED -> TRAINING* -> FREE, fates), the write-ahead log, `busrl.training`, the weight plane and
the bus (LEARNER_STATE_UPDATE). What to claim and when to fire is decided by `busrl.scheduling`; knows nothing of
prompts as text or of engines.

- Append to the log, then fates and slots, then the optimiser: wherever a learner dies in between, each sample is
  trained exactly once in the history that survives.
- Groups count as unpublished before their slots are freed, until their version is published.
- Micro-batches run while the step fills up (streaming); the weights do not change in between.
- All that may take long is declared, and moves the progress counter with each micro-batch, tensor or file.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt

from busrl import capabilities
from busrl.errors import CannotTrain, DiskFull, FateRefused, RankFailed, WriteFailed
from busrl.ledger.controls import Controls
from busrl.ledger.trained import newest_checkpoint, step_of
from busrl.ledger.wal import Record, SampleRecord
from busrl.predict.control import Control
from busrl.protocol import messages as m
from busrl.ring import State
from busrl.roles.actor import Actor, WorkDeadline
from busrl.roles.learner.alarms import FLAT, QUARTERS, Alarms, Idling, LengthSkew
from busrl.roles.learner.groups import (
    Claimed,
    Excerpts,
    Malformed,
    claim_groups,
    context_at,
    end,
    gap_of,
    give_back,
    parts_of,
    shaped,
    tag_at,
)
from busrl.roles.learner.history import History
from busrl.roles.learner.metrics import StepMetrics
from busrl.roles.learner.parity import Parity, Verdict
from busrl.roles.learner.publish import Publisher, UpdateFence, join_engine
from busrl.roles.learner.samples import terms_of
from busrl.roles.learner.step import TrainingStep
from busrl.scheduling.admission import Waves
from busrl.scheduling.groups import GroupScanner, GroupView
from busrl.scheduling.plan import checkpoint_is_due, make_plan
from busrl.scheduling.trigger import Claim, Fire, SetAside, Wait, publication_is_due
from busrl.states import PAUSE_STARTING, Fate, HeaderWord, RunPhase, SampleClass
from busrl.system.clocks import PausedClock
from busrl.training.custom import Metrics
from busrl.training.forward import COMPILE_S
from busrl.training.step_stats import StepStats
from busrl.training.trainer import Team

log = logging.getLogger("busrl")
PACE_SLICE_S = 0.5  # between two signs of progress


class Learner(Actor):
    role = "learner"
    singleton = True
    tick_s = 0.02
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.ProbeDrawn,)

    def setup(self) -> None:
        self.config, self.work_s = self.topology.learner, self.topology.limits.work_s
        limits = self.topology.derived.limits
        self.waves = Waves.of(limits)
        self.scanner = GroupScanner(self.fates.view(), self.topology.groups.size, horizon=self.topology.derived.horizon)
        self.team = self._gathered() if self.topology.ranks > 1 else None
        waits_s = 0.0 if self.team is None else self.config.parallel.collective_timeout_s  # for another rank
        # A micro-batch of another kind than the probe's may be compiled at any time.
        least_s = self.work_s if self.config.memory.compile else self.topology.limits.progress_s
        self.deadline = WorkDeadline(least_s + waits_s, self.work_s + waits_s)
        self.fence = UpdateFence()
        pace = self._take_as_long if self.topology.mock.learner_s_per_token else lambda *_: None
        with self.activity("compile", COMPILE_S) if self.config.memory.compile else contextlib.nullcontext():
            self.training = TrainingStep(self.topology, self.team, self._on_progress, self.fence, pace)
        self.plan = make_plan(self.topology, streamable=self.training.models.streamable)
        with contextlib.suppress(FateRefused):  # the keeper finds it too, and reports it
            self.ring.finish_drops()  # so that the fates hold what a predecessor set aside
        self.own_metrics = Metrics(self.config.metrics, self.topology.base_dir)
        self.metrics = StepMetrics(
            self.paths, self._has_fate, self.own_metrics, self.topology.validation.solved, self.topology.log.keep
        )
        self.excerpts = Excerpts(self.topology)
        self.idling, self._solved, self._learnt_told = Idling(self.topology, self.paths), False, False
        self.parity, self.alarms = Parity(self.topology, self.training.models), Alarms(self.config.ess_alarm)
        self.skew = LengthSkew(self.config.length_alarm_steps, self.config.length_alarm)
        self.control = Control(self.paths.decisions, self.topology, self.training, self.plan)
        self.clock = PausedClock()
        self.claimed: dict[int, Claimed] = {}
        self.pending: list[Claimed] = []  # claimed, not yet in a micro-batch
        self._recover()
        if self.history.leaves_log:
            self._checkpoint_after(self.history.step)
            self.history.leave_log()
        self._checkpoint_as_asked()

    def _gathered(self) -> Team:
        """The other ranks, as soon as all are there."""
        gather = capabilities.plug("ranks", "team")
        team: Team = gather(
            self.topology, self.paths, self.activity, self.awaited, lambda text: self.warn("learner", text),
            self.ring.progress,
        )
        return team

    # -- start --------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Load the newest checkpoint, train the log's records after it again, and finish what a predecessor began."""
        self.deadline.begin()
        with self.activity("recover", max(self.work_s, COMPILE_S) if self.config.memory.compile else self.work_s):
            self.history = History(self.paths, self.topology)
            self.history.load(self.training, self.control.load)
            models = self.training.models
            if models.changed:
                self.warn("learner", f"the topology's values are used from here on: {', '.join(models.changed)}")
            self._report_history()
            replayed = self._replay()
            self.metrics.resume(self.history.step)
            self.control.start()
            self.history.store_fates(self.fates)
            self.publisher = Publisher(self, self.history.highest_version, self.training.models.write)
            if models.shared and not join_engine(self.publisher, models, self.fence, lambda: self.history.step):
                return  # stopped meanwhile
            if self.history.step or self.publisher.version or self.training.models.from_elsewhere:
                log.info("resumed at step %d (%d of them trained again from the log)", self.history.step, replayed)
                self._publish()
            else:
                self.publisher.start_fresh(self.training.weights)
        self.begun_at = self.history.step
        self.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, 0)
        self.ring.set_header(HeaderWord.STEP, self.history.step)
        pause = self.ring.header(HeaderWord.GENERATION_PAUSE)
        if pause & PAUSE_STARTING:  # afterwards the word is launch's
            self.ring.set_header(HeaderWord.GENERATION_PAUSE, pause & ~PAUSE_STARTING)
        self.plan.trigger.step_ended(self._now())

    def _replay(self) -> int:
        """Train the records of the log after the checkpoint again; how many there were."""
        replayed = 0
        for record in self.history.to_replay():
            self.training.stale.at(record.version, record.step - 1)
            with self._blamed():
                stats = self.training.replay(record)
            self.control.step(record, stats, {})
            self.history.finished(record)
            self.metrics.replayed(record, stats)
            self.ring.progress()
            replayed += 1
        return replayed

    # -- what is asked of a running run -------------------------------------------------------------------------

    def follow(self) -> None:
        """Take up what was set. What is trained by the rates of before is in a checkpoint first, since a replay of the
        log uses the present ones. What is claimed, and partly trained, keeps its terms up to the end of the step."""
        before, self.config = self.config, self.topology.learner
        rates = [(one.lr, one.trigger.n_min) for one in (before, self.config)]
        if rates[0] != rates[1]:
            self._checkpoint_after(self.history.step)
        self.training.follow(self.topology)
        if not self.claimed:
            self.training.train_by(terms_of(self.topology))
        since = self.plan.trigger
        self.plan = make_plan(self.topology, streamable=self.training.models.streamable)
        self.plan.trigger.follow(since)
        self.control.plan = self.plan
        self.excerpts.kept = self.topology.log.samples
        self._checkpoint_as_asked()

    def _checkpoint_as_asked(self) -> None:
        """The checkpoint that was asked for last, unless there is one of that step or of a later one."""
        self._checkpoint_after(Controls.read(self.paths).checkpoint)

    def _checkpoint_after(self, step: int) -> None:
        newest = newest_checkpoint(self.paths)
        if step and (newest is None or step_of(newest) < step) and not self.stopping:
            self._checkpoint(wait=True)

    def _now(self) -> float:
        """The time of the trigger: it stands still while the run is paused."""
        return self.clock.time(time.monotonic(), self.paused)

    # -- the loop -----------------------------------------------------------------------------------------------

    def work(self) -> bool:
        if self._is_over():
            self._finish()
            return True
        self.publisher.sender.check()  # WeightsOwnerLost if they lie in the memory of a process that is gone
        if self.team is not None:
            self.team.look()
        begun = time.monotonic_ns()
        self.publisher.announce()
        self._commit_checkpoint()
        for verdict in self.parity.look(self._present_version()):
            self._differs(verdict)
        # `idle` waits from this count: a reward that is committed from here on ends its wait at once.
        self.looked = self.ring.transitions(State.REWARDED)
        self._free_trained()
        view = self.scan(self.scanner, self._shaped_lines())
        actions = self.plan.decide(
            view, list(self.claimed), step=self.history.step, now=self._now(),
            next_admission=self.ring.header(HeaderWord.NEXT_ADMISSION), aside=self.metrics.ended.groups,
            wave_over=self._wave_over(view),
        )
        self.idling.look(view, [action.draw for action in actions if isinstance(action, SetAside)])
        self._look_at_idling()
        moved = False
        for action in actions:
            if isinstance(action, SetAside):
                moved |= self._set_aside(view, action)
            elif isinstance(action, Claim):
                if not self._claim(view, action):
                    return True  # a slot moved: look again before anything else
                moved = True
            elif isinstance(action, Fire):
                if self.parity.holds(self._present_version()):
                    self.shown.waits("parity")
                    return moved
                self._step(action, view)
                moved = True
            else:
                moved |= self._while_waiting(action)
        if moved:
            self.ring.add(busy_ns=time.monotonic_ns() - begun)
        return moved

    def _wave_over(self, view: GroupView) -> bool | None:
        """In rounds of segments: whether the wave is over, and no member is still to be dispatched."""
        if self.waves is None:
            return None
        return not view.due.any() and self.waves.over(self.lines, self.ring.header(HeaderWord.NEXT_ADMISSION))

    def _shaped_lines(self) -> npt.NDArray[Any]:
        """A copy of the ring's lines in which cut answers have the rewards that [reward] gives them."""
        return shaped(self.ring.lines(), self.topology.reward, self.topology.generation.max_new_tokens)

    def _is_over(self) -> bool:
        run = self.topology.run
        return self._solved or self.history.step >= run.max_steps or 0 < run.max_groups <= self.history.groups

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.ProbeDrawn):
            self.parity.take(message)

    def _differs(self, verdict: Verdict) -> None:
        self.warn("learner", verdict.text, kind=f"parity {verdict.cause}")

    def idle(self, timeout_s: float) -> None:
        """Sleep until a reward is committed, or the time is over."""
        begun = time.monotonic_ns()
        left_s = self.plan.trigger.deadline_s(self._now())
        due = min(timeout_s, left_s) if left_s > 0 else timeout_s  # past it only a reward changes what may be trained
        self.ring.wait(State.REWARDED, self.looked, due)
        waited = time.monotonic_ns() - begun
        self.metrics.waited(waited / 1e9)
        self.ring.add(idle_ns=waited)

    # -- actions ------------------------------------------------------------------------------------------------

    def _free_trained(self) -> None:
        """REWARDED slots whose uid is in checkpoint or log already: a predecessor trained them."""
        if not self.history.unfinished:
            return
        lines = self.ring.lines()
        for slot in (lines["state"] == State.REWARDED).nonzero()[0].tolist():
            if int(lines["uid"][slot]) in self.history.trained and int(lines["cls"][slot]) == SampleClass.TRAIN:
                word = self.ring.claim(slot, int(lines["word"][slot]), State.TRAINING)
                if word:
                    self.ring.finish(slot, word, Fate.TRAINED)
        self.history.unfinished = bool((lines["state"] == State.TRAINING).any())

    def _set_aside(self, view: GroupView, action: SetAside) -> bool:
        lines = self._shaped_lines()
        slots = view.slots_of(action.draw)
        shown = slots[0]
        parts, tag = parts_of(self.ring, slots), self._tag(shown)
        self.metrics.set_aside(lines[slots], action.fate, self.history.step + 1, parts, tag)
        self.idling.set_aside(lines[slots], action.fate, lambda: self.excerpts.glimpse(self.ring, shown, lines[shown]))
        self.skew.ended(action.draw, lines["response_tokens"][slots].tolist(), action.fate)
        for slot in slots:
            if int(lines["state"][slot]) == State.REWARDED and int(lines["group"][slot]) == action.draw:
                self.ring.drop(slot, int(lines["word"][slot]), action.fate)
        return True

    def _tag(self, slot: int) -> str:
        return tag_at(self.ring, slot, self.topology.validation.tag_key)

    def _has_fate(self, draw: int, fate: str) -> bool:
        width = 2 * self.topology.groups.size
        return bool((self.fates.view()[draw * width : (draw + 1) * width] == ord(fate)).any())

    def _look_at_idling(self) -> None:
        """While groups end but none can be trained: write a line of metrics.jsonl at each quarter of the patience, warn
        at the first (at the third if the task looks solved), and end the run at the last: as finished if the task is
        solved, else as failed."""
        quarters = self.idling.quarters()
        if not quarters:
            return
        idling, text = self.idling, self.idling.text(self.history.step)
        self.metrics.idle(self.history.step, self.publisher.version, idling)
        solved, ends = idling.solved and self.history.step > 0, QUARTERS in quarters
        if solved and ends:
            self.warn("learner", f"the run ends here: {text}", kind="solved")
            self._solved = True
        elif idling.learnt and not ends:  # a nearly solved task has short streaks all the time
            if 3 in quarters:
                self._tell_learnt()
        elif (3 if solved else 1) in quarters:
            self.warn("learner", f"{text}. The run ends after {idling.patience} (limits.idle_groups)", kind="idle")
        if ends and not solved:
            self._return_claims()
            if self.history.step > self.begun_at:
                self._checkpoint(wait=True)
            raise CannotTrain(f"nothing to train (limits.idle_groups = {idling.limit}): {text}")

    def _tell_learnt(self) -> None:
        """Once: a success, and what to do with the time."""
        if not self._learnt_told:
            self._learnt_told = True
            text = self.idling.learnt_text(self.history.step, self.topology.run.max_steps)
            self.warn("learner", text, m.NOTE, kind="learnt")

    def _claim(self, view: GroupView, action: Claim) -> bool:
        slots = [view.slots_of(draw) for draw in action.draws]
        got = claim_groups(self.ring, self._shaped_lines(), slots, self.training.fault)
        if isinstance(got, Malformed):
            self.warn("learner", f"{got}; dropped as malformed, its group is looked at again", "error")
        if not isinstance(got, list):
            return False
        self.claimed.update(zip(action.draws, got))
        self.pending += got
        self.metrics.first_claim()
        return True

    def _while_waiting(self, action: Wait) -> bool:
        """Use the time: run a micro-batch on what was claimed, publish what is still unpublished."""
        self.metrics.waiting(action.reason, action.group)
        self.shown.waits(action.reason, action.group)
        few = sum(len(group.records) for group in self.pending) < self.config.micro_batch_min_samples
        if self.plan.streaming and self.pending and not few:
            self._accumulate()
            return True
        due = publication_is_due(
            self.ring.header(HeaderWord.UNPUBLISHED_GROUPS), self.history.step, n_min=self.plan.trigger.n_min,
            admitted=self.plan.limits.B, publish_every=self.topology.publish_every,
        )
        if due:
            self._publish()
        return due

    def _accumulate(self) -> None:
        groups, self.pending = self.pending, []
        self.training.stale.at(self.publisher.version, self.history.step)
        records = [record for group in groups for record in group.records]
        self.training.trainer.tally.watch(self.excerpts.watched(groups))
        with self.activity("accumulate", self.deadline.begin()), self._blamed():
            self.training.accumulate(records, self._present_version())

    def _take_as_long(self, begun: float, tokens: int) -> None:
        """In a scripted run: wait until `tokens` tokens, begun then, took as long as they take a larger model."""
        end = begun + self.topology.mock.learner_s_per_token * tokens
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, PACE_SLICE_S))
            self._on_progress()

    def _on_progress(self) -> None:
        self.deadline.ended()
        self.ring.progress()

    def _present_version(self) -> int | None:
        """The version that has the weights which are trained; None while they are not published (or published late)."""
        return self.publisher.version if self.ring.header(HeaderWord.VERSION_STEP) == self.history.step else None

    # -- a step -------------------------------------------------------------------------------------------------

    def _step(self, action: Fire, view: GroupView) -> None:
        """One step: commit to the log, end the slots, train, publish, report."""
        with self.activity("step", self.deadline.begin()):
            if not self._history_stands():
                return
            groups = [self.claimed[draw] for draw in action.draws]
            record = self._record(action, groups)
            trained_version = self._present_version()
            if trained_version is not None:
                if verdict := self.parity.first(record.samples, trained_version, self.history.step):
                    self._differs(verdict)
                self.parity.before_update(trained_version)
            if not self._commit(record):
                return
            excerpts = self._end_slots(groups)
            self.training.stale.at(record.version, self.history.step)
            stats = self._train(record.samples, groups)
            gaps = self.training.trainer.tally.gaps()
            excerpts = [row | gap_of(gaps.get(row["uid"])) for row in excerpts]
            self.history.finished(record)
            self.ring.set_header(HeaderWord.STEP, self.history.step)
            published_s = self._publish() if self.history.step % self.topology.publish_every == 0 else 0.0
            more = {
                "groups_total": self.history.groups, "queue": max(0, int(view.usable.sum()) - len(groups)),
                **self._lengths(groups, view), **self.control.numbers(), **self.parity.numbers(),
            }
            row = self.metrics.step(record, stats, excerpts, self.publisher.version, published_s, more)
            self.control.step(record, stats, row)
            self._report_step(record, stats, row, trained_version)
            due = checkpoint_is_due(self.topology, self.history.step, self.history.groups, len(groups))
            if due and not self._is_over():
                self._checkpoint()
            self.training.train_by(terms_of(self.topology))
        self.plan.trigger.step_ended(self._now())

    def _record(self, action: Fire, groups: Sequence[Claimed]) -> Record:
        """What the log keeps of a step, before any of it happens."""
        return Record(
            step=self.history.step + 1, version=self.publisher.version, cause=action.cause.value,
            groups=list(action.draws), samples=[record for group in groups for record in group.records],
            terms=self.training.terms,
        )

    def _end_slots(self, groups: Sequence[Claimed]) -> list[dict[str, Any]]:
        """Give the slots of a committed step back, after what people are to see of them is copied."""
        excerpts = self.excerpts.of_step(self.ring, groups)
        for group in groups:
            slots = [slot for slot, _ in group.slots]
            self.metrics.trained(group.group, parts_of(self.ring, slots), self._tag(slots[0]))
            self.metrics.context(context_at(self.ring, group))
            end(self.ring, group, Fate.TRAINED)
        self.claimed.clear()
        return excerpts

    def _lengths(self, groups: Sequence[Claimed], view: GroupView) -> dict[str, Any]:
        """How the lengths that were trained compare with those that were drawn; a warning when they begin to differ."""
        for group in groups:
            self.skew.ended(group.group, [record.tokens for record in group.records], Fate.TRAINED.letter)
        figures = self.skew.step([*view.draws.tolist(), *view.unopened(1).tolist()])
        if warning := self.skew.warning(figures):
            self.warn("learner", warning, kind="length skew")
        return figures

    def _report_step(self, record: Record, stats: StepStats, row: dict[str, Any], trained_version: int | None) -> None:
        """The finished step on the bus, and its warnings. `trained_version`: that of the weights that were trained."""
        step, found = self.history.step, stats.diagnostics
        self.bus.send(m.LearnerStateUpdate(**self.metrics.update(self.control.numbers())))
        self.idling.add_rewards([sample.reward for sample in record.samples])
        self.idling.end_streak()
        if trained_version is not None and (
            text := self.parity.trained(step - 1, trained_version, found.mismatch, found.mismatch_begun)
        ):
            self.warn("learner", text, kind="mismatch")
        for text in self.own_metrics.failures:
            self.warn("learner", f"step {step}: {text}", kind=text[:60])
        for name, text in {} if self.topology.scripted else self.alarms.step(row).items():
            if name == FLAT and self.idling.learnt:
                self._tell_learnt()
            else:
                self.warn("learner", text, kind=f"alarm {name}")
        if stats.skipped:
            what = "left out a part of its updates" if stats.partly else "changed nothing"
            self.warn("learner", f"step {step} {what}: {stats.skipped} ({', '.join(stats.culprits)})", "error")

    def _report_history(self) -> None:
        for text in self.history.warnings:
            self.warn("learner", text, "error", kind=text)
        self.history.warnings.clear()

    def _history_stands(self) -> bool:
        """Log and checkpoint are still on the disk; else a checkpoint is written before a restart would need them."""
        self._report_history()
        fault = self.history.fault()
        if not fault:
            return True
        self.warn("learner", f"{fault}; a checkpoint is written at once, so nothing is lost", "error", kind="history")
        return self.write_or_wait("training", lambda: self._write_checkpoint(wait=True))

    def _commit(self, record: Record) -> bool:
        """Append to the log: the commit point. While the disk is full, hold the batch and report it."""
        self.keep_lock()
        waiting = self.ring.header(HeaderWord.UNPUBLISHED_GROUPS)
        self.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, waiting + len(record.groups))
        return self.write_or_wait("training", lambda: self.history.append(record))

    def _train(self, samples: Sequence[SampleRecord], groups: Sequence[Claimed]) -> StepStats:
        if self.plan.streaming:
            self._accumulate()
            with self._blamed():
                return self.training.finish(len(groups))
        self.pending = []
        self.training.trainer.tally.watch(self.excerpts.watched(groups))
        with self._blamed():
            return self.training.train(samples, len(groups), self._present_version())

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        """What fails twice with the same samples ends the run with their names."""
        try:
            yield
        except RankFailed as problem:
            self.history.failed(problem)
            raise

    def _publish(self) -> float:
        seconds = self.publisher.publish(self.history.step, self.training.weights())
        if (version := self._present_version()) is not None:
            self.parity.published(version)
        return seconds

    def _checkpoint(self, wait: bool = False) -> None:
        try:
            self._write_checkpoint(wait)
        except (DiskFull, WriteFailed) as problem:
            self.warn("learner", f"no checkpoint at step {self.history.step}, the log is kept: {problem}", "error")

    def _write_checkpoint(self, wait: bool = False) -> None:
        """Begin one, and see it written where that is asked for, here or by the topology."""
        begun, _ = time.monotonic(), self.deadline.begin()  # whatever was waited for before
        with self.activity("checkpoint", self.work_s):
            self.history.checkpoint(self.training, self.publisher.version, self.control.meta(), self._save_control)
            if wait or not self.topology.learner.saves_meanwhile(self.topology.ranks):
                self.history.commit()
            self.metrics.checkpoint_s = time.monotonic() - begun

    def _commit_checkpoint(self) -> None:
        """One that was begun and is on disk by now."""
        try:
            self.history.commit(wait=False)
        except (DiskFull, WriteFailed) as problem:
            self.warn("learner", f"a checkpoint was lost while it was written, the log is kept: {problem}", "error")

    def _save_control(self, directory: Path) -> None:
        """The last file of a checkpoint, which is refused if the weights were lost while they were written."""
        self.control.save(directory)
        self.publisher.sender.check()

    # -- end ----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """The run is over: give back what was claimed early, write the last checkpoint, end the run in the ring."""
        self._return_claims()
        if self.ring.header(HeaderWord.UNPUBLISHED_GROUPS):
            self._publish()
        if not self.write_or_wait("the last checkpoint", lambda: self._write_checkpoint(wait=True)):
            return
        self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
        self.stop("nothing is left to learn" if self._solved else "all steps are done")

    def _return_claims(self) -> None:
        for group in self.claimed.values():
            give_back(self.ring, group.slots)
        self.claimed.clear()
        self.pending = []

    def teardown(self) -> None:
        if self.ring.header(HeaderWord.RUN_STATE) != RunPhase.FINISHING:
            self._return_claims()
            self._checkpoint(wait=True)
        self.publisher.sender.close()
        self.control.close()
        self.metrics.close()
        self.history.close()
        if self.team is not None:
            self.team.close()
