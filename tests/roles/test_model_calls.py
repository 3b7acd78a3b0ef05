"""Model calls through a real rollout process: the same answers in any order, deaths on both sides, cancelled calls, new
weights, streams."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from call_scene import PATIENCE_S, ROOT, Scene, call

from busrl.errors import CallUnanswered
from busrl.protocol import messages as m
from busrl.ring.calls import ModelCall
from busrl.states import Finish

CALLER = """
import sys
import numpy as np
from busrl.ring import Ring
from busrl.ring.calls import Caller, ModelCall
ring = Ring.attach(sys.argv[1], calls=True)
ring.register("agent", "agent/9")
caller = Caller(ring, lambda message, to: None)
put = [caller.put(ModelCall(np.arange(1, 9, dtype=np.int32), 300, uid=number)) for number in range(7)]
print(len(put), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_a_stream_gives_the_same_tokens_in_any_order_and_company(scene: Scene) -> None:
    calls = [call(number, max_new_tokens=20 + number) for number in range(6)]
    alone = [scene.answers(call)[0] for call in calls]
    together = scene.answers(*calls)
    backwards = scene.answers(*reversed(calls))[::-1]
    assert alone == together == backwards
    other = scene.answers(*[call(number, max_new_tokens=20 + number, stream=77) for number in range(6)])
    assert other != alone and scene.all_free()


def test_an_answer_has_ids_logprobs_versions_and_who_made_it(scene: Scene) -> None:
    pending = scene.caller.put(call(3, max_new_tokens=5))
    [answer] = scene.results(pending)
    assert 1 <= len(answer.ids) == len(answer.logprobs) == len(answer.versions) <= 5
    assert (answer.logprobs <= 0).all() and answer.finish in (Finish.EOS, Finish.LENGTH)
    [engine] = [process for process in scene.ring.processes() if process.role == "rollout"]
    assert answer.engine == engine.index and answer.generated_s > 0 and answer.waited_s >= 0


def test_a_call_is_left_to_its_engine_first_then_to_any(scene: Scene) -> None:
    engine = scene.results(scene.caller.put(call(6, max_new_tokens=2)))[0].engine
    named = scene.caller.put(call(6, max_new_tokens=2, engine=engine, affinity_s=600.0))
    assert scene.results(named)[0].engine == engine
    left = scene.caller.put(call(7, max_new_tokens=2, engine=scene.ring.index, affinity_s=0.3))
    [answer] = scene.results(left)
    assert answer.engine == engine and answer.waited_s >= 0.3


def test_a_call_that_continues_another_computes_its_new_ids_alone(scene: Scene) -> None:
    ids = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], np.int32)
    for turn in range(5):
        [answer] = scene.results(scene.caller.put(ModelCall(ids, 6, uid=777, stream=turn)))
        assert answer.computed == (3 if turn else len(ids) - 1)
        ids = np.concatenate((ids, answer.ids, np.array([7, 8 + turn % 2, 1], np.int32)))


def test_a_stop_id_ends_the_answer_with_it(scene: Scene) -> None:
    [whole] = scene.answers(call(4))
    stop = whole[len(whole) // 2]
    [cut] = scene.answers(call(4, stop=(stop,)))
    assert cut == whole[: whole.index(stop) + 1]


@pytest.mark.slow  # an engine's start
def test_a_killed_engines_answer_is_the_same_from_its_next_start(scene: Scene) -> None:
    calls = [call(number) for number in range(3)]
    before = scene.answers(*calls)
    put = [scene.caller.put(ids) for ids in calls]
    scene.until("an engine at work", lambda: any(scene.is_generating(call.slot) for call in put))
    scene.kill("rollout/0")
    scene.start("rollout/0")
    assert [answer.ids.tolist() for answer in scene.results(*put)] == before
    assert scene.all_free()


def test_all_slots_are_free_after_a_killed_caller(scene: Scene) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", CALLER, scene.paths.calls_name], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"7\n"
    assert not scene.all_free()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    scene.emptied()
    assert [process.label for process in scene.ring.processes() if process.role == "agent"] == ["agent/0"]


def test_a_cancelled_call_is_left_by_its_engine(scene: Scene) -> None:
    answer = scene.caller.put(call(1))
    scene.until("an engine at work", lambda: scene.is_generating(answer.slot))
    scene.caller.cancel(answer)
    scene.ended(answer)
    assert isinstance(answer.error, CallUnanswered) and answer.error.code == "cancelled"
    waiting = [scene.caller.put(call(number)) for number in range(8)]
    for each in waiting:
        scene.caller.cancel(each)
    scene.ended(*waiting)
    scene.emptied()
    assert {each.error.code for each in waiting} == {"cancelled"}


def test_a_call_with_an_unknown_id_is_refused_and_the_engine_lives(scene: Scene) -> None:
    answer = scene.caller.put(ModelCall(np.array([1, 1 << 30], np.int32), 4))
    scene.ended(answer)
    with pytest.raises(CallUnanswered, match=f"token id {1 << 30}: the model knows 0 to") as refused:
        answer.result()
    assert refused.value.code == "refused" and scene.answers(call(0, max_new_tokens=2)) and scene.all_free()


def test_every_token_has_its_version_when_weights_change_during_a_call(scene: Scene) -> None:
    scene.publish(1, 1.0)
    scene.until("version 1", lambda: _versions(scene, 5) == {1})
    for version in range(2, 30):
        answer = scene.caller.put(call(5))
        scene.until("an engine at work", lambda answer=answer: answer.done or scene.is_generating(answer.slot))
        scene.publish(version, 1.0)
        versions = scene.results(answer)[0].versions
        assert (np.diff(versions.astype(int)) >= 0).all()
        if len(set(versions.tolist())) == 2:
            break
    assert set(versions.tolist()) == {version - 1, version}
    assert answer.result().step == version - 1, "the step of the oldest version comes with the answer"
    assert answer.result().ids.tolist() == scene.answers(call(5))[0], "the weights were the same, so the tokens are"


def _versions(scene: Scene, number: int) -> set[int]:
    return set(scene.results(scene.caller.put(call(number, max_new_tokens=1)))[0].versions.tolist())


def test_more_coroutines_than_slots_ask_and_a_late_call_names_its_holder(scene: Scene) -> None:
    async def many() -> list[list[int]]:
        async with scene.async_caller() as caller:
            asks = [caller.ask(call(n % 5, max_new_tokens=4), PATIENCE_S) for n in range(scene.ring.n_slots + 20)]
            answers = [answer.ids.tolist() for answer in await asyncio.gather(*asks)]
            with pytest.raises(CallUnanswered, match=r"no answer within 0\.02 s: slot \d+ is ") as late:
                await caller.ask(call(1), 0.02)
            assert late.value.code == "late"
            return answers

    answers = asyncio.run(many())
    assert answers == [answers[n % 5] for n in range(len(answers))]
    scene.emptied()


def test_a_stream_gives_the_answer_piece_by_piece_and_whole_without_messages(scene: Scene) -> None:
    [whole] = scene.answers(call(2))

    async def stream(heard: bool) -> tuple[list[list[int]], object]:
        async with scene.async_caller() as caller:
            listening = asyncio.ensure_future(listen(caller)) if heard else None
            pieces = [piece async for piece in caller.stream(call(2), PATIENCE_S)]
            if listening is not None:
                listening.cancel()
            return pieces[:-1], pieces[-1]

    async def listen(caller) -> None:
        while True:
            for message in scene.bus.drain():
                if isinstance(message, m.CallTokens):
                    caller.tokens(message)
            await asyncio.sleep(0.001)

    for heard in (True, False):
        pieces, answer = asyncio.run(stream(heard))
        assert [token for piece in pieces for token in piece] == answer.ids.tolist() == whole
        assert (len(pieces) > 1) == heard
