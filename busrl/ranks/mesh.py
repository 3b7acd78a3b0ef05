"""The mesh of a learner's ranks, and a model spread over it: FSDP2 of torch, sums instead of means.

Used by `leader`, `follower` and `builder`. Talks to torch.distributed; knows nothing of losses, plans of micro-batches,
messages or processes.

- A gradient is the *sum* over ranks: FSDP2's own division by their number is off in every module, and the sum is
  forced, for the setting of the factor alone becomes an operation that Gloo refuses.
- Every forward goes through the root module and through the head as modules, for there FSDP2 gathers the weights. No
  tensor that leaves them is a view: FSDP2 hooks backward to it, and an operation in place on a view drops the hook.
- All ranks make the same number of forwards and of backwards: each is a collective.
- Shards, gradients and optimiser are float32; `dtype` is what is gathered and computed with.
- ranks = replicate x fsdp x tensor, the tensor axis innermost. Ranks of one tensor group compute the same samples.
- An expert is whole: those of a layer are dealt out over `expert` ranks, and tokens travel to them. What no plan of
  transformers names (embedding, head, norms; experts without an expert axis) is whole on each tensor rank.
- An adapter is cut as its layer is: B where that is cut by outputs, A where it is by inputs; the other one is whole.
- A cut is even on every axis but that of fsdp, or the model is refused: parts are boxes of any checkpoint and file.
"""

from __future__ import annotations

import copy
import functools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import fsdp

from busrl.data.vocabulary import TokenRows
from busrl.errors import ModelNotLoaded
from busrl.system.device import BACKEND
from busrl.training.batch import Flat, Sample
from busrl.training.forward import Forward, PaddedRows, Scores
from busrl.training.head import Head

dist: Any = torch.distributed  # its stub exports no stores
T = TypeVar("T")
HOST = "127.0.0.1"  # for ranks of one host

# -- axes ----------------------------------------------------------------------

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
        """Number of groups of ranks with samples of their own; rank `share * tensor` is the first of its group."""
        return self.ranks // self.tensor


@dataclass(frozen=True)
class Meshes:
    """`dense`: the mesh of FSDP2, one axis or (replicate, fsdp); the others are None without their axis."""

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

    used = {name: size for name, size in axes.items() if size > 1 or name == "fsdp"}
    return init_device_mesh(device, tuple(used.values()), mesh_dim_names=tuple(used))


def _spread(mesh: Any, layout: Layout) -> Any:
    return mesh["replicate", "fsdp"] if layout.replicate > 1 else mesh["fsdp"]


# -- transformers' plans ----------------------------------------------------------------------------


def _cut(model: Any, meshes: Meshes) -> None:
    """Cut a model on `meta` along the tensor and the expert axis, in place; ModelNotLoaded where it cannot be."""
    layout = meshes.layout
    if layout.tensor > 1:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        plan = tensor_plan(model, layout)
        # Silences a line per rank about gathering along two axes in turn, which is intended.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        apply_tensor_parallelism(model, meshes.tensor, plan)
    if layout.expert > 1:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        apply_expert_parallelism(model, meshes.expert, meshes.tensor, expert_plan(model, layout), ALL_TO_ALL)


def tensor_plan(model: Any, layout: Layout) -> dict[str, str]:
    """transformers' plan of the layers, by the names of modules and parameters. The embedding and the head stay whole:
    busrl's own head reads the weight and not the module's output."""
    every = (getattr(model, "tp_plan", None) or {}).items()
    styles = {name: style for name, style in every if ".layers." in f".{name}"}
    if not styles:
        raise ModelNotLoaded(
            f"{type(model).__name__}: transformers has no plan (tp_plan) to cut its layers; set "
            "learner.parallel.tensor = 1"
        )
    of_layers = {name: style for name, style in styles.items() if ".experts" not in name}
    if odd := sorted({*of_layers.values()} - TENSOR_STYLES):
        raise ModelNotLoaded(
            f"{type(model).__name__}: its plan cuts tensors as {', '.join(odd)}, whose parts no file of ranks can "
            "hold; set learner.parallel.tensor = 1"
        )
    plan = _with_adapters(model, of_layers)
    _require_heads(model.config, layout.tensor)
    parameters = dict(model.named_parameters())
    for name, style in plan.items():
        if (parameter := parameters.get(name)) is not None and style in ("colwise", "rowwise"):
            axis = 1 if style == "rowwise" and parameter.ndim > 1 else 0
            rows = layout.fsdp * (1 if axis else layout.tensor)
            if style == "colwise" or axis:
                _require_even(name, parameter, axis, layout.tensor, "learner.parallel.tensor")
            remedy = "lora.rank, or " if ".lora_A." in name else ""
            _require_even(name, parameter, 0, rows, f"{remedy}ranks / learner.parallel.replicate")
    return plan


ADAPTED = {"colwise": "lora_B.default", "rowwise": "lora_A.default"}  # the matrix that is cut with the layer


def _with_adapters(model: Any, plan: dict[str, str]) -> dict[str, str]:
    """The expanded plan. The style of a layer with an adapter goes to its base, and to the matrix of the adapter that
    has the cut axis."""
    inside = {f"{name}.{part}": style for name, style in plan.items() if style in ADAPTED
              for part in ("base_layer", ADAPTED[style])}
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    return {name: style for name, style in _expanded(model, plan | inside).items() if name not in adapted}


def expert_plan(model: Any, layout: Layout) -> dict[str, str]:
    """transformers' plan of the experts, by the names of modules and parameters."""
    styles = dict(getattr(model, "ep_plan", None) or {})
    if not styles or set(styles.values()) - EXPERT_STYLES or EXPERTS not in styles.values():
        raise ModelNotLoaded(
            f"{type(model).__name__}: transformers has no plan (ep_plan) that deals its experts out; set "
            "learner.parallel.expert = 1"
        )
    plan, parameters = _expanded(model, styles), dict(model.named_parameters())
    experts = [name for name in plan if name in parameters]
    for name in experts:
        _require_even(name, parameters[name], 0, layout.expert, "learner.parallel.expert")
        _require_even(name, parameters[name], 0, layout.fsdp * layout.tensor, "ranks / learner.parallel.replicate")
    if not experts:
        raise ModelNotLoaded(f"{type(model).__name__} has no experts; set learner.parallel.expert = 1")
    return plan


def _expanded(model: Any, plan: dict[str, str]) -> dict[str, str]:
    expanded: dict[str, str] = model._expand_parallel_plan(plan)
    return expanded


def _require_heads(config: Any, tensor: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None) or 0
        if count % tensor:
            raise ModelNotLoaded(
                f"the model has {name} = {count}, which learner.parallel.tensor = {tensor} does not divide; set a "
                "divisor of it"
            )


def _require_even(name: str, tensor: Tensor, axis: int, over: int, key: str) -> None:
    if tensor.shape[axis] % over:
        raise ModelNotLoaded(
            f"{name} is {list(tensor.shape)}: its {'columns' if axis else 'rows'} cannot be cut evenly into {over} "
            f"parts; change {key}"
        )


# -- groups of processes -----------------------------------------------------------


def open_store(world: int, timeout_s: float, address: str = HOST) -> tuple[Any, socket.socket]:
    """The store through which `world` ranks find each other, on a free port of this address alone (its `port`); and
    the socket that it listens at."""
    bound = socket.create_server((address, 0), backlog=max(128, world))
    listening = bound.dup()
    store = dist.TCPStore(
        address, bound.getsockname()[1], world, is_master=True, timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False, master_listen_fd=bound.detach(),
    )
    return store, listening


def find_store(port: int, world: int, timeout_s: float, address: str = HOST) -> Any:
    """Connect to the store of `open_store`, as another rank."""
    return dist.TCPStore(address, port, world, is_master=False, timeout=timedelta(seconds=timeout_s))


def join(
    store: Any, prefix: str, rank: int, world: int, device: torch.device, timeout_s: float,
    layout: Layout | None = None,
) -> Meshes:
    """The meshes of `world` ranks; blocks until all are there. A collective that takes longer than the time raises."""
    name = BACKEND.get(device.type, device.type)
    backend = name if device.type == "cpu" else f"cpu:{BACKEND['cpu']},{device.type}:{name}"
    dist.init_process_group(
        backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    return meshes(layout or Layout(world), device.type)


def leave() -> None:
    """Give up the group of this process, if it has one."""
    if dist.is_initialized():
        dist.destroy_process_group()


# -- the model ------------------------------------------------------------------------


def shard(
    model: Any, meshes: Meshes, dtype: torch.dtype | None = None, reshard: bool = True, offload: bool = False
) -> None:
    """Spread a model over the meshes in place, layer by layer; ModelNotLoaded without known layers or plans.

    `dtype`: what is gathered and computed with; None: as the parameters are. `reshard`: gathered weights are given up
    between forward and backward (less memory, one more all-gather). `offload`: shards and gradients are on the host.
    """
    _cut(model, meshes)
    reduced = None if dtype is None else torch.float32
    # No cast of inputs: a model in one type casts where it must, and the plan of a packed row is to stay one object.
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    pinned = fsdp.CPUOffloadPolicy(pin_memory=meshes.dense.device_type != "cpu") if offload else fsdp.OffloadPolicy()
    spread: Any = functools.partial(fsdp.fully_shard, mesh=meshes.dense, mp_policy=policy, offload_policy=pinned)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for module in model.modules():
        if getattr(module, "_is_expert_parallel", False):
            # Called before FSDP2's own hook, which is added later: with a tensor axis the output is a view of a sum.
            module.register_forward_hook(lambda _, __, output: whole_tensors(output))
            spread(module, mesh=meshes.experts, reshard_after_forward=reshard)
    for layer in layers(model):
        spread(layer, reshard_after_forward=reshard)
    tail = [part for part in (getattr(model.base_model, "norm", None), head) if isinstance(part, nn.Module)]
    if head is not None and head.weight is embedding.weight:  # torch refuses a tied weight in two groups
        tail = [embedding, *tail]
    else:
        spread(embedding, reshard_after_forward=reshard)
    if tail:
        spread(tail, reshard_after_forward=False)
    spread(model, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):  # neither setting reaches the modules below
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def layers(model: Any) -> list[nn.Module]:
    """The model's layers; ModelNotLoaded with the remedy if they stand where no known model has them."""
    modules = getattr(model.base_model, "layers", None)
    if not isinstance(modules, nn.ModuleList) or not len(modules):
        raise ModelNotLoaded(
            f"{type(model).__name__}: its layers are not at base_model.layers, so it cannot be spread over ranks; "
            "train it with ranks = 1"
        )
    return list(modules)


class ShardedForward(Forward):
    """The scores of another way for a model that `shard` has spread: its calls run where FSDP2 gathers the weights."""

    spread = True

    def __init__(self, way: Forward, device: torch.device | None = None) -> None:
        """`device`: where it computes, if the parameters are elsewhere."""
        super().__init__(way.model)
        self.where = way.where = device
        self.way, self.name, self.together, self.replay = way, f"sharded {way.name}", way.together, way.replay
        if isinstance(way, PaddedRows):
            way.head = _Gathered(way.model.get_output_embeddings(), way.head)
            way.model.busrl_forward = lambda compute: whole_tensors(compute())
            fsdp.register_fsdp_forward_method(way.model, "busrl_forward")

    def score(self, samples: Sequence[Sample], flat: Flat) -> Scores:
        return self._forward(lambda: self.way.score(samples, flat))

    @torch.no_grad()
    def best(self, samples: Sequence[Sample], flat: Flat, count: int, limit: int) -> tuple[Tensor, Tensor]:
        return self._forward(lambda: self.way.best(samples, flat, count, limit))

    def states(self, samples: Sequence[Sample]) -> Tensor:
        return self._forward(lambda: self.way.states(samples))

    def with_states(self, samples: Sequence[Sample], flat: Flat) -> tuple[Scores, Tensor]:
        return self._forward(lambda: self.way.with_states(samples, flat))

    def by_itself(self) -> Forward:
        another = copy.copy(self)
        another.way = self.way.by_itself()
        return another

    def leave_out_all_but(self, token_rows: TokenRows) -> None:
        self.way.leave_out_all_but(token_rows)

    def _forward(self, compute: Callable[[], T]) -> T:
        if not isinstance(self.way, PaddedRows):  # it calls the root module itself
            return compute()
        result: T = self.model.busrl_forward(compute)
        if not torch.is_grad_enabled():  # no backward will give up what was gathered, and it would be used when stale
            for module in self.model.modules():
                if isinstance(module, fsdp.FSDPModule):
                    module.reshard()
        return result


class _Gathered:
    """A head in pieces whose calls are made by the module of the head, with its gathered weight; the module's own call
    stays as it was."""

    def __init__(self, head: Any, pieces: Head) -> None:
        self.head, self.pieces, plain = head, pieces, head.forward

        def forward(hidden: Tensor, compute: Callable[..., Any] | None = None) -> Any:
            return plain(hidden) if compute is None else whole_tensors(compute(hidden, head.weight, head.bias))

        head.forward = forward

    def __call__(
        self, hidden: Tensor, _: Tensor, targets: Tensor, temperature: Tensor | None, __: Any, token_rows: TokenRows
    ) -> Scores:
        scores: Scores = self.head(hidden, lambda rows, weight, bias: self.pieces(
            rows, weight, targets, temperature, bias, token_rows))
        return scores

    def best(
        self, hidden: Tensor, _: Tensor, count: int, limit: int, temperature: Tensor | None, __: Any,
        token_rows: TokenRows,
    ) -> tuple[Tensor, Tensor]:
        best: tuple[Tensor, Tensor] = self.head(hidden, lambda rows, weight, bias: self.pieces.best(
            rows, weight, count, limit, temperature, bias, token_rows))
        return best


def whole_tensors(result: Any) -> Any:
    """The tensor, or a tuple of tensors, with a copy in place of each view that has a gradient."""
    if isinstance(result, tuple):
        return tuple(whole_tensors(part) for part in result)
    is_view = isinstance(result, Tensor) and result.requires_grad and result._base is not None
    return result.clone() if is_view else result


# -- failures --------------------------------------------------------------------------

def of_a_peer(problem: BaseException) -> bool:
    """True if a collective failed because of another rank, not this one's own computation: its transport says so."""
    text = str(problem).lower()
    of_torch = isinstance(problem, RuntimeError) and any(name in text for name in BACKEND.values())
    return of_torch or isinstance(problem, dist.DistError)
