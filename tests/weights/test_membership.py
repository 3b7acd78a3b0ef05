"""Deaths in every phase of a broadcast, of every role: the others have the next version within the timeout.

Real processes. A trap in the victim's own thread kills (SIGKILL) or stops (SIGSTOP) it exactly in the phase.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from members import BUCKET, PATIENCE_S, Child, engine, learner, settle, tensors

from busrl.weights.base import GroupCallbacks, GroupChange
from busrl.weights.broadcast.group import ControlConnection
from busrl.weights.broadcast.sender import BroadcastSender

TIMEOUT_S = 6.0
Start = Callable[..., Child]
# Where an engine is caught: the point that its receiver passes. Roll call, manifest and connection belong to its
# joining, the buckets and the commit of version 2 to a group that stands. The learner passes points of the same names
# but for the manifest, which it sends with the roll call.
JOINING = ["roll call", "manifest", "connect"]
STANDING = ["bucket 0", "bucket 5", "commit"]
LEARNER = ["roll call", "connecting", "sending", "bucket 5", "commit"]
HOW = [signal.SIGKILL, signal.SIGSTOP]
slow = pytest.mark.slow


class Scene:
    """A learner in this process, and what it says of its members."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.missing: dict[str, str] = {}
        self.groups: list[GroupChange] = []
        self.sender = BroadcastSender(
            file, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET,
            callbacks=GroupCallbacks(self.groups.append, self.missing.__setitem__),
        )

    def publish(self, version: int) -> None:
        self.sender.publish(version, version * 10, tensors(version))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "store")
    yield scene
    scene.sender.close()


def cases(*points: str) -> list[object]:
    """Every point and signal; all but one kill and one stop among the slow tests."""
    problems: list[object] = []
    for point in points:
        for how in HOW:
            name = f"{point.replace(' ', '-')}-{how.name}"
            quick = (point, how) in (("bucket 5", signal.SIGKILL), ("connect", signal.SIGKILL))
            problems.append(pytest.param(point, how, id=name, marks=[] if quick else slow))
    return problems


@pytest.mark.parametrize("victim", ["a", pytest.param("b", marks=slow)])
@pytest.mark.parametrize(("point", "how"), cases(*STANDING))
def test_a_member_lost_in_a_transfer_delays_others_at_most_the_timeout(
    scene: Scene, start: Start, victim: str, point: str, how: signal.Signals
) -> None:
    engines = {
        name: start(engine, str(scene.file), name, TIMEOUT_S, point if name == victim else "", False, how)
        for name in ("a", "b", "c")
    }
    scene.publish(1)
    for member in engines.values():
        member.until(1)
    wait_for_group(scene, "a", "b", "c")
    settle(scene.sender)  # version 1 in this group too
    engines[victim].arm()
    scene.publish(2)
    fell = engines[victim].fell(how)
    others = [member for name, member in engines.items() if name != victim]
    assert max(member.until(2) for member in others) - fell < TIMEOUT_S
    scene.publish(3)
    for member in others:
        member.until(3)
    assert settle(scene.sender) == [n for n in ("a", "b", "c") if n != victim]
    assert set(scene.missing) == {victim} and "epoch" in scene.missing[victim]
    if how is signal.SIGSTOP:  # it comes back by itself
        engines[victim].go_on()
        engines[victim].until(3)


@pytest.mark.parametrize("victim", ["a", pytest.param("c", marks=slow)])
@pytest.mark.parametrize(("point", "how"), cases(*JOINING))
def test_a_member_lost_while_joining_delays_others_at_most_the_timeout(
    scene: Scene, start: Start, victim: str, point: str, how: signal.Signals
) -> None:
    first = start(engine, str(scene.file), "b", TIMEOUT_S)
    scene.publish(1)
    first.until(1)
    joiner = start(engine, str(scene.file), victim, TIMEOUT_S, point, True, how)
    fell = joiner.fell(how)
    scene.publish(2)
    assert first.until(2) - fell < TIMEOUT_S
    assert settle(scene.sender) == ["b"]
    assert set(scene.missing) == {victim}
    if how is signal.SIGSTOP:
        joiner.go_on()
        joiner.until(2)
    third = start(engine, str(scene.file), "d", TIMEOUT_S)  # the server is still open
    third.until(2)


@pytest.mark.long
@pytest.mark.parametrize(("point", "how"), cases(*LEARNER))
def test_engines_outlive_a_learner_that_falls_and_follow_the_next_one(
    tmp_path: Path, start: Start, point: str, how: signal.Signals
) -> None:
    file = str(tmp_path / "store")
    engines = [start(engine, file, name, TIMEOUT_S) for name in ("a", "b")]
    first = start(learner, file, 5, TIMEOUT_S, point, how)
    first.fell(how)
    if how is signal.SIGSTOP:
        # It holds nobody up: one that is asked to end does so, and the other has the version when it goes on.
        begun = time.monotonic()
        assert engines.pop().told_to_end(PATIENCE_S) == 0
        assert time.monotonic() - begun < TIMEOUT_S
        first.go_on()
        engines[0].until(5)
        first.process.kill()
        first.process.join(PATIENCE_S)
    start(learner, file, 6, TIMEOUT_S)
    for member in engines:
        member.until(6)


def test_a_silent_member_is_reported_with_phase_and_seconds(scene: Scene, start: Start) -> None:
    """A member that says hello and then nothing: only the deadline of the roll call finds it."""
    mute = ControlConnection.to(scene.file)
    mute.send({"say": "join", "name": "mute", "pid": 1, "have": -1})
    other = start(engine, str(scene.file), "b", TIMEOUT_S)
    scene.publish(1)
    other.until(1)
    settle(scene.sender)
    assert scene.missing.keys() == {"mute"}
    # The other engine may have come while the first epoch was being called: then a second one is, with both.
    assert "has not answered the roll call of epoch " in scene.missing["mute"]
    assert f" for {TIMEOUT_S / 3:.1f} s" in scene.missing["mute"]
    assert [change.members for change in scene.groups][-1] == ("b",)
    assert any("mute" in change.why and "roll call" in change.why for change in scene.groups)
    mute.close()


def test_joins_and_leaves_are_told_with_the_epoch_and_the_reason(scene: Scene, start: Start) -> None:
    first = start(engine, str(scene.file), "a", TIMEOUT_S)
    scene.publish(1)
    first.until(1)
    second = start(engine, str(scene.file), "b", TIMEOUT_S)
    second.until(1)
    wait_for_group(scene, "a", "b")
    assert second.told_to_end(PATIENCE_S) == 0
    scene.publish(2)
    first.until(2)
    wait_for_group(scene, "a")
    assert [change.epoch for change in scene.groups] == sorted({change.epoch for change in scene.groups})
    text = "; ".join(change.why for change in scene.groups)
    assert "a joined" in text and "b joined" in text and "b left" in text
    assert scene.missing == {}


def test_a_second_process_of_a_name_takes_the_place_of_the_first(scene: Scene, start: Start) -> None:
    first = start(engine, str(scene.file), "a", TIMEOUT_S)
    scene.publish(1)
    first.until(1)
    second = start(engine, str(scene.file), "a", TIMEOUT_S)
    second.until(1)
    scene.publish(2)
    second.until(2)
    assert settle(scene.sender) == ["a"]
    assert not first.pipe.poll(0.2), "the first is out, and does not fight for its name"


def wait_for_group(scene: Scene, *names: str) -> None:
    """Until a group of just these stands."""
    deadline = time.monotonic() + PATIENCE_S
    while not scene.groups or scene.groups[-1].members != names or scene.sender.group_members != list(names):
        assert time.monotonic() < deadline, scene.groups
        threading.Event().wait(0.01)
