"""docs/ring.md and its neighbours against the compiler: offsets, types, states, transitions are the header's."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("ring", "ring-memory", "ring-layout", "ring-tensors")
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in NAMES)
STRUCTS = ["HeaderFixed", "Header", "WakeLine", "CounterLine", "ProcEntry", "Line", "TensorTable", "TensorEntry"]


@pytest.fixture(scope="module")
def layout(tmp_path_factory) -> dict[str, Any]:
    program = tmp_path_factory.mktemp("layout") / "print_layout"
    source = ROOT / "csrc" / "tests" / "print_layout.cpp"
    build = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc' / 'include'}", str(source)]
    subprocess.run([*build, "-o", str(program)], check=True, timeout=120)
    return json.loads(subprocess.run([str(program)], check=True, timeout=30, capture_output=True).stdout)


def table(head: str) -> list[list[str]]:
    """Cells of the first table whose head line begins so, after a mark or anywhere."""
    begin = PAGE.index(head)
    lines = PAGE[PAGE.index("|", begin) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("name", STRUCTS)
def test_the_page_has_every_field_where_the_compiler_puts_it(layout, name):
    rows = table(f"<!-- layout: {name} -->")
    told = [[int(row[0], 16), int(row[1]), row[2], row[3]] for row in rows]
    assert told == layout["structs"][name]["fields"]


@pytest.mark.parametrize("name", STRUCTS)
def test_no_byte_of_a_struct_is_left_out(layout, name):
    end = 0
    for offset, size, kind, field in layout["structs"][name]["fields"]:
        assert (offset, kind != "?") == (end, True), f"{name}.{field}: add what lies before it to print_layout.cpp"
        end = offset + size
    assert end == layout["structs"][name]["bytes"]


def test_the_page_names_every_state_and_whether_it_has_an_owner(layout):
    told = [[row[1].rstrip("*"), row[1].endswith("*")] for row in table("| number | state |")]
    assert told == layout["states"]


def test_the_page_has_exactly_the_transitions_of_the_code(layout):
    told = [row[:3] for row in table("| from | to | meaning | who |")]
    assert told == layout["transitions"]
    assert all(row[3] for row in table("| from | to | meaning | who |"))


def test_the_page_has_exactly_the_transitions_of_calls_and_both_magic_numbers(layout):
    told = [row[:3] for row in table("| of a call | to | meaning | who |")]
    assert told == layout["call_transitions"]
    assert all(f"`{magic}`" in PAGE for magic in layout["magic"])


def test_the_words_of_the_run_stand_where_the_page_says(layout):
    rows = table("| word | at | written by |")
    words = next(field for field in layout["structs"]["Header"]["fields"] if field[3] == "words")
    assert [row[0].strip("`") for row in rows] == layout["header_words"]
    assert [int(row[1], 16) for row in rows] == [words[0] + 8 * i for i in range(len(rows))]


def test_the_word_the_ident_and_the_constants_are_as_the_page_says(layout):
    assert layout["word"] == [1 << 58, 1 << 44, 1 << 36, 1]
    assert "`state << 58 | owner << 44 | segs << 36 | seq`: 6, 14, 8 and 36 bits" in PAGE
    assert layout["ident"] == 3 << 32 | 2 << 8 | 1
    said = " ".join(PAGE.split())
    assert layout["owners"] == (1 << 14) - 1 and "16,383 processes" in said
    assert f"{layout['segments']} segments" in said and f"{layout['tensors']} tensors a slot" in said
    assert f"a multiple of {layout['tensor_align']}" in said
    counters = next(row[4] for row in table("<!-- layout: CounterLine -->") if row[3] == "value")
    assert re.findall(r"(\d+) (\w+)", counters) == [(str(i), name) for name, i in layout["counters"].items()]
    codes = next(row[4] for row in table("<!-- layout: TensorEntry -->") if row[3] == "code")
    assert re.findall(r"\d+", codes) == [str(code) for code in layout["dtypes"].values()]


def test_sizes_that_the_page_says_in_words_are_those_of_the_structs(layout):
    size = {name: struct["bytes"] for name, struct in layout["structs"].items()}
    said = " ".join(PAGE.split())
    assert f"`proc_off` = {size['Header']:#x}" in said
    assert f"`line_off` = `proc_off` + {size['ProcEntry']} `n_procs`" in said
    assert f"`hint_off` = `line_off` + {size['Line']} `n_slots`" in said
    assert f"`data_off` = `table_off` + {size['TensorTable']} `n_slots`" in said


def test_the_hints_lie_as_the_page_says(layout):
    assert "For FREE, QUEUED, GENERATED, REWARDED, in this order, `hint_bytes` each" in PAGE
    assert layout["hints"]["states"] == ["FREE", "QUEUED", "GENERATED", "REWARDED"]
    assert "`bitmap(n)` = `n` bits rounded up to 128 bytes" in " ".join(PAGE.split())

    def bitmap(bits: int) -> int:
        return -(-bits // 1024) * 128

    told = [[n, bitmap(n), bitmap(n) + bitmap(-(-n // 64))] for n, _, _ in layout["hints"]["bytes"]]
    assert layout["hints"]["bytes"] == told


def test_the_page_is_about_the_layout_of_the_header(layout):
    major, minor = (row[4].split(".")[0] for row in table("<!-- layout: HeaderFixed -->")[1:3])
    assert [int(major), int(minor)] == layout["layout"]
