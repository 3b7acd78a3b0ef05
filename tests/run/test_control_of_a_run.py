"""A running run is paused, changed, scaled, checkpointed and stopped from outside, with processes killed meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, read_lines, running
from test_agents_in_a_run import slots_of_calls

from busrl.bus import Endpoint
from busrl.cli import main
from busrl.cli.run import ask
from busrl.errors import PeerTimeout
from busrl.ledger.controls import read_lines as controls
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Ring
from busrl.states import PAUSED, HeaderWord

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
WAIT_S = 120.0


def done(run: Run, verb: str, key: str = "", value: str = "") -> str:
    """What launch says to it, once it is in force everywhere."""
    answer = ask(run.paths, verb, key, value, WAIT_S)
    assert answer.ok, (answer, run.tail())
    return answer.text


def refused(run: Run, verb: str, key: str, value: str) -> str:
    answer = ask(run.paths, verb, key, value, WAIT_S)
    assert not answer.ok, answer
    return answer.text


def busrl(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def word(run: Run, name: HeaderWord) -> int:
    with closing(Ring.attach(run.paths.ring_name, read_only=True)) as ring:
        return int(ring.header(name))


def tokens(run: Run) -> int:
    with closing(Ring.attach(run.paths.ring_name, read_only=True)) as ring:
        return int(ring.stats().tokens)


def until(run: Run, what: str, condition: Callable[[], object]) -> None:
    run.until(what, condition, WAIT_S)


def forged(run: Run, key: bytes) -> m.ControlDone:
    """The answer to a CONTROL of a member of the bus that does not know the key of the run."""
    with closing(Endpoint("rollout-7", run.paths.frontend, run.paths.backend,
                          subscribe=[topic(m.ControlDone, "rollout-7")])) as bus:
        asked = m.Control(id="forged", verb="stop", value="now", who="nobody")
        asked.proof, end = asked.proof_with(key), time.monotonic() + WAIT_S
        while time.monotonic() < end:
            bus.send(asked)
            answer = bus.recv(0.5)
            if isinstance(answer, m.ControlDone):
                return answer
    raise AssertionError("no answer")


def test_each_control_verb_works_amid_dying_processes_without_any_loss(
    tmp_path: Path, quickstart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run", "limits.progress_s=20", steps=60)
    with running(run):
        run.until_step(4)
        assert busrl("pause", run.directory, "--wait", WAIT_S) == 0 and "nobody draws" in capsys.readouterr().out
        assert word(run, HeaderWord.GENERATION_PAUSE) == PAUSED
        admitted, drawn = word(run, HeaderWord.NEXT_ADMISSION), tokens(run)

        old = {name: run.kill(name) for name in ("scheduler", "rollout/0", "learner")}
        for name, pid in old.items():
            until(run, f"{name} was ready again", lambda name=name, pid=pid: (
                (process := run.processes().get(name)) and process.pid != pid and process.state == "ready"))

        assert "learner.lr = 1e-05" in done(run, "set", "learner.lr", "1e-5")
        assert 'scheduler.policy = "sjf"' in done(run, "set", "scheduler.policy", "sjf")
        assert "learner.trigger.n_min = 6, it was 8" in done(run, "set", "learner.trigger.n_min", "6")
        assert "log.samples = 2" in done(run, "set", "log.samples", "2")
        assert "rollout.count = 2" in done(run, "scale", "rollout", "2")
        assert "is written" in done(run, "checkpoint")
        assert "cannot change while the run runs" in refused(run, "set", "run.max_steps", "9")
        assert "a run has one" in refused(run, "scale", "learner", "2")
        answer = forged(run, b"0" * 64)
        assert not answer.ok and "control.key" in answer.text
        until(run, "the refusal was filed", lambda: any(
            "control.key" in line["text"] for line in read_lines(run.paths.errors)))

        assert word(run, HeaderWord.NEXT_ADMISSION) == admitted, "something was dispatched while it was paused"
        assert tokens(run) == drawn, "something was drawn while it was paused"
        paused_at = run.step()
        assert busrl("set", run.directory, "learner.lr", "fast") == 2
        assert "busrl: set: learner.lr = \"fast\": expected a number" in capsys.readouterr().err
        assert busrl("status", run.directory) == 0
        shown = capsys.readouterr().out
        assert "paused by" in shown and "learner.lr = 1e-05" in shown, shown

        run.kill_launch()
        assert busrl("resume", run.directory) == 2 and "no process runs it" in capsys.readouterr().err
        run.start()
        until(run, "the run said what is in force", lambda: "still in force: paused by" in run.text())
        until(run, "rollouts were ready", lambda: {"rollout/0", "rollout/1"} <= {
            process.label for process in run.processes().values() if process.state == "ready"})
        assert word(run, HeaderWord.GENERATION_PAUSE) & PAUSED and run.step() <= paused_at + 1
        assert "it goes on" in done(run, "resume")
        assert "not paused" in done(run, "resume")
        run.until_step(paused_at + 4)
        assert "rollout.count = 1" in done(run, "scale", "rollout", "1")
        assert run.pid("rollout/1") == 0
        check_end(run, run.wait())
    last = run.metrics()[-1]
    assert last["lr"] < 2e-5 < run.metrics()[0]["lr"] and last["n_min"] == 6, last
    lines = {(line.verb, line.key, line.new, line.ok) for line in controls(run.paths)}
    assert ("set", "learner.lr", "1e-05", True) in lines and ("set", "learner.lr", "fast", False) in lines
    assert not any(line.id == "forged" for line in controls(run.paths))


def test_a_request_to_a_run_that_ends_meanwhile_is_told_so(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", steps=100_000)
    with running(run), ThreadPoolExecutor(1) as waiting:
        run.until_step(1)
        os.kill(run.pid("scheduler"), signal.SIGSTOP)  # it never takes the pause up
        answer = waiting.submit(ask, run.paths, "pause", "", "", WAIT_S)
        until(run, "launch has carried it out", lambda: any(line.verb == "pause" for line in controls(run.paths)))
        run.kill_launch()
        with pytest.raises(PeerTimeout, match="the run ended before pause was carried out"):
            answer.result(WAIT_S)


def test_calls_of_episodes_wait_through_a_pause_and_are_answered_after_it(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", "agents.episodes=64", "agents.episode_s=5", "validation.data=",
              config=ROOT / "configs" / "agents.toml", steps=6)
    with running(run):
        run.until_step(2)
        done(run, "pause")
        drawn = tokens(run)
        run.let_pass(8.0)  # longer than an episode may take by itself
        assert tokens(run) == drawn, "something was drawn while it was paused"
        states = slots_of_calls(run)
        assert set(states) - {"FREE"}, "no call waited"
        done(run, "resume")
        check_end(run, run.wait())
    lost = {fate for row in run.metrics() for fate in row["set_aside"]} - {"f"}  # whose rewards were all alike
    assert not lost, f"episodes were lost to the pause: {lost}"


def test_a_stop_at_once_kills_everything_and_the_next_start_goes_on(
    tmp_path: Path, quickstart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run", steps=12)
    with running(run):
        run.until_step(3)
        assert busrl("stop", run.directory, "--now") == 0 and "ended" in capsys.readouterr().out
        assert run.wait() == 143 and "killing" in run.text()
        run.start()
        check_end(run, run.wait())
