"""A run directory by hand: as many files as a test needs, in the form in which a run writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ended(step: int, draws: list[int], fate: str, lengths: list[list[int]], born: int = 0) -> dict[str, Any]:
    return {
        "step": step, "draws": draws, "fates": fate * len(draws), "born": [born] * len(draws), "lengths": lengths,
        "rewards": [[0.0] * len(group) for group in lengths],
    }


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": number, "version": number, "cause": "count", "time": BEGAN + 10 * number, "seconds": 10.0,
        "wait_s": {"groups": 4.0}, "waits": [[1.0, 5.0]], "publish_s": 1.0, "checkpoint_s": 0.0, "reward": 0.5,
        "tokens": 100, "masked": {"earlier_segments": 0, "too_old": 0}, "ess": 0.9, "length_ended": 20.0, **more,
    }


def interval(end: float, drawn: int, decoding: float = 0.25, **more: Any) -> dict[str, Any]:
    return {
        "time": BEGAN + end, "wall_s": 0.25, "step_s": decoding, "weights_s": 0.0, "idle_s": 0.25 - decoding,
        "steps": 2, "tokens": 8, "joined": 0, "updates": 0, "engine": {"tokens": drawn}, **more,
    }


def make_run(root: Path, name: str = "made") -> Path:
    """Two steps, one flat group, one that was too old, two lives of a rollout, a round of validation, a warning."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "topology.json").write_text(json.dumps({"run": {"name": name}, "learner": {"ess_alarm": 0.5, "lr": 0.1}}))
    (root / "run.json").write_text(json.dumps({"run_id": name}))
    write_lines(root / "starts.jsonl", [{"time": BEGAN, "busrl": "9.9", "step": 0, "versions": {"torch": "8.8"}}])
    masked = {"earlier_segments": 30, "too_old": 10}
    write_lines(root / "metrics.jsonl", [step(1), step(2, tokens=60, masked=masked, ess=0.4)])
    write_lines(root / "groups.jsonl", [
        ended(1, [7], "f", [[10, 10]]), ended(1, [0, 1], "T", [[20, 30], [25, 25]]), ended(2, [8], "o", [[300]], 1),
        ended(2, [2], "T", [[40, 60]]),
    ])
    write_lines(root / "pace" / "rollout-0.jsonl", [
        interval(2, 200), interval(4, 500), interval(9, 90), interval(12, 250),
    ])
    write_lines(root / "validation.jsonl", [
        {"round": 0, "val/reward": 0.25, "time": BEGAN + 3, "seconds": 2.0, "samples": 2},
    ])
    write_lines(root / "validation.log", [{"uid": 1, "tokens": 5, "round": 0}, {"uid": 2, "tokens": 6, "round": 0}])
    write_lines(root / "errors.jsonl", [
        {"time": BEGAN + 6, "process": "keeper", "severity": "warning", "where": "keeper",
         "text": "<b>rollout/0 died</b>", "uids": [20, 21, 22]},
    ])
    (root / "fates.bin").write_bytes(b"TTTTTTff" + b"DD" + b"R")
    return root
