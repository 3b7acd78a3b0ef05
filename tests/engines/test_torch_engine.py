"""The embedded engine against the plain Hugging Face forward, for several architectures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from requests_ import crowd, endless, plain_logprobs, request, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from busrl.engines.torch.engine import TorchEngine
from busrl.errors import UserError
from busrl.states import Finish

KINDS = ["qwen3", "qwen2", "llama", "gpt2", "mistral-window", "qwen3-window"]
FAST_KINDS = {"qwen3", "qwen2", "llama"}
EOS_ID = 1
Folder = Callable[[str], Path]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_a_plain_forward_pass(model_folder: Folder, kind: str) -> None:
    folder = model_folder(kind)
    engine = TorchEngine.load(folder, capacity=5)
    model = AutoModelForCausalLM.from_pretrained(folder)
    requests = crowd(14, temperature=0.8)
    results = run(engine, requests)
    assert sorted(results) == list(range(14))
    for sent in requests:
        got = results[sent.key]
        wanted = plain_logprobs(model, sent.prompt_ids, got.token_ids, 0.8)
        np.testing.assert_allclose(got.logprobs, wanted, atol=1e-4)
        assert got.logprobs.dtype == np.float32 and got.token_ids.dtype == np.int32


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_decoder_is_used_for_the_architectures_that_it_knows(
    model_folder: Folder, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "busrl"):
        engine = TorchEngine.load(model_folder(kind), capacity=2)
    assert type(engine.decoder).__name__ == ("FastDecoder" if kind in FAST_KINDS else "GenericDecoder")
    assert ("generic decoder" in caplog.text) == (kind not in FAST_KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [True, False])
def test_greedy_decoding_equals_generate(model_folder: Folder, kind: str, fast: bool) -> None:
    folder = model_folder(kind)
    model = AutoModelForCausalLM.from_pretrained(folder)
    requests = crowd(6, temperature=0.0)
    results = run(TorchEngine.load(folder, capacity=4, fast=fast), requests)
    for sent in requests:
        ids = torch.from_numpy(sent.prompt_ids.astype(np.int64))[None]
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )[0, ids.shape[1] :]
        assert results[sent.key].token_ids.tolist() == wanted.tolist()
        assert not results[sent.key].logprobs.any()


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_sample_is_the_same_alone_and_in_a_crowd(model_folder: Folder, kind: str) -> None:
    engine = TorchEngine.load(model_folder(kind), capacity=7)
    requests = crowd(20)
    together = run(engine, requests)
    for sent in requests[::3]:
        alone = run(engine, [sent])[sent.key]
        assert alone.token_ids.tolist() == together[sent.key].token_ids.tolist()
        np.testing.assert_allclose(alone.logprobs, together[sent.key].logprobs, atol=1e-4)


def test_uid_segment_and_seed_each_give_another_sample(model_folder: Folder) -> None:
    engine = TorchEngine.load(model_folder("qwen3"), capacity=4)
    prompt = [5, 6, 7]
    variants = [{}, {"uid": 1}, {"segment": 1}, {"seed": 6}]
    results = run(engine, [request(k, prompt, **{"uid": 7, **change}) for k, change in enumerate(variants)])
    assert len({tuple(result.token_ids.tolist()) for result in results.values()}) == 4


def test_a_segment_goes_on_where_the_last_one_ended(model_folder: Folder) -> None:
    folder = model_folder("llama")
    engine, model = TorchEngine.load(folder, capacity=3), AutoModelForCausalLM.from_pretrained(folder)
    prefix = np.asarray([8, 9, 10, 11], np.int32)
    got = run(engine, [request(0, [4, 5], prefix_ids=prefix, segment=1)])[0]
    wanted = plain_logprobs(model, np.asarray([4, 5, 8, 9, 10, 11]), got.token_ids, 1.0)
    np.testing.assert_allclose(got.logprobs, wanted, atol=1e-4)


def test_sequences_end_at_eos_at_their_limit_and_at_the_models_length(model_folder: Folder) -> None:
    engine = TorchEngine.load(model_folder("gpt2"), capacity=64, max_length=16)
    results = run(engine, crowd(64, max_new_tokens=9))
    for sent in crowd(64, max_new_tokens=9):
        got = results[sent.key]
        count, limit = len(got.token_ids), min(9, 16 - len(sent.prompt_ids))
        assert EOS_ID not in got.token_ids[:-1]
        assert got.finish == (Finish.EOS if got.token_ids[-1] == EOS_ID else Finish.LENGTH)
        assert count == limit or got.finish == Finish.EOS
    assert {result.finish for result in results.values()} == {Finish.EOS, Finish.LENGTH}


def test_a_request_without_room_for_a_token_ends_at_once(model_folder: Folder) -> None:
    engine = TorchEngine.load(model_folder("gpt2"), capacity=2, max_length=8)
    engine.submit([request(3, [5] * 8), request(4, [5] * 7)])
    assert engine.active == 2
    results = run(engine, [])
    assert len(results[3].token_ids) == 0 and results[3].finish == Finish.LENGTH
    assert len(results[4].token_ids) == 1


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_parameters_have_the_names_of_the_model_and_are_live(model_folder: Folder, kind: str) -> None:
    folder = model_folder(kind)
    engine, model = TorchEngine.load(folder, capacity=2), AutoModelForCausalLM.from_pretrained(folder)
    assert list(engine.parameters()) == [name for name, _ in model.named_parameters()]
    for parameter in engine.parameters().values():
        parameter.zero_()
    got = run(engine, [request(0, [5, 6], max_new_tokens=3)])[0]
    np.testing.assert_allclose(got.logprobs, -np.log(35), atol=1e-5)


def test_an_aborted_request_leaves_and_the_others_are_not_touched(model_folder: Folder) -> None:
    engine = endless(model_folder("qwen3"), capacity=5)
    requests = crowd(5)
    wanted = run(engine, requests)
    engine.submit(requests)
    gone = engine.abort(4)
    assert gone and (gone.key, gone.finish, len(gone.token_ids)) == (4, Finish.ABORTED, 0) and engine.abort(99) is None
    engine.step()
    gone = engine.abort(1)
    assert gone and (gone.key, gone.finish, len(gone.token_ids)) == (1, Finish.ABORTED, 1) and engine.abort(1) is None
    results = run(engine, [])
    assert sorted(results) == [0, 2, 3]
    for key, got in results.items():
        assert got.token_ids.tolist() == wanted[key].token_ids.tolist()


def test_a_request_that_ended_without_a_row_is_found_by_abort_too(model_folder: Folder) -> None:
    engine = TorchEngine.load(model_folder("gpt2"), capacity=2, max_length=8)
    engine.submit([request(0, [5] * 8)])
    gone = engine.abort(0)
    assert gone and (gone.key, gone.finish, engine.active) == (0, Finish.LENGTH, 0) and engine.step() == []


def test_pauses_keep_wait_or_abort(model_folder: Folder) -> None:
    engine = endless(model_folder("qwen3"), capacity=5)
    requests = crowd(5)
    wanted = run(engine, requests)
    engine.submit(requests)
    engine.step()
    before = engine.statistics()
    assert engine.pause("keep") == [] and engine.decoding == 0 and engine.step() == []
    assert engine.statistics().tokens == before.tokens and engine.statistics().paused
    engine.resume()
    engine.step()
    for answer in (ended := engine.pause("wait")):
        assert answer.token_ids.tolist() == wanted[answer.key].token_ids.tolist()
    assert len(ended) == 5 and not engine.active
    engine.submit(requests[:2])
    assert engine.decoding == 0
    engine.resume()
    engine.step()
    engine.submit(requests[2:4])
    aborted = {answer.key: answer for answer in engine.pause("abort")}
    assert {key: len(answer.token_ids) for key, answer in aborted.items()} == {0: 1, 1: 1, 2: 0, 3: 0}
    assert {answer.finish for answer in aborted.values()} == {Finish.ABORTED} and not engine.active
    engine.resume()
    again = run(engine, requests)
    assert {key: answer.token_ids.tolist() for key, answer in again.items()} == {
        key: answer.token_ids.tolist() for key, answer in wanted.items()
    }
    assert engine.statistics().pause_s > 0


def test_a_sequence_with_non_finite_weights_ends_without_spoiling_later_ones(model_folder: Folder) -> None:
    engine = TorchEngine.load(model_folder("qwen3"), capacity=2)
    good = {name: parameter.clone() for name, parameter in engine.parameters().items()}
    wanted = run(engine, [request(0, [5, 6, 7])])[0]
    for parameter in engine.parameters().values():
        parameter.fill_(torch.nan)
    spoilt = run(engine, [request(1, [5] * 12)])[1]
    assert np.isnan(spoilt.logprobs).tolist() == [True]
    for name, parameter in engine.parameters().items():
        parameter.copy_(good[name])
    assert run(engine, [request(0, [5, 6, 7])])[0].token_ids.tolist() == wanted.token_ids.tolist()


def test_what_can_not_be_run_is_refused_with_its_reason(model_folder: Folder, tmp_path: Path) -> None:
    engine = TorchEngine.load(model_folder("gpt2"), capacity=2)
    with pytest.raises(ValueError, match="has no tokens"):
        engine.submit([request(0, [])])
    with pytest.raises(ValueError, match="token id 35; the model knows 0 to 34"):
        engine.submit([request(0, [35])])
    with pytest.raises(ValueError, match="3 requests, but 2 rows are free"):
        engine.submit(crowd(3))
    with pytest.raises(UserError, match=r"model\.path"):
        TorchEngine.load(tmp_path, capacity=2)


def test_text_goes_through_the_models_tokenizer(model_folder: Folder) -> None:
    engine = TorchEngine.load(model_folder("qwen3"), capacity=2)
    ids = engine.encode("sort: cab")
    assert engine.decode(ids) == "sort: cab"
    assert engine.encode("sort: cab") is ids
    assert engine.decode([*ids, EOS_ID]) == "sort: cab"
    assert engine.decode([*ids, EOS_ID], ended=False) == "sort: cab<eos>"
    assert engine.decode([EOS_ID, *ids]) == "<eos>sort: cab"


def test_with_a_chat_template_a_prompt_is_one_user_turn(model_folder: Folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("qwen3"))
    tokenizer = AutoTokenizer.from_pretrained(model_folder("qwen3"))
    tokenizer.chat_template = "<bos>{{ messages[0]['content'] }}:{% if add_generation_prompt %} {% endif %}"
    chat = TorchEngine(model, tokenizer, capacity=1, chat=True)
    assert chat.decode(chat.encode([{"role": "user", "content": "cab"}])) == "<bos>cab: "
