"""Weights through shared memory, with real processes that are killed in the middle of a copy."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from busrl.errors import SharedMemoryFull, UserError, WeightsTimeout
from busrl.weights import shm
from busrl.weights.base import NOTHING
from busrl.weights.shm import ShmReceiver, ShmSender
from busrl.weights.tensors import Manifest

SENDER = """
import os, signal, sys, torch
from busrl.weights.shm import ShmSender
path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
kill_at, checksums = sys.argv[4], sys.argv[5] == "1"
sender = ShmSender(path, checksums=checksums)
for version in range(first, first + count):
    if version == first + count - 1 and kill_at:
        sender.hook = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == kill_at else None
    sender.publish(version, version * 10, {f"t{k}": torch.full((300, 7), float(version)) for k in range(5)})
"""


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"t{k}": torch.full((300, 7), float(value)) for k in range(5)}


def run_sender(path: Path, first: int, count: int, kill_at: str = "", checksums: bool = False) -> int:
    arguments = [str(path), str(first), str(count), kill_at, str(int(checksums))]
    return subprocess.run([sys.executable, "-c", SENDER, *arguments], timeout=120).returncode


@pytest.fixture
def path() -> Iterator[Path]:
    """A name in /dev/shm of this test alone."""
    name = Path("/dev/shm") / f"busrl.test.{os.getpid()}.{os.urandom(4).hex()}.weights"
    yield name
    name.unlink(missing_ok=True)


def test_the_newest_version_arrives_in_place(path: Path) -> None:
    sender, receiver = ShmSender(path), ShmReceiver(path)
    assert sender.newest() == receiver.newest() == NOTHING
    here = tensors(0.0)
    before = {name: tensor.data_ptr() for name, tensor in here.items()}
    for version in (1, 2, 3, 7):
        sender.publish(version, version + 100, tensors(version))
        assert sender.newest() == receiver.newest() == (version, version + 100)
        assert receiver.fetch(here) == (version, version + 100)
        assert all(bool((tensor == version).all()) for tensor in here.values())
    assert before == {name: tensor.data_ptr() for name, tensor in here.items()}


def test_types_and_shapes_of_all_kinds_travel(path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "bf16": torch.randn(5, 3).to(torch.bfloat16), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4),
        "ids": torch.arange(9), "transposed": torch.randn(4, 6).t(),
    }
    here = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    ShmSender(path).publish(1, 1, tensors)
    ShmReceiver(path).fetch(here)
    for name, tensor in tensors.items():
        assert torch.equal(here[name], tensor)


def test_the_file_is_private_and_appears_complete(path: Path) -> None:
    ShmSender(path).publish(1, 1, tensors(1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.glob(f"{path.name}.*")) == []


@pytest.mark.parametrize("checksums", [False, True])
def test_a_sender_killed_in_mid_copy_leaves_the_version_before_readable(path: Path, checksums: bool) -> None:
    assert run_sender(path, 1, 4, kill_at="t2", checksums=checksums) == -signal.SIGKILL
    receiver, here = ShmReceiver(path), tensors(0.0)
    assert receiver.newest() == (3, 30)
    assert receiver.fetch(here) == (3, 30)
    assert all(bool((tensor == 3).all()) for tensor in here.values())


def test_a_restarted_sender_goes_on_in_the_segment_of_a_killed_one(path: Path) -> None:
    assert run_sender(path, 1, 4, kill_at="t2") == -signal.SIGKILL
    receiver, inode = ShmReceiver(path), path.stat().st_ino
    sender = ShmSender(path)
    assert sender.newest() == (3, 30)
    here = tensors(0.0)
    for version in (4, 5, 6):
        sender.publish(version, version, tensors(version))
        assert receiver.fetch(here) == (version, version)
        assert all(bool((tensor == version).all()) for tensor in here.values())
    assert path.stat().st_ino == inode


def test_with_the_first_copy_torn_the_error_names_the_dead_writer(path: Path) -> None:
    assert run_sender(path, 1, 1, kill_at="t2") == -signal.SIGKILL
    receiver = ShmReceiver(path, timeout_s=0.1)
    assert receiver.newest() == NOTHING
    with pytest.raises(WeightsTimeout, match=r"writer pid \d+ is dead, in the middle of version 1"):
        receiver.fetch(tensors(0.0))
    with pytest.raises(WeightsTimeout, match="no version 1 after"):
        receiver.wait_for(1, 0.05)


def test_where_nothing_was_published_the_error_says_so(path: Path) -> None:
    with pytest.raises(WeightsTimeout, match="published nothing yet"):
        ShmReceiver(path, timeout_s=0.05).wait_for(1, 0.05)


def test_a_copy_that_was_overtaken_is_thrown_away(path: Path) -> None:
    sender, receiver, here = ShmSender(path), ShmReceiver(path), tensors(0.0)
    sender.publish(1, 1, tensors(1))

    def overtake(point: str) -> None:
        receiver.hook = None
        for version in (2, 3):  # the second of them goes into the buffer that was just copied
            sender.publish(version, version, tensors(version))

    receiver.hook = overtake
    assert receiver.fetch(here) == (3, 3)
    assert all(bool((tensor == 3).all()) for tensor in here.values())


def test_no_mixture_is_read_while_another_process_writes_at_full_speed(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SENDER, str(path), "1", "100000000", "", "0"]) as writer:
        receiver, here, seen = ShmReceiver(path), tensors(0.0), set()
        receiver.wait_for(1, 60)
        for _ in range(500):
            version, step = receiver.fetch(here)
            assert step == version * 10
            assert all(bool((tensor == version).all()) for tensor in here.values())
            seen.add(version)
        writer.kill()
    assert len(seen) > 1


def test_bytes_that_do_not_fit_their_checksum_are_not_used(path: Path) -> None:
    sender = ShmSender(path, checksums=True)
    sender.publish(1, 1, tensors(1))
    segment = shm.attach_segment(path, writable=True)
    assert segment is not None
    segment.data[segment.newest() or 0][100] ^= 1
    with pytest.raises(WeightsTimeout, match="no complete version"):
        ShmReceiver(path, timeout_s=0.05).fetch(tensors(0.0))


def test_another_model_replaces_the_segment_and_readers_follow(path: Path) -> None:
    sender, receiver = ShmSender(path), ShmReceiver(path)
    sender.publish(5, 5, tensors(5))
    assert receiver.newest() == (5, 5)
    other = {"only": torch.ones(3)}
    ShmSender(path).publish(1, 1, other)
    assert receiver.newest() == (1, 1)
    here = {"only": torch.zeros(3)}
    assert receiver.fetch(here) == (1, 1) and bool((here["only"] == 1).all())


def test_versions_of_a_sender_only_grow_but_a_new_run_starts_over(path: Path) -> None:
    sender = ShmSender(path)
    sender.publish(5, 5, tensors(5))
    with pytest.raises(UserError, match="version 5 is not above 5"):
        sender.publish(5, 6, tensors(6))
    receiver = ShmReceiver(path)
    ShmSender(path).publish(1, 1, tensors(1))
    assert receiver.newest() == (1, 1)


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({"a": torch.zeros(2)}, "1 published tensors are not in this model, first 'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "not published, first 'c'"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"'b' is float32\[3\] where published and float32\[4\] here"),
        ({"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.float64)}, "float64"),
    ],
)
def test_another_model_on_the_other_side_is_named_tensor_by_tensor(
    path: Path, here: dict[str, torch.Tensor], message: str
) -> None:
    ShmSender(path).publish(1, 1, {"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(UserError, match=message):
        ShmReceiver(path).fetch(here)
    assert not here["a"].any()


def test_a_file_that_is_no_segment_is_not_read(path: Path) -> None:
    path.write_bytes(b"something else")
    assert ShmReceiver(path).newest() == NOTHING
    ShmSender(path).publish(1, 1, tensors(1))
    assert ShmReceiver(path).newest() == (1, 1)


def test_a_segment_whose_file_was_removed_is_remade_with_the_next_version(path: Path) -> None:
    sender, receiver = ShmSender(path), ShmReceiver(path)
    sender.publish(1, 1, tensors(1))
    assert receiver.newest() == (1, 1)
    path.unlink()
    assert receiver.newest() == NOTHING
    sender.publish(2, 2, tensors(2))
    params = tensors(0)
    assert receiver.fetch(params) == (2, 2) and params["t0"][0, 0] == 2.0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
@pytest.mark.parametrize("side", [lambda path: ShmReceiver(path).newest(), ShmSender])
def test_a_segment_of_another_user_is_neither_read_nor_written(path: Path, side: Callable[[Path], object]) -> None:
    ShmSender(path).publish(1, 1, tensors(1))
    path.chmod(0o666)
    os.chown(path, 65534, 65534)
    with pytest.raises(UserError, match=f"{path} belongs to user 65534, not to you"):
        side(path)


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="it is no file of this run"):
        ShmSender(path)


def test_too_little_shared_memory_is_said_with_both_sizes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryFull, match=r"need \d+ bytes, /dev/shm has \d+ free"):
        ShmSender(path).publish(1, 1, tensors(1))
    assert list(path.parent.glob(f"{path.name}*")) == []


def test_a_manifest_comes_back_from_its_json() -> None:
    manifest = Manifest.of(tensors(1))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert all(entry.offset % 64 == 0 for entry in manifest.entries)
