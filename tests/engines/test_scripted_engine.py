"""The scripted engine keeps the promises of the interface and of its pace, and answers as the trace says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import Published

from busrl.data import JsonlStream, trace
from busrl.data.pretrained import Vocabulary
from busrl.data.trace import TracedPrompt
from busrl.engines import Engine, Finished, Request
from busrl.engines.scripted import LATEST_S, Script, ScriptedEngine
from busrl.states import Finish
from busrl.topology.schema import Scripted

EOS_ID, PLAIN = 1, (3, 4, 5, 6)
GROUP = 2


class World:
    """A clock that moves only when somebody waits, each time by a little more than asked for."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now, self.late_s = 100.0, late_s

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds + self.late_s


def script_of(folder: Path, *tasks: TracedPrompt, right: float = 0.5) -> Script:
    path = folder / "trace.jsonl"
    trace.write(path, tasks)
    return Script(JsonlStream(path, 0, False), Vocabulary(EOS_ID, PLAIN), GROUP, right=right)


def engine_of(script: Script, world: World, capacity: int = 4, pace: Scripted | None = None) -> ScriptedEngine:
    return ScriptedEngine(
        script, pace or Scripted(0.002), capacity=capacity, max_length=200, clock=world.clock, wait=world.wait
    )


def request(key: int, uid: int, prefix: int = 0, limit: int = 150, segment: int = 0) -> Request:
    nothing = np.zeros(prefix, np.int32)
    return Request(key, uid, segment, np.full(5, 3, np.int32), nothing, limit, 1.0, 1.0, 0)


def uid(draw: int, member: int, attempt: int = 0) -> int:
    return (draw * 2 + attempt) * GROUP + member


def until_idle(engine: ScriptedEngine) -> list[Finished]:
    finished: list[Finished] = []
    while engine.active:
        finished += engine.step()
    return finished


def test_answers_have_the_lengths_of_the_trace_and_valid_tokens(tmp_path: Path) -> None:
    script = script_of(tmp_path, TracedPrompt("one", (7, 3)), TracedPrompt("two", (120, 1)))
    engine: Engine = engine_of(script, World())
    engine.submit([request(10 * draw + member, uid(draw, member)) for draw in (0, 1) for member in (0, 1)])
    answers = {answer.key: answer for answer in until_idle(engine)}  # type: ignore[arg-type]
    assert {key: len(answer.token_ids) for key, answer in answers.items()} == {0: 7, 1: 3, 10: 120, 11: 1}
    for answer in answers.values():
        assert answer.finish == Finish.EOS and answer.token_ids[-1] == EOS_ID
        assert set(answer.token_ids[:-1].tolist()) <= set(PLAIN)
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions)
        assert np.all(answer.logprobs < 0) and np.all(np.isfinite(answer.logprobs))


def test_a_re_roll_is_as_long_and_other_tokens(tmp_path: Path) -> None:
    engine = engine_of(script_of(tmp_path, TracedPrompt("one", (40, 3))), World())
    engine.submit([request(0, uid(0, 0)), request(1, uid(0, 0, attempt=1))])
    first, second = until_idle(engine)
    assert len(first.token_ids) == len(second.token_ids) == 40
    assert first.token_ids.tolist() != second.token_ids.tolist()


def test_time_is_steps_times_their_cost_however_late_it_wakes(tmp_path: Path) -> None:
    script, world = script_of(tmp_path, TracedPrompt("one", (100, 50))), World(late_s=0.003)
    engine = engine_of(script, world, pace=Scripted(0.002, per_sequence_s=0.001, prefill_s_per_token=0.01))
    engine.submit([request(0, uid(0, 0)), request(1, uid(0, 1))])
    until_idle(engine)
    scripted = 2 * 5 * 0.01 + 50 * 0.004 + 50 * 0.003  # two prefills, 50 steps with two rows, 50 with one
    assert world.now - 100 == pytest.approx(scripted, abs=0.0031)


def test_a_process_that_was_stopped_makes_up_for_little_of_it(tmp_path: Path) -> None:
    script, world = script_of(tmp_path, TracedPrompt("one", (1000,) * 2)), World()
    engine = ScriptedEngine(script, Scripted(0.002), capacity=2, max_length=2000, clock=world.clock, wait=world.wait)
    engine.submit([request(0, 0, limit=1500)])
    engine.step()
    world.now += 60.0
    stopped_until = world.now
    until_idle(engine)
    assert world.now - stopped_until == pytest.approx(1000 * 0.002 - 0.01 - LATEST_S, abs=0.02)


def test_jitter_keeps_the_mean(tmp_path: Path) -> None:
    script, world = script_of(tmp_path, TracedPrompt("one", (4000,) * 2)), World()
    engine = ScriptedEngine(
        script, Scripted(0.005, jitter=0.5), capacity=2, max_length=5000, clock=world.clock, wait=world.wait
    )
    engine.submit([request(0, 0, limit=4500)])
    until_idle(engine)
    assert world.now - 100 == pytest.approx(20.0, rel=0.05)
    assert world.now - 100 != pytest.approx(20.0, rel=1e-6)


def test_new_weights_between_two_steps_show_in_the_versions(tmp_path: Path) -> None:
    engine = engine_of(script_of(tmp_path, TracedPrompt("one", (20, 20))), World())
    engine.submit([request(0, 0)])
    engine.update_weights(Published(3, 1))  # before its first token
    drawn = engine.decoding
    engine.step()
    engine.update_weights(Published(4, 2))
    engine.update_weights(Published(5, 3))
    (answer,) = until_idle(engine)
    assert answer.versions.tolist() == [3] * drawn + [5] * (20 - drawn)
    assert 0 < drawn < 20


def test_the_tokens_announced_are_the_tokens_drawn(tmp_path: Path) -> None:
    engine = engine_of(script_of(tmp_path, TracedPrompt("one", (33, 58)), TracedPrompt("two", (7, 90))), World())
    engine.submit([request(n, n if n < 2 else n + 2) for n in range(4)])
    announced = total = 0
    while engine.active:
        announced += engine.decoding
        total += sum(len(answer.token_ids) for answer in engine.step())
    assert announced == total == 33 + 58 + 7 + 90


def test_limits_cut_answers_and_full_prompts_give_none_and_aborted_requests_vanish(tmp_path: Path) -> None:
    script = script_of(tmp_path, TracedPrompt("one", (100, 100), answer="7"), right=1.0)
    engine = engine_of(script, World())
    engine.submit([request(0, 0, limit=30), request(1, 1)])
    assert engine.abort(1) is not None and engine.abort(1) is None
    (cut,) = until_idle(engine)
    assert (cut.finish, len(cut.token_ids), cut.text) == (Finish.LENGTH, 30, "wrong")
    assert EOS_ID not in cut.token_ids
    full = Request(5, 0, 0, np.full(200, 3, np.int32), np.empty(0, np.int32), 9, 1.0, 1.0, 0)
    engine.submit([full])
    assert [(answer.key, len(answer.token_ids)) for answer in engine.step()] == [(5, 0)]
    with pytest.raises(ValueError, match="rows are free"):
        engine.submit([request(n, 0) for n in range(5)])


@settings(max_examples=40)
@given(length=st.integers(1, 90), segment=st.integers(1, 40), limit=st.integers(1, 100))
def test_segments_by_different_actors_are_the_answer_in_one_piece(
    length: int, segment: int, limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = script_of(tmp_path_factory.mktemp("trace"), TracedPrompt("one", (length, length)))
    whole_engine = engine_of(script, World())
    whole_engine.submit([request(0, 0, limit=limit)])
    (whole,) = until_idle(whole_engine)
    parts: list[int] = []
    number = 0
    while True:
        engine = engine_of(script, World())  # another actor each time
        piece = request(0, 0, len(parts), min(segment, limit - len(parts)), number)
        engine.submit([piece])
        (part,) = until_idle(engine)
        parts += part.token_ids.tolist()
        number += 1
        if part.finish == Finish.EOS or len(parts) == limit:
            break
    assert parts == whole.token_ids.tolist() and part.finish == whole.finish
    assert number == -(-min(length, limit) // segment)


def test_a_model_call_ends_within_its_token_limit(tmp_path: Path) -> None:
    world = World()
    engine = ScriptedEngine(
        script_of(tmp_path, TracedPrompt("one", (7, 3))), Scripted(0.002), capacity=4, max_length=200, calls=True,
        clock=world.clock, wait=world.wait,
    )
    engine.submit([request(number, uid(0, 0), limit=limit, segment=limit) for number, limit in enumerate((20, 5))])
    answers = {answer.key: answer for answer in until_idle(engine)}
    assert [len(answers[number].token_ids) for number in (0, 1)] == [20, 5]
    for answer in answers.values():
        assert answer.finish == Finish.EOS and answer.token_ids[-1] == EOS_ID and answer.text is None
    assert answers[0].token_ids[:4].tolist() != answers[1].token_ids[:4].tolist(), "each call has a stream of its own"


def test_pauses_keep_wait_or_abort(tmp_path: Path) -> None:
    script, world = script_of(tmp_path, TracedPrompt("one", (60, 90))), World()
    engine = engine_of(script, world)
    engine.submit([request(0, 0), request(1, 1)])
    engine.step()
    assert engine.pause("keep") == [] and engine.decoding == 0 and engine.step() == []
    world.now += 2.0
    engine.resume()
    (aborted,) = [engine.abort(1)]
    assert aborted is not None and aborted.finish == Finish.ABORTED and 0 < len(aborted.token_ids) < 90
    assert aborted.token_ids.tolist() == script.tokens(1, 0, 90, True)[0][: len(aborted.token_ids)].tolist()
    (ended,) = engine.pause("wait")
    assert ended.finish == Finish.EOS and len(ended.token_ids) == 60
    engine.resume()
    engine.submit([request(2, 0), request(3, 1)])
    engine.step()
    assert sorted(answer.key for answer in engine.pause("abort")) == [2, 3] and not engine.active
    counted = engine.statistics()
    assert counted.paused and counted.pause_s == pytest.approx(2.0) and counted.tokens > 60


def test_rewards_follow_the_trace_or_a_coin(tmp_path: Path) -> None:
    given_rewards = script_of(tmp_path, TracedPrompt("one", (2, 2), answer="7", rewards=(1.0, 0.0)))
    assert [given_rewards.text(uid(0, m), True) for m in (0, 1)] == ["7", "wrong"]
    by_chance = script_of(tmp_path, *[TracedPrompt(f"{n}", (2, 2), answer="wrong") for n in range(500)], right=0.25)
    right = sum(by_chance.text(n, True) == "wrong" for n in range(2000))
    assert 400 < right < 600


def test_prompts_are_plain_ids_one_for_four_bytes(tmp_path: Path) -> None:
    script = script_of(tmp_path, TracedPrompt("one", (2, 2)))
    assert len(script.encode("12345678")) == 2 and len(script.encode("判断：12345")) == 4
    assert set(script.encode("Compute the sum of 1, 2, 3.")) <= set(PLAIN)


def test_the_interface_the_scripted_engine_and_its_receiver_import_no_torch() -> None:
    code = (
        "import sys, busrl.roles.rollout, busrl.engines.scripted, busrl.weights.shm\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
