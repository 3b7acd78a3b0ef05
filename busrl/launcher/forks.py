"""Processes of a run that are forked from one which has imported what they need: who is, who waits, who starts alone.

Talks to the template (`system/template.py`), for the processes that `processes.py` starts. Knows nothing of deaths.

- A program, another interpreter or an environment of its own: such a process starts alone, and so does the bus, for
  which all others wait.
- The template imports what processes without a model need; once those are started, what models need.
- Whatever goes wrong with the template costs one line and the time that it would have saved.
- Its death ends nothing: the next process that it could serve starts it again, until it has died `MOST_DEATHS` times
  without serving any.
"""

from __future__ import annotations

import enum
import os
import selectors
import time
from collections.abc import Mapping, Sequence

from busrl.capabilities import ROLES
from busrl.launcher.summary import Journal, cpu_of
from busrl.paths import RunPaths
from busrl.system.guardian import halted
from busrl.system.imports import interpreter
from busrl.system.template import Template, TemplateGone, TemplateRefused
from busrl.topology import ProcessName, Topology
from busrl.topology.kinds import ENGINES
from busrl.topology.schema import has_model

IDLE_S = 20.0  # without any CPU: an import that waits for something
MOST_CPU_S = 120.0  # of an import that never ends
SLOW_S = 10.0  # from then on a line says what the run waits for
FORK_S = 5.0
MOST_DEATHS = 3
# A library that looks whether there is a GPU would start the driver, which no fork survives: NVML answers without.
NO_DEVICE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
ALONE_ROLES = ("bus",)
# They bind a process to cores when a library is imported: a fork would have those of the template.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class Way(enum.Enum):
    """The way in which a process starts."""

    FORKED = "forked from the template"
    WAITS = "waits for the template"
    ALONE = "a program of its own"


class Warmth(enum.Enum):
    """COLD -> WARMING_LIGHT -> LIGHT -> WARMING_ALL -> ALL; any -> COLD (it died) | OFF (given up, or turned off)"""

    COLD = "there is no template"
    WARMING_LIGHT = "imports what processes without a model need"
    LIGHT = "serves processes without a model"
    WARMING_ALL = "imports what models need"
    ALL = "serves all"
    OFF = "not used"


def needs_model(process: ProcessName) -> bool:
    return ROLES[process.role].tensors or has_model(process.spec)


class Patience:
    """Judges by the CPU that it uses how long a template may import: a busy machine makes imports slow."""

    def __init__(self, pid: int) -> None:
        self._pid, self._began_at, self._begun_s = pid, time.monotonic(), cpu_of(pid)
        self._used_s, self._used_at, self._noted = self._begun_s, self._began_at, False

    def look(self) -> str:
        """A line to note, once, when it takes long; TemplateRefused when it takes too long."""
        now, used_s = time.monotonic(), cpu_of(self._pid)
        if used_s > self._used_s:
            self._used_s, self._used_at = used_s, now
        if now > self._used_at + IDLE_S:
            raise TemplateRefused(f"the template (pid {self._pid}) imports, and has used no CPU for {IDLE_S:g} s")
        if used_s > self._begun_s + MOST_CPU_S:
            raise TemplateRefused(f"the template (pid {self._pid}) has used {MOST_CPU_S:g} CPU seconds to import")
        if self._noted or now < self._began_at + SLOW_S:
            return ""
        self._noted = True
        return f"the template (pid {self._pid}) still imports after {now - self._began_at:.0f} s; processes wait"


class Forks:
    """The template of a run, from the first process that it can serve to `close`.

    `environment` is that of all processes, without what is a process's own; `journal` shows lines.
    """

    def __init__(
        self, paths: RunPaths, topology: Topology, environment: Mapping[str, str],
        selector: selectors.BaseSelector, journal: Journal,
    ) -> None:
        self._paths, self._environment, self._selector, self._journal = paths, environment, selector, journal
        served = [process for process in topology.processes() if self._can_fork(process)]
        self._light = [process.name for process in served if not needs_model(process)]
        self._with_model = [process.name for process in served if needs_model(process)]
        self.warmth = Warmth.COLD if topology.run.template and len(served) > 1 else Warmth.OFF
        self._template: Template | None = None
        self._deaths, self._patience = 0, Patience(0)
        binding = next((name for name in BINDING if environment.get(name)), "")
        if binding and self.warmth is Warmth.COLD:
            self._give_up(f"{binding} is set, which binds a process to cores when it imports a library")

    @staticmethod
    def _can_fork(process: ProcessName) -> bool:
        spec = process.spec
        alone = process.role in ALONE_ROLES or (process.role == "rollout" and not ENGINES[spec.engine].forks)
        return not (alone or spec.command or spec.python or spec.env) and process.role in ROLES

    @property
    def pid(self) -> int:
        """Process number of the template; 0 while there is none."""
        return self._template.pid if self._template else 0

    def way_of(self, process: ProcessName) -> Way:
        if self.warmth is Warmth.OFF or not self._can_fork(process):
            return Way.ALONE
        ready = (Warmth.ALL,) if needs_model(process) else (Warmth.LIGHT, Warmth.ALL)
        return Way.FORKED if self.warmth in ready else Way.WAITS

    def look(self, due: Sequence[ProcessName]) -> None:
        """Bring the template as far as the processes that are due need it; see whether it is still there."""
        try:
            if self._template and self._template.ended():
                self._died()
            if self.warmth is Warmth.COLD and any(self.way_of(process) is Way.WAITS for process in due):
                self._start()
            elif self._template and self._template.busy:
                self._see_its_answer(self._template)
            if self.warmth is Warmth.LIGHT and not any(self.way_of(process) is Way.FORKED for process in due):
                self._warm(Warmth.WARMING_ALL, self._with_model)
        except TemplateGone:
            self._died()
        except TemplateRefused as refusal:
            self._give_up(str(refusal))
        except OSError as problem:
            self._give_up(f"it could not be started: {problem}")

    def fork(
        self, process: ProcessName, environment: Mapping[str, str], descriptors: Sequence[int], cores: frozenset[int]
    ) -> int:
        """Fork the process; its pid. TemplateRefused if it has to be started as a program of its own after all."""
        assert self._template is not None
        try:
            if held := halted(self._template.pid):
                raise TemplateRefused(f"the template (pid {self._template.pid}) is {held}")
            pid = self._template.fork(
                "busrl.roles.__main__:forked", [str(self._paths.root), process.name], environment, descriptors,
                sorted(cores), FORK_S,
            )
        except TemplateGone:
            self._died()
            raise
        except TemplateRefused as refusal:
            self._give_up(str(refusal))
            raise
        self._deaths = 0
        return pid

    # -- its life ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        log = os.open(self._paths.log("template"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            command = [*interpreter(), "busrl.system.template"]
            self._template = Template(command, {**self._environment, **NO_DEVICE}, log)
        finally:
            os.close(log)
        self._selector.register(self._template, selectors.EVENT_READ)
        self._warm(Warmth.WARMING_LIGHT, self._light)

    def _warm(self, warmth: Warmth, names: Sequence[str]) -> None:
        assert self._template is not None
        self.warmth, self._patience = warmth, Patience(self._template.pid)
        self._template.call("busrl.roles.__main__:warm", str(self._paths.root), list(names))

    def _see_its_answer(self, template: Template) -> None:
        if template.answered():
            more = self.warmth is Warmth.WARMING_LIGHT and self._with_model
            self.warmth = Warmth.LIGHT if more else Warmth.ALL
        elif held := halted(template.pid):
            raise TemplateRefused(f"the template (pid {template.pid}) is {held}")
        elif line := self._patience.look():
            self._journal.note(line)

    def _died(self) -> None:
        """Let the next process that it could serve start it again, if it has served any since it died before."""
        self._deaths += 1
        self._drop()
        self.warmth = Warmth.COLD
        if self._deaths >= MOST_DEATHS:
            self._give_up(f"the template died {self._deaths} times and served no process in between")

    def _give_up(self, why: str) -> None:
        self._drop()
        self.warmth = Warmth.OFF
        self._journal.say(f"processes start without a template from here on, which takes longer: {why}")

    def _drop(self) -> None:
        if self._template is not None:
            self._selector.unregister(self._template)
            self._template.close()
            self._template = None

    def close(self) -> None:
        self._drop()
        self.warmth = Warmth.OFF
