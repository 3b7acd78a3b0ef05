"""Seats of an episode: under which names its code calls models, and what the episode was worth to each of them. Pure.

Shared by the process that plays an episode and by the one that keeps its turns. Talks to nothing; knows nothing of
trees, slots or pipes.

- With one seat a result is a number, or a map of named parts of it, whatever the names are.
- With several, a number counts for each trained seat. A map whose keys are seats gives each its own: a number or parts.
- Where one seat alone is trained, a map without that seat's name is its parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from busrl.errors import CallRefused
from busrl.rewards.base import MalformedReward, settle

LONGEST_NAME = 64  # characters of a wrong name that are shown


class Seat(msgspec.Struct, frozen=True):
    """A seat: its name, the tag of the model that plays it ("" in a run of one), and whether its turns are trained."""

    name: str
    tag: str = ""
    trained: bool = True


ONLY = Seat("policy")


class Worth(msgspec.Struct):
    """The reward that a seat got, and its parts."""

    reward: float = 0.0
    parts: dict[str, float] = {}


def seat_of(seats: Sequence[Seat], name: str) -> Seat:
    """The seat of this name, or the only one of the tag of this name. KeyError names the seats."""
    of_tag = [seat for seat in seats if seat.tag == name and name]
    found = [seat for seat in seats if seat.name == name] or of_tag
    if len(found) == 1:
        return found[0]
    names = ", ".join(seat.name for seat in found or seats)
    if found:
        raise KeyError(f"{name!r} plays several seats: {names}; name one of them")
    raise KeyError(f"{shown(name)} is no seat of this run; its seats: {names}")


def settled(result: Any, seats: Sequence[Seat] = (ONLY,)) -> tuple[float, dict[str, float], dict[str, Worth]]:
    """The reward of every trained seat and its parts, or what each seat got, from the result of an episode.
    MalformedReward if it is no reward."""
    if len(seats) <= 1 or not isinstance(result, Mapping):
        return (*settle(result), {})
    names, trained = {seat.name for seat in seats}, [seat.name for seat in seats if seat.trained]
    unknown = next((name for name in result if name not in names), None)
    if len(trained) == 1 and (unknown is not None or trained[0] not in result):
        return (*settle(result), {})
    if unknown is not None:
        raise MalformedReward(f"the reward is of {shown(unknown)}, which is no seat; seats: {', '.join(sorted(names))}")
    if not result:
        settle(result)  # says that an empty map is no reward
    return 0.0, {}, {str(name): Worth(*_of_seat(name, value)) for name, value in result.items()}


def worth_of(seats: Sequence[Seat], same: Worth, each: Mapping[str, Worth], spoke: Collection[str]) -> dict[str, Worth]:
    """The worth of each trained seat that spoke. MalformedReward where it got none, or another seat is unknown."""
    wanted = [seat.name for seat in seats if seat.trained and seat.name in spoke]
    if not each:
        return dict.fromkeys(wanted, same)
    names = {seat.name for seat in seats}
    if (unknown := next((name for name in each if name not in names), None)) is not None:
        raise MalformedReward(f"the reward is of {shown(unknown)}, which is no seat; seats: {', '.join(sorted(names))}")
    if (without := next((name for name in wanted if name not in each), None)) is not None:
        raise MalformedReward(f"the seat {without} made calls and got no reward; rewards: {', '.join(each)}")
    return {name: each[name] for name in wanted}


def seat_asked(seats: Sequence[Seat], own: str, model: str) -> str:
    """The seat that a request over HTTP means: `own` is that of its key ("" if the key is of the whole episode), and
    `model` the name in its body. CallRefused for a name that none has."""
    if len(seats) <= 1:
        return seats[0].name
    try:
        asked = seat_of(seats, model).name if model else own or seats[0].name
    except KeyError as problem:
        if own:  # this client names one model in all of its requests, whatever its key is for
            return own
        raise CallRefused("model_not_found", f"model: {problem.args[0]}", "model") from None
    if own and asked != own:
        raise CallRefused("invalid", f"model = {model!r}: this key is that of the seat {own}; ask with the key of "
                          f"{asked}, or with that of the episode", "model")
    return asked


def shown(name: object) -> str:
    """A name that somebody else gave, of any length, for a message."""
    text = repr(name)
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}..."


def _of_seat(name: object, value: Any) -> tuple[float, dict[str, float]]:
    try:
        return settle(value)
    except MalformedReward as problem:
        raise MalformedReward(f"seat {name}: {problem}") from None
