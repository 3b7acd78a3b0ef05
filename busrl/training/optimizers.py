"""The optimiser of [learner]: AdamW, AdamW with 8-bit states, Adafactor, or a class of the user's by import path.

Used by the trainer; `busrl check` tries a class of the user's through `busrl.training.custom`. Talks to torch and, for
8-bit states, to bitsandbytes. Knows nothing of models, losses, schedules or files.

- The learning rate is set before every update, in every parameter group: an optimiser that changes parameters at a
  rate of 0 is refused.
- Weight decay acts on matrices alone: norms and biases set a scale, they do not overfit.
- The states in a checkpoint are restored to the bit; those of another optimiser are refused.
"""

from __future__ import annotations

import importlib
import inspect
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from busrl.algorithms import trained_parameters
from busrl.errors import FunctionRefused, ModelNotLoaded, UserError, cause
from busrl.system import imports
from busrl.training import sharded

KEY = "learner.optimizer"
ADAMW, ADAMW8, ADAFACTOR = "adamw", "adamw8bit", "adafactor"
ADAM_KEYS = ("betas", "eps", "weight_decay")  # names of the topology and of AdamW; the rate comes with each step
SMALL = 4096  # values of a tensor below which adamw8bit keeps float32 states
KIND = "optimizer"  # name in the state of a checkpoint; a state without it is of AdamW
TRAINED = "train_layers"  # name in the state of a checkpoint; a state without it is of all parameters
Optimizer = torch.optim.Optimizer
Settings = Mapping[str, Any]


def make(name: str, parameters: Sequence[Tensor], adam: Settings, options: Settings, base_dir: str) -> Any:
    """The optimiser over these parameters, or over this rank's parts of them where it cannot take spread ones; its rate
    is 0 until it is set. `adam`: betas, eps and weight_decay of [learner]; `options`: [learner.options], which
    Adafactor and a class of the user's take."""
    of_spread = name == ADAFACTOR or (name == ADAMW and sharded.alike(parameters))
    if of_spread or not sharded.any_spread(parameters):
        return _made(name, parameters, adam, options, base_dir)
    require_elementwise(name, adam, options, base_dir)
    return OverParts(parameters, lambda parts: _made(name, parts, adam, options, base_dir), name == ADAMW8)


def _made(
    name: str, parameters: Sequence[Tensor], adam: Settings, options: Settings, base_dir: str
) -> Optimizer:
    if name == ADAMW:
        return torch.optim.AdamW(_groups(parameters, adam), lr=0.0, betas=adam["betas"], eps=adam["eps"], fused=True)
    if name == ADAMW8:
        more = {"betas": adam["betas"], "eps": adam["eps"], "min_8bit_size": SMALL}
        optimizer: Optimizer = _bitsandbytes().AdamW8bit(_groups(parameters, adam), lr=0.0, **more)
        return optimizer
    if name == ADAFACTOR:
        settings = {"weight_decay": adam["weight_decay"], **options}
        kind = SpreadAdafactor if sharded.any_spread(parameters) else torch.optim.Adafactor
        return _built(name, kind, parameters, settings)
    return _built(name, _own(name, base_dir), parameters, options)


def _groups(parameters: Sequence[Tensor], settings: Settings) -> list[dict[str, Any]]:
    """Matrices, and all others without weight decay; one group where there is none."""
    if "weight_decay" not in settings:
        return [{"params": list(parameters)}]
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings["weight_decay"]},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _bitsandbytes() -> Any:
    try:
        return importlib.import_module("bitsandbytes").optim  # only here: it takes seconds, and is an extra
    except ImportError as problem:
        raise ModelNotLoaded(f'{KEY} = "{ADAMW8}": {problem}; pip install \'busrl[adam8]\'') from problem


def _own(target: str, base_dir: str) -> Callable[..., Any]:
    kind = imports.load(KEY, target, FunctionRefused, base_dir)
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        raise FunctionRefused(f"{KEY} = {target!r}: it is no class of torch.optim.Optimizer; name a subclass of that")
    return kind


def _built(name: str, make_one: Callable[..., Any], parameters: Sequence[Tensor], options: Settings) -> Optimizer:
    try:
        # TOML has no tuples.
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        optimizer: Optimizer = make_one(_groups(parameters, options), lr=0.0, **settings)
    except Exception as problem:
        raise FunctionRefused(
            f"{KEY} = {name!r}: with lr = 0.0 and the options {dict(options)} it raised {cause(problem)}; correct "
            "[learner.options], or the class: it has to take lr = 0.0, as the rate is set before every update"
        ) from problem
    return optimizer


# -- parts of tensors on several ranks ------------------------------------------------


def require_elementwise(name: str, adam: Settings, options: Settings, base_dir: str) -> None:
    """FunctionRefused for an optimiser that updates a part of a tensor in another way than it does in the whole."""
    if name not in (ADAMW, ADAMW8, ADAFACTOR) and not _is_elementwise(name, adam, options, base_dir):
        raise FunctionRefused(
            f"{KEY} = {name!r}: it updates a part of a matrix in another way than the whole, so ranks that hold parts "
            f'would train something else; use an elementwise one ("{ADAMW}"), or ranks = 1'
        )


def _is_elementwise(name: str, adam: Settings, options: Settings, base_dir: str) -> bool:
    """True if two halves of the rows of a matrix, and of a vector, are updated as they are in the whole."""
    uncut = _tried(name, adam, options, base_dir)
    parts = [part.clone() for both in uncut[0] for part in both.chunk(2)]
    halves = parts, make(name, parts, adam, options, base_dir)
    for seed in (1, 2, 3):
        random = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(tensor.shape, generator=random) for tensor in uncut[0]]
        _step(name, uncut, TRIED_RATE, gradients)
        _step(name, halves, TRIED_RATE, [part.clone() for both in gradients for part in both.chunk(2)])
    again = [torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return all(torch.allclose(left, right, rtol=1e-5, atol=1e-6) for left, right in zip(uncut[0], again, strict=True))


class SpreadAdafactor(torch.optim.Adafactor):
    """torch's Adafactor for tensors that are spread over ranks: means of rows and columns and sizes of weights and
    updates are those of whole tensors, by two sums over all ranks per update. The state of a matrix is whole on every
    rank."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make an update, on all ranks; `closure` is not called."""
        every = [_Factored(parameter, group, self.state[parameter]) for group in self.param_groups
                 for parameter in group["params"] if parameter.grad is not None]
        _add_up([sums for tensor in every for sums in tensor.squares()])
        sizes = [tensor.update() for tensor in every]
        _add_up(sizes)
        for tensor, size in zip(every, sizes, strict=True):
            tensor.move(float(size))


class _Factored:
    """A tensor in an update of Adafactor: `squares`, `update`, `move`, with a sum over ranks after the first two."""

    def __init__(self, parameter: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.parameter, self.group, self.state = parameter, group, state
        self.part, self.share = sharded.local(parameter), sharded.weight_in_sum(parameter)
        self.gradient = -sharded.local(parameter.grad) if group["maximize"] else sharded.local(parameter.grad)
        place, shape = sharded.within(parameter), parameter.shape
        # Per mean its axis, its whole shape, and where in it those of this rank's part are.
        self.means = {
            "row_var": (-1, (*shape[:-1], 1), place[:-1]),
            "col_var": (-2, (*shape[:-2], 1, shape[-1]), (*place[:-2], slice(None), place[-1])),
        } if parameter.ndim > 1 else {}
        if not state:
            means = {name: self.part.new_zeros(size) for name, (_, size, _) in self.means.items()}
            state |= {"step": torch.zeros(()), **(means or {"variance": torch.zeros_like(parameter)})}
        for name in self.means:  # a checkpoint gives a mean with the shape of the tensor in parts
            state[name] = sharded.whole(state[name])
        state["step"] += 1

    def squares(self) -> list[Tensor]:
        """This rank's share of the sums of squares: of the weights, and of the gradient by rows and by columns."""
        self.sums = [(self.part.square().sum() * self.share).reshape(1)]
        for axis, size, place in self.means.values():
            self.sums.append(self.part.new_zeros(size))
            self.sums[-1][place] = self.gradient.square().sum(axis, keepdim=True) * self.share
        return self.sums

    def update(self) -> Tensor:
        """Compute this rank's part of the update, before it is scaled; return its share of the sum of squares."""
        least, new = self.group["eps"][0], float(self.state["step"]) ** self.group["beta2_decay"]
        least = torch.finfo(self.part.dtype).eps if least is None else least
        for (name, (axis, _, _)), sums in zip(self.means.items(), self.sums[1:], strict=True):
            self.state[name].lerp_(sums / self.parameter.shape[axis], new)
        if self.means:
            rows, columns = (self.state[name][place] for name, (_, _, place) in self.means.items())
            mean = self.state["row_var"].mean(-2, keepdim=True)[self.means["row_var"][2][:-1]]
            scale = (rows @ columns).div_(mean.clamp(min=least))
        else:
            scale = sharded.local(self.state["variance"]).lerp_(self.gradient.square(), new).clone()
        self.change = scale.clamp_(min=least * least).rsqrt_().mul_(self.gradient)
        size: Tensor = self.change.square().sum() * self.share
        return size.reshape(1)

    def move(self, squares: float) -> None:
        """Change the weights; `squares`: the sum of squares of the whole update."""
        lr, root = float(self.group["lr"]), math.sqrt(self.parameter.numel())
        rate = min(lr, float(self.state["step"]) ** -0.5)
        rate *= max(self.group["eps"][1], math.sqrt(float(self.sums[0])) / root)
        self.part.mul_(1 - lr * self.group["weight_decay"])
        self.part.add_(self.change, alpha=-rate / max(1.0, math.sqrt(squares) / (root * self.group["d"])))


def _add_up(parts: list[Tensor]) -> None:
    """Sum each of these tensors over all ranks, in place: one collective."""
    together = torch.cat([part.flatten() for part in parts])
    torch.distributed.all_reduce(together)
    for part, total in zip(parts, torch.split(together, [part.numel() for part in parts]), strict=True):
        part.copy_(total.view_as(part))


class OverParts:
    """An optimiser of this rank's parts of tensors that are spread over ranks, for one that cannot take such tensors.

    Stands for the optimiser of the tensors themselves: its states are saved and loaded spread as the tensors are. A
    rank that has no row of a tensor updates a row of zeros in its place, so that all ranks have the same states.
    """

    def __init__(self, parameters: Sequence[Any], make: Callable[[list[Tensor]], Any], eight: bool) -> None:
        """`eight`: the optimiser of `make` keeps its states in 8 bits, by blocks of a part."""
        self._eight = eight
        self._parameters: dict[Any, Any] = {}
        for parameter in parameters:
            local = sharded.local(parameter.detach())
            self._parameters[nn.Parameter(local if local.numel() else local.new_zeros(1, *local.shape[1:]))] = parameter
        self.inner = make(list(self._parameters))
        self.param_groups = [
            {**group, "params": [self._parameters[part] for part in group["params"]]}
            for group in self.inner.param_groups
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part, parameter in self._parameters.items():
            part.grad = parameter.grad = None

    def step(self) -> None:
        for part, parameter in self._parameters.items():
            if parameter.grad is not None:
                gradient = sharded.local(parameter.grad)
                part.grad = gradient if gradient.numel() else torch.zeros_like(part)
        for group, own_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            own_group.update({name: value for name, value in group.items() if name != "params"})
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        inner = self.inner.state_dict()
        states = {number: unpacked(state) for number, state in inner["state"].items()}
        groups = [{**group, "params": numbers["params"]} for group, numbers in
                  zip(self.param_groups, inner["param_groups"], strict=True)]
        return {**inner, "param_groups": groups, "state": {
            number: {name: _spread_part(value, part, self._parameters[part]) for name, value in states[number].items()}
            for number, part in enumerate(self._parts()) if number in states
        }}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states = {
            number: {name: _own_part(value, part) for name, value in state["state"][number].items()}
            for number, part in enumerate(self._parts()) if number in state["state"]
        }
        if self._eight:
            states = {number: packed(plain) for number, plain in states.items()}
        self.inner.load_state_dict({**state, "state": states})
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({name: value for name, value in inner_group.items() if name != "params"})

    def _parts(self) -> list[Any]:
        return [part for group in self.inner.param_groups for part in group["params"]]


def _spread_part(value: Any, part: Tensor, pattern: Any) -> Any:
    """A state with a value for each value of the part, spread as `pattern` is; any other state as it is."""
    if not isinstance(value, Tensor) or not value.ndim or value.shape != part.shape:
        return value
    return sharded.spread_of(value[: sharded.local(pattern).shape[0]], pattern)


def _own_part(value: Any, part: Tensor) -> Any:
    """The part of a spread state that belongs to `part`; any other state as it is: the inverse of `_spread_part`."""
    if not hasattr(value, "device_mesh"):
        return value
    local = sharded.local(value)
    return local.clone() if local.numel() else torch.zeros_like(part, dtype=local.dtype)


BLOCK, WRAPPED = 256, "__bnb_optimizer_quant_state__"  # of bitsandbytes


def unpacked(state: Settings) -> dict[str, Any]:
    """The state of a parameter with float32 values in the place of 8-bit ones, which are by blocks of its part."""
    plain = {**state, **state.get(WRAPPED, {})}
    plain.pop(WRAPPED, None)
    for number in [index for index in (1, 2) if f"qmap{index}" in plain]:
        code, largest = plain.pop(f"qmap{number}"), plain.pop(f"absmax{number}")
        values = plain[f"state{number}"]
        plain[f"state{number}"] = _bits().dequantize_blockwise(values, absmax=largest, code=code, blocksize=BLOCK)
    return plain


def packed(state: Settings) -> dict[str, Any]:
    """The state of a parameter as adamw8bit keeps it: the inverse of `unpacked`."""
    blocks = dict(state)
    for number in (1, 2):
        values = blocks.get(f"state{number}")
        if isinstance(values, Tensor) and values.dtype == torch.float32 and values.numel() >= SMALL:
            code = _bits().create_dynamic_map(signed=number == 1).to(values.device)
            packed_values, quantised = _bits().quantize_blockwise(values.contiguous(), code=code, blocksize=BLOCK)
            blocks |= {f"state{number}": packed_values, f"qmap{number}": code, f"absmax{number}": quantised.absmax}
    return blocks


def _bits() -> Any:
    return importlib.import_module("bitsandbytes.functional")


# -- states in checkpoints -------------------------------------------------------


def begin_with(folder: str) -> str:
    """Advice: how a new run begins with the weights of the checkpoint at `folder` and a fresh optimiser."""
    return f'start a new run with learner.start_from = "{folder}" and learner.start_optimizer = false'


def require_same(state: Settings, name: str, folder: str) -> None:
    """UserError if the state in the checkpoint at `folder` is of another optimiser."""
    before = state.get(KIND, ADAMW)
    if before != name:
        raise UserError(
            f"{folder} was trained with {KEY} = {before!r}, the topology says {name!r}, which cannot read its states; "
            f"set it back to {before!r}, or {begin_with(folder)}"
        )


def require_same_layers(state: Settings, text: str, names: Sequence[str], folder: str) -> None:
    """UserError if it has states of other parameters than `learner.train_layers` = `text` names among `names`."""
    before = state.get(TRAINED, "")
    if trained_parameters.chosen(before, names)[0] != trained_parameters.chosen(text, names)[0]:
        raise UserError(
            f"{folder} was trained with learner.{TRAINED} = {before!r}, the topology says {text!r}: it has no states "
            f"of the other parameters; set it back to {before!r}, or {begin_with(folder)}"
        )


def settings_of(name: str, options: Settings) -> list[str]:
    """The keys of [learner] that this optimiser reads, without the rate."""
    keys = ADAM_KEYS if name in (ADAMW, ADAMW8) else ("weight_decay",) if name == ADAFACTOR else ()
    return [*keys, *(f"options.{option}" for option in options)]


def keep_settings(optimizer: Optimizer, keys: Sequence[str], load: Callable[[], None]) -> list[str]:
    """`load` a state, and keep the present settings of these `keys` (as in the topology: "eps", "options.momentum").
    Returns, as text, those that were others in the state."""
    names = {key: key.rpartition(".")[2] for key in keys}
    now = [{name: group[name] for name in names.values() if name in group} for group in optimizer.param_groups]
    load()
    changed = []
    for present, group in zip(now, optimizer.param_groups, strict=True):
        for key, name in names.items():
            if name in present and _plain(group.get(name)) != _plain(present[name]):
                changed.append(f"learner.{key} = {_plain(present[name])} (before: {_plain(group.get(name))})")
        group.update(present)
    return list(dict.fromkeys(changed))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


# -- the trial of `busrl check` -----------------------------------------------

TRIED_RATE = 1e-2


def try_optimizer(target: str, adam: Settings, options: Settings, base_dir: str) -> None:
    """FunctionRefused if it cannot be made, moves at a rate of 0, does not move at another one, gives a value that is
    not finite, or does not continue from its state as a checkpoint keeps it."""
    first, second = (_tried(target, adam, options, base_dir) for _ in range(2))
    _update(target, first, 0.0, 1)
    if not all(torch.equal(moved, fresh) for moved, fresh in zip(first[0], second[0], strict=True)):
        raise _refused(target, "moved the parameters at a learning rate of 0", 'read it from param_groups[i]["lr"]')
    before = [parameter.clone() for parameter in first[0]]
    for seed in (2, 3):
        _update(target, first, TRIED_RATE, seed)
    if all(torch.equal(moved, old) for moved, old in zip(first[0], before, strict=True)):
        raise _refused(target, f"did not move the parameters at a learning rate of {TRIED_RATE}", "correct its step()")
    if not all(bool(parameter.isfinite().all()) for parameter in first[0]):
        raise _refused(target, "made a parameter that is not finite", "correct its step(), or the options")
    _try_to_continue(target, first, second)


def _try_to_continue(target: str, first: _Tried, second: _Tried) -> None:
    try:
        file = io.BytesIO()
        torch.save(first[1].state_dict(), file)
        file.seek(0)
        second[1].load_state_dict(torch.load(file, weights_only=True))
    except Exception as problem:
        what = f"cannot be saved and loaded again: {cause(problem)}"
        raise _refused(target, what, "keep tensors, numbers, strings, lists and dicts in its state") from problem
    for old, new in zip(first[0], second[0], strict=True):
        new.copy_(old)
    for tried in (first, second):
        _update(target, tried, TRIED_RATE, 4)
    if not all(torch.equal(left, right) for left, right in zip(first[0], second[0], strict=True)):
        what = "made another update after its state was saved and loaded"
        raise _refused(target, what, "keep all that an update reads in `state` or `param_groups`")


_Tried = tuple[list[Tensor], Optimizer]


def _tried(target: str, adam: Settings, options: Settings, base_dir: str) -> _Tried:
    random = torch.Generator().manual_seed(0)
    parameters = [torch.randn(80, 64, generator=random), torch.randn(8, generator=random)]
    return parameters, make(target, parameters, adam, options, base_dir)


def _update(target: str, tried: _Tried, rate: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    _step(target, tried, rate, [torch.randn(parameter.shape, generator=random) for parameter in tried[0]])


def _step(target: str, tried: _Tried, rate: float, gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(tried[0], gradients, strict=True):
        parameter.grad = gradient
    for group in tried[1].param_groups:
        group["lr"] = rate
    try:
        tried[1].step()
    except Exception as problem:
        raise _refused(target, f"raised {cause(problem)} in step()", "it is called without a closure") from problem


def _refused(target: str, what: str, remedy: str) -> FunctionRefused:
    return FunctionRefused(f"{KEY} = {target!r}: it {what}; {remedy}")
