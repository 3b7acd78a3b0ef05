"""Model calls over HTTP: calls per second of one server process, and what it adds to a call's time.

    python -m benchmarks serve [--turns 4 40] [--calls 2000] [--at-once 32] [--rounds 3] [--loops asyncio uvloop]

A server process holds the door of `busrl.agents.http` over episodes whose engine answers at once with 16 ids; a client
process plays whole conversations over kept connections, each call with all of its history. Reported: calls a second by
the clock, calls per CPU second of the server (on a machine that others use the better figure), and the median time of
a call that is alone, engine included. No slots, no ring: those are measured by `calls`. With several `--loops` the
servers of a round run one after the other; the client's loop stays asyncio's.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.agents import renderer
from benchmarks.common import report
from busrl.agents.episode import Call, EngineAnswer, Episode, Settings
from busrl.agents.http import EpisodeServer
from busrl.agents.parsers import MessageMaker, hermes
from busrl.data.episodes import EpisodeLimits
from busrl.states import Finish

WORDS = "The next thing to look at is what came of it, in as few words as will do."


def runner(loop: str) -> Any:
    """`run` of asyncio, or of uvloop, which is no dependency of busrl: pip install uvloop."""
    return importlib.import_module(loop).run


def serve(pipe: Any, episodes: int, loop: str) -> None:
    """The server: sends its keys, waits for the end, sends its CPU seconds."""
    folder = tempfile.TemporaryDirectory()
    chat = renderer(Path(folder.name))
    drawn = np.array([*chat.encode(WORDS)[:15], 1], np.int32)

    async def engine(call: Call) -> EngineAnswer:
        return EngineAnswer(drawn, np.full(len(drawn), -1, np.float32), np.zeros(len(drawn), np.uint32), Finish.EOS)

    async def run() -> None:
        async with EpisodeServer(1 << 20, chat, "override") as door:
            settings = Settings(16, EpisodeLimits())
            opened = [Episode(number, engine, chat, MessageMaker(hermes), settings) for number in range(episodes)]
            for episode in opened:
                door.open(episode)
            pipe.send([episode.openai for episode in opened])
            begun = time.process_time()
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            pipe.send(time.process_time() - begun)

    runner(loop)(run())


async def play(doors: list[dict[str, str]], turns: int, at_once: int) -> tuple[float, list[float]]:
    """Seconds of all conversations, and of each call."""
    import aiohttp

    times: list[float] = []

    async def work(session: aiohttp.ClientSession, left: list[dict[str, str]]) -> None:
        while left:
            door = left.pop()
            url, head = f"{door['base_url']}/chat/completions", {"Authorization": f"Bearer {door['api_key']}"}
            messages: list[Any] = [{"role": "user", "content": WORDS}]
            for _ in range(turns):
                begun = time.perf_counter()
                async with session.post(url, json={"model": "policy", "messages": messages}, headers=head) as answer:
                    message = (await answer.json())["choices"][0]["message"]
                times.append(time.perf_counter() - begun)
                messages += [message, {"role": "user", "content": WORDS}]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begun, left = time.perf_counter(), list(doors)
        await asyncio.gather(*(work(session, left) for _ in range(at_once)))
        return time.perf_counter() - begun, times


def once(turns: int, calls: int, at_once: int, loop: str) -> dict[str, float]:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, max(1, calls // turns), loop))
    server.start()
    doors = ours.recv()
    seconds, times = asyncio.run(play(doors, turns, at_once))
    ours.send("end")
    spent = ours.recv()
    server.join(30)
    return {"calls_per_s": len(times) / seconds, "calls_per_cpu_s": len(times) / spent,
            "cpu_ms_per_call": 1000 * spent / len(times),
            "median_ms": 1000 * statistics.median(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 40])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loops", nargs="+", choices=("asyncio", "uvloop"), default=["asyncio"])
    options = parser.parse_args()
    rows = []
    for turns in options.turns:
        for at_once in (options.at_once, 1):
            count = options.calls if at_once > 1 else options.calls // 8
            rounds = [
                {loop: once(turns, count, at_once, loop) for loop in options.loops} for _ in range(options.rounds)
            ]
            for loop in options.loops:
                runs = [by_loop[loop] for by_loop in rounds]
                rows.append({"turns": turns, "at once": at_once, "loop": loop,
                             **{name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}})
    result = {"machine": report.machine(), "load": os.getloadavg()[0], "commit": report.commit(ROOT), "rows": rows}
    print(json.dumps(result, indent=1))
