"""Tensors that are spread over ranks, as DTensor has them: the part of a rank, gathered ones, sums over ranks.

Used by the trainer, its checkpoints and the ranks. Talks to torch.distributed; knows nothing of models, losses or
processes. A tensor that is not spread is its own part, so that one text serves a trainer alone and a team.

- A part is a box of the whole tensor; a cut whose parts are none is an error.
- An optimiser that cannot take spread tensors gets this rank's parts (`OverParts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from busrl.errors import BugError

dist: Any = torch.distributed  # its stub does not export the mesh of a tensor

# -- one tensor -----------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; a tensor that is not spread is its own part. Shares the memory."""
    own = getattr(tensor, "to_local", None)
    return tensor if own is None else own()


def rank_and_world(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """This process's rank among those that the tensors are spread over, and how many these are; 0 of 1 without."""
    spread = any(hasattr(tensor, "device_mesh") for tensor in tensors)
    return (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)


def alike(tensors: Sequence[Any]) -> bool:
    """Whether all are spread over the same mesh, so that one operation can be of all of them."""
    return len({tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")}) < 2


def weight_in_sum(tensor: Any) -> float:
    """What a number of this rank's part has to be multiplied by in a sum over all ranks: 1 over how many have it."""
    if not hasattr(tensor, "device_mesh"):
        return 1.0
    sizes = (tensor.device_mesh.size(axis) for axis, cut in enumerate(tensor.placements) if not cut.is_replicate())
    return float(math.prod(sizes) / dist.get_world_size())


def box(tensor: Any) -> tuple[int, ...]:
    """Where this rank's part of a spread tensor begins, per axis; its size is that of the part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local(tensor).shape):
        raise BugError(f"a tensor of {list(tensor.shape)} is cut into parts that are no boxes: {tensor.placements}")
    return tuple(int(one) for one in offset)


def within(tensor: Any) -> tuple[slice, ...]:
    """The same as slices of the whole tensor."""
    if not hasattr(tensor, "device_mesh"):
        return tuple(slice(0, size) for size in tensor.shape)
    return tuple(slice(at, at + size) for at, size in zip(box(tensor), local(tensor).shape, strict=True))


def spread_of(part: Tensor, pattern: Any) -> Tensor:
    """What is spread as `pattern` is, of this rank's part."""
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        part.to(local(pattern).device), pattern.device_mesh, pattern.placements, run_check=False,
        shape=pattern.shape, stride=pattern.stride(),
    )
    return made


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank and on the device of the ranks: a collective if it is spread."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    there: Any = tensor
    found: Tensor = there.to(there.device_mesh.device_type).full_tensor()
    return found


def gathered(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A whole tensor, cast before it is gathered; a collective on all ranks if it is spread."""
    return whole(tensor.detach() if dtype is None else tensor.detach().to(dtype))


def spread_like(tensor: Tensor, pattern: Any) -> Tensor:
    """This rank's part of `tensor`, which every rank has whole, spread as `pattern` is; without communication."""
    if not hasattr(pattern, "device_mesh"):
        return tensor
    return spread_of(tensor[within(pattern)].clone(), pattern)


# -- sums over ranks ------------------------------------------------------------------


def added(values: Sequence[float], parameters: Sequence[Tensor]) -> list[float]:
    """The sums of numbers over the ranks that the parameters are spread over: one collective, in float64."""
    if not any(hasattr(parameter, "device_mesh") for parameter in parameters):
        return list(values)
    found = torch.tensor(values, dtype=torch.float64, device=local(parameters[0]).device)
    dist.all_reduce(found)
    return found.tolist()


def add_gradients(own: Sequence[Tensor], copies: int, parameters: Sequence[Tensor]) -> None:
    """Sums the gradients of tensors that every rank has whole over the ranks that `parameters` are spread over, in
    place. `copies`: how many ranks compute the same samples."""
    if not any(hasattr(parameter, "device_mesh") for parameter in parameters):
        return
    for one in own:
        one.grad = torch.zeros_like(one) if one.grad is None else one.grad.div_(copies)
        dist.all_reduce(one.grad)


# -- an optimiser of parts ------------------------------------------------------------


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
            number: self._packed({name: _own_part(value, part) for name, value in state["state"][number].items()})
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
    return spread_of(value[: local(whole).shape[0]], whole)


def _own_part(value: Any, part: Tensor) -> Any:
    """The other way."""
    if not hasattr(value, "device_mesh"):
        return value
    own = local(value)
    return own.clone() if own.numel() else torch.zeros_like(part, dtype=own.dtype)
