"""Where a message goes: `NAME/` to everybody, `NAME/ADDRESSEE/` to one process.

Talks to nothing; knows only the names in `registry.py`. The broker compares prefixes byte by byte, so every part ends
with "/": a filter for `NEW_TASK/rollout-1/` never matches `NEW_TASK/rollout-10/`, while `NEW_TASK/` matches all.
"""

from __future__ import annotations

from busrl.protocol.messages import MAX_NAME, Message, name_of
from busrl.protocol.registry import BY_NAME


def address(process: str) -> str:
    """The form of a process name that stands in a topic: `rollout/0` -> `rollout-0`."""
    made = process.replace("/", "-")
    if not made.isascii() or not made.isprintable() or " " in made or not 0 < len(made) <= MAX_NAME:
        raise ValueError(
            f"process name {process!r} can not stand in a topic: it must be 1 to {MAX_NAME} printable ASCII characters "
            "without spaces; rename the process"
        )
    return made


def is_address(name: str) -> bool:
    """Whether a name, as it came from outside, can stand in a topic."""
    return bool(name) and name.isascii() and name.isprintable() and not {" ", "/"} & {*name} and len(name) <= MAX_NAME


def topic(kind: type[Message] | str, to: str = "") -> str:
    """Topic of a message kind (class or wire name), for one process or, with `to=""`, for everybody."""
    name = kind if isinstance(kind, str) else name_of(kind)
    if name not in BY_NAME:
        raise ValueError(f"unknown message {name!r}: the bus knows {', '.join(sorted(BY_NAME))}")
    return f"{name}/{address(to)}/" if to else f"{name}/"


def kind_of(topic_text: str) -> type[Message]:
    """The message class that travels on a topic; says what is wrong with a topic that is none."""
    name, slash, rest = topic_text.partition("/")
    if name not in BY_NAME or not slash or (rest and not rest.endswith("/")):
        raise ValueError(
            f"{topic_text!r} is no topic: write NAME/ or NAME/ADDRESSEE/ with the final slash, and a NAME of "
            f"{', '.join(sorted(BY_NAME))}"
        )
    return BY_NAME[name]
