"""Models of clients over one base model, each with gradients, moments and states of its own: what adapters (`tenants`)
and all weights (`whole`) have in common.

Driven by what executes logged requests. Talks to the forward passes of training and to folders of states. Knows nothing
of clients, logs, numbers of requests or of who waits.

- Gradients add up over `forward_backward` until `optim_step` uses them or `drop_gradients` throws them away.
- What is refused (UserFault) before a backward changes nothing. After a `forward_backward` that failed the caller drops
  the gradients: a part of its data may have added to them.
- The same calls give the same numbers, to the bit on a CPU with one thread; other models on the base change nothing,
  those that are trained between the forward and the backward of a micro-batch included.
- A state is weights, moments and steps, never gradients. Its folder is filled file by file, a tensor at a time: whoever
  calls gives one that is renamed when it is whole. Nothing is a pickle.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from busrl.data.vocabulary import token_rows
from busrl.service.adapters import Adapter
from busrl.service.registry import require_kind
from busrl.service.sums import TARGETS, Config, Datum, UserFault, check, losses_of
from busrl.system.device import synchronize
from busrl.training.batch import Flat, Sample, cut, flatten
from busrl.training.forward import Forward
from busrl.training.model import vocabulary
from busrl.training.shard_files import Part, Writing

STATE, STATE_TENSORS = "model_state.json", "model_state.safetensors"
CLIP_EPS = 1e-6  # that torch's clipping adds to the norm
MOMENTS = ("exp_avg", "exp_avg_sq")  # names of torch
MICRO_BATCH_TOKENS = 2048
LONGEST = 1 << 20
Outputs = list[dict[str, NDArray[np.float32]]]
# The summed loss and the log-probabilities of a micro-batch, and what adds its gradients, if it has any.
Computed = tuple[float, list[NDArray[np.float32]], Callable[[], None] | None]


@dataclass(frozen=True)
class Adam:
    """Settings of one step of AdamW, as clients name them; `grad_clip_norm` 0: the gradient stays as it is."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def check(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise UserFault(f"adam_params: {name} = {value!r}; give a finite number, at least 0")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise UserFault(f"adam_params: {name} = {getattr(self, name)}; give a number below 1")
        if self.eps == 0:
            raise UserFault("adam_params: eps = 0; give a number above 0, or a step may divide by zero")


class Pass:
    """A forward_backward under way. `outputs` and `metrics` are whole once `advance` has returned False."""

    def __init__(
        self, parts: Iterable[list[int]], compute: Callable[[list[int]], Computed], forward_only: bool
    ) -> None:
        self._left, self._compute, self.forward_only = deque(parts), compute, forward_only
        self._logprobs: dict[int, NDArray[np.float32]] = {}
        self._total = 0.0
        self._backward: Callable[[], None] | None = None  # of the micro-batch whose forward was computed

    @property
    def halfway(self) -> bool:
        """True between the forward of a micro-batch, which holds memory for its backward, and that."""
        return self._backward is not None

    def advance(self, in_one: bool = False) -> bool:
        """Compute the forward of a micro-batch or, behind that, its backward; with `in_one` both. True if there is
        more. UserFault for a loss that is not finite."""
        if self._backward is None:
            numbers = self._left.popleft()
            total, logprobs, self._backward = self._compute(numbers)
            self._total += total
            self._logprobs |= zip(numbers, logprobs)
            if self._backward is not None and not in_one:
                return True
        if self._backward is not None:
            backward, self._backward = self._backward, None
            backward()
        return bool(self._left)

    @property
    def outputs(self) -> Outputs:
        return [{"logprobs": self._logprobs[number]} for number in range(len(self._logprobs))]

    @property
    def metrics(self) -> dict[str, float]:
        return {"loss:sum": self._total}


class Saved(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        file: Any = safe_open(str(path), "pt")
        self._file, self._names = file, [str(name) for name in file.keys()]  # noqa: SIM118  # no mapping

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor, which is not read; none of a tensor that is not there."""
        return list(self._file.get_slice(name).get_shape()) if name in self._names else []

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Trained(ABC):
    """A model of a client: `steps` so far; `summed` once a request has added to its gradients."""

    steps: int
    summed: bool

    @property
    @abstractmethod
    def adapter(self) -> Adapter: ...

    @abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """Within it the base computes as this model does, backward included."""

    @abstractmethod
    def step(self, adam: Adam) -> float:
        """Step by AdamW with the gradients so far, which are used up; returns their norm. UserFault for a norm that
        is not finite: nothing is changed, and the gradients are dropped."""

    @abstractmethod
    def drop_gradients(self) -> None: ...

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Weights, and moments from the first step on, by the names of a state; what is written there counts."""

    @abstractmethod
    def begin_after(self, steps: int) -> None:
        """Have moments as behind so many steps, or none, whatever they are."""

    def settle(self) -> None:
        """Note that `tensors` were written."""

    def add(self, losses: Tensor) -> None:
        """Add the gradient of the sum of the losses."""
        self.summed = True
        losses.sum().backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor], steps: int) -> None:
        """Continue from the tensors of a state, which fit."""
        self.begin_after(steps)
        for name, part in self.tensors().items():
            part.copy_(saved[name])
        self.settle()


def clip_by(norm: float, adam: Adam, gradients: Sequence[Tensor], drop: Callable[[], None]) -> None:
    """Scale gradients down to the norm that is asked for. UserFault for one that is not finite; they are dropped."""
    if not math.isfinite(norm):
        drop()
        raise UserFault(f"the norm of the gradient is {norm}; its gradients were dropped, nothing was changed")
    if 0 < adam.grad_clip_norm < norm + CLIP_EPS:
        torch._foreach_mul_(list(gradients), adam.grad_clip_norm / (norm + CLIP_EPS))


Kind = TypeVar("Kind", bound=Trained)


class Models(ABC, Generic[Kind]):
    """The models over the base of a folder. `context`: the most tokens of a datum; 0: the base's own limit."""

    def __init__(
        self, folder: Path, way: Forward, dtype: torch.dtype, context: int, micro_batch_tokens: int
    ) -> None:
        self._folder, self._way, self._dtype, self._budget = folder, way, dtype, micro_batch_tokens
        self._device: torch.device = way.device
        way.leave_out_all_but(token_rows(folder))
        self._vocabulary = vocabulary(way.model)
        self._context = context or getattr(way.model.config, "max_position_embeddings", 0) or LONGEST
        self._models: dict[str, Kind] = {}

    # -- models -----

    @abstractmethod
    def create(self, name: str, adapter: Adapter) -> None:
        """Make a model that computes what the base does; UserFault if the base cannot have this adapter."""

    @abstractmethod
    def bytes_of(self, adapter: Adapter) -> int:
        """Bytes that a model of this shape takes at most, beside the base. UserFault as `create`."""

    def tenant(self, name: str) -> Kind:
        return self._models[name]

    def has(self, name: str) -> bool:
        return name in self._models

    def names(self) -> list[str]:
        return list(self._models)

    def forget(self, name: str) -> None:
        """Remove a model, its gradients and moments."""
        del self._models[name]

    # -- training -----

    def forward_backward(
        self, name: str, data: Sequence[Datum], loss_fn: str, config: Config, forward_only: bool = False,
    ) -> tuple[Outputs, dict[str, float]]:
        """Per datum `logprobs` in the shape of its targets, and the summed loss as `loss:sum`; adds gradients unless
        `forward_only`."""
        under_way = self.begin(name, data, loss_fn, config, forward_only)
        while under_way.advance(in_one=True):
            pass
        return under_way.outputs, under_way.metrics

    def begin(
        self, name: str, data: Sequence[Datum], loss_fn: str, config: Config, forward_only: bool = False,
    ) -> Pass:
        """A `forward_backward` of which nothing is computed yet; other models may be trained while it is under way.
        UserFault for data that cannot be trained."""
        check(data, loss_fn, config, self._context, self._vocabulary)
        model = self._models[name]

        def compute(numbers: list[int]) -> Computed:
            chosen = [data[number] for number in numbers]
            return self._micro_batch(model, numbers, chosen, loss_fn, config, forward_only)

        return Pass(self._parts(data), compute, forward_only)

    def _micro_batch(
        self, model: Kind, numbers: list[int], data: list[Datum], loss_fn: str, config: Config, forward_only: bool,
    ) -> Computed:
        """Compute data with these numbers in their request, but for their gradients."""
        with model.computing(), torch.set_grad_enabled(not forward_only):
            scores, losses = self._losses(data, loss_fn, config)
            _refuse_infinite(losses, numbers, data)

        def backward() -> None:
            with model.computing():
                model.add(losses)
            synchronize(self._device)  # its time and its faults are of this turn

        rows = torch.split(scores.detach().float().cpu(), [len(datum.tokens) for datum in data])
        total = float(losses.detach().double().sum())
        return total, [row.numpy() for row in rows], None if forward_only else backward

    def optim_step(self, name: str, adam: Adam) -> dict[str, float]:
        """Step with the gradients since the last one, and use them up; UserFault if there are none."""
        adam.check()
        model = self._models[name]
        if not model.summed:
            raise UserFault("optim_step: there are no gradients since the last step; call forward_backward before it")
        return {"unclipped_grad_l2:mean": model.step(adam)}

    def drop_gradients(self, name: str) -> None:
        self._models[name].drop_gradients()

    def _parts(self, data: Sequence[Datum]) -> Iterator[list[int]]:
        """Numbers of the data of each micro-batch: of similar length, with the same inputs and targets per position."""
        alike: dict[Any, list[int]] = defaultdict(list)
        for number, datum in enumerate(data):
            alike[datum.inputs[TARGETS].shape[1:], frozenset(datum.inputs)].append(number)
        for numbers in alike.values():
            samples = [_sample(data[number], number) for number in numbers]
            for part in cut(samples, self._budget):
                yield [numbers[place] for place in part]

    def _losses(self, data: Sequence[Datum], loss_fn: str, config: Config) -> tuple[Tensor, Tensor]:
        """Log-probability and loss of each target, datum after datum."""
        samples = [_sample(datum, number) for number, datum in enumerate(data)]
        inputs = {
            key: torch.from_numpy(np.concatenate([datum.inputs[key] for datum in data])).to(self._device)
            for key in data[0].inputs
        }
        exact = torch.promote_types(self._dtype, torch.float32)
        flat = replace(flatten(samples, exact, self._device), targets=inputs.pop(TARGETS).long())
        scores = self._scores(samples, flat)
        return scores, losses_of(loss_fn, config, scores, {k: v.to(exact) for k, v in inputs.items()}, flat.rows)

    def _scores(self, samples: Sequence[Sample], flat: Flat) -> Tensor:
        """Log-probability of each target."""
        return self._way.score(samples, flat)[0]

    # -- folders -----

    def save_state(self, name: str, folder: Path) -> None:
        """Fill a folder with the model's state, without gradients. DiskFull."""
        model = self._models[name]
        described = {"adapter": asdict(model.adapter), "steps": model.steps, "base": self._base}
        folder.mkdir(parents=True, exist_ok=True)
        parts = [Part(key, part, (0,) * part.ndim, tuple(part.shape)) for key, part in model.tensors().items()]
        Writing(folder / STATE_TENSORS, parts, 1).entry()
        (folder / STATE).write_text(json.dumps(described, indent=1))

    def load_state(self, name: str, folder: Path, optimizer: bool = True) -> None:
        """Continue a model from a state, without its moments unless `optimizer`; gradients are dropped. UserFault for a
        state of another base or another adapter, or one that cannot be read: nothing is changed."""
        model = self._models[name]
        described, saved = read_state(folder)
        theirs, ours = described["adapter"], asdict(model.adapter)
        require_kind(folder.name, theirs["rank"], ours["rank"])
        if differing := [key for key in ours if key != "seed" and theirs[key] != ours[key]]:
            key = differing[0]
            raise UserFault(
                f"{folder.name}: saved with {key} = {theirs[key]}, this model has {ours[key]}; load it as a new model"
            )
        if described["base"] != self._base:
            raise UserFault(f"{folder.name}: saved over another base model ({described['base']}), not {self._base}")
        weights = {name: part for name, part in model.tensors().items() if not name.startswith(MOMENTS)}
        if unfit := [name for name, part in weights.items() if saved.shape(name) != list(part.shape)]:
            raise UserFault(f"{folder.name}: saved over another base model: its {unfit[0]} has another shape, or none")
        steps = int(described["steps"]) if optimizer else 0
        model.drop_gradients()
        model.restore(saved, steps)

    @abstractmethod
    def snapshot(self, name: str, folder: Path) -> None:
        """Fill a folder with what an engine draws with, in the base's number type."""

    @property
    def _base(self) -> dict[str, Any]:
        """Marks by which base models differ, wherever their folders lie."""
        config = self._way.model.config
        return {"type": config.model_type, "hidden_size": config.hidden_size, "layers": config.num_hidden_layers,
                "vocabulary": self._vocabulary}


def read_state(folder: Path) -> tuple[dict[str, Any], Saved]:
    """The description and the tensors of a state; UserFault if it cannot be read."""
    try:
        described: dict[str, Any] = json.loads((folder / STATE).read_text())
        return described, Saved(folder / STATE_TENSORS)
    except Exception as problem:  # JSON, the system, safetensors' own types: all mean a state that is not whole
        raise UserFault(f"{folder.name}: no saved state that can be read ({problem}); save it again") from problem


def _sample(datum: Datum, number: int) -> Sample:
    """The datum as training packs it: every position predicts a target, the last one too, whatever stands behind it."""
    following, zeros = np.append(datum.tokens[1:], np.int32(0)), np.zeros(len(datum.tokens), np.float32)
    return Sample(number, number, 0, datum.tokens[:1], following, zeros, zeros.astype(np.uint32))


def _refuse_infinite(losses: Tensor, numbers: Sequence[int], data: Sequence[Datum]) -> None:
    bad = torch.nonzero(~torch.isfinite(losses.detach()).reshape(len(losses), -1).all(-1))
    if len(bad):
        lengths = np.array([len(datum.tokens) for datum in data])
        row, ends = int(bad[0]), np.cumsum(lengths)
        place = int(np.searchsorted(ends, row, side="right"))
        position = row - int((ends - lengths)[place])
        raise UserFault(
            f"datum {numbers[place]}: the loss of position {position} is not finite; look at logprobs and advantages"
        )
