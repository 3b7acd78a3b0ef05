"""Lines of `busrl check` and `busrl doctor` on boxes: whether this machine makes them.

Plugs of the checks before a start. Talks to `boxes`, for a topology as `python -m busrl.rewards.box`, as the user's own
Python has it. Knows nothing of runs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from busrl.preflight.doctor import Line
from busrl.preflight.trial import LOAD_S, SHOWN_TEXT
from busrl.rewards.box import boxes
from busrl.system.imports import interpreter
from busrl.topology import Topology


def facts(t: Topology) -> Iterator[str]:
    """Describe the boxes of this machine, if a part of the reward runs code that a model wrote."""
    if any(part.kind == "code" for part in t.reward.part):
        done = subprocess.run(
            [*interpreter(), "busrl.rewards.box"], capture_output=True, text=True, timeout=LOAD_S, check=False
        )
        yield "boxes for code: " + ("; ".join(done.stdout.splitlines()) or done.stderr.strip()[-SHOWN_TEXT:])


def look() -> Iterator[Line]:
    """Make a box, and say whether this machine can."""
    refused = boxes.refusal()
    remedy = f"{refused}; reward kind \"code\" refuses to run without (docs/rewards.md)" if refused else ""
    works = 'works: what models write for reward kind "code" runs shut in'
    yield Line("code box", works if not refused else "this machine does not allow it", remedy)
