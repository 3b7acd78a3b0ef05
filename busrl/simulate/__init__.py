"""The simulator: a run on a virtual clock, with the decisions of the live roles and service times instead of work.

Uses `busrl.scheduling` as it is, the topology, traces, and the files of a finished run. Starts no process, loads no
torch. `world` has the event queue and drives the rest: `roles` has the ring, the scheduler and the learner, `actors`
the rollout processes and the workers of the reward, `answers` the lengths and rewards. `settings` has the setting of a
run from topology and command line, `fit` its times, `figures` and `report` its results.
"""
