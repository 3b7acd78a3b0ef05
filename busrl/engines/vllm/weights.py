"""New weights in a running vLLM: tensors through its workers, adapters by its own interface, folders by a restart.

Used by the vLLM engine, which it pauses and resumes. Talks to `worker` by calls with plain data and reads its pages.
Knows nothing of slots or the bus.

- Workers receive tensors beside generation. An update pauses, loads, notes the version, drops the cache of the old
  weights and resumes.
- All workers of an engine load the same version or none: each first reports the version that it holds ready.
- A version that does not fit never touches the model. A load that failed half-way leaves the engine paused and dirty:
  it answers nothing until a later version is loaded whole.
- No adapter of a running answer is ever removed; unused adapters are removed before a new one is loaded.
- After the first load a short answer is compared with a plain forward pass, because nothing else would show a fault.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from busrl.data.pretrained import model_facts
from busrl.engines.vllm.process import is_death
from busrl.errors import BusrlError, CannotTrain, UserError, WeightsRefused, WeightsTimeout
from busrl.system import files
from busrl.topology.kinds import FOLDERS, ONE_COPY
from busrl.weights.base import NOTHING, TensorReceiver, poll

if TYPE_CHECKING:
    import torch

    from busrl.engines.vllm.engine import VllmEngine
    from busrl.weights.base import Receiver
    from busrl.weights.factory import TransportSettings

log = logging.getLogger("busrl")
SIZE = 4096
HEAD = struct.Struct("<II")  # checksum and length of the line
TROUBLE = SIZE // 8  # characters of it that are written, of at most six bytes each
TRIES = 100
LOOK_EVERY_S = 0.005
CHECK_TOKENS = 24
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


@dataclass(frozen=True)
class Line:
    """A report of a worker: (version, step) that waits to be loaded, and that of the model; the trouble, if any."""

    staged: tuple[int, int] = NOTHING
    loaded: tuple[int, int] = NOTHING
    trouble: str = ""

    @property
    def newest(self) -> tuple[int, int]:
        """The version of the model after the next update."""
        return max(self.staged, self.loaded)


class Page:
    """A page of shared memory on which a worker writes the versions that it has. The rollout process reads it at every
    step, because a call to the engine would wait for a decoding step. One writer; a reader sees a whole line, which the
    checksum proves, or the line before."""

    def __init__(self, path: str | Path, *, create: bool = False) -> None:
        """`create`: a new file under that name, for this user only; processes that map an older file keep it."""
        self.path = Path(path)
        if create:
            with files.replacing(self.path, durable=False) as descriptor:
                os.ftruncate(descriptor, SIZE)
        try:
            descriptor = os.open(self.path, (os.O_RDWR if create else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as problem:
            raise UserError(f"{self.path}: {problem.strerror}; a worker of vLLM should have made it") from None
        try:
            self._map = mmap.mmap(descriptor, SIZE, access=mmap.ACCESS_WRITE if create else mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self._seen = Line()  # read or written last; equal to an empty page

    def write(self, line: Line) -> None:
        if line == self._seen:
            return
        self._seen = line
        body = msgspec.json.encode(dataclasses.replace(line, trouble=line.trouble[:TROUBLE]))
        self._map[: HEAD.size + len(body)] = HEAD.pack(zlib.crc32(body), len(body)) + body

    def read(self) -> Line:
        """The last whole line; an empty one before the first."""
        for _ in range(TRIES):
            checksum, length = HEAD.unpack_from(self._map)
            body = self._map[HEAD.size : HEAD.size + length]
            if length and zlib.crc32(body) == checksum:
                self._seen = msgspec.json.decode(body, type=Line)
                break
        return self._seen

    def close(self) -> None:
        self._map.close()


class WorkerReceiver(TensorReceiver):
    """The rollout role's view of the receivers in vLLM's workers: one page each."""

    def __init__(self, engine: VllmEngine, pages: Sequence[Page], name: str) -> None:
        self._engine, self._pages, self.name = engine, pages, name
        self.trouble = ""  # of a worker, as of the last `newest`

    def newest(self) -> tuple[int, int]:
        """The version that every worker has. Logs a worker's trouble once."""
        lines = [page.read() for page in self._pages]
        troubles = [line.trouble for line in lines if line.trouble]
        if troubles and troubles[0] != self.trouble:
            log.warning("weights: %s: %s", self.name, troubles[0])
        self.trouble = troubles[0] if troubles else "nothing is wrong there"
        return min(line.newest for line in lines)

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        def there() -> tuple[int, int] | None:
            if (newest := self.newest())[0] >= version:
                return newest
            self._engine.check()
            return None

        if stamp := poll(there, timeout_s):
            return stamp
        text = f"{self.name}: vLLM's workers have no version {version} after {timeout_s:g} s"
        raise WeightsTimeout(f"{text}, newest {self.newest()[0]}; {self.trouble}")

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        raise UserError(f"{self.name}: the model is in vLLM's workers; update_weights loads what they received")

    def close(self) -> None:
        for page in self._pages:
            page.close()


@dataclass
class LoadedAdapter:
    """The version of an adapter and vLLM's request for it; the request is None for the model without an adapter."""

    version: int
    request: Any


class Adapters:
    """The adapters of one model in vLLM, which has `places` for them. `newest` draws new requests: before the first
    version it is the bare model. vLLM knows them by `name` and by ids from `first` on, both followed by the version."""

    def __init__(self, engine: VllmEngine, places: int, name: str = "v", first: int = 1) -> None:
        self._engine, self._places, self._name, self._first = engine, places, name, first
        self._loaded: dict[int, Any] = {}  # by version
        self.newest = LoadedAdapter(0, None)

    def used(self) -> set[int]:
        """Versions of the adapters of running answers and of new requests."""
        adapters = [running.adapter for running in self._engine.running] + [self.newest]
        return {adapter.version for adapter in adapters if adapter is not None and self._is_ours(adapter)}

    def _is_ours(self, adapter: LoadedAdapter) -> bool:
        return adapter.request is not None and adapter.request.lora_int_id == self._first + adapter.version

    @property
    def has_room(self) -> bool:
        """True if one more finds a place: running answers occupy the places of theirs."""
        return len(self.used()) < self._places

    def make_room(self) -> None:
        """Make a place for one more adapter. WeightsRefused if running answers occupy all places for `rpc_s`."""
        engine = self._engine
        if not engine.wait_until(lambda: self.has_room, engine.settings.rpc_s):
            used, oldest = sorted(self.used()), min(self.used())
            late = next((run.id for run in engine.running if run.adapter and run.adapter.version == oldest), "none")
            text = f"running answers have the adapters of versions {used}, and vLLM has {self._places} places"
            raise WeightsRefused(f"{text}; waited {engine.settings.rpc_s:g} s, among others for request {late}")
        self.remove_unused()

    def remove_unused(self) -> None:
        """Remove what no answer needs: vLLM itself might choose an adapter whose answers wait for their turn."""
        core = self._engine.core
        for version in sorted(self._loaded.keys() - self.used()):
            core.call("remove_lora", partial(core.engine.remove_lora, self._loaded.pop(version).lora_int_id))

    def add(self, version: int, path: Path) -> None:
        """Load an adapter under a new id: running requests keep theirs, with the cache that it made."""
        from vllm.lora.request import LoRARequest

        core = self._engine.core
        request = LoRARequest(f"{self._name}{version}", self._first + version, str(path))
        try:
            core.call("add_lora", lambda: core.engine.add_lora(request))
        except BusrlError:
            raise
        except Exception as problem:
            raise WeightsRefused(f"vLLM: the adapter {path} was refused: {problem}") from problem
        self._loaded[version] = request
        self.newest = LoadedAdapter(version, request)

    def forget(self) -> None:
        """Take note that vLLM has started again, without any of them."""
        self._loaded.clear()


class Updates:
    """The updates of one engine. `on_update`: keep or recompute the cache of running sequences; auto = recompute."""

    def __init__(self, engine: VllmEngine, on_update: str) -> None:
        self._engine = engine
        self._any = False  # a version of a receiver is in vLLM
        self._recompute = on_update != "keep"
        self._dirty = ""
        self._checked = False  # the weights were compared with a plain forward pass, or cannot be
        self._workers: WorkerReceiver | None = None
        self._close_s = engine.settings.stop_s
        self.adapters = Adapters(engine, engine.start.adapters) if engine.start.lora_rank else None

    @property
    def adapter(self) -> LoadedAdapter | None:
        """The adapter of new requests, where versions are adapters."""
        return None if self.adapters is None else self.adapters.newest

    def receiver(self, settings: TransportSettings, name: str) -> Receiver | None:
        """Workers receive tensors themselves; folders and adapters are the ordinary receiver's."""
        if settings.transport in FOLDERS:
            return None
        self._checked = settings.transport == ONE_COPY
        if settings.transport == ONE_COPY:  # a worker closes after the learner has released the weights
            self._close_s += settings.timeout_s
        engine, start = self._engine, self._engine.start
        page = Path(settings.address_file).parent / f"vllm-{name.replace('/', '-')}.page"
        opening = {"settings": settings.plain(), "name": name, "model": start.model, "dtype": start.dtype}
        text = json.dumps({**opening, "page": str(page)})
        paths = engine.core.rpc("busrl_open", text, timeout_s=engine.settings.start_s)
        self._workers = WorkerReceiver(engine, [Page(path) for path in paths], name)
        return self._workers

    def take(self, receiver: Receiver) -> tuple[int, int]:
        """Make the receiver's newest version the engine's; returns (version, step)."""
        workers = self._workers if receiver is self._workers else None
        stamp = self._folder(receiver) if workers is None else self._tensors(workers)
        self._any = True
        return stamp

    def refuse_if_dirty(self) -> None:
        """UserError while the model may hold a mixture of two versions."""
        if self._dirty:
            raise UserError(f"vLLM: {self._dirty}; a later version has to be loaded first")

    def close(self) -> None:
        """Make the workers receive no more and leave their transport, if vLLM lives."""
        if self._workers is None:
            return
        core = self._engine.core
        if not core.over:
            try:
                core.rpc("busrl_close", timeout_s=self._close_s)
            except Exception as problem:  # vLLM ends next, by force if needed
                log.warning("vLLM: %s: its workers did not leave: %s", self._workers.name, problem)
        self._workers.close()

    # -- tensors -----

    def _tensors(self, workers: WorkerReceiver) -> tuple[int, int]:
        newest = workers.newest()
        if newest == NOTHING:
            raise WeightsTimeout(f"{workers.name}: no version has arrived in vLLM's workers; {workers.trouble}")
        if newest[0] == self._engine.version and self._any:
            return newest
        core, comparing = self._engine.core, self._wants_check()
        agreed = self._agree_on(workers)
        was_paused = self._engine.paused and not self._dirty
        self._engine.hold()
        version, step = self._swap(agreed, comparing)
        self._engine.use_version(version)
        self._dirty = ""
        if version != agreed:  # one copy: the learner made a later one before we had paused
            self._note(version)
        if not was_paused:
            self._engine.resume()
        if comparing:
            self._compare(version)
            self._checked = True
            core.rpc("busrl_release")
        return version, step

    def _agree_on(self, workers: WorkerReceiver) -> int:
        """Wait until all workers hold the same version ready, and return it; WeightsTimeout after `rpc_s`."""
        core, deadline = self._engine.core, time.monotonic() + self._engine.settings.rpc_s
        stamps: set[tuple[int, ...]] = set()
        pause = threading.Event()
        while time.monotonic() < deadline:
            stamps = {tuple(stamp) for stamp in core.rpc("busrl_prepare", True)}
            if len(stamps) == 1 and NOTHING not in stamps:
                return stamps.pop()[0]
            core.rpc("busrl_release")
            workers.wait_for(max(stamp[0] for stamp in stamps), max(0.0, deadline - time.monotonic()))
            pause.wait(LOOK_EVERY_S)
        raise WeightsTimeout(f"{workers.name}: vLLM's workers hold {sorted(stamps)} ready, not one version")

    def _swap(self, version: int, hold: bool) -> tuple[int, int]:
        """Load in every worker, drop the cache of the old weights and note the version, in one round trip without a
        decoding step. With `recompute` running sequences are computed again. Without it vLLM cannot drop their cache
        and returns False; new requests have another salt and do not find it. EngineLost if workers load different
        versions."""
        core, again = self._engine.core, self._recompute

        async def together() -> list[Any]:
            work = [core.engine.collective_rpc("busrl_commit", args=(hold,)), core.engine.reset_prefix_cache(again)]
            if core.abilities.weight_version:
                work.append(core.engine.update_weight_version(str(version)))
            return await asyncio.gather(*work, return_exceptions=True)

        loaded, dropped, *noted = core.call("busrl_commit", together)
        if dead := next((result for result in (loaded, dropped, *noted) if is_death(result)), None):
            raise core.lose(f"vLLM's engine died while it loaded new weights: {dead}")
        if isinstance(loaded, Exception):
            raise self._not_loaded(loaded)
        if (again and dropped is False) or any(isinstance(result, Exception) for result in (dropped, *noted)):
            raise core.lose(f"vLLM kept the cache of old weights, or their version: {dropped} {noted}")
        stamps = {tuple(stamp) for stamp in loaded}
        if len(stamps) != 1:
            raise core.lose(f"vLLM's workers loaded different versions: {sorted(stamps)}")
        newest, step = stamps.pop()
        return newest, step

    def _not_loaded(self, problem: Exception) -> UserError:
        """Mark the model as dirty: it may hold a mixture, so the engine stays paused until a later version is loaded
        whole. Returns the error to raise."""
        self._dirty = f"loading new weights failed: {problem}"
        self._engine.core.rpc("busrl_release")
        log.error("vLLM: %s; it answers nothing until a version was loaded whole", self._dirty)
        return UserError(f"vLLM: {self._dirty}")

    def _note(self, version: int) -> None:
        """Note the version in vLLM, where vLLM can mark every token with it."""
        core = self._engine.core
        if core.abilities.weight_version:
            core.call("update_weight_version", lambda: core.engine.update_weight_version(str(version)))

    def _wants_check(self) -> bool:
        if self._checked:
            return False
        parameters = model_facts(Path(self._engine.start.model)).parameters  # 0 if the folder does not say
        return 0 < parameters <= self._engine.settings.check_parameters

    def _compare(self, version: int) -> None:
        """CannotTrain if vLLM's log-probabilities of a short answer are not those of a plain forward pass."""
        engine, core = self._engine, self._engine.core
        ids, sampled, prompt_length = core.call(
            "the check of new weights", lambda: engine.kind.for_check(engine, core, CHECK_TOKENS)
        )
        plain = core.rpc("busrl_reference", engine.start.model, ids, engine.temperature)
        expected = next(values for values in plain if values)
        worst = max(abs(ours - theirs) for ours, theirs in zip(sampled, expected[prompt_length - 1 :]))
        limit = engine.settings.check_tolerance or TOLERANCE[engine.start.dtype]
        log.info("vLLM: version %d checked: log-probabilities differ by at most %.1e", version, worst)
        if not worst <= limit:
            text = (f"vLLM {core.version}: log-probabilities of version {version} differ by {worst:.3g} from a plain "
                    f"forward pass, more than {limit:g}")
            core.lose(text)
            raise CannotTrain(f"{text}: do not train with it; vllm.check_tolerance is the limit")

    # -- adapters and folders -----

    def _folder(self, receiver: Receiver) -> tuple[int, int]:
        assert receiver.kind != "tensors"  # those come to the receivers in its workers alone
        adapters = self.adapters
        # The first adapter goes into the model without one; later folders need a vLLM that starts again.
        restarts = receiver.kind == "folder" and (adapters is None or adapters.newest.request is not None)
        if not restarts and adapters is not None:
            adapters.make_room()
        version, step, path = receiver.take()
        if restarts or adapters is None:
            self._start_again(version, path)
        else:
            adapters.add(version, path)
        return version, step

    def _start_again(self, version: int, path: Path) -> None:
        """Restart vLLM with that folder as its model, or with that adapter. After WeightsRefused it has the adapter
        before."""
        engine, adapters = self._engine, self.adapters
        assert not engine.running  # the caller of a restart takes them out first
        if adapters is None:
            engine.restart(dataclasses.replace(engine.start, model=str(path)))
            self._note(version)
            return
        before = adapters.newest
        engine.restart(engine.start)
        adapters.forget()
        try:
            adapters.add(version, path)
        except WeightsRefused as problem:
            try:
                adapters.add(before.version, Path(before.request.lora_path))
            except WeightsRefused as second:
                raise engine.core.lose(f"{problem}; and the one before is gone: {second}") from second
            raise
