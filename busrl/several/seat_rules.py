"""Rules about seats: their names, and what a run whose model plays several of them cannot have.

Looks at a topology's settings alone. Plugged into `busrl check` with the other rules.

- A run of several seats plays episodes: no other sample has sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from busrl.preflight.findings import Check, Clash, Finding, clashes
from busrl.topology.kinds import FIFO
from busrl.topology.reader import show
from busrl.topology.rewards import RETURNED
from busrl.topology.schema import AGENT, SERVE, Topology

NAME = re.compile(r"[a-z][a-z0-9-]{0,15}")  # of a seat, and of a tag
NAME_RULE = "a small letter, then at most 15 small letters, digits and dashes"
MOST_SEATS = 8
SEATS = "model.seats"
PLAYERS = (AGENT, SERVE)  # the roles whose episodes may have several sides


def has_several(t: Topology) -> bool:
    return len(t.seats) > 1


def _without_players(t: Topology) -> bool:
    return has_several(t) and not any(entry.role in PLAYERS for entry in t.process)


def _with_others(t: Topology) -> str:
    """A role that makes samples of one side only; empty where there is none."""
    others = (entry.role for entry in t.process if entry.role in ("atropos", "tinker"))
    return next(others, "") if has_several(t) else ""


TABLE = (
    Clash((SEATS, "process"), _without_players,
          'only an episode has several sides; add a [[process]] with role = "agent" or "serve"'),
    Clash((SEATS, "process"), _with_others,
          lambda t: f"the samples of {_with_others(t)} have one side; remove that process, or the seats"),
    Clash((SEATS, "process"), lambda t: has_several(t) and t.scripted,
          'a scripted engine knows the answers of one seat; engine = "torch" or "vllm"'),
    Clash((SEATS, "process"), lambda t: has_several(t) and t.host_names,
          "the sides of an episode are claimed in one memory; remove hosts"),
    Clash(("reward.kind", SEATS), lambda t: has_several(t) and t.reward.kind != RETURNED,
          f'each side has a reward of its own, which the episode returns; kind = "{RETURNED}"'),
    Clash((SEATS, "data.skip.max_pass_rate", "data.skip.min_pass_rate"), lambda t: has_several(t) and t.data.skip.on,
          "a pass rate is that of one answer, and a draw has one for each seat; remove [data.skip]"),
    Clash(("scheduler.policy", SEATS), lambda t: has_several(t) and t.scheduler.policy != FIFO,
          f'lengths are predicted of one seat; policy = "{FIFO}"'),
    Clash(("learner.trigger.n_min", SEATS, "weights.mode"),
          lambda t: t.weights.mode == "sync" and t.learner.trigger.n_min % len(t.seats),
          lambda t: f"a draw has {len(t.seats)} groups and a round is of whole draws; set n_min to a multiple of "
                    f"{len(t.seats)}"),
)


def _names(t: Topology) -> Iterator[Finding]:
    seats = t.model.seats
    if (wrong := next((name for name in seats if not NAME.fullmatch(name)), None)) is not None:
        yield Finding((SEATS,), f"{show(wrong)} is no name of a seat: {NAME_RULE}", 'for example "first"')
    if len({*seats}) < len(seats):
        yield Finding((SEATS,), "a seat is named twice", "each plays one part of the episode: remove it, or rename it")
    if len(seats) > MOST_SEATS:
        yield Finding((SEATS,), f"a model has at most {MOST_SEATS} seats", "remove some")


def _seats(t: Topology) -> Iterator[Finding]:
    yield from _names(t)
    yield from clashes(t, TABLE)


CHECKS: tuple[Check, ...] = (_seats,)
