"""Models of clients that are adapters by name over one frozen base model.

Driven as all `models` are. Talks to the base through `adapters`, to folders of peft's format. Knows nothing of clients,
logs, numbers of requests or of who waits.

- The base has one adapter at a time on, for as long as a micro-batch of its model takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from busrl.service import adapters
from busrl.service.adapters import Adapter, Numbers, Wearer
from busrl.service.models import MICRO_BATCH_TOKENS, MOMENTS, Adam, Models, Trained, clip_by
from busrl.training.batch import Flat, Sample
from busrl.training.forward import PaddedRows, checkpoint_layers, choose_forward
from busrl.training.model import load

FLOAT32_BYTES = 4
MAX_RANK = 64


class Tenant(Trained):
    """An adapter of a client, and AdamW's moments from the first step on."""

    def __init__(self, numbers: Numbers, wearer: Wearer) -> None:
        self.numbers, self._wearer = numbers, wearer
        self.moments: list[Tensor] = []
        self.steps, self.summed = 0, False

    @property
    def adapter(self) -> Adapter:
        return self.numbers.adapter

    @contextmanager
    def computing(self) -> Iterator[None]:
        self.numbers.ready()
        with self._wearer.wearing(self.numbers):
            yield

    @torch.no_grad()
    def step(self, adam: Adam) -> float:
        values, gradients = self.numbers.vector, self.numbers.gradients
        assert gradients is not None
        norm = float(gradients.norm())
        clip_by(norm, adam, [gradients], self.drop_gradients)
        self.moments = self.moments or [torch.zeros_like(values) for _ in MOMENTS]
        adamw(
            [values], [gradients], [self.moments[0]], [self.moments[1]], [], [torch.tensor(float(self.steps))],
            foreach=False, amsgrad=False, maximize=False, beta1=adam.beta1, beta2=adam.beta2, lr=adam.learning_rate,
            weight_decay=adam.weight_decay, eps=adam.eps,
        )
        self.steps += 1
        self.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        self.summed = False
        self.numbers.drop_gradients()

    def tensors(self) -> dict[str, Tensor]:
        named = {f"adapter.{name}": part for name, part in self.numbers.named(self.numbers.vector).items()}
        for kind, moment in zip(MOMENTS, self.moments):
            named |= {f"{kind}.{name}": part for name, part in self.numbers.named(moment).items()}
        return named

    def begin_after(self, steps: int) -> None:
        self.moments = [torch.zeros_like(self.numbers.vector) for _ in MOMENTS] if steps else []
        self.steps = steps


class Tenants(Models[Tenant]):
    """The adapters over the base of a folder. `again`: compute layers again in backward instead of keeping what they
    gave; `of_experts`: see `Wearer`."""

    def __init__(
        self, folder: Path, *, dtype: str = "float32", device: torch.device | None = None, context: int = 0,
        max_rank: int = MAX_RANK, micro_batch_tokens: int = MICRO_BATCH_TOKENS, again: bool = False,
        of_experts: bool = True,
    ) -> None:
        base = load(folder, getattr(torch, dtype), device)
        way = choose_forward(base)
        self._wearer, self._max_rank = Wearer(base, of_experts), max_rank
        if again:
            checkpoint_layers(way)
        super().__init__(folder, way, getattr(torch, dtype), context, micro_batch_tokens)

    def create(self, name: str, adapter: Adapter) -> None:
        adapter.check(self._max_rank)
        numbers = Numbers(adapter, self._wearer.sites(adapter), self._device)
        self._models[name] = Tenant(numbers, self._wearer)

    def bytes_of(self, adapter: Adapter) -> int:
        """Bytes of a model's numbers, their gradients and moments."""
        adapter.check(self._max_rank)
        numbers = sum(adapter.rank * (site.inputs + site.outputs) for site in self._wearer.sites(adapter))
        return (2 + len(MOMENTS)) * FLOAT32_BYTES * numbers

    def snapshot(self, name: str, folder: Path) -> None:
        """Fill a folder with the adapter in peft's format."""
        adapters.write_folder(folder, self._models[name].numbers, self._dtype, str(self._folder))

    def _scores(self, samples: Sequence[Sample], flat: Flat) -> Tensor:
        if self._wearer.wears_head and isinstance(self._way, PaddedRows):
            return self._wearer.through_head(self._way, self._way.states(samples), flat.targets)
        return super()._scores(samples, flat)
