"""A run that stands still says why: `busrl status --json` names process and root, for one injection after another."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Run, read_lines, running

from busrl.cli import main
from busrl.data import trace
from busrl.data.trace import TracedPrompt
from busrl.ring import Ring
from busrl.status.view import status

SCRIPTED = [
    "process.rollout.count=1", "learner.trigger.n_min=2", "mock.token_s=0.0005", "mock.per_sequence_s=0",
    "generation.max_new_tokens=32", "limits.progress_s=600", "learner.checkpoint_every=0", "limits.stall_steps=2",
    "limits.stall_s=2", "weights.max_staleness=1",
]
# Files beside it say what it does; its module is loaded again by each child.
JUDGE = """
import time
import zlib
from pathlib import Path

here = Path(__file__).parent
while (here / "unloadable").exists():
    time.sleep(0.05)

def score(*about):
    if (here / "slow").exists():
        time.sleep(1.5)
    while (here / "hang").exists():
        time.sleep(0.05)
    return float(zlib.crc32(str(about).encode()) % 2)
"""
PLAY = """
import asyncio
from pathlib import Path
from busrl.agents.scripted import episode as play

async def episode(task, llm):
    reward = await play(task, llm)
    while (Path(__file__).parent / "hang").exists():
        await asyncio.sleep(0.05)
    return reward
"""


def waits(run: Run) -> list[dict[str, Any]]:
    waits: list[dict[str, Any]] = json.loads(status(run.directory, as_json=True)).get("waits", [])
    return waits


def until_root(run: Run, process: str, root: str, because: str = "") -> list[dict[str, Any]]:
    """The chain once it ends with this process and this root, in these words."""
    seen: list[list[dict[str, Any]]] = [[]]

    def named() -> bool:
        seen[0] = waits(run)
        last = seen[0][-1] if seen[0] else {"process": "", "for": "", "because": ""}
        return last["process"] == process and root in last["for"] and because in last["because"]

    try:
        run.until(f"{process} <- {root}", named, limit_s=60.0)
    except AssertionError as problem:
        raise AssertionError(f"{problem}\nthe chain is {seen[0]}") from None
    return seen[0]


def told_of(run: Run, root: str) -> bool:
    """Whether launch has warned of a stall with this root."""
    rows = read_lines(run.paths.errors)
    return any(row["process"] == "launch" and "stands still" in row["text"] and root in row["text"] for row in rows)


def moves_on(run: Run) -> None:
    run.until_step(run.step() + 2)


@contextmanager
def stopped(run: Run, name: str) -> Iterator[int]:
    pid = run.pid(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def there(file: Path) -> Iterator[None]:
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@pytest.mark.long
def test_each_stall_is_traced_to_its_root_and_warned_of_once(tmp_path: Path, quickstart: None) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    judged = ["reward.kind=python", f"reward.function={tmp_path}/judge.py:score", "reward.timeout_s=3000",
              "limits.ready_s=600"]
    run = Run(tmp_path / "run", *SCRIPTED, *judged, config=ROOT / "configs" / "scripted.toml", steps=100_000)
    function = "reward function " + f"{tmp_path}/judge.py:score"
    with running(run):
        run.until_step(4)
        for name in ("rollout/0", "reward/0", "scheduler", "learner"):
            with stopped(run, name) as pid:
                root = until_root(run, name, f"kill -CONT {pid}")
                assert root[0]["process"] == "learner"
                if name == "reward/0":
                    run.until("the warning", lambda: told_of(run, f"kill -CONT {pid}"))
            moves_on(run)
        with there(tmp_path / "slow"):
            until_root(run, "reward/0", function, "has had")
        moves_on(run)
        with there(tmp_path / "hang"):
            root = until_root(run, "reward/0", function, "no call returned for")
            assert [wait["for"] for wait in root] == ["reward/0", function]
            until_root(run, "reward/0", function, "no slot is free")
        moves_on(run)
        with there(tmp_path / "unloadable"):
            run.kill("reward/0")
            until_root(run, "reward/0", "its start", "load the reward function")
        moves_on(run)
        assert main(["pause", str(run.directory)]) == 0  # the word alone would not last: launch sets it back
        until_root(run, "scheduler", "`busrl resume`")
        assert main(["resume", str(run.directory)]) == 0
        moves_on(run)
        with there(tmp_path / "hang"):
            run.until("the warning", lambda: told_of(run, function))
            run.until("a stall that is told of at the end", lambda: waits(run)[0]["since_s"] > 12)
            assert run.child is not None
            run.child.send_signal(signal.SIGTERM)
            run.wait()
    assert "stood still for" in run.text() and run.summary()["waits"][-1]["for"] == function
    stalls = [row["text"] for row in read_lines(run.paths.errors) if "stands still" in row["text"]]
    assert not any("busrl resume" in text for text in stalls)
    assert sum(function in text for text in stalls[-1:]) == 1


@pytest.mark.long
def test_an_episode_whose_tool_hangs_is_the_root(tmp_path: Path, quickstart: None) -> None:
    (tmp_path / "play.py").write_text(PLAY)
    trace.write(tmp_path / "episodes.jsonl", [TracedPrompt("go", (), "", "", (0.0, 1.0), turns=(((9, 0.0),),) * 2)] * 8)
    text = (ROOT / "configs" / "scripted.toml").read_text()
    text = text.replace('[reward]\nkind = "exact_match"', "[agents]\nepisodes = 64")
    text += f'[[process]]\nrole = "agent"\nfunction = "{tmp_path}/play.py:episode"\n'
    (tmp_path / "t.toml").write_text(text)
    settings = [*SCRIPTED, f"data.train={tmp_path}/episodes.jsonl", "groups.size=2"]
    run = Run(tmp_path / "run", *settings, config=tmp_path / "t.toml", steps=100_000)
    with running(run):
        run.until_step(2)
        with there(tmp_path / "hang"):
            root = until_root(run, "agent/0", f"({tmp_path}/play.py:episode)", "no call under way")
            assert root[0]["process"] == "learner"
        moves_on(run)
        with stopped(run, "rollout/0") as pid:
            until_root(run, "rollout/0", f"kill -CONT {pid}")
        moves_on(run)


@pytest.mark.long
def test_weights_that_one_engine_does_not_take_are_traced_to_it(tmp_path: Path, quickstart: None) -> None:
    settings = ["weights.transport=broadcast", "weights.timeout_s=300", "weights.mode=sync", "process.rollout.count=2",
             "limits.progress_s=600", "learner.checkpoint_every=0", "validation.every=0"]
    run = Run(tmp_path / "run", *settings, steps=100_000)

    def idle() -> bool:
        """The engine stopped while it holds no sample, so that only its weights are waited for."""
        entry = run.processes()["rollout/1"]
        os.kill(entry.pid, signal.SIGSTOP)
        if not (ring.lines()["owner"] == entry.index).any():
            return True
        os.kill(entry.pid, signal.SIGCONT)
        return False

    with running(run):
        run.until_step(2)
        ring = Ring.attach(run.paths.ring_name, read_only=True)
        run.until("an engine without samples", idle)
        pid = run.pid("rollout/1")
        root = until_root(run, "rollout/1", f"kill -CONT {pid}")
        # The learner publishes at that moment, or has, and the other engine waits for what it cannot have alone, be it
        # its first weights.
        assert [wait["process"] for wait in root] in (["learner", "rollout/1"], ["learner", "rollout/0", "rollout/1"])
        assert any(words in root[-2]["because"] for words in ("publishe", "first weights")), root
        os.kill(pid, signal.SIGCONT)
        ring.close()
        moves_on(run)


@pytest.mark.long
def test_a_version_that_a_stopped_validator_holds_is_traced_to_it(tmp_path: Path, quickstart: None) -> None:
    settings = ["limits.progress_s=600", "learner.checkpoint_every=0", "validation.every=2", "validation.samples=64"]
    run = Run(tmp_path / "run", *settings, steps=100_000)

    def held() -> bool:
        """The validator stopped while it holds a version."""
        pid = run.pid("validator")
        if pid and ring.header("hold"):
            os.kill(pid, signal.SIGSTOP)
            if ring.header("hold"):
                return True
            os.kill(pid, signal.SIGCONT)
        return False

    with running(run):
        run.until_step(1)
        ring = Ring.attach(run.paths.ring_name, read_only=True)
        run.until("a round", held)
        pid = run.pid("validator")
        root = until_root(run, "validator", f"kill -CONT {pid}")
        assert "is held" in root[0]["because"]
        os.kill(pid, signal.SIGCONT)
        ring.close()
        moves_on(run)
