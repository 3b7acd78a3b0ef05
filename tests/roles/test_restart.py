"""Answers that are cut because an engine restarts lose no token, and go on with numbers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from busrl.engines import Finished, Request
from busrl.engines.base import PIECE
from busrl.engines.torch.engine import TorchEngine
from busrl.roles.rollout import EngineRestart
from busrl.states import Finish


def request(key: int, tokens: int = 12, temperature: float = 1.0) -> Request:
    return Request(
        key=key, uid=key, segment=0, prompt_ids=np.array([3, 4, 5 + key], np.int32), prefix_ids=np.empty(0, np.int32),
        max_new_tokens=tokens, temperature=temperature, top_p=1.0, seed=0,
    )


@pytest.fixture
def engine(tmp_path: Path) -> TorchEngine:
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, max_position_embeddings=64, eos_token_id=15, tie_word_embeddings=True,
    )
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(16)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t15")
    return TorchEngine(Qwen3ForCausalLM(config), tokenizer, capacity=4, max_length=32)


def generate(engine: TorchEngine, requests: Sequence[Request], cuts: Sequence[int] = ()) -> dict[int, Finished]:
    """All answers; the engine is emptied and goes on after these steps."""
    restart, done, steps = EngineRestart(finish=False), {}, 0
    restart.submitted(requests)
    engine.submit(requests)
    while engine.active:
        if steps in cuts:
            for ended in restart.take_out(engine):
                done[ended.key] = restart.merged(ended)
            assert engine.active == 0
            engine.version += 1
            restart.resume(engine)
        for ended in engine.step():
            done[ended.key] = restart.merged(ended)
        steps += 1
    assert not restart.answers
    return done


def test_greedy_answers_are_the_same_however_often_they_are_cut(engine: TorchEngine) -> None:
    requests = [request(key, temperature=0.0) for key in range(3)]
    whole, cut = generate(engine, requests), generate(engine, requests, cuts=(0, 3, 4, 9))
    for key, answer in cut.items():
        assert answer.token_ids.tolist() == whole[key].token_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, whole[key].logprobs, atol=1e-5)
        assert answer.versions.tolist() == sorted(answer.versions.tolist())
        assert answer.finish == whole[key].finish
        assert len(answer.logprobs) == len(answer.versions) == len(answer.token_ids)
    longest = max(cut.values(), key=lambda answer: len(answer.token_ids))
    assert len(longest.token_ids) == 12 and longest.finish == Finish.LENGTH
    assert len(set(longest.versions.tolist())) == 4, "before any cut nothing was drawn; after each comes its version"


def test_a_piece_draws_from_a_stream_of_its_own(engine: TorchEngine) -> None:
    restart = EngineRestart(finish=False)
    restart.submitted([request(0)])
    engine.submit([request(0)])
    for _ in range(3):
        assert not engine.step()
    restart.take_out(engine)
    rest = restart.answers[0].rest()
    assert rest.segment == PIECE and len(rest.prefix_ids) == 3 and rest.max_new_tokens == 9
    streams = engine._seats._streams
    first = streams.uniforms(0, 0, 0, 3)
    assert not np.isin(streams.uniforms(0, 0, rest.segment, 9), first).any()


def test_an_engine_that_shall_finish_first_starts_nothing_meanwhile(engine: TorchEngine) -> None:
    restart = EngineRestart(finish=True)
    assert not restart.waits(engine) and not restart.draining
    engine.submit([request(0, tokens=2)])
    assert restart.waits(engine) and restart.draining
    while engine.active:
        engine.step()
    assert not restart.waits(engine) and not restart.draining
    assert not EngineRestart(finish=False).waits(engine)


def test_what_ended_by_itself_is_told_and_not_started_again() -> None:
    class Ends:
        """An engine that finds one of its answers done when it is told to stop."""

        active = 2

        def __init__(self) -> None:
            self.submitted: list[Any] = []

        def pause(self, how: str) -> list[Finished]:
            empty, none = np.empty(0, np.float32), np.empty(0, np.uint32)
            ended = Finished(0, np.array([7], np.int32), np.zeros(1, np.float32), np.ones(1, np.uint32), Finish.LENGTH)
            return [ended, Finished(1, np.empty(0, np.int32), empty, none, 3)]

        def resume(self) -> None: ...

        def submit(self, requests: Sequence[Request]) -> None:
            self.submitted += requests

    restart, other = EngineRestart(finish=False), Ends()
    restart.submitted([request(0), request(1)])
    (ended,) = restart.take_out(other)  # type: ignore[arg-type]
    restart.resume(other)  # type: ignore[arg-type]
    assert ended.key == 0 and restart.merged(ended) is ended
    assert [request.key for request in other.submitted] == [1]
    assert other.submitted[0].segment == 0, "nothing was drawn, so nothing is repeated"
