"""The process that feeds the sinks of [sinks], with a thread for each.

Talks to `busrl.observe.sinks`, and to the ring for the present values that Prometheus reads. Knows nothing of what a
sink does with a number.

- The run goes on when a sink fails; that is reported once, until the sink works again. A sink whose code cannot be
  imported is left out until the next start.
- At the end sinks have half of limits.stop_s to pass on the last numbers; one that needs longer is named and left.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence

from busrl.errors import UserError
from busrl.observe.sinks import Live, RunCard, Sink
from busrl.observe.sinks.feed import Feed
from busrl.observe.sinks.known import KNOWN
from busrl.roles.actor import Actor
from busrl.states import HeaderWord
from busrl.system import files, imports
from busrl.topology.schema import SINKS

log = logging.getLogger("busrl")


class Sinks(Actor):
    role = "sinks"
    singleton = True
    tick_s = 0.25

    def setup(self) -> None:
        self._reports: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._broken: set[str] = set()
        others = [tag for tag in self.topology.trained_tags if tag != self.topology.tag]
        beside = {tag: self.topology.paths_of(tag, self.paths) for tag in others}
        self._feeds = [
            Feed(name, make, self._card(name), self.paths, lambda who, what: self._reports.put((who, what)), beside)
            for name in self.topology.sinks.to if (make := self._maker(name)) is not None
        ]
        for feed in self._feeds:
            feed.start()

    def _maker(self, name: str) -> Callable[[RunCard], Sink] | None:
        """The class of a sink; None, and a warning, if the user's code cannot be imported."""
        if name in SINKS:
            return KNOWN[name]
        try:
            return imports.load("sinks.to", name, UserError, self.topology.base_dir)
        except UserError as problem:
            self.warn("sinks", f"{problem}; the run goes on without it: correct it, and start the run again", "error")
            return None

    def _card(self, name: str) -> RunCard:
        settings = self.topology.sinks
        shown = name if name in SINKS else name.removeprefix(f"{self.topology.base_dir}/")
        folder = self.paths.sinks / shown.replace("/", "-").replace(":", "-")
        folder.mkdir(parents=True, exist_ok=True)
        topology = files.read_map(self.paths.topology)
        return RunCard(
            self.topology.run.name, self.ring.uuid.hex(), settings.project, folder, topology, settings.host,
            settings.port, self._present, log.info,
        )

    def work(self) -> bool:
        while not self._reports.empty():
            name, text = self._reports.get()
            if not text and name in self._broken:
                self.warn("sinks", f"{name} works again")
            elif text and name not in self._broken:
                self.warn("sinks", f"{name}: {text}; tried again now and then, and given what it has missed")
            self._broken = self._broken | {name} if text else self._broken - {name}
        return False

    def teardown(self) -> None:
        for feed in self._feeds:
            feed.finish()
        patience_s = self.topology.limits.stop_s / 2
        end = time.monotonic() + patience_s
        with self.activity("giving the last numbers to the sinks", 2 * patience_s):
            for feed in self._feeds:
                feed.join(max(0.0, end - time.monotonic()))
        self.work()
        for feed in self._feeds:
            if feed.is_alive():
                what = f"has not taken the last numbers in {patience_s:g} s (limits.stop_s / 2)"
                self.warn("sinks", f"{feed.sink_name} {what}")

    def _present(self) -> Sequence[Live]:
        """Present values of the ring: slots by state, the run's step and versions, and its processes."""
        stats, processes, now = self.ring.stats(), self.ring.processes(), time.monotonic_ns()
        words = (HeaderWord.STEP, HeaderWord.VERSION, HeaderWord.VERSION_STEP)
        by_process = {
            "process_up": [float(not self.ring.is_dead(process.index)) for process in processes],
            "process_silent_seconds": [max(0, now - process.progress_ns) / 1e9 for process in processes],
            "process_busy_seconds_total": [process.busy_ns / 1e9 for process in processes],
        }
        labels = [{"process": process.label} for process in processes]
        return [
            *(Live("slots", {"state": state.lower()}, count) for state, count in stats.occupancy.items()),
            *(Live(f"now_{word.value}", {}, self.ring.header(word)) for word in words),
            Live("generated_tokens_total", {}, stats.tokens), Live("reaps_total", {}, stats.reaps),
            *(Live(name, *of_process) for name, values in by_process.items() for of_process in zip(labels, values)),
        ]
