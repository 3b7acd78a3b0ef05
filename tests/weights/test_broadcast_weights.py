"""Weights by broadcast: members that join, leave, stop and are killed, each a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from members import members, settle

from busrl.errors import UserError, WeightsTimeout
from busrl.weights.base import NOTHING, GroupCallbacks
from busrl.weights.broadcast.group import HOST, open_store
from busrl.weights.broadcast.receiver import BroadcastReceiver
from busrl.weights.broadcast.sender import BroadcastSender

TIMEOUT_S = 12.0  # a third of it is what a slow machine has for a phase
PATIENCE_S = 60.0
BUCKET = 4096  # several buckets a version

# A member: prints every version that it fetched, in order, after a check that it is of one piece.
MEMBER = """
import os, signal, sys, torch
from busrl.weights.broadcast.receiver import BroadcastReceiver
file, name, kill_at, timeout_s, bucket = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5])
receiver = BroadcastReceiver(file, name, timeout_s=timeout_s)
point, _, count = kill_at.partition("@")
left = [int(count or 0)]
def die(reached):
    if reached == point:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
receiver.hook = die if kill_at else None
here = {f"t{k}": torch.zeros(300, 7) for k in range(5)}
newest = 0
while True:
    newest, _ = receiver.wait_for(newest + 1, 120)
    version, step = receiver.fetch(here)
    whole = all(bool((tensor == version).all()) for tensor in here.values()) and step == version * 10
    print(version if whole else "TORN", flush=True)
    newest = version
"""

# A learner that publishes one version and stays.
LEARNER = """
import sys, time, torch, threading
from busrl.weights.broadcast.sender import BroadcastSender
sender = BroadcastSender(sys.argv[1], timeout_s=float(sys.argv[3]), bucket_bytes=int(sys.argv[4]))
version = int(sys.argv[2])
sender.publish(version, version * 10, {f"t{k}": torch.full((300, 7), float(version)) for k in range(5)})
threading.Event().wait(120)
"""


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"t{k}": torch.full((300, 7), float(value)) for k in range(5)}


class Cast:
    """The processes of a test, ended with it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.processes: list[subprocess.Popen[str]] = []

    def member(self, name: str, kill_at: str = "") -> subprocess.Popen[str]:
        return self._start(MEMBER, name, kill_at, str(TIMEOUT_S), str(BUCKET))

    def learner(self, version: int) -> subprocess.Popen[str]:
        return self._start(LEARNER, str(version), str(TIMEOUT_S), str(BUCKET))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _start(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(self.file), *arguments]
        self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return self.processes[-1]


def says(process: subprocess.Popen[str], version: int) -> bool:
    """Read what a member fetched until it names `version`; versions come in order and of one piece."""
    assert process.stdout is not None
    last = 0
    for line in process.stdout:
        assert line.strip() != "TORN"
        assert int(line) > last
        last = int(line)
        if last >= version:
            return last == version
    return False  # it has ended


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    made = Cast(tmp_path / "weights.store")
    yield made
    made.end()


@pytest.fixture
def missing() -> list[str]:
    return []


@pytest.fixture
def sender(cast: Cast, missing: list[str]) -> Iterator[BroadcastSender]:
    made = BroadcastSender(
        cast.file, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET,
        callbacks=GroupCallbacks(lambda change: None, lambda name, text: missing.append(name)),
    )
    yield made
    made.close()


def publish(sender: BroadcastSender, version: int) -> None:
    sender.publish(version, version * 10, tensors(version))


def test_every_version_reaches_every_member_and_a_late_joiner_gets_the_newest(
    sender: BroadcastSender, cast: Cast
) -> None:
    first, second = cast.member("rollout/0"), cast.member("rollout/1")
    for version in (1, 2, 3):
        publish(sender, version)
        assert says(first, version) and says(second, version)
    assert says(cast.member("rollout/2"), 3)
    publish(sender, 4)
    assert says(first, 4) and says(second, 4)
    settle(sender)
    assert members(sender) == ["rollout/0", "rollout/1", "rollout/2"]
    assert sender.newest() == (4, 40)


def test_a_member_killed_in_mid_broadcast_is_left_out_and_named(
    sender: BroadcastSender, cast: Cast, missing: list[str]
) -> None:
    first, doomed, third = cast.member("rollout/0"), cast.member("rollout/1", "bucket 3@2"), cast.member("rollout/2")
    publish(sender, 1)
    assert says(first, 1) and says(doomed, 1) and says(third, 1)
    publish(sender, 2)  # bucket 3 of its second transfer at the latest is where rollout/1 dies
    assert says(first, 2) and says(third, 2)
    assert doomed.wait(PATIENCE_S) == -signal.SIGKILL
    settle(sender)
    assert missing == ["rollout/1"]
    assert members(sender) == ["rollout/0", "rollout/2"]
    publish(sender, 3)
    assert says(first, 3) and says(third, 3)


def test_a_killed_member_is_not_waited_for_and_its_successor_joins(
    sender: BroadcastSender, cast: Cast
) -> None:
    first, doomed = cast.member("rollout/0"), cast.member("rollout/1")
    publish(sender, 1)
    assert says(first, 1) and says(doomed, 1)
    doomed.kill()
    doomed.wait()
    publish(sender, 2)
    assert says(first, 2)
    successor = cast.member("rollout/1")
    assert says(successor, 2)
    publish(sender, 3)
    assert says(first, 3) and says(successor, 3)


def test_a_stopped_member_holds_up_the_others_for_a_while_only_and_may_come_back(
    sender: BroadcastSender, cast: Cast, missing: list[str]
) -> None:
    first, stopped = cast.member("rollout/0"), cast.member("rollout/1")
    publish(sender, 1)
    assert says(first, 1) and says(stopped, 1)
    stopped.send_signal(signal.SIGSTOP)
    publish(sender, 2)
    assert says(first, 2)
    settle(sender)
    assert missing == ["rollout/1"]
    stopped.send_signal(signal.SIGCONT)
    publish(sender, 3)
    assert says(first, 3)
    assert says(stopped, 3)


def test_a_member_that_dies_in_the_roll_call_delays_nobody_for_good(
    sender: BroadcastSender, cast: Cast, missing: list[str]
) -> None:
    first = cast.member("rollout/0")
    publish(sender, 1)
    assert says(first, 1)
    doomed = cast.member("rollout/1", "roll call 2@1")
    assert doomed.wait(PATIENCE_S) == -signal.SIGKILL
    publish(sender, 2)
    assert says(first, 2)
    settle(sender)
    assert missing == ["rollout/1"]


def test_members_keep_the_newest_version_of_a_killed_learner_and_follow_its_successor(cast: Cast) -> None:
    learner, member = cast.learner(5), cast.member("rollout/0")
    receiver = BroadcastReceiver(cast.file, "rollout/1", timeout_s=TIMEOUT_S)
    assert says(member, 5)
    assert receiver.wait_for(5, PATIENCE_S) == (5, 50)
    learner.kill()
    learner.wait()
    here = tensors(0)
    assert receiver.fetch(here) == (5, 50)
    cast.learner(6)
    assert says(member, 6)
    assert receiver.wait_for(6, PATIENCE_S) == (6, 60)
    receiver.fetch(here)
    assert all(bool((tensor == 6).all()) for tensor in here.values())
    receiver.close()


def test_publishing_waits_for_nobody_and_an_overtaken_version_is_skipped(sender: BroadcastSender, cast: Cast) -> None:
    for version in range(1, 30):
        publish(sender, version)
    assert members(sender) == []
    assert says(cast.member("rollout/0"), 29)


def test_a_process_that_ends_without_closing_ends_cleanly(sender: BroadcastSender, cast: Cast) -> None:
    code = MEMBER.replace("while True", "while newest < 2")
    leaving = subprocess.Popen(
        [sys.executable, "-c", code, str(cast.file), "rollout/0", "", str(TIMEOUT_S), str(BUCKET)],
        stdout=subprocess.PIPE, text=True,
    )
    cast.processes.append(leaving)
    publish(sender, 1)
    assert says(leaving, 1)
    publish(sender, 2)
    assert says(leaving, 2)
    assert leaving.wait(PATIENCE_S) == 0


def test_waiting_has_a_deadline_that_says_what_is_missing(cast: Cast) -> None:
    receiver = BroadcastReceiver(cast.file, "rollout/7", timeout_s=TIMEOUT_S)
    assert receiver.newest() == NOTHING
    with pytest.raises(WeightsTimeout, match=r"rollout/7: no version 1 .* looking for the learner"):
        receiver.wait_for(1, 0.05)
    with pytest.raises(WeightsTimeout, match="rollout/7: no version has arrived"):
        receiver.fetch(tensors(0))
    receiver.close()


def test_the_socket_is_private_and_versions_grow(sender: BroadcastSender, cast: Cast) -> None:
    assert cast.file.stat().st_mode & 0o777 == 0o600
    publish(sender, 3)
    with pytest.raises(UserError, match="version 3 is not above 3"):
        publish(sender, 3)
    with pytest.raises(UserError, match="not published, first 'more'"):
        sender.publish(4, 4, {**tensors(4), "more": torch.zeros(1)})


def test_only_this_host_can_reach_the_store() -> None:
    _store, where = open_store(HOST, TIMEOUT_S)
    port = int(where.partition("/")[0].rpartition(":")[2])
    listening = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    addresses = [line.split()[1] for line in listening if f":{port:04X}" in line and line.split()[3] == "0A"]
    assert addresses == [f"0100007F:{port:04X}"] or os.uname().machine not in ("x86_64", "aarch64")


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({"t0": torch.zeros(300, 7)}, "4 published tensors are not in this model, first 't1'"),
        ({**tensors(0), "more": torch.zeros(1)}, "not published, first 'more'"),
        ({**tensors(0), "t3": torch.zeros(7, 300)}, r"'t3' is float32\[300, 7\] where published and float32\[7, 300\]"),
        ({**tensors(0), "t3": torch.zeros(300, 7, dtype=torch.bfloat16)}, "bfloat16"),
    ],
)
def test_an_engine_of_another_model_is_told_which_tensor_differs(
    sender: BroadcastSender, cast: Cast, here: dict[str, torch.Tensor], message: str
) -> None:
    receiver = BroadcastReceiver(cast.file, "rollout/9", timeout_s=TIMEOUT_S)
    publish(sender, 1)
    assert receiver.wait_for(1, PATIENCE_S) == (1, 10)
    with pytest.raises(UserError, match=message):
        receiver.fetch(here)
    assert not any(tensor.any() for tensor in here.values())
    receiver.close()
