"""`busrl ring inspect --uid` of a sample of a seat: its draw, its prompt, and the other sides of its episode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.cli.sample_history import history
from busrl.paths import RunPaths
from busrl.ring import Fates
from busrl.states import uid_of
from busrl.topology import Topology

SIZE = 4
BASE = """\
[model]
path = "model"
[data]
train = "train.jsonl"
shuffle = false
[groups]
size = 4
[[process]]
role = "rollout"
[[process]]
role = "learner"
[[process]]
role = "agent"
function = "play.py:episode"
"""


@pytest.fixture
def run(here: Path, loaded: Callable[..., Topology]) -> RunPaths:
    (here / "play.py").write_text("async def episode(task, llm):\n    return 0.0\n")
    paths = RunPaths.of(here / "run")
    paths.root.mkdir()
    topology = loaded("", 'model.seats=["first", "second"]', base=BASE)
    paths.topology.write_text(topology.to_json())
    fates = Fates(str(paths.fates), create=True)
    fates.reserve(1 << 10)
    for uid, fate in ((uid_of(6, 0, 1, SIZE), "T"), (uid_of(7, 0, 1, SIZE), "u"), (uid_of(7, 0, 2, SIZE), "P")):
        fates.store(uid, "D")
        fates.store(uid, fate)
    return paths


def test_a_sample_of_a_seat_names_draw_prompt_and_other_sides(run: RunPaths) -> None:
    text = history(run.root, str(uid_of(7, 0, 1, SIZE)))
    assert "draw 3, seat second, try 0, member 1 of 4" in text
    assert '3+3=' in text and "seat not used (set aside by rule)" in text
    assert f"side      first: uid {uid_of(6, 0, 1, SIZE)}, trained" in text


def test_a_side_that_ended_by_accident_names_its_own_reroll(run: RunPaths) -> None:
    text = history(run.root, str(uid_of(7, 0, 2, SIZE)))
    assert f"re-roll   uid {uid_of(7, 1, 2, SIZE)} is not dispatched yet" in text
    assert f"side      first: uid {uid_of(6, 0, 2, SIZE)}, none" in text
