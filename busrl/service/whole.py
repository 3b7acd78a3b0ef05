"""The one model of a service that trains all weights of its base: the base's own parameters are the model's.

Driven as all `models` are. Talks to the model's folder and to torch. Knows nothing of clients, logs, numbers of
requests or of who waits.

- Weights that are trained are float32: the parameters themselves, or masters of those that compute in fewer bits.
- One model at a time; the next one begins from the folder of the base, or from a state.
- Weight decay acts on matrices alone, as for a learner: norms and biases set a scale.
- Beside the base a model takes its gradient while there is one, and the moments. Files are written and read a tensor
  at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from busrl.service.adapters import Adapter
from busrl.service.model_folders import read_into
from busrl.service.models import MICRO_BATCH_TOKENS, MOMENTS, Adam, Models, Trained, clip_by
from busrl.service.registry import require_kind
from busrl.training.checkpoint import export
from busrl.training.forward import choose_forward
from busrl.training.model import Masters, load

ALL_WEIGHTS = Adapter(rank=0)
GRADIENT_AND_MOMENTS = 12  # bytes of a parameter
OF_WEIGHTS = "weights."  # begins the names of weights in a state


class Weights:
    """All weights of a base: `named`, float32, those that are trained; `touched` once they may differ from the base's
    folder."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model, self.touched = model, False
        self._masters = Masters(model, dtype) if dtype != torch.float32 else None
        self.named: Mapping[str, Tensor] = (
            dict(model.named_parameters()) if self._masters is None else self._masters.named)

    def settle(self) -> None:
        """Let the model compute with what `named` holds now."""
        self.touched = True
        if self._masters is not None:
            self._masters.round()

    def gradients(self) -> dict[str, Tensor]:
        return {name: part.grad for name, part in self.named.items() if part.grad is not None}

    def drop_gradients(self) -> None:
        for part in self.named.values():
            part.grad = None

    @torch.no_grad()
    def read(self, folder: Path) -> None:
        """Begin from the weights of a folder."""
        read_into(folder, self.named)
        self.settle()
        self.touched = False


class Whole(Trained):
    """The model of a client: all weights, and AdamW's moments from the first step on."""

    adapter = ALL_WEIGHTS

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.moments: dict[str, dict[str, Tensor]] = {}  # by kind, and name
        self.steps, self.summed = 0, False

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    @torch.no_grad()
    def step(self, adam: Adam) -> float:
        gradients = self.weights.gradients()
        norms = torch._foreach_norm(list(gradients.values()))
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        clip_by(norm, adam, list(gradients.values()), self.drop_gradients)
        if not self.moments:
            self._make_moments()
        for matrices in (True, False):
            names = [name for name in gradients if (self.weights.named[name].ndim >= 2) == matrices]
            if names:
                self._update(names, gradients, adam, adam.weight_decay if matrices else 0.0)
        self.steps += 1
        self.weights.settle()
        self.drop_gradients()
        return norm

    def _update(self, names: list[str], gradients: Mapping[str, Tensor], adam: Adam, weight_decay: float) -> None:
        values, (first, second) = [self.weights.named[name] for name in names], (self.moments[key] for key in MOMENTS)
        steps = torch.full((len(names),), float(self.steps), device=values[0].device)
        adamw(
            values, [gradients[name] for name in names], [first[name] for name in names],
            [second[name] for name in names], [], list(steps.unbind()), fused=True, amsgrad=False, maximize=False,
            beta1=adam.beta1, beta2=adam.beta2, lr=adam.learning_rate, weight_decay=weight_decay, eps=adam.eps,
        )

    def drop_gradients(self) -> None:
        self.summed = False
        self.weights.drop_gradients()

    def tensors(self) -> dict[str, Tensor]:
        named = {f"{OF_WEIGHTS}{name}": part.detach() for name, part in self.weights.named.items()}
        for kind, moments in self.moments.items():
            named |= {f"{kind}.{name}": part for name, part in moments.items()}
        return named

    def begin_after(self, steps: int) -> None:
        self.moments, self.steps = {}, steps
        if steps:
            self._make_moments()

    def settle(self) -> None:
        self.weights.settle()

    def _make_moments(self) -> None:
        self.moments = {
            kind: {name: torch.zeros_like(part, requires_grad=False) for name, part in self.weights.named.items()}
            for kind in MOMENTS
        }


class WholeModels(Models[Whole]):
    """The model, one at a time, whose weights are those of a folder at first."""

    def __init__(
        self, folder: Path, *, dtype: str = "float32", device: torch.device | None = None, context: int = 0,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    ) -> None:
        base: nn.Module = load(folder, torch.float32, device)
        way = choose_forward(base)  # a probe in float32 is more exact
        self._weights = Weights(base, getattr(torch, dtype))
        super().__init__(folder, way, getattr(torch, dtype), context, micro_batch_tokens)

    def create(self, name: str, adapter: Adapter) -> None:
        assert not self._models, "the model before is forgotten first"
        require_kind(name, adapter.rank, 0)
        if self._weights.touched:
            self._weights.read(self._folder)
        self._models[name] = Whole(self._weights)

    def forget(self, name: str) -> None:
        self._models[name].drop_gradients()
        super().forget(name)

    def bytes_of(self, adapter: Adapter) -> int:
        return GRADIENT_AND_MOMENTS * sum(part.numel() for part in self._weights.named.values())

    def snapshot(self, name: str, folder: Path) -> None:
        """Fill a folder with the model, as Hugging Face's library has models."""
        export(self._weights.model, folder, self._folder)
