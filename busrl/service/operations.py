"""The operations of a service's models: what a numbered request does to a model and to saved folders.

Called by the driver, which knows order and answers. Talks to `models` and to folders. Knows nothing of
logs, of turns or of other models.

- A `forward_backward` is executed in parts: the forward of a micro-batch, its backward. The last one has the result.
- What a request saved, it finds again when it is run again: a folder says by which request it is.
- A step that fails leaves no gradients behind: the next one begins with its own.
- A name that is taken is refused before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from busrl.errors import DiskFull
from busrl.service import folders
from busrl.service.adapters import Adapter
from busrl.service.bodies import (
    BadBody,
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    read_logged,
)
from busrl.service.folders import ServiceFolders
from busrl.service.models import Adam, Models, Pass
from busrl.service.registry import SAVES, Model, saved
from busrl.service.requests import Answer, Request
from busrl.service.sums import UserFault
from busrl.service.wire import read_forward_backward, write_forward_backward_result
from busrl.system import files
from busrl.training.checkpoint import whole_directory


@dataclass(frozen=True)
class Result:
    state: str
    payload: bytes
    proto: bool = False
    weights: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)  # for the model's course


@dataclass
class Progress:
    """A model between two steps. `state`: the folder that it begins from, if any; `broken`: why the next step is
    refused; `whole`: there are no gradients; `under_way`: the `forward_backward` of which a part is computed, whose
    body and data are `held_bytes` of memory; `in_one`: a forward comes with its backward."""

    state: Path | None = None
    broken: str = ""
    whole: bool = True
    under_way: Pass | None = None
    held_bytes: int = 0
    in_one: bool = False

    @property
    def halfway(self) -> bool:
        """True if the backward of a micro-batch waits, whose forward was computed."""
        return self.under_way is not None and self.under_way.halfway

    def breaks(self, why: str) -> None:
        self.broken = self.broken or why


class Operations:
    """`snapshots`: the highest number of a snapshot so far. `warn` takes lines for people."""

    def __init__(self, models: Models[Any], where: ServiceFolders, warn: Callable[[str], None], snapshots: int) -> None:
        self._models, self._where, self._warn, self._snapshots = models, where, warn, snapshots

    # -- models -----

    def bytes_of(self, model: Model) -> int:
        """Bytes of memory that a model takes at most; 0 for one that this base cannot have."""
        try:
            return self._models.bytes_of(Adapter(**msgspec.structs.asdict(model.adapter)))
        except UserFault:  # the answer to its first request
            return 0

    def has(self, model: Model) -> bool:
        """True if the model is in memory."""
        return self._models.has(model.id)

    def forget(self, model: Model) -> None:
        """Give up the memory of a model, which begins from a state the next time."""
        if self.has(model):
            self._models.forget(model.id)

    def write_state(self, model: Model, number: int, chain: bytes) -> None:
        """Write the state of a model after its request `number`. DiskFull."""
        write_folder(self._where.state(model.id, number), {"applied": number, "chain": chain.hex()},
                     lambda folder: self._models.save_state(model.id, folder))
        self._where.drop_old_states(model.id)

    def _load(self, model: Model, at: Progress) -> None:
        self._models.create(model.id, Adapter(**msgspec.structs.asdict(model.adapter)))
        try:
            if at.state is not None:
                self._models.load_state(model.id, at.state, True)
        except BaseException:
            self._models.forget(model.id)
            raise

    # -- requests -----

    def run(
        self, model: Model, at: Progress, request: Request, earlier: Answer | None, in_one: bool = False,
    ) -> Result | None:
        """Execute a request; None if a part of it is left for another call. `earlier`: its answer, if it was done
        before; `in_one`: a forward comes with its backward. No exception of one model ends the process."""
        at.in_one = in_one
        try:
            if not self.has(model):
                self._load(model, at)
            if request.kind == "refused":
                raise UserFault(request.about["why"])
            result: Result | None = getattr(self, f"_{request.op}")(model, at, request, earlier)
            return result
        except (UserFault, BadBody) as problem:
            fault = failure("user", str(problem))
        except MemoryError as problem:
            fault = failure("server", f"out of memory: {problem}")
        except DiskFull as problem:
            self._warn(f"{model.id}: request {request.seq} ({request.op}) failed: {problem}")
            fault = failure("server", str(problem))
        except RuntimeError as problem:  # torch: a device without memory, a shape that nobody foresaw
            self._warn(f"{model.id}: request {request.seq} ({request.op}) failed: {problem}")
            fault = failure("server", f"{type(problem).__name__}: {problem}")
        self.failed(model, at, request, json.loads(fault.payload)["error"])
        return fault

    def not_run(self, model: Model, at: Progress, request: Request, why: str, state: str = "server") -> Result:
        """The failure of a request that is not executed."""
        text = f"request {request.seq} ({request.op}) {why}"
        self.failed(model, at, request, text)
        return failure(state, text)

    def failed(self, model: Model, at: Progress, request: Request, why: str) -> None:
        """Leave a model as a failed request must: a step behind a part that failed is refused."""
        at.under_way = None
        if adds_gradients(request):
            at.breaks(f"request {request.seq} of this step failed: {why}")
        elif request.op == "optim_step":
            self._drop_gradients(model, at)

    def _drop_gradients(self, model: Model, at: Progress) -> None:
        at.whole, at.broken = True, ""
        if self.has(model):
            self._models.drop_gradients(model.id)

    # -- training -----

    def _forward_backward(self, model: Model, at: Progress, request: Request, earlier: Answer | None) -> Result | None:
        if at.under_way is None:
            asked = read_forward_backward(request.body)
            at.whole, at.held_bytes = at.whole and asked.forward_only, len(request.body) + asked.held_bytes
            at.under_way = self._models.begin(model.id, asked.data, asked.loss_fn, asked.config, asked.forward_only)
        if at.under_way.advance(at.in_one):
            return None
        computed, at.under_way = at.under_way, None
        outputs, metrics = computed.outputs, computed.metrics
        tokens = sum(len(output["logprobs"]) for output in outputs)
        figures = {} if computed.forward_only else {**metrics, "tokens": tokens}
        return Result("done", write_forward_backward_result(outputs, metrics), proto=True, figures=figures)

    def _optim_step(self, model: Model, at: Progress, request: Request, earlier: Answer | None) -> Result:
        if at.broken:
            raise UserFault(f"{at.broken}; its gradients were dropped, nothing was changed")
        asked = read_logged(OptimStep, request.body).adam_params
        assert asked is not None  # the door looked
        metrics = self._models.optim_step(model.id, Adam(**msgspec.structs.asdict(asked)))
        at.whole = True
        return Result("done", msgspec.json.encode({"metrics": metrics, "type": request.op}), figures=metrics)

    # -- folders -----

    def _save_weights(self, model: Model, at: Progress, request: Request, earlier: Answer | None) -> Result:
        def fill(folder: Path) -> None:
            self._models.save_state(model.id, folder)

        asked = read_logged(SaveWeights, request.body)
        return self._saved(model, request, earlier, asked.path, asked.overwrite, 0, fill)

    def _save_weights_for_sampler(
        self, model: Model, at: Progress, request: Request, earlier: Answer | None
    ) -> Result:
        asked = read_logged(SaveWeightsForSampler, request.body)
        number = earlier.weights if earlier is not None else self._snapshots + 1
        sampler = "" if asked.path else f"{model.session}:sample:{asked.sampling_session_seq_id}"
        if asked.path:
            self._place(model, request, earlier, asked.path, asked.overwrite)
        if number and not (earlier and self._where.snapshot(number).exists()):
            write_folder(self._where.snapshot(number), {"by": by(request), "sampler": sampler, "name": asked.path},
                         lambda folder: self._models.snapshot(model.id, folder))
        self._snapshots = max(self._snapshots, number)
        if asked.path:
            return self._saved(model, request, earlier, asked.path, asked.overwrite, number, lambda folder: None)
        path = f"tinker://{model.id}/sampler_weights/ephemeral-{request.seq}"
        told = {"path": path, "sampling_session_id": sampler, "type": request.op}
        return Result("done", msgspec.json.encode(told), weights=number)

    def _save_weights_external(self, model: Model, at: Progress, request: Request, earlier: Answer | None) -> Result:
        asked = read_logged(SaveWeightsExternal, request.body)
        return self._saved(model, request, earlier, asked.path, False, 0,
                           lambda folder: self._models.snapshot(model.id, folder))

    def _saved(
        self, model: Model, request: Request, earlier: Answer | None, name: str, overwrite: bool, number: int,
        fill: Callable[[Path], None],
    ) -> Result:
        """Save under a client's name; the same request run again finds its own."""
        path, folder = self._place(model, request, earlier, name, overwrite)
        if earlier is None or folders.about(folder) is None:  # else the folder may be of a later request
            adapter = msgspec.structs.asdict(model.adapter)
            write_folder(folder, {"by": by(request), "weights": number, "adapter": adapter}, fill)
        return Result("done", msgspec.json.encode({"path": path, "type": request.op}), weights=number)

    def _place(
        self, model: Model, request: Request, earlier: Answer | None, name: str, overwrite: bool
    ) -> tuple[str, Path]:
        """The path and the folder of a client's name; UserFault if another request saved under it."""
        path = f"tinker://{model.id}/{SAVES[request.op]}/{name}"
        folder = self._where.saved_as(model.id, SAVES[request.op], name)
        there = folders.about(folder)
        if earlier is None and there is not None and there["by"] != by(request) and not overwrite:
            raise UserFault(f"{path} exists, and overwrite was not asked for")
        return path, folder

    def _load_weights(self, model: Model, at: Progress, request: Request, earlier: Answer | None) -> Result:
        asked = read_logged(LoadWeights, request.body)
        named = saved(asked.path)
        folder = self._where.saved_as(*named) if named and named[1] == "weights" else None
        if folder is None or folders.about(folder) is None:
            raise UserFault(f"{asked.path} does not exist")
        self._models.load_state(model.id, folder, asked.optimizer)
        self._drop_gradients(model, at)
        told = {"path": asked.path, "model_id": model.id, "type": request.op}
        return Result("done", msgspec.json.encode(told))


def write_folder(path: Path, about: dict[str, Any], fill: Callable[[Path], None]) -> None:
    """Make a folder with what `fill` puts there and a description, in the place of an older one. DiskFull."""
    with whole_directory(path) as folder:
        fill(folder)
        listed = files.listing(folder, sorted(folder.iterdir()) if folder.exists() else ())
        (folder / folders.META).write_text(json.dumps({**about, "files": listed}))


def adds_gradients(request: Request) -> bool:
    """False for a request that leaves gradients as they are, such as a forward without a backward."""
    if request.op != "forward_backward" or request.about.get("forward_only"):
        return False
    try:
        return request.kind == "refused" or not read_forward_backward(request.body).forward_only
    except BadBody:
        return True


def changes_weights(request: Request) -> bool:
    """True for a request without which later steps of its model would be others."""
    return request.op in ("optim_step", "load_weights") or adds_gradients(request)


class _Path(msgspec.Struct):
    path: str | None = None


def named(request: Request) -> bool:
    """True for a request that saves under a client's name."""
    return request.op in SAVES and bool(msgspec.json.decode(request.body or b"{}", type=_Path).path)


def by(request: Request) -> str:
    return f"{request.id}:{request.seq}"


def failure(state: str, text: str) -> Result:
    return Result(state, msgspec.json.encode({"error": text, "category": state}))
