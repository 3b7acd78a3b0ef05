"""A loss by import path: REINFORCE with a clipped importance weight (CISPO, arXiv 2506.13585, equation 4).

    [learner]
    loss = "loss.py:cispo"

Unlike PPO's clip, the clipped weight is a constant: a token outside of the interval still has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from busrl.algorithms.losses import LossInputs, LossSettings, log_ratio


def cispo(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """-clip(r) A log p, with r = p / behaviour as a constant; halved for each step that a token is old."""
    ratio = log_ratio(inputs.trainer_logprobs, inputs.behaviour_logprobs).exp().detach()
    weight = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    assert inputs.ages is not None  # a training step always gives them
    fresh = torch.pow(0.5, inputs.ages.to(weight.dtype))
    return -fresh * weight * inputs.advantages * inputs.trainer_logprobs


cispo.streamable = True  # type: ignore[attr-defined]  # no token's loss depends on another sample
cispo.uses = ()  # type: ignore[attr-defined]  # neither of the log-probabilities before the step, nor of the entropy
