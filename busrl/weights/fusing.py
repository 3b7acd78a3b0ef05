"""Which rows of an engine's tensors are which tensor of the checkpoint: engines fuse projections with equal inputs.

Used by the bridge when one process's model is made of another's tensors. Works on names and shapes alone: knows nothing
of devices, processes or torch.

- Every name of the checkpoint has its rows, and every tensor of the engine is covered: a tensor that would stay as it
  was while the others are trained is an error, not a surprise.
- Fused rows lie in the order q, k, v and gate, up. Rows beyond the vocabulary are padding and belong to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from busrl.errors import UserError

Shape = tuple[int, ...]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PADDED = ("embed_tokens.weight", "lm_head.weight", "wte.weight")  # engines round the vocabulary up


@dataclass(frozen=True)
class Part:
    """A tensor of the checkpoint: rows `start` to `stop` of the engine's tensor; a tensor without rows has 0 to 0."""

    name: str
    tensor: str
    start: int
    stop: int


def parts(engine: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> list[Part]:
    """Where each wanted tensor lies among the engine's. UserError names the first that has no place."""
    found = [_place(name, shape, engine, wanted) for name, shape in wanted.items()]
    left = engine.keys() - {part.tensor for part in found}
    if left:
        raise UserError(f"weights: {_first(left)} of the engine is no tensor of the checkpoint; {_remedy()}")
    return found


def _place(name: str, shape: Shape, engine: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> Part:
    if name in engine:
        _check_whole(name, shape, engine[name])
        return Part(name, name, 0, shape[0] if shape else 0)
    for fused, pieces in FUSED.items():
        for piece in pieces:
            tensor = name.replace(f".{piece}.", f".{fused}.")
            if tensor != name and tensor in engine:
                siblings = [name.replace(f".{piece}.", f".{other}.") for other in pieces]
                return _slice(name, tensor, siblings, engine, wanted)
    raise UserError(f"weights: the engine has no {name}, alone or fused; {_remedy()}")


def _check_whole(name: str, shape: Shape, own: Shape) -> None:
    padded = name.endswith(PADDED) and own[1:] == shape[1:] and own[0] >= shape[0]
    if own != shape and not padded:
        raise UserError(f"weights: {name} is {list(own)} in the engine and {list(shape)} in the checkpoint")


def _slice(
    name: str, tensor: str, siblings: list[str], engine: Mapping[str, Shape], wanted: Mapping[str, Shape]
) -> Part:
    missing = [sibling for sibling in siblings if sibling not in wanted]
    if missing:
        raise UserError(f"weights: {tensor} of the engine holds {missing[0]} too, which the checkpoint does not have")
    rows = [wanted[sibling][0] for sibling in siblings]
    same = all(wanted[sibling][1:] == engine[tensor][1:] for sibling in siblings)
    if sum(rows) != engine[tensor][0] or not same:
        raise UserError(
            f"weights: {tensor} is {list(engine[tensor])} in the engine; {' + '.join(siblings)} make {sum(rows)} rows "
            "in the checkpoint (is the engine split over several devices?)"
        )
    start = sum(rows[: siblings.index(name)])
    return Part(name, tensor, start, start + wanted[name][0])


def _first(names: set[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return min(names) + more


def _remedy() -> str:
    return 'this architecture can not share its weights: use weights.transport = "shm"'
