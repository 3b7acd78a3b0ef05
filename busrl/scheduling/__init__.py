"""Decisions: what to dispatch, what to train, what is too old. Pure classes, the same in a live and a simulated run.

Imports only itself, `busrl.states` and NumPy beside the standard library: no sockets, files or clocks.
Time, ring lines and fates are handed in.

scheduler role: GroupScanner -> GroupView -> Admission.room -> Policy.next ; GroupView.todo
learner role:   GroupScanner -> GroupView -> LearnerPlan.decide -> SetAside | Claim | Fire | Wait
"""
