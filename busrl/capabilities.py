"""The one table of the parts of busrl that can be left out, and of the module in which each role is found.

Read by `python -m busrl.roles`. Imports nothing of busrl: a part is imported when it is used.
"""

ROLE_MODULES: dict[str, str] = {
    "bus": "busrl.roles.bus:Bus", "keeper": "busrl.roles.keeper:Keeper", "scheduler": "busrl.roles.scheduler:Scheduler",
    "rollout": "busrl.roles.rollout:Rollout", "reward": "busrl.roles.reward:Reward",
    "learner": "busrl.roles.learner:Learner", "validator": "busrl.roles.validator:Validator",
    "agent": "busrl.agents.roles.agent:Agent", "serve": "busrl.agents.roles.serve:Serve",
    "atropos": "busrl.agents.roles.atropos:Atropos", "rank": "busrl.ranks.role:Rank",
    "relay": "busrl.hosts.relay:Relay", "satellite": "busrl.hosts.satellite:Satellite",
    "sinks": "busrl.observe.sinks.role:Sinks",
}
