"""A learner that has the weights of each version, and judges what an engine answers to the prompts of its update."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from busrl.data.vocabulary import TokenRows
from busrl.engines.base import Engine
from busrl.preflight.load import load
from busrl.roles.learner.parity import Parity, Verdict
from busrl.roles.probes import Prober
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Trainer

WORDS = 64  # at least those of any model here
QUICK = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


class Proving:
    def __init__(self, folder: Path, model: Any, *settings: str, trainer: Any = None) -> None:
        """`trainer`: what scores in the place of the model."""
        self.trainer = trainer or Trainer(
            copy.deepcopy(model).requires_grad_(True), TrainerSettings(micro_batch_tokens=512)
        )
        topology = load(QUICK, ["learner.parity.every=0", *settings])
        topology = replace(topology, model=replace(topology.model, path=str(folder)))
        training = SimpleNamespace(team=None, token_rows=TokenRows(rows=WORDS), trainer=self.trainer)
        self.parity, self.prober = Parity(topology, cast("Any", training)), Prober(topology, only_validates=False)

    def publish(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        """The learner's weights are these, and known as that version."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.trainer.model.get_parameter(name).copy_(tensor)
        self.parity.published(version)

    def answer(self, engine: Engine, version: int) -> None:
        """The engine says that it has the version, and answers what proves it."""
        self.prober.loaded(version)
        asked, deadline = self.prober.take(engine.capacity), time.monotonic() + 120
        assert asked
        engine.submit(asked)
        while not (messages := self.prober.messages("rollout-0")):
            assert time.monotonic() < deadline
            for answer in engine.step():
                self.prober.ended(answer)
        for message in messages:
            self.parity.take(message)

    def judged(self, version: int) -> list[Verdict]:
        return list(self.parity.look(version))
