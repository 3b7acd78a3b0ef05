"""Requests to a running run: who may ask, whether a request makes sense, what is done, and the answer.

Talks to CONTROL messages that `run.py` brings, to `control.jsonl`, `topology.json` and the header word
`generation_pause`. Knows nothing of sockets; children are started and ended by `run.py`.

- Only who can read control.key may ask: the run's own user, and whom that user gave it. Each start makes another
  key, and a message that it does not prove changes nothing.
- What has an id is done once, however often it comes; each time it is answered with what is so by then.
- topology.json and the line in control.jsonl are written before anything is answered: whoever starts or dies from then
  on has what was set, and the next start of the run too.
- A process has taken something up when its HEARTBEAT says that it follows control.jsonl so far.
"""

from __future__ import annotations

import json
import secrets
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Protocol

from msgspec import to_builtins

from busrl.errors import BusrlError, TopologyError, UserError
from busrl.launch.rundir import OpenRun
from busrl.launch.summary import RunOutcome
from busrl.ledger.controls import VERBS, ControlLine, Controls
from busrl.ledger.trained import newest_checkpoint, step_of
from busrl.preflight import inflight
from busrl.protocol import messages as m
from busrl.protocol.codec import address
from busrl.states import PAUSE_STARTING, PAUSED, HeaderWord, RunPhase
from busrl.system import files
from busrl.system.files import size_of
from busrl.topology import ProcessName, Topology

NO_PROOF = "refused: its proof is not made with the control.key of this start of the run"
TAKE_UP = {"pause": ("scheduler", "rollout"), "resume": ("scheduler", "rollout"), "checkpoint": ("learner",)}


class Children(Protocol):
    """The part of launch that starts and ends children."""

    def adopt(self, topology: Topology) -> None: ...
    def unsettled(self) -> list[str]: ...  # those that are still to become ready, or to end


class ControlDesk:
    """The desk of one start of a run. `outcome`: the run is to end; `at_once`: without an orderly end."""

    outcome: RunOutcome | None = None
    at_once = False

    def __init__(
        self, run: OpenRun, processes: Mapping[str, ProcessName], children: Children, say: Callable[[str], None]
    ) -> None:
        self._run, self._processes, self._children, self._say = run, processes, children, say
        self.controls = Controls.read(run.paths)
        self._secret = secrets.token_hex(32).encode()
        run.written[run.paths.control_key] = self._secret
        files.replace(run.paths.control_key, self._secret)
        self._sizes: dict[str, int] = {}  # of control.jsonl when the line of an id was there
        self._followed: dict[str, int] = {}  # by process, as in topics
        if not run.topology.here:
            self._begin()

    def _begin(self) -> None:
        """Before any child is there: what was in force is so again; the topology has the values already."""
        for words in self.controls.words():
            self._say(f"still in force: {words}")
        word = self._run.ring.header(HeaderWord.GENERATION_PAUSE) & PAUSE_STARTING
        self._run.ring.set_header(HeaderWord.GENERATION_PAUSE, word | (PAUSED if self.paused else 0))

    @property
    def paused(self) -> bool:
        return self.controls.paused is not None

    def look(self) -> None:
        """Keep the bit as it should be. The learner writes the word while it clears bit 0, and nobody afterwards."""
        word, wanted = self._run.ring.header(HeaderWord.GENERATION_PAUSE), PAUSED if self.paused else 0
        if word != wanted and not word & PAUSE_STARTING and not self._run.topology.here:
            self._run.ring.set_header(HeaderWord.GENERATION_PAUSE, wanted)

    def heard(self, beat: m.Heartbeat) -> None:
        """Note how far a process follows."""
        self._followed[beat.sender] = beat.control

    def signalled(self, name: str) -> None:
        """A signal asks for the end of the run: that is written down like what is asked by a message."""
        line = ControlLine(uuid.uuid4().hex, "stop", True, "its processes end in order", who=f"a signal ({name})",
                           step=self._run.ring.header(HeaderWord.STEP))  # fmt: skip
        with suppress(BusrlError):  # a full disk, say: the run ends all the same
            self._record(line)

    def handle(self, asked: m.Control) -> m.ControlDone:
        """Do what was asked, once, and answer what became of it."""
        if not asked.is_proved(self._secret):
            return m.ControlDone(id=asked.id, ok=False, text=NO_PROOF)
        return self._answer(self.controls.ids.get(asked.id) or self._do(asked))

    def _do(self, asked: m.Control) -> ControlLine:
        step, before = self._run.ring.header(HeaderWord.STEP), self._run.topology
        line = ControlLine(asked.id, asked.verb, False, who=asked.who, key=asked.key, new=asked.value, step=step)
        try:
            self._act(asked, line)
            line.ok = True
        except TopologyError as problem:  # the place is what was typed
            told = "\n".join(f"{one.value or asked.key}: {one.rule}; {one.remedy}" for one in problem.problems)
            line.text = told.replace("--set ", "")
        except UserError as problem:
            line.text = str(problem)
        try:
            self._record(line)
        except BusrlError as problem:
            self._use(before)
            return ControlLine(asked.id, asked.verb, False, f"it cannot be written down, so it is not done: {problem}")
        self.look()
        value = f" {line.key} {line.old} -> {line.new}" if line.key else f" {line.new}" if line.new else ""
        self._say(f"{line.verb}{value}, asked by {line.who}: {line.text if line.ok else f'refused: {line.text}'}")
        return line

    def _record(self, line: ControlLine) -> None:
        line.time = time.time()
        with closing(files.LineFile(self._run.paths.control, sync=True)) as lines:
            lines.append(json.dumps(to_builtins(line), ensure_ascii=False).encode())
        self.controls.add(line)
        self._sizes[line.id] = size_of(self._run.paths.control)

    # -- verbs --------------------------------------------------------------------------------------------------

    def _act(self, asked: m.Control, line: ControlLine) -> None:
        """Fill in what is done; UserError if it is not to be done."""
        if asked.verb not in VERBS:
            raise UserError(f"{asked.verb}: nothing that can be asked of a run; there are {', '.join(VERBS)}")
        if asked.verb == "stop":
            self._stop(asked, line)
            return
        if self._run.topology.here:
            raise UserError("this is the part of a run on another host: ask its launch at home")
        if self.outcome or self._run.ring.header(HeaderWord.RUN_STATE) != RunPhase.RUNNING:
            raise UserError("the run is ending")
        match asked.verb:
            case "pause" | "resume":
                line.text = self._pause(asked.verb)
            case "checkpoint":
                line.text = self._checkpoint(line.step)
            case _:
                self._set(asked, line)

    def _stop(self, asked: m.Control, line: ControlLine) -> None:
        if asked.value not in ("", "now"):
            raise UserError(f'stop {asked.value}: expected nothing, or "now"')
        self.at_once = self.at_once or asked.value == "now"
        self.outcome = self.outcome or RunOutcome("stopped", f"asked to by {asked.who}", 128 + signal.SIGTERM)
        line.text = "every process is killed" if self.at_once else "its processes end in order"

    def _pause(self, verb: str) -> str:
        before = self.controls.paused
        if verb == "pause":
            return f"it is paused already, by {before.who} since {before.when}" if before else "nobody draws tokens now"
        return "it goes on" if before else "it is not paused"

    def _checkpoint(self, step: int) -> str:
        if not step:
            raise UserError("no step is done yet: the run is as its model was")
        return f"of step {step} or a later one"

    def _set(self, asked: m.Control, line: ControlLine) -> None:
        before = self._run.topology
        line.key = inflight.count_key(asked.key) if asked.verb == "scale" else asked.key
        made = inflight.changed(before, line.key, asked.value)
        line.old, line.new = inflight.value_of(before, line.key), inflight.value_of(made, line.key)
        line.text = f"{line.key} = {line.new}" + (" already" if line.old == line.new else f", it was {line.old}")
        self._use(made)

    def _use(self, topology: Topology) -> None:
        """Put a topology in force: processes read it from here on."""
        paths = self._run.paths
        if topology is self._run.topology:
            return
        data = topology.to_json().encode()
        files.replace(paths.topology, data)
        self._run.written[paths.topology], self._run.topology = data, topology
        self._children.adopt(topology)

    # -- answers ------------------------------------------------------------------------------------------------

    def _answer(self, line: ControlLine) -> m.ControlDone:
        waits, ok, text = self._waits(line) if line.ok else [], line.ok, line.text
        if line.verb == "checkpoint" and ok and not waits:
            newest = newest_checkpoint(self._run.paths)
            ok = newest is not None and step_of(newest) >= line.step
            text = f"{newest} is written" if ok else "the learner could not write it: see errors.jsonl"
        return m.ControlDone(id=line.id, ok=ok, text=text[:m.MAX_TEXT], waits=[name[:m.MAX_NAME] for name in waits])

    def _waits(self, line: ControlLine) -> list[str]:
        """Processes that have not taken it up yet."""
        roles = inflight.followers(line.key) if line.verb == "set" else TAKE_UP.get(line.verb, ())
        own = [name for name, one in self._processes.items() if one.role in roles and not one.spec.command]
        needed = self._sizes.get(line.id, 0)
        late = [name for name in own if self._followed.get(address(name), -1) < needed]
        scaled = inflight.is_count(line.key) and line.verb in ("set", "scale")
        return [*late, *(self._children.unsettled() if scaled else [])]
