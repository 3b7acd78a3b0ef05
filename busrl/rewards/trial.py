"""The process in which a reward is loaded and tried before a run: `python -m busrl.rewards.trial`.

Reads one JSON line from stdin (the settings, a record, the answers to try) and writes one line per event to stdout:
loaded, then a result for each answer. The parent (`busrl.config.trial`) has the deadlines and kills it. Judges as
`child` does; knows nothing of topologies.

- What the user's code prints goes to stderr, and stdin is empty for it.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from busrl.rewards.base import build
from busrl.rewards.child import die_with_parent, judge, private_pipes
from busrl.rewards.process import Request


def main() -> int:
    """Exit code 1 if the function cannot be loaded."""
    requests, answers = private_pipes()
    asked: dict[str, Any] = json.loads(requests.readline())
    die_with_parent(asked["parent"])
    try:
        function = build(SimpleNamespace(**asked["reward"]))
    except BaseException as problem:
        report(answers, {"not_loaded": str(problem) or type(problem).__name__})
        return 1
    report(answers, {"not_loaded": ""})
    for number, (completion, token_ids) in enumerate(asked["answers"]):
        request = Request(seq=number, record_line=asked["record"].encode(), completion=completion, token_ids=token_ids)
        found = judge(function, request)
        report(answers, {"value": found.value, "parts": found.parts, "error": found.error, "text": found.text})
    return 0


def report(answers: int, event: dict[str, Any]) -> None:
    """One line."""
    os.write(answers, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
