"""The other processes of the checks: owners and receivers of weights, members of a group. Driven by JSON lines.

`gpu_check.py --peer NAME SETTINGS` runs one. An order that fails is answered with its error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from busrl.system import device as devices
from busrl.weights.factory import TransportSettings, make_receiver
from busrl.weights.one_copy import OneCopyReceiver
from gpucheck import shapes
from gpucheck.machine_checks import broadcast_once


class Answers:
    """Standard output for answers alone: libraries that print go to standard error."""

    def __init__(self) -> None:
        self.file = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def write(self, answer: Any) -> None:
        self.file.write(json.dumps(answer) + "\n")
        self.file.flush()


def sums(tensors: dict[str, torch.Tensor]) -> list[float]:
    """A sum per tensor, in an order that both sides have: names sorted."""
    return [float(tensors[name].sum(dtype=torch.float64)) for name in sorted(tensors)]


class Model:
    """Tensors of a model's shapes on the device, and a receiver for them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.device = devices.choose(settings["device"])
        self.checkpoint = shapes.checkpoint_shapes(settings["size"])
        own = shapes.fused_shapes(self.checkpoint) if settings["fused"] else self.checkpoint
        self.tensors = shapes.tensors(own, self.device, getattr(torch, settings["dtype"]))
        self.receiver = make_receiver(TransportSettings.from_plain(settings["weights"]), "engine")

    def obey(self, order: dict[str, Any]) -> Any:
        if order["do"] == "share":
            assert isinstance(self.receiver, OneCopyReceiver)
            self.receiver.share(self.tensors, self.checkpoint)
            return True
        if order["do"] == "fetch":
            return self.fetch(order["above"], order["within"])
        return sums(self.tensors)

    def fetch(self, above: int, within: float) -> Any:
        """Take a version above that one: its number, and how long the model was not at rest."""
        deadline = time.monotonic() + within
        while self.receiver.newest()[0] <= above:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no version above {above} after {within:g} s")
        begun = time.perf_counter()
        assert self.receiver.kind == "tensors"
        version, _ = self.receiver.fetch(self.tensors)
        devices.synchronize(self.device)
        return [version, time.perf_counter() - begun]


def model(answers: Answers, settings: dict[str, Any]) -> None:
    made = Model(settings)
    answers.write("ready")
    for line in sys.stdin:
        try:
            answers.write(made.obey(json.loads(line)))
        except Exception as problem:
            answers.write({"error": f"{type(problem).__name__}: {problem}"})


def member(answers: Answers, settings: dict[str, Any]) -> None:
    answers.write(broadcast_once(**settings)[2])


PEERS: dict[str, Callable[[Answers, dict[str, Any]], None]] = {"model": model, "member": member}


def run(name: str, settings: str) -> None:
    PEERS[name](Answers(), json.loads(settings))
