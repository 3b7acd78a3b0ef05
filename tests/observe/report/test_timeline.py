"""The timeline of a run, read back as a viewer reads it, and the share of generation that falls into training."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_scene import make_run, write_lines

from busrl.observe.report.files import read
from busrl.observe.report.timeline import Slice, common, overlap, slices_of, timeline, union, without

PHASES = {"X", "i", "C", "M"}


def checked_events(text: str) -> list[dict[str, Any]]:
    """The events of a trace file, after what the format demands of them."""
    events: list[dict[str, Any]] = json.loads(text, parse_constant=pytest.fail)["traceEvents"]
    names = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    ends: dict[tuple[int, int], int] = defaultdict(int)
    before = 0
    for event in events:
        assert event["ph"] in PHASES and isinstance(event["name"], str)
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "pid", "tid"))
        if event["ph"] == "M":
            assert before == 0 and isinstance(event["args"]["name"], str), "names come first"
            continue
        assert event["ts"] >= before and ("process_name", event["pid"], 0) in names
        before = event["ts"]
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert ("thread_name", *track) in names and event["dur"] >= 0
            assert event["ts"] >= ends[track], f"{event} begins before the one before has ended"
            ends[track] = event["ts"] + event["dur"]
    return events


def test_a_trace_has_an_ordered_track_for_every_process(tmp_path: Path) -> None:
    record = read(make_run(tmp_path))
    events = checked_events(timeline(record, slices_of(record)))
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "keeper", "launch", "learner", "rollout-0", "validator",
    }
    (first,) = (event for event in events if event["name"] == "step 1")
    assert (first["ts"], first["dur"]) == (0, 10_000_000)
    training = [(event["ts"], event["dur"]) for event in events if event["name"] == "training"]
    assert training[:2] == [(0, 1_000_000), (5_000_000, 4_000_000)], "waits from 1 to 5, publishes from 9 on"
    assert all(event["args"]["derived"] for event in events if event["name"] in ("decoding", "publish"))
    assert any(event["ph"] == "i" and "rollout/0 died" in event["name"] for event in events)


def test_the_share_of_decoding_during_training_follows_the_clock(tmp_path: Path) -> None:
    # Training of step 1 lies in 0 to 1 and 5 to 9 s, of step 2 in 10 to 11 and 15 to 19 s.
    assert overlap(slices_of(read(make_run(tmp_path)))) == pytest.approx(0.25), "of 2, 4, 9 and 12 s the one at 9 s"


def test_files_without_times_have_no_overlap_and_still_a_trace(tmp_path: Path) -> None:
    root = make_run(tmp_path)
    for name in ("metrics.jsonl", "pace/rollout-0.jsonl", "validation.jsonl"):
        rows = [json.loads(line) for line in (root / name).read_text().splitlines()]
        write_lines(root / name, ({key: value for key, value in row.items() if key != "time"} for row in rows))
    record = read(root)
    assert overlap(slices_of(record)) is None
    assert checked_events(timeline(record, slices_of(record)))


NUMBERS = st.none() | st.floats(-1e9, 1e9) | st.sampled_from([1e300, "x", [], 1.7e9])
ROWS = st.fixed_dictionaries({}, optional={
    "time": NUMBERS, "seconds": NUMBERS, "publish_s": NUMBERS, "checkpoint_s": NUMBERS, "wall_s": NUMBERS,
    "step_s": NUMBERS, "idle_s": NUMBERS, "tokens": NUMBERS, "steps": NUMBERS,
    "waits": st.lists(st.lists(st.floats(0, 50), min_size=2, max_size=2), max_size=4),
})


@settings(deadline=None, max_examples=40)
@given(st.lists(ROWS, max_size=6))
def test_whatever_the_lines_hold_a_viewer_can_read_the_trace(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    root = make_run(tmp_path_factory.mktemp("run"))
    for name in ("metrics", "pace/rollout-0"):
        write_lines(root / f"{name}.jsonl", [{"step": n, **row} for n, row in enumerate(rows)])
    record = read(root)
    pieces = slices_of(record)
    checked_events(timeline(record, pieces))
    share = overlap(pieces)
    assert share is None or 0 <= share <= 1 + 1e-9


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: (min(ends), max(ends))), max_size=8)


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {n for begin, end in spans for n in range(begin, end)}


@given(SPANS, SPANS)
def test_spans_of_time_are_sets_of_points(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    assert points(union(spans)) == points(spans)  # type: ignore[arg-type]
    assert points(without(spans, others)) == points(spans) - points(others)  # type: ignore[arg-type]
    cut = [Slice("p", "x", begin, end, {}) for begin, end in union(spans)]
    assert common(cut, union(others)) == len(points(spans) & points(others))
