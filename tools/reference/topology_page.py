"""Writes `configs/reference*.toml` from the declarations of the keys, so that the reference cannot fall behind.

`python -m tools.reference.topology_page > configs/reference.toml` writes what a user needs,
`python -m tools.reference.topology_page configs` that and the tables that have a file of their own; a test compares.
Knows nothing of values in use.

- The first screen of reference.toml is a topology that runs; every other key stands below it, commented out, with its
  default. A key without a default has an example.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from busrl.topology import schema
from busrl.topology.declare import REQUIRED, Item, Rule, items, tables
from busrl.topology.reader import SECTIONS, show

NEEDED = (
    "run.max_steps", "model.path", "data.train", "groups.size", "generation.max_new_tokens",
    "generation.max_prompt_tokens", "learner.lr", "learner.trigger.n_min", "reward.kind",
)
COMPANIONS = (
    "run.name", "model.dtype", "data.template", "generation.max_batch", "lora.rank", "learner.checkpoint_every",
    "weights.max_staleness", "reward.function", "validation.data", "validation.every",
)
APART = ("segments", "mock", "openai", "vllm", "simulate", "faults", "experiments")  # tables with a file of their own
HEAD = """\
# What a run says, in a file to copy: nine keys, and their ten companions. One learner, one reward and one rollout
# process (engine torch) are started, and a validator where validation.data names prompts; a [[process]] entry says
# otherwise. `busrl check FILE` explains a file, `--set section.key=value` changes one key for a start
# (`process.rollout.count=2` for processes)."""
MIDDLE = """\

# Every other key with its default: give only what differs. Tables with a file of their own, for those who use them:
# {apart}.
# Made by `python -m tools.reference.topology_page` from the declarations.
"""
EXAMPLES = {
    "validation.set.name": "math", "validation.set.data": "math.jsonl",
    "model.tag": "judge", "model.path": "tiny:sort", "data.train": "tiny:sort", "learner.lr": 2e-4,
    "process.role": "rollout",
    "tinker.key.name": "ann", "tinker.key.digest": "0" * 64,
    "reward.part.kind": "math", "faults.crash.process": "rollout/0", "faults.crash.point": "commit.before",
}
PROCESS = """\
# A process that is to be more than one, another engine or another program; an entry stands for its role, or for the
# first of it: two entries of role rollout are two kinds of engines. Bus, keeper and scheduler are one each, always."""

MODELS = """
# Several models in one run: [[model]] for each in the place of [model], with these keys beside those of [model]; see
# docs/several-models.md. [model.learner], [model.lora], [model.weights], [model.generation] and [model.vllm] below a
# [[model]] override keys of these tables for it."""


def text() -> str:
    """configs/reference.toml: what a user needs."""
    first = (*NEEDED, *COMPANIONS)
    found = [(name, cls) for name, cls in _tables() if name.partition(".")[0] not in APART]
    lines = [HEAD]
    for name, cls in found:
        if keys := [line for key, line in _lines(name, cls) if key in first]:
            lines += [f"[{name}]", *keys]
    lines += [MIDDLE.format(apart=", ".join(f"reference-{name}.toml" for name in APART))]
    for name, cls in found:
        rows = [line for item in items(cls).values() if item.row for line in _row(f"{name}.{item.name}", item.row)]
        if rest := [*_rest(name, cls, first), *rows]:
            lines += [*rest, ""]
    lines += [PROCESS, "#[[process]]", *(f"#{line}" for _, line in _lines("process", schema.Process))]
    shown = (f'{item.name} = {_default(item, "")}' for item in items(schema.Follow).values())
    follow = f"{{ {', '.join(shown)} }}"
    tag = [line for _, line in _lines("model", schema.Tag)]
    lines += [MODELS, "#[[model]]", *(f"#{line}" for line in tag), f"#follow = {follow}  # {_title(schema.Follow)}"]
    return "\n".join(lines) + "\n"


def apart(name: str) -> str:
    """configs/reference-NAME.toml: one table with all of its keys."""
    lines = []
    for table, cls in tables(name, SECTIONS[name]):
        lines += [f"[{table}]  # {_title(cls)}", *(line for _, line in _lines(table, cls)), ""]
        rows = ((f"{table}.{item.name}", item.row) for item in items(cls).values() if item.row)
        lines += [line for key, row in rows for line in (*_row(key, row), "")]
    return "\n".join(lines).rstrip("\n") + "\n"


def _tables() -> Iterator[tuple[str, type]]:
    """Every table and the tables in it."""
    for name, cls in SECTIONS.items():
        yield from tables(name, cls)


def _row(name: str, cls: type) -> Iterator[str]:
    """An array of tables is empty by default, so an example of an entry stands there as a comment."""
    yield f"#[[{name}]]  # {_title(cls)}"
    yield from (f"#{line}" for _, line in _lines(name, cls))


def _rest(name: str, cls: type, first: tuple[str, ...]) -> Iterator[str]:
    found = [line for key, line in _lines(name, cls) if key not in first]
    if found or not any(key.rpartition(".")[0] == name for key in first):
        yield f"#[{name}]  # {_title(cls)}"
        yield from (f"#{line}" for line in found)


def _lines(table: str, cls: type) -> Iterator[tuple[str, str]]:
    """Dotted key and line of every key of a table; the tables within it have a place of their own."""
    for item in items(cls).values():
        if not (item.table or item.row) and item.rule.doc:  # what has no text is no key
            yield f"{table}.{item.name}", f"{item.name} = {_default(item, table)}  # {_comment(item.rule)}"


def _title(cls: type) -> str:
    return (cls.__doc__ or "").split(": ", 1)[-1].rstrip(".")


def _comment(rule: Rule) -> str:
    allowed = rule.text()
    return f"{rule.doc} ({allowed})" if allowed else rule.doc


def _default(item: Item, table: str) -> str:
    value = item.default
    if value is REQUIRED:
        return show(EXAMPLES[f"{table}.{item.name}"])
    if isinstance(value, float) and (math.isinf(value) or value == int(value) or abs(value) >= 1e-3):
        return '"inf"' if math.isinf(value) else str(value)
    return show(value)


def write(folder: Path) -> None:
    """All files of the reference."""
    (folder / "reference.toml").write_text(text())
    for name in APART:
        (folder / f"reference-{name}.toml").write_text(apart(name))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]))
    else:
        sys.stdout.write(text())
