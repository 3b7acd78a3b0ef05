"""Tensors that are spread over ranks, as DTensor has them: the part of a rank, gathered ones, sums over ranks.

Used by the trainer, its checkpoints and the ranks. Talks to torch.distributed; knows nothing of models, losses or
processes. A tensor that is not spread is its own part, so that one text serves a trainer alone and a team. A part is a
box of the whole tensor; a cut whose parts are none is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from busrl.errors import BugError

dist: Any = torch.distributed  # its stub does not export the mesh of a tensor

# -- one tensor -----------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; shares the memory."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def any_spread(tensors: Iterable[Tensor]) -> bool:
    return any(hasattr(tensor, "device_mesh") for tensor in tensors)


def rank_and_world(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """This process's rank among those that the tensors are spread over, and how many these are; 0 of 1 without."""
    return (dist.get_rank(), dist.get_world_size()) if any_spread(tensors) else (0, 1)


def alike(tensors: Sequence[Any]) -> bool:
    """True if all are spread over the same mesh, so that one operation can be of all of them."""
    return len({tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")}) < 2


def weight_in_sum(tensor: Any) -> float:
    """The factor of a number of this rank's part in a sum over all ranks: 1 over how many have it."""
    if not hasattr(tensor, "device_mesh"):
        return 1.0
    sizes = (tensor.device_mesh.size(axis) for axis, cut in enumerate(tensor.placements) if not cut.is_replicate())
    return float(math.prod(sizes) / dist.get_world_size())


def begin(tensor: Any) -> tuple[int, ...]:
    """The place where this rank's part of a tensor begins, per axis; it ends by its own size."""
    if not hasattr(tensor, "device_mesh"):
        return tuple(0 for _ in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local(tensor).shape):
        raise BugError(f"a tensor of {list(tensor.shape)} is cut into parts that are no boxes: {tensor.placements}")
    return tuple(int(start) for start in offset)


def within(tensor: Any) -> tuple[slice, ...]:
    """This rank's part as slices of the whole tensor."""
    return tuple(slice(at, at + size) for at, size in zip(begin(tensor), local(tensor).shape, strict=True))


def first_to_have(tensor: Any, rank: int) -> bool:
    """True if no lower rank has what this one has of a tensor; of one that is not spread rank 0 alone."""
    if not hasattr(tensor, "device_mesh"):
        return rank == 0
    mesh, where = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    copies = (at for at, cut in zip(where, tensor.placements, strict=True) if cut.is_replicate())
    return bool((mesh.mesh == 0).any()) and not any(copies)


def spread_of(part: Tensor, pattern: Any) -> Tensor:
    """A tensor that is spread as `pattern` is, of this rank's part."""
    from torch.distributed.tensor import DTensor

    tensor: Tensor = DTensor.from_local(
        part.to(local(pattern).device), pattern.device_mesh, pattern.placements, run_check=False,
        shape=pattern.shape, stride=pattern.stride(),
    )
    return tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank and on the device of the ranks: a collective if it is spread."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    there: Any = tensor
    tensor_: Tensor = there.to(there.device_mesh.device_type).full_tensor()
    return tensor_


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
    if not any_spread(parameters):
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64, device=local(parameters[0]).device)
    dist.all_reduce(sums)
    return sums.tolist()


def summed(values: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The sum of a tensor over the ranks that the parameters are spread over; nothing is read back from the device."""
    if any_spread(parameters):
        values = values.clone()
        dist.all_reduce(values)
    return values


def add_gradients(tensors: Sequence[Tensor], copies: int, parameters: Sequence[Tensor]) -> None:
    """Sums the gradients of tensors that every rank has whole over the ranks that `parameters` are spread over, in
    place. `copies`: how many ranks compute the same samples."""
    if not any_spread(parameters):
        return
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.div_(copies)
        dist.all_reduce(tensor.grad)
