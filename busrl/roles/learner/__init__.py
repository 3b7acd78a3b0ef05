"""The learner: claims groups, trains, publishes policy versions. `loop` is its process, the others are its parts."""

from busrl.roles.learner.loop import Learner

__all__ = ["Learner"]
