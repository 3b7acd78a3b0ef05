"""What a scheduler left out by pass rate stays left out, wherever it was killed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl.data import JsonlStream
from busrl.errors import DiskFull
from busrl.ledger.skips import newest_skips, skip_lines
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.ring import Fates
from busrl.roles.scheduler import SkippedPrompts
from busrl.scheduling.predictor import Candidate
from busrl.states import Fate
from busrl.status.view import _left_out
from busrl.system.files import LineFile
from busrl.topology import Topology
from busrl.topology.prompts import Skip, SourceLines

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SIZE = 6, 8


class Place:
    """A run directory of six prompts in their order, and schedulers one after another."""

    def __init__(self, root: Path) -> None:
        self.root, self.paths, self.told = root, RunPaths.of(root), list[str]()
        (root / "p.jsonl").write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(PROMPTS)))
        self.fates = Fates(str(self.paths.fates), create=True)

    def topology(self, skip: Skip) -> Topology:
        topology = load(ROOT / "configs" / "quickstart.toml")
        data = dataclasses.replace(topology.data, skip=skip, train=str(self.root / "p.jsonl"))
        return dataclasses.replace(topology, data=data)

    def filter(self, rest: int = 1) -> SkippedPrompts:
        stream = JsonlStream(self.root / "p.jsonl", 0, shuffle=False)
        skip = Skip(max_pass_rate=0.9, rest=rest)
        return SkippedPrompts(self.topology(skip), self.paths, stream, self.fates, self.told.append)

    def ended(self, *draws: int, right: int) -> None:
        rewards = [[1.0] * right + [0.0] * (SIZE - right) for _ in draws]
        with open(self.paths.groups, "a") as file:
            file.write(json.dumps({"step": 1, "draws": draws, "fates": "T" * len(draws), "rewards": rewards}) + "\n")

    def left_out(self) -> list[int]:
        """Draws by the table of fates; no other sample of such a draw has one."""
        uids = [uid for uid, code in enumerate(self.fates.view()) if code == Fate.SKIPPED]
        assert all(uid % (2 * SIZE) == 0 for uid in uids)
        return [uid // (2 * SIZE) for uid in uids]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def draws(first: int, last: int) -> Iterator[Candidate]:
    return (Candidate(draw, "", 1) for draw in range(first, last))


def take(skipped: SkippedPrompts, first: int, last: int) -> list[int]:
    skipped.look()
    candidates = draws(first, last)
    wanted, _ = skipped.take(lambda: next(candidates, None), last - first)
    return [candidate.draw for candidate in wanted]


def test_draws_of_learned_prompts_are_recorded_and_the_others_are_opened(place: Place) -> None:
    place.ended(1, 2, right=SIZE)
    place.ended(0, right=3)
    assert take(place.filter(), 6, 12) == [6, 9, 10, 11]
    assert place.left_out() == [7, 8]
    assert _left_out(place.paths) == {"p": {"draws": 2, "resting": 2, "prompts": PROMPTS}}
    after = place.filter()
    after.look()
    assert after.metrics() == {"left_out": 2.0, "resting": 2.0}


def test_a_scheduler_killed_before_the_fates_leaves_them_to_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.ended(1, 2, 3, right=SIZE)
    killed = place.filter()
    monkeypatch.setattr(killed, "_end", lambda draws: place.fates.store(draws[0] * 2 * SIZE, Fate.DISPATCHED.letter))
    take(killed, 6, 12)
    assert place.left_out() == []
    place.ended(1, 2, 3, right=0)  # what the next one would decide by itself
    after = place.filter()
    assert place.left_out() == [7, 8, 9] and after.left_out == [3]
    assert take(after, 12, 18) == [12, 13, 14, 15, 16, 17]


def test_a_pass_omitting_nothing_survives_a_kill_and_is_told_once(place: Place) -> None:
    place.ended(*range(PROMPTS), right=SIZE)
    assert take(place.filter(rest=0), 6, 8) == [6, 7]
    place.ended(6, 7, right=0)
    assert take(place.filter(rest=0), 8, 12) == [8, 9, 10, 11]
    assert take(place.filter(rest=0), 12, 18) == [12, 13]
    assert len(place.told) == 1 and "every prompt is out of the band" in place.told[0]
    assert [line.given_up for line in skip_lines(place.paths.skips)] == [12, 0]


def test_with_a_full_disk_nothing_is_left_out_or_forgotten(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ended(*range(PROMPTS), right=SIZE)
    skipped = place.filter(rest=0)

    def full(file: LineFile, line: bytes) -> None:
        raise DiskFull("no space")

    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "append", full)
        with pytest.raises(DiskFull):
            take(skipped, 6, 12)
    assert place.left_out() == [] and newest_skips(place.paths.skips) is None and not place.told
    assert take(skipped, 6, 12) == [6, 7, 8, 9, 10, 11] and len(place.told) == 1


def test_damaged_lines_of_groups_leave_their_prompts_in(place: Place) -> None:
    place.ended(1, right=SIZE)
    with open(place.paths.groups, "a") as file:
        file.write('{"draws": [2], "rewards": "none"}\n\xff\n{"draws": [3], "rewards": [[1, 1]]')
    assert take(place.filter(), 6, 12) == [6, 8, 9, 10, 11]


def test_prompts_of_several_sources_are_counted_by_source(place: Place) -> None:
    parts = (SourceLines("easy", 0, 2, 500, ""), SourceLines("hard", 2, 4, 500, ""))
    topology = place.topology(Skip(max_pass_rate=0.9, rest=0))
    topology = dataclasses.replace(topology, derived=dataclasses.replace(topology.derived, sources=parts))
    stream = JsonlStream(place.root / "p.jsonl", 0, shuffle=False, sections=parts)
    easy = [draw for draw in range(40) if stream.place(draw).source == 0]
    place.ended(*easy[:2], right=SIZE)
    skipped = SkippedPrompts(topology, place.paths, stream, place.fates, place.told.append)
    assert take(skipped, 20, 40) == [draw for draw in range(20, 40) if draw not in easy] and not place.told
    out = float(len([draw for draw in easy if draw >= 20]))
    assert skipped.metrics() == {
        "left_out": out, "resting": 2.0, "left_out/easy": out, "left_out/hard": 0.0, "resting/easy": 2.0,
        "resting/hard": 0.0}
