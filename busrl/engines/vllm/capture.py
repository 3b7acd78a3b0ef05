"""Routes inside a worker of vLLM on a CPU: the experts that its routers chose, kept beside the key-value cache.

Made by `worker` in vLLM's process; the rollout process takes the routes of a request when it has ended. Talks to the
model's routers and to the batch of vLLM's first model runner. Knows nothing of versions, slots or the bus.

- Routes lie where a position's keys and values lie, so a prefix found in the cache has those of the request that
  computed it, and a block that is given to another request gives its place away with it.
- A request's rows are copied when it leaves the batch (at its end, or preempted): its blocks may be another's next.
- Rows of a step that asked no router are lost, and whoever takes a request with one of them gets none.
- A position that is computed again keeps its first row: that of the weights that drew the token behind it.
- Rows are copied for requests whose names begin with `MARK` alone, and kept until they are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

MARK = "routes."
MOST = 8  # times the requests that vLLM has at once: those whose rows are kept, as of one cancelled at its start
MISSES = "its routes cannot be noted"


def objection(runner: Any, layers: list[int]) -> str:
    """The reason why routes of a runner's model cannot be noted; "" if they can."""
    lacks = [name for name in ("_model_forward", "input_batch", "query_start_loc", "kv_cache_config")
             if not hasattr(runner, name)]
    if lacks:
        return f"{type(runner).__name__} of this vLLM has no {lacks[0]}: {MISSES}"
    found = sorted(layer for layer, _ in _routers(_model_of(runner)))
    if found != sorted(layers):
        return f"vLLM has routers in the layers {found}, and the model in {layers}: {MISSES}"
    if getattr(runner, "speculative_config", None) is not None:
        return f"a step of speculative decoding reads tokens that may be refused: {MISSES}"
    if not runner.model_config.enforce_eager:
        return f"a compiled model (vllm.enforce_eager = \"off\") calls no router by itself: {MISSES}"
    if (groups := len(runner.kv_cache_config.kv_cache_groups)) != 1:
        return f"the layers of this model have {groups} kinds of caches: {MISSES}"
    return ""


def watch(runner: Any, file: Callable[[], None], leave: Callable[[str], None]) -> None:
    """Have `file` called after each forward pass of a runner, and `leave` before a request leaves its batch."""
    batch = runner.input_batch
    forward, remove = runner._model_forward, batch.remove_request

    def model_forward(*args: Any, **more: Any) -> Any:
        output = forward(*args, **more)
        file()
        return output

    def remove_request(name: str) -> Any:
        leave(name)
        return remove(name)

    runner._model_forward, batch.remove_request = model_forward, remove_request


def _model_of(runner: Any) -> Any:
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


def _routers(model: Any) -> list[tuple[int, Any]]:
    """Number and router of each layer with experts; a module around one may have its router too."""
    found = ((getattr(module, "layer_id", None), getattr(module, "router", None)) for module in model.modules())
    routers = {id(router): (layer, router) for layer, router in found
               if layer is not None and callable(getattr(router, "set_capture_fn", None))}
    return list(routers.values())


class Capture:
    """The routes of one runner, from its making on. `layers`: numbers of the layers with experts, in order."""

    def __init__(self, runner: Any, layers: list[int], top_k: int, dtype: str) -> None:
        self._runner, self._batch = runner, runner.input_batch
        group = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        places = int(runner.kv_cache_config.num_blocks) * int(group.block_size)
        shape = (len(layers), top_k)
        self._kept = np.zeros((places, *shape), dtype)  # by place in the key-value cache
        self._known = np.zeros(places, np.bool_)  # and whether it was noted when the place was last written
        self._step = np.zeros((runner.max_num_tokens, *shape), dtype)
        self._noted = [0] * len(layers)  # rows of this step, by layer
        self._ends: dict[str, int] = {}  # by request of the last step: positions computed
        self._rows: dict[str, npt.NDArray[Any]] = {}  # by request: of its first positions, copied
        self._most = MOST * runner.max_num_reqs
        self._taken: set[str] = set()  # while they are in the batch
        for layer, router in _routers(_model_of(runner)):
            router.set_capture_fn(self._noting(layers.index(layer)))
        watch(runner, self._file, self._leave)

    def take(self, name: str, begin: int, end: int) -> bytes:
        """Routes of the positions from `begin` to `end` of a request that has ended, which is then forgotten; nothing
        if they are not all here. vLLM's own name of a request is ours, with an ending that it makes."""
        own = next((one for one in [*self._ends, *self._rows] if one == name or one.rpartition("-")[0] == name), name)
        if own in self._batch.req_id_to_index:
            self._copy(own)
            self._taken.add(own)
        rows = self._rows.pop(own, self._kept[:0])
        return rows[begin:end].tobytes() if len(rows) >= end else b""

    @property
    def kept(self) -> int:
        """Requests whose rows are copied and not taken."""
        return len(self._rows)

    # -- in a step of the runner -----

    def _noting(self, place: int) -> Any:
        def note(ids: Any) -> None:
            self._noted[place] = len(ids)
            self._step[: len(ids), place] = ids.detach().cpu().numpy()

        return note

    def _file(self) -> None:
        """Put the routes of this step beside what it wrote into the cache."""
        count = self._batch.num_reqs
        begins = self._runner.query_start_loc.np[: count + 1]
        known, lengths, rows = self._batch.num_computed_tokens_cpu[:count], np.diff(begins), int(begins[-1])
        owners = np.repeat(np.arange(count), lengths)
        positions = np.arange(rows) + np.repeat(known - begins[:-1], lengths)
        places = self._places(owners, positions)
        self._known[places] = noted = min(self._noted) >= rows  # else a kernel has asked no router
        if noted:
            self._kept[places] = self._step[:rows]
        self._noted = [0] * len(self._noted)
        self._ends = dict(zip(self._batch.req_ids[:count], (known + lengths).tolist()))

    def _places(self, owner: Any, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Places in the cache of positions of a row of the batch, or each of its own row."""
        table = self._batch.block_table[0]
        size = int(table.block_size)
        blocks: npt.NDArray[np.int64] = table.get_numpy_array()[owner, positions // size].astype(np.int64)
        places: npt.NDArray[np.int64] = blocks * size + positions % size
        return places

    def _leave(self, name: str) -> None:
        """A request leaves the batch."""
        if name in self._taken:
            self._taken.discard(name)
        elif name.startswith(MARK) and name in self._batch.req_id_to_index:
            self._copy(name)

    def _copy(self, name: str) -> None:
        """Copy a request's rows that were not copied before, up to one that is lost."""
        before = self._rows.get(name, self._kept[:0])
        new = np.arange(len(before), self._ends.get(name, 0))
        if len(new):
            places = self._places(self._batch.req_id_to_index[name], new)
            own = self._kept[places[np.logical_and.accumulate(self._known[places])]]
            self._rows[name] = np.concatenate([before, own])
            if len(self._rows) > self._most:  # the oldest: one that lives is copied anew
                del self._rows[next(iter(self._rows))]
