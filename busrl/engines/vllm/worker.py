"""The extension of a worker of vLLM: weights arrive beside generation and are loaded when the engine calls for it.

vLLM imports this module in every worker (`worker_extension_cls`) and mixes `Extension` into its class; the rollout
process calls the methods by name, with plain data. A thread receives with `busrl.weights`, as every engine does, and
reports its versions on a page (`weights.Page`). Knows nothing of requests, slots or the bus.

- A version is received whole into our own memory before the model is touched; a version that does not fit is refused
  there.
- `commit` runs between two decoding steps, while generation is paused. A failed `commit` leaves the model dirty: only a
  complete load makes it clean again.
- The process dies with its parent. vLLM alone would leave the engine behind if the rollout process is killed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from busrl.data.vocabulary import TokenRows, token_rows
from busrl.engines.vllm import capture, cpu_patches
from busrl.engines.vllm.weights import Line, Page
from busrl.errors import BusrlError, UserError
from busrl.system.parent import die_with
from busrl.weights.base import NOTHING, SharedReceiver, TensorReceiver
from busrl.weights.factory import TransportSettings, make_receiver

log = logging.getLogger("busrl")
LOOK_EVERY_S = 0.005
RESTAGE_S = 0.25  # a version that waits for its load for so long gives way to a newer version
maker: Any = AutoModelForCausalLM  # it has no type hints


class WorkerWeights:
    """Weights of one worker, staged beside the live `model`. The model's `load_weights` maps names to its tensors."""

    def __init__(self, model: Any, source: TensorReceiver, staging: dict[str, torch.Tensor], page: Page) -> None:
        self._model, self._source, self._staging, self._page = model, source, staging, page
        self._staged = self._loaded = NOTHING
        self._staged_at = 0.0
        self._held = False  # `_staging` must not change: its version is about to be loaded, or still needed
        self._dirty = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._page.write(Line())
        self._thread = threading.Thread(target=self._serve, name="busrl weights", daemon=True)
        self._thread.start()

    # -- called between two decoding steps -----

    def prepare(self, hold: bool) -> tuple[int, int]:
        """Hold the staged version until `commit` or `release`; NOTHING if no version is staged."""
        with self._lock:
            self._held = hold
            return self._staged

    def commit(self, hold: bool) -> tuple[int, int]:
        """Load the staged version. UserError if there is none, or if the load failed: then the model is dirty."""
        with self._lock:
            if self._staged == NOTHING:
                raise UserError(f"no version is staged{': ' + self._dirty if self._dirty else ''}")
            self._dirty = f"version {self._staged[0]} was not loaded to its end"
            self._load()
            self._dirty = ""
            self._loaded, self._staged, self._held = self._staged, NOTHING, hold
            self._write_page()
            return self._loaded

    def release(self) -> str:
        """Receive again. Returns the reason why the model must not be used, "" if it may be."""
        with self._lock:
            self._held = False
            return self._dirty

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the last load; only while they are held."""
        if not self._held or self._loaded == NOTHING:
            raise UserError("the weights that were loaded last are not held")
        return self._staging

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._source.close()

    def _load(self) -> None:
        load_into(self._model, self._staging.items())

    # -- the receiving thread -----

    def _serve(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self._look()
            except (BusrlError, RuntimeError, OSError, ValueError) as problem:
                with self._lock:
                    self._staged = NOTHING
                    self._write_page(f"{type(problem).__name__}: {problem}")
                log.warning("weights: %s", problem)
                self._stop.wait(RESTAGE_S)

    def _look(self) -> None:
        version, _ = self._source.newest()
        with self._lock:
            if self._held or version <= self._loaded[0] or version <= self._staged[0]:
                return
            if self._staged != NOTHING and time.monotonic() - self._staged_at < RESTAGE_S:
                return
            self._staged = NOTHING  # until the next version is whole
            self._staged = self._source.fetch(self._staging)
            self._staged_at = time.monotonic()
            self._write_page()

    def _write_page(self, trouble: str = "") -> None:
        self._page.write(Line(self._staged, self._loaded, trouble))


class SharedWeights(WorkerWeights):
    """A single copy of the weights: the learner changes vLLM's own tensors while generation is paused (docs/gpu.md).
    `shapes` are those of the checkpoint, whose tensors vLLM fuses. A version is staged when the learner requests a
    pause to make it; `commit` returns when the change is complete."""

    def __init__(self, model: Any, source: SharedReceiver, shapes: dict[str, tuple[int, ...]], page: Page) -> None:
        source.share(dict(model.named_parameters()), shapes)
        super().__init__(model, source, {}, page)

    def prepare(self, hold: bool) -> tuple[int, int]:
        newest = self._source.newest()
        return newest if newest[0] > self._loaded[0] else NOTHING

    def commit(self, hold: bool) -> tuple[int, int]:
        self._loaded = self._source.fetch({})
        return self._loaded

    def _look(self) -> None:
        self._page.write(Line(self._source.newest(), self._loaded))


class Extension:
    """Methods that vLLM's worker gets; its class must not have their names. Arguments and results are plain data."""

    rank: int
    model_runner: Any
    busrl_weights: Any = None
    busrl_capture: Any = None

    def busrl_leave_out(self, end: int, holes: list[int]) -> bool:
        """Set rows of logits without a token to -inf from now on, before vLLM uses them: neither the drawn tokens nor
        the reported log-probabilities have a share of them."""
        runner = self.model_runner
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        plain, rows = model.compute_logits, TokenRows(end, tuple(holes))

        def compute_logits(*args: Any, **more: Any) -> Any:
            logits = plain(*args, **more)
            return logits if logits is None else rows.mask(logits)  # None on ranks that draw nothing

        model.compute_logits = compute_logits
        return True

    def busrl_note_routes(self, layers: list[int], top_k: int, dtype: str) -> str:
        """Note from now on which experts the routers choose, on rank 0; returns why that cannot be, "" if it can."""
        if self.rank:
            return ""
        why = capture.objection(self.model_runner, layers)
        self.busrl_capture = None if why else capture.Capture(self.model_runner, layers, top_k, dtype)
        return why

    def busrl_take_routes(self, wanted: list[tuple[str, int, int]]) -> list[bytes]:
        """Routes of requests that have ended, each as its name and the first and last position, which are then
        forgotten; nothing on ranks other than 0."""
        return [self.busrl_capture.take(*one) for one in wanted] if self.busrl_capture else []

    def busrl_open(self, text: str) -> str:
        """Begin to receive. `text` is JSON: settings of the transport, name, model folder, dtype, page (a prefix)."""
        opening = json.loads(text)
        runner, wanted = self.model_runner, _tensors_of(opening["model"], opening["dtype"])
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        name = f"{opening['name']}.{self.rank}" if self.rank else opening["name"]
        self.busrl_close()
        page = Page(f"{opening['page']}.{self.rank}", create=True)
        source = make_receiver(TransportSettings.from_plain(opening["settings"]), name)
        assert source.kind == "tensors"  # folders and adapters do not come through the workers
        if isinstance(source, SharedReceiver):
            shapes = {name: tuple(t.shape) for name, t in wanted.items()}
            self.busrl_weights = SharedWeights(model, source, shapes, page)
        else:
            staging = {name: torch.empty_like(t, device="cpu") for name, t in wanted.items()}
            self.busrl_weights = WorkerWeights(model, source, staging, page)
        return str(page.path)

    def busrl_prepare(self, hold: bool) -> list[int]:
        return list(self.busrl_weights.prepare(hold))

    def busrl_commit(self, hold: bool) -> list[int]:
        return list(self.busrl_weights.commit(hold))

    def busrl_release(self) -> str:
        return str(self.busrl_weights.release())

    def busrl_reference(self, model: str, ids: list[int], temperature: float) -> list[float]:
        """Log-probabilities of ids[1:] by a plain forward pass with the held weights; [] on ranks other than 0."""
        if self.rank:
            return []
        return plain_logprobs(model, self.busrl_weights.tensors(), ids, temperature)

    def busrl_close(self) -> bool:
        if self.busrl_weights is not None:
            self.busrl_weights.close()
            self.busrl_weights = None
        return True


def load_into(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Let a live model load tensors by the names of its checkpoints. UserError if one of its own got no value."""
    with torch.no_grad():
        loaded = cpu_patches.load(model, tensors)
    if loaded is None:  # this model does not report the names that it loaded
        return
    if left := sorted({name for name, _ in model.named_parameters()} - set(loaded)):
        raise UserError(f"{len(left)} tensors of vLLM's model got no new value, first {left[0]!r}")


def plain_logprobs(folder: str, tensors: dict[str, torch.Tensor], ids: list[int], temperature: float) -> list[float]:
    """Log-probabilities of ids[1:] as transformers computes them, in the type of the tensors, on the CPU."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    dtype = next(iter(tensors.values())).dtype
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # fresh weights must not move vLLM's random state
        model = maker.from_config(config, dtype=dtype)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    with torch.inference_mode():
        logits = token_rows(Path(folder)).mask(model.eval()(torch.tensor([ids])).logits[0, :-1].float()) / temperature
        logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])
    return [float(value) for value in logprobs[:, 0]]


def _tensors_of(folder: str, dtype: str) -> dict[str, torch.Tensor]:
    """The tensors that a learner of this model publishes, without memory: names, shapes and type."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = maker.from_config(config)
    wanted: torch.dtype = getattr(torch, dtype)
    return {name: torch.empty(p.shape, dtype=wanted, device="meta") for name, p in model.named_parameters()}


# vLLM calls no method of an extension before it makes the model, so these two happen at the import.
if (parent := multiprocessing.parent_process()) is not None:
    die_with(parent.pid or 0)
    cpu_patches.apply()
