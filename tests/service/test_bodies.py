"""JSON bodies of a service: what the SDK sends is read; what is wrong is refused with field, value, rule, remedy."""

from __future__ import annotations

import json
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from service_messages import Recorded, recorded

from busrl.service.bodies import (
    BODIES,
    JSON_BYTES,
    BadBody,
    Prompt,
    RetrieveFutures,
    Sample,
    SamplingParams,
    TooLarge,
    as_logged,
    read_body,
    read_logged,
)

PAGE = (Path(__file__).parents[2] / "docs/service-wire.md").read_text()
JSON = [entry for entry in recorded() if entry.route in BODIES]
ADAM = {"model_id": "s:train:0", "seq_id": 5, "adam_params": {"learning_rate": 0.01}}
MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
SAVE = {"model_id": "s:train:0", "seq_id": 6, "path": "one"}
SNAPSHOT = {"model_id": "s:train:0", "seq_id": 9, "sampling_session_seq_id": 0}
LOAD = {"model_id": "s:train:0", "seq_id": 7, "path": "tinker://s:train:0/weights/one", "optimizer": True}
SAMPLE = {"sampling_session_id": "s:sample:0", "seq_id": 0, "prompt": {"chunks": [{"tokens": [5, 6]}]}}
TARGETS = {"data": [1, 2], "shape": [1, 2], "dtype": "int64"}


def refusal(route: str, body: object) -> BadBody:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(BadBody) as raised:
        read_body(BODIES[route], raw)
    return raised.value


@pytest.mark.parametrize("entry", JSON, ids=[f"{entry.route}-{place}" for place, entry in enumerate(JSON)])
def test_a_body_of_the_sdk_is_read_field_by_field(entry: Recorded) -> None:
    read = read_body(BODIES[entry.route], entry.body)
    for name, value in json.loads(entry.body).items():
        if name != "type":
            told = getattr(read, name)
            assert told == value or not isinstance(value, int | str | None), (name, told, value)


@pytest.mark.parametrize("entry", JSON, ids=[f"{entry.route}-{place}" for place, entry in enumerate(JSON)])
def test_what_is_logged_of_a_body_is_all_that_was_read(entry: Recorded) -> None:
    more = json.dumps({**json.loads(entry.body), "later": [1]}).encode()
    read = read_body(BODIES[entry.route], more)
    assert b"later" not in as_logged(read)
    assert read_body(BODIES[entry.route], as_logged(read)) == read == read_body(BODIES[entry.route], entry.body)


def test_no_objects_are_made_of_what_the_interface_does_not_name() -> None:
    body = json.dumps({**ADAM, "later": [0] * 2**20}).encode()
    tracemalloc.start()
    try:
        read_body(BODIES["optim_step"], body)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    finally:
        tracemalloc.stop()


def test_a_body_at_the_limit_is_read_again_though_longer() -> None:
    spare = len(json.dumps({**SAMPLE, "prompt": {"chunks": [{"tokens": []}]}}))
    tokens = ",".join(["1"] * ((JSON_BYTES - spare) // 2))
    raw = json.dumps(SAMPLE).replace("5, 6", tokens).encode()
    read = read_body(Sample, raw)
    assert len(raw) <= JSON_BYTES < len(as_logged(read))
    assert read_logged(Sample, as_logged(read)) == read


def test_bodies_of_all_routes_were_recorded_but_those_of_cancelling() -> None:
    assert {entry.route for entry in JSON} == set(BODIES) - {"cancel_future"}


@pytest.mark.parametrize("route", [route for route in BODIES if route != "asample"])
def test_the_page_of_routes_names_every_field(route: str) -> None:
    row = next(line for line in PAGE.splitlines() if line.replace("PUT ", "").startswith(f"| `{route}` |"))
    fields = set(BODIES[route].__struct_fields__)
    assert fields <= set(re.findall(r"`([a-z_]+)`", row.split("|")[2])), fields


def test_the_page_of_routes_names_every_field_of_a_sample() -> None:
    section = PAGE.split("\n## asample\n")[1].split("\n## ")[0] + "`sampling_session_id` `seq_id`"
    for kind in (Sample, SamplingParams):
        assert set(kind.__struct_fields__) <= set(re.findall(r"`([a-z_]+)`", section))


def test_fields_that_the_interface_does_not_name_are_ignored() -> None:
    assert read_body(BODIES["optim_step"], json.dumps({**ADAM, "later": {"a": [1]}}).encode()).seq_id == 5


FAULTS: list[tuple[str, Any, str]] = [  # route, body, words of the refusal
    ("asample", {**SAMPLE, "prompt": {"chunks": [{}] * 70_000}}, "70003 objects and lists; 65536 at most"),
    ("get_info", {"model_id": "m", "later": [[]] * 70_000}, "70002 objects and lists"),
    ("get_info", b"{", "the body: no JSON"),
    ("get_info", b"\xff\xfe", "the body: no JSON"),
    ("get_info", b'{"later":' + b"[" * 10_000, "the body: no JSON"),
    ("get_info", b'{"a":' * 10_000, "the body: no JSON"),
    ("get_info", [], "the body: Expected `object`, got `array`"),
    ("get_info", {}, "missing required field `model_id`"),
    ("get_info", {"model_id": "a\nb"}, "model_id: 'a\\nb': Expected"),
    ("get_info", {"model_id": ""}, "model_id: '': Expected"),
    ("get_info", {"model_id": "m" * 2**20}, "model_id: Expected"),
    ("get_info", b'{"model_id": "m", "later": "\xff"}', "the body: no JSON"),
    ("session_heartbeat", {"session_id": "../s"}, "session_id: '../s'"),
    ("create_session", {"user_metadata": {"a": "x" * 20_000}}, "user_metadata: above 16 KiB"),
    ("sessions/S/finish", {"reason": {"type": "bored"}}, "reason.type: 'bored'"),
    ("create_model", {**MODEL, "model_seq_id": -1}, "model_seq_id: -1"),
    ("create_model", {**MODEL, "lora_config": {"rank": 0}}, "lora_config.rank: 0"),
    ("create_model", {**MODEL, "lora_config": {"rank": -1}}, "lora_config.rank: -1"),
    ("create_model", {**MODEL, "lora_config": {"rank": 4.5}}, "lora_config.rank: 4.5"),
    ("create_model", {**MODEL, "lora_config": {"rank": 4, "train_attn": False, "train_mlp": False,
                                               "train_unembed": False}}, "it trains no part"),
    ("create_model", {**MODEL, "optimizer_config": {"type": "dimuon"}}, "'dimuon' is not served; use adamw"),
    ("optim_step", {**ADAM, "adam_params": None}, "adam_params: missing"),
    ("optim_step", {**ADAM, "adam_params": {"eps": 0}}, "adam_params.eps: 0"),
    ("optim_step", {**ADAM, "adam_params": {"beta1": 1}}, "adam_params.beta1: 1"),
    ("optim_step", {**ADAM, "adam_params": {"learning_rate": -1}}, "adam_params.learning_rate: -1"),
    ("optim_step", {**ADAM, "adam_params": {"learning_rate": "fast"}}, "adam_params.learning_rate: 'fast'"),
    ("optim_step", b'{"model_id": "m", "seq_id": 1, "adam_params": {"eps": NaN}}', "the body: no JSON"),
    ("optim_step", b'{"model_id": "m", "seq_id": 1, "adam_params": {"eps": 1e999}}', "eps: Number out of range"),
    ("asample", b'{"sampling_params": {"temperature": NaN}}', "the body: no JSON"),
    *(("optim_step", {**ADAM, "seq_id": seq}, f"seq_id: {seq}") for seq in (0, -1, 2**31, 2**70, 1.5, True)),
    *(("save_weights", {**SAVE, "path": path}, "is no name") for path in ("..", "a/b", "", "a" * 200, "a\n", "ä")),
    ("save_weights", {**SAVE, "ttl_seconds": 0}, "ttl_seconds: 0"),
    ("save_weights_for_sampler", {**SNAPSHOT, "sampling_session_seq_id": None}, "neither path nor"),
    ("save_weights_for_sampler", {**SNAPSHOT, "kind": "frozen"}, "kind: 'frozen'"),
    ("load_weights", {**LOAD, "path": "tinker://a/weights/../../b"}, "is no path of this service"),
    ("load_weights", {**LOAD, "path": "/etc/passwd"}, "is no path of this service"),
    ("load_weights", {**LOAD, "session_id": "s", "model_seq_id": 1}, "neither or both"),
    ("load_weights", {"path": LOAD["path"], "optimizer": False}, "neither or both"),
    ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 0}, "neither model_path nor"),
    ("asample", {**SAMPLE, "seq_id": -1}, "seq_id: -1"),
    ("asample", {**SAMPLE, "num_samples": 0}, "num_samples: 0"),
    ("asample", {**SAMPLE, "num_samples": 10**6}, "num_samples: 1000000"),
    ("asample", {**SAMPLE, "prompt": {"chunks": [{"tokens": [-1]}]}}, "prompt.chunks[0].tokens[0]: -1"),
    ("asample", {**SAMPLE, "prompt": {"chunks": [{"type": "image", "data": "png"}]}}, "images and audio"),
    ("asample", {**SAMPLE, "topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs: 1000000"),
    ("asample", {**SAMPLE, "prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: not served here"),
    ("asample", {**SAMPLE, "prompt_logprobs_last_n": 1}, "set prompt_logprobs"),
    ("asample", {**SAMPLE, "record_stability_info": True}, "use loss_fn=importance_sampling"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**TARGETS, "sparse_crow_indices": [0, 1]}}, "one of sparse_crow"),
    *(("asample", {**SAMPLE, "target_prompt_logprobs": {
        **TARGETS, "sparse_crow_indices": rows, "sparse_col_indices": columns}}, words) for rows, columns, words in (
        ([0, 2, 2], [0, 1], "do not rise"), ([1, 2], [0, 1], "do not rise"), ([0, 1], [0, 1], "do not rise"),
        ([0, 2], [0, 2], "outside of the shape"), ([0, 2], [1, 1], "listed twice"),
        ([0, 3], [0, 1, 0], "2 ids for 3 columns"))),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**TARGETS, "shape": [2, 2]}}, "[2, 2] for 2 ids"),
    *(("asample", {**SAMPLE, "sampling_params": {name: value}}, f"sampling_params.{name}: {shown}") for
      name, value, shown in (
          ("max_tokens", 0, "0"), ("temperature", -1, "-1"), ("top_p", 0, "0"), ("top_p", 1.5, "1.5"),
          ("top_k", 0, "0 draws nothing"), ("top_k", -2, "-2"), ("stop", "", "'' stops nothing"),
          ("stop", ["a", ""], "'' stops nothing"), ("stop", [-1], "-1 stops nothing"),
          ("stop", ["x"] * 1000, "1000 stops"), ("seed", 2**64, "18446744073709551616"))),
    ("retrieve_future", {"request_id": "a\r\nb"}, "request_id: 'a\\r\\nb'"),
    ("retrieve_futures", {"target": {}}, "missing required field `sampling_session_id`"),
    ("retrieve_futures", {"target": {"sampling_session_id": "s"}, "timeout": -1}, "timeout: -1"),
    ("retrieve_futures", {"target": {"sampling_session_id": "s"}, "prev_cursor": -1}, "prev_cursor: -1"),
    ("weights_info", {"tinker_path": 5}, "tinker_path: 5"),
]


@pytest.mark.parametrize("route, body, words", FAULTS)
def test_a_fault_is_told_with_its_field_and_value(route: str, body: Any, words: str) -> None:
    problem = refusal(route, body)
    assert words in str(problem) and "; " in str(problem) and len(str(problem)) < 400, str(problem)


def test_a_large_body_of_json_is_refused_unread() -> None:
    with pytest.raises(TooLarge, match="8388608 at most"):
        read_body(BODIES["asample"], b"[" * (JSON_BYTES + 1))


def test_a_wrong_training_request_still_has_its_number() -> None:
    assert refusal("optim_step", {**ADAM, "adam_params": {"eps": 0}}).request == ("s:train:0", 5)
    assert refusal("save_weights", {**SAVE, "path": ".."}).request == ("s:train:0", 6)
    assert refusal("load_weights", {**LOAD, "optimizer": None}).request == ("s:train:0", 7)


def test_a_request_without_a_number_has_none() -> None:
    for body in ({**ADAM, "seq_id": 0}, {**ADAM, "seq_id": True}, {**ADAM, "model_id": "a b"}, {"seq_id": 1}):
        assert refusal("optim_step", body).request is None
    assert refusal("asample", {**SAMPLE, "num_samples": 0}).request is None


@pytest.mark.parametrize("stop", [None, [], "x", ["x", "y"], [3, 4], ["x", 3]])
def test_ends_of_an_answer_are_texts_or_ids_or_none(stop: Any) -> None:
    body = json.dumps({**SAMPLE, "sampling_params": {"stop": stop, "temperature": 0, "max_tokens": None}}).encode()
    params = read_body(BODIES["asample"], body).sampling_params
    assert (params.stop, params.temperature, params.max_tokens) == (stop, 0.0, None)


def test_the_ids_of_a_prompt_are_those_of_all_its_chunks() -> None:
    prompt = read_body(BODIES["asample"], json.dumps(
        {**SAMPLE, "prompt": {"chunks": [{"tokens": [5]}, {"tokens": []}, {"tokens": [6, 7]}]}}).encode()).prompt
    ids = prompt.ids(vocabulary=8, context=4)
    assert ids.tolist() == [5, 6, 7] and ids.dtype == np.int32


@pytest.mark.parametrize("tokens, words", [
    ([], "prompt: 0 tokens; 1 to 3 are allowed"), ([1] * 4, "prompt: 4 tokens"),
    ([1, 8], "token 8; the model has 0 to 7"),
])
def test_a_prompt_without_room_or_with_unknown_tokens_is_refused(tokens: list[int], words: str) -> None:
    prompt = read_body(BODIES["asample"], json.dumps({**SAMPLE, "prompt": {"chunks": [{"tokens": tokens}]}}).encode())
    assert isinstance(prompt.prompt, Prompt)
    with pytest.raises(BadBody) as raised:
        prompt.prompt.ids(vocabulary=8, context=4)
    assert words in str(raised.value)


def test_numbers_of_clones_from_older_sdks_are_read() -> None:
    """Up to 0.34 a clone draws a number of up to 10^9 by itself."""
    number = 10**9 * 10**9 + 5
    assert read_body(Sample, json.dumps({**SAMPLE, "seq_id": number}).encode()).seq_id == number
    asked = {"target": {"sampling_session_id": "s:sample:0", "cloned_sampler_id": 10**9}}
    assert read_body(RetrieveFutures, json.dumps(asked).encode()).target.cloned_sampler_id == 10**9
