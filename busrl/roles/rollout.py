"""A rollout actor: takes work from its intake, generates, and gives the answers back to it.

Talks to one engine (`busrl.engines`), to the weight transport (`busrl.weights`) and to its intake (`roles/intake.py`),
which has the slots: those of samples, or those of model calls where agents make the samples. Knows nothing of rewards,
groups or the learner's state beyond the newest version.

- New weights enter only between two decoding steps; every token carries the version that produced it.
- A slot is claimed only when the engine has a row for it: no worker prefetches more than it runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from busrl import capabilities
from busrl.engines import Engine, Finished, Request, make_engine, warm_engine
from busrl.engines.base import PartialAnswer
from busrl.errors import MachineError, WeightsRefused, WeightsTimeout
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Ring, State
from busrl.roles import version_pin
from busrl.roles.actor import WAVE_TICK_S, Actor, WorkDeadline
from busrl.roles.intake import CallIntake, Intake, SampleIntake
from busrl.roles.probes import Prober
from busrl.scheduling.admission import LeftBehind, steps_behind
from busrl.states import Finish, HeaderWord
from busrl.system.files import LineFile
from busrl.topology import Topology
from busrl.weights.base import Receiver
from busrl.weights.factory import TransportSettings, import_transport, make_receiver

log = logging.getLogger("busrl")
PACE_EVERY_S = 0.25
MIB_EACH = 2  # of the pace file, after which half as many intervals are written
MOST_LEFT_OUT = 256  # at least one interval in so many is written, for people who look at the engine's numbers
REQUEST_EVERY_S = 1.0
BELL_EVERY_S = 0.04
SPARSE, SPARSE_BELL_EVERY_S = 8, 0.01  # an eighth of the rows in use: others may wait for these answers
WEIGHTS_TURN_S = 0.25
LEFT_BEHIND_S = 10.0  # new weights usually reach every worker within a decoding step


# -- the pace of decoding, for `busrl simulate --fit` ------


class PaceRow(msgspec.Struct):
    """An interval, wall = steps + weights + idle + the loop's own time. `tokens`: running sequences summed over the
    steps, so their mean is tokens / steps. `engine`: its statistics since it was made. `time`: its end."""

    time: float = 0.0
    wall_s: float = 0.0
    step_s: float = 0.0
    weights_s: float = 0.0
    idle_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    joined: int = 0
    updates: int = 0
    engine: Any = None


class Pace:
    """Sums over short intervals in `pace/NAME.jsonl`, a line per interval. The role adds to `row`.

    The file is thinned as it grows, also over restarts: each further `MIB_EACH` MiB take as long as all before, down to
    a line a minute. A first week makes some 20 MB, later ones 3 MB. Each line is of one short interval, whatever was
    left out beside it, so a fit reads all alike. A full disk costs lines, never the process.
    """

    def __init__(self, directory: Path, name: str, engine: Callable[[], Any], keep: int = 0) -> None:
        self._engine = engine
        directory.mkdir(exist_ok=True)
        self._file = LineFile(directory / f"{name}.jsonl", keep=keep)
        self._left_out = 0
        self._began, self.row = time.monotonic(), PaceRow()

    def stepped(self, active: int, sampled: int, seconds: float) -> None:
        """An engine's step: `sampled` tokens by `active` sequences, which is one decoding step or several."""
        self.row.step_s += seconds
        self.row.steps += sampled // active
        self.row.tokens += sampled
        self.write_when_due()

    def write_when_due(self, last: bool = False) -> None:
        row, now = self.row, time.monotonic()
        if not last and now < self._began + PACE_EVERY_S:
            return
        self._left_out += 1
        if last or self._left_out >= one_in(self._file.size()):
            self._left_out, row.wall_s, row.engine = 0, now - self._began, self._engine()
            row.time = round(time.time(), 3)
            times = {name: round(getattr(row, name), 6) for name in ("wall_s", "step_s", "weights_s", "idle_s")}
            with contextlib.suppress(MachineError, OSError):
                self._file.append(msgspec.json.encode(msgspec.structs.replace(row, **times)))
        self._began, self.row = now, PaceRow()

    def close(self) -> None:
        if self.row.steps:  # so that the lines count every token
            self.write_when_due(last=True)
        self._file.close()


def one_in(nbytes: int) -> int:
    """The number of intervals of which one is written to a file of `nbytes`."""
    return min(MOST_LEFT_OUT, 1 << min(32, nbytes // (MIB_EACH << 20)))


# -- an engine that restarts with new weights ---------------


class EngineRestart:
    """The answers of an engine that starts again with new weights (versions are folders there).

    `finish`: let answers end before the restart, and start none meanwhile; else they are cut and continued after it.

    - A cut answer loses no token: what was drawn becomes the prefix of a new request, and the pieces are committed as
      one answer, each token with its own log-probability and version.
    - The piece after a cut draws from a random stream of its own: the same numbers twice would correlate tokens of one
      answer.
    - Pieces live in this process alone: if it dies, the whole segment is generated again.
    """

    def __init__(self, finish: bool) -> None:
        self.finish = finish
        self.draining = False
        self.answers: dict[int, PartialAnswer] = {}  # of what runs in the engine or is cut, by key
        self._cut: list[int] = []  # keys of what was taken out of the engine, until `resume`

    def submitted(self, requests: Iterable[Request]) -> None:
        """Remember what runs; every request comes back by `merged`."""
        self.answers.update((request.key, PartialAnswer(request)) for request in requests)

    def waits(self, engine: Engine) -> bool:
        """True if the restart has to wait for running answers; none is to be started meanwhile (`draining`)."""
        self.draining = self.finish and engine.active > 0
        return self.draining

    def take_out(self, engine: Engine) -> list[Finished]:
        """Stop the engine and take out what runs. Returns the answers that had ended."""
        ended = []
        for answer in engine.pause("abort"):
            if answer.finish == Finish.ABORTED:
                self._cut.append(answer.key)
                self.answers[answer.key].add_piece(answer)
            else:
                ended.append(answer)
        return ended

    def resume(self, engine: Engine) -> None:
        """Let the engine work again, on the answers that were cut."""
        engine.resume()
        cut, self._cut = self._cut, []
        engine.submit([self.answers[key].rest() for key in cut])

    def merged(self, last: Finished) -> Finished:
        """The answer whose last piece is `last`, with the pieces before it."""
        partial = self.answers.pop(last.key, None)
        if partial is None or not partial.pieces:
            return last
        partial.add_piece(last)  # without its text: the engine has that of the last piece at most
        return partial.finished(last.finish, refused=last.refused)


# -- the role ----------------------------------------------


def import_all(topology: Topology, name: str) -> None:
    """Import what `setup` imports: the engine, the transport."""
    warm_engine(topology, name)
    import_transport(topology.weights.transport)


class Rollout(Actor):
    role = "rollout"
    warm = staticmethod(import_all)
    subscribe: ClassVar[tuple[type[m.Message], ...]] = ()
    restart: EngineRestart | None = None  # where new weights make the engine start again
    engine_held = False  # since the run is paused
    refused = 0  # version that could not be used here
    intake_of_calls: type[CallIntake] = CallIntake

    def setup(self) -> None:
        self.engine: Engine = self._make_engine()
        self.intake: Intake = self._make_intake()
        self.prober = Prober(self.topology, self.intake.only_validates)
        if self.intake.waves is not None:
            self.tick_s = WAVE_TICK_S
        weights = TransportSettings.of(self.topology, self.paths)
        if self.topology.follows:
            receiver: Receiver = capabilities.plug("several", "receiver")(self.topology, self.paths, self.name)
        else:
            receiver = self.engine.receiver(weights, self.worker_id) or make_receiver(weights, self.worker_id)
        self.receiver = receiver
        if self.receiver.kind == "folder":
            self.restart = EngineRestart(finish=self.topology.weights.on_restart == "finish")
        self._next_request = self._last_bell = 0.0
        self.joined = False  # since the last decoding step
        self.deadline = WorkDeadline(self.topology.limits.progress_s, self.topology.limits.work_s)
        self.behind = LeftBehind(LEFT_BEHIND_S)
        self.update_weights(wait=True)
        self.pace = Pace(self.paths.pace, self.worker_id, self.engine.statistics, self.topology.log.keep)

    def _make_engine(self) -> Engine:
        return make_engine(self.topology, self.name)

    def _make_intake(self) -> Intake:
        if not self.topology.derived.call_slots:
            intake = SampleIntake(self.ring, self.topology, self.name, self.engine, self.warn)
            intake.require_room()
            return intake
        calls = Ring.attach(self.paths.calls_name, calls=True)
        calls.register(self.role, self.name)
        return self.intake_of_calls(calls, self.topology, self.name, self.engine, self.warn)

    def work(self) -> bool:
        self.update_weights()
        for slot in self.intake.orphans():
            self._cancel(slot)
        if self.paused:
            self._hold()
            return False
        if self.engine_held:
            self.engine_held = False
            self.engine.resume()
        self.take()
        self._request_tasks()
        if not self.engine.active:
            return False
        begun, active, sampled = time.monotonic(), self.engine.active, self.engine.decoding
        # Counted before they are drawn: a death in the middle of the step hides none.
        self.ring.add(tokens=sampled)
        finished = self.step_engine(joining=self.joined or sampled < active)
        whole = self._commit(finished)
        self._announce()
        busy_s = time.monotonic() - begun
        if self.intake.segments is not None:
            self.intake.segments.stepped(busy_s)
        self.ring.add(busy_ns=int(busy_s * 1e9), samples=whole)
        self.pace.stepped(active, sampled, busy_s)
        return True

    def _hold(self) -> None:
        """While the run is paused answers stay as they are, and what had ended is given back."""
        self.engine_held = True
        if not self.engine.paused:  # new weights may have made it work again
            self.ring.add(samples=self._commit(self.engine.pause("keep")))

    def step_engine(self, joining: bool) -> list[Finished]:
        """A decoding step; declared if it may compute long prompts, or all keys again after new weights."""
        self.joined = False
        if not joining:
            return self.engine.step()
        with self.activity("prefill", self.deadline.begin()):
            finished = self.engine.step()
        self.deadline.ended()
        return finished

    def _announce(self) -> None:
        """Ring doorbells, seldom while many answers run: the reward worker takes all there are at each."""
        now = time.monotonic()
        pause = SPARSE_BELL_EVERY_S if self.engine.active < self.engine.capacity // SPARSE else BELL_EVERY_S
        if now >= self._last_bell + pause:
            self._last_bell = now
            self._ring_bells()

    def _ring_bells(self) -> None:
        # An engine that restarts numbers the tokens of each piece of an answer from 0: its answers come whole.
        for message, to in self.intake.bells(self.engine if self.restart is None else None):
            self.bus.send(message, to)
        for probe in self.prober.messages(self.worker_id):
            self.bus.send(probe)

    def idle(self, timeout_s: float) -> None:
        self._ring_bells()
        ring = self.intake.ring
        seen = ring.transitions(State.QUEUED)
        if not self.take():
            begun = time.monotonic()
            ring.wait(State.QUEUED, seen, timeout_s)
            self.pace.row.idle_s += time.monotonic() - begun
            self.pace.write_when_due()

    def subscriptions(self) -> list[str]:
        return [*super().subscriptions(), topic(m.NewTask, self.worker_id), topic(m.CallCancel, self.worker_id)]

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.CallCancel) and self.intake.holds(message.slot_id, message.seq):
            self._cancel(message.slot_id)

    def _cancel(self, slot: int) -> None:
        """Stop working on a call. One that is not in the engine at the moment goes on: that costs tokens alone."""
        ended = self.engine.abort(slot)
        if ended is not None:
            self.intake.cancelled(ended if self.restart is None else self.restart.merged(ended))

    def _request_tasks(self) -> None:
        """Send the scheduler this worker's name and its rows for training; the scheduler answers with doorbells."""
        if (now := time.monotonic()) >= self._next_request and self.intake.trains:
            self._next_request, rows = now + REQUEST_EVERY_S, self.engine.capacity
            self.bus.send(m.TaskRequest(worker_id=self.worker_id, capacity=rows - self.engine.active, rows=rows))

    # -- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, wait: bool = False) -> None:
        """Load the newest version if there is one. At the start `wait` for it: old weights would age every sample. A
        worker that only validates keeps its version through a round."""
        if self.intake.only_validates and not wait and version_pin.pinned_by(self.ring):
            return
        newest, _ = self.receiver.newest()
        # Version 0 is the model folder that the engine has loaded; nothing was published then.
        if wait and self.ring.header(HeaderWord.VERSION) > max(newest, 0):
            self.wait_for_weights(self.ring.header(HeaderWord.VERSION))
            newest, _ = self.receiver.newest()
        if newest <= max(self.intake.version, self.refused):
            return
        if self.restart is not None and self.restart.waits(self.engine):
            return
        begun = time.monotonic()
        try:
            with self.activity("new weights", self.topology.limits.ready_s):  # some engines restart for them
                version, step = self._new_weights()
        except WeightsRefused as problem:
            self.refused = newest
            text = f"continues with version {self.intake.version}: {problem}"
            self.warn("rollout", text, "error", kind="weights refused")
            return
        self.joined = True
        seconds = time.monotonic() - begun
        if self.intake.segments is not None:
            self.intake.segments.fetched(seconds)
        self.intake.loaded(version, step)
        self.ring.set_version_seen(version)
        self.prober.loaded(version)
        if not wait:
            self.pace.row.weights_s += seconds
            self.pace.row.updates += 1

    def _new_weights(self) -> tuple[int, int]:
        """Load between two decoding steps; running answers leave an engine that has to restart, and come back."""
        if self.restart is None:
            return self.engine.update_weights(self.receiver)
        ended, refused = self.restart.take_out(self.engine), None
        try:
            loaded = self.engine.update_weights(self.receiver)
        except WeightsRefused as problem:
            refused = problem
        self.restart.resume(self.engine)
        self.ring.add(samples=self._commit(ended))
        if refused is not None:
            raise refused
        return loaded

    def wait_for_weights(self, version: int) -> None:
        """Wait for a version in short turns: the learner may be starting too, and the run may be stopped.

        The limit counts from the learner's last progress, since it may have many steps to train again.
        """
        limit_s = self.topology.limits.ready_s
        turns = left = math.ceil(limit_s / WEIGHTS_TURN_S)  # turns, not time: the machine may be suspended
        seen: list[tuple[int, int]] | None = None
        with self.activity("first weights", limit_s):
            while left > 0:
                with contextlib.suppress(WeightsTimeout):
                    self.receiver.wait_for(version, WEIGHTS_TURN_S)
                    return
                if self.stopping:
                    return
                left -= 1
                processes = self.ring.processes()
                learners = [(process.pid, process.progress) for process in processes if process.role == "learner"]
                if learners != seen:
                    seen, left = learners, turns
                    self.shown.progress()
        raise WeightsTimeout(f"{self.name}: no version {version}, and no progress of a learner for {limit_s:g} s")

    # -- slots --------------------------------------------------------------------------------------------------

    def take(self) -> bool:
        """Claim work for the free rows of the engine, and submit it; True if there was any."""
        room = self.engine.capacity - self.engine.active
        draining = self.restart is not None and self.restart.draining
        if room <= 0 or draining or self.paused or self.is_left_behind():
            return False
        requests = self.prober.take(room)
        if len(requests) < room:
            of_run = self.intake.take(room - len(requests), self.is_left_behind)
            self.prober.see(of_run)
            requests += of_run
        if requests:
            if self.restart is not None:
                self.restart.submitted(requests)
            self.engine.submit(requests)
            self.joined = True
            self.pace.row.joined += len(requests)
        return bool(requests)

    def _commit(self, ended: Iterable[Finished]) -> int:
        """Give the answers back, when there is memory for them. Returns how many are whole."""
        if self.restart is not None:
            ended = map(self.restart.merged, ended)
        whole: list[bool] = []

        def commit(answer: Finished) -> None:
            whole.append(self.intake.commit(answer))

        for answer in ended:
            if answer.key < 0:
                self.prober.ended(answer)
            else:
                self.write_or_wait("generation", partial(commit, answer))
        return sum(whole)

    def is_left_behind(self) -> bool:
        """True if this worker starts nothing because new weights do not reach it; warn when that lasts."""
        if self.intake.only_validates:
            return False
        bound = steps_behind(self.topology.derived.limits, self.topology.experiments.forced_age)
        behind = self.ring.header(HeaderWord.VERSION_STEP) - self.intake.steps.step_of(self.intake.version)
        is_behind = self.behind.look(behind, bound, time.monotonic())
        self.shown.waits("weights" if is_behind else "")
        if not is_behind:
            return False
        if self.behind.lasts(time.monotonic()):
            newest, _ = self.receiver.newest()
            published = self.ring.header(HeaderWord.VERSION)
            text = f"takes no new prompts: version {published} is published, but only {newest} has reached this worker"
            self.warn("rollout", text, kind="left behind")
        return True

    def teardown(self) -> None:
        self.intake.give_back()
        log.info("engine: %s", self.engine.statistics())
        self.pace.close()
        self.receiver.close()
        self.engine.close()
