"""Requests to a running run (CONTROL): who may send one, whether it makes sense, what is done, and the answer.

`run.py` brings the messages and sends the answers; `processes.py` starts and ends children. Writes `control.jsonl`,
`topology.json` and the header word `generation_pause`. Knows nothing of sockets.

- A sender proves that it can read control.key: the run's own user can, and whoever that user gave it. Each start makes
  another key, and a request without proof changes nothing.
- A request is carried out once, however often its id comes. Each time the answer is the state by then.
- topology.json and the line of control.jsonl are written before the answer: a process that starts from then on has the
  new value, and so has the next start of the run.
- A process has taken up a request when its HEARTBEAT says that it follows control.jsonl up to that line.
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
from busrl.launcher.rundir import OpenRun
from busrl.launcher.summary import RunOutcome
from busrl.ledger.controls import VERBS, ControlLine, Controls
from busrl.ledger.trained import newest_checkpoint, step_of
from busrl.preflight import changeable
from busrl.protocol import messages as m
from busrl.protocol.codec import address
from busrl.states import PAUSE_STARTING, PAUSED, HeaderWord, RunPhase
from busrl.system import files
from busrl.system.files import size_of
from busrl.topology import ProcessName, Topology

NO_PROOF = "refused: its proof is not made with the control.key of this start of the run"
PAUSE = ("scheduler", "rollout", "tuner")
TAKE_UP = {"pause": PAUSE, "resume": PAUSE, "checkpoint": ("learner",)}


class Children(Protocol):
    """The part of launch that starts and ends children."""

    def adopt(self, topology: Topology) -> None: ...
    def unsettled(self) -> list[str]: ...  # those that are still to become ready, or to end


class ControlDesk:
    """Requests of one start of a run. `outcome` is set when the run is to end, `at_once` if it is not to end in order.
    """

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
        self._sizes: dict[str, int] = {}  # by id: the size of control.jsonl up to its line
        self._followed: dict[str, int] = {}  # by process, as in topics: the size up to which it follows
        if not run.topology.here:
            self._begin()

    def _begin(self) -> None:
        """Put in force what was in force at the end of the last start, before any child starts. The topology has the
        values already."""
        for words in self.controls.words():
            self._say(f"still in force: {words}")
        for each in self._run.every:
            word = each.ring.header(HeaderWord.GENERATION_PAUSE) & PAUSE_STARTING
            each.ring.set_header(HeaderWord.GENERATION_PAUSE, word | (PAUSED if self.paused else 0))

    @property
    def paused(self) -> bool:
        return self.controls.paused is not None

    def look(self) -> None:
        """Restore the bit of the pause in its word. The learner writes that word until it has cleared bit 0, and no
        process afterwards."""
        for ring in (each.ring for each in self._run.every if not self._run.topology.here):
            word, wanted = ring.header(HeaderWord.GENERATION_PAUSE), PAUSED if self.paused else 0
            if word != wanted and not word & PAUSE_STARTING:
                ring.set_header(HeaderWord.GENERATION_PAUSE, wanted)

    def note_heartbeat(self, beat: m.Heartbeat) -> None:
        """Note how far a process follows control.jsonl."""
        self._followed[beat.sender] = beat.control

    def signalled(self, name: str) -> None:
        """Record the end of the run by a signal as a request is recorded."""
        line = ControlLine(uuid.uuid4().hex, "stop", True, "its processes end in order", who=f"a signal ({name})",
                           step=self._run.ring.header(HeaderWord.STEP))  # fmt: skip
        with suppress(BusrlError):  # a full disk, say: the run ends all the same
            self._record(line)

    def handle(self, request: m.Control) -> m.ControlDone:
        """Carry out a request, once; the answer."""
        if not request.is_proved(self._secret):
            return m.ControlDone(id=request.id, ok=False, text=NO_PROOF)
        return self._answer(self.controls.ids.get(request.id) or self._do(request))

    def _do(self, request: m.Control) -> ControlLine:
        step, before = self._run.ring.header(HeaderWord.STEP), self._run.topology
        line = ControlLine(
            request.id, request.verb, False, who=request.who, key=request.key, new=request.value, step=step
        )
        if before.models:
            line.steps = {each.topology.tag: each.ring.header(HeaderWord.STEP) for each in self._run.trained()}
        try:
            self._act(request, line)
            line.ok = True
        except TopologyError as error:  # of a place in the topology the person typed only the key
            faults = [f"{fault.value or request.key}: {fault.rule}; {fault.remedy}" for fault in error.problems]
            line.text = "\n".join(faults).replace("--set ", "")
        except UserError as error:
            line.text = str(error)
        try:
            self._record(line)
        except BusrlError as error:
            self._use(before)
            text = f"it cannot be written down, so it is not done: {error}"
            return ControlLine(request.id, request.verb, False, text)
        self.look()
        new = f"{line.old} -> {line.new}" if line.old else line.new
        value = "".join(f" {part}" for part in (line.key, new) if part)
        self._say(f"{line.verb}{value}, asked by {line.who}: {line.text if line.ok else f'refused: {line.text}'}")
        return line

    def _record(self, line: ControlLine) -> None:
        line.time = time.time()
        with closing(files.LineFile(self._run.paths.control, sync=True)) as lines:
            lines.append(json.dumps(to_builtins(line), ensure_ascii=False).encode())
        self.controls.add(line)
        self._sizes[line.id] = size_of(self._run.paths.control)

    # -- verbs --------------------------------------------------------------------------------------------------

    def _act(self, request: m.Control, line: ControlLine) -> None:
        """Carry out a request and fill in its line; UserError if it is refused."""
        if request.verb not in VERBS:
            raise UserError(f"{request.verb}: nothing that can be asked of a run; there are {', '.join(VERBS)}")
        if request.verb == "stop":
            self._stop(request, line)
            return
        if self._run.topology.here:
            raise UserError("this is the part of a run on another host: ask its launch at home")
        phases = (each.ring.header(HeaderWord.RUN_STATE) for each in self._run.trained())
        if self.outcome or RunPhase.RUNNING not in phases:
            raise UserError("the run is ending")
        match request.verb:
            case "pause" | "resume":
                line.text = self._pause(request.verb)
            case "checkpoint":
                line.text = self._checkpoint(line)
            case _:
                self._set(request, line)

    def _stop(self, request: m.Control, line: ControlLine) -> None:
        if request.value not in ("", "now"):
            raise UserError(f'stop {request.value}: expected nothing, or "now"')
        self.at_once = self.at_once or request.value == "now"
        self.outcome = self.outcome or RunOutcome("stopped", f"asked to by {request.who}", 128 + signal.SIGTERM)
        line.text = "every process is killed" if self.at_once else "its processes end in order"

    def _pause(self, verb: str) -> str:
        before = self.controls.paused
        if verb == "pause":
            return f"it is paused already, by {before.who} since {before.when}" if before else "nobody draws tokens now"
        return "it goes on" if before else "it is not paused"

    def _checkpoint(self, line: ControlLine) -> str:
        """Have every learner write one, or that of the model that is the key; in words, of which steps."""
        if not any(process.role == "learner" for process in self._processes.values()):
            raise UserError("no process of this run writes checkpoints; a service writes the state of each model by "
                            "itself (tinker.state_every_s), and what is asked behind that is in its log")
        asked = {tag: step for tag, step in line.by_tag.items() if line.key in ("", tag)}
        if not asked:
            raise UserError(f"{line.key}: no model of this run that learns; there are {', '.join(line.by_tag)}")
        if not any(asked.values()):
            raise UserError("no step is done yet: the run is as its model was")
        if line.steps:  # a model without a step is as it was
            line.steps = {tag: step for tag, step in asked.items() if step and not self._is_past(tag, step)}
            if not line.steps:
                tags = ", ".join(tag for tag, step in asked.items() if step)
                raise UserError(f"{tags} has made its steps: its learner writes no checkpoint any more")
        of_each = (f"{tag}: step {step}" if tag else f"step {step}" for tag, step in line.by_tag.items())
        return f"of {', '.join(of_each)} or a later one"

    def _is_past(self, tag: str, step: int) -> bool:
        """Tell whether a model has ended, and lacks a checkpoint of this step: nobody will write one."""
        own = next(each for each in self._run.trained() if each.topology.tag == tag)
        ended = own.ring.header(HeaderWord.RUN_STATE) != RunPhase.RUNNING
        newest = newest_checkpoint(own.paths) if ended else None
        return ended and (newest is None or step_of(newest) < step)

    def _set(self, request: m.Control, line: ControlLine) -> None:
        before = self._run.topology
        line.key = changeable.whole_key(before, request.key, request.verb == "scale")
        topology = changeable.changed(before, line.key, request.value)
        line.old, line.new = changeable.value_of(before, line.key), changeable.value_of(topology, line.key)
        line.text = f"{line.key} = {line.new}" + (" already" if line.old == line.new else f", it was {line.old}")
        self._use(topology)

    def _use(self, topology: Topology) -> None:
        """Put a topology in force: processes read it from here on."""
        if topology is not self._run.topology:
            self._run.use(topology)
            self._children.adopt(topology)

    # -- answers ------------------------------------------------------------------------------------------------

    def _answer(self, line: ControlLine) -> m.ControlDone:
        waits, ok, text = self._waits(line) if line.ok else [], line.ok, line.text
        if line.verb == "checkpoint" and ok and not waits:
            ok, text = self._written(line)
        return m.ControlDone(id=line.id, ok=ok, text=text[:m.MAX_TEXT], waits=[name[:m.MAX_NAME] for name in waits])

    def _written(self, line: ControlLine) -> tuple[bool, str]:
        """Tell whether the checkpoints that were asked for are there, and in words which."""
        topology, texts, whole = self._run.topology, list[str](), True
        for tag, step in line.by_tag.items():
            newest = newest_checkpoint(topology.paths_of(tag, self._run.paths))
            there = newest is not None and step_of(newest) >= step
            learner = next(name for name, process in self._processes.items()
                           if process.role == "learner" and tag in topology.models_of(name))
            texts.append(f"{newest} is written" if there else f"the {learner} could not write it: see errors.jsonl")
            whole = whole and there
        return whole, "; ".join(texts)

    def _waits(self, line: ControlLine) -> list[str]:
        """Processes that have not taken up a request yet."""
        roles = changeable.followers(line.key) if line.verb == "set" else TAKE_UP.get(line.verb, ())
        needed = self._sizes.get(line.id, 0)
        late = [
            name for name, process in self._processes.items()
            if process.role in roles and not process.spec.command and self._followed.get(address(name), -1) < needed
            and not self._is_spared(line, name)
        ]
        scaled = changeable.is_count(line.key) and line.verb in ("set", "scale")
        return [*late, *(self._children.unsettled() if scaled else [])]

    def _is_spared(self, line: ControlLine, name: str) -> bool:
        """Tell whether a process needs to take up nothing: a learner whose models have all ended, or, for a checkpoint,
        a process of other models than those that it is about."""
        owns = {own.topology.tag: own.ring.header(HeaderWord.RUN_STATE) for own in self._run.of_models(name)}
        if self._processes[name].role == "learner" and RunPhase.RUNNING not in owns.values():
            return True
        return line.verb == "checkpoint" and bool(line.steps) and not owns.keys() & line.by_tag.keys()
