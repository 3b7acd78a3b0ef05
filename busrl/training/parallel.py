"""How the ranks of a learner share one model: meshes of ranks, and transformers' own plans of what each axis cuts.

Used by `distributed` and by what builds a trainer of a shard. Talks to torch's meshes and to the tables `tp_plan` and
`ep_plan` of transformers; knows nothing of files, messages or losses.

- ranks = replicate x fsdp x tensor, the tensor axis innermost. Ranks of one tensor group compute the same samples.
- An expert is whole: the experts of a layer are dealt out over `expert` ranks of fsdp x tensor, and tokens travel to
  them. What no plan names (embedding, head, norms; experts without an expert axis) is whole on each tensor rank.
- A cut is even on every axis, or the model is refused: parts are boxes then, of any checkpoint and any file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from busrl.errors import ModelNotLoaded

TENSOR_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}  # those whose parts are boxes
EXPERT_STYLES = {"grouped_gemm", "ep_dispatch_experts"}
EXPERTS = "ep_dispatch_experts"  # the style of a module whose parameters are dealt out
ALL_TO_ALL = "all_to_all"  # tokens travel in scoring as in training: one way of computing


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; see the head of the module."""

    ranks: int
    replicate: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def fsdp(self) -> int:
        return self.ranks // (self.replicate * self.tensor)

    @property
    def shares(self) -> int:
        """How many ranks have samples of their own; the rank `share * tensor` is the first that has those of one."""
        return self.ranks // self.tensor


@dataclass(frozen=True)
class Meshes:
    """`dense` is what FSDP2 spreads over, one axis or (replicate, fsdp); the others are there where their axis is."""

    layout: Layout
    dense: Any
    tensor: Any = None
    experts: Any = None  # what FSDP2 spreads experts over
    expert: Any = None


def meshes(layout: Layout, device: str) -> Meshes:
    """A collective of all ranks."""
    axes = {"replicate": layout.replicate, "fsdp": layout.fsdp, "tensor": layout.tensor}
    every = _mesh(device, axes)
    dense = _spread(every, layout)
    if layout.expert == 1:
        return Meshes(layout, dense, every["tensor"] if layout.tensor > 1 else None)
    left = layout.fsdp * layout.tensor // layout.expert
    sparse = _mesh(device, {"replicate": layout.replicate, "fsdp": left, "expert": layout.expert})
    tensor = every["tensor"] if layout.tensor > 1 else _mesh(device, {"replicate": layout.ranks, "fsdp": 1})["fsdp"]
    return Meshes(layout, dense, tensor, _spread(sparse, layout), sparse["expert"])


def _mesh(device: str, axes: Mapping[str, int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    kept = {name: size for name, size in axes.items() if size > 1 or name == "fsdp"}
    return init_device_mesh(device, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _spread(mesh: Any, layout: Layout) -> Any:
    return mesh["replicate", "fsdp"] if layout.replicate > 1 else mesh["fsdp"]


# -- plans ----------------------------------------------------------------------------


def cut(model: Any, meshes: Meshes) -> None:
    """Cut a model on `meta` along the tensor and the expert axis, in place; ModelNotLoaded where it cannot be."""
    layout = meshes.layout
    if layout.tensor > 1:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        plan = tensor_plan(model, layout)
        # One line per rank about gathering along two axes in turn, which is what is wanted.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        apply_tensor_parallelism(model, meshes.tensor, plan)
    if layout.expert > 1:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        apply_expert_parallelism(model, meshes.expert, meshes.tensor, expert_plan(model, layout), ALL_TO_ALL)


def tensor_plan(model: Any, layout: Layout) -> dict[str, str]:
    """transformers' plan of the layers, by the names of modules and parameters. The embedding and the head stay whole:
    busrl's own head reads the weight and not the module's output."""
    known = {name: style for name, style in (getattr(model, "tp_plan", None) or {}).items() if _in_layers(name)}
    if not known:
        raise ModelNotLoaded(
            f"{type(model).__name__}: transformers has no plan (tp_plan) to cut its layers; set "
            "learner.parallel.tensor = 1"
        )
    if odd := sorted({style for name, style in known.items() if style not in TENSOR_STYLES and ".experts" not in name}):
        raise ModelNotLoaded(
            f"{type(model).__name__}: its plan cuts tensors as {', '.join(odd)}, whose parts no file of ranks can "
            "hold; set learner.parallel.tensor = 1"
        )
    plan = _expanded(model, {name: style for name, style in known.items() if ".experts" not in name})
    _require_heads(model.config, layout.tensor)
    parameters = dict(model.named_parameters())
    for name, style in plan.items():
        if (one := parameters.get(name)) is not None and style in ("colwise", "rowwise"):
            axis = 1 if style == "rowwise" and one.ndim > 1 else 0
            rows = layout.fsdp * (1 if axis else layout.tensor)
            if style == "colwise" or axis:
                _require_even(name, one, axis, layout.tensor, "learner.parallel.tensor")
            _require_even(name, one, 0, rows, "ranks / learner.parallel.replicate")
    return plan


def expert_plan(model: Any, layout: Layout) -> dict[str, str]:
    """transformers' plan of the experts, by the names of modules and parameters."""
    known = dict(getattr(model, "ep_plan", None) or {})
    if not known or set(known.values()) - EXPERT_STYLES or EXPERTS not in known.values():
        raise ModelNotLoaded(
            f"{type(model).__name__}: transformers has no plan (ep_plan) that deals its experts out; set "
            "learner.parallel.expert = 1"
        )
    plan, parameters = _expanded(model, known), dict(model.named_parameters())
    dealt = [name for name in plan if name in parameters]
    for name in dealt:
        _require_even(name, parameters[name], 0, layout.expert, "learner.parallel.expert")
        _require_even(name, parameters[name], 0, layout.fsdp * layout.tensor, "ranks / learner.parallel.replicate")
    if not dealt:
        raise ModelNotLoaded(f"{type(model).__name__} has no experts; set learner.parallel.expert = 1")
    return plan


def dealt(model: Any) -> Iterator[nn.Module]:
    """The modules of a model whose experts `cut` has dealt out."""
    return (module for module in model.modules() if getattr(module, "_is_expert_parallel", False))


def _in_layers(name: str) -> bool:
    return ".layers." in f".{name}"


def _expanded(model: Any, plan: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = model._expand_parallel_plan(plan)
    return found


def _require_heads(config: Any, tensor: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None) or 0
        if count % tensor:
            raise ModelNotLoaded(
                f"the model has {name} = {count}, which learner.parallel.tensor = {tensor} does not divide; set a "
                "divisor of it"
            )


def _require_even(name: str, tensor: torch.Tensor, axis: int, over: int, key: str) -> None:
    if tensor.shape[axis] % over:
        raise ModelNotLoaded(
            f"{name} is {list(tensor.shape)}: its {'columns' if axis else 'rows'} cannot be cut evenly into {over} "
            f"parts; change {key}"
        )
