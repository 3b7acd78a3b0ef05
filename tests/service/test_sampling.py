"""From the body of a request for samples to its answer in the log, with an engine in the place of the ring."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from bases import TOKENS, train, write_base
from service_messages import read_sample_result

from busrl.data.chat import LightTokenizer
from busrl.engines.base import Request as EngineRequest
from busrl.engines.tokens import NO_IDS
from busrl.errors import CallUnanswered, DiskFull
from busrl.ring.calls import CallAnswer, CallDetails, ModelCall
from busrl.service.adapters import Adapter
from busrl.service.desk import Desk
from busrl.service.engine import AdapterEngine
from busrl.service.figures import Census
from busrl.service.folders import ServiceFolders
from busrl.service.operations import write_folder
from busrl.service.registry import Sampler
from busrl.service.requests import Answer, LogWriter, Request
from busrl.service.sampling import Samples
from busrl.service.tenants import Tenants

torch.set_num_threads(1)
PROMPT = [5, 9, 3, 12, 7]
ADAPTER = {"rank": 4, "seed": 2, "attn": True, "mlp": True, "unembed": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("bases") / "base")


class Calls:
    """A caller whose calls one engine answers, as they would come out of the ring; `held` keeps them waiting."""

    def __init__(self, base: Path) -> None:
        self.engine = AdapterEngine.load(base, capacity=8, max_length=64)
        self.asked: list[ModelCall] = []
        self.held = False
        self.given_up = 0

    async def ask(self, call: ModelCall, patience_s: float) -> CallAnswer:
        self.asked.append(call)
        details = msgspec.msgpack.decode(call.details(), type=CallDetails)
        try:
            while self.held:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        self.engine.submit([EngineRequest(
            len(self.asked), call.uid, details.stream, call.ids, NO_IDS, call.max_new_tokens, call.temperature,
            call.top_p, 0, tuple(details.stop), extra=details.extra)])
        while not (finished := self.engine.step()):
            pass
        answer = finished[0]
        extra = {name: answer.extra[name] for name in call.extra.get("gives", ())}
        return CallAnswer(answer.token_ids, answer.logprobs, answer.versions, answer.finish, 0, 0.0, 0.0, extra=extra)


class Scene:
    """A model that was saved twice, its logs, and requests for samples of it."""

    def __init__(self, root: Path, base: Path, longest: int = 60) -> None:
        self.where = ServiceFolders(root)
        tenants = Tenants(base)
        tenants.create("s:train:0", Adapter(4, 2))
        self._answers = LogWriter(self.where.answers)
        self.desk = Desk(self.where, sync=False)
        self.desk.log(Request("session", "s", about={"key": "k"}))
        self.desk.log(Request("model", "s:train:0", about={"session": "s", "adapter": ADAPTER, "first": 1}))
        self._tenants, self._base, self._longest, self.saves = tenants, base, longest, 0
        self.calls = Calls(base)

    def save(self, kind: str = "snapshot") -> Sampler:
        """Train the model, and save it for a sampler."""
        self.saves += 1
        seq = self.saves
        train(self._tenants, "s:train:0", 2, first=seq)
        body = {"model_id": "s:train:0", "seq_id": seq, "sampling_session_seq_id": seq, "kind": kind}
        self.desk.log(Request("training", "s:train:0", seq, "save_weights_for_sampler", b"", json.dumps(body).encode()))
        write_folder(self.where.snapshot(seq), {}, lambda folder: self._tenants.snapshot("s:train:0", folder))
        self._answers.write(Answer("s:train:0", seq, b"", "done", False, b"", weights=seq))
        self.desk.follow()
        return self.desk.registry.samplers[f"s:sample:{seq}"]

    async def began(self, sampler: Sampler, seq: int, **body: Any) -> Samples:
        self.samples = getattr(self, "samples", None) or Samples(
            self.desk, self.where, self.calls, LightTokenizer.of(self._base), 64, self._longest, 60.0, self._raise)
        asked = {"sampling_session_id": sampler.id, "seq_id": seq, "prompt": {"chunks": [{"tokens": PROMPT}]},
                 "sampling_params": {"max_tokens": 4, "seed": 1}, **body}
        self.desk.log(Request("sample", sampler.id, seq, "asample", b"", json.dumps(asked).encode()))
        self.samples.begin(sampler, seq)
        return self.samples

    async def sample(self, sampler: Sampler, seq: int, **body: Any) -> tuple[Any, list[Any], dict[str, Any]]:
        """Number of the snapshot, sequences, scores of the prompt."""
        await self.began(sampler, seq, **body)
        found = await self.desk.answer((sampler.id, seq), 60)
        assert found is not None and found.state == "done", found and found.payload()
        return found.weights, *read_sample_result(found.payload())

    def _raise(self, problem: BaseException) -> None:
        raise problem

    def close(self) -> None:
        self.desk.close()
        self._answers.close()


@pytest.fixture
def scene(tmp_path: Path, base: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path, base)
    yield scene
    scene.close()


def play(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))  # type: ignore[arg-type]


def test_targets_and_likeliest_tokens_of_a_prompt_agree(scene: Scene) -> None:
    async def story() -> None:
        targets = [[PROMPT[1], 6], [PROMPT[2], -1], [PROMPT[3], 8], [PROMPT[4], 2]]
        _, _, scores = await scene.sample(
            scene.save(), 0, prompt_logprobs=True, topk_prompt_logprobs=TOKENS,
            target_prompt_logprobs={"data": [target for row in targets for target in row], "shape": [4, 2]})
        assert np.isnan(scores["logprobs"][0]) and scores["targets"].shape == (4, 2)
        np.testing.assert_array_equal(scores["targets"][:, 0], scores["logprobs"][1:])
        assert scores["targets"][1, 1] == 0.0
        ids, logprobs = scores["topk"]
        assert logprobs[3][list(ids[3]).index(8)] == scores["targets"][2, 1]

    play(story)


def test_sparse_targets_are_answered_in_their_layout_from_the_first_one_on(scene: Scene) -> None:
    async def story() -> None:
        sampler, dense = scene.save(), [[-1, -1, -1], [-1, 9, 4], [-1, -1, -1], [6, -1, -1]]
        _, _, wanted = await scene.sample(sampler, 0, target_prompt_logprobs={
            "data": [target for row in dense for target in row], "shape": [4, 3]})
        _, _, scores = await scene.sample(sampler, 1, target_prompt_logprobs={
            "data": [9, 4, 6], "shape": [4, 3], "sparse_crow_indices": [0, 0, 2, 2, 3],
            "sparse_col_indices": [1, 2, 0]})
        assert scores["sparse"] and not wanted["sparse"] and (scores["targets"][1, 1:] < 0).all()
        np.testing.assert_array_equal(scores["targets"], wanted["targets"])
        places = [call.extra["score"] for call in scene.calls.asked if "score" in call.extra]
        assert [(place["first"], place["end"]) for place in places] == [(2, 5), (2, 5)]
        _, _, nothing = await scene.sample(sampler, 2, target_prompt_logprobs={
            "data": [], "shape": [4, 3], "sparse_crow_indices": [0] * 5, "sparse_col_indices": []})
        assert not nothing["targets"].any()

    play(story)


def test_scores_of_many_tokens_come_in_parts_that_fit_their_slots(tmp_path: Path, base: Path) -> None:
    narrow, wide = Scene(tmp_path / "narrow", base, longest=20), Scene(tmp_path / "wide", base, longest=2000)

    async def story() -> None:
        told = []
        for scene in (narrow, wide):
            told.append(await scene.sample(scene.save(), 0, prompt_logprobs=True, topk_prompt_logprobs=9,
                                           topk_sample_logprobs=5))
        assert len(narrow.calls.asked) > len(wide.calls.asked) == 3
        np.testing.assert_allclose(told[0][2]["logprobs"], told[1][2]["logprobs"], atol=1e-5)
        for mine, wanted in zip(told[0][2]["topk"], told[1][2]["topk"]):
            np.testing.assert_allclose(mine, wanted, atol=1e-5)
        assert told[0][1][0].topk[0].shape == (len(told[0][1][0].tokens), 5)
        for mine, wanted in zip(told[0][1][0].topk, told[1][1][0].topk):
            np.testing.assert_allclose(mine, wanted, atol=1e-5)

    play(story)
    narrow.close()
    wide.close()


def test_the_last_places_alone_are_scored_where_only_they_are_asked_for(scene: Scene) -> None:
    async def story() -> None:
        sampler = scene.save()
        _, _, whole = await scene.sample(sampler, 0, prompt_logprobs=True)
        _, _, last = await scene.sample(sampler, 1, prompt_logprobs=True, prompt_logprobs_last_n=2)
        assert np.isnan(last["logprobs"]).tolist() == [True, True, True, False, False]
        np.testing.assert_array_equal(last["logprobs"][-2:], whole["logprobs"][-2:])
        asked = [call.extra["score"] for call in scene.calls.asked if "score" in call.extra]
        assert [(places["first"], places["end"]) for places in asked] == [(1, 5), (3, 5)]

    play(story)


def test_a_sampler_in_flight_draws_with_what_was_published_since(scene: Scene) -> None:
    async def story() -> None:
        inflight = scene.save("inflight")
        assert (await scene.sample(inflight, 0))[0] == 1
        snapshot = scene.save()
        assert (await scene.sample(inflight, 1))[0] == 1
        newest = scene.save("inflight")
        weights = [(await scene.sample(sampler, 2))[0] for sampler in (inflight, snapshot, newest)]
        assert weights == [3, 2, 3]

    play(story)


def test_no_stops_at_all_is_another_request_than_the_models_own(scene: Scene) -> None:
    async def story() -> None:
        sampler = scene.save()
        for seq, (stop, extra) in enumerate([
            (None, {}), ([], {"ends": False}), ("ab", {"stop_texts": ["ab"]}), ([5, "b"], {"stop_texts": ["b"]})]):
            params = {"max_tokens": 4, "stop": stop, "top_k": seq or -1}
            await scene.sample(sampler, seq, sampling_params=params)
            said = {name: value for name, value in scene.calls.asked[-1].extra.items() if name != "weights"}
            assert said == extra | ({"top_k": seq} if seq else {})
        assert scene.calls.asked[-1].stop == (5,)

    play(story)


def test_requests_that_nobody_waits_for_end_their_calls(scene: Scene) -> None:
    async def story() -> None:
        scene.calls.held = True
        sampler = scene.save()
        samples = await scene.began(sampler, 0, num_samples=3)
        await scene.began(sampler, 1, num_samples=2)
        while len(scene.calls.asked) < 5:
            await asyncio.sleep(0)
        samples.stop((sampler.id, 0))
        await asyncio.sleep(0.01)
        assert (scene.calls.given_up, samples.under_way) == (3, 1)
        samples.stop_session("s")
        await asyncio.sleep(0.01)
        assert (scene.calls.given_up, samples.under_way) == (5, 0)
        assert not list(scene.desk.under_way)

    play(story)


def test_samples_of_a_silent_client_wait_and_are_the_same(scene: Scene) -> None:
    async def story() -> None:
        sampler = scene.save()
        undisturbed = await scene.sample(sampler, 0)
        scene.calls.held = True
        await scene.began(sampler, 1, num_samples=3)
        while len(scene.calls.asked) < 4:
            await asyncio.sleep(0)
        census, owner = scene.desk.census, sampler.owner
        scene.samples.follow_clients(silent_s=60.0, keep_s=60.0)
        assert scene.samples.under_way == 1 and scene.desk.under_way.of[owner] == 1
        hearing(census, 100.0)
        scene.samples.follow_clients(silent_s=60.0, keep_s=200.0)
        while scene.calls.given_up < 3 or scene.samples.under_way:
            await asyncio.sleep(0)
        assert scene.desk.under_way.of[owner] == 0 and scene.desk.found((sampler.id, 1)) is None
        scene.calls.held = False
        hearing(census, 0.0)
        scene.samples.follow_clients(silent_s=60.0, keep_s=200.0)
        found = await scene.desk.answer((sampler.id, 1), 60)
        assert found is not None and scene.desk.under_way.of[owner] == 0
        assert read_sample_result(found.payload())[0][0].tokens == undisturbed[1][0].tokens

    play(story)


def test_samples_of_a_client_that_stays_away_are_given_up(scene: Scene) -> None:
    async def story() -> None:
        scene.calls.held = True
        sampler = scene.save()
        await scene.began(sampler, 0)
        for silence in (100.0, 300.0):
            hearing(scene.desk.census, silence)
            scene.samples.follow_clients(silent_s=60.0, keep_s=200.0)
        found = await scene.desk.answer((sampler.id, 0), 60)
        assert found is not None and b"silent for 300 s" in found.payload()
        assert not list(scene.desk.under_way) and not scene.desk.under_way.aside and not scene.samples.under_way
        assert scene.desk.under_way.of[sampler.owner] == 0

    play(story)


def test_weights_whose_numbers_are_not_finite_fail_a_sample_in_words(scene: Scene) -> None:
    async def story() -> None:
        async def malformed(call: ModelCall, patience_s: float) -> CallAnswer:
            scene.calls.asked.append(call)
            raise CallUnanswered("malformed", "the engine drew from numbers that are not finite")

        scene.calls.ask = malformed  # type: ignore[method-assign]
        sampler = scene.save()
        await scene.began(sampler, 0)
        found = await scene.desk.answer((sampler.id, 0), 60)
        assert found is not None and found.state == "server" and b"are not finite" in found.payload()
        assert len(scene.calls.asked) == 2 and not scene.samples.under_way

    play(story)


def test_a_cancel_for_which_there_is_no_room_changes_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(answer: Answer) -> None:
        raise DiskFull("no space left on the device")

    async def story() -> None:
        scene.calls.held = True
        sampler = scene.save()
        await scene.began(sampler, 0)
        with monkeypatch.context() as patched:
            patched.setattr(scene.desk, "answered", full)
            with pytest.raises(DiskFull):
                scene.samples.stop((sampler.id, 0))
        scene.calls.held = False
        found = await scene.desk.answer((sampler.id, 0), 60)
        assert found is not None and found.state == "done"

    play(story)


def test_likeliest_tokens_of_a_sample_have_room_at_the_context_s_end(scene: Scene) -> None:
    async def story() -> None:
        asked = {"topk_sample_logprobs": 3, "sampling_params": {"seed": 1, "stop": []}}
        _, sequences, _ = await scene.sample(scene.save(), 0, prompt={"chunks": [{"tokens": [5] * 50}]}, **asked)
        assert len(sequences[0].tokens) == 13 and len(sequences[0].topk[0]) == 13
        sampler = scene.save()
        await scene.began(sampler, 1, prompt={"chunks": [{"tokens": [5] * 63}]}, **asked)
        found = await scene.desk.answer((sampler.id, 1), 60)
        assert found is not None and b"leaves no room for it" in found.payload()

    play(story)


@pytest.mark.parametrize("temperature", [1e-6, 1e-40])
def test_a_temperature_next_to_nothing_draws_the_likeliest_tokens(scene: Scene, temperature: float) -> None:
    async def story() -> None:
        sampler = scene.save()
        _, cold, _ = await scene.sample(sampler, 0, sampling_params={"max_tokens": 6, "seed": 1, "temperature": 0.0})
        almost = {"max_tokens": 6, "seed": 1, "temperature": temperature}
        _, colder, _ = await scene.sample(sampler, 1, sampling_params=almost)
        assert colder[0].tokens == cold[0].tokens

    play(story)


def hearing(census: Census, silence: float) -> None:
    """Let a client have been heard for the last time so long ago."""
    census.silent_s = lambda session: silence  # type: ignore[method-assign]
