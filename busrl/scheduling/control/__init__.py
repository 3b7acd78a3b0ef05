"""The controller of the learner's trigger: from what the steps said to a count, a time and an admission bound.

Pure like the rest of `busrl.scheduling`: one `Inputs` per step goes in, at most one `Decision` comes out. It is fed by
the learner role, by a simulator, or from the lines of `decisions.jsonl`.
"""

from busrl.scheduling.control.controller import Controller, Decision
from busrl.scheduling.control.inputs import Inputs
from busrl.scheduling.control.knobs import Knobs
from busrl.scheduling.control.noise import noise_pair
from busrl.scheduling.control.settings import ControlSettings

__all__ = ["ControlSettings", "Controller", "Decision", "Inputs", "Knobs", "noise_pair"]
