"""Decisions: what to dispatch, what to train, what is too old. Plain classes, the same in a live and a simulated run.

Imports nothing of busrl but itself, and only NumPy beside the standard library: no sockets, no files, no clocks. Time,
ring lines and fates are handed in.

scheduler role: GroupScanner -> GroupView -> Admission.room -> Policy.next ; GroupView.todo_of, less what Probes hold
learner role:   GroupScanner -> GroupView -> LearnerPlan.decide -> SetAside | Claim | Fire | Wait
"""

from busrl.scheduling.admission import Admission, Room, Staleness, Verdict, age, kept_back
from busrl.scheduling.dispatch import POLICIES, Adaptive, Fifo, Ljf, Policy, Sjf, make_policy
from busrl.scheduling.groups import NOT_STARTED, UNKNOWN, GroupScanner, GroupView, Todo, slot_priority, uid_of
from busrl.scheduling.lengths import Candidate, Predictor, RulesPredictor, kendall_tau, make_predictor
from busrl.scheduling.limits import Limits, derive
from busrl.scheduling.pool import LearnerState, Record
from busrl.scheduling.trigger import Action, Cause, Claim, Fire, LearnerPlan, Moment, SetAside, Trigger, Wait

__all__ = [
    "NOT_STARTED",
    "POLICIES",
    "UNKNOWN",
    "Action",
    "Adaptive",
    "Admission",
    "Candidate",
    "Cause",
    "Claim",
    "Fifo",
    "Fire",
    "GroupScanner",
    "GroupView",
    "LearnerPlan",
    "LearnerState",
    "Limits",
    "Ljf",
    "Moment",
    "Policy",
    "Predictor",
    "Record",
    "Room",
    "RulesPredictor",
    "SetAside",
    "Sjf",
    "Staleness",
    "Todo",
    "Trigger",
    "Verdict",
    "Wait",
    "age",
    "derive",
    "kendall_tau",
    "kept_back",
    "make_policy",
    "make_predictor",
    "slot_priority",
    "uid_of",
]
