"""vLLM as the engine of a service: many adapters at once, scores of prompts, and a run of real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "service"))
import test_sdk
from test_a_service import service, supervised
from vllm_scene import START_S, VOCABULARY, config_of, model_of, request, save

from busrl.engines.base import Finished, Request
from busrl.engines.vllm.process import Start
from busrl.service import vllm as served_by_vllm
from busrl.service.adapters import Adapter, Numbers, Wearer, write_folder
from busrl.service.engine import AdapterEngine
from busrl.service.sampling import SCORES, Places
from busrl.service.vllm import EXTENSION, AdaptersInVllm, WholeInVllm, settings_of
from busrl.states import Finish
from busrl.topology.schema import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SHAPES = [Adapter(1, 1, unembed=False), Adapter(4, 2, unembed=False), Adapter(8, 3, mlp=False, unembed=False)]
PROMPT = [2, 5, 9, 3, 12, 7]
CLOSE = 1e-3
SLOW_START = ("process.rollout.engine=vllm", "limits.ready_s=420", "limits.progress_s=120", "vllm.start_s=400",
              "vllm.rpc_s=60", "generation.max_batch=16")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("base"), model_of(config_of(False), 0))


def write(root: Path, *shapes: Adapter) -> list[str]:
    """Random adapters in folders named by numbers."""
    wearer, paths = Wearer(model_of(config_of(False), 0)), []
    for number, shape in enumerate(shapes, 10 + len(shapes)):
        numbers = Numbers(shape, wearer.sites(shape), torch.device("cpu"))
        torch.nn.init.normal_(numbers.vector, std=0.1)
        write_folder(root / str(number), numbers, torch.float32, "base")
        paths.append(str(root / str(number)))
    return paths


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The base, and adapters of different ranks and parts."""
    return ["", *write(tmp_path_factory.mktemp("snapshots"), *SHAPES)]


@pytest.fixture(scope="module")
def head(base: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An adapter of the head too."""
    return write(tmp_path_factory.mktemp("head"), Adapter(2, 9))[0]


@pytest.fixture(scope="module")
def engine(base: Path) -> Iterator[AdaptersInVllm]:
    settings = settings_of(Vllm(kv_cache_mb=16, start_s=START_S, rpc_s=60.0, silent_s=120.0), places=2)
    engine = AdaptersInVllm(
        Start(str(base), "float32", capacity=9, max_length=96, settings=settings, lora_rank=8, adapters=2))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(base: Path) -> AdapterEngine:
    engine = AdapterEngine.load(base, capacity=8, max_length=96)
    assert isinstance(engine, AdapterEngine)
    return engine


def asked(key: int, folder: str, ids: Any = PROMPT, tokens: int = 12, **extra: Any) -> Request:
    return replace(request(key, list(ids), tokens), extra={"weights": folder, **extra})


def answers(engine: Any, *requests: Request) -> dict[int, Finished]:
    assert len(requests) <= engine.capacity
    found: dict[int, Finished] = {}
    engine.submit(requests)
    while len(found) < len(requests):
        found |= {finished.key: finished for finished in engine.step()}
    return found


def scored(engine: Any, folder: str, ids: Any, places: Places) -> dict[str, Any]:
    return answers(engine, asked(99, folder, ids, 1, **places.extra()))[99].extra


def test_more_adapters_than_places_draw_at_once_each_with_its_own(
    engine: AdaptersInVllm, plain: AdapterEngine, folders: list[str]
) -> None:
    requests = [replace(asked(key, folders[key % 4]), temperature=0.7) for key in range(8)]
    found = answers(engine, *requests)
    for one in requests:
        finished, folder = found[one.key], one.extra["weights"]
        assert set(finished.versions.tolist()) == {int(Path(folder).name) if folder else 0}
        ids = [*PROMPT, *finished.token_ids.tolist()]
        wanted = scored(plain, folder, ids, Places(len(PROMPT), len(ids)))[SCORES[0]]
        np.testing.assert_allclose(finished.logprobs, wanted, atol=CLOSE)


def test_scores_of_a_prompt_are_those_of_the_torch_engine(
    engine: AdaptersInVllm, plain: AdapterEngine, folders: list[str]
) -> None:
    ids = np.random.default_rng(3).integers(2, len(VOCABULARY), 40)
    asked_of = Places(1, 40, 3), Places(7, 40), Places(1, 20, len(VOCABULARY)), Places(1, 40, 1)
    for folder, places in zip(folders, asked_of, strict=True):
        mine, wanted = (scored(side, folder, ids, places) for side in (engine, plain))
        assert mine.keys() == wanted.keys()
        for name in set(mine) - {SCORES[1]}:
            np.testing.assert_allclose(mine[name], wanted[name], atol=CLOSE)


def test_an_adapter_that_cannot_be_used_refuses_its_requests_alone(
    engine: AdaptersInVllm, folders: list[str], tmp_path: Path
) -> None:
    found = answers(engine, asked(1, folders[1]), asked(2, str(tmp_path / "77")), asked(3, folders[2]))
    assert "77" in found[2].refused and not found[1].refused and not found[3].refused
    assert len(answers(engine, asked(4, folders[3]))[4].token_ids)


def test_answers_end_as_their_requests_say(engine: AdaptersInVllm, folders: list[str]) -> None:
    whole = answers(engine, asked(1, folders[1], ends=False))[1]
    assert (whole.finish, len(whole.token_ids)) == (Finish.LENGTH, 12)
    text = engine.decode(whole.token_ids[3:5], False)
    cut = answers(engine, asked(1, folders[1], ends=False, stop_texts=[text]))[1]
    assert cut.finish == Finish.EOS and 1 < len(cut.token_ids) <= 12
    assert text in engine.decode(cut.token_ids, False)
    greedy = answers(engine, replace(asked(1, folders[1]), temperature=0.0))[1]
    first = answers(engine, asked(1, folders[1], top_k=1))[1]
    assert first.token_ids.tolist() == greedy.token_ids.tolist()
    assert greedy.logprobs.max() < 0
    np.testing.assert_allclose(first.logprobs, greedy.logprobs, atol=CLOSE)


def test_targets_of_a_prompt_are_those_of_the_torch_engine(
    engine: AdaptersInVllm, plain: AdapterEngine, folders: list[str]
) -> None:
    random = np.random.default_rng(4)
    ids = random.integers(2, len(VOCABULARY), 40)
    for folder, first, end, width in zip(folders, (1, 7, 1, 30), (40, 40, 2, 40), (1, 4, 9, 128), strict=True):
        targets = random.integers(-1, len(VOCABULARY), (end - first, width)).astype(np.int32)
        targets[len(targets) // 2] = -1
        places = Places(first, end, 2, targets.tobytes())
        mine, wanted = (scored(side, folder, ids, places) for side in (engine, plain))
        assert mine.keys() == wanted.keys() and mine[SCORES[3]].shape == targets.shape
        for name in (SCORES[0], SCORES[2], SCORES[3]):
            there = targets >= 0 if name == SCORES[3] else slice(None)
            np.testing.assert_allclose(mine[name][there], wanted[name][there], atol=CLOSE)


def test_a_vllm_that_scores_no_chosen_ids_refuses_targets_in_words(
    engine: AdaptersInVllm, folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_by_vllm, "gives_targets", lambda: False)
    targets = np.zeros((1, 1), np.int32).tobytes()
    found = answers(engine, asked(1, folders[1], PROMPT[:2], 1, **Places(1, 2, 0, targets).extra()))
    assert "target_prompt_logprobs" in found[1].refused


def test_no_prompt_is_scored_beside_an_adapter_of_the_head(
    engine: AdaptersInVllm, plain: AdapterEngine, folders: list[str], head: str
) -> None:
    requests = [asked(key, [*folders[:3], head][key % 4]) for key in range(8)]
    found = answers(engine, *requests, asked(9, folders[0], PROMPT, 1, **Places(1, 4).extra()))
    for one in requests:
        ids = [*PROMPT, *found[one.key].token_ids.tolist()]
        wanted = scored(plain, one.extra["weights"], ids, Places(len(PROMPT), len(ids)))[SCORES[0]]
        np.testing.assert_allclose(found[one.key].logprobs, wanted, atol=CLOSE)
    refused = answers(engine, asked(1, folders[1], PROMPT, 1, **Places(1, 4).extra()))[1].refused
    assert "train_unembed=False" in refused


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The base, and whole models in folders named by numbers."""
    root = tmp_path_factory.mktemp("models")
    return ["", *(str(save(root / str(number), model_of(config_of(False), number))) for number in (21, 22))]


@pytest.fixture(scope="module")
def whole(base: Path) -> Iterator[WholeInVllm]:
    settings = settings_of(Vllm(kv_cache_mb=16, start_s=START_S, rpc_s=60.0, silent_s=120.0), places=0)
    engine = WholeInVllm(Start(str(base), "float32", capacity=9, max_length=96, settings=settings, extension=EXTENSION))
    yield engine
    engine.close()


def test_whole_models_take_turns_and_draw_their_own(base: Path, whole: WholeInVllm, models: list[str]) -> None:
    plain = AdapterEngine.load(base, capacity=8, max_length=96, whole=True)
    requests = [replace(asked(key, models[key % 3]), temperature=0.7) for key in range(9)]
    found = answers(whole, *requests)
    for one in requests:
        finished, folder = found[one.key], one.extra["weights"]
        assert set(finished.versions.tolist()) == {int(Path(folder).name) if folder else 0}
        ids = [*PROMPT, *finished.token_ids.tolist()]
        places = Places(len(PROMPT), len(ids))
        wanted = scored(plain, folder, ids, places)[SCORES[0]]
        np.testing.assert_allclose(finished.logprobs, wanted, atol=CLOSE)
        np.testing.assert_allclose(scored(whole, folder, ids, places)[SCORES[0]], wanted, atol=CLOSE)


def test_a_folder_without_a_model_refuses_its_requests_alone(
    whole: WholeInVllm, models: list[str], tmp_path: Path
) -> None:
    found = answers(whole, asked(1, models[1]), asked(2, str(tmp_path / "77")), asked(3, models[2]))
    assert "77" in found[2].refused and not found[1].refused and not found[3].refused
    whole.submit([asked(4, models[1]), asked(5, models[2])])
    assert whole.abort(5) is not None
    assert {finished.key for finished in whole.pause("abort")} == {4}
    whole.resume()
    assert len(answers(whole, asked(6, models[0]))[6].token_ids)


@pytest.mark.skipif(not test_sdk.PYTHON.exists(), reason="make tinker-env")
def test_the_sdk_trains_all_weights_and_samples_them_with_vllm(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    subprocess.run([sys.executable, test_sdk.SDK / "hub.py", hub], check=True, timeout=test_sdk.LIMIT_S)
    with test_sdk.service(tmp_path / "run", hub, "tinker.weights=full", *SLOW_START) as (url, environment):
        printed = test_sdk.said([test_sdk.SDK / "whole.py", url, test_sdk.NAME], hub, environment)
    assert "losses" in printed and "refused" in printed


@pytest.mark.parametrize("weights", ["adapters", "full"])
def test_a_service_trains_and_samples_with_vllm(tmp_path: Path, weights: str) -> None:
    from busrl.quickstart import ensure

    ensure("tiny:sort")
    with service(tmp_path / "run", f"tinker.weights={weights}", *SLOW_START) as (_, client):
        model, data = client.model(), [supervised([5, 6, 7, 8, 9])] * 4
        before = client.sampler(model, 0)
        for _ in range(3):
            client.forward_backward(model, *data)
            client.result(client.step(model))
        after = client.sampler(model, 1)
        ids = [5, 6, 7, 8, 9]
        scores = [client.sample(sampler, 0, ids, prompt_logprobs=True)[1]["logprobs"] for sampler in (before, after)]
        assert scores[1][1:].sum() > scores[0][1:].sum()
        sequences, _ = client.sample(before, 1, topk_sample_logprobs=2)
        assert all(sequence.topk[0].shape == (len(sequence.tokens), 2) for sequence in sequences)
        targets = {"data": [5, 6, 7, -1, 9, 8, 8, 9], "shape": [4, 2]}
        _, told = client.sample(after, 2, ids, prompt_logprobs=True, target_prompt_logprobs=targets)
        np.testing.assert_allclose(told["targets"][[0, 1, 3], [1, 0, 1]], told["logprobs"][[1, 2, 4]], atol=1e-3)
        assert told["targets"][1, 1] == 0.0
