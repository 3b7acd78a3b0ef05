"""Versions that are folders: complete or not there, refused by name when they are not what was published."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from busrl.errors import (
    InsecureDirectory,
    RunInUse,
    SharedMemoryFull,
    UserError,
    WeightsRefused,
    WeightsTimeout,
)
from busrl.weights import folders
from busrl.weights.folders import FolderReceiver, FolderSender
from busrl.weights.tensors import fingerprint

Named = Mapping[str, Any]


def write(folder: Path, tensors: Named) -> None:
    """Stands for peft: two files, one of them in a folder of its own."""
    (folder / "config.json").write_text(json.dumps(sorted(tensors)))
    (folder / "deep").mkdir()
    (folder / "deep" / "weights").write_bytes(b"".join(tensors.values()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "published"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "base", b"base")


def model_folder(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "tiny", "hidden_size": 4, "transformers_version": "5"}')
    header = b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    weights = len(header).to_bytes(8, "little") + header + content.ljust(1 << 20, b".")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def sender(root: Path, base: Path, kept: int = 3) -> FolderSender:
    return FolderSender(root, write, kind="adapter", kept=kept, base=fingerprint(base))


def receiver(root: Path, base: Path, name: str = "rollout/0", kept: int = 1) -> FolderReceiver:
    return FolderReceiver(root, name, kind="adapter", kept=kept, base=base, timeout_s=0.2)


def test_a_version_arrives_whole_and_stays_until_the_next_one_is_taken(root: Path, base: Path) -> None:
    sends, takes = sender(root, base, kept=1), receiver(root, base)
    assert takes.newest() == (-1, -1)
    sends.publish(3, 7, {"a": b"three"})
    assert takes.wait_for(3, 1.0) == takes.newest() == (3, 7)
    version, step, first = takes.take()
    assert (version, step, (first / "deep" / "weights").read_bytes()) == (3, 7, b"three")
    assert takes.take().path == first, "the same version again is the same folder"
    for newer in (4, 5, 6):
        sends.publish(newer, newer, {"a": b"more"})
    assert (first / "deep" / "weights").read_bytes() == b"three", "the learner keeps one version, and took none of mine"
    assert takes.take().version == 6 and not first.exists()
    assert [folder.version for folder in folders.versions(root)] == [6]
    takes.close()
    sends.close()
    assert not list((root / "held").iterdir())


def test_an_engine_keeps_as_many_versions_as_its_sequences_may_be_of(root: Path, base: Path) -> None:
    sends, takes = sender(root, base, kept=2), receiver(root, base, kept=3)
    paths = []
    for version in range(1, 6):
        sends.publish(version, version, {"a": bytes([version])})
        paths.append(takes.take().path)
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    assert len({path.name for path in paths}) == 5, "a path means one version for ever"


def test_the_directory_is_private_and_one_that_is_not_is_refused(root: Path, base: Path) -> None:
    sends = sender(root, base)
    sends.publish(1, 1, {"a": b"1"})
    assert root.stat().st_mode & 0o777 == 0o700
    sends.close()
    root.chmod(0o755)
    with pytest.raises(InsecureDirectory, match="mode is 0755"):
        sender(root, base)


def test_a_second_learner_is_refused_by_name_until_the_first_is_gone(root: Path, base: Path) -> None:
    first = sender(root, base)
    with pytest.raises(RunInUse, match=str(os.getpid())):
        sender(root, base)
    first.close()
    sender(root, base).close()


def test_versions_grow_and_another_run_begins_anew(root: Path, base: Path) -> None:
    first = sender(root, base)
    first.publish(9, 9, {"a": b"9"})
    with pytest.raises(UserError, match="version 9 is not above 9"):
        first.publish(9, 9, {"a": b"9"})
    takes = receiver(root, base)
    assert takes.take().version == 9
    first.close()
    again = sender(root, base)
    assert again.newest() == (9, 9)
    again.publish(2, 2, {"a": b"2"})
    assert again.newest() == (2, 2)
    assert takes.take().version == 9, "an engine never goes back"


def test_a_directory_that_was_removed_is_made_again(root: Path, base: Path) -> None:
    import shutil

    sends = sender(root, base)
    sends.publish(1, 1, {"a": b"1"})
    shutil.rmtree(root)
    sends.publish(2, 2, {"a": b"2"})
    assert receiver(root, base).take().version == 2


def spoil_content(folder: Path) -> None:
    (folder / "deep" / "weights").write_bytes(b"other")


def spoil_missing(folder: Path) -> None:
    (folder / "deep" / "weights").unlink()


def spoil_stamp(folder: Path) -> None:
    (folder / folders.STAMP).write_text('{"layout": 1, "kind": ')


def spoil_version(folder: Path) -> None:
    stamp = json.loads((folder / folders.STAMP).read_text())
    (folder / folders.STAMP).write_text(json.dumps({**stamp, "version": 1}))


def spoil_kind(folder: Path) -> None:
    told = json.loads((folder / folders.STAMP).read_text())
    (folder / folders.STAMP).write_text(json.dumps({**told, "kind": "checkpoint"}))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_content, "is not what was written"),
        (spoil_missing, "deep/weights is missing"),
        (spoil_stamp, "busrl.json cannot be read"),
        (spoil_version, "busrl.json names version 1"),
        (spoil_kind, "expected adapter"),
    ],
)
def test_a_spoilt_version_is_refused_by_name_and_the_one_before_stays(
    root: Path, base: Path, spoil: Callable[[Path], None], why: str
) -> None:
    sends, takes = sender(root, base), receiver(root, base)
    sends.publish(1, 1, {"a": b"first"})
    before = takes.take()
    sends.publish(2, 2, {"a": b"later"})
    spoil(folders.versions(root)[-1].path)
    with pytest.raises(WeightsRefused, match=f"version 2 is not used: .*{why}"):
        takes.take()
    assert (before.path / "deep" / "weights").read_bytes() == b"first"
    sends.publish(3, 3, {"a": b"third"})
    assert takes.take().version == 3


def test_an_adapter_for_another_base_is_refused(root: Path, base: Path, tmp_path: Path) -> None:
    other = model_folder(tmp_path / "other", b"tuned")
    sender(root, base).publish(1, 1, {"a": b"1"})
    with pytest.raises(WeightsRefused, match="made for another base model"):
        receiver(root, other).take()


def test_a_copied_model_is_the_same_base_and_a_changed_one_differs(base: Path, tmp_path: Path) -> None:
    copied = model_folder(tmp_path / "copy", b"base")
    (copied / "config.json").write_text('{"hidden_size": 4, "model_type": "tiny", "transformers_version": "6"}')
    assert fingerprint(copied) == fingerprint(base)
    (copied / "config.json").write_text('{"hidden_size": 8, "model_type": "tiny"}')
    assert fingerprint(copied) != fingerprint(base)
    with pytest.raises(UserError, match="no weights"):
        (copied / "model.safetensors").unlink()
        fingerprint(copied)


def test_waiting_has_an_end_and_names_the_learner(root: Path, base: Path) -> None:
    takes = receiver(root, base)
    with pytest.raises(WeightsTimeout, match="the learner has published nothing yet"):
        takes.take()
    sends = sender(root, base)
    sends.publish(1, 1, {"a": b"1"})
    with pytest.raises(WeightsTimeout, match=rf"pid {os.getpid()}\) is alive: no version 2 after 0.1 s, newest 1"):
        takes.wait_for(2, 0.1)


def test_without_room_nothing_of_the_version_is_left(root: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, tensors: Named) -> None:
        (folder / "half").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    place = Path("/dev/shm") / f"busrl.test.{os.getpid()}.{os.urandom(4).hex()}"
    sends = FolderSender(place, full, kind="adapter", kept=2)
    try:
        with pytest.raises(SharedMemoryFull, match="while version 1 was written"):
            sends.publish(1, 1, {})
        assert [path.name for path in place.iterdir()] == ["lock"]
    finally:
        sends.close()
        folders.remove(place)


DYING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_folder_versions import receiver, sender

def die(step):
    if step == {step!r}:
        os.kill(os.getpid(), signal.SIGKILL)

root, base = Path({root!r}), Path({base!r})
one = {make}
one.hook = die
{act}
"""


def dies(root: Path, base: Path, step: str, make: str, act: str) -> int:
    """Pid of a process that was killed by its own hand at that step."""
    code = DYING.format(tests=str(Path(__file__).parent), step=step, root=str(root), base=str(base), make=make, act=act)
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert child.wait(60) == -signal.SIGKILL
    return child.pid


@pytest.mark.parametrize(("step", "newest"), [("written", 1), ("stamped", 1), ("renamed", 2)])
def test_a_learner_that_dies_while_it_publishes_leaves_whole_versions_only(
    root: Path, base: Path, step: str, newest: int
) -> None:
    first = sender(root, base)
    first.publish(1, 1, {"a": b"1"})
    first.close()
    dies(root, base, step, "sender(root, base)", "one.publish(2, 2, {'a': b'2'})")
    takes = receiver(root, base)
    assert takes.take().version == newest
    assert bool(list(root.glob(".draft-*"))) == (newest == 1)
    again = sender(root, base)
    again.publish(3, 3, {"a": b"3"})
    assert takes.take().version == 3 and not list(root.glob(".draft-*"))


@pytest.mark.parametrize("step", ["linked", "taken"])
def test_an_engine_that_dies_while_it_takes_harms_nobody(root: Path, base: Path, step: str) -> None:
    sends = sender(root, base)
    sends.publish(1, 1, {"a": b"1"})
    pid = dies(root, base, step, "receiver(root, base)", "one.take()")
    assert (root / "held" / f"rollout-0.{pid}").is_dir()
    after = receiver(root, base)
    assert after.take().version == 1
    assert [path.name for path in (root / "held").iterdir()] == [f"rollout-0.{os.getpid()}"]


def test_versions_that_go_while_they_are_taken_are_looked_for_again(root: Path, base: Path) -> None:
    sends, takes = sender(root, base, kept=1), receiver(root, base)
    sends.publish(1, 1, {"a": b"1"})
    overtaken: list[str] = []

    def overtake(step: str) -> None:
        if step == "linked" and not overtaken:
            overtaken.append(step)
            draft = root / "held" / f"rollout-0.{os.getpid()}" / ".draft-v000000000001-s1"
            (draft / "deep" / "weights").unlink()  # as if it had gone meanwhile
            sends.publish(2, 2, {"a": b"2"})

    takes.hook = overtake
    assert takes.take().version == 2
