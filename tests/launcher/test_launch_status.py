"""`busrl status` before, during and after a run, and the plan of a dry run; neither changes anything."""

from __future__ import annotations

import json
import os

import pytest

from busrl.errors import NoSuchRun
from busrl.paths import RunPaths
from busrl.status.view import status


def test_a_running_run_shows_its_processes_slots_and_step(scripted):
    scripted.start({"rollout/0": "well", "learner": "learner"})
    pid = scripted.ready("rollout/0")
    text = status(scripted.root)
    assert "running" in text and f"rollout/0      pid {pid}" in text
    assert "slots     free 8" in text and "step 0/10" in text
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    text = status(scripted.root)
    assert "finished, the learner has reached the goal" in text and "step 10/10" in text


def test_status_of_a_killed_launch_announces_the_adoption_of_its_ring(scripted):
    scripted.start({"learner": "learner"})
    pid = scripted.ready("learner")
    scripted.launch.kill()
    scripted.launch.communicate()
    scripted.until(lambda: not scripted.alive(pid), "the learner to end")
    assert "nobody runs; the next `busrl launch` in this directory adopts its ring" in status(scripted.root)


def test_a_directory_that_is_no_run_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    with pytest.raises(NoSuchRun, match="name the directory"):
        status(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoSuchRun, match="no run under"):
        status()


def test_without_a_directory_the_newest_run_is_shown(tmp_path, monkeypatch):
    for age, name in enumerate(("new", "old")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        file = RunPaths.of(tmp_path / "runs" / name).run_json
        file.write_text(json.dumps({"run_id": name}))
        os.utime(file, (1000 - age, 1000 - age))
    monkeypatch.chdir(tmp_path)
    assert status().startswith("new: no ring and no summary")


@pytest.mark.parametrize(
    "line", ['{"time": -1e999, %s}', '{"time": 1' + "0" * 400 + ", %s}", "[" * 5000], ids=["infinite", "huge", "deep"]
)
def test_a_malformed_error_line_does_not_hide_the_others(tmp_path, line):
    paths = RunPaths.of(tmp_path)
    paths.run_json.write_text(json.dumps({"run_id": "mine"}))
    rest = '"process": "learner", "severity": "error", "text": "seen"'
    paths.errors.write_text(line.replace("%s", rest) + f'\n{{"time": 5, {rest}}}\n')
    assert "learner error: seen" in status(tmp_path)
