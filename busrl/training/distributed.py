"""A model whose parameters, gradients and optimiser state are spread over ranks: FSDP2 of torch, sums instead of means.

Used by whoever builds a trainer of several ranks. Talks to torch.distributed; knows nothing of losses, plans or
processes.

- A gradient is the *sum* over ranks: FSDP2's own division by their number is off in every module, and the sum is
  forced, for the setting of the factor alone becomes an operation that Gloo refuses.
- Every forward goes through the root module and through the head as modules, for there FSDP2 gathers the weights.
- All ranks make the same number of forwards and of backwards: each is a collective.
- Shards, gradients and optimiser are float32; `dtype` is what is gathered and computed with.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from busrl.errors import BugError, ModelNotLoaded
from busrl.training.batch import Flat, Sample
from busrl.training.forward import Forward, PaddedRows, Scores
from busrl.training.shard_files import Part, Shards

dist: Any = torch.distributed  # its stub exports neither the stores nor the groups of a mesh
HOST = "127.0.0.1"  # the only one that is served

# -- groups of processes -----------------------------------------------------------


def open_store(world: int, timeout_s: float) -> Any:
    """The store through which `world` ranks find each other, on a free port of this host; its `port` says which."""
    return dist.TCPStore(HOST, 0, world, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def find_store(port: int, world: int, timeout_s: float) -> Any:
    """The same for a rank that did not open it."""
    return dist.TCPStore(HOST, port, world, is_master=False, timeout=timedelta(seconds=timeout_s))


def join(store: Any, prefix: str, rank: int, world: int, device: torch.device, timeout_s: float) -> Any:
    """The mesh of `world` ranks; blocks until all are there. A collective that takes longer than the time raises."""
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_backend(device)}"
    dist.init_process_group(
        backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.device_mesh.init_device_mesh(device.type, (world,), mesh_dim_names=("fsdp",))


def _backend(device: torch.device) -> str:
    return {"cuda": "nccl", "npu": "hccl"}.get(device.type, device.type)


def leave() -> None:
    """Give up the group of this process, if it has one."""
    if dist.is_initialized():
        dist.destroy_process_group()


# -- the model ------------------------------------------------------------------------


def shard(model: Any, mesh: Any, dtype: torch.dtype | None = None, reshard: bool = True) -> None:
    """Spread a loaded model over the mesh in place, layer by layer. ModelNotLoaded for one without known layers.

    `dtype`: what is gathered and computed with; None: as the parameters are. `reshard`: gathered weights are given up
    between forward and backward (less memory, one more all-gather).
    """
    reduced = None if dtype is None else torch.float32
    # No cast of inputs: a model in one type casts where it must, and the plan of a packed row is to stay one object.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    embedding, head, norm = model.get_input_embeddings(), model.get_output_embeddings(), _norm(model)
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    tail = [part for part in (norm, head) if part is not None]
    if head is not None and head.weight is embedding.weight:  # torch refuses a tied weight in two groups
        tail = [embedding, *tail]
    else:
        fully_shard(embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if tail:
        fully_shard(tail, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # neither setting reaches the modules below
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def layers(model: Any) -> list[nn.Module]:
    """The model's layers; ModelNotLoaded with the remedy if they stand where no known model has them."""
    found = getattr(model.base_model, "layers", None)
    if not isinstance(found, nn.ModuleList) or not len(found):
        raise ModelNotLoaded(
            f"{type(model).__name__}: its layers are not at base_model.layers, so it cannot be spread over ranks; "
            "train it with ranks = 1"
        )
    return list(found)


def _norm(model: Any) -> nn.Module | None:
    norm = getattr(model.base_model, "norm", None)
    return norm if isinstance(norm, nn.Module) else None


class Sharded(Forward):
    """Another way's scores of a model that `shard` has spread, its calls made where FSDP2 gathers the weights."""

    def __init__(self, way: Forward) -> None:
        super().__init__(way.model)
        self.way, self.name, self.together = way, f"sharded {way.name}", way.together
        if isinstance(way, PaddedRows):
            way.head = _through(way.model.get_output_embeddings(), way.head)
            way.model.busrl_score = types.MethodType(_scored, way.model)
            register_fsdp_forward_method(way.model, "busrl_score")

    def score(self, samples: Sequence[Sample], flat: Flat) -> Scores:
        if not isinstance(self.way, PaddedRows):
            return self.way.score(samples, flat)
        found: Scores = self.model.busrl_score(self.way, samples, flat)
        if not torch.is_grad_enabled():  # no backward will give up what was gathered, and it would be used when stale
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return found

    def size(self, samples: Sequence[Sample]) -> int:
        return self.way.size(samples)


def _scored(_: Any, way: Forward, samples: Sequence[Sample], flat: Flat) -> Scores:
    """A method of the root module."""
    return way.score(samples, flat)


def _through(head: Any, pieces: Callable[..., Scores]) -> Callable[..., Scores]:
    """`pieces`, called by the module of the head with its gathered weight; the module's own call stays as it was."""
    plain = head.forward

    def forward(hidden: Tensor, *more: Any, of_tokens: bool = False) -> Any:
        return pieces(hidden, head.weight, *more, head.bias) if of_tokens else plain(hidden)

    def call(hidden: Tensor, _: Tensor, *more: Any) -> Scores:
        found: Scores = head(hidden, *more[:-1], of_tokens=True)  # the last is the bias
        return found

    head.forward = forward
    return call


# -- tensors --------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; a tensor that is not spread is its own part. Shares the memory."""
    own = getattr(tensor, "to_local", None)
    return tensor if own is None else own()


def place(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """This process's rank among those that the tensors are spread over, and how many these are; 0 of 1 without."""
    meshes = (tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh"))
    mesh: Any = next(meshes, None)
    return (0, 1) if mesh is None else (int(mesh.get_rank()), int(mesh.size()))


def part_of(name: str, tensor: Tensor, rank: int) -> Part | None:
    """What this rank has to write of a tensor: its rows, or all of one that is not spread, on rank 0 alone."""
    if not hasattr(tensor, "device_mesh"):
        return None if rank else Part(name, tensor, 0, tuple(tensor.shape))
    return Part(name, local(tensor), _first_row(tensor), tuple(tensor.shape))


def region(tensor: Any) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor, a slice per dimension."""
    if not hasattr(tensor, "device_mesh"):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _first_row(tensor: Any) -> int:
    rows, *others = region(tensor)
    if any(one.stop - one.start != size for one, size in zip(others, tensor.shape[1:], strict=True)):
        raise BugError(f"a tensor of {list(tensor.shape)} is cut along another axis than its rows")
    return int(rows.start)


def read_like(found: Shards, name: str, pattern: Any) -> Tensor:
    """This rank's part of a tensor of a checkpoint, spread as `pattern` is; whole where that is not spread."""
    if not hasattr(pattern, "device_mesh"):
        return found.whole(name)
    from torch.distributed.tensor import DTensor

    own = local(pattern)
    part = found.rows(name, _first_row(pattern), len(own)) if own.numel() else torch.empty_like(own)
    made: Tensor = DTensor.from_local(
        part.to(own.device), pattern.device_mesh, pattern.placements, shape=pattern.shape, stride=pattern.stride()
    )
    return made


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank: a collective if it is spread."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def spread_like(tensor: Tensor, pattern: Any) -> Tensor:
    """This rank's part of `tensor`, which every rank has whole, spread as `pattern` is; without communication."""
    if not hasattr(pattern, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    spread: Tensor = distribute_tensor(
        tensor.to(pattern.device), pattern.device_mesh, pattern.placements, src_data_rank=None
    )
    return spread


class OverParts:
    """An optimiser of this rank's parts of tensors that are spread over ranks, for one that cannot take such tensors.

    Stands for the optimiser of the tensors themselves: its states come out and go in spread as those are. A rank that
    has no row of a tensor updates a row of zeros in its place, so that all ranks have the same states.
    """

    def __init__(
        self, parameters: Sequence[Any], make: Callable[[list[Tensor]], Any],
        unpacked: Callable[[Any], dict[str, Any]], packed: Callable[[Any], dict[str, Any]],
    ) -> None:
        """`unpacked` turns the state of a part into one whose values stand where those of the part do, `packed` is the
        other way."""
        self._unpacked, self._packed = unpacked, packed
        self._whole: dict[Any, Any] = {}
        for parameter in parameters:
            own = local(parameter.detach())
            self._whole[nn.Parameter(own if own.numel() else own.new_zeros(1, *own.shape[1:]))] = parameter
        self.inner = make(list(self._whole))
        self.param_groups = [
            {**group, "params": [self._whole[part] for part in group["params"]]} for group in self.inner.param_groups
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part, whole in self._whole.items():
            part.grad = whole.grad = None

    def step(self) -> None:
        for part, whole in self._whole.items():
            if whole.grad is not None:
                own = local(whole.grad)
                part.grad = own if own.numel() else torch.zeros_like(part)
        for mine, own_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            own_group.update({name: value for name, value in mine.items() if name != "params"})
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        found = self.inner.state_dict()
        kept = {number: self._unpacked(state) for number, state in found["state"].items()}
        groups = [{**one, "params": numbers["params"]} for one, numbers in
                  zip(self.param_groups, found["param_groups"], strict=True)]
        return {**found, "param_groups": groups, "state": {
            number: {name: _spread_part(value, part, self._whole[part]) for name, value in kept[number].items()}
            for number, part in enumerate(self._parts()) if number in kept
        }}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = {
            number: self._packed({name: _part_of(value, part) for name, value in state["state"][number].items()})
            for number, part in enumerate(self._parts()) if number in state["state"]
        }
        self.inner.load_state_dict({**state, "state": found})
        for mine, own in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update({name: value for name, value in own.items() if name != "params"})

    def _parts(self) -> list[Any]:
        """By number."""
        return [part for group in self.inner.param_groups for part in group["params"]]


def _spread_part(value: Any, part: Tensor, whole: Any) -> Any:
    """A value per value of the part, as a part of what is spread; anything else as it is."""
    if not isinstance(value, Tensor) or not value.ndim or value.shape != part.shape:
        return value
    from torch.distributed.tensor import DTensor

    own = value[: local(whole).shape[0]]
    return DTensor.from_local(
        own, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _part_of(value: Any, part: Tensor) -> Any:
    """The other way."""
    if not hasattr(value, "device_mesh"):
        return value
    own = local(value)
    return own.clone() if own.numel() else torch.zeros_like(part, dtype=own.dtype)


def added(values: Sequence[float], parameters: Sequence[Tensor]) -> list[float]:
    """The sums of numbers over the ranks that the parameters are spread over: one collective, in float64."""
    if not any(hasattr(parameter, "device_mesh") for parameter in parameters):
        return list(values)
    found = torch.tensor(values, dtype=torch.float64, device=local(parameters[0]).device)
    dist.all_reduce(found)
    return found.tolist()


def gathered(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A whole tensor, cast before it is gathered; a collective on all ranks if it is spread."""
    return whole(tensor.detach() if dtype is None else tensor.detach().to(dtype))
