"""A life of vLLM: its arguments and environment, calls with a deadline, the notice of its death, and an end that leaves
nothing behind.

Used by the vLLM engine, whose caller is synchronous. Talks to AsyncLLM, which runs in a thread with its own loop, and
to the kernel about vLLM's processes. Imports vLLM inside functions only. Knows nothing of requests, weights or the bus.

- The abilities of a vLLM are read off its objects (`inspect.signature`, attributes), never off its version number.
- Every call races the death of the engine and a deadline: vLLM alone would wait for a dead engine for ever.
- A dead or silent engine is killed with all of its processes before the error is raised, so that our own process can
  end: at its end Python waits for living children, even for stopped ones.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone  # of its own before Python 3.11
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from busrl.engines.vllm_versions import CPU_BLOCK, FIRST_ROUTE, NATIVE_ROUTES, lora_rank, vllm_installed, vllm_objection
from busrl.errors import EngineLost, UserError
from busrl.system.guardian import stat_of
from busrl.topology.kinds import ADAPTERS
from busrl.topology.learner import Routing
from busrl.topology.schema import Vllm
from busrl.topology.sizes import adapter_slots

if TYPE_CHECKING:
    from busrl.topology import Topology

T = TypeVar("T")
log = logging.getLogger("busrl")
CPU_CACHE_MB = 16  # the least: some blocks of any model
EXTENSION = "busrl.engines.vllm.worker.Extension"
CALLED = ("generate", "abort", "collective_rpc", "pause_generation", "resume_generation", "reset_prefix_cache")
STATES = {"R": "running", "S": "asleep", "D": "waiting for a device", "T": "stopped", "Z": "dead", "X": "dead"}
GONE_S = 5.0  # a killed process is gone by then, with the memory of its device


# -- how vLLM is started -----

@dataclass(frozen=True)
class Start:
    """The arguments of one start of vLLM, as plain data."""

    model: str
    dtype: str
    capacity: int
    max_length: int
    settings: Vllm = field(default_factory=Vllm)
    seed: int = 0
    lora_rank: int = 0  # 0 = no adapters
    adapters: int = 0
    extension: str = EXTENSION
    routing: Routing | None = None  # the shape of the routes that every answer comes with; None: without any

    @classmethod
    def of(cls, topology: Topology) -> Start:
        settings, model = topology.vllm, topology.model
        # Any other transport brings merged weights, and a vLLM with places for adapters could not load them: it wraps
        # the layers that adapters change.
        rank = topology.lora.rank if topology.weights.transport in ADAPTERS else 0
        return cls(
            model.path, model.dtype, capacity=topology.generation.max_batch,
            max_length=settings.max_model_len or topology.longest, settings=settings, seed=topology.run.seed,
            lora_rank=lora_rank(rank) if rank else 0, adapters=adapter_slots(topology) if rank else 0,
            routing=topology.derived.routing,
        )


@dataclass(frozen=True)
class Abilities:
    """Abilities of the installed vLLM."""

    weight_version: bool  # reports for every token the version of the weights that drew it
    bare_pause: bool  # has the engine's own pause, without the 20 ms that the front end adds


def require() -> str:
    """The version of the installed vLLM; UserError if there is none, or one that busrl does not support."""
    package, version = vllm_installed()
    why, remedy = vllm_objection(package, version)
    if why:
        raise UserError(f'engine = "vllm": {why}; {remedy}')
    return version


def abilities_of(engine: Any, version: str) -> Abilities:
    """Look at the engine itself. UserError names a method that it lacks and nothing replaces."""
    for name in CALLED:
        if not callable(getattr(engine, name, None)):
            raise UserError(f'engine = "vllm": vLLM {version} has no AsyncLLM.{name}; see docs/vllm.md')
    if "clear_cache" not in inspect.signature(engine.pause_generation).parameters:
        raise UserError(f'engine = "vllm": pause_generation of vLLM {version} has no clear_cache; see docs/vllm.md')
    bare = getattr(engine.engine_core, "pause_scheduler_async", None)
    return Abilities(
        weight_version=callable(getattr(engine, "update_weight_version", None)),
        bare_pause=callable(bare) and {"mode", "clear_cache"} <= inspect.signature(bare).parameters.keys(),
    )


def make(start: Start, record: Callable[[float], None]) -> Any:
    """Make an AsyncLLM, in the loop that will run it. UserError if vLLM refuses the arguments. `record` gets the share
    of the key-value cache in use after every step, if this vLLM reports it."""
    # This process has threads: a fork of it could hang. A user's other variables stay as they are.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    _set_defaults(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1")
    if cpu := on_a_cpu():
        # One process for engine and worker, whose threads are those of [[process]] threads and bound to no core.
        _set_defaults(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
        if _eager(start.settings, cpu):  # helpers of its sampler would still call a C++ compiler at the first token
            _set_defaults(TORCH_COMPILE_DISABLE="1")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = _arguments(start, cpu)
    parameters = inspect.signature(AsyncEngineArgs).parameters
    if unknown := sorted(arguments.keys() - parameters.keys()):
        where = "vllm.extra" if unknown[0] in start.settings.extra else 'engine = "vllm"'
        raise UserError(f"{where}: the engine of vLLM {require()} has no argument {unknown[0]!r}; see docs/vllm.md")
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[_logger(record)])


def on_a_cpu() -> bool:
    """Tell whether the vLLM of this Python works on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def skips_routes() -> bool:
    """Tell whether a request of this vLLM may say that it has the routes of its first tokens."""
    from vllm import SamplingParams

    return FIRST_ROUTE in inspect.signature(SamplingParams).parameters


def _logger(report: Callable[[float], None]) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any = None, *args: Any, **more: Any) -> None:
            if scheduler_stats is not None:
                report(float(getattr(scheduler_stats, "kv_cache_usage", 0.0) or 0.0))

        def log_engine_initialized(self) -> None: ...

    return Logger


def _set_defaults(**variables: str) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _eager(settings: Vllm, cpu: bool) -> bool:
    return settings.enforce_eager == "on" or (settings.enforce_eager == "auto" and cpu)


def _arguments(start: Start, cpu: bool) -> dict[str, Any]:
    """The arguments of vLLM's engine."""
    settings = start.settings
    arguments: dict[str, Any] = {
        "model": start.model,
        "tokenizer": start.model,
        "dtype": start.dtype,
        "max_model_len": start.max_length,
        "max_num_seqs": start.capacity,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": _eager(settings, cpu),
        "seed": start.seed,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # every request has all settings of sampling
        "logprobs_mode": "processed_logprobs",  # of the distribution drawn from
        "enable_prefix_caching": True,
        "worker_extension_cls": start.extension,
        "disable_log_stats": True,
    }
    if not cpu:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    cache_mb = settings.kv_cache_mb if settings.kv_cache_mb != "auto" else _cpu_cache_mb(start) if cpu else 0
    if cache_mb:
        arguments["kv_cache_memory_bytes"] = int(cache_mb) << 20
    if settings.block_size or cpu:  # whole blocks are cached, so the smallest caches most
        arguments["block_size"] = settings.block_size or CPU_BLOCK
    if start.lora_rank:
        arguments |= {"enable_lora": True, "max_lora_rank": start.lora_rank, "max_loras": start.adapters}
        arguments["max_cpu_loras"] = start.adapters
    if start.routing and not cpu:  # where our own extension notes them
        arguments[NATIVE_ROUTES] = True
    return arguments | {name: _value_of(text) for name, text in sorted(settings.extra.items())}


def _cpu_cache_mb(start: Start) -> int:
    """MB of the cache for `capacity` sequences of full length, with heads as wide as the kernels need them."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(start.model, local_files_only=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 4 if start.dtype == "float32" else 2
    positions = start.capacity * -(-start.max_length // CPU_BLOCK) * CPU_BLOCK
    needed: int = positions * config.num_hidden_layers * heads * max(head, 32) * 2 * size
    return max(CPU_CACHE_MB, -(-needed // (1 << 20)))


def _value_of(text: str) -> Any:
    """The value of an extra argument: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# -- its life -----

class Core:
    """A life of vLLM, with the deadlines of `start.settings`. Raises EngineLost from every method.
    starting -> running -> closed; and from each of the first two -> dead, whose cause `lost` holds."""

    def __init__(self, start: Start, record: Callable[[float], None]) -> None:
        self.version = require()
        self.lost = ""  # the cause of its death
        self._settings = start.settings
        self._before = {child.pid for child in multiprocessing.active_children()}
        self._pidfds: dict[int, int] = {}
        self._closed = False
        self._death = asyncio.Event()
        self.on_death: Callable[[], None] = lambda: None
        self.loop = asyncio.new_event_loop()
        self._started: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(start, record), name="vllm", daemon=True)
        begun = time.monotonic()
        self._thread.start()
        atexit.register(self.close)
        self.engine: Any = self._wait_for_start(self._settings.start_s)
        self.abilities: Abilities = abilities_of(self.engine, self.version)
        self._find()
        if not self._pidfds:
            raise self.lose("vLLM's engine has no process")
        threading.Thread(target=self._wait_for_death, name="vllm watch", daemon=True).start()
        log.info("vLLM %s is up after %.1f s, engine pids %s", self.version, time.monotonic() - begun, self.pids())

    # -- calls -----

    def call(self, what: str, make_awaitable: Callable[[], Awaitable[T]], timeout_s: float = 0.0) -> T:
        """Await `what` in the loop, from another thread. EngineLost names the engine, `what` and the seconds."""
        self.check()
        limit = timeout_s or self._settings.rpc_s
        future = asyncio.run_coroutine_threadsafe(self._race(what, make_awaitable, limit), self.loop)
        try:
            return future.result(limit + GONE_S)
        except NotDone:  # the loop itself is stuck
            future.cancel()
            raise self.lose(f"vLLM's loop did not turn for {limit + GONE_S:g} s during {what}") from None

    def rpc(self, method: str, *args: Any, timeout_s: float = 0.0) -> list[Any]:
        """Call a method of every worker; one result per rank."""
        return self.call(method, lambda: self.engine.collective_rpc(method, args=args), timeout_s)

    def check(self) -> None:
        """EngineLost if the engine is dead or closed."""
        if self.lost:
            raise EngineLost(self.lost)
        if self._closed:
            raise EngineLost("vLLM was closed")

    def lose(self, why: str) -> EngineLost:
        """Give the engine up: kill all of its processes. Returns the error to raise."""
        if not self.lost:
            self.lost = why
            log.error("%s; its processes are killed", why)
        self._kill()
        return EngineLost(self.lost)

    @property
    def over(self) -> bool:
        """True once it is ending or dead: from then on an error of a request is no fault of the request."""
        return self._closed or bool(self.lost)

    def describe(self) -> str:
        """The engine's processes and their states in the kernel, for errors."""
        return ", ".join(f"pid {pid} is {_state(pid)}" for pid in self.pids()) or "it has no process"

    def cache_capacity(self) -> int:
        """Positions of vLLM's key-value cache; 0 if it does not report them."""
        cache = getattr(getattr(self.engine, "vllm_config", None), "cache_config", None)
        return int((getattr(cache, "num_gpu_blocks", 0) or 0) * (getattr(cache, "block_size", 0) or 0))

    def pids(self) -> list[int]:
        """Processes that vLLM started here and that were alive when it was up."""
        return sorted(self._pidfds)

    async def dies(self, within_s: float) -> bool:
        """Await the notice of the engine's death in the loop, for at most that long; True if it came."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._death.wait(), within_s)
        return self._death.is_set()

    async def _race(self, what: str, make_awaitable: Callable[[], Awaitable[T]], limit_s: float) -> T:
        work = asyncio.ensure_future(make_awaitable())
        death = asyncio.ensure_future(self._death.wait())
        done, _ = await asyncio.wait({work, death}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if work in done and not (self._death.is_set() and work.exception()) and not is_death(work.exception()):
            return work.result()
        work.cancel()
        if self._death.is_set() or work in done:
            raise self.lose(f"vLLM's engine died during {what}: {self.lost or self.describe()}")
        raise self.lose(f"vLLM's engine did not answer {what} within {limit_s:g} s; {self.describe()}")

    # -- life -----

    def _run(self, start: Start, record: Callable[[float], None]) -> None:
        asyncio.set_event_loop(self.loop)

        async def begin() -> None:
            try:
                self._started.set_result(make(start, record))
            except BaseException as problem:
                self._started.set_exception(problem)

        self.loop.run_until_complete(begin())
        if self._started.exception() is None:
            self.loop.run_forever()
        with contextlib.suppress(Exception):
            self.loop.run_until_complete(self._cancel_all())
        self.loop.close()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _wait_for_start(self, limit_s: float) -> Any:
        try:
            return self._started.result(limit_s)
        except NotDone:
            self._find()
            raise self.lose(f"vLLM {self.version} did not start within {limit_s:g} s; {self.describe()}") from None
        except Exception as problem:
            self._find()
            self._kill()
            self._closed = True
            if isinstance(problem, (RuntimeError, OSError, AssertionError)):
                text = f"vLLM {self.version} did not start: {problem}; its own messages are above in this log"
                raise EngineLost(text) from problem
            raise

    def _find(self) -> None:
        """Open a pidfd of every process that vLLM has started, so that no pid can become another process's."""
        for pid in _with_descendants(self._roots()):
            if pid not in self._pidfds:
                with contextlib.suppress(ProcessLookupError):
                    self._pidfds[pid] = os.pidfd_open(pid)

    def _roots(self) -> list[int]:
        """vLLM's engine cores: children of this process. They watch over their own children."""
        children = (child.pid for child in multiprocessing.active_children())
        return [pid for pid in children if pid is not None and pid not in self._before]

    def _wait_for_death(self) -> None:
        descriptors = {self._pidfds[pid]: pid for pid in self._roots() if pid in self._pidfds}
        ended = wait(descriptors)
        if self._closed:
            return
        pid = next(pid for descriptor, pid in descriptors.items() if descriptor in ended)
        self.lost = self.lost or f"vLLM's engine died: pid {pid} ended"
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self.loop.call_soon_threadsafe(self._death.set)
        self.on_death()

    def close(self) -> None:
        """End it in order, then by force; returns when its processes are gone."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if not self.lost:
            self._find()
            self._shut_down()
        self._kill()
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(GONE_S)
        with contextlib.suppress(Exception):
            # Freed here: its destructor needs modules that are gone at the end of the interpreter.
            self.engine, self._started = None, Future()
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds = {}

    def _shut_down(self) -> None:
        done, shutdown = threading.Event(), self.engine.shutdown
        more = {"timeout": self._settings.stop_s} if "timeout" in inspect.signature(shutdown).parameters else {}

        def end() -> None:
            try:
                shutdown(**more)
            except Exception as problem:
                log.warning("vLLM's shutdown raised %s: %s", type(problem).__name__, problem)
            done.set()

        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(end)
        if not done.wait(self._settings.stop_s + 1.0):
            log.warning("vLLM did not end within %g s; it is killed", self._settings.stop_s)

    def _kill(self) -> None:
        """Kill all of its processes, wait until they are gone, and remove the memory that they shared."""
        shared = {file for pid in self._pidfds for file in _shared_files(pid)}
        for descriptor in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        end = time.monotonic() + GONE_S
        late = [pid for pid, fd in self._pidfds.items() if not wait([fd], max(0.0, end - time.monotonic()))]
        if late:
            log.error("vLLM: pids %s are not gone %g s after SIGKILL", late, GONE_S)
        for child in multiprocessing.active_children():  # reaps those that have ended
            if child.pid in self._pidfds:
                child.join(0)
        for file in shared:
            file.unlink(missing_ok=True)


def is_death(result: object) -> bool:
    """Tell whether the result of a call is vLLM's error that its engine is dead."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(result, EngineDeadError)


def _with_descendants(roots: list[int]) -> list[int]:
    pids = list(roots)
    for pid in pids:  # grows meanwhile
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
    return pids


def _state(pid: int) -> str:
    fields = stat_of(pid)
    return STATES.get(fields[0], fields[0]) if fields else "gone"


def _shared_files(pid: int) -> set[Path]:
    """Shared memory of Python's multiprocessing that a process maps: it stays behind if that process is killed."""
    with contextlib.suppress(OSError):
        names = (line.rpartition(" ")[2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        return {Path(name) for name in names if name.startswith("/dev/shm/psm_")}
    return set()
