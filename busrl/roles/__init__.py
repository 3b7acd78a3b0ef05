"""The processes of a run: each module is one role's loop, joining the ring, the bus and the pure decision code.

    prompts -> scheduler -> [QUEUED] -> rollout -> [GENERATED] -> reward -> [REWARDED] -> learner -> weights -> rollout

A role may be killed at any line: what it held goes back to rest when anybody reaps it, and its successor derives all
it needs from the ring and the files. `python -m busrl.roles RUN_DIR NAME` starts one.
"""
