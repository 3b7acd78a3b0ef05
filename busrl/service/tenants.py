"""Models of clients: adapters by name over one base model, each with gradients, moments and states of its own.

Driven by what executes logged requests. Talks to the base through `adapters` and the forward passes of training, to
folders of states and snapshots. Knows nothing of clients, logs, numbers of requests or of who waits.

- Gradients add up over `forward_backward` until `optim_step` uses them or `drop_gradients` throws them away.
- What is refused (UserFault) before a backward changes nothing. After a `forward_backward` that failed the caller drops
  the gradients: a part of its data may have added to them.
- The same calls give the same numbers, to the bit on a CPU with one thread; other models on the base change nothing.
- A state is adapter, moments and steps, never gradients. Its folder is filled file by file: whoever calls gives one
  that is renamed when it is whole. Nothing is a pickle.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adamw import adamw

from busrl.data.vocabulary import token_rows
from busrl.service import adapters
from busrl.service.adapters import Adapter, Numbers, Wearer
from busrl.service.sums import TARGETS, Config, Datum, UserFault, check, losses_of
from busrl.training.batch import Sample, cut, flatten
from busrl.training.forward import PaddedRows, checkpoint_layers, choose_forward
from busrl.training.model import load, vocabulary

STATE, STATE_TENSORS = "model_state.json", "model_state.safetensors"
CLIP_EPS = 1e-6  # that torch's clipping adds to the norm
MOMENTS = ("exp_avg", "exp_avg_sq")  # names of torch
MICRO_BATCH_TOKENS = 2048
FLOAT32_BYTES = 4
MAX_RANK, LONGEST = 64, 1 << 20
Outputs = list[dict[str, NDArray[np.float32]]]


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


class Tenant:
    """Model of a client: its adapter, and AdamW's moments from the first step on."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.moments: list[Tensor] = []
        self.steps = 0

    @torch.no_grad()
    def step(self, adam: Adam) -> float:
        """Step by AdamW with the gradients so far, which are used up; returns their norm. UserFault for a norm that
        is not finite: nothing is changed, and the gradients are dropped."""
        values, gradients = self.numbers.vector, self.numbers.gradients
        assert gradients is not None
        norm = float(gradients.norm())
        if not math.isfinite(norm):
            self.numbers.drop_gradients()
            raise UserFault(f"the norm of the gradient is {norm}; its gradients were dropped, nothing was changed")
        if 0 < adam.grad_clip_norm < norm + CLIP_EPS:
            gradients.mul_(adam.grad_clip_norm / (norm + CLIP_EPS))
        self.moments = self.moments or [torch.zeros_like(values) for _ in MOMENTS]
        adamw(
            [values], [gradients], [self.moments[0]], [self.moments[1]], [], [torch.tensor(float(self.steps))],
            foreach=False, amsgrad=False, maximize=False, beta1=adam.beta1, beta2=adam.beta2, lr=adam.learning_rate,
            weight_decay=adam.weight_decay, eps=adam.eps,
        )
        self.steps += 1
        self.numbers.drop_gradients()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Adapter and moments by name, for a state."""
        named = {f"adapter.{name}": part for name, part in self.numbers.named(self.numbers.vector).items()}
        for kind, moment in zip(MOMENTS, self.moments):
            named |= {f"{kind}.{name}": part for name, part in self.numbers.named(moment).items()}
        return named

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor], steps: int) -> None:
        """Continue from the tensors of a state, which fit."""
        self.moments = [torch.zeros_like(self.numbers.vector) for _ in MOMENTS] if steps else []
        self.steps = steps
        for name, part in self.tensors().items():
            part.copy_(saved[name])


class Pass:
    """A forward_backward under way. `outputs` and `metrics` are whole once `advance` has returned False."""

    def __init__(
        self, parts: Iterable[list[int]], compute: Callable[[list[int]], tuple[float, list[NDArray[np.float32]]]],
        forward_only: bool,
    ) -> None:
        self._left, self._compute, self.forward_only = deque(parts), compute, forward_only
        self._logprobs: dict[int, NDArray[np.float32]] = {}
        self._total = 0.0

    def advance(self) -> bool:
        """Compute a micro-batch; True if there is another one. UserFault for a loss that is not finite."""
        numbers = self._left.popleft()
        total, logprobs = self._compute(numbers)
        self._total += total
        self._logprobs |= zip(numbers, logprobs)
        return bool(self._left)

    @property
    def outputs(self) -> Outputs:
        return [{"logprobs": self._logprobs[number]} for number in range(len(self._logprobs))]

    @property
    def metrics(self) -> dict[str, float]:
        return {"loss:sum": self._total}


class Tenants:
    """The models over the base of a folder. `context`: the most tokens of a datum; 0: the base's own limit. `again`:
    compute layers again in backward instead of keeping what they gave."""

    def __init__(
        self, folder: Path, *, dtype: str = "float32", device: torch.device | None = None, context: int = 0,
        max_rank: int = MAX_RANK, micro_batch_tokens: int = MICRO_BATCH_TOKENS, again: bool = False,
    ) -> None:
        self._device, self._dtype = device or torch.device("cpu"), getattr(torch, dtype)
        self._folder, self._max_rank, self._budget = folder, max_rank, micro_batch_tokens
        base = load(folder, self._dtype, self._device)
        self._way = choose_forward(base)
        self._wearer = Wearer(base)
        if again:
            checkpoint_layers(self._way)
        self._way.leave_out_all_but(token_rows(folder))
        self._vocabulary = vocabulary(base)
        self._context = context or getattr(base.config, "max_position_embeddings", 0) or LONGEST
        self._tenants: dict[str, Tenant] = {}

    # -- models -----

    def create(self, name: str, adapter: Adapter) -> None:
        """Make a model that computes what the base does; UserFault if the base cannot have this adapter."""
        adapter.check(self._max_rank)
        self._tenants[name] = Tenant(Numbers(adapter, self._wearer.sites(adapter), self._device))

    def tenant(self, name: str) -> Tenant:
        return self._tenants[name]

    def has(self, name: str) -> bool:
        return name in self._tenants

    def names(self) -> list[str]:
        return list(self._tenants)

    def forget(self, name: str) -> None:
        """Remove a model, its gradients and moments."""
        del self._tenants[name]

    def bytes_of(self, adapter: Adapter) -> int:
        """Bytes that a model of this shape takes at most: its numbers, their gradients and moments. UserFault as
        `create`."""
        adapter.check(self._max_rank)
        numbers = sum(adapter.rank * (site.inputs + site.outputs) for site in self._wearer.sites(adapter))
        return (2 + len(MOMENTS)) * FLOAT32_BYTES * numbers

    # -- training -----

    def forward_backward(
        self, name: str, data: Sequence[Datum], loss_fn: str, config: Config, forward_only: bool = False,
    ) -> tuple[Outputs, dict[str, float]]:
        """Per datum `logprobs` in the shape of its targets, and the summed loss as `loss:sum`; adds gradients unless
        `forward_only`."""
        under_way = self.begin(name, data, loss_fn, config, forward_only)
        while under_way.advance():
            pass
        return under_way.outputs, under_way.metrics

    def begin(
        self, name: str, data: Sequence[Datum], loss_fn: str, config: Config, forward_only: bool = False,
    ) -> Pass:
        """A `forward_backward` of which nothing is computed yet; other models may be trained while it is under way.
        UserFault for data that cannot be trained."""
        check(data, loss_fn, config, self._context, self._vocabulary)
        tenant = self._tenants[name]

        def compute(numbers: list[int]) -> tuple[float, list[NDArray[np.float32]]]:
            return self._micro_batch(tenant, numbers, [data[number] for number in numbers], loss_fn, config,
                                     forward_only)

        return Pass(self._parts(data), compute, forward_only)

    def _micro_batch(
        self, tenant: Tenant, numbers: list[int], data: list[Datum], loss_fn: str, config: Config, forward_only: bool,
    ) -> tuple[float, list[NDArray[np.float32]]]:
        """The summed loss and the log-probabilities of data with these numbers in their request."""
        tenant.numbers.ready()
        with self._wearer.wearing(tenant.numbers), torch.set_grad_enabled(not forward_only):
            scores, losses = self._losses(data, loss_fn, config)
            _refuse_infinite(losses, numbers, data)
            if not forward_only:
                tenant.numbers.add(losses)
        rows = torch.split(scores.detach().float().cpu(), [len(datum.tokens) for datum in data])
        return float(losses.detach().double().sum()), [row.numpy() for row in rows]

    def optim_step(self, name: str, adam: Adam) -> dict[str, float]:
        """Step with the gradients since the last one, and use them up; UserFault if there are none."""
        adam.check()
        tenant = self._tenants[name]
        if not tenant.numbers.summed:
            raise UserFault("optim_step: there are no gradients since the last step; call forward_backward before it")
        return {"unclipped_grad_l2:mean": tenant.step(adam)}

    def drop_gradients(self, name: str) -> None:
        self._tenants[name].numbers.drop_gradients()

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
        if self._wearer.wears_head and isinstance(self._way, PaddedRows):
            scores = self._wearer.through_head(self._way, self._way.states(samples), flat.targets)
        else:
            scores = self._way.score(samples, flat)[0]
        return scores, losses_of(loss_fn, config, scores, {k: v.to(exact) for k, v in inputs.items()}, flat.rows)

    # -- folders -----

    def save_state(self, name: str, folder: Path) -> None:
        """Fill a folder with the model's state, without gradients."""
        from safetensors.torch import save_file

        tenant = self._tenants[name]
        described = {"adapter": asdict(tenant.numbers.adapter), "steps": tenant.steps, "base": self._base}
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: part.to("cpu").contiguous() for key, part in tenant.tensors().items()}
        save_file(tensors, folder / STATE_TENSORS)
        (folder / STATE).write_text(json.dumps(described, indent=1))

    def load_state(self, name: str, folder: Path, optimizer: bool = True) -> None:
        """Continue a model from a state, without its moments unless `optimizer`; gradients are dropped. UserFault for a
        state of another base or another adapter, or one that cannot be read: nothing is changed."""
        tenant = self._tenants[name]
        described, saved = read_state(folder)
        theirs, ours = described["adapter"], asdict(tenant.numbers.adapter)
        if differing := [key for key in ours if key != "seed" and theirs[key] != ours[key]]:
            key = differing[0]
            raise UserFault(
                f"{folder.name}: saved with {key} = {theirs[key]}, this model has {ours[key]}; load it as a new model"
            )
        if described["base"] != self._base:
            raise UserFault(f"{folder.name}: saved over another base model ({described['base']}), not {self._base}")
        steps = int(described["steps"]) if optimizer else 0
        tenant.numbers.drop_gradients()
        tenant.restore(saved, steps)

    def snapshot(self, name: str, folder: Path) -> None:
        """Fill a folder with the adapter in the base's number type, in peft's format."""
        adapters.write_folder(folder, self._tenants[name].numbers, self._dtype, str(self._folder))

    @property
    def _base(self) -> dict[str, Any]:
        """Marks by which base models differ, wherever their folders lie."""
        config = self._way.model.config
        return {"type": config.model_type, "hidden_size": config.hidden_size, "layers": config.num_hidden_layers,
                "vocabulary": self._vocabulary}


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a state; UserFault if it cannot be read."""
    from safetensors.torch import load_file

    try:
        described: dict[str, Any] = json.loads((folder / STATE).read_text())
        return described, load_file(folder / STATE_TENSORS)
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
