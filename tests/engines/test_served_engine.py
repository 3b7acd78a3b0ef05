"""The engine behind an endpoint, against a real server process that answers, fails, lies, hangs and dies."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from endpoint import EOS as EOS_ID
from endpoint import answer, next_token
from endpoint_process import WAIT_S, Endpoint
from proof_scene import Proving
from requests_ import request

from busrl.data.vocabulary import TokenRows
from busrl.engines import Finished
from busrl.engines.openai import client
from busrl.engines.openai.engine import ServedEngine
from busrl.errors import PeerTimeout, UserError, WeightsRefused
from busrl.states import Finish
from busrl.topology.schema import Openai
from busrl.weights.factory import TransportSettings

ALL = 1 << 60
LONG = next([k, 5] for k in range(3, 90) if len(answer([k, 5], 40, 0)[0]) == 40)  # a prompt whose answer has no end


class Letters:
    """A tokenizer of small letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 94 for letter in text]

    def decode(self, ids: Any, ended: bool = True) -> str:
        return "".join(chr(int(i) + 94) for i in ids if not (ended and i == EOS_ID))


Start = Callable[..., Endpoint]
Make = Callable[..., ServedEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Server processes; all are gone afterwards."""
    running: list[Endpoint] = []

    def start_endpoint(token_s: float = 0.0, port: int = 0) -> Endpoint:
        running.append(Endpoint(tmp_path, token_s, port))
        return running[-1]

    yield start_endpoint
    for endpoint in running:
        endpoint.kill()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Engines that wait milliseconds where a run waits seconds."""
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(client, "MOST_WAIT_S", 0.1)
    engines: list[ServedEngine] = []

    def make_engine(
        url: str, capacity: int = 8, update_s: float = 120.0, eos_ids: frozenset[int] = frozenset({EOS_ID}),
        tokens: Letters | None = None, **settings: Any,
    ) -> ServedEngine:
        openai = {"timeout_s": 20.0, "patience_s": 20.0, "retries": 4, **settings}
        engines.append(
            ServedEngine(
                Openai(base_url=url, **openai), tokens or Letters(),  # type: ignore[arg-type]
                capacity=capacity, max_length=200, known=TokenRows(rows=40), eos_ids=eos_ids, update_s=update_s,
            )
        )
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


def until_idle(engine: ServedEngine) -> dict[int, Finished]:
    results: dict[int, Finished] = {}
    deadline = time.monotonic() + WAIT_S
    while engine.active:
        assert time.monotonic() < deadline, f"{engine.active} are still active"
        results.update({finished.key: finished for finished in engine.step()})
    return results


def until(engine: ServedEngine, tokens: int) -> dict[int, Finished]:
    """Step until so many tokens have come in all, or everything has ended."""
    results: dict[int, Finished] = {}
    deadline = time.monotonic() + WAIT_S
    while engine.active and engine.statistics().tokens < tokens:
        assert time.monotonic() < deadline
        results.update({finished.key: finished for finished in engine.step()})
    return results


def same(got: Finished, prompt: list[int], limit: int, version: int = 0) -> None:
    ids, logprobs = answer(prompt, limit, version)
    assert got.token_ids.tolist() == ids
    np.testing.assert_allclose(got.logprobs, logprobs, rtol=1e-6)
    assert got.versions.tolist() == [version] * len(ids)
    assert got.finish == (Finish.EOS if ids[-1] == EOS_ID else Finish.LENGTH)


def test_ids_log_probs_ends_and_counts_are_those_of_the_server(start: Start, make: Make) -> None:
    endpoint = start()
    engine = make(endpoint.url)
    prompts = [[3 + k, 5] for k in range(8)]
    engine.submit([request(k, prompt, max_new_tokens=40) for k, prompt in enumerate(prompts)])
    announced = 0
    results: dict[int, Finished] = {}
    while engine.active:
        announced += engine.decoding
        results.update({finished.key: finished for finished in engine.step()})
    for k, prompt in enumerate(prompts):
        same(results[k], prompt, 40)
    assert {finished.finish for finished in results.values()} == {Finish.EOS, Finish.LENGTH}
    tokens = sum(len(finished.token_ids) for finished in results.values())
    assert engine.statistics().tokens == tokens == announced
    assert {entry["body"]["model"] for entry in endpoint.log if "completions" in entry["path"]} == {"letters"}
    with pytest.raises(ValueError, match="9 requests, but 8 rows are free"):
        engine.submit([request(k, [5]) for k in range(9)])


def test_a_prefix_counts_as_prompt_and_a_full_prompt_ends_at_once(start: Start, make: Make) -> None:
    engine = make(start().url)
    prefix = np.asarray([7, 8], np.int32)
    engine.submit([request(0, [5, 6], prefix_ids=prefix, max_new_tokens=9), request(1, [5] * 200)])
    results = until_idle(engine)
    same(results[0], [5, 6, 7, 8], 9)
    assert (results[1].finish, len(results[1].token_ids)) == (Finish.LENGTH, 0)


def test_partial_output_can_be_requested_and_stop_ids_are_sent(start: Start, make: Make) -> None:
    endpoint = start(token_s=0.01)
    engine = make(endpoint.url)
    engine.submit([request(0, LONG, max_new_tokens=20, stop_ids=(39,))])
    until(engine, 3)
    early = engine.sampled(0, 1).tolist()
    whole = until_idle(engine)[0].token_ids.tolist()
    assert len(early) >= 2 and whole[1 : 1 + len(early)] == early
    assert engine.sampled(0, 0).tolist() == [] and 39 in endpoint.log[-1]["body"]["stop_token_ids"]


@pytest.mark.parametrize(
    "how",
    ["500", "503/0.05", "429/0.05", "429/Fri, 01 Jan 2021 00:00:00 GMT", "html", "no ids", "unknown id", "nan",
     "above zero", "two for one", "half", "clean half", "abort", "silent end", "endless line"],
)
def test_unusable_output_is_requested_again_from_where_it_stopped(start: Start, make: Make, how: str) -> None:
    endpoint = start()
    endpoint.behave(how, how)
    engine = make(endpoint.url)
    engine.submit([request(0, LONG, max_new_tokens=40)])
    same(until_idle(engine)[0], LONG, 40)
    assert engine.statistics().errors >= (1 if how == "silent end" else 2)
    bodies = [entry["body"] for entry in endpoint.log if entry["path"] == "/v1/completions"]
    starts = [len(body["prompt"]) - len(LONG) for body in bodies]
    if how in ("clean half", "abort"):  # three tokens came of each try, and are not drawn again
        assert starts == [0, 3, 6]
    if how in ("half", "clean half", "abort"):
        assert len({body["seed"] for body in bodies}) == 3
    if how == "half":  # a reset connection may take tokens along that were sent but not read yet
        assert len(starts) == 3 and all(0 <= later - earlier <= 3 for earlier, later in pairwise(starts))


def test_ids_may_come_as_named_tokens(start: Start, make: Make) -> None:
    endpoint = start()
    endpoint.behave("named ids")
    engine = make(endpoint.url)
    engine.submit([request(0, LONG, max_new_tokens=10)])
    same(until_idle(engine)[0], LONG, 10)
    assert engine.statistics().errors == 0


@pytest.mark.parametrize("how", ["hang", "comments"])
def test_a_server_that_brings_no_token_is_asked_again_after_the_timeout(start: Start, make: Make, how: str) -> None:
    endpoint = start()
    endpoint.behave(how)
    engine = make(endpoint.url, timeout_s=0.3)
    engine.submit([request(0, LONG, max_new_tokens=10)])
    same(until_idle(engine)[0], LONG, 10)
    assert engine.statistics().errors == 1


def test_retry_after_is_kept_to(start: Start, make: Make) -> None:
    endpoint = start()
    endpoint.behave("429/0.4")
    engine = make(endpoint.url)
    begun = time.monotonic()
    engine.submit([request(0, LONG, max_new_tokens=5)])
    until_idle(engine)
    assert time.monotonic() - begun >= 0.4


def test_a_request_refused_by_the_server_reports_why_while_others_continue(start: Start, make: Make) -> None:
    endpoint = start()
    endpoint.behave("400")
    engine = make(endpoint.url)
    engine.submit([request(0, LONG, max_new_tokens=5)])
    refused = until_idle(engine)[0]
    assert refused.finish == Finish.ABORTED and "400" in refused.refused and "told to say 400" in refused.refused
    engine.submit([request(1, LONG, max_new_tokens=5)])
    same(until_idle(engine)[1], LONG, 5)


@pytest.mark.parametrize("how", ["401", "404"])
def test_an_error_for_all_requests_ends_the_engine_with_the_server_message(
    start: Start, make: Make, how: str
) -> None:
    endpoint = start()
    endpoint.behave(how)
    engine = make(endpoint.url)
    engine.submit([request(0, LONG)])
    with pytest.raises(UserError, match=rf"{how}.*told to say {how}.*see \[openai\]"):
        until_idle(engine)


def test_an_endpoint_that_dies_and_comes_back_costs_time_and_no_token(start: Start, make: Make) -> None:
    endpoint = start()
    endpoint.allow(20)
    engine = make(endpoint.url)
    prompts = [[3 + k, 5] for k in range(4)]
    engine.submit([request(k, prompt, max_new_tokens=40) for k, prompt in enumerate(prompts)])
    results = until(engine, 20)
    endpoint.kill()
    assert engine.step() is not None
    start(token_s=0.0, port=endpoint.port)
    results |= until_idle(engine)
    for k, prompt in enumerate(prompts):
        same(results[k], prompt, 40)
    assert engine.statistics().errors > 0


def test_an_unreachable_endpoint_raises_a_named_error_after_the_patience(start: Start, make: Make) -> None:
    endpoint = start()
    endpoint.allow(5)
    engine = make(endpoint.url, patience_s=0.5)
    engine.submit([request(0, LONG, max_new_tokens=40)])
    until(engine, 2)
    endpoint.kill()
    begun = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"127\.0\.0\.1.*no usable answer for .*patience_s = 0\.5.*last failure"):
        until_idle(engine)
    assert time.monotonic() - begun < 60
    with pytest.raises(PeerTimeout, match="asking which models there are failed"):
        make(endpoint.url, patience_s=0.2)


def test_one_request_that_always_fails_is_given_up_alone(start: Start, make: Make) -> None:
    endpoint = start(token_s=0.002)
    endpoint.behave("ok", *["500"] * 60)
    endpoint.allow(1)
    engine = make(endpoint.url, retries=3)
    engine.submit([request(0, LONG, max_new_tokens=40)])
    results = until(engine, 1)
    engine.submit([request(1, LONG, max_new_tokens=40)])
    while engine.statistics().errors == 0:
        engine.step()
    endpoint.allow(ALL)
    results |= until_idle(engine)
    same(results[0], LONG, 40)
    assert results[1].finish == Finish.ABORTED
    assert "failures in a row" in results[1].refused and "500" in results[1].refused


class Folders:
    """A receiver whose newest version is a folder. That of lora_restart is of kind "folder", and has adapters."""

    def __init__(self, tmp_path: Path, kind: str, version: int, torn: bool = False) -> None:
        self.kind, self.version, self.path, self.torn = kind, version, tmp_path / f"v{version}", torn
        self.path.mkdir(exist_ok=True)
        (self.path / "version").write_text(str(version))
        if kind in ("adapter", "lora_restart"):
            (self.path / "adapter_config.json").write_text("{}")
            self.kind = "adapter" if kind == "adapter" else "folder"

    def take(self) -> tuple[int, int, Path]:
        if self.torn:
            raise WeightsRefused(f"{self.path}: torn")
        return self.version, self.version * 10, self.path


def checked(got: Finished, prompt: list[int]) -> set[int]:
    """Every token is the one that the version which it names gives after those before it."""
    ids = list(prompt)
    for token, version in zip(got.token_ids.tolist(), got.versions.tolist()):
        assert answer(ids, 1, version)[0] == [token]
        ids.append(token)
    return set(got.versions.tolist())


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["folder", "adapter", "lora_restart"])
def test_an_update_cuts_running_requests_which_continue_with_the_new_weights(
    start: Start, make: Make, tmp_path: Path, kind: str, server: str
) -> None:
    endpoint = start()
    endpoint.allow(15)
    engine = make(endpoint.url, update=server)
    prompts = [[k, 7] for k in range(3, 400) if len(answer([k, 7], 60, 0)[0]) == 60][:3]
    engine.submit([request(k, prompt, max_new_tokens=60) for k, prompt in enumerate(prompts)])
    results = until(engine, 15)
    assert engine.update_weights(Folders(tmp_path, kind, 3)) == (3, 30)  # type: ignore[arg-type]
    drawn = endpoint.drawn
    endpoint.allow(drawn + 30)
    results |= until(engine, engine.statistics().tokens + 3)
    if engine.active:
        engine.update_weights(Folders(tmp_path, kind, 4))  # type: ignore[arg-type]
    endpoint.allow(ALL)
    results |= until_idle(engine)
    seen = set().union(*(checked(results[k], prompt) for k, prompt in enumerate(prompts)))
    assert {0, 3} <= seen and engine.statistics().updates >= 1 and engine.statistics().errors == 0
    if kind == "folder":
        order = endpoint.calls("/pause", "/pause_generation", "/collective_rpc", "/update_weights_from_disk", "/resume",
                               "/continue_generation")
        wanted = {"vllm": ["/pause", "/collective_rpc", "/resume"],
                  "sglang": ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]}
        assert order == wanted[server] * engine.statistics().updates
    else:
        names = [entry["body"]["lora_name"] for entry in endpoint.log if entry["path"].endswith("/load_lora_adapter")]
        assert names == ["busrl-v3", "busrl-v4"][: engine.statistics().updates]


class Learner:
    """Scores as the server draws: with the version that it has."""

    version, model = 0, None

    def every(self, samples: Sequence[Any]) -> list[Any]:
        return [self._row(sample.prompt_ids.tolist()) for sample in samples]

    def score(self, samples: Sequence[Any]) -> list[Any]:
        return [self._row(sample.prompt_ids.tolist())[sample.token_ids] for sample in samples]

    def _row(self, prompt: list[int]) -> Any:
        row = np.full(40, -9.0, np.float32)
        token, row_of_token = next_token(prompt, self.version)
        row[token] = row_of_token
        return row


def test_a_server_that_keeps_old_weights_when_it_says_otherwise_is_found(
    start: Start, make: Make, tmp_path: Path
) -> None:
    engine, learner = make(start().url, update="vllm"), Learner()
    (tmp_path / "config.json").write_text('{"vocab_size": 40}')
    settings = ("openai.base_url=http://127.0.0.1:1/v1", "openai.update=vllm", "weights.transport=checkpoint_restart")
    proving = Proving(tmp_path, None, "process.rollout.engine=openai", *settings, trainer=learner)
    texts = []
    for version in (1, 2, 3):
        learner.version = version
        proving.publish(version, {})
        folder = Folders(tmp_path, "folder", version)
        if version == 3:
            (folder.path / "version").write_text("2")
        engine.update_weights(folder)  # type: ignore[arg-type]
        proving.answer(engine, version)
        texts += [finding.text for finding in proving.judged(version)]
    [text] = texts
    assert text.startswith("engine openai of rollout-0, version 3: over 8 tokens")


@pytest.mark.parametrize("kind", ["folder", "adapter"])
def test_a_restarted_server_gets_its_version_before_any_request(
    start: Start, make: Make, tmp_path: Path, kind: str
) -> None:
    endpoint = start()
    endpoint.allow(5)
    engine = make(endpoint.url, update="vllm")
    engine.update_weights(Folders(tmp_path, kind, 5))  # type: ignore[arg-type]
    prompt = with_long_answer(5)
    engine.submit([request(0, prompt, max_new_tokens=40)])
    until(engine, 5)
    endpoint.kill()
    start(token_s=0.0, port=endpoint.port)
    same(until_idle(engine)[0], prompt, 40, version=5)


def test_a_failed_update_is_retried_and_an_impossible_one_names_the_remedy(
    start: Start, make: Make, tmp_path: Path
) -> None:
    endpoint = start()
    engine = make(endpoint.url, update="vllm")
    endpoint.behave("update:500", "update:503")
    assert engine.update_weights(Folders(tmp_path, "adapter", 1)) == (1, 10)  # type: ignore[arg-type]
    endpoint.behave("update:404")
    with pytest.raises(UserError, match=r"version 2.*404.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        engine.update_weights(Folders(tmp_path, "adapter", 2))  # type: ignore[arg-type]


def with_long_answer(version: int) -> list[int]:
    """A prompt whose answer by that version has no end."""
    return next([k, 6] for k in range(3, 90) if len(answer([k, 6], 40, version)[0]) == 40)


@pytest.mark.parametrize("what", ["torn", "refused by the server"])
def test_requests_continue_after_a_failed_update_and_the_next_one_is_applied(
    start: Start, make: Make, tmp_path: Path, what: str
) -> None:
    endpoint = start()
    endpoint.allow(4)
    engine = make(endpoint.url, update="vllm")
    engine.submit([request(0, LONG, max_new_tokens=40)])
    until(engine, 4)
    if what == "torn":
        with pytest.raises(WeightsRefused):
            engine.update_weights(Folders(tmp_path, "adapter", 1, torn=True))  # type: ignore[arg-type]
    else:
        endpoint.behave("update:400")
        with pytest.raises(UserError, match="told to fail"):
            engine.update_weights(Folders(tmp_path, "adapter", 1))  # type: ignore[arg-type]
    assert not engine.statistics().paused
    endpoint.allow(endpoint.drawn + 30)
    until(engine, engine.statistics().tokens + 3)
    assert engine.update_weights(Folders(tmp_path, "adapter", 2)) == (2, 20)  # type: ignore[arg-type]
    assert not engine.statistics().paused
    endpoint.allow(ALL)
    assert checked(until_idle(engine)[0], LONG) == {0, 2}


def test_a_server_that_lost_only_its_connection_keeps_its_loaded_adapter(
    start: Start, make: Make, tmp_path: Path
) -> None:
    endpoint = start()
    engine = make(endpoint.url, update="vllm")
    engine.update_weights(Folders(tmp_path, "adapter", 5))  # type: ignore[arg-type]
    endpoint.behave("half", "half")
    engine.submit([request(0, with_long_answer(5), max_new_tokens=40)])
    same(until_idle(engine)[0], with_long_answer(5), 40, version=5)
    engine.update_weights(Folders(tmp_path, "adapter", 6))  # type: ignore[arg-type]
    assert endpoint.models == ["letters", "busrl-v6"]


def test_a_restarted_process_replaces_its_own_adapter_and_no_other(
    start: Start, make: Make, tmp_path: Path
) -> None:
    endpoint = start()
    engines = []
    for run in ("one", "two", "one"):
        engines.append(engine := make(endpoint.url, update="vllm"))
        settings = TransportSettings("lora_hotswap", "", "", folders=str(tmp_path / run))
        assert engine.receiver(settings, "rollout/0") is None
        assert engine.update_weights(Folders(tmp_path, "adapter", 5)) == (5, 50)  # type: ignore[arg-type]
    assert len(endpoint.models) == 3  # the base model and one adapter of each run
    engines[1].submit([request(0, with_long_answer(5), max_new_tokens=40)])
    engines[2].submit([request(0, with_long_answer(5), max_new_tokens=40)])
    for engine in engines[1:]:
        same(until_idle(engine)[0], with_long_answer(5), 40, version=5)


def test_no_version_loads_beside_an_older_one_being_restored(
    start: Start, make: Make, tmp_path: Path
) -> None:
    endpoint = start()
    engine = make(endpoint.url, update="vllm", update_s=0.5)
    engine.update_weights(Folders(tmp_path, "folder", 5))  # type: ignore[arg-type]
    endpoint.behave("half", "update:hang")
    engine.submit([request(0, with_long_answer(5), max_new_tokens=40)])
    calls = len(endpoint.calls("/pause"))
    until_called(endpoint, engine, "/pause", calls + 1)
    with pytest.raises(PeerTimeout, match=r"127\.0\.0\.1.*: version 5, which it lost, is still being loaded again"):
        engine.update_weights(Folders(tmp_path, "folder", 6))  # type: ignore[arg-type]
    assert endpoint.calls("/collective_rpc") == ["/collective_rpc"] and not engine.statistics().paused


def test_a_server_lost_again_right_after_resuming_gets_its_version_again(
    start: Start, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = start()
    engine = make(endpoint.url, update="vllm")
    engine.update_weights(Folders(tmp_path, "folder", 5))  # type: ignore[arg-type]
    open_gate, go_on = client.Client.open_gate, threading.Event()

    def slow_to_end(opened: client.Client) -> None:
        open_gate(opened)
        go_on.wait(WAIT_S)

    monkeypatch.setattr(client.Client, "open_gate", slow_to_end)
    endpoint.behave("half", "half")
    engine.submit([request(0, with_long_answer(5), max_new_tokens=40)])
    try:
        until_called(endpoint, engine, "/collective_rpc", 3)
    finally:
        go_on.set()
    same(until_idle(engine)[0], with_long_answer(5), 40, version=5)


def test_a_server_without_its_restored_version_gets_nothing_after_a_pause(
    start: Start, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = start()
    endpoint.allow(5)
    engine = make(endpoint.url, update="vllm")
    engine.update_weights(Folders(tmp_path, "folder", 5))  # type: ignore[arg-type]
    engine.submit([request(0, with_long_answer(5), max_new_tokens=40)])
    until(engine, 5)
    endpoint.kill()
    while "version 5 is loaded again" not in caplog.text:
        engine.step()
    engine.pause("keep")
    engine.resume()
    start(token_s=0.0, port=endpoint.port)  # its weights are those of version 0 until it is told of others
    same(until_idle(engine)[0], with_long_answer(5), 40, version=5)


def until_called(endpoint: Endpoint, engine: ServedEngine, path: str, times: int) -> None:
    deadline = time.monotonic() + 20
    while len(endpoint.calls(path)) < times:
        assert time.monotonic() < deadline, endpoint.calls(path)
        engine.step()


def test_pause_keeps_waits_or_aborts(start: Start, make: Make) -> None:
    endpoint = start()
    endpoint.allow(4)
    engine = make(endpoint.url)
    engine.submit([request(0, LONG, max_new_tokens=40)])
    until(engine, 4)
    assert engine.pause("keep") == []
    endpoint.allow(10)
    for _ in range(5):  # each waits for news
        engine.step()
    before = engine.statistics()
    assert before.tokens == 4 and before.paused
    engine.resume()
    until(engine, 6)
    (aborted,) = engine.pause("abort")
    assert aborted.finish == Finish.ABORTED and 6 <= len(aborted.token_ids) <= 10 and not engine.active
    assert aborted.token_ids.tolist() == answer(LONG, 40, 0)[0][: len(aborted.token_ids)]
    engine.resume()
    endpoint.allow(ALL)
    engine.submit([request(1, LONG, max_new_tokens=20)])
    ended = list(until(engine, engine.statistics().tokens + 1).values())
    ended += engine.pause("wait") + engine.step()
    assert [finished.key for finished in ended] == [1]
    same(ended[0], LONG, 20)


def test_an_aborted_request_is_gone_with_its_tokens(start: Start, make: Make) -> None:
    endpoint = start()
    endpoint.allow(6)
    engine = make(endpoint.url)
    engine.submit([request(0, LONG, max_new_tokens=40), request(1, LONG, max_new_tokens=40)])
    until(engine, 6)
    gone = engine.abort(0)
    assert gone is not None and gone.finish == Finish.ABORTED and engine.abort(0) is None and engine.abort(7) is None
    assert gone.token_ids.tolist() == answer(LONG, 40, 0)[0][: len(gone.token_ids)]
    endpoint.allow(ALL)
    results = until_idle(engine)
    assert sorted(results) == [1]
    same(results[1], LONG, 40)


def test_a_request_that_ended_by_itself_is_found_by_abort_too(start: Start, make: Make) -> None:
    engine = make(start().url)
    engine.submit([request(0, [5] * 200)])
    gone = engine.abort(0)
    assert gone is not None and gone.finish == Finish.LENGTH and not engine.active and engine.step() == []


@pytest.mark.parametrize("how", ["completions", "chat"])
def test_an_answer_ends_with_an_end_id_unknown_to_the_server(start: Start, make: Make, how: str) -> None:
    endpoint = start()
    ids, logprobs = answer(Letters().encode("cab"), 30, 0)
    ends = frozenset({EOS_ID, ids[5], ids[9]})  # the server knows the first of these alone
    engine = make(endpoint.url, endpoint=how, eos_ids=ends)
    prompt = engine.encode("cab")
    engine.submit([request(0, prompt, max_new_tokens=30), request(1, prompt, max_new_tokens=3)])
    results = until_idle(engine)
    first = next(k for k, token in enumerate(ids) if token in ends)
    assert results[0].token_ids.tolist() == ids[: first + 1] and results[0].finish == Finish.EOS
    np.testing.assert_allclose(results[0].logprobs, logprobs[: first + 1], rtol=1e-6)
    assert results[1].finish == (Finish.EOS if first < 3 else Finish.LENGTH)
    assert endpoint.log[-1]["body"]["stop_token_ids"] == sorted(ends)
    assert not engine.active and engine.statistics().errors == 0


class Closed(Letters):
    """A tokenizer that writes a token after each prompt, as a chat template does."""

    def encode(self, text: str) -> list[int]:
        return [*super().encode(text), 2]


def test_chat_prompts_travel_as_text_with_tools_and_must_match_our_ids(
    start: Start, make: Make, tmp_path: Path
) -> None:
    endpoint = start()
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}]))
    engine = make(endpoint.url, endpoint="chat", tools=str(tools), tokens=Closed())
    prompt = engine.encode("cab")
    endpoint.behave("500", "half", "ok")
    engine.submit([request(0, prompt, max_new_tokens=12)])
    same(until_idle(engine)[0], prompt, 12)
    sent = endpoint.log[-1]["body"]
    assert sent["tools"][0]["function"]["name"] == "add"
    assert sent["messages"] == [{"role": "user", "content": "cab"}]
    endpoint.behave("other prompt")
    engine.submit([request(1, prompt, max_new_tokens=12)])
    with pytest.raises(UserError, match="renders the prompt of uid 1001 to 1 tokens, the model folder to 4"):
        until_idle(engine)


def test_a_chat_answer_may_outlast_the_timeout_for_a_try_without_tokens(start: Start, make: Make) -> None:
    endpoint = start(token_s=0.05)
    engine = make(endpoint.url, endpoint="chat", timeout_s=0.5, retries=0)
    prompt = engine.encode("cab")
    long = next(k for k in range(90) if len(answer([*prompt, k], 40, 0)[0]) == 40)
    engine.submit([request(0, engine.encode("cab" + chr(94 + long)), max_new_tokens=40)])
    result = until_idle(engine)[0]
    same(result, [*prompt, long], 40)
    assert engine.statistics().errors == 0


def test_chat_accepts_an_answer_in_one_piece_and_detects_withheld_tokens(
    start: Start, make: Make
) -> None:
    endpoint = start()
    engine = make(endpoint.url, endpoint="chat")
    prompt = engine.encode("cab")
    endpoint.behave("whole")
    engine.submit([request(0, prompt, max_new_tokens=12)])
    same(until_idle(engine)[0], prompt, 12)
    assert engine.statistics().errors == 0
    endpoint.behave("kept back", "ok")
    engine.submit([request(1, prompt, max_new_tokens=12)])
    same(until_idle(engine)[1], prompt, 12)
    assert engine.statistics().errors == 1


def test_by_chat_an_update_waits_for_the_answers_under_way(start: Start, make: Make, tmp_path: Path) -> None:
    endpoint = start(token_s=0.003)
    engine = make(endpoint.url, endpoint="chat", update="vllm")
    prompt = engine.encode("cab")
    engine.submit([request(0, prompt, max_new_tokens=30)])
    while not endpoint.calls("/v1/chat/completions"):
        engine.step()
    engine.update_weights(Folders(tmp_path, "folder", 2))  # type: ignore[arg-type]
    engine.submit([request(1, prompt, max_new_tokens=30)])
    results = until_idle(engine)
    same(results[0], prompt, 30, version=0)
    same(results[1], prompt, 30, version=2)


def test_the_key_comes_from_the_environment_and_is_asked_for_by_name(
    start: Start, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = start()
    monkeypatch.setenv("SOME_KEY", "secret")
    engine = make(endpoint.url, api_key_env="SOME_KEY", model="letters")
    engine.submit([request(0, LONG, max_new_tokens=2)])
    until_idle(engine)
    assert endpoint.log[-1]["key"] == "Bearer secret"
    with pytest.raises(UserError, match=r"\$NO_SUCH_KEY, which is not set"):
        make(endpoint.url, api_key_env="NO_SUCH_KEY")


def test_a_closing_engine_unloads_its_adapter_even_when_the_server_is_dead(
    start: Start, make: Make, tmp_path: Path
) -> None:
    endpoint, before = start(), threading.active_count()
    engine = make(endpoint.url, update="vllm")
    engine.update_weights(Folders(tmp_path, "adapter", 2))  # type: ignore[arg-type]
    assert len(endpoint.models) == 2
    engine.close()
    assert endpoint.models == ["letters"]
    other = make(endpoint.url, update="vllm")
    other.update_weights(Folders(tmp_path, "adapter", 3))  # type: ignore[arg-type]
    endpoint.kill()
    other.close()
    assert threading.active_count() == before


def test_nothing_is_left_of_an_engine_that_was_closed(start: Start, make: Make) -> None:
    endpoint = start(token_s=0.01)
    before = threading.active_count()
    engine = make(endpoint.url)
    engine.submit([request(k, LONG, max_new_tokens=40) for k in range(8)])
    until(engine, 3)
    engine.close()
    assert threading.active_count() == before, threading.enumerate()
    assert not [link for link in _links() if f":{endpoint.port}" in link]


def _links() -> list[str]:
    """The remote ports of this process's TCP connections."""
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    sockets = {os.readlink(file) for file in files if os.path.islink(file)}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [f":{int(row[2].split(':')[1], 16)}" for row in rows if f"socket:[{row[9]}]" in sockets]


def test_a_closed_engine_leaves_no_coroutine_that_nobody_awaits(
    start: Start, make: Make, recwarn: pytest.WarningsRecorder
) -> None:
    gc.collect()
    gc.disable()  # what an answer leaves behind is found only after its loop has ended, as it may be at any time
    try:
        engine = make(start().url)
        engine.submit([request(1, [5, 6], max_new_tokens=4)])
        until_idle(engine)
        engine.close()
        gc.collect()
    finally:
        gc.enable()
    with pytest.raises(PeerTimeout, match="is closed"):
        engine.pause("keep")
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)]
