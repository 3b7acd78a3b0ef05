"""A run from start to end with real children: restarts, back-off, giving up, silence, and the orderly end."""

from __future__ import annotations

import fcntl
import os
import re
import signal

import pytest


def test_the_run_ends_with_zero_and_no_leftovers_after_the_learner(scripted):
    scripted.start({"keeper": "well", "rollout/0": "well", "learner": "learner"})
    pids = [scripted.ready(name) for name in ("keeper", "rollout/0", "learner")]
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert not any(scripted.alive(pid) for pid in pids)
    assert scripted.leftovers() == []
    summary = scripted.summary()
    assert summary["goal_reached"] and summary["outcome"] == "finished" and summary["audit"]["clean"]
    assert scripted.paths.open_bin.exists()
    assert "finished, the learner has reached the goal" in scripted.output


def test_processes_end_in_order_the_producers_first(scripted):
    names = ("keeper", "scheduler", "rollout/0", "learner")
    scripted.start({name: "learner" if name == "learner" else "well" for name in names})
    for name in names:
        scripted.ready(name)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert (scripted.root / "ended").read_text().split() == ["scheduler", "rollout/0", "keeper"]


def test_a_process_that_became_ready_is_restarted_at_once_however_often(scripted):
    scripted.start({"rollout/0": "well", "learner": "learner"}, restart_attempts=2)
    for life in range(1, 6):
        os.kill(scripted.ready("rollout/0", life), signal.SIGKILL)
    scripted.ready("rollout/0", 6)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert scripted.log().count("signal SIGKILL; starting it again\n") == 5
    assert scripted.summary()["processes"]["rollout/0"]["restarts"] == 5


def test_a_process_that_leaves_with_zero_is_started_again_too(scripted):
    scripted.start({"rollout/0": "exits_zero", "learner": "learner"})
    scripted.ready("rollout/0")
    (scripted.root / "leave").touch()
    scripted.said("exit code 0; starting it again")
    (scripted.root / "leave").unlink()
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_a_death_before_ready_is_followed_by_a_pause_and_then_forgiven(scripted):
    scripted.start({"rollout/0": "dies_early_once", "learner": "learner"})
    scripted.ready("rollout/0", 2)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "starting it again in 0.25 s (attempt 2 of 3)" in scripted.log()


def test_the_run_gives_up_after_its_attempts_and_shows_the_log(scripted):
    scripted.start({"rollout/0": "dies_early", "learner": "learner"})
    assert scripted.wait() == 1
    assert "giving up: it died 3 times in a row before it was ready" in scripted.output
    assert "| the model folder is not there" in scripted.output and "rollout-0.log" in scripted.output
    assert scripted.summary()["outcome"] == "failed" and not scripted.summary()["goal_reached"]
    assert scripted.leftovers() == []


def test_a_command_that_does_not_exist_counts_as_a_death_before_ready(scripted):
    scripted.child.unlink()
    scripted.start({"rollout/0": "well"}, restart_attempts=2)
    assert scripted.wait() == 1
    assert "can't open file" in scripted.output


def test_a_process_without_progress_is_killed_by_name_and_replaced(scripted):
    scripted.start({"rollout/0": "hangs", "learner": "learner"}, progress_s=1.0)
    pid = scripted.life("rollout/0")
    scripted.ready("rollout/0", 2)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert f"killing rollout/0 (pid {pid}), state ready: no progress for 1." in scripted.log()
    assert scripted.summary()["processes"]["rollout/0"]["killed_for_silence"] == 1


def test_a_declared_activity_may_take_as_long_as_it_says(scripted):
    scripted.start({"rollout/0": "long_activity", "reward/0": "hangs", "learner": "learner"}, progress_s=1.0)
    first = scripted.ready("rollout/0")
    scripted.ready("reward/0", 2)  # the other one, which declared nothing, was killed meanwhile
    assert scripted.lives("rollout/0") == (first, 1)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_a_process_not_ready_in_time_is_killed_as_an_early_death(scripted):
    scripted.start({"rollout/0": "never_ready"}, ready_s=1.5, restart_attempts=2)
    assert scripted.wait() == 1
    assert "state starting: not ready for 1." in scripted.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_in_order_with_the_usual_exit_code(scripted, number, code):
    launch = scripted.start({"rollout/0": "well", "learner": "learner"})
    pids = [scripted.ready(name) for name in ("rollout/0", "learner")]
    launch.send_signal(number)
    assert scripted.wait() == code
    assert (scripted.root / "ended").read_text().split() == ["rollout/0", "learner"]
    assert not any(scripted.alive(pid) for pid in pids) and scripted.leftovers() == []
    assert scripted.paths.open_bin.exists() and scripted.summary()["outcome"] == "stopped"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_ignored_since_launch_started_never_ends_the_run(scripted, number):
    before = signal.signal(number, signal.SIG_IGN)  # as nohup does, and a shell that starts something with `&`
    try:
        launch = scripted.start({"rollout/0": "well", "learner": "learner"}, cold=True)
    finally:
        signal.signal(number, before)
    scripted.ready("learner")
    launch.send_signal(number)
    os.kill(scripted.ready("rollout/0"), signal.SIGKILL)
    scripted.ready("rollout/0", 2)  # launch has looked again since
    launch.send_signal(signal.SIGTERM)
    assert scripted.wait() == 143 and number.name not in scripted.log()


def test_a_hangup_of_a_terminal_ends_the_run_in_order(scripted):
    launch = scripted.start({"rollout/0": "well", "learner": "learner"})
    scripted.ready("learner")
    launch.send_signal(signal.SIGHUP)
    assert scripted.wait() == 129 and "asked to by SIGHUP" in scripted.log()


def test_output_that_nobody_reads_stops_neither_the_watch_nor_the_end(scripted):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"." * 4096)
    launch = scripted.start({"rollout/0": "well", "learner": "learner"}, stdout=writer)
    for life in range(1, 4):
        os.kill(scripted.ready("rollout/0", life), signal.SIGKILL)
    scripted.ready("rollout/0", 4)
    launch.send_signal(signal.SIGTERM)
    assert launch.wait(60) == 143 and scripted.summary()["outcome"] == "stopped"
    unread = re.search(r"^(\d+) lines up to the end were not shown, as nobody read", scripted.log(), re.MULTILINE)
    assert unread and int(unread[1]) > 10, "all that was said, and the summary"
    os.close(reader)
    os.close(writer)


def test_an_interrupt_whose_reader_is_gone_too_ends_the_run_in_order(scripted):
    reader, writer = os.pipe()
    launch = scripted.start({"rollout/0": "well", "learner": "learner"}, stdout=writer)
    os.close(writer)
    scripted.ready("learner")
    os.close(reader)  # as `tee` is, which the terminal sent the same signal
    launch.send_signal(signal.SIGINT)
    assert launch.wait(60) == 130 and scripted.summary()["outcome"] == "stopped" and scripted.leftovers() == []


@pytest.mark.parametrize("name", ["rollout/0", "validator", "scheduler", "keeper", "bus"])
def test_a_process_that_dies_after_ready_without_work_ends_the_run(scripted, name):
    """Also while others work: but for a worker that shows only in what the run does, that is none of its own."""
    does = "always+after_another+dies_when_ready" if name == "rollout/0" else "dies_after_others_moved"
    scripted.start({name: does, "rollout/9": "moves" if name != "rollout/0" else "well", "learner": "learner"},
                   crash_attempts=3)
    scripted.ready("rollout/9")
    scripted.dispatch_one(0)
    assert scripted.wait() == 1
    assert f"{name} died 3 times in a row and did none of its work in between" in scripted.output
    assert scripted.summary()["outcome"] == "failed" and scripted.leftovers() == []


def test_a_process_that_ignores_sigterm_is_killed_by_name_after_its_time(scripted):
    launch = scripted.start({"rollout/0": "stubborn", "learner": "learner"}, stop_s=0.5)
    for name in ("rollout/0", "learner"):
        scripted.ready(name)
    launch.send_signal(signal.SIGTERM)
    assert scripted.wait() == 143
    assert "rollout/0 did not end within 0." in scripted.log() and "of SIGTERM: killed" in scripted.log()


def test_a_second_interrupt_kills_at_once(scripted):
    launch = scripted.start({"rollout/0": "stubborn", "learner": "learner"}, stop_s=1000.0)
    pid = scripted.ready("rollout/0")
    launch.send_signal(signal.SIGINT)
    scripted.said("ending: asked to by SIGINT")
    launch.send_signal(signal.SIGINT)
    assert scripted.wait() == 130
    assert "a second signal: killing rollout/0" in scripted.log() and not scripted.alive(pid)
    assert scripted.leftovers() == []


def test_a_process_without_a_ring_mapping_is_ready_when_it_says_hello(scripted):
    scripted.start({"bus": "bus", "rollout/0": "foreign", "learner": "learner"}, progress_s=1.0)
    pid = scripted.life("rollout/0")
    scripted.said(f"rollout/0 (pid {pid}) is ready: it sent HELLO")
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "killing" not in scripted.log() and scripted.lives("rollout/0") == (pid, 1)


def test_the_run_goes_on_when_the_broker_is_killed(scripted):
    scripted.start({"bus": "bus", "rollout/0": "well", "learner": "learner"})
    for name in ("rollout/0", "learner"):
        scripted.ready(name)
    broker = scripted.until(lambda: _pid_in(scripted.log(), "bus (pid "), "the broker to be ready")
    os.kill(broker, signal.SIGKILL)
    scripted.said(f"bus (pid {broker}) ended while ready")
    scripted.until(lambda: _pid_in(scripted.log(), "bus (pid ") != broker, "another broker to be ready")
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert scripted.lives("rollout/0")[1] == scripted.lives("learner")[1] == 1


def _pid_in(log: str, before: str) -> int:
    ready = [line for line in log.splitlines() if before in line and line.endswith("is ready")]
    return int(ready[-1].partition(before)[2].partition(")")[0]) if ready else 0
