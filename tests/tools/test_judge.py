"""Rounds of programs and what is written of them: after every round, with how many there are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.common import judge, systems


def test_a_run_stopped_in_a_round_keeps_the_earlier_rounds(tmp_path: Path) -> None:
    log = judge.Log()

    def measure(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt
        log.say("ours", 1.0 + number, "s")
        log.say("theirs", 2.0, "s")

    with pytest.raises(KeyboardInterrupt):
        judge.in_rounds(log, 5, measure, [judge.Bar("ours", "ours", "theirs", 1.0)], "made-up", tmp_path)
    result = json.loads(next(tmp_path.glob("made-up_*.json")).read_text())
    assert (result["rounds"], result["rounds_asked"]) == (2, 5)
    assert result["values"]["ours"] == [1.0, 2.0] and result["bars"][0]["ratios"] == [0.5, 1.0]


@pytest.mark.parametrize("stop_at", [3, None])
def test_a_stopped_comparison_says_of_how_many_turns_it_is(
    stop_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def runner(seed: int, terms: systems.Terms) -> dict[str, Any]:
        if len(measured) == stop_at:
            raise KeyboardInterrupt
        measured.append(seed)
        return {"reached": True, "seconds": 2.0, "cpu_seconds": 1.0, "updates": 10, "samples": 80, "seed": seed}

    monkeypatch.setattr(compare, "runners", lambda against, extra: {"busrl": runner, "loop-1": runner})
    options = argparse.Namespace(
        against=["loop"], seeds=[4, 5], rounds=2, overrides=[], without_busrl=False, quiet=1e9, patience=0.0,
        out=tmp_path)
    terms = systems.Terms(0.85, 1e-3, 10, 60.0, Path("quickstart.toml"), "")
    if stop_at is None:
        assert compare.compare(options, terms) == []
    else:
        with pytest.raises(KeyboardInterrupt):
            compare.compare(options, terms)
    result = json.loads(next(tmp_path.glob("loop_*.json")).read_text())
    assert (result["turns"], result["turns_asked"]) == ((1, 4) if stop_at else (4, 4))
    assert [run["seed"] for run in result["runs"]] == [4, 4, 5, 5, 4, 4, 5, 5][: 2 * result["turns"]]
    assert ("stopped after 1 of 4" in next(tmp_path.glob("loop_*.md")).read_text()) is bool(stop_at)
