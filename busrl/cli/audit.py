"""`busrl audit`: print what `busrl.ledger.audit` finds. Knows only where a tiny task keeps its prompts."""

from __future__ import annotations

import json
from pathlib import Path

from busrl import quickstart
from busrl.launch.printable import printable
from busrl.ledger.audit import audit as look
from busrl.ledger.audit import render
from busrl.paths import RunPaths


def audit(run_dir: Path, as_json: bool) -> int:
    """Print the report; 1 if a promise is broken."""
    report = look(run_dir, prompts=_tiny_prompts(run_dir))
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print("\n".join(map(printable, render(report).split("\n"))))
    return report.exit_code


def _tiny_prompts(run_dir: Path) -> Path | None:
    """The prompt file of a run whose topology names a tiny task instead of one."""
    try:
        train = str(json.loads(RunPaths.of(run_dir).topology.read_bytes())["data"]["train"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the audit itself says what is missing
    made = quickstart.paths(train) if quickstart.known(train) else None
    return made.train if made else None
