"""Episodes in real processes that are killed, hang, block or crash: each ends once, and no other pays for it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import msgspec
import numpy as np
import pytest

from busrl.agents.child import EpisodeSetup, user_line
from busrl.agents.episode import Call, EngineAnswer, Episode, Settings
from busrl.agents.parsers import MessageMaker, none
from busrl.agents.pool import Children, Played
from busrl.agents.renderer import Renderer
from busrl.errors import AgentNotLoaded
from busrl.states import Finish

AGENT = """
import asyncio, os, signal, subprocess, sys, threading, time
from busrl.agents.llm import Again, Failed

print("loaded, on stdout")
ALL = threading.Barrier(40)

class Wordless(Exception):
    def __str__(self): raise OSError("no words")

async def episode(task, llm):
    messages = [{"role": "user", "content": task["say"]}]
    if task["do"] == "note":
        try: await llm.chat(messages)
        finally: open(task["file"], "w").close()
    if task["do"] == "half": raise ValueError("\\ud800")
    if task["do"] == "half part": return {"\\ud800": 1.0}
    if task["do"] == "wordless": raise Wordless()
    if task["do"] == "half prompt": await llm.complete("\\ud800")
    for number in range(task.get("turns", 2)):
        messages += [await llm.chat(messages), {"role": "user", "content": "Go on."}]
        if task["do"] == "die" or task["do"] == "once" and first(task): os._exit(7)
    if task["do"] == "raise": raise ValueError("no such luck")
    if task["do"] == "again": raise Again("the site was down")
    if task["do"] == "hang": await asyncio.sleep(600)
    if task["do"] == "block": time.sleep(600)
    if task["do"] == "write": os.write(3, b"garbage"); [os.write(fd, b"garbage\\n") for fd in pipes()]
    if task["do"] == "orphan":
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(task["file"] + ".new", "w") as file: file.write(str(started.pid))
        os.rename(task["file"] + ".new", task["file"])
        await asyncio.sleep(600)
    return {"turns": task.get("turns", 2), "version": llm.version * 0.0}

def pipes():
    for fd in range(3, 20):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"): yield fd
        except OSError: pass

def first(task):
    if os.path.exists(task["file"]): return False
    open(task["file"], "w").close()
    return True

def threaded(task, llm):
    if task["do"] == "hang": time.sleep(600)
    if task["do"] == "together": return float(ALL.wait(60) >= 0)
    if task["do"] == "note":
        try: llm.chat([{"role": "user", "content": "A"}])
        finally: open(task["file"], "w").close()
    return float(len(llm.chat([{"role": "user", "content": task["say"]}])["content"]) > 0)

class Kept:
    def __init__(self): self.number = 0
    async def setup(self): self.number = 40
    async def episode(self, task, llm):
        await llm.chat([{"role": "user", "content": task["say"]}])
        self.number += 1
        return float(self.number)
    def close(self): open(os.environ["CLOSED"], "w").close()

class Empty: pass
class Broken:
    def setup(self): raise OSError("no disk")
    async def episode(self, task, llm): return 0.0
"""
LINE = next(number for number, line in enumerate(AGENT.split("\n"), 1) if "time.sleep(600)" in line)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return worlds.renderer(tmp_path_factory.mktemp("model"), "qwen2_5")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


class Desk:
    """Makes the calls of attempts, over an engine that answers at once; every attempt has a world that checks it."""

    def __init__(self, chat: Renderer) -> None:
        self.chat, self.worlds = chat, {}

    def begin(self) -> Episode:
        world = worlds.World(self.chat, random.Random(len(self.worlds)))

        async def engine(call: Call) -> EngineAnswer:
            await asyncio.sleep(0)
            ids = [*world.split("Some words."), self.chat.special_ids["<|im_end|>"]]
            scores = np.array([-world.random.random() for _ in ids], np.float32)
            world.log.append((tuple(call.prompt.tolist()), tuple(ids), tuple(map(float, scores))))
            return EngineAnswer(np.array(ids, np.int32), scores, np.full(len(ids), 3, np.uint32), Finish.EOS)

        episode = Episode(1, engine, self.chat, MessageMaker(none), Settings(100))
        world.tree = episode.tree
        self.worlds[episode] = world
        return episode

    async def play(self, children: Children, do: str, **task: Any) -> Played:
        played = await children.play(self.begin, msgspec.json.encode({"do": do, "say": "Hello.", **task}))
        wrong, lost, doubled, _ = self.worlds[played.episode].exact()
        assert (wrong, doubled) == (0, 0) and lost <= 0
        return played


def run(work: Callable[[Children, Desk], Coroutine[Any, Any, None]], chat: Renderer, folder: Path,
        function: str = "episode", count: int = 1, episode_s: float = 60.0) -> None:
    async def whole() -> None:
        children = Children(EpisodeSetup(f"agent.py:{function}", str(folder)), count, episode_s)
        await children.start()
        try:
            await work(children, Desk(chat))
        finally:
            await children.close()

    asyncio.run(whole())


def gone(pid: int) -> bool:
    """The process has ended (it may be a zombie of a parent that does not look)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_for(what: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.02)


def test_episodes_in_a_process_get_their_answers_and_end_with_their_reward(chat: Renderer, folder: Path) -> None:
    async def work(children: Children, desk: Desk) -> None:
        episodes = await asyncio.gather(*(desk.play(children, "well", turns=n % 3 + 1) for n in range(12)))
        assert [episode.ended.reward for episode in episodes] == [n % 3 + 1 for n in range(12)]
        assert all(episode.attempts == 1 and len(episode.episode.tree.sequences()) == 1 for episode in episodes)
        failed = await desk.play(children, "raise")
        assert failed.ended.how == "raised" and failed.ended.text.startswith("ValueError: no such luck (")
        assert "agent.py" in failed.ended.text and len(failed.episode.tree.turns) == 2
        again = await desk.play(children, "again")
        assert again.ended.how == "raised" and again.attempts == 3 and "begin again 3 times" in again.ended.text

    run(work, chat, folder, count=2)


def test_a_killed_process_costs_its_episodes_an_attempt_each(chat: Renderer, folder: Path) -> None:
    async def work(children: Children, desk: Desk) -> None:
        under_way = [asyncio.ensure_future(desk.play(children, "well", turns=40)) for _ in range(6)]
        while children.all[0].load < 6:
            await asyncio.sleep(0)
        os.kill(children.all[0].pid, signal.SIGKILL)
        episodes = await asyncio.gather(*under_way)
        assert all(episode.ended.reward == 40 and episode.attempts == 2 for episode in episodes)

    run(work, chat, folder)


@pytest.mark.slow
def test_processes_that_are_killed_again_and_again_lose_no_episode(chat: Renderer, folder: Path) -> None:
    async def work(children: Children, desk: Desk) -> None:
        chance, kills = random.Random(6), 0
        under_way = {asyncio.ensure_future(desk.play(children, "well", turns=n + 40)): n for n in range(12)}
        pending: set[Any] = set(under_way)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=chance.random() * 0.1)
            busy = [child for child in children.all if not child.lost]
            if busy and kills < 12:
                with contextlib.suppress(ProcessLookupError):  # it was killed a moment ago
                    os.kill(chance.choice(busy).pid, signal.SIGKILL)
                kills += 1
        for task, number in under_way.items():
            ended = task.result().ended
            assert ended.how == "crashed" or ended.reward == number + 40
        assert kills >= 4

    run(work, chat, folder, count=2)


def test_an_episode_alone_with_two_dying_processes_has_crashed_and_others_not(
    chat: Renderer, folder: Path
) -> None:
    async def work(children: Children, desk: Desk) -> None:
        bad, *good = await asyncio.gather(
            desk.play(children, "die"), *(desk.play(children, "well", turns=30) for _ in range(3)))
        assert bad.ended.how == "crashed" and bad.attempts in (2, 3) and "exit status 7" in bad.ended.text
        assert all(episode.ended.reward == 30 for episode in good)
        once = await desk.play(children, "once", file=str(folder / "once"))
        assert once.ended.reward == 2 and once.attempts == 2

    run(work, chat, folder)


@pytest.mark.parametrize("function, do", [
    ("episode", "block"), pytest.param("episode", "hang", marks=pytest.mark.slow),
    pytest.param("threaded", "hang", marks=pytest.mark.slow),
])
def test_an_episode_over_its_own_time_ends_and_the_others_do_not(
    chat: Renderer, folder: Path, function: str, do: str
) -> None:
    async def work(children: Children, desk: Desk) -> None:
        late = await desk.play(children, do)
        assert late.ended.how == "hung" and "agents.episode_s" in late.ended.text
        assert (f"agent.py:{LINE}, in episode" in late.ended.text) == (do == "block")
        assert (await desk.play(children, "well")).ended.how == "returned"

    run(work, chat, folder, function, episode_s=3.2)


def test_an_episode_that_writes_to_the_pipe_ends_itself_alone(chat: Renderer, folder: Path) -> None:
    async def work(children: Children, desk: Desk) -> None:
        assert (await desk.play(children, "write")).ended.how in ("crashed", "raised")
        assert (await desk.play(children, "well")).ended.how == "returned"

    run(work, chat, folder)


def test_what_user_code_started_ends_with_its_process(chat: Renderer, folder: Path) -> None:
    async def work(children: Children, desk: Desk) -> None:
        file = folder / "orphan"
        task = asyncio.ensure_future(desk.play(children, "orphan", file=str(file)))
        while not file.exists():
            await asyncio.sleep(0.02)
        child, pid = children.all[0].pid, int(file.read_text())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await children.close()
        assert gone(child)
        await asyncio.to_thread(wait_for, lambda: gone(pid))

    run(work, chat, folder)


def test_a_class_keeps_its_state_from_setup_to_close(
    chat: Renderer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOSED", str(folder / "closed"))

    async def work(children: Children, desk: Desk) -> None:
        assert [(await desk.play(children, "well")).ended.reward for _ in range(2)] == [41, 42]

    run(work, chat, folder, "Kept")
    assert (folder / "closed").exists()


@pytest.mark.parametrize("function, text", [
    ("missing", "has no 'missing'"), ("Empty", r"no method episode\(task, llm\)"), ("Broken", "OSError: no disk"),
])
def test_code_that_cannot_be_loaded_is_refused_with_the_cause(
    chat: Renderer, folder: Path, function: str, text: str
) -> None:
    async def work(children: Children, desk: Desk) -> None: ...

    with pytest.raises(AgentNotLoaded, match=text):
        run(work, chat, folder, function)


def test_an_engine_that_fails_is_told_to_who_plays_the_episode(chat: Renderer, folder: Path) -> None:
    async def work(children: Children, desk: Desk) -> None:
        async def engine(call: Call) -> EngineAnswer:
            raise ConnectionError("no engine")

        with pytest.raises(ConnectionError):
            await children.play(lambda: Episode(1, engine, chat, MessageMaker(none), Settings(100)),
                                msgspec.json.encode({"do": "well", "say": "A"}))
        assert (await desk.play(children, "well")).ended.how == "returned"

    run(work, chat, folder)


@pytest.mark.parametrize("function", ["episode", "threaded"])
def test_an_episode_whose_engine_fails_does_not_wait_for_ever(chat: Renderer, folder: Path, function: str) -> None:
    async def work(children: Children, desk: Desk) -> None:
        async def engine(call: Call) -> EngineAnswer:
            raise ConnectionError("no engine")

        file = folder / "left"
        with pytest.raises(ConnectionError):
            await children.play(lambda: Episode(1, engine, chat, MessageMaker(none), Settings(100)),
                                msgspec.json.encode({"do": "note", "say": "A", "file": str(file)}))
        await asyncio.to_thread(wait_for, file.exists)

    run(work, chat, folder, function)


@pytest.mark.parametrize("do, how, text", [
    ("half", "raised", r"ValueError: \ud800"), ("half part", "returned", ""),
    ("wordless", "raised", "could not be told"), ("half prompt", "raised", "prompt holds half of a character"),
])
def test_an_end_whose_text_cannot_be_sent_is_still_an_end(
    chat: Renderer, folder: Path, do: str, how: str, text: str
) -> None:
    async def work(children: Children, desk: Desk) -> None:
        ended = (await desk.play(children, do)).ended
        assert ended.how == how and text in ended.text
        assert do != "half part" or ended.parts == {r"\ud800": 1.0}

    run(work, chat, folder)


def test_every_episode_that_does_not_await_has_a_thread(chat: Renderer, folder: Path) -> None:
    """Forty that wait for each other, which is more than a loop's own threads on any machine."""
    async def work(children: Children, desk: Desk) -> None:
        episodes = await asyncio.gather(*(desk.play(children, "together") for _ in range(40)))
        assert [episode.ended.reward for episode in episodes] == [1.0] * 40

    run(work, chat, folder, "threaded")


def test_as_many_children_start_as_were_asked_for(chat: Renderer, folder: Path) -> None:
    async def work(children: Children, desk: Desk) -> None:
        assert len({child.pid for child in children.all}) == 2

    run(work, chat, folder, count=2)


def test_the_place_where_code_of_a_package_blocks_is_named() -> None:
    names: dict[str, Any] = {"__name__": "mine.deep"}
    exec(compile("def episode(library):\n    return library()", "/at/deep.py", "exec"), names)

    assert names["episode"](lambda: user_line(inspect.currentframe(), "mine")) == "deep.py:2, in episode"
    assert names["episode"](lambda: user_line(inspect.currentframe(), "other")).startswith("test_pool.py:")


PARENT = """
import asyncio, sys, msgspec
from busrl.agents.child import EpisodeSetup
from busrl.agents.pool import Children

async def main():
    children = Children(EpisodeSetup("agent.py:episode", sys.argv[1]), 1, 60.0)
    await children.start()
    print(children.all[0].pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_children_end_with_a_parent_that_is_killed(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_for(lambda: gone(child))
