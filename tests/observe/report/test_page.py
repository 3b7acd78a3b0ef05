"""The page of a run: one file that loads nothing, whatever the files of the run hold."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_scene import make_run, step, write_lines

from busrl.cli.command import main
from busrl.observe.report.files import few_of, read
from busrl.observe.report.page import Line, chart, page, thinned, ticks

VOID = {"meta", "path", "circle", "br", "i"}


class Balance(HTMLParser):
    """Raises where an element is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        for name, value in attrs:
            assert name not in ("src", "href", "onload", "onclick"), f"{tag} {name}={value}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)


def checked(text: str) -> set[str]:
    balance = Balance()
    balance.feed(text)
    balance.close()
    assert not balance.open
    assert "url(" not in text and "@import" not in text and "nan" not in re.sub(r"<style>.*</style>", "", text)
    assert not balance.names & {"script", "img", "link", "iframe", "b" if "<b>rollout" in text else "script"}
    return balance.names


def test_the_page_of_a_run_loads_nothing_and_escapes_what_others_wrote(tmp_path: Path) -> None:
    text = page([read(make_run(tmp_path, "<i>my run</i>"))])
    assert {"svg", "table", "style"} <= checked(text)
    assert "&lt;b&gt;rollout/0 died&lt;/b&gt;" in text and "&lt;i&gt;my run" in text
    assert "busrl 9.9, torch 8.8" in text and "learner.lr = 0.1" in text
    assert "What could not be read" not in text


def test_several_runs_are_compared_and_their_settings_differ_where_they_do(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    topology = {"run": {"name": "made"}, "learner": {"lr": 0.3, "ess_alarm": 0.5}}
    (second / "topology.json").write_text(json.dumps(topology))
    text = page([read(first), read(second)])
    checked(text)
    assert "<th>learner.lr</th><td class=\"w\">0.1</td><td class=\"w\">0.3</td>" in text
    assert "<th>learner.ess_alarm</th>" not in text and ">one<" in text and ">two<" in text


def sample(number: int, reward: object, text: str, **more: object) -> dict[str, object]:
    return {"step": number, "prompt": f"say {number}", "completion": text, "reward": reward, **more}


def test_the_page_shows_what_the_model_wrote_and_what_it_was_worth(tmp_path: Path) -> None:
    rows = [sample(n, n / 8, f"answer {n}") for n in range(9)]
    rows[8] |= {"completion": "<script>alert(1)</script>\n\x1b[31mred", "reward_parts": {"<right>": 0.5}}
    rows[0] |= {"prompt": [{"role": "user", "content": "<hello>"}], "completion": "x" * 5000 + "end"}
    write_lines(make_run(tmp_path) / "samples.jsonl", [*rows, sample(9, 0.4, "the last")])
    text = page([read(tmp_path)])
    checked(text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;<br> [31mred" in text and "&lt;right&gt; 0.5" in text
    assert "best, step 8" in text and "worst, step 0" in text and "last, step 9" in text and "best, step 5" not in text
    assert "&lt;hello&gt;" in text and "x" * 1000 not in text and "xend" in text


@pytest.mark.parametrize(
    ("rewards", "best", "worst", "last"),
    [
        ([], None, None, None), ([0.5], [0], [0], [0]), ([1, 1, 1, 1, 1], [4, 3, 2], [4, 3, 2], [2, 3, 4]),
        ([0, 1, 2, 3, 4, 5], [5, 4, 3], [0, 1, 2], [3, 4, 5]), ([None, "1", 2, float("nan")], [2], [2], [2]),
    ],
)
def test_the_best_the_worst_and_the_last_samples_are_chosen(
    rewards: list[object], best: list[int] | None, worst: list[int] | None, last: list[int] | None
) -> None:
    samples = few_of([{"step": -1, "reward": 9.0}, *(sample(n, reward, "x") for n, reward in enumerate(rewards))])
    kinds = ("best", "worst", "last")
    assert [[row["step"] for row in samples[kind]] if kind in samples else None for kind in kinds] == [
        best, worst, last
    ]


def test_the_page_has_the_parts_of_the_reward_by_step(tmp_path: Path) -> None:
    rows = [step(n, reward_parts={"right": n / 4, "short": 0.5}) for n in (1, 2)]
    write_lines(make_run(tmp_path) / "metrics.jsonl", rows)
    text = page([read(tmp_path)])
    checked(text)
    assert "Parts of the reward" in text and "right <b>0.5</b>" in text and "short <b>0.5</b>" in text


def test_the_page_says_what_was_asked_of_the_run_while_it_ran(tmp_path: Path) -> None:
    asked = {"id": "1", "verb": "set", "ok": True, "text": "done", "key": "learner.lr", "old": "0.1", "new": "0.3"}
    refused = {**asked, "id": "2", "ok": False, "key": "groups.size", "new": "9", "text": "<no>"}
    rows = [{**line, "who": "<me>", "step": 7, "time": 1.0} for line in (asked, refused)]
    write_lines(make_run(tmp_path) / "control.jsonl", rows)
    text = page([read(tmp_path)])
    checked(text)
    assert "<th>changed in flight</th><td class=\"w\">learner.lr = 0.3</td>" in text
    assert "&lt;me&gt;" in text and "refused: &lt;no&gt;" in text and "step 7" in text


def test_a_killed_start_is_not_shown_with_an_earlier_one_s_end(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    earlier = {"outcome": "finished", "why": "its goal", "ended": 5.0, "processes": {"reward/7": {"busy_share": 0.5}}}
    (run / "summary.json").write_text(json.dumps(earlier))
    assert "finished, its goal" in page([read(run)]) and "reward/7" in page([read(run)])
    (run / "run.json").write_text(json.dumps({"run_id": "made", "started": 9.0}))
    text = page([read(run)])
    checked(text)
    assert "not ended in order" in text and "its goal" not in text and "reward/7" not in text


def test_page_and_timeline_are_written_beside_what_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make_run(tmp_path / "runs" / "one"), make_run(tmp_path / "runs" / "two")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for arguments, file in (
        (["report", str(first)], first / "report.html"), (["trace", "../runs/two"], second / "trace.json"),
        (["report", str(first), str(second)], tmp_path / "runs" / "report.html"),
        (["report", str(first), "-o", "mine.html"], tmp_path / "here" / "mine.html"),
    ):
        assert main(arguments) == 0 and file.is_file() and file.name in capsys.readouterr().out
    assert [path.name for path in Path.cwd().iterdir()] == ["mine.html"]


@pytest.mark.parametrize("name", [
    "topology.json", "run.json", "metrics.jsonl", "groups.jsonl", "starts.jsonl", "validation.jsonl", "validation.log",
    "pace/rollout-0.jsonl", "errors.jsonl", "summary.json",
])
def test_a_damaged_file_is_named_and_all_else_is_shown(tmp_path: Path, name: str) -> None:
    path = make_run(tmp_path) / name
    whole = path.read_bytes() if path.exists() else b""
    path.write_bytes(whole.removesuffix(b"\n") + b'\n\xff\xfe[1, {"step": 1e999}\n{"step": -3, "time": "soon", "half')
    text = page([read(tmp_path)])
    checked(text)
    assert "What could not be read" in text and name in text
    assert "made" in text if name != "topology.json" else tmp_path.name in text


def test_a_half_written_line_at_the_end_costs_that_line(tmp_path: Path) -> None:
    path = make_run(tmp_path) / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    record = read(tmp_path)
    assert [row["step"] for row in record.steps] == [1]
    assert record.faults == ["metrics.jsonl: its last line is half written"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6,
)
KEYS = st.sampled_from([
    "reward", "time", "seconds", "waits", "wait_s", "masked", "tokens", "ess", "val/reward", "round", "engine", "uids",
    "text", "changes", "step_s", "wall_s", "publish_s", "set", "versions", "process",
])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.dictionaries(KEYS, JSON, max_size=8), max_size=4))
def test_no_value_of_any_line_keeps_the_page_from_being_made(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]
) -> None:
    root = make_run(tmp_path_factory.mktemp("run"))
    for name in ("metrics", "starts", "validation", "errors", "pace/rollout-0"):
        write_lines(root / f"{name}.jsonl", [{"step": n, **row} for n, row in enumerate(rows)])
    balance = Balance()
    balance.feed(page([read(root)]))
    assert not balance.open


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_numbers_in_the_range_and_a_handful(low: float, width: float) -> None:
    marks = ticks(low, low + width)
    assert 1 <= len(marks) <= 6 and marks == sorted(marks)
    assert all(low - 1e-6 * width <= mark <= low + width * (1 + 1e-6) for mark in marks)


@given(st.lists(st.floats(-9, 9) | st.just(float("nan")), max_size=2000))
def test_a_long_line_is_drawn_with_few_points_keeping_its_extremes(values: list[float]) -> None:
    y = np.array(values, np.float64)
    line = thinned(Line("x", np.arange(len(y), dtype=np.float64), y))
    known = y[np.isfinite(y)]
    assert len(line.x) == min(240, len(known)) and np.all(np.diff(line.x) > 0)
    if len(known):
        assert known.min() - 1e-9 <= line.y.min() and line.y.max() <= known.max() + 1e-9
    assert ("<svg" in chart("t", "n", [line])) == bool(len(known))
