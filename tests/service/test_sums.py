"""Losses of clients: their formulas, and what is refused of a request's data."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf
from typing import Any

import numpy as np
import pytest
import torch

from busrl.service.sums import LOSSES, UserFault, check, losses_of

CONFIG: dict[str, dict[str, float | str]] = {
    "dro": {"beta": 0.05}, "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
}


@dataclass(frozen=True)
class Datum:
    tokens: Any
    inputs: dict[str, Any]


def expected(loss: str, lp: float, q: float, advantage: float, mean: float) -> float:
    """By the words of the interface, number by number."""
    low, high = (0.9, 1.3) if loss == "gspo" else (0.8, 1.2)
    ratio = exp(mean) if loss == "gspo" else exp(lp - q)
    clipped = min(max(ratio, low), high)
    return {
        "cross_entropy": -lp,
        "importance_sampling": -ratio * advantage,
        "ppo": -min(ratio * advantage, clipped * advantage),
        "gspo": -min(ratio * advantage, clipped * advantage),
        "cispo": -clipped * advantage * lp,
        "dro": -(lp * advantage - 0.025 * (lp - q) ** 2),
    }[loss]


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_is_its_formula_at_every_position(loss: str) -> None:
    random = np.random.default_rng(0)
    count, rows = 40, np.repeat([0, 1], [15, 25])
    lp, q = (-random.random(count) * 2 - 0.1 for _ in range(2))
    advantage, weight, mask = random.normal(size=count), random.random(count), random.integers(0, 2, count)
    inputs = {"weights": weight}
    if loss != "cross_entropy":
        inputs |= {"logprobs": q, "advantages": advantage}
    if loss == "gspo":
        inputs |= {"sequence_ratio_mask": mask.astype(np.float64)}
    means = [((lp - q) * mask)[rows == row].sum() / mask[rows == row].sum() for row in (0, 1)]
    wanted = [w * expected(loss, *row) for w, *row in zip(weight, lp, q, advantage, np.array(means)[rows])]
    tensors = {key: torch.tensor(values) for key, values in inputs.items()}
    losses = losses_of(loss, CONFIG.get(loss, {}), torch.tensor(lp), tensors, torch.tensor(rows))
    assert losses.tolist() == pytest.approx(wanted, abs=1e-12)


def test_cispo_has_no_gradient_through_its_ratio_and_gspo_has() -> None:
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-1.1, -1.9]), "advantages": torch.tensor([1.0, -1.0])}
    losses_of("cispo", {}, lp, inputs, torch.zeros(2, dtype=torch.int64)).sum().backward()
    assert lp.grad is not None
    assert lp.grad.tolist() == pytest.approx([-exp(0.1), exp(-0.1)], rel=1e-5)
    lp.grad = None
    inputs["sequence_ratio_mask"] = torch.ones(2)
    losses_of("gspo", CONFIG["gspo"], lp, inputs, torch.zeros(2, dtype=torch.int64)).sum().backward()
    assert lp.grad.tolist() == pytest.approx([-1.0, 1.0], abs=1e-6)


def datum(**changes: Any) -> Datum:
    inputs = {
        "target_tokens": np.array([2, 3, 4]), "logprobs": np.zeros(3, np.float32), "advantages": np.ones(3, np.float32),
        **changes,
    }
    tokens = inputs.pop("tokens", np.array([1, 2, 3], np.int32))
    return Datum(tokens, {key: value for key, value in inputs.items() if value is not None})


@pytest.mark.parametrize(("loss", "config", "changes", "words"), [
    ("sft", {}, {}, "loss 'sft' is not served"),
    ("ppo", {"clip_low": 0.5}, {}, "'clip_low' is not read; its keys: clip_low_threshold, clip_high_threshold"),
    ("ppo", {"clip_low_threshold": "0.5"}, {}, "give a finite number"),
    ("ppo", {"clip_low_threshold": inf}, {}, "give a finite number"),
    ("dro", {}, {}, "give beta"),
    ("gspo", {"clip_low_threshold": 0.9}, {}, "give clip_high_threshold"),
    ("ppo", {}, {"logprobs": None}, "needs logprobs"),
    ("ppo", {}, {"advantage": np.ones(3)}, "does not read advantage"),
    ("cross_entropy", {}, {"logprobs": None, "advantages": None}, "needs weights"),
    ("ppo", {}, {"weights": np.ones(3), "mask": np.ones(3)}, "two names of one factor"),
    ("ppo", {}, {"tokens": np.zeros(0, np.int32)}, "0 tokens"),
    ("ppo", {}, {"tokens": np.zeros(9, np.int32)}, "9 tokens; a datum has 1 to 8"),
    ("ppo", {}, {"target_tokens": np.array([2, 3])}, "target_tokens has 2 positions, the input 3"),
    ("ppo", {}, {"target_tokens": np.array([2.0, 3.0, 4.0])}, "token ids are integers"),
    ("ppo", {}, {"target_tokens": np.array([2, 3, 10])}, "token 10 in target_tokens; the model knows 0 to 9"),
    ("ppo", {}, {"tokens": np.array([-1, 2, 3], np.int32)}, "token -1 in the input"),
    ("ppo", {}, {"advantages": np.ones(4)}, r"advantages has shape \[4\]"),
    ("ppo", {}, {"advantages": np.array([1, np.nan, 1])}, "not finite"),
    ("ppo", {}, {"target_tokens": np.zeros((3, 0), np.int64)}, r"shape \[3, 0\]"),
    ("dro", {"beta": 0.1}, {key: np.zeros((3, 2), np.int64) for key in ("target_tokens", "logprobs", "advantages")},
     r"shape \[3, 2\], and dro is not 0 at a cell without a target; give weights or mask"),
    ("gspo", CONFIG["gspo"], {key: np.zeros((3, 2), np.int64) for key in ("target_tokens", "sequence_ratio_mask")},
     r"shape \[3, 2\]; gspo takes \[3\]"),
])
def test_a_faulty_request_is_refused_by_its_place(loss: str, config: Any, changes: Any, words: str) -> None:
    with pytest.raises(UserFault, match=words):
        check([datum(**changes)], loss, config, context=8, vocabulary=10)


@pytest.mark.parametrize("loss", [name for name, loss in LOSSES.items() if not loss.single])
def test_cells_that_a_sparse_request_does_not_list_add_nothing(loss: str) -> None:
    listed = torch.tensor([[True, True], [True, False], [False, False]])
    logprobs = -torch.rand(3, 2, generator=torch.Generator().manual_seed(1)) - 0.1
    inputs = {"logprobs": torch.full((3, 2), -0.5), "advantages": torch.tensor([[1.0, -2.0], [0.5, 3.0], [1.0, 1.0]])}
    if loss == "cross_entropy" or LOSSES[loss].at_padding:
        inputs["weights"] = torch.ones(3, 2)
    reads = {name: torch.where(listed, values, 0.0) for name, values in inputs.items() if name in LOSSES[loss].reads}
    rows = torch.zeros(3, dtype=torch.int64)
    losses = losses_of(loss, CONFIG.get(loss, {}), logprobs, reads, rows)
    assert losses[listed].abs().min() > 0 and losses[~listed].abs().max() == 0


def test_the_fault_names_the_datum_and_no_data_is_one() -> None:
    check([datum(), datum()], "ppo", {}, 8, 10)
    with pytest.raises(UserFault, match=r"^datum 1: "):
        check([datum(), datum(logprobs=None)], "ppo", {}, 8, 10)
    with pytest.raises(UserFault, match="no data"):
        check([], "ppo", {}, 8, 10)
