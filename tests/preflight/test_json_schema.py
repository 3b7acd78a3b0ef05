"""The JSON schema of the topology: every file of configs/ fits, and it refuses what the reader refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

from busrl.cli import main
from busrl.preflight.json_schema import json_schema as schema
from busrl.preflight.json_schema import value_schema as value
from busrl.topology.declare import Item, Wrong, convert, items
from busrl.topology.schema import Topology

ROOT = Path(__file__).resolve().parents[2]


def keys(cls: type, name: str = "") -> dict[str, Item]:
    items_by_key: dict[str, Item] = {}
    for item in items(cls).values():
        inner = item.table or item.row
        items_by_key |= keys(inner, f"{name}{item.name}.") if inner else {f"{name}{item.name}": item}
    return items_by_key


KEYS = {name: item for name, item in keys(Topology).items() if not name.startswith("derived.")}
PLAIN = st.one_of(
    st.text(max_size=4).filter(lambda text: "\0" not in text), st.integers(-3, 1 << 33), st.booleans(),
    st.floats(-2, 3).filter(lambda number: number != int(number)),  # 1.0 is an integer to JSON, and none to TOML
)
ANY = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.dictionaries(st.sampled_from("abc"), PLAIN, max_size=2))


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/*.toml")), ids=lambda file: file.stem)
def test_every_topology_that_busrl_brings_fits(file: Path) -> None:
    checker = jsonschema.Draft202012Validator(schema())
    assert [error.message for error in checker.iter_errors(tomllib.loads(file.read_text()))] == []


@given(st.sampled_from(sorted(KEYS)), st.data())
def test_a_value_fits_where_the_reader_takes_it(name: str, data: st.DataObject) -> None:
    item = KEYS[name]
    likely = st.sampled_from([*item.rule.choices, *item.rule.words, "my.module:name", "file.py:name"])
    drawn = data.draw(st.one_of(ANY, likely))
    try:
        convert(item.hint, item.rule, drawn)
        accepted = True
    except Wrong:
        accepted = False
    assert jsonschema.Draft202012Validator(value(item.hint, item.rule)).is_valid(drawn) == accepted


def test_a_key_that_there_is_not_and_a_missing_one_are_found() -> None:
    checker = jsonschema.Draft202012Validator(schema())
    wrong: dict[str, Any] = {"run": {"steps": 3}, "process": [{"count": 1}]}
    messages = " ".join(error.message for error in checker.iter_errors(wrong))
    assert "'steps' was unexpected" in messages and "'role' is a required property" in messages


def test_the_command_prints_it_as_a_sound_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    text = capsys.readouterr().out
    assert "Infinity" not in text  # Python would read it, an editor not
    printed = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert {"run", "process"} < set(printed["properties"]) < {field.name for field in dataclasses.fields(Topology)}
    assert printed["properties"]["learner"]["properties"]["lr"]["description"]
