"""`busrl ring inspect`: slots by state, owner and age; and, with --uid, one sample's whole history from all places."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import ROOT

from busrl.cli.command import main
from busrl.data import JsonlStream
from busrl.ledger.errors import record_error
from busrl.ledger.openbin import OpenSlot, record_put_back, write_open
from busrl.ledger.trained import TrainedSet, TrainLine
from busrl.ledger.wal import Record, SampleRecord, Wal, frames
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.ring import Fates, Ring, State
from busrl.ring.locks import taken_back
from busrl.states import VALIDATE_BIT
from busrl.system.files import LineFile
from busrl.topology import Topology

G = 8


def busrl(*arguments: object, cwd: Path | None = None, code: int = 0) -> str:
    """What the command prints, in this process: a new one for each call would take most of the time."""
    text, before = io.StringIO(), Path.cwd()
    os.chdir(cwd or ROOT)
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            assert main([str(argument) for argument in arguments]) == code, text.getvalue()
    finally:
        os.chdir(before)
    return text.getvalue()


class Made:
    """A run directory with a ring, as the writers of the product leave them."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True)
        prompts = root.parent / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"item {i}", "answer": str(i)}) + "\n" for i in range(50)))
        self.paths = RunPaths.of(root)
        self.topology: Topology = load(
            ROOT / "configs" / "quickstart.toml", [f"data.train={prompts}", f"validation.data={prompts}"]
        )
        self.paths.topology.write_text(self.topology.to_json())
        self.paths.run_json.write_text("{}")
        self.stream = JsonlStream(prompts, 0, True, "prompt")
        self.fates = Fates(str(self.paths.fates), create=True)
        self.validate_fates = Fates(str(self.paths.validate_fates), create=True)
        self.ring = Ring.create(self.paths.ring_name, slots=8, slot_bytes=4096, uuid=uuid.uuid4().bytes)
        self.ring.bind_fates(self.fates, self.validate_fates)
        self.ring.register("rollout", "rollout/0")

    def dispatch(self, sample: int, **more: Any) -> tuple[int, int]:
        [done] = self.ring.dispatch(
            uid=sample, group=sample // G // 2, admission=4, member=sample % G, group_size=G, cls=0, task=b"{}",
            prompt_crc=0, max_new_tokens=8, temperature=1.0, version=3, **more,
        )
        return done

    def generated(self, sample: int) -> tuple[int, int]:
        self.dispatch(sample)
        (held,) = self.ring.take(State.QUEUED, State.GENERATING, cls=0, limit=1)
        slot, word = held
        self.ring.put(slot, word, "versions", np.array([3, 3, 4], np.uint32), 0)
        return slot, self.ring.commit_segment(slot, word, True)

    def train(self, sample: int, step: int) -> None:
        record = Record(step=step, version=step, cause="count", groups=[sample // G // 2], samples=[SampleRecord(
            uid=sample, group=sample // G // 2, admission=0, member=sample % G, attempt=1, prompt_crc=0, reward=0.5,
            temperature=1.0, version=1, step=1, finish=1, prompt_ids=b"", token_ids=bytes(12), logprobs=bytes(12),
            versions=np.array([5, 6, 6], np.uint32).tobytes(),
        )])
        with Wal(self.paths.wal, sync=False) as wal:
            wal.append(record)
        log = LineFile(self.paths.train_log)
        log.append(msgspec.json.encode(TrainLine.of(record)))
        log.close()
        self.fates.store(sample, "T")

    def inspect(self, sample: object, code: int = 0) -> str:
        return busrl("ring", "inspect", self.paths.root, "--uid", sample, code=code)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Made]:
    scene = Made(tmp_path / "runs" / "one")
    yield scene
    scene.ring.close()
    Ring.unlink(scene.paths.ring_name)


def test_inspect_shows_states_and_owners_and_ages_of_the_newest_run(scene: Made, tmp_path: Path) -> None:
    for sample in range(4):
        scene.dispatch(sample)
    scene.ring.take(State.QUEUED, State.GENERATING, cls=0, limit=3)
    text = busrl("ring", "inspect", cwd=tmp_path)
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:3] == ["GENERATING", "rollout/0", "3"] and row[4:] == ["s", "0"] for row in rows), text
    assert any(row[:3] == ["QUEUED", "-", "1"] and row[4:] == ["s", "3"] for row in rows), text
    assert "4 FREE, 1 QUEUED, 3 GENERATING" in text


def test_a_sample_in_a_slot_shows_prompt_and_owner_and_versions(scene: Made) -> None:
    sample = 5 * 2 * G + 2
    slot, word = scene.generated(sample)
    text = scene.inspect(sample)
    item = scene.stream.item(5)
    assert "draw 5, try 0, member 2 of 8" in text and "fate      dispatched" in text
    assert f"prompts.jsonl:{item.index + 1} (crc {item.crc:08x}) {item.line.decode()}" in text
    assert f"slot      {slot}: GENERATED for " in text and "held by" not in text
    assert "segment   0: 3 tokens of versions 3 to 4" in text and "admitted as number 4 at version 3" in text
    assert scene.ring.claim(slot, word, State.REWARDING)
    assert re.search(rf"REWARDING for \d+\.\d s, held by rollout/0 \(pid {os.getpid()}\)", scene.inspect(sample))


def test_a_trained_sample_is_found_in_every_record_without_a_ring(scene: Made) -> None:
    scene.train(20, step=3)
    scene.ring.close()
    Ring.unlink(scene.paths.ring_name)
    directory = scene.paths.checkpoints / "global_step_3"
    directory.mkdir(parents=True)
    TrainedSet([20]).save(directory / "trained.bin")
    scene.paths.samples.write_text(
        json.dumps({"uid": 20, "completion": "2|3", "reward": 0.5, "versions": [5, 6]}) + '\n{"uid": 2'
    )
    text = scene.inspect(20)
    for said in (
        "fate      trained",
        "step 3, attempt 1, 3 tokens of versions 5 to 6, reward 0.5",
        "in checkpoint global_step_3",
        "step      3 (version 3, count) trained its attempt 1",
        "answer    2|3 (reward 0.5, versions [5, 6])",
    ):
        assert said in text, text
    assert "slot" not in text


def test_a_sample_in_an_idle_line_or_behind_log_damage_is_found(scene: Made) -> None:
    for sample, step in ((20, 3), (21, 4), (22, 5)):
        scene.train(sample, step)
    (segment,) = scene.paths.wal.glob("*.wal")
    data = bytearray(segment.read_bytes())
    first = next(end for _, end in frames(bytes(data)))
    data[first + 20] ^= 0xFF
    segment.write_bytes(data)
    assert "step 5, attempt 1" in scene.inspect(22) and "step 4, attempt" not in scene.inspect(21)
    scene.paths.samples.write_text('{"kind": "idle"}\n{"uid": 3, "completion": "2|3", "reward": 0.5, "version": 7}\n')
    assert "answer    2|3 (reward 0.5, versions [7])" in scene.inspect(3)


def test_an_accident_and_its_re_roll_name_each_other(scene: Made) -> None:
    slot, word = scene.dispatch(3)
    assert scene.ring.drop(slot, word, "P")
    assert "fate      poison (an accident)" in scene.inspect(
        3
    ) and "re-roll   uid 11 is not dispatched yet" in scene.inspect(3)
    scene.dispatch(3 + G)
    assert "re-roll   uid 11: dispatched" in scene.inspect(3)
    assert "try 1, member 3" in scene.inspect(11) and "parent    uid 3, which ended as poison" in scene.inspect(11)


def test_a_replayed_step_counts_once_and_a_reverted_one_is_named(scene: Made) -> None:
    scene.train(20, step=3)
    scene.train(36, step=4)
    log = LineFile(scene.paths.train_log)
    log.append(msgspec.json.encode(TrainLine(step=3, version=3, cause="count", samples=[(20, 1, 0)])))
    log.close()
    assert scene.inspect(20).count("trained its attempt 1") == 1
    assert "step      3 (version 3, count) trained its attempt 1; replayed 1×, counted once" in scene.inspect(20)
    assert "trained its attempt 1; taken back: the learner went on from an earlier step" in scene.inspect(36)


def test_warnings_about_a_sample_join_its_history_and_move_no_cursor(scene: Made) -> None:
    scene.dispatch(3)
    record_error(scene.paths, "keeper", "warning", "gateway", "2 more, the latest: sample 9 of js-1", uids=[3, 9])
    record_error(scene.paths, "far", "error", "x", "sample 3 is odd\x1b[2J\nand more")
    record_error(scene.paths, "far", "error", "x", "sample 33 is not it")
    text = scene.inspect(3)
    assert "keeper warning: 2 more, the latest: sample 9 of js-1" in text and "far error: sample 3 is odd" in text
    assert "is not it" not in text and "\x1b" not in text and "and more" in text.split("far error")[1].split("\n")[0]


def test_samples_of_a_dead_worker_are_named_with_the_takeover(scene: Made) -> None:
    scene.dispatch(5)
    code = (
        "import os, sys; from busrl.ring import Ring, State; r = Ring.attach(sys.argv[1]); r.register('rollout', 'x'); "
        "assert r.take(State.QUEUED, State.GENERATING, cls=0, limit=1); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, scene.paths.ring_name], check=False)
    [(text, uids)] = taken_back(scene.ring, scene.ring.reap())
    assert re.fullmatch(r"1 slots of x \(pid \d+\) went back from GENERATING to QUEUED: it died", text) and uids == [5]


def test_put_backs_open_slots_and_samples_in_no_slot_are_told(scene: Made) -> None:
    scene.fates.reserve(9)
    scene.fates.store(8, "D")
    record_put_back(scene.paths.draws, [8], "the run was started without a ring")
    write_open(scene.paths.open_bin, [OpenSlot(8, int(State.QUEUED), 6)])
    text = scene.inspect(8)
    assert "the run was started without a ring" in text and "was QUEUED in slot 6 when the run ended in order" in text
    assert "slot      none" in text


def test_a_validation_sample_is_named_by_its_round(scene: Made) -> None:
    samples = scene.topology.derived.val_samples
    row = 10 * samples + 7
    scene.validate_fates.reserve(row + 1)
    scene.validate_fates.store(row, "V")
    line = {"uid": VALIDATE_BIT | row, "round": 10, "reward": 1.0, "version": 9, "oldest": 8, "tokens": 4}
    (scene.paths.root / "validation.log").write_text(json.dumps(line) + "\n")
    text = scene.inspect(f"v{row}")
    assert "validation round 10, sample 7" in text and "fate      validated" in text and "prompts.jsonl:8 " in text
    assert "round 10: reward 1, 4 tokens, versions 8 to 9" in text


@pytest.mark.parametrize(
    ("uid", "said"),
    [
        (
            "4711",
            "knows no such sample, draw 294, try 0, member 7 of 8: it was never dispatched; nothing was dispatched",
        ),
        ("v5", "knows no such sample, validation round 0, sample 5"),
        ("-3", "a uid is a whole number below 2**64 - 1"),
        ("seven", "--uid seven: a uid is a whole number"),
        (str(2**64 - 1), "a uid is a whole number below"),
    ],
)
def test_an_unknown_uid_is_a_clear_error(uid: str, said: str, scene: Made) -> None:
    assert said in busrl("ring", "inspect", scene.paths.root, f"--uid={uid}", code=2)


def test_a_directory_without_a_run_is_a_clear_error(tmp_path: Path) -> None:
    assert "--uid needs a run directory" in busrl("ring", "inspect", tmp_path, "--uid", "3", code=2)
    assert "no run under" in busrl("ring", "inspect", cwd=tmp_path, code=2)
