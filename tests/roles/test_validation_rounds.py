"""Which validation round is due, from what is done and where the learner stands."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from role_parts import parts

from busrl.data import JsonlStream
from busrl.data.figures import Figures, Judged
from busrl.data.prompts import lines_of
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.ring import Fates, Ring, State
from busrl.roles.answers import write_parts, write_segment, write_text
from busrl.roles.validator import MeasuredSet, Result, RoundPin, Validator, _finished_rounds, _short
from busrl.scheduling.trigger import Rounds
from busrl.states import VALIDATE_BIT
from busrl.system.files import LineFile
from busrl.topology.prompts import AskedSet, Validation


def test_a_damaged_line_costs_its_round_another_end_and_not_the_validator(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    path.write_bytes(b'{"round":0,"mean":1}\n\xff\x00{"round":3}\n[]\n{"round":5}\n')
    assert _finished_rounds(path).keys() == {0, 5} and not _finished_rounds(tmp_path / "none")


def test_a_first_round_that_comes_late_has_the_number_of_its_step() -> None:
    """Weights of step 30 are not those that the run began with, whatever the first round is called."""
    assert Rounds(before=True, every=10, at_end=True, done=set(), late=True).due(34, False) == 34


def test_of_a_round_the_last_line_that_measured_something_stands(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    lines = [
        '{"round": 0, "samples": 0, "val/reward": null}', '{"round": 5, "samples": 3, "groups": 40}',
        '{"round": 5, "samples": 0}', '{"round": 7, "samples": 0, "val/reward": 0.0}', '{"round": 9}',
        '{"round": 8, "samples": 2, "set": "other"}',
    ]
    path.write_text("\n".join(lines) + "\n")
    assert _finished_rounds(path) == {5: 40, 9: 0}, "neither null nor the 0 of an older busrl is a result"


@given(st.integers(1, 300), st.integers(1, 300))
def test_round_prompts_spread_over_the_file_and_never_change(samples: int, lines: int) -> None:
    asked = lines_of(samples, lines)
    assert len(asked) == samples and asked.min() >= 0 and asked.max() < lines
    assert np.array_equal(asked, lines_of(samples, lines))
    counts = np.bincount(asked, minlength=lines)
    assert counts.max() - counts.min() <= 1
    if samples <= lines:
        stretch = np.searchsorted(np.arange(1, samples + 1) * lines // samples, asked, side="right")
        assert stretch.tolist() == list(range(samples)), "one prompt of each stretch of the file"


def test_the_first_lines_of_a_long_file_are_not_the_subset() -> None:
    asked = lines_of(16, 10_000)
    assert asked.tolist() == sorted(set(asked.tolist())) and asked[-1] > 9000 and asked[0] < 625


def test_each_prompt_has_the_same_weight_however_often_a_round_asks_it() -> None:
    asked = lines_of(5, 3)  # prompts 0 and 1 twice
    judged = [Judged(int(line), 0, reward) for line, reward in zip(asked, (1.0, 0.0, 0.0, 1.0, 0.0))]
    assert Figures(judged).mean() == pytest.approx(1 / 3)
    assert Figures([Judged(2, 0, 0.5)]).mean() == 0.5 and Figures([]).mean() is None


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    ring = Ring.create(str(tmp_path / "ring"), slots=4, slot_bytes=4096, processes=4, uuid=uuid.uuid4().bytes)
    ring.register("validator", "validator")
    fates = [Fates(str(tmp_path / name), create=True) for name in ("fates", "validate_fates")]
    ring.bind_fates(*fates)
    yield ring
    ring.close()


def answered(ring: Ring, versions: list[int], admitted: int) -> tuple[int, int]:
    """A validation answer of these versions in a slot that we hold."""
    ((slot, word),) = ring.dispatch(
        uid=VALIDATE_BIT, group=VALIDATE_BIT, admission=0, member=0, group_size=1, cls=1, task=b"{}", prompt_crc=0,
        priority=0, max_new_tokens=8, temperature=1.0, top_p=1.0, version=admitted, step=0,
    )
    word = ring.claim(slot, word, State.GENERATING)
    count = len(versions)
    drawn = np.ones(count, np.int32), np.zeros(count, np.float32), np.array(versions, np.uint32)
    write_segment(ring, slot, word, 0, *drawn)
    write_text(ring, slot, word, 0, "x")
    return slot, ring.commit_segment(slot, word, True)


@pytest.fixture
def make(ring: Ring, tmp_path: Path) -> Iterator[Callable[..., Validator]]:
    """A validator of one set, with a ring and nothing else, in round 0."""
    streams = []

    def made(prompts: int, k: int = 1, lines: Sequence[str] = ('{"prompt": "x"}',) * 4, name: str = "") -> Validator:
        (tmp_path / "held-out.jsonl").write_text("\n".join(lines) + "\n")
        streams.append(JsonlStream(tmp_path / "held-out.jsonl", 0, False))
        spec = AskedSet(name, "held-out.jsonl", len(lines), prompts, k, 1.0, 1.0, 8, 0, 0)
        role = Validator(tmp_path, "validator", parts(SimpleNamespace(validation=Validation()), ring))
        role.answers, role.round, role.started = spec.answers, 0, time.monotonic()
        role.find = str.strip
        role.sets = role.due = [MeasuredSet(spec, streams[-1], Rounds(True, 0, True, set()), spec.answers)]
        return role

    yield made
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(
    ("versions", "mixed", "seen"),
    [([4, 4, 5], True, [4, 5]), ([5, 5], False, [5])],  # the second waited in the queue while 5 came
)
def test_an_answer_across_two_versions_makes_its_round_mixed(
    ring: Ring, make: Callable[..., Validator], versions: list[int], mixed: bool, seen: list[int]
) -> None:
    role = make(1)
    slot, word = answered(ring, versions, admitted=4)
    result = role.result_of(slot, word, ring.line(slot))
    role.sets[0].results = {result.uid: result}
    row = role.record_of(role.sets[0], 0)
    assert (row["mixed"], row["versions"], row["version"]) == (mixed, seen, seen[0])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
@settings(max_examples=40)
def test_a_round_is_mixed_exactly_when_its_oldest_and_newest_version_differ(
    make: Callable[..., Validator], drawn: list[tuple[int, int]]
) -> None:
    role = make(8)
    both = [(min(pair), max(pair)) for pair in drawn]
    role.sets[0].results = {
        (uid := VALIDATE_BIT + at): Result(uid, 0, 1.0, newest, oldest, 3) for at, (oldest, newest) in enumerate(both)
    }
    row = role.record_of(role.sets[0], 0)
    oldest, newest = min(low for low, _ in both), max(high for _, high in both)
    assert (row["versions"][0], row["versions"][-1], row["mixed"]) == (oldest, newest, oldest != newest)


def test_a_round_has_the_mean_of_each_part_of_the_reward(ring: Ring, make: Callable[..., Validator]) -> None:
    role = make(2)
    slot, word = answered(ring, [4], admitted=4)
    word = ring.claim(slot, word, State.REWARDING)
    write_parts(ring, slot, word, {"format": 1.0, "right": 0.5})
    result = role.result_of(slot, word, ring.line(slot))
    again = msgspec.json.decode(msgspec.json.encode(result), type=Result)
    assert again == result, "as a successor reads it from validation.log"
    other = msgspec.structs.replace(result, uid=result.uid + 1, parts={"format": 0.0})
    role.sets[0].results = {judged.uid: judged for judged in (result, other)}
    assert role.record_of(role.sets[0], 0)["val/parts"] == {"format": 0.5, "right": 0.5}


def test_k_answers_to_a_prompt_stand_together_and_give_its_figures(make: Callable[..., Validator]) -> None:
    tagged = [f'{{"prompt": "x", "source": "{name}"}}' for name in ("easy", "hard")]
    role = make(2, k=4, lines=tagged, name="exam")
    assert role.sets[0].lines.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    right = [True, True, True, False, False, False, True, False]
    answers = ["42" if good else f"no {at}" for at, good in enumerate(right)]
    role.sets[0].results = {
        (uid := VALIDATE_BIT + at): Result(uid, 0, float(good), 3, 3, 5, set="exam", answer=answer)
        for at, (good, answer) in enumerate(zip(right, answers))
    }
    row = role.record_of(role.sets[0], 0)
    assert (row["set"], row["k"], row["prompts"], row["samples"]) == ("exam", 4, 2, 8)
    assert row["val/reward"] == row["val/avg@4"] == row["val/pass@1"] == 0.5
    assert row["val/pass@2"] == pytest.approx((1.0 + 0.5) / 2) and row["val/pass@4"] == 1.0
    assert row["val/maj@4"] == pytest.approx((1.0 + 0.25) / 2), "four answers of one vote each: one of them is right"
    assert row["by"]["easy"]["val/pass@1"] == 0.75 and row["by"]["hard"]["val/pass@1"] == 0.25
    assert row["by"]["hard"]["samples"] == 4 and set(row["intervals"]) >= {"reward", "pass@4", "maj@4"}


@pytest.fixture
def living(make: Callable[..., Validator], tmp_path: Path) -> Iterator[Callable[[], Validator]]:
    """A validator of three samples in round 0 with its ring and its files, as after each start in one directory."""
    fates = [Fates(str(tmp_path / name), create=True) for name in ("fates", "validate_fates")]
    opened: list[LineFile] = []

    def made() -> Validator:
        role = make(3)
        role.validate_fates, role.log_path = fates[1], tmp_path / "validation.log"
        role.log, role.rows = LineFile(role.log_path), LineFile(tmp_path / "validation.jsonl")
        opened.extend((role.log, role.rows))
        role.groups, role.request, role.pins, role.pins_of, role.heard = 0, None, False, {}, []
        role.bus = SimpleNamespace(send=role.heard.append)
        role.warn = lambda where, text, **more: role.heard.append(text)
        role.write_or_wait = lambda what, write: write() is None
        role.topology.limits = SimpleNamespace(ready_s=9.0)
        role.topology.derived = SimpleNamespace(val_reserve=4)
        role.sets[0].rounds.done = set(_finished_rounds(tmp_path / "validation.jsonl"))
        return role

    yield made
    for file in opened:
        file.close()


def play(role: Validator, ring: Ring, judge: Callable[[int], float | None]) -> None:
    """Round 0 to its end: each sample gets the reward of its place, or none."""
    role.begin(0, list(role.sets))
    while role.round is not None:
        role.work()
        for slot, word in ring.take(State.QUEUED, State.GENERATING, cls=1, limit=9):
            write_segment(ring, slot, word, 0, np.ones(1, np.int32), np.zeros(1, np.float32), np.ones(1, np.uint32))
            write_text(ring, slot, word, 0, "x")
            word = ring.claim(slot, ring.commit_segment(slot, word, True), State.REWARDING)
            reward = judge(int(ring.line(slot)["uid"]) & ~VALIDATE_BIT)
            if reward is None:
                ring.drop(slot, word, "R")
                continue
            ring.set(slot, word, reward=reward)
            ring.release(slot, word, State.REWARDED)


def lines(tmp_path: Path) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in (tmp_path / "validation.jsonl").read_bytes().splitlines()]


def test_an_unjudged_round_is_null_and_a_successor_asks_again(
    ring: Ring, living: Callable[[], Validator], tmp_path: Path
) -> None:
    first = living()
    play(first, ring, lambda place: None)
    (row,) = lines(tmp_path)
    assert (row["val/reward"], row["val/length"], row["samples"], row["dropped"]) == (None, None, 0, 3)
    assert first.sets[0].rounds.done == set()
    told = [message for message in first.heard if isinstance(message, m.ValidationDone)]
    assert [(message.samples, message.dropped) for message in told] == [(0, 3)]
    again = living()
    assert again.sets[0].rounds.due(0, False) == 0
    play(again, ring, lambda place: 0.25 * place)
    assert lines(tmp_path)[1]["val/reward"] == 0.25 and lines(tmp_path)[1]["dropped"] == 0
    assert living().sets[0].rounds.due(0, False) is None, "what was measured is not asked again"


def test_a_round_of_which_a_part_was_judged_says_so_and_stands(
    ring: Ring, living: Callable[[], Validator], tmp_path: Path
) -> None:
    role = living()
    play(role, ring, lambda place: 1.0 if place else None)
    (row,) = lines(tmp_path)
    assert (row["val/reward"], row["samples"], row["dropped"]) == (1.0, 2, 1)
    assert role.sets[0].rounds.done == {0}
    assert any("1 of 3 samples" in said for said in role.heard if isinstance(said, str))


def test_a_result_that_cannot_be_written_does_not_prolong_a_hold(
    ring: Ring, living: Callable[[], Validator], tmp_path: Path
) -> None:
    role, told = living(), list[int]()
    written, role.write_or_wait = role.write_or_wait, lambda what, write: False
    other: Any = SimpleNamespace(add=lambda samples: told.append(samples))
    role.other_rings = [other]
    rounds = iter(range(100))

    def work() -> bool:
        if next(rounds) == 9:
            assert not any(told), "the disk is full"
            role.write_or_wait = written
        return Validator.work(role)

    role.work = work
    play(role, ring, lambda place: 1.0)
    assert sum(told) == 3


@pytest.mark.parametrize(
    ("begun_at", "fate", "written", "late"),
    [
        (0, "", "", False), (34, "", "", True), (34, "D", "", False),  # D: a predecessor was in the middle of it
        (0, "R", '{"round": 0, "samples": 0}', True), (34, "R", '{"round": 0, "samples": 0}', True),
    ],
)
def test_only_what_the_run_began_with_is_its_first_round(
    living: Callable[[], Validator], tmp_path: Path, begun_at: int, fate: str, written: str, late: bool
) -> None:
    role = living()
    if fate:
        role.validate_fates.store(0, "D")
        role.validate_fates.store(0, fate)
    (tmp_path / "validation.jsonl").write_text(f"{written}\n" if written else "")
    role.begun_at, role.paths = begun_at, RunPaths.of(tmp_path)
    role.topology.run, role.topology.data = SimpleNamespace(seed=0), SimpleNamespace(prompt_key="prompt")
    measured = role.measured(dataclasses.replace(role.sets[0].spec, data=str(tmp_path / "held-out.jsonl")))
    measured.stream.close()
    assert measured.rounds.late == late and measured.rounds.due(40, False) == (40 if late else 0)


def test_a_round_whose_samples_stand_in_slots_keeps_its_fates(ring: Ring, living: Callable[[], Validator]) -> None:
    role = living()
    role.begin(0, list(role.sets))
    role.work()
    before = role.validate_fates.view()[:3].tolist()
    role.begin(0, list(role.sets))
    assert role.validate_fates.view()[:3].tolist() == before == [ord("D")] * 3


def test_results_of_other_prompts_than_are_asked_now_are_not_counted(make: Callable[..., Validator]) -> None:
    role = make(4, name="exam")
    measured, uid = role.sets[0], VALIDATE_BIT + 2
    good = Result(uid, 0, 1.0, 1, 1, 1, set="exam", line=2)
    assert measured.is_result(0, uid, good) and measured.is_result(0, uid, msgspec.structs.replace(good, line=-1))
    assert not measured.is_result(0, uid, msgspec.structs.replace(good, line=1))
    assert not measured.is_result(0, uid, msgspec.structs.replace(good, set="other"))


def test_long_answers_that_differ_at_their_ends_stay_different() -> None:
    assert _short("x" * 200 + "1") != _short("x" * 200 + "2") and _short("7") == "7" and _short(None) is None
    assert len(_short("x" * 200) or "") <= 64


def test_a_round_of_late_rollouts_begins_with_its_pin_and_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    monkeypatch.setattr("busrl.roles.version_pin.pin", lambda ring: did.append("pin") or True)
    monkeypatch.setattr("busrl.roles.version_pin.unpin", lambda ring: did.append("unpin"))
    behind = SimpleNamespace(label="rollout/1", version=2)
    ring: Any = SimpleNamespace(processes=lambda: [behind], header=lambda word: 5)
    pin = RoundPin(ring, {"rollout/1"}, 9.0, did.append)
    assert not pin.take(100.0) and did == ["unpin"]
    assert pin.take(110.0)
    assert did[1:] == ["the round begins though its rollouts do not all have version 5: {'rollout/1': 2}", "pin"]
    behind.version = 5
    assert pin.take(111.0) and did[3:] == ["pin"]
