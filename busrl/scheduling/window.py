"""The anchored window: which ready groups may be trained now, so that answers that finish early are not favoured.

Talks to nothing. Groups have admission indices; the window is the W indices from the oldest group that is neither
claimed nor set aside (the anchor). Knows nothing of rewards, ages or steps.

- A group is chosen only if it is ready and inside the window, oldest first.
- Choosing the anchor moves the window; choosing a younger group does not.
- A ready group outside waits for the anchor, and the result names it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from busrl.scheduling.groups import Bools, Ints


@dataclass(frozen=True)
class Window:
    """Positions in the given arrays: `chosen` in admission order, `inside` all ready ones that could be chosen.

    `anchor` is the group that holds the window (None if all are ready); `waiting` counts ready groups beyond it.
    """

    chosen: Ints
    inside: Ints
    anchor: int | None
    waiting: int


def look(admission: Ints, ready: Bools, width: int, limit: int) -> Window:
    """Choose up to `limit` ready groups among those neither claimed nor set aside.

    `admission` need not be sorted. Choosing the ready groups before the first one that is not ready moves the window
    past them, so the anchor that counts is that first one.
    """
    order = np.argsort(admission, kind="stable")
    ready_in_order = ready[order]
    if ready_in_order.all():
        return Window(order[: max(0, limit)], order, None, 0)
    first = int(np.argmin(ready_in_order))
    anchor = int(order[first])
    within = admission[order] < admission[anchor] + width
    inside = order[ready_in_order & within]
    return Window(inside[: max(0, limit)], inside, anchor, int(ready.sum()) - len(inside))
