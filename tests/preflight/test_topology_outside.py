"""What `busrl check` says of roles whose workers join from outside."""

from __future__ import annotations

from collections.abc import Callable

from busrl.preflight.explain import report
from busrl.topology import Topology

NONE_HERE = ("process.reward.count=0",)


def test_a_role_that_joins_from_outside_is_explained_with_its_lease(loaded: Callable[..., Topology]) -> None:
    text = report(loaded("", *NONE_HERE, "limits.lease_s=7"))
    assert "expected to join from outside, or not at all: reward" in text and "a task's lease is 7 s" in text


def test_samples_beyond_a_message_are_warned_of_where_one_needs_it(
    loaded: Callable[..., Topology],
) -> None:
    big = ("ring.slot_bytes=8000", "bus.max_message_bytes=8192")
    assert "workers without a mapping cannot join" in report(loaded("", *NONE_HERE, *big))
    assert "workers without a mapping" not in report(loaded("", *big))
    assert "workers without a mapping" not in report(loaded("", *NONE_HERE))
