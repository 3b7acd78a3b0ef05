"""Learning rates to begin with, by the size of a model: advice for `busrl check`, and a warning far from the usual.

From published runs of policy gradients with AdamW (1e-6 for all weights of models of some billion parameters, ten times
that for an adapter) and busrl's measurements for the quickstart. Reads the model's folder for its size only.

- Only a rate FAR times the usual one gets a warning: a policy that has collapsed does not come back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from busrl.data import pretrained
from busrl.preflight.findings import Finding
from busrl.topology.schema import Topology

USUAL = ((1e6, 2e-4), (1e7, 5e-5), (1e8, 2e-5), (1e9, 3e-6), (1e10, 1e-6))  # fewer parameters than: middle, all weights
LARGEST = 5e-7
LORA = 10.0  # an adapter's middle is so many times that of all weights
FAR = 20.0
WARNED_FROM = 1e8  # parameters; smaller models are toys, whose owners know what they do

SPREAD = 3.0  # a rate is usual up to so many times the middle, and down to such a part of it
FRESH = 2  # steps of age that the usual learning rates bear (docs/losses.md)


def usual_rate(size: int, lora: bool) -> float:
    """A learning rate to begin with; a third of it and three times that are usual as well."""
    return next((rate for below, rate in USUAL if size < below), LARGEST) * (LORA if lora else 1)


def rate_advice(t: Topology) -> str:
    size, what = pretrained.parameters(t.model.path), "a LoRA adapter of" if t.lora.on else "all weights of"
    if not size:
        return "usual are 1e-06 for all weights of a model of some billion parameters, 1e-05 for a LoRA adapter"
    middle = usual_rate(size, t.lora.on)
    return f"for {what} {shown_size(size)} parameters {middle:.0e} is usual, from a third of it to three times that"


def other_rate_advice(t: Topology) -> Iterator[str]:
    """A finding where learner.lr is a usual rate, but of the other kind of training: all weights, or an adapter."""
    lr, size = t.learner.lr, pretrained.parameters(t.model.path)
    if size < WARNED_FROM:
        return
    middle, other = usual_rate(size, t.lora.on), usual_rate(size, not t.lora.on)
    if lr > SPREAD * middle and other / SPREAD <= lr <= SPREAD * other:
        yield "  that is a rate for a LoRA adapter (lora.rank): all weights are trained here, and need a tenth of it"
    elif lr < middle / SPREAD and other / SPREAD <= lr <= SPREAD * other:
        yield "  that is a rate for all weights: a LoRA adapter is trained here, and needs ten times that"


def stale_rate_advice(t: Topology) -> Iterator[str]:
    """Say what old samples ask of learner.lr: a careful start divides it by the square root of the oldest age."""
    if t.weights.mode == "fully-async":
        yield "  samples of any age: watch k3 and ess; where k3 rises above 0.05, lower the rate or bound the age"
    elif t.weights.mode == "batch-async" and t.weights.max_staleness > FRESH:
        age, careful = t.weights.max_staleness, t.learner.lr / math.sqrt(t.weights.max_staleness / FRESH)
        yield f"  with samples of age up to {age} a careful start is {careful:.1e} (lr / sqrt({age} / {FRESH}))"


def rate_findings(t: Topology) -> Iterator[Finding]:
    lr, size = t.learner.lr, pretrained.parameters(t.model.path)
    if lr is None or size < WARNED_FROM:
        return
    middle = usual_rate(size, t.lora.on)
    if lr > FAR * middle:
        what = "a LoRA adapter" if t.lora.on else "all weights"
        rule = f"{lr / middle:.0f} times what is usual for {what} of {shown_size(size)} parameters"
        remedy = f"{rate_advice(t)}; a policy that has collapsed does not come back"
        yield Finding(("learner.lr",), rule, remedy, warning=True, depends=("model.path", "lora.rank"))


def shown_size(size: int) -> str:
    return f"{size / 1e9:.1f} B" if size >= 1e9 else f"{size / 1e6:.0f} M" if size >= 1e7 else f"{size / 1e6:.1f} M"
