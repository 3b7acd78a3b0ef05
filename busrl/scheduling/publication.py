"""When weights are published that have not been published with their step.

Talks to nothing: three numbers in, yes or no out.
"""

from __future__ import annotations


def publication_is_due(unpublished: int, step: int, *, n_min: int, admitted: int, publish_every: int) -> bool:
    """Unpublished groups hold credit: `publish_every` may keep it back only while enough for a step is left.

    `unpublished`: groups trained since the last publication; `admitted`: B.
    """
    short = unpublished + n_min > admitted
    return bool(unpublished) and (short or step % publish_every == 0)
