"""Programs that play episodes: real processes at a real door, and what becomes of each kind of end."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import agent_worlds as worlds
import pytest
from agent_worlds import Engine, of

from busrl.agents.http import EpisodeServer
from busrl.agents.llm import Ended
from busrl.agents.pool import Played, Programs, verdict_of
from busrl.errors import CallUnanswered

ASKS = '''
import json, os, sys, urllib.request

def ask(prompt):
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/completions"
    body = json.dumps({"prompt": prompt, "max_tokens": 5}).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))["choices"][0]["text"]

task = json.load(open(os.environ["BUSRL_TASK"]))
'''


@pytest.fixture
def played(tmp_path: Path) -> Callable[..., tuple[Played, list[Engine]]]:
    chat = worlds.renderer(tmp_path / "model", "qwen2_5")

    def run(code: str, episode_s: float = 30.0, fails: bool = False) -> tuple[Played, list[Engine]]:
        (tmp_path / "program.py").write_text(ASKS + code)
        programs = Programs([sys.executable, "{here}/program.py"], str(tmp_path), tmp_path, episode_s)
        engines: list[Engine] = []

        async def unanswered(call: object) -> object:
            raise CallUnanswered("late", "no engine")

        async def main() -> Played:
            async with EpisodeServer(4096, chat, "override") as door:
                def begin() -> object:
                    episode, engine = of(chat)
                    if fails:
                        engine.instead = unanswered  # type: ignore[assignment]
                    engines.append(engine)
                    door.open(episode)
                    return episode

                return await programs.play(begin, b'{"prompt": "One."}')  # type: ignore[arg-type]

        return asyncio.run(main()), engines

    return run


def test_a_program_asks_its_model_and_says_its_reward(played: Callable[..., tuple[Played, list[Engine]]]) -> None:
    result, (engine,) = played('print("first", ask(task["prompt"]), ask("Two."))\nprint(json.dumps({"reward": '
                              '{"right": 0.5, "form": 0.25}}))')
    assert result.ended == Ended("returned", 0.75, {"right": 0.5, "form": 0.25})
    assert len(result.episode.tree.turns) == 2 and engine.world.exact() == (0, 0, 0, 0)


def test_a_program_may_begin_again_with_a_new_episode_three_times(
    played: Callable[..., tuple[Played, list[Engine]]]
) -> None:
    result, engines = played('ask("x")\nprint(json.dumps({"again": True, "why": "no luck"}))')
    assert result.ended.how == "raised" and "no luck" in result.ended.text
    assert len(engines) == result.attempts == 3 and len(result.episode.tree.turns) == 1


def test_a_program_that_takes_too_long_is_killed_with_what_it_started(
    played: Callable[..., tuple[Played, list[Engine]]], tmp_path: Path
) -> None:
    code = 'import subprocess\nopen("pid", "w").write(str(subprocess.Popen(["sleep", "600"]).pid))\nsys.stdin.read()\n'
    result, _ = played(code + 'import time\ntime.sleep(600)', episode_s=3.0)
    assert result.ended.how == "hung"
    await_end_of(int((tmp_path / "pid").read_text()))


def await_end_of(pid: int) -> None:
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until, "what it had started still lives"
        time.sleep(0.01)


def test_a_session_that_a_program_leaves_ends_with_its_episode(
    played: Callable[..., tuple[Played, list[Engine]]], tmp_path: Path
) -> None:
    code = "import subprocess\nleft = subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3)\n"
    result, _ = played(code + 'open("pid", "w").write(str(left.pid))\nprint(json.dumps({"reward": 1}))')
    assert result.ended.how == "returned"
    await_end_of(int((tmp_path / "pid").read_text()))


def test_an_engine_without_an_answer_ends_the_program_not_the_sample(
    played: Callable[..., tuple[Played, list[Engine]]]
) -> None:
    with pytest.raises(CallUnanswered, match="no engine"):
        played('ask("x")\nprint(json.dumps({"reward": 1}))', fails=True)


@pytest.mark.parametrize(("status", "output", "how", "words"), [
    (0, b'log\n{"reward": 2}\n\n', "returned", ""),
    (0, b'{"reward": -1, "failed": true, "why": "gave up"}', "failed", "gave up"),
    (0, b'{"failed": true}', "used_up", ""),
    (0, b"done", "malformed", "must be JSON"),
    (0, b"", "malformed", "must be JSON"),
    (0, b'{"rewards": 1}', "malformed", "no reward"),
    (0, b'{"reward": "high"}', "malformed", "reward"),
    (3, b'{"reward": 1}', "raised", "exit status 3"),
    (-9, b"half a li", "raised", "SIGKILL"),
    (0, b'{"reward": 1e400}', "malformed", ""),
    (0, b"\xff\xfe", "malformed", "must be JSON"),
])
def test_the_last_line_and_the_exit_status_say_how_a_program_ended(
    status: int, output: bytes, how: str, words: str
) -> None:
    ended = verdict_of(status, output)
    assert ended.how == how and words in ended.text
