"""The controller of the learner's trigger: from what the steps said to a count, a time and an admission bound.

Pure like the rest of `busrl.scheduling`: one `Inputs` per step goes in, at most one `Decision` comes out. It is fed by
the learner role, by a simulator, or from the lines of `decisions.jsonl`.
"""

from busrl.scheduling.controller import Controller, ControlSettings, Decision, Inputs, Knobs, noise_pair

__all__ = ["ControlSettings", "Controller", "Decision", "Inputs", "Knobs", "noise_pair"]
