"""What `launch` writes down for whoever looks at the run: deaths of its children, and ERRORs from outside.

Talks to `errors.jsonl` and `supervisor.json`, which `busrl status` shows. Knows nothing of processes beyond what it is
told, and decides nothing.

- Processes of busrl file their own warnings before they publish them, so only those of others are filed here. Who
  belongs to busrl is known by its place in the topology, or by its entry in the ring together with its title.
- What strangers send is bounded: a line each 5 s for each of `MOST_SENDERS`, the rest counted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from busrl.errors import first_line
from busrl.gateway import Tally
from busrl.launch.strangers import is_titled
from busrl.launch.supervisor import Child
from busrl.ledger.errorlog import record_error
from busrl.ledger.files import show_whole
from busrl.ledger.throttle import Throttle
from busrl.paths import RunPaths
from busrl.protocol import address
from busrl.protocol import messages as m
from busrl.ring import Process

MOST_SENDERS = 64
OTHERS = "(others)"
UNNAMED = "(unnamed)"
SAVE_EVERY_S = 1.0
TRACE = 4000
TEXT = 200


class Chronicle:
    """`own`: names of the children that are busrl's own programs. `tick` now and then, `close` at the end."""

    def __init__(self, paths: RunPaths, children: Sequence[Child], own: Collection[str]) -> None:
        self._paths, self._children = paths, children
        self._own = {address(name) for name in own} | {"launch"}
        self._met: set[tuple[int, int]] = set()
        self._throttle, self._shown, self._tally = Throttle(), Throttle(), Tally()
        self._deaths: dict[str, str] = {}
        self._changed, self._next_save = True, 0.0

    def died(self, child: Child, text: str, *, gives_up: bool = False) -> None:
        """A child ended that should not have."""
        self.warn(text, "critical" if gives_up else "warning")
        self._deaths[child.name] = text
        self._changed = True

    def warn(self, text: str, severity: str = "warning", uids: Sequence[int] = ()) -> None:
        """Anything else that launch itself saw or did."""
        record_error(self._paths, "launch", severity, "supervisor", text, uids=uids)

    def met(self, entries: Iterable[Process]) -> None:
        """The process table: a role of busrl that somebody else started files its warnings itself."""
        for one in entries:
            if not one.remote and (one.pid, one.index) not in self._met:
                self._met.add((one.pid, one.index))
                if is_titled(one.pid, one.label):
                    self._own.add(one.label.replace("/", "-"))

    def heard(self, error: m.Error, now: float) -> list[str]:
        """An ERROR came; the lines that a person should read now."""
        severity = error.severity if error.severity in m.SEVERITIES else m.SEVERITIES[0]
        if error.sender in self._own:
            return self._heard_own((error.sender, severity, error.where, error.text), now)
        sender = self._known(error.sender)
        self._tally.add(sender, severity, text=first_line(error.text))
        self._changed = True
        line = (sender, severity, error.where, error.text, error.traceback[-TRACE:])
        return [self._file(line)] if self._throttle.admit(sender, line, now) else []

    def tick(self, now: float, everything: bool = False) -> list[str]:
        """What was held back of strangers and is due: filed, and the lines to show. Saves the counts."""
        told = []
        for count, (sender, severity, where, text, trace), _ in self._throttle.due(now, everything):
            told.append(self._file((sender, severity, where, f"{count} more from it, the latest: {text}", trace)))
        for count, (sender, severity, where, text), _ in self._shown.due(now, everything):
            told.append(f"{shown(sender, severity, where, text)} ({count} more like this)")
        if self._changed and (everything or now >= self._next_save):
            self._changed, self._next_save = False, now + SAVE_EVERY_S
            show_whole(self._paths.supervisor, self.plain())
        return told

    def close(self, now: float) -> list[str]:
        """Everything that was held back."""
        return self.tick(now, everything=True)

    def _heard_own(self, line: tuple[str, str, str, str], now: float) -> list[str]:
        """It files and holds back itself; this is for one that does not, or that is none of ours."""
        sender, _, where, text = line
        kind = f"{sender}/{where}/{re.sub('[0-9]+', '#', text)[:TEXT]}"
        return [shown(*line)] if self._shown.admit(kind, line, now) else []

    def _known(self, sender: str) -> str:
        sender = sender or UNNAMED
        return sender if sender in self._tally.workers or len(self._tally.workers) < MOST_SENDERS else OTHERS

    def _file(self, line: tuple[str, ...]) -> str:
        sender, severity, where, text, trace = line
        record_error(self._paths, sender, severity, where, text, trace)
        return shown(sender, severity, where, text)

    def plain(self) -> dict[str, Any]:
        """What stands in supervisor.json."""
        return {
            "time": time.time(),
            "processes": {
                child.name: {
                    "restarts": child.restarts,
                    "killed_for_silence": child.kills,
                    **({"latest": self._deaths[child.name]} if child.name in self._deaths else {}),
                }
                for child in self._children
            },
            "errors_from_outside": self._tally.plain(),
        }


def shown(sender: str, severity: str, where: str, text: str) -> str:
    """An ERROR as one line."""
    return f"{severity}: {sender}{f' ({where})' if where else ''}: {first_line(text)}"
