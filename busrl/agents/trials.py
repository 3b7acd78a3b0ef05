"""Trials of agents before a run starts: how the chat template continues turns, and whether an episode can begin.

Runs `busrl.agents.renderer` and `busrl.agents.child` as programs with deadlines, for `busrl check`
(`busrl.preflight.trial`). Knows nothing of slots or model calls.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

from busrl.data import pretrained
from busrl.preflight.trial import LOAD_S, foreign
from busrl.states import ENVIRONMENT
from busrl.topology import Topology
from busrl.topology.declare import FUNCTION
from busrl.topology.schema import AGENT, Process


def notes_on_turns(t: Topology) -> Iterator[str]:
    """Yield lines on how the chat template continues the turns of an episode; none without agents or a template."""
    folder = pretrained.model_at(t.model.path)
    if folder is None or not t.has_callers:
        return
    with foreign(t, AGENT, "busrl.agents.renderer", str(folder)) as program:
        try:
            lines = program.child.communicate(timeout=LOAD_S)[0].decode(errors="replace").splitlines()
        except subprocess.TimeoutExpired:
            lines = [f"not tried: the template took longer than {LOAD_S:g} s"]
        if program.child.returncode:
            lines = [f"cannot be tried: {program.last_words()}"]
    if lines:
        yield "turns of an episode, as the chat template lets them be continued"
        yield from (f"  {line}" for line in lines)


def try_agents(t: Topology) -> Iterator[tuple[str, str]]:
    """Yield (key, fault) of each agent that cannot be loaded, or cannot begin an episode."""
    for index, entry in enumerate(t.process):
        sound = bool(ENVIRONMENT.fullmatch(entry.environment)) != bool(FUNCTION.fullmatch(entry.function))
        sound = sound and (not entry.python or os.access(entry.python, os.X_OK))
        if entry.role == AGENT and sound and (fault := _fault_of_agent(t, entry)):
            key, value = ("environment", entry.environment) if entry.environment else ("function", entry.function)
            yield f"process.{index}.{key}", fault.removeprefix(f"{key} = {value!r}: ")


def _fault_of_agent(t: Topology, entry: Process) -> str:
    setup = {"type": "setup", "function": entry.function, "base_dir": t.base_dir, "environment": entry.environment,
             "options": entry.options, "trial": True}
    until = time.monotonic() + LOAD_S
    with foreign(t, AGENT, "busrl.agents.child", str(os.getpid()), python=entry.python) as child:
        child.send(setup)
        while (event := child.next(max(0.0, until - time.monotonic()))) is not None:
            if event["type"] == "ready":
                return str(event.get("error", ""))
        late = f"importing and setting it up took longer than {LOAD_S:g} s"
        return f"its process died: {child.last_words()}" if child.ended else late
