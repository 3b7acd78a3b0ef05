"""Tables of keys behave as frozen dataclasses do, with methods that all of them share."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from busrl.topology.declare import REQUIRED, Table, key


class Inner(Table):
    """[outer.inner]."""

    size: int = key(4, "a size")


class Outer(Table):
    """[outer]."""

    path: str = key(REQUIRED, "a path")
    count: int = key(2, "a count")
    inner: Inner = dataclasses.field(default_factory=Inner)
    note: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count < 0")


def test_values_are_given_by_place_or_by_name_and_else_are_defaults() -> None:
    assert Outer("a", 3) == Outer(path="a", count=3, inner=Inner(4)) != Outer("a")
    assert repr(Inner(5)) == "Inner(size=5)" and Outer("a").inner == Inner()
    assert [field.name for field in dataclasses.fields(Outer)] == ["path", "count", "inner", "note"]


@pytest.mark.parametrize(("positional", "by_name"), [
    ((), {}), (("a",), {"path": "b"}), (("a",), {"cuont": 3}), (("a", 1, Inner(), "", 5), {}),
])
def test_a_missing_doubled_or_unknown_key_is_refused(
    positional: tuple[object, ...], by_name: dict[str, object]
) -> None:
    with pytest.raises(TypeError):
        Outer(*positional, **by_name)


def test_a_table_is_frozen_compared_by_value_and_checked_when_made() -> None:
    table = Outer("a", note="one")
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.count = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del table.count
    assert table == Outer("a", note="other") == copy.deepcopy(table) and hash(table) == hash(Outer("a"))
    assert dataclasses.replace(table, count=7).count == 7
    with pytest.raises(ValueError, match="count < 0"):
        dataclasses.replace(table, count=-1)


def test_tables_of_different_classes_are_never_equal() -> None:
    class Other(Table):
        """[other]."""

        size: int = key(4, "a size")

    assert Inner() != Other()
