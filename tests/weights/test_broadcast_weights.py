"""Weights by broadcast: members that join, leave, stop and are killed, each a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from members import BUCKET, PATIENCE_S, Child, engine, learner, settle, tensors

from busrl.errors import UserError, WeightsTimeout
from busrl.weights.base import NOTHING, GroupCallbacks
from busrl.weights.broadcast.group import HOST, open_store
from busrl.weights.broadcast.receiver import BroadcastReceiver
from busrl.weights.broadcast.sender import BroadcastSender

TIMEOUT_S = 12.0  # a third of it is what a slow machine has for a phase
# A member that fetches two versions and then just ends.
LEAVING = """
import sys
from members import tensors
from busrl.weights.broadcast.receiver import BroadcastReceiver
receiver = BroadcastReceiver(sys.argv[1], "rollout/0", timeout_s=float(sys.argv[2]))
for version in (1, 2):
    receiver.wait_for(version, 120)
    print(*receiver.fetch(tensors(0)), flush=True)
"""


class Cast:
    """Members and learners of a test, each a process of its own."""

    def __init__(self, file: Path, start: Callable[..., Child]) -> None:
        self.file, self._start = file, start

    def member(self, name: str, kill_at: str = "") -> Child:
        return self._start(engine, str(self.file), name, TIMEOUT_S, kill_at)

    def learner(self, version: int) -> Child:
        """One that publishes a version and stays."""
        return self._start(learner, str(self.file), version, TIMEOUT_S)


@pytest.fixture
def cast(tmp_path: Path, start: Callable[..., Child]) -> Cast:
    return Cast(tmp_path / "weights.store", start)


@pytest.fixture
def missing() -> list[str]:
    return []


@pytest.fixture
def sender(cast: Cast, missing: list[str]) -> Iterator[BroadcastSender]:
    sender = BroadcastSender(
        cast.file, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET,
        callbacks=GroupCallbacks(lambda change: None, lambda name, text: missing.append(name)),
    )
    yield sender
    sender.close()


def publish(sender: BroadcastSender, version: int) -> None:
    sender.publish(version, version * 10, tensors(version))


def test_every_version_reaches_every_member_and_a_late_joiner_gets_the_newest(
    sender: BroadcastSender, cast: Cast
) -> None:
    first, second = cast.member("rollout/0"), cast.member("rollout/1")
    for version in (1, 2, 3):
        publish(sender, version)
        first.until(version)
        second.until(version)
    cast.member("rollout/2").until(3)
    publish(sender, 4)
    first.until(4)
    second.until(4)
    settle(sender)
    assert sender.group_members == ["rollout/0", "rollout/1", "rollout/2"]
    assert sender.newest() == (4, 40)


def test_a_member_killed_in_mid_broadcast_is_left_out_and_named(
    sender: BroadcastSender, cast: Cast, missing: list[str]
) -> None:
    first, doomed, third = cast.member("rollout/0"), cast.member("rollout/1", "bucket 3@2"), cast.member("rollout/2")
    publish(sender, 1)
    first.until(1)
    doomed.until(1)
    third.until(1)
    publish(sender, 2)  # bucket 3 of its second transfer at the latest is where rollout/1 dies
    first.until(2)
    third.until(2)
    doomed.fell(signal.SIGKILL)
    settle(sender)
    assert missing == ["rollout/1"]
    assert sender.group_members == ["rollout/0", "rollout/2"]
    publish(sender, 3)
    first.until(3)
    third.until(3)


def test_a_killed_member_is_not_waited_for_and_its_successor_joins(
    sender: BroadcastSender, cast: Cast
) -> None:
    first, doomed = cast.member("rollout/0"), cast.member("rollout/1")
    publish(sender, 1)
    first.until(1)
    doomed.until(1)
    doomed.process.kill()
    doomed.fell(signal.SIGKILL)
    publish(sender, 2)
    first.until(2)
    successor = cast.member("rollout/1")
    successor.until(2)
    publish(sender, 3)
    first.until(3)
    successor.until(3)


@pytest.mark.long
def test_a_stopped_member_delays_others_briefly_and_may_return(
    sender: BroadcastSender, cast: Cast, missing: list[str]
) -> None:
    first, stopped = cast.member("rollout/0"), cast.member("rollout/1")
    publish(sender, 1)
    first.until(1)
    stopped.until(1)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    publish(sender, 2)
    first.until(2)
    settle(sender)
    assert missing == ["rollout/1"]
    stopped.go_on()
    publish(sender, 3)
    first.until(3)
    stopped.until(3)


def test_a_member_that_dies_in_the_roll_call_delays_nobody_for_good(
    sender: BroadcastSender, cast: Cast, missing: list[str]
) -> None:
    first = cast.member("rollout/0")
    publish(sender, 1)
    first.until(1)
    doomed = cast.member("rollout/1", "roll call 2@1")
    doomed.fell(signal.SIGKILL)
    publish(sender, 2)
    first.until(2)
    settle(sender)
    assert missing == ["rollout/1"]


def test_members_keep_the_version_of_a_killed_learner_and_follow_its_successor(cast: Cast) -> None:
    fallen, member = cast.learner(5), cast.member("rollout/0")
    receiver = BroadcastReceiver(cast.file, "rollout/1", timeout_s=TIMEOUT_S)
    member.until(5)
    assert receiver.wait_for(5, PATIENCE_S) == (5, 50)
    fallen.process.kill()
    fallen.fell(signal.SIGKILL)
    here = tensors(0)
    assert receiver.fetch(here) == (5, 50)
    cast.learner(6)
    member.until(6)
    assert receiver.wait_for(6, PATIENCE_S) == (6, 60)
    receiver.fetch(here)
    assert all(bool((tensor == 6).all()) for tensor in here.values())
    receiver.close()


def test_publishing_waits_for_nobody_and_an_overtaken_version_is_skipped(sender: BroadcastSender, cast: Cast) -> None:
    for version in range(1, 30):
        publish(sender, version)
    assert sender.group_members == []
    cast.member("rollout/0").until(29)


def test_a_process_that_ends_without_closing_ends_cleanly(sender: BroadcastSender, cast: Cast) -> None:
    command = [sys.executable, "-c", LEAVING, str(cast.file), str(TIMEOUT_S)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as leaving:
        assert leaving.stdout is not None
        for version in (1, 2):
            publish(sender, version)
            assert leaving.stdout.readline() == f"{version} {version * 10}\n"
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
    _store, where, _listening = open_store(HOST, TIMEOUT_S)
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
