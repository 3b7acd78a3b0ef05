"""Engines that play older versions of another tag: each with the checkpoint of its own distance, whole or by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from requests_ import plain_logprobs, request, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from busrl.engines.torch.engine import TorchEngine
from busrl.errors import WeightsRefused, WeightsTimeout
from busrl.several.followed import LOOK_S, FollowedCheckpoints, wanted
from busrl.system.files import listing

PROMPT = [5, 6, 7]
FOLLOW: Any = SimpleNamespace(model="main", every=5, back=0)


@given(steps=st.sets(st.integers(0, 60)), every=st.integers(1, 10), back=st.integers(0, 4))
def test_the_version_is_the_newest_multiple_less_so_many(steps: set[int], every: int, back: int) -> None:
    multiples = [step for step in range(60, 0, -1) if step in steps and step % every == 0]
    assert wanted(sorted(steps, reverse=True), every, back) == [*multiples, *[-1] * (back + 1)][back]


class Checkpoints:
    """A folder of checkpoints of one model, each with weights of its own."""

    def __init__(self, root: Path, base: Path) -> None:
        self.root, self.base, self.models = root, base, {0: AutoModelForCausalLM.from_pretrained(base)}
        self.now = 0.0
        root.mkdir()

    def write(self, step: int) -> Path:
        model = AutoModelForCausalLM.from_pretrained(self.base)
        torch.manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        self.models[step] = model
        draft = self.root / ".tmp-draft"
        model.save_pretrained(draft / "model")
        (draft / "meta.json").write_text("{}")
        files = listing(draft, (path for path in draft.rglob("*") if path.is_file()))
        (draft / "files.json").write_text(json.dumps(files))
        return draft.rename(self.root / f"global_step_{step}")

    def receiver(self, room: Path, number: int = 0) -> FollowedCheckpoints:
        return FollowedCheckpoints(
            self.root, room, f"rollout/{number}", FOLLOW, more_back=number, clock=lambda: self.now)


def engine_of(folder: Path) -> TorchEngine:
    return TorchEngine(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), capacity=2)


@pytest.fixture
def main(model_folder: Callable[[str], Path], tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", model_folder("qwen3"))


def test_each_of_four_engines_answers_with_the_checkpoint_of_its_distance(main: Checkpoints, tmp_path: Path) -> None:
    engines = [engine_of(main.base) for _ in range(4)]
    receivers = [main.receiver(tmp_path / "room", number) for number in range(4)]
    loaded = [0] * 4
    for step in (2, 5, 7, 10, 15, 20, 21, 25):
        main.write(step)
        main.now += LOOK_S
        for number, (engine, receiver) in enumerate(zip(engines, receivers, strict=True)):
            version, made_by = receiver.newest()
            if version > loaded[number]:
                loaded[number], _ = engine.update_weights(receiver)
                assert loaded[number] == version == made_by
            (answer,) = run(engine, [request(step, PROMPT, temperature=0.7)]).values()
            expected = max(0, step // 5 - number) * 5
            assert set(answer.versions.tolist()) == {expected}, (step, number)
            plain = plain_logprobs(main.models[expected], np.asarray(PROMPT), answer.token_ids, 0.7)
            assert np.abs(answer.logprobs - plain).max() < 1e-4
    assert loaded == [25, 20, 15, 10]
    rooms = sorted((tmp_path / "room").iterdir())
    assert [[path.name for path in room.iterdir()] for room in rooms] == [
        [f"global_step_{step}"] for step in loaded], "each keeps what it plays, and no more"
    for receiver in receivers:
        receiver.close()
    assert not [*(tmp_path / "room").iterdir()]


def test_a_checkpoint_that_goes_once_it_is_linked_is_played(
    main: Checkpoints, tmp_path: Path
) -> None:
    path, receiver, engine = main.write(5), main.receiver(tmp_path / "room"), engine_of(main.base)
    receiver.hook = lambda point: shutil.rmtree(path) if point == "linked" else None
    assert engine.update_weights(receiver) == (5, 5) and not path.exists()
    (answer,) = run(engine, [request(0, PROMPT)]).values()
    plain = plain_logprobs(main.models[5], np.asarray(PROMPT), answer.token_ids, 1.0)
    assert np.abs(answer.logprobs - plain).max() < 1e-4


@pytest.mark.parametrize("harm, text", [
    (shutil.rmtree, "of main is not played: it was removed before it was read; learner.keep_last"),
    (lambda path: (path / "model" / "config.json").write_text("{}"), "is damaged: model/config.json is not what"),
    (lambda path: (path / "files.json").write_text("[]"), "of main is not played: it cannot be read"),
])
def test_a_checkpoint_that_cannot_be_played_is_named(
    main: Checkpoints, tmp_path: Path, harm: Callable[[Path], Any], text: str
) -> None:
    receiver, engine = main.receiver(tmp_path / "room"), engine_of(main.base)
    with pytest.raises(WeightsTimeout, match="of main"):
        receiver.take()
    main.write(5)
    main.now += LOOK_S
    assert engine.update_weights(receiver) == (5, 5)
    bad = main.write(10)
    main.now += LOOK_S
    assert receiver.newest() == (10, 10)
    harm(bad)
    with pytest.raises(WeightsRefused, match=text) as refused:
        engine.update_weights(receiver)
    assert str(bad) in str(refused.value)
    (answer,) = run(engine, [request(0, PROMPT)]).values()
    assert set(answer.versions.tolist()) == {5}
    main.write(15)
    main.now += LOOK_S
    assert engine.update_weights(receiver) == (15, 15)


def test_the_folder_is_looked_at_once_a_second(main: Checkpoints, tmp_path: Path) -> None:
    receiver = main.receiver(tmp_path / "room")
    assert receiver.newest() == (-1, -1)
    main.write(5)
    main.now += LOOK_S / 2
    assert receiver.newest() == (-1, -1)
    main.now += LOOK_S / 2
    assert receiver.newest() == (5, 5)


def test_what_a_dead_process_of_the_name_left_is_removed(main: Checkpoints, tmp_path: Path) -> None:
    main.write(5)
    left = tmp_path / "room" / "rollout-0.999999999"
    left.mkdir(parents=True)
    receiver = main.receiver(tmp_path / "room")
    receiver.take()
    assert not left.exists() and len([*(tmp_path / "room").iterdir()]) == 1
