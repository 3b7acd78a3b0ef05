"""Episodes that wait in tools, with an engine without a model: rows busy, calls per second, CPU of a call, memory.

    python -m benchmarks agents-wait [--episodes 4096] [--rows 128] [--tool 2] [--answer 0.5] [--seconds 20]
    python -m benchmarks agents-wait --episodes 32 --rows 32 --tool 0 --answer 0     # calls per second of llm.chat
    python -m benchmarks agents-wait --episodes 1 --rows 1 --tool 0 --answer 0       # what a call costs, alone

The engine is a process of its own: it claims as many calls as it has rows free, and answers each after `--answer`
seconds with 32 tokens. `rows busy` is over the time from the first full engine to the end; `added` the median of a call
in the user's code, less the engine's time; CPU and RSS are those of the process that has trees, calls and pipes, as the
role `agent` does, and RSS of the children beside it. Episodes take four turns of chat, then others begin.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.agents import renderer
from busrl.agents.child import EpisodeSetup
from busrl.agents.episode import Call, EngineAnswer, Episode, Settings
from busrl.agents.parsers import MessageMaker, parser_of
from busrl.agents.pool import Children
from busrl.ring import NO_SEGMENT, Ring, State
from busrl.ring.calls import AsyncCaller, ModelCall, read_ids, write_answer

TOKENS, TURNS = 32, 4
PLAY = '''
import asyncio, statistics, time

async def episode(task, llm):
    """Four turns; the reward is the median time of a call."""
    messages, took = [{"role": "user", "content": "Go."}], []
    for turn in range(4):
        begun = time.monotonic()
        messages.append(await llm.chat(messages))
        took.append(time.monotonic() - begun)
        if task["tool"]:
            await asyncio.sleep(task["tool"])
        messages.append({"role": "user", "content": f"Result {turn}."})
    return statistics.median(took)
'''


def engine(name: str, rows: int, answer_s: float, ready, busy) -> None:
    """Answers until it is killed; `busy`: when all rows were in use first, and seconds of rows since."""
    ring = Ring.attach(name, calls=True)
    ring.register("rollout", "rollout/0")
    drawn, versions = np.arange(3, 3 + TOKENS, dtype=np.int32), np.zeros(TOKENS, np.uint32)
    logprobs, running, before = np.full(TOKENS, -0.5, np.float32), [], time.monotonic()
    ready.set()
    while True:
        now = time.monotonic()
        busy[1] += len(running) * (now - before) if busy[0] else 0.0
        before = now
        while running and running[0][0] <= now:
            _, slot, word, claimed = heapq.heappop(running)
            write_answer(ring, slot, word, drawn, logprobs, versions, 1, claimed, 0)
        wait = min(0.05, running[0][0] - now) if running else 0.05
        room = rows - len(running)
        taken = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=room, max_attempt=255,
                          timeout_s=wait) if room else []
        for slot, word in taken:
            read_ids(ring, slot, "prompt_ids", NO_SEGMENT)
            heapq.heappush(running, (time.monotonic() + answer_s, slot, word, time.monotonic_ns()))
        if not room:
            time.sleep(max(0.0, wait))
            busy[0] = busy[0] or time.monotonic()


def memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


async def play(options: argparse.Namespace, ring: Ring, folder: Path, busy) -> None:
    (folder / "play.py").write_text(PLAY)
    chat, maker = renderer(folder), MessageMaker(parser_of("none", "", "."))
    children = Children(EpisodeSetup("play.py:episode", str(folder)), options.children, 600.0)
    await children.start()
    task, calls, ends, took = f'{{"tool": {options.tool}}}'.encode(), 0, [], []
    stop = time.monotonic() + options.seconds

    async with AsyncCaller(ring, lambda message, to: None) as caller:
        async def ask(call: Call) -> EngineAnswer:
            nonlocal calls
            answer = await caller.ask(ModelCall(call.prompt, TOKENS, uid=call.uid, stream=call.stream), 600.0)
            calls += 1
            return EngineAnswer(answer.ids, answer.logprobs, answer.versions, answer.finish)

        async def episodes_of(uid: int) -> None:
            while time.monotonic() < stop:
                played = await children.play(lambda: Episode(uid, ask, chat, maker, Settings(TOKENS)), task)
                ends.append(played.ended.how)
                took.append(played.ended.reward)

        playing = [asyncio.ensure_future(episodes_of(uid)) for uid in range(options.episodes)]
        begun, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(options.seconds)
        seconds, used = time.monotonic() - begun, time.process_time() - cpu
        full, rows_s = busy[0], busy[1]
        here, theirs = memory_mib(os.getpid()), [memory_mib(child.pid) for child in children.all]
        for each in playing:
            each.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
    share = f"{rows_s / (options.rows * (time.monotonic() - full)):.1%}" if full else "never full"
    added = f"{1e3 * (statistics.median(took) - options.answer):.2f} ms" if took else "-"
    print(f"{options.episodes} episodes, {options.rows} rows: rows busy {share}, {calls / seconds:.0f} calls/s, "
          f"{1e3 * used / max(1, calls):.2f} ms of CPU each, added {added}, RSS {here:.0f} MiB, children "
          f"{', '.join(f'{mib:.0f}' for mib in theirs)} MiB; ended {len(ends)}, not by returning "
          f"{sum(how != 'returned' for how in ends)}")
    await children.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in (("episodes", 4096), ("rows", 128), ("children", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, seconds in (("tool", 2.0), ("answer", 0.5), ("seconds", 20.0)):
        parser.add_argument(f"--{name}", type=float, default=seconds)
    options = parser.parse_args()
    name = f"busrl.bench.{os.getpid()}.calls"
    slots = options.rows * 5 // 4 + 16
    ring = Ring.create(name, slots=slots, slot_bytes=16384, processes=8, uuid=bytes(16), calls=True)
    ring.register("agent", "agent/0")
    ready, busy = multiprocessing.Event(), multiprocessing.Array("d", 2, lock=False)
    child = multiprocessing.Process(target=engine, args=(name, options.rows, options.answer, ready, busy), daemon=True)
    child.start()
    try:
        if not ready.wait(60.0):
            sys.exit("the engine's process did not start within 60 s")
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(play(options, ring, Path(folder), busy))
    finally:
        child.kill()
        Ring.unlink(name)
        ring.close()
