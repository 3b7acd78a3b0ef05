"""The audit of a run of several models: every ledger by all rules, and episodes that lost a side."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.cli import run as verbs
from busrl.several.audit import Sides, audit, unpaired

SIZE = 2


def sides(*groups: str, seats: int = 1) -> Sides:
    """The fates of groups of two: first tries, then second ones; "." for none."""
    text = "".join(group.ljust(2 * SIZE, ".") for group in groups)
    return Sides(seats, SIZE, np.array([0 if letter == "." else ord(letter) for letter in text], np.uint8))


def test_episodes_whose_sides_all_ended_are_paired() -> None:
    assert unpaired([sides("TT", "ff", "TP.T"), sides("Tu", "ii", "TP.T")]) == {}
    assert unpaired([sides("TT", "fu", seats=2)]) == {}


def test_a_side_that_ended_by_accident_is_counted_with_its_episode() -> None:
    assert unpaired([sides("TT"), sides("TP..")]) == {"accident": 1}
    assert unpaired([sides("TT"), sides("TP.T")]) == {"accident": 1, "alone": 1}


def test_an_episode_with_a_side_under_way_is_not_over() -> None:
    assert unpaired([sides("TT"), sides("TD")]) == {}


def test_sides_of_a_model_that_has_finished_are_named_so() -> None:
    assert unpaired([sides("TT", "TT", "TT"), sides("TT")]) == {"finished": 4}


def test_a_draw_that_a_lost_ring_left_out_is_played_alone() -> None:
    assert unpaired([sides("TT", "TT", "TT"), sides("TT", "..", "TT")]) == {"alone": 2}
    assert unpaired([sides("TT", "..", seats=2)]) == {"alone": 2}


FATES = st.text(alphabet="..DTTTfuiPR", min_size=0, max_size=60)


@given(first=FATES, second=FATES, seats=st.integers(1, 3))
def test_every_episode_is_paired_half_ended_or_under_way(first: str, second: str, seats: int) -> None:
    ledgers = [sides(first, seats=seats), sides(second)]
    found = 0
    for draw in range(max(ledger.draws for ledger in ledgers)):
        for place in range(2 * SIZE):
            codes = [int(code) for ledger in ledgers for code in ledger.of(draw, 1)[:, 0, place]]
            ended = [code in b"TfoielsuV" and code > 0 for code in codes]
            found += any(ended) and not all(ended) and ord("D") not in codes
    assert sum(unpaired(ledgers).values()) == found


def run_folder(root: Path, tag: str, codes: str, **sections: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    data = {
        "run": {"seed": 1}, "data": {"train": "none.jsonl", "shuffle": False}, "groups": {"size": SIZE},
        "learner": {"wal": "off"}, "model": {}, "tag": tag, **sections,
    }
    (root / "topology.json").write_text(json.dumps(data))
    table = bytes(0 if letter == "." else ord(letter) for letter in codes)
    (root / "fates.bin").write_bytes(table.ljust(1 << 12, b"\0"))
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_folder(tmp_path / "run", "solver", "ff..ff..ff")
    run_folder(tmp_path / "run" / "models" / "judge", "judge", "ff..fP..ff")
    return tmp_path / "run"


def test_each_models_report_follows_that_of_the_lead(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = SimpleNamespace(run_dir=run, waste=False, json=False)
    assert verbs.audit(options) == 0
    text = capsys.readouterr().out
    assert f"audit of {run}\n" in text and f"audit of {run}/models/judge\n" in text
    assert "NOTE unpaired x 1: a side ended by accident" in text
    options.json = True
    assert verbs.audit(options) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["models"]["judge"]["clean"] and told["unpaired"] == {"accident": 1}


def test_the_worst_verdict_of_all_models_counts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder(run / "models" / "judge", "judge", "fD..ff..f?")
    assert verbs.audit(SimpleNamespace(run_dir=run, waste=False, json=False)) == 1  # type: ignore[arg-type]
    audited = audit(run)
    assert audited is not None and audited.errors == ["judge: lost", "judge: wrong_fate_code"]


def test_a_run_of_one_model_with_one_seat_has_nothing_more(tmp_path: Path) -> None:
    assert audit(run_folder(tmp_path / "run", "", "ff")) is None
    assert audit(run_folder(tmp_path / "two", "", "ff..ff", model={"seats": ["a", "b"]})) is not None
