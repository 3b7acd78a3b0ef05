"""What the training of samples of one turn is made of, as numbers to compare with those of an earlier busrl.

`python tests/training/one_turn.py` writes one_turn.json anew: only where a change of these numbers is meant.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from busrl.training import batch, packing
from busrl.training.scorer import Advantages

FILE = Path(__file__).with_suffix(".json")
LOSSES = ("ppo_clip", "gspo", "gmpo", "opsm", "cispo")


def digest(*arrays: Any) -> str:
    sha = hashlib.sha256()
    for one in arrays:
        array = np.ascontiguousarray(one.numpy() if isinstance(one, torch.Tensor) else one)
        sha.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return sha.hexdigest()


def places(lab: Any) -> dict[str, str]:
    """Digests of all that says which row predicts which token: whole numbers, the same on every machine."""
    made = {}
    for seed in range(3):
        samples = lab.samples(groups=4, members=5, seed=seed, temperatures=(1.0, 0.7))
        for together in (False, True):
            cuts = [batch.cut(samples, budget, together) for budget in (1, 30, 60, 200, 10**6)]
            made[f"cut {seed} {together}"] = hashlib.sha256(json.dumps(cuts).encode()).hexdigest()
        made[f"pad {seed}"], made[f"join {seed}"] = digest(*batch.pad(samples)), digest(*batch.join(samples))
        plan = packing.plan_of(samples)
        rows = plan.sequences
        made[f"plan {seed}"] = digest(plan.ids, plan.positions, np.array(plan.shared), rows.before_first, rows.before,
                                      rows.first, rows.lengths)
        flat = batch.flatten(samples, torch.float32, torch.device("cpu"))
        made[f"flat {seed}"] = digest(flat.targets, flat.behaviour_logprobs, flat.policy_versions, flat.rows,
                                      flat.lengths, flat.temperature)
    return made


def steps(lab: Any, double: bool) -> dict[str, Any]:
    """Loss, norm and digest of the gradient of a step of each loss by each way."""
    made = {}
    for way in ("full", "padded", "packed"):
        for loss in LOSSES:
            trainer = lab.trainer("qwen3", way, double, loss=loss)
            samples = lab.samples(groups=3, temperatures=(1.0, 0.7), model=trainer.model)
            worth, weights = lab.advantages(len(samples)), [1 / len(sample.token_ids) for sample in samples]
            trainer.accumulate(samples, Advantages(worth, weights), version=4)
            gradients = [parameter.grad.clone() for parameter in trainer.parameters]
            stats = trainer.step(1e-3)
            numbers = {one.name: getattr(stats.diagnostics, one.name) for one in fields(stats.diagnostics)}
            assert is_dataclass(stats.diagnostics)
            made[f"{way} {loss}"] = [stats.loss, stats.grad_norm, stats.padding, numbers, digest(*gradients)]
    return made


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from lab import Lab

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        recorded = {"places": places(lab), "steps": steps(lab, True)}
        bits = steps(lab, False)
    if sys.argv[1:]:
        print(json.dumps([recorded, bits], indent=1))
    else:
        FILE.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
