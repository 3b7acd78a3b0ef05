"""What docs/trl-verl.md offers to people who come from TRL or verl computes what their code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from busrl.algorithms import losses
from busrl.algorithms.advantages import ADVANTAGES
from busrl.algorithms.catalog import NO_DUAL
from busrl.algorithms.losses import LossInputs, LossSettings
from busrl.topology.learner import Learner

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trl-verl.md").read_text()
SECTION = PAGE.partition("## Coming from TRL or verl")[2].partition("\n## ")[0]
REWARDS = [0.0, 0.0, 1.0, 0.0, 0.25, 1.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)[0], names)
    return names


def test_the_group_deviation_of_trl_has_its_constant(theirs: dict[str, Any]) -> None:
    values = torch.tensor(REWARDS, dtype=torch.float64)
    wanted = (values - values.mean()) / (values.std() + 1e-4)
    values_of_trl = torch.tensor(theirs["group_std"](REWARDS, [1] * 8), dtype=torch.float64)
    assert torch.allclose(values_of_trl, wanted, atol=1e-12, rtol=0)
    values_of_busrl = torch.as_tensor(ADVANTAGES["group_std"](REWARDS, [1] * 8))
    assert not torch.allclose(values_of_trl, values_of_busrl, atol=1e-5, rtol=0)


def test_one_right_answer_of_eight_is_where_the_two_differ_most() -> None:
    """By 0.03 %, as the page says."""
    shares = [1e-4 / (torch.tensor([1.0] * right + [0.0] * (8 - right)).std().item() + 1e-4) for right in range(1, 8)]
    assert 0.00025 < max(shares) < 0.0003 and max(shares) == pytest.approx(shares[0])


def test_cispo_of_verl_has_a_lower_bound_and_busrls_has_none(theirs: dict[str, Any]) -> None:
    ratios, advantages = torch.tensor([0.1, 0.9, 1.1, 4.0, 9.0]), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    behaviour = torch.full((5,), -3.0)
    trained = (behaviour + ratios.log()).requires_grad_()
    inputs = LossInputs(trainer_logprobs=trained, behaviour_logprobs=behaviour, proximal_logprobs=behaviour,
                        advantages=advantages, samples=torch.zeros(5, dtype=torch.int64),
                        lengths=torch.tensor([5]))
    settings = LossSettings(clip_low=0.2, clip_high=0.2)
    for loss, weights in ((theirs["cispo"], [0.8, 0.9, 1.1, 1.2, 1.2]), (losses.cispo, [0.1, 0.9, 1.1, 4.0, 5.0])):
        (gradient,) = torch.autograd.grad(loss(inputs, settings).sum(), trained)
        assert torch.allclose(gradient, -torch.tensor(weights) * advantages, atol=1e-6)


def test_the_column_of_busrl_has_its_defaults() -> None:
    defaults = {name: field.default for name, field in Learner.__dataclass_fields__.items()}
    assert (defaults["clip_low"], defaults["clip_high"]) == (0.2, 0.28)
    assert (defaults["dual_clip"], defaults["cispo_cap"]) == (3.0, 5.0)
    assert (defaults["ratio"], defaults["kl"], NO_DUAL) == ("behaviour", "none", 1000.0)
