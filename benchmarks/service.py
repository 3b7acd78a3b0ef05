"""A service under load: CPU of the door with 1,000 samples in flight, MB/s of 5 MB bodies, heartbeats, a neighbour.

    python -m benchmarks service [--parts samples bodies neighbour kills learn] [--tinker-python PYTHON] [--json FILE]

A whole service of the tests' tiny model, and clients over HTTP in this process, which ask as the SDK does: a long poll
for each sampler, a request for each result. `heartbeat` is the longest of those that a client sends every 0.1 s
meanwhile, with this process's own delays in it. `bodies` come when tuner and engine have begun, and have a number that
nothing came before, so that nothing trains meanwhile. `neighbour`: a small step, alone and beside another owner, who
keeps eight requests waiting. `times` is by the clock; `times_tuner` in CPU seconds of the tuner while the step was
open: what the order of turns costs, without the wait for cores that clients, door and tuner share. `kills` is
tests/service/sdk/crash.py, `learn` the cookbook's rl_loop; both need the environment of `make tinker-env`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks import RESULTS, ROOT
from benchmarks.common import report, runs, sides
from busrl.service.keys import digest_of
from busrl.service.wire import CODES, counted, number, sized

CONFIG, SDK = ROOT / "configs" / "tinker.toml", ROOT / "tests" / "service" / "sdk"
PARTS = ("samples", "bodies", "neighbour", "kills", "learn")
NAME = "Qwen/Qwen3-8B"  # what the tests' tiny model is called
SEEDS = (0, 1, 2)
HEARTBEAT_S, WAIT_S, SDK_S = 0.1, 600.0, 3600.0
CONTEXT, SAMPLED = 512, 128
ADAM = {"learning_rate": 1e-3}
OTHER = "tml-other"  # the key of a second owner
Figures = dict[str, Any]


# -- a client -----


class Client:
    """A client of a service, with a session and one model."""

    def __init__(self, http: aiohttp.ClientSession, run: runs.BenchRun, url: str) -> None:
        self._http, self._run, self._url = http, run, url
        self.session = ""
        self.number = 0  # of the newest request of its one model

    @property
    def model(self) -> str:
        return f"{self.session}:train:0"

    async def post(self, path: str, body: bytes | None = None, **asked: Any) -> tuple[int, bytes]:
        """Status and content of the answer to a body, or to one of JSON."""
        sent = {"json": asked} if body is None else {"data": body}
        async with self._http.post(f"{self._url}/api/v1/{path}", **sent) as answer:  # type: ignore[arg-type]
            return answer.status, await answer.read()

    async def ask(self, path: str, body: bytes | None = None, **asked: Any) -> Any:
        """The answer to a request that is accepted, after a wait where the door asks for one."""
        end = time.monotonic() + WAIT_S
        while True:
            status, content = await self.post(path, body, **asked)
            if status == 200:
                return json.loads(content)
            if status != 429 or time.monotonic() > end:
                raise RuntimeError(f"{path}: {status} {content[:300]!r}")
            await asyncio.sleep(1.0)

    async def result(self, future: dict[str, Any]) -> bytes:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            status, content = await self.post("retrieve_future", request_id=future["request_id"])
            if status != 408:
                if status != 200 or content.startswith(b'{"error'):
                    raise RuntimeError(f"{future}: {status} {content[:300]!r}")
                return content
        raise RuntimeError(f"no answer to {future} within {WAIT_S:g} s\n{self._run.tail()}")

    async def forward_backward(self, data: Sequence[bytes], seq: int = 0) -> dict[str, Any]:
        self.number = seq or self.number + 1
        body = b"".join([sized(1, self.model.encode()), counted(2, self.number), *data, sized(4, b"cross_entropy")])
        future: dict[str, Any] = await self.ask("forward_backward", body)
        return future

    async def step(self) -> dict[str, Any]:
        self.number += 1
        future: dict[str, Any] = await self.ask(
            "optim_step", model_id=self.model, seq_id=self.number, adam_params=ADAM)
        return future

    async def sampler(self) -> str:
        """The id of a sampler with the weights of the model, which are its first request."""
        saved = await self.ask("save_weights_for_sampler", model_id=self.model, seq_id=1, sampling_session_seq_id=0)
        id: str = json.loads(await self.result(saved))["sampling_session_id"]
        return id

    async def sample(self, sampler: str, number: int, tokens: int) -> dict[str, Any]:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(range(5, 15)) * 6}]}
        future: dict[str, Any] = await self.ask("asample", sampling_session_id=sampler, seq_id=number, num_samples=1,
                                                prompt=prompt, sampling_params={"max_tokens": tokens})
        return future


@asynccontextmanager
async def clients(run: runs.BenchRun, *others: str) -> AsyncIterator[list[Client]]:
    """Clients of a service that has begun, each with a session and a model of its own: one with the run's key, and one
    with each other key."""
    about = run.until("the door", lambda: read(run.directory / "tinker.json"))
    url, opened = about["base_url"], []
    async with AsyncExitStack() as stack:
        for key in ((run.directory / "tinker.key").read_text(), *others):
            connector = aiohttp.TCPConnector(limit=0)
            http = aiohttp.ClientSession(connector=connector, headers={"X-API-Key": key})
            client = Client(await stack.enter_async_context(http), run, url)
            client.session = (await client.ask("create_session"))["session_id"]
            await client.ask("create_model", session_id=client.session, model_seq_id=0, base_model=NAME,
                             lora_config={"rank": 8, "train_unembed": False})
            opened.append(client)
        yield opened


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def data_of(count: int, tokens: int) -> list[bytes]:
    """Data for cross_entropy, each of that many tokens, as a client writes them."""
    ids = np.random.default_rng(0).integers(5, 20, tokens + 1)
    parts = sized(1, sized(1, sized(1, ids[:-1].astype(np.int32).tobytes())))
    for name, values in (("target_tokens", ids[1:]), ("weights", np.ones(tokens, np.float32))):
        tensor = sized(1, values.tobytes()) + counted(3, CODES[values.dtype]) + sized(4, number(tokens))
        parts += sized(2, sized(1, name.encode()), sized(2, tensor))
    return [sized(3, parts)] * count


# -- what is measured beside ------


class Beside:
    """Heartbeats of a session while something else happens, and what the door used: `figures` at the end."""

    def __init__(self, run: runs.BenchRun, client: Client) -> None:
        self._client = client
        self._door = sides.CpuOfTree(json.loads((run.directory / "tinker.json").read_text())["pid"])
        self._late: list[float] = []

    async def __aenter__(self) -> Beside:
        self._cpu_s, self._begun = self._door.now(), time.monotonic()
        self._beating = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(self, *problem: object) -> None:
        self.seconds, self.door_s = time.monotonic() - self._begun, self._door.now() - self._cpu_s
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            begun = time.monotonic()
            await self._client.ask("session_heartbeat", session_id=self._client.session)
            self._late.append(time.monotonic() - begun)
            await asyncio.sleep(HEARTBEAT_S)

    @property
    def figures(self) -> Figures:
        return {"seconds": round(self.seconds, 2), "door_share": round(self.door_s / self.seconds, 3),
                "heartbeat_s": round(max(self._late), 3), "heartbeat_median_s": round(statistics.median(self._late), 4)}


# -- parts -----


async def measure_samples(run: runs.BenchRun, at_once: int, seconds: float) -> Figures:
    """Keep that many requests of one sample in flight."""
    async with clients(run) as (client,):
        sampler = await client.sampler()
        numbers, end, answered = iter(range(1 << 30)), time.monotonic() + seconds, 0
        open_requests = asyncio.Semaphore(at_once)
        tasks: set[asyncio.Task[Any]] = set()

        async def ask() -> None:
            await client.sample(sampler, next(numbers), SAMPLED)

        async def take(name: str) -> None:
            await client.result({"request_id": name})
            open_requests.release()

        async def follow() -> None:
            nonlocal answered
            cursor = 0
            while True:
                news = await client.ask("retrieve_futures", target={"sampling_session_id": sampler}, prev_cursor=cursor)
                cursor, answered = news["cursor"], news["cursor"]
                tasks.update(asyncio.ensure_future(take(done["request_id"])) for done in news["completions"])

        async with Beside(run, client) as beside:
            following = asyncio.ensure_future(follow())
            while time.monotonic() < end:
                await asyncio.wait_for(open_requests.acquire(), WAIT_S)
                tasks.add(asyncio.ensure_future(ask()))
            following.cancel()
        await asyncio.gather(*tasks, following, return_exceptions=True)
        for task in tasks:
            task.result()
    return {"at_once": at_once, **beside.figures, "samples_per_s": round(answered / beside.seconds, 1),
            "door_ms_per_sample": round(1000 * beside.door_s / answered, 2)}


async def measure_bodies(run: runs.BenchRun, count: int, at_once: int, data: Sequence[bytes]) -> Figures:
    """Send requests of which none can be executed: their first number is missing."""
    async with clients(run) as (client,):
        await client.result(await client.sample(await client.sampler(), 0, 1))
        size, gate = sum(map(len, data)), asyncio.Semaphore(at_once)

        async def send(seq: int) -> None:
            async with gate:
                await client.forward_backward(data, seq)

        async with Beside(run, client) as beside:
            await asyncio.gather(*(send(3 + index) for index in range(count)))
    return {"body_mb": round(size / 1e6, 2), "data": len(data), "bodies": count, "at_once": at_once, **beside.figures,
            "mb_per_s": round(count * size / beside.seconds / 1e6, 1),
            "door_ms_per_body": round(1000 * beside.door_s / count, 1)}


async def measure_neighbour(run: runs.BenchRun, steps: int, waiting: int, heavy_data: Sequence[bytes]) -> Figures:
    """Seconds of a small step, alone and beside another owner who asks for much; and those of the tuner meanwhile."""
    light_data = data_of(8, 64)
    async with clients(run, OTHER) as (light, heavy):
        tuner = sides.CpuOfTree(run.until("the tuner", lambda: run.process("tuner")).pid)
        tuner.now()

        async def step() -> tuple[float, float]:
            begun, cpu_s = time.monotonic(), tuner.now(look=False)
            await light.forward_backward(light_data)
            await light.result(await light.step())
            return time.monotonic() - begun, tuner.now(look=False) - cpu_s

        async def ask_for_much() -> None:
            futures: list[dict[str, Any]] = []
            while True:
                futures.append(await heavy.forward_backward(heavy_data))
                if len(futures) >= waiting:
                    await heavy.result(futures.pop(0))

        await step()  # the model is made
        alone = [await step() for _ in range(steps)]
        asking = asyncio.ensure_future(ask_for_much())
        await step()
        beside = [await step() for _ in range(steps)]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    (alone_s, alone_tuner), (beside_s, beside_tuner) = (map(statistics.median, zip(*each)) for each in (alone, beside))
    return {"heavy_tokens": len(heavy_data) * 64, "alone_s": round(alone_s, 4), "beside_s": round(beside_s, 4),
            "beside_max_s": round(max(beside)[0], 4), "times": round(beside_s / alone_s, 2),
            "tuner_alone_s": round(alone_tuner, 4), "tuner_beside_s": round(beside_tuner, 4),
            "times_tuner": round(beside_tuner / alone_tuner, 2)}


def measure_kills(python: str, hub: Path, steps: int, every_s: float) -> Figures:
    """Run the same training undisturbed and under SIGKILLs."""
    busrl = Path(sys.executable).with_name("busrl")
    said = sdk(python, hub, SDK / "crash.py", busrl, CONFIG, hub / NAME, NAME, steps, every_s)
    figures: Figures = json.loads(said.splitlines()[-1])
    return {**figures, "every_s": every_s, "times": round(figures["rough_s"] / figures["calm_s"], 2)}


def measure_learn(python: str, hub: Path, seed: int, steps: int, settings: Sequence[str]) -> Figures:
    """Rewards of rl_loop, unmodified, on sums of two digits."""
    begins = json.loads(sdk(python, hub, SDK / "teach.py", seed).splitlines()[-1])
    with runs.run(*settings, config=CONFIG) as run:
        url = run.until("the door", lambda: read(run.directory / "tinker.json"))["base_url"]
        os.environ["TINKER_API_KEY"] = (run.directory / "tinker.key").read_text()
        begun, log = time.monotonic(), run.directory / "rl"
        sdk(python, hub, "-m", "tinker_cookbook.recipes.rl_loop", f"base_url={url}", f"log_path={log}", "batch_size=16",
            "group_size=8", "max_tokens=8", f"max_steps={steps}", "lora_rank=16", "learning_rate=3e-3",
            f"model_name={NAME}", "loss_fn=importance_sampling", "save_every=0")
        seconds = time.monotonic() - begun
        rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/total"] for row in rows if "reward/total" in row]
    return {"seed": seed, "taught": begins["reward"], "first": round(statistics.fmean(rewards[:3]), 3),
            "last": round(statistics.fmean(rewards[-10:]), 3), "steps": len(rewards),
            "step_s": round(seconds / len(rewards), 2), "rewards": [round(reward, 3) for reward in rewards]}


def sdk(python: str, hub: Path, *command: object) -> str:
    """Run a program in the SDK's environment and the hub's folder; returns what it printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(hub / "cache"), "OMP_NUM_THREADS": "1"}
    ended = sides.ran([python, *map(str, command)], cwd=hub, env=environment, timeout_s=SDK_S)
    if ended.code:
        raise RuntimeError(f"{command}: {ended.errors[-2000:]}")
    return ended.output


# -- the program -----


def make_hub(hub: Path, seed: int = 0) -> None:
    """A folder with the tiny model of the tests, and the recipes' data."""
    shutil.rmtree(hub, ignore_errors=True)
    hub.mkdir()
    sides.ran([sys.executable, str(SDK / "hub.py"), str(hub), str(seed)], check=True)


def measure(part: str, hub: Path, options: argparse.Namespace) -> Any:
    """Figures of a part."""
    settings = (f"model.path={hub / NAME}", f"tinker.base={NAME}", "tinker.port=0", f"tinker.context={CONTEXT}",
                "tinker.pending_mb=4096", "model.device=cpu", *options.set)
    if part == "samples":
        with runs.run(*settings, config=CONFIG) as run:
            return asyncio.run(measure_samples(run, options.at_once, options.seconds))
    if part == "kills":
        return measure_kills(options.tinker_python, hub, options.kill_steps, options.kill_s)
    rows: list[Figures] = []
    if part == "bodies":
        for wal, data in itertools.product(("sync", "async"), (data_of(1000, 312), data_of(610, 511))):
            with runs.run(*settings, f"learner.wal={wal}", config=CONFIG) as run:
                rows.append({"wal": wal, **asyncio.run(measure_bodies(run, 60, 8, data))})
    if part == "neighbour":
        config = hub / "two.toml"
        config.write_text(f'{CONFIG.read_text()}\n[[tinker.key]]\nname = "other"\ndigest = "{digest_of(OTHER)}"\n')
        for count in (8, 64, 1000):
            with runs.run(*settings, config=config) as run:
                rows.append(asyncio.run(measure_neighbour(run, options.small_steps, 8, data_of(count, 64))))
    if part == "learn":
        for seed in SEEDS:
            make_hub(hub, seed)
            rows.append(measure_learn(options.tinker_python, hub, seed, options.learn_steps, settings))
            print(json.dumps(rows[-1]), flush=True)  # if the next one fails
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:3]))
    parser.add_argument("--tinker-python", default=str(ROOT / ".venv" / "tinker" / "bin" / "python"))
    parser.add_argument("--at-once", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--small-steps", type=int, default=60)
    parser.add_argument("--kill-steps", type=int, default=100)
    parser.add_argument("--kill-s", type=float, default=1.2)
    parser.add_argument("--learn-steps", type=int, default=80)
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the topology")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    path = options.json or RESULTS / f"service_{os.cpu_count()}cores_{time.strftime('%Y-%m-%d')}.json"
    result: Figures = {"machine": report.machine(), "commit": report.commit(ROOT), "nice": os.nice(0)}
    if path.exists():  # parts may be measured one by one
        result = {**json.loads(path.read_text()), **result}
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="busrl-bench-") as folder:
            make_hub(Path(folder))
            load = os.getloadavg()[0]
            figures = measure(part, Path(folder), options)
        result[part] = {"date": time.strftime("%F %R"), "load_before": load, "figures": figures}
        print(json.dumps({part: result[part]}, indent=1), flush=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
