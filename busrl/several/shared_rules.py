"""Rules about one engine that serves several models: what their adapters need of it, and of each other.

Looks at the topology of the run, when that of each model has been checked by itself. Knows nothing of engines.

- A model that only serves, and follows none, is the base itself: it needs no adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from busrl.preflight.findings import Finding
from busrl.topology.reader import show
from busrl.topology.schema import Topology

ENGINE_OF_SEVERAL = "vllm"
TRANSPORT = "lora_hotswap"  # with which versions of one model do not stop the engine for the others


class Same(NamedTuple):
    """A key, or a table, that all models of one engine have alike."""

    name: str
    why: str


ALIKE = (
    Same("model.path", "one engine has one base, on which all of its adapters are"),
    Same("model.dtype", "one engine has one base, in one type"),
    Same("generation.max_batch", "the rows of one engine are for all of its models"),
    Same("vllm", "one engine has one [vllm]"),
)


def findings_of_shared(t: Topology, shared: Mapping[int, Sequence[str]]) -> Iterator[Finding]:
    """The rules about processes of several models; `shared`: their tags by the place in the file."""
    for at, tags in shared.items():
        yield from _alike(t, at, tags)
        for tag in tags:
            yield from _of_tag(t.of(tag), at, tags)


def _finding(at: int, tags: Sequence[str], rule: str, remedy: str) -> Finding:
    return Finding((f"process.{at}.model",), rule, remedy, value=f"process.{at}.model = {show(list(tags))}")


def _alike(t: Topology, at: int, tags: Sequence[str]) -> Iterator[Finding]:
    for name, why in ALIKE:
        values = {tag: _value(t.of(tag), name) for tag in tags}
        other = next((tag for tag in tags if values[tag] != values[tags[0]]), "")
        if other:
            told = "" if name == "vllm" else f": {tags[0]} has {show(values[tags[0]])}, {other} {show(values[other])}"
            yield _finding(at, tags, f"{why}{told}", f"the same {name} for all, or an entry for each tag")


def _value(t: Topology, name: str) -> Any:
    table, _, key = name.partition(".")
    return getattr(getattr(t, table), key) if key else getattr(t, table)


def _of_tag(own: Topology, at: int, tags: Sequence[str]) -> Iterator[Finding]:
    apart = "or an entry of its own for it"
    if own.follows:
        yield _finding(at, tags, f"{own.tag} answers with checkpoints of another model", apart.removeprefix("or "))
    elif not own.frozen and own.lora.rank == 0:
        rule = f"all weights of {own.tag} are trained, and one engine has one base"
        yield _finding(at, tags, rule, f"lora.rank above 0 for it, {apart}")
    elif not own.frozen and own.weights.transport != TRANSPORT:
        rule = f'versions of {own.tag} come by transport = "{own.weights.transport}", not as adapters'
        yield _finding(at, tags, rule, f'transport = "{TRANSPORT}" for it, {apart}')
