"""A task that is decided by a token of the first segment: last_segment can not learn it, behaviour and pois can.

Engine, records, masks and trainer are the real ones; only ring and processes are left out (tests/run has them).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from busrl.engines.base import Finished, Request
from busrl.engines.torch.engine import TorchEngine
from busrl.ledger.wal import SampleRecord
from busrl.preflight.load import load
from busrl.roles.learner import samples
from busrl.roles.learner.step import TrainingStep
from busrl.topology import Topology
from busrl.topology.schema import Segments

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, SEGMENT, GROUPS, SIZE, STEPS = 12, 3, 8, 8, 30
RIGHT = range(2, 6)  # a third of the tokens is right as the first one


class NoText:
    """The engine's tokenizer; nothing here is text."""

    eos_token_id = VOCABULARY


def topology(folder: Path, loss: str, seed: int) -> Topology:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, intermediate_size=48, max_position_embeddings=32, eos_token_id=VOCABULARY,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)  # its end token is none that it can write: all have two segments
    base = load(ROOT / "configs" / "quickstart.toml")
    learner = dataclasses.replace(base.learner, lr=1.5e-2)
    segments = Segments(length=SEGMENT, max_segments=2, loss=loss)
    return dataclasses.replace(
        base, model=dataclasses.replace(base.model, path=str(folder)), learner=learner, segments=segments
    )


def answers(engine: TorchEngine, step: int, seed: int) -> list[tuple[Request, list[Finished]]]:
    """A batch of answers, each made in two segments."""
    none = np.empty(0, np.int32)
    answers: list[tuple[Request, list[Finished]]] = []
    for member in range(GROUPS * SIZE):
        prompt = np.array([6 + member // SIZE % 4, 6 + step % 4], np.int32)
        uid = step * GROUPS * SIZE + member
        answers.append((Request(member, uid, 0, prompt, none, SEGMENT, 1.0, 1.0, seed), []))
    for segment in range(2):
        engine.submit([
            dataclasses.replace(r, segment=segment, prefix_ids=parts[0].token_ids if parts else none)
            for r, parts in answers
        ])
        while engine.active:
            for done in engine.step():
                answers[done.key][1].append(done)
    return answers


def records(answers: list[tuple[Request, list[Finished]]]) -> list[SampleRecord]:
    records = []
    for request, parts in answers:
        tokens, logprobs, versions = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("token_ids", "logprobs", "versions")
        )
        records.append(
            SampleRecord(
                uid=request.uid, group=request.uid // SIZE, admission=request.uid // SIZE, member=request.uid % SIZE,
                attempt=0, prompt_crc=0, reward=float(tokens[0] in RIGHT), temperature=1.0, version=0, step=0,
                finish=2, prompt_ids=request.prompt_ids.tobytes(), token_ids=tokens.tobytes(),
                logprobs=logprobs.tobytes(), versions=versions.tobytes(),
                segments=[len(part.token_ids) for part in parts],
            )
        )
    return records


def learn(folder: Path, loss: str, seed: int) -> tuple[float, float, float]:
    """Mean reward of the first and of the last five steps, and the share of tokens that was never trained."""
    step = TrainingStep(topology(folder, loss, seed))
    model: Any = Qwen3ForCausalLM.from_pretrained(folder)
    engine = TorchEngine(model, NoText(), capacity=GROUPS * SIZE, max_length=16)
    rewards, masked, tokens = [], 0, 0
    for number in range(STEPS):
        with torch.no_grad():
            for name, value in engine.parameters().items():
                value.copy_(step.weights()[name])
        batch = records(answers(engine, number, seed))
        rewards.append(float(np.mean([record.reward for record in batch])))
        stats = step.train(batch, GROUPS, version=number)
        masked, tokens = masked + stats.context_tokens, tokens + stats.tokens + stats.context_tokens
    return float(np.mean(rewards[:5])), float(np.mean(rewards[-5:])), masked / tokens


@pytest.mark.parametrize("loss", ["behaviour", "pois"])
def test_a_loss_over_all_segments_learns_what_the_first_one_decides(loss: str, tmp_path: Path) -> None:
    first, last, never = learn(tmp_path, loss, seed=0)
    assert first < 0.7 and last > 0.9 and never == 0.0, (first, last, never)


def test_the_last_segment_alone_fails_and_the_untrained_share_explains_it(tmp_path: Path) -> None:
    first, last, never = learn(tmp_path, "last_segment", seed=0)
    assert never == 0.5 and last < 0.65, (first, last, never)


def test_a_mask_that_forgets_the_earlier_segments_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter-proof: without its mask last_segment learns, so the test above can fail."""
    whole = samples.to_sample
    monkeypatch.setattr(samples, "to_sample", lambda record, last_only, skipped=0: whole(record))
    assert learn(tmp_path, "last_segment", seed=0)[1] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_it_is_so_for_every_seed(seed: int, tmp_path: Path) -> None:
    last = {loss: learn(tmp_path / loss, loss, seed)[1] for loss in ("behaviour", "pois", "last_segment")}
    assert min(last["behaviour"], last["pois"]) > 0.9 and last["last_segment"] < 0.7, last
