"""The simulator: a run on a virtual clock, with the decisions of the live roles and service times instead of work.

Uses `busrl.scheduling` as it is, the topology, traces, and the files of a finished run. Starts no process, loads no
torch. `world` is the event queue and drives the rest: `scheduler` opens groups, `actors` holds the ring, the rollout
processes, the workers of the reward and the learner, `answers` gives lengths and rewards. `settings` puts together what
the command line asks for, `fit` what is known of times, `figures` and `report` what came out.
"""
