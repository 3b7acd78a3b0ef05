"""Teachers of a run: several by the tag of a prompt, behind endpoints, or posted with the groups of environments.

A capability (`busrl.capabilities`): a run with none, or with `model.teacher` alone, needs nothing of it.
"""
