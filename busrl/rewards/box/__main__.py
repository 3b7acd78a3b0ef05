"""`python -m busrl.rewards.box`: prints each part of a box that this kernel grants, and makes a box to try it."""

from busrl.rewards.box import parts, refusal

print(parts())
print(refusal() or "a first program ran in a box")
