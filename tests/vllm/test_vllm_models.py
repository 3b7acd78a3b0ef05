"""One vLLM with the adapters of several models at once: each token by its own, and no version stops the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_vllm_folders import Folders, adapter
from vllm_scene import EXACT, LENGTH, START_S, config_of, logprobs_of, model_of, request, save

from busrl.engines.base import Finished, Request
from busrl.engines.vllm.process import Start
from busrl.several.shared_engine import AdaptersOfModels
from busrl.topology.schema import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PLACES = 3
APART = 0.1  # log-probabilities of two random adapters differ by more


class Models:
    """An engine for so many models, and what plain forward passes of each say. Version v of model m is adapter
    100 x m + v of the scene of folders."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, config = folder, config_of(False)
        save(folder / "base", model_of(config, 0))
        self.scene = SimpleNamespace(config=config, models={0: model_of(config, 0)})
        settings = Vllm(kv_cache_mb=16, start_s=START_S, rpc_s=60.0, silent_s=120.0)
        start = Start(str(folder / "base"), "float32", capacity=2 * count + 2, max_length=LENGTH, settings=settings,
                      lora_rank=8, adapters=PLACES * count, extension="vllm_breakable.Breakable")
        self.engine = AdaptersOfModels(start, {f"m{index}": PLACES for index in range(count)})
        self.shares = self.engine.shares
        self.newest = [0] * count

    def update(self, model: int) -> int:
        """Bring the next version of a model into the engine."""
        self.newest[model] = version = self.newest[model] + 1
        number, source = 100 * (model + 1) + version, Folders("adapter")
        rank = (4, 8, 2)[model % 3]  # models have ranks of their own
        source.version, source.path = version, adapter(self.scene, self.folder / str(number), number, rank)
        assert self.shares[model].update_weights(source) == (version, 10 * version)
        return version

    def finish(self, *wanted: int, limit_s: float = 120.0) -> list[dict[int, Finished]]:
        """Step until each model has so many answers."""
        found: list[dict[int, Finished]] = [{} for _ in self.shares]
        end = time.monotonic() + limit_s
        while any(len(ended) < count for ended, count in zip(found, wanted)):
            assert time.monotonic() < end, [len(ended) for ended in found]
            for ended, share in zip(found, self.shares):
                ended.update((one.key, one) for one in share.step())
        return found

    def off_by(self, model: int, asked: Request, made: Finished) -> float:
        """Largest difference of a log-probability to a plain forward pass of this model's adapter of that version."""
        [version] = {*made.versions.tolist()}
        plain = self.scene.models[100 * (model + 1) + version if version else 0]
        ids = torch.tensor([[*asked.prompt_ids.tolist(), *made.token_ids.tolist()]])
        expected = logprobs_of(plain, ids, 1.0, 1.0)[len(asked.prompt_ids) - 1 :]
        return float(np.abs(expected - made.logprobs).max())


@pytest.fixture(scope="module", params=[2, 8])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("models"), request.param)
    yield made
    made.engine.close()


def test_tokens_are_those_of_their_own_adapter_beside_all_others(models: Models) -> None:
    count = len(models.shares)
    for model in range(count):
        models.update(model)
    asked = [request(5, [5, 6, 7], 30), request(6, [5, 6, 7, 8], 30)]  # the same prompts and numbers for all
    for share in models.shares:
        share.submit(asked)
    found = models.finish(*[2] * count)
    for model, ended in enumerate(found):
        for one in asked:
            made = ended[one.key]
            assert {*made.versions.tolist()} == {models.newest[model]}
            assert models.off_by(model, one, made) < EXACT
            assert models.off_by((model + 1) % count, one, made) > APART, "and of no other model's"


def test_a_model_without_a_version_draws_with_the_base(tmp_path: Path, models: Models) -> None:
    fresh = models.engine.lines[0]
    kept, fresh.newest = fresh.newest, type(fresh.newest)(0, None)
    asked = request(1, [5, 6, 9], 20)
    models.shares[0].submit([asked])
    made = models.finish(1)[0][1]
    fresh.newest = kept
    assert {*made.versions.tolist()} == {0} and models.off_by(0, asked, made) < EXACT


def slowed(engine: Any) -> None:
    engine.core.rpc("busrl_slow_down", 0.02)


def test_versions_of_one_model_do_not_stop_another(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, engine = models.shares[0], models.shares[1], models.engine
    held = []
    monkeypatch.setattr(engine, "hold", lambda: held.append("held"))
    before, asked = models.newest[1], request(21, [8, 9, 10], 140)
    slowed(engine)
    try:
        second.submit([asked])
        seen = [0]
        for _ in range(2 * PLACES):  # more than there are places
            models.update(0)
            while second.sampled(21, 0).size <= seen[-1]:  # the other goes on after each of them
                assert second.active and not second.step(), "ended too early to be caught running"
            seen.append(second.sampled(21, 0).size)
    finally:
        engine.core.rpc("busrl_full_speed")
    made = models.finish(0, 1)[1][21]
    assert not held and not second.statistics().pause_s and not first.statistics().pause_s
    assert {*made.versions.tolist()} == {before} and models.off_by(1, asked, made) < EXACT


def test_a_model_with_all_places_taken_leaves_the_others_theirs(models: Models) -> None:
    first, second, engine = models.shares[0], models.shares[1], models.engine
    asked = {}
    slowed(engine)
    try:
        for version in range(PLACES):
            models.update(0)
            asked[30 + version] = request(30 + version, [5, 6, 7 + version], 100)
            first.submit([asked[30 + version]])
        assert not first.has_room and second.has_room
        models.update(1)
    finally:
        engine.core.rpc("busrl_full_speed")
    made = models.finish(PLACES)[0]
    for key, one in asked.items():
        assert models.off_by(0, one, made[key]) < EXACT
    assert first.has_room
    models.update(0)
