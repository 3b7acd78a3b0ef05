"""What busrl adds to a worker of vLLM: weights that arrive beside generation and are loaded when the engine says so.

vLLM imports this module in every worker (`worker_extension_cls`) and mixes `Extension` into its class; the rollout
process calls the methods by name, with plain data. A thread receives with `busrl.weights`, as every engine does, and
tells on a page (`vllm_page`) what it has. Knows nothing of requests, slots or the bus.

- A version is received whole into memory of our own before the model is touched; what does not fit is refused there.
- `commit` runs between two decoding steps, while generation is paused. One that fails leaves the model dirty: nothing
  but a complete load makes it clean again.
- The process dies with its parent. vLLM alone would leave the engine behind if the rollout process is killed.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from busrl.config.rules import ONE_COPY
from busrl.engines.vllm.weights import Line, Page
from busrl.errors import BusrlError, UserError
from busrl.weights.base import NOTHING, TensorReceiver
from busrl.weights.factory import Settings, make_receiver, one_copy_receiver

if TYPE_CHECKING:
    from busrl.weights.shared import OneCopyReceiver

log = logging.getLogger("busrl")
LOOK_EVERY_S = 0.005
RESTAGE_S = 0.25  # a version that nobody loads for this long gives way to a newer one
PR_SET_PDEATHSIG = 1


class Plane:
    """Weights of one worker. `model` gives the live model, whose own `load_weights` knows how names map to it."""

    def __init__(self, model: Any, source: TensorReceiver, staging: dict[str, torch.Tensor], page: Page) -> None:
        self._model, self._source, self._staging, self._page = model, source, staging, page
        self._staged = self._loaded = NOTHING
        self._staged_at = 0.0
        self._held = False  # what was loaded last is still needed as it stands
        self._dirty = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._page.write(Line())
        self._thread = threading.Thread(target=self._serve, name="busrl weights", daemon=True)
        self._thread.start()

    # -- called between two decoding steps ------------------------------------------------------------------------

    def prepare(self, hold: bool) -> tuple[int, int]:
        """Keep what is staged as it is until `commit` or `thaw`; NOTHING if no version is."""
        with self._lock:
            self._held = hold
            return self._staged

    def commit(self, hold: bool) -> tuple[int, int]:
        """Load what is staged. UserError if nothing is, or if the model did not take it: then it is dirty."""
        with self._lock:
            if self._staged == NOTHING:
                raise UserError(f"no version is staged{': ' + self._dirty if self._dirty else ''}")
            self._dirty = f"version {self._staged[0]} was not loaded to its end"
            self._load()
            self._dirty = ""
            self._loaded, self._staged, self._held = self._staged, NOTHING, hold
            self._tell()
            return self._loaded

    def thaw(self) -> str:
        """Go on receiving. Returns why the model may not be used, empty if it may."""
        with self._lock:
            self._held = False
            return self._dirty

    def tensors(self) -> dict[str, torch.Tensor]:
        """What was loaded last; only while it is held."""
        if not self._held or self._loaded == NOTHING:
            raise UserError("the weights that were loaded last are not held")
        return self._staging

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._source.close()

    def _load(self) -> None:
        with torch.no_grad():
            taken = self._model.load_weights(iter(self._staging.items()))
        if taken is None:  # this model does not tell
            return
        if left := sorted({name for name, _ in self._model.named_parameters()} - set(taken)):
            raise UserError(f"{len(left)} tensors of vLLM's model got no new value, first {left[0]!r}")

    # -- the receiving thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self._look()
            except (BusrlError, RuntimeError, OSError, ValueError) as problem:
                with self._lock:
                    self._staged = NOTHING
                    self._tell(f"{type(problem).__name__}: {problem}")
                log.warning("weights: %s", problem)
                self._stop.wait(RESTAGE_S)

    def _look(self) -> None:
        version, _ = self._source.newest()
        with self._lock:
            if self._held or version <= self._loaded[0] or version <= self._staged[0]:
                return
            if self._staged != NOTHING and time.monotonic() - self._staged_at < RESTAGE_S:
                return
            self._staged = NOTHING  # from here on until it is whole it is no version
            self._staged = self._source.fetch(self._staging)
            self._staged_at = time.monotonic()
            self._tell()

    def _tell(self, trouble: str = "") -> None:
        self._page.write(Line(self._staged, self._loaded, trouble))


class SharedPlane:
    """One copy of the weights: the learner changes vLLM's own tensors while generation is paused (docs/gpu.md).

    `shapes` are those of the checkpoint, which vLLM fuses. A version is staged when the learner asks for the pause of
    its change; `commit` returns when the change is complete.
    """

    def __init__(self, model: Any, source: OneCopyReceiver, shapes: dict[str, tuple[int, ...]], page: Page) -> None:
        self._source, self._page = source, page
        self._loaded = NOTHING
        source.share(dict(model.named_parameters()), shapes)
        self._stop = threading.Event()
        self._page.write(Line())
        self._thread = threading.Thread(target=self._serve, name="busrl weights", daemon=True)
        self._thread.start()

    def prepare(self, hold: bool) -> tuple[int, int]:
        newest = self._source.newest()
        return newest if newest[0] > self._loaded[0] else NOTHING

    def commit(self, hold: bool) -> tuple[int, int]:
        self._loaded = self._source.fetch({})
        return self._loaded

    def thaw(self) -> str:
        return ""

    def tensors(self) -> dict[str, torch.Tensor]:
        raise UserError("there is one copy of the weights, with which nothing can be compared")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._source.close()

    def _serve(self) -> None:
        told = Line()
        while not self._stop.wait(LOOK_EVERY_S):
            line = Line(self._source.newest(), self._loaded)
            if line != told:
                self._page.write(line)
                told = line


class Extension:
    """Methods that vLLM's worker gets; their names must not be taken there. All arguments and results are plain."""

    rank: int
    model_runner: Any
    busrl_plane: Any = None

    def busrl_open(self, text: str) -> str:
        """Begin to receive. `text` is JSON: settings of the transport, name, model folder, dtype, page (a prefix)."""
        given = json.loads(text)
        model, wanted = _model_of(self.model_runner), _tensors_of(given["model"], given["dtype"])
        name = given["name"] if not self.rank else f"{given['name']}.{self.rank}"
        self.busrl_close()
        page = Page(f"{given['page']}.{self.rank}", create=True)
        settings = Settings.from_plain(given["settings"])
        if settings.transport == ONE_COPY:
            shapes = {name: tuple(t.shape) for name, t in wanted.items()}
            self.busrl_plane = SharedPlane(model, one_copy_receiver(settings, name), shapes, page)
        else:
            source = make_receiver(settings, name)
            assert source.kind == "tensors"  # folders and adapters do not come through the workers
            staging = {name: torch.empty_like(t, device="cpu") for name, t in wanted.items()}
            self.busrl_plane = Plane(model, source, staging, page)
        return str(page.path)

    def busrl_prepare(self, hold: bool) -> list[int]:
        return list(self.busrl_plane.prepare(hold))

    def busrl_commit(self, hold: bool) -> list[int]:
        return list(self.busrl_plane.commit(hold))

    def busrl_thaw(self) -> str:
        return str(self.busrl_plane.thaw())

    def busrl_reference(self, model: str, ids: list[int], temperature: float) -> list[float]:
        """Log-probabilities of ids[1:] by a plain forward pass with the weights that are held; [] on other ranks."""
        if self.rank:
            return []
        return plain_logprobs(model, self.busrl_plane.tensors(), ids, temperature)

    def busrl_close(self) -> bool:
        if self.busrl_plane is not None:
            self.busrl_plane.close()
            self.busrl_plane = None
        return True


def plain_logprobs(folder: str, tensors: dict[str, torch.Tensor], ids: list[int], temperature: float) -> list[float]:
    """What transformers itself makes of the tensors, in float32 or their own type, on the CPU."""
    maker, config = _maker_of(folder)
    dtype = next(iter(tensors.values())).dtype
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # its fresh weights must not move vLLM's random state
        model = maker.from_config(config, dtype=dtype)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([ids])).logits[0, :-1].float() / temperature
        found = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])
    return [float(value) for value in found[:, 0]]


def _tensors_of(folder: str, dtype: str) -> dict[str, torch.Tensor]:
    """Names, shapes and type of what a learner of this model publishes, as tensors without memory."""
    maker, config = _maker_of(folder)
    with torch.device("meta"):
        model = maker.from_config(config)
    wanted: torch.dtype = getattr(torch, dtype)
    return {name: torch.empty(p.shape, dtype=wanted, device="meta") for name, p in model.named_parameters()}


def _maker_of(folder: str) -> tuple[Any, Any]:
    """What makes a model of transformers' own, and the folder's configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM, AutoConfig.from_pretrained(folder, local_files_only=True)


def _model_of(runner: Any) -> Any:
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


# -- what is done once in every worker ----------------------------------------------------------------------------


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends; nothing to do where nobody did."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent.pid:  # it died before the line above
        os._exit(1)


def mend_cpu() -> None:
    """Three things that vLLM's CPU backend needs before a model is made.

    - A random stream is set back by its state after a step that took only a part of a prompt (`mend_streams`).
    - Linear layers pack their weight away where new ones do not reach it, for a tied output head silently: not here.
    - Heads smaller than its attention kernels know are padded with zeros, which changes no result.
    """
    from vllm import _custom_ops as operations
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    operations._supports_onednn = False
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    mend_streams(GPUModelRunner)
    from vllm.model_executor.layers.attention import Attention

    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = sorted(CPUAttentionBackend.get_supported_head_sizes())
    except (ImportError, AttributeError):  # a version that is built otherwise says itself what it can not do
        return
    pad_heads(Attention, sizes)


def mend_streams(runner: Any) -> None:
    """Make the class, of which a CPU's runner is one, set back the streams of rows whose token is thrown away.

    A row draws a token in every step, also while its prompt, or what it computes anew after an update, is taken in
    pieces. vLLM then sets the stream back by an offset, which a generator of the CPU does not have, and ends. Versions
    that keep the rows under another name go on without setting back.
    """
    sample, keep_books = runner._sample, runner._bookkeeping_sync

    def _sample(self: Any, *args: Any, **more: Any) -> Any:
        streams, mask = self.input_batch.generators, getattr(self, "discard_request_mask", None)
        rows = [] if mask is None else mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        thrown = [streams[row] for row in rows if row in streams]
        states = [stream.get_state() for stream in thrown]
        made = sample(self, *args, **more)
        for stream, state in zip(thrown, states):
            stream.set_state(state)
        return made

    def _bookkeeping_sync(self: Any, *args: Any, **more: Any) -> Any:
        streams, self.input_batch.generators = self.input_batch.generators, {}  # read here for nothing else
        try:
            return keep_books(self, *args, **more)
        finally:
            self.input_batch.generators = streams

    runner._sample, runner._bookkeeping_sync = _sample, _bookkeeping_sync


def pad_heads(attention: Any, sizes: list[int]) -> None:
    """Make the layer class use the next head size that its kernels have; the scale is the caller's, so it stays."""
    made, forward = attention.__init__, attention.forward

    def __init__(self: Any, num_heads: int, head_size: int, *args: Any, **more: Any) -> None:
        own = more.get("head_size_v") in (None, head_size)
        wide = next((size for size in sizes if size >= head_size), head_size) if own else head_size
        made(self, num_heads, wide, *args, **more)
        self.busrl_head = head_size

    def padded(self: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
        head, wide = self.busrl_head, self.head_size
        if head == wide:
            return forward(self, query, key, value, *args, **more)

        def pad(tensor: Any, heads: int) -> Any:
            split = tensor.reshape(-1, heads, head)
            return torch.nn.functional.pad(split, (0, wide - head)).flatten(1)

        made_of = (pad(query, self.num_heads), pad(key, self.num_kv_heads), pad(value, self.num_kv_heads))
        out = forward(self, *made_of)
        return out.reshape(-1, self.num_heads, wide)[..., :head].reshape(-1, self.num_heads * head)

    attention.__init__, attention.forward = __init__, padded


if multiprocessing.parent_process() is not None:
    die_with_parent()
    mend_cpu()
