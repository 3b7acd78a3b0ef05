"""Which learning rates are usual, by the size of the model and what is trained of it: advice, and a warning by number.

Reads config.json and the headers of the weights; loads neither torch nor a model. The numbers are starting points from
published runs of policy gradients with AdamW (1e-6 for all weights of models of some billion parameters, ten times that
for a low-rank adapter), and busrl's own measurements for the quickstart. Knows nothing of schedules.

- Only a rate far above what is usual is warned of: FAR times the middle, for models that anybody would call one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from busrl.topology import machine
from busrl.topology.rules import Finding
from busrl.topology.schema import TINY, Topology

USUAL = ((1e6, 2e-4), (1e7, 5e-5), (1e8, 2e-5), (1e9, 3e-6), (1e10, 1e-6))  # fewer parameters than: middle, all weights
LARGEST = 5e-7
LORA = 10.0  # an adapter's middle is so many times that of all weights
FAR = 20.0
WARNED_FROM = 1e8  # parameters; smaller models are toys, whose owners know what they do
TINY_PARAMETERS = 100_000


def usual(size: int, lora: bool) -> float:
    """A learning rate to begin with; a third of it and three times that are usual as well."""
    return next((rate for below, rate in USUAL if size < below), LARGEST) * (LORA if lora else 1)


def parameters(t: Topology) -> int:
    """How many the model has: from its weights, or else from the widths of config.json; 0 where neither says."""
    if t.model.path.startswith(TINY):
        return TINY_PARAMETERS
    folder = Path(t.model.path)
    counted = sum(machine.elements(shape) for shape in machine.tensor_shapes(folder).values())
    return max(counted, estimate(machine.read_config(folder)))  # of a folder whose weights are elsewhere, or a part


def estimate(config: dict[str, Any]) -> int:
    """A decoder's parameters from its widths: embeddings, attention and a gated feed-forward of each layer."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    width, layers = machine.whole(text, "hidden_size", "n_embd", "d_model"), machine.whole(text, *machine.LAYERS)
    inner = machine.whole(text, "intermediate_size", "n_inner", "d_ff") or 4 * width
    heads, shared = machine.whole(text, "num_attention_heads", "n_head"), machine.whole(text, "num_key_value_heads")
    attention = 2 * width * width * (1 + (shared / heads if heads and shared else 1))
    feed = (3 if "intermediate_size" in text else 2) * width * inner
    embeddings = machine.whole(text, "vocab_size") * width * (1 if config.get("tie_word_embeddings", True) else 2)
    return int(embeddings + layers * (attention + feed))


def advice(t: Topology) -> str:
    """What to set learner.lr to, in words."""
    size, what = parameters(t), "a LoRA adapter of" if t.lora.on else "all weights of"
    if not size:
        return "usual are 1e-06 for all weights of a model of some billion parameters, 1e-05 for a LoRA adapter"
    middle = usual(size, t.lora.on)
    return f"for {what} {shown(size)} parameters {middle:.0e} is usual, from a third of it to three times that"


def shown(size: int) -> str:
    """A count of parameters as people write it."""
    return f"{size / 1e9:.1f} B" if size >= 1e9 else f"{size / 1e6:.0f} M" if size >= 1e7 else f"{size / 1e6:.1f} M"


def findings(t: Topology) -> Iterator[Finding]:
    """A learning rate that destroys a model of this size within a few steps."""
    lr, size = t.learner.lr, parameters(t)
    if lr is None or size < WARNED_FROM:
        return
    middle = usual(size, t.lora.on)
    if lr > FAR * middle:
        what = "a LoRA adapter" if t.lora.on else "all weights"
        rule = f"{lr / middle:.0f} times what is usual for {what} of {shown(size)} parameters"
        remedy = f"{advice(t)}; a policy that has collapsed does not come back"
        yield Finding(("learner.lr",), rule, remedy, warning=True, depends=("model.path", "lora.rank"))
