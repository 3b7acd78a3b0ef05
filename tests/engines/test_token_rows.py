"""Rows of a model that no token has: engines never draw them, and the learner's softmax leaves the same ones out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from requests_ import request
from wide_folders import forget, widen

from busrl.data.pretrained import vocabulary
from busrl.data.vocabulary import TokenRows, token_rows
from busrl.engines import Finished
from busrl.engines.openai.engine import RequestBodies
from busrl.engines.torch.engine import TorchEngine
from busrl.engines.vllm.worker import Extension, plain_logprobs
from busrl.topology.schema import Openai
from busrl.training import packing
from busrl.training.batch import Sample, first_fault, flatten
from busrl.training.earlier import Earlier, over_old_keys
from busrl.training.forward import Forward, JoinedRows, PackedRows, PaddedRows
from busrl.training.model import Adapter, LoraSettings, load
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Trainer

TOKENS = 35  # of the tokenizer of these folders
ROWS = 48
HOLES = {7, 20}
WAYS = {"full": Forward, "padded": PaddedRows, "joined": JoinedRows, "packed": PackedRows}
Wide = Callable[..., Path]


@pytest.fixture(scope="session")
def wide(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Wide:
    """Folders whose model has rows without a token: the last ones, with `holes` others too."""
    folders: dict[tuple[str, bool], Path] = {}

    def folder_of(kind: str = "qwen3", holes: bool = False) -> Path:
        if (kind, holes) not in folders:
            folder = widen(model_folder(kind), tmp_path_factory.mktemp(kind) / "wide", ROWS)
            folders[kind, holes] = forget(folder, HOLES) if holes else folder
        return folders[kind, holes]

    return folder_of


def drawn(folder: Path, temperature: float = 1.0, top_p: float = 1.0, fast: bool = True) -> list[Finished]:
    """Answers of 40 tokens and fewer to 12 prompts, which may have any id."""
    engine = TorchEngine.load(folder, capacity=12, max_length=60, fast=fast)
    fields = {"max_new_tokens": 40, "temperature": temperature, "top_p": top_p}
    engine.submit([request(key, [3 + key, ROWS - 1], **fields) for key in range(12)])
    finished: list[Finished] = []
    while engine.active:
        finished += engine.step()
    return finished


def samples_of(answers: list[Finished], temperature: float = 1.0) -> list[Sample]:
    return [
        Sample(answer.key, answer.key, 0, np.array([3 + answer.key, ROWS - 1], np.int32), answer.token_ids,
               answer.logprobs, answer.versions, 1.0, temperature)
        for answer in answers
    ]


def scored(way: Forward, samples: list[Sample], folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    way.leave_out_all_but(token_rows(folder))
    with torch.no_grad():
        return way.score(samples, flatten(samples, torch.float32, torch.device("cpu")))


# -- which rows have a token -----


@pytest.mark.parametrize(("tokenizer", "end", "holes"), [
    ({"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}, 3, ()),
    ({"model": {"vocab": {"a": 0, "b": 1, "d": 3}}}, 4, (2,)),
    ({"model": {"vocab": [["a", -1.0], ["a", -2.0], ["b", -3.0]]}}, 3, ()),  # unigram: one piece may stand twice
    ({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 5, "content": "<end>"}]}, 6, (2, 3, 4)),
    ({"model": {"vocab": {"a": 0, "b": 1, "z": 30}}}, 8, (2, 3, 4, 5, 6, 7)),  # a token beyond all rows
])
def test_rows_with_a_token_are_those_of_the_tokenizer(
    tmp_path: Path, tokenizer: dict[str, Any], end: int, holes: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert token_rows(tmp_path) == TokenRows(end, holes, 8)
    assert token_rows(tmp_path).left_out() == [*holes, *range(end, 8)]


def test_tokens_that_stand_beside_the_tokenizer_are_tokens_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 12, "eos_token_id": 6}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"2": {"content": "<x>"}}}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<y>": 4}))
    assert token_rows(tmp_path) == TokenRows(7, (3, 5), 12)  # 6 ends answers, with a text or without


def test_without_a_tokenizer_every_row_stands_for_a_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    rows = token_rows(tmp_path)
    assert (rows.without, rows.left_out(), rows.bound) == (0, [], 8)


def test_a_tokenizer_in_other_files_is_asked_of_transformers(wide: Wide, tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    vocab = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": GPT2Tokenizer.__name__}))
    assert token_rows(tmp_path) == TokenRows(4, (), 9)


# -- the embedded engine, beside the learner -----


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])  # tied, untied, and tied with another name
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_an_engine_draws_tokens_alone_with_the_learners_log_probabilities(
    wide: Wide, kind: str, holes: bool, fast: bool
) -> None:
    folder = wide(kind, holes)
    answers = drawn(folder, 0.7, fast=fast)
    ids = np.concatenate([answer.token_ids for answer in answers])
    assert len(ids) > 100 and ids.max() < TOKENS and (not holes or not set(ids.tolist()) & HOLES)
    for name, make in WAYS.items():
        model = load(folder)
        if name == "packed":
            if kind == "gpt2":
                continue
            packing.adopt(model)
        samples = samples_of(answers, 0.7)
        logprobs, entropy = scored(make(model), samples, folder)
        drawn_from = np.concatenate([answer.logprobs for answer in answers])
        np.testing.assert_allclose(logprobs, drawn_from, atol=1e-5, err_msg=name)
        assert bool((entropy <= np.log(TOKENS) + 1e-5).all()) and bool(entropy.isfinite().all())


def test_greedy_and_truncated_draws_are_of_tokens_alone(wide: Wide) -> None:
    for settings in ((0.0, 1.0), (1.0, 0.5)):
        assert all(answer.token_ids.max() < TOKENS for answer in drawn(wide("qwen3"), *settings))


def test_token_shares_match_those_of_a_model_without_the_other_rows(
    wide: Wide, model_folder: Callable[[str], Path]
) -> None:
    """Not only consistent: what is left out has no share of what remains."""
    samples = samples_of(drawn(wide("qwen3")))
    narrow = [replace(sample, prompt_ids=sample.prompt_ids[:1]) for sample in samples]
    padded, plain = (scored(PaddedRows(load(folder)), narrow, folder) for folder in
                    (wide("qwen3"), model_folder("qwen3")))
    torch.testing.assert_close(padded, plain)


# -- the learner -----


def test_rows_without_a_token_get_no_gradient_of_the_head(wide: Wide) -> None:
    folder = wide("llama")  # untied
    samples = samples_of(drawn(folder))
    for make in (Forward, PaddedRows):
        model = load(folder)
        way = make(model)
        way.leave_out_all_but(token_rows(folder))
        logprobs, entropy = way.score(samples, flatten(samples, torch.float32, torch.device("cpu")))
        (logprobs.sum() + entropy.sum()).backward()
        slope = model.get_output_embeddings().weight.grad
        assert bool(slope.isfinite().all()) and not slope[TOKENS:].any() and bool(slope[:TOKENS].any())


def test_a_trainer_leaves_them_out_of_ratio_reference_and_teacher(wide: Wide) -> None:
    folder = wide("qwen3")
    samples = samples_of(drawn(folder))
    trainer = Trainer(load(folder), TrainerSettings(token_rows=token_rows(folder)))
    for sample, row in zip(samples, trainer.score(samples), strict=True):
        np.testing.assert_allclose(row, sample.behaviour_logprobs, atol=1e-5)
    flat = flatten(samples, torch.float32, torch.device("cpu"))
    for way in (trainer.forward, Forward(trainer.model)):
        way.leave_out_all_but(token_rows(folder))
        ids, logprobs = way.best(samples, flat, ROWS, ROWS)
        assert ids.shape[1] == TOKENS and int(ids.max()) < TOKENS
        torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(len(ids)))


def test_what_an_old_cache_would_give_is_of_tokens_alone_too(wide: Wide) -> None:
    folder = wide("qwen3")
    model, before = load(folder), Earlier()
    before.keep(model, 0)
    for sample in samples_of(drawn(folder))[:3]:
        logprobs = over_old_keys(model, before, sample, 1, token_rows(folder))
        np.testing.assert_allclose(logprobs, sample.behaviour_logprobs, atol=1e-5)


def test_an_adapter_is_trained_on_tokens_alone(wide: Wide) -> None:
    pytest.importorskip("peft")
    folder = wide("qwen3")
    model = load(folder)
    adapter = Adapter(model, LoraSettings(rank=2, scale=2.0))
    trainer = Trainer(model, TrainerSettings(token_rows=token_rows(folder)), adapter=adapter)
    samples = samples_of(drawn(folder))
    trainer.accumulate(samples, [1.0, -1.0] * (len(samples) // 2), 0)
    stats = trainer.step(1e-2)
    assert not stats.skipped and stats.diagnostics.mismatch < 1e-5
    assert trainer.named_weights()["model.embed_tokens.weight"].shape[0] == ROWS  # what is published stays whole


def test_a_sample_with_an_id_that_is_no_token_is_never_trained(wide: Wide) -> None:
    known = token_rows(wide("qwen3"))
    good, bad = samples_of(drawn(wide("qwen3")))[:2]
    assert first_fault([good, bad], known) is None  # its prompt has such an id, which is only read
    bad = replace(bad, token_ids=np.append(bad.token_ids[:-2], [40, 41]).astype(np.int32))
    assert first_fault([good, bad], known) == (1, "2 of its ids stand for no token of the tokenizer, the first is 40")


# -- other engines -----


def test_scripted_answers_are_of_tokens_alone(wide: Wide) -> None:
    words = vocabulary(wide("qwen3", holes=True))
    assert words is not None and max(words.plain) < TOKENS and not set(words.plain) & HOLES


def test_an_endpoint_is_asked_to_leave_them_out() -> None:
    settings = Openai(base_url="http://127.0.0.1:1/v1")
    for known, bias in ((TokenRows(6, (2,), 8), {"2": -100.0, "6": -100.0, "7": -100.0}), (TokenRows(8, (), 8), None)):
        assert RequestBodies(settings, known, frozenset({1})).of(request(0, [3])).get("logit_bias") == bias


def test_workers_of_vllm_mask_the_logits_before_anything_is_made_of_them() -> None:
    model = SimpleNamespace(compute_logits=lambda hidden: None if hidden is None else torch.zeros(2, 8))
    worker = Extension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    assert worker.busrl_leave_out(6, [2])
    logits = model.compute_logits("hidden")
    assert logits.isneginf().all(0).nonzero().flatten().tolist() == [2, 6, 7] and logits[:, [0, 1, 3, 4, 5]].eq(0).all()
    assert model.compute_logits(None) is None  # of a rank that draws nothing


def test_the_check_of_vllms_weights_leaves_them_out_too(wide: Wide) -> None:
    folder = wide("qwen3")
    answer = drawn(folder, 0.7)[0]
    weights = {name: parameter.detach() for name, parameter in load(folder).named_parameters()}
    ids = [3 + answer.key, ROWS - 1, *answer.token_ids.tolist()]
    logprobs = plain_logprobs(str(folder), weights, ids, 0.7)
    np.testing.assert_allclose(logprobs[1:], answer.logprobs, atol=1e-5)
