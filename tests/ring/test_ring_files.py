"""Making and attaching: names, sizes, hostile bytes; and the two files beside the ring, fates and role locks."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.errors import (
    DiskFull,
    FateRefused,
    LockTimeout,
    MachineError,
    RingError,
    RingExists,
    RingMismatch,
    RingNotFound,
    RingReadOnly,
    ShmTooSmall,
)
from busrl.ring import Fates, OfdLock, Ring, RingGuard, State
from busrl.states import VALIDATE_BIT


def small(path, **changes) -> Ring:
    return Ring.create(str(path), **{"slots": 2, "slot_bytes": 256, "processes": 4, "uuid": bytes(16), **changes})


def test_a_ring_is_private_to_its_maker_and_leaves_no_other_files(folder):
    ring = small(folder / "ring")
    assert os.listdir(folder) == ["ring"]
    assert stat.S_IMODE(os.stat(folder / "ring").st_mode) == 0o600
    assert ring.n_slots == 2 and ring.slot_bytes == 256 and ring.n_processes == 4


def test_a_second_ring_of_the_same_name_is_refused(folder):
    small(folder / "ring")
    with pytest.raises(RingExists, match="busrl ring clean"):
        small(folder / "ring")
    assert Ring.unlink(str(folder / "ring")) and not Ring.unlink(str(folder / "ring"))
    with pytest.raises(RingNotFound):
        Ring.attach(str(folder / "ring"))


def test_a_ring_beyond_the_memory_file_system_names_sizes_and_remedy(folder):
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free > 1 << 38:
        pytest.skip("/dev/shm is larger than a ring of short answers can be")
    with pytest.raises(ShmTooSmall, match=r"lower ring\.slots or ring\.slot_bytes.*shm-size") as refusal:
        small(folder / "ring", slots=1 << 20, slot_bytes=250_000)  # below where a slot gives memory back
    assert refusal.value.needed > refusal.value.free > 0
    assert isinstance(refusal.value, MachineError)
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    "changes",
    [{"slots": 0}, {"slot_bytes": 0}, {"slot_bytes": 1 << 50}, {"processes": 1}, {"processes": 20000}, {"uuid": b"x"}],
)
def test_numbers_that_make_no_ring_are_refused(folder, changes):
    with pytest.raises(RingError, match=r"must be|16 bytes"):
        small(folder / "ring", **changes)


@pytest.mark.parametrize(
    "content", [b"", b"x" * 100, bytes(1 << 16), b"BUSRLRG1" + bytes(1 << 16), b"\xff" * (1 << 16)]
)
def test_a_file_that_is_no_ring_is_refused(folder, content):
    (folder / "ring").write_bytes(content)
    with pytest.raises(RingMismatch):
        Ring.attach(str(folder / "ring"))


def test_a_folder_a_link_or_a_cut_file_is_no_ring(folder):
    small(folder / "ring")
    (folder / "link").symlink_to(folder / "ring")
    with pytest.raises(RingError):
        Ring.attach(str(folder / "link"))
    with pytest.raises(RingError):
        Ring.attach(str(folder))
    os.truncate(folder / "ring", 20000)
    with pytest.raises(RingMismatch, match="the file has 20000"):
        Ring.attach(str(folder / "ring"))


@settings(max_examples=60)
@given(st.integers(0, 0x7F), st.integers(1, 255))
def test_no_changed_byte_of_the_header_is_accepted(folder, offset, flip):
    path = folder / f"ring.{offset}.{flip}"
    small(path)
    content = bytearray(path.read_bytes())
    content[offset] ^= flip
    path.write_bytes(content)
    with pytest.raises(RingMismatch):
        Ring.attach(str(path))
    path.unlink()


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 2 * 128 - 1), st.integers(0, 255)), max_size=12))
def test_a_hostile_tensor_table_never_reads_outside_its_slot(folder, changes):
    path = folder / "hostile"
    Ring.unlink(str(path))
    ring = small(path)
    table = 0x2000 + 4 * 256  # proc_off + table, rounded up: lines, then tensor tables
    table = -(-table // 4096) * 4096
    table = -(-(table + 2 * 128) // 4096) * 4096
    with open(path, "r+b") as raw:
        raw.seek(table)
        raw.write((1).to_bytes(4, "little"))
        entry = bytearray(128)
        entry[:4] = b"task"
        entry[0x20:0x24] = bytes([255, 1, 8, 1])
        entry[0x30:0x40] = (16).to_bytes(8, "little") * 2
        entry[0x58:0x60] = (16).to_bytes(8, "little")
        entry[0x78] = 1
        for at, value in changes:
            if at >= 128:
                entry[at - 128] = value
        raw.seek(table + 128)
        raw.write(entry)
    try:
        for view in ring.tensors(0).values():
            assert view.nbytes <= 256
            view.tobytes()
        ring.get(0, "task").tobytes()
    except RingError:
        pass


def test_a_read_only_handle_reads_and_refuses_to_write(world):
    world.dispatch(1)
    monitor = Ring.attach(world.path, read_only=True)
    assert monitor.lines()["uid"][0] == 1 and monitor.words()[0] == world.ring.words()[0]
    for write in (
        lambda: monitor.register("m", "m"),
        lambda: monitor.set_header("hold", 1),
        lambda: monitor.drop(0, int(monitor.words()[0]), "f"),
        lambda: monitor.reap(),
    ):
        with pytest.raises(RingReadOnly):
            write()
    assert monitor.wait(State.QUEUED, monitor.transitions(State.QUEUED), 0.01) == 1


FATE_ORDER = {"D": {0}, "T": None, "V": None, "f": {ord("D")}, "P": {ord("D")}, 0: {ord("D")}}


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["D", "T", "V", "f", "P", 0])), max_size=30))
def test_fates_only_move_forward(folder, stores):
    (folder / "fates").unlink(missing_ok=True)
    fates = Fates(str(folder / "fates"), create=True, capacity=1 << 16)
    model = [0] * 4
    for i, code in stores:
        value = ord(code) if isinstance(code, str) else code
        allowed = FATE_ORDER[code] is None or model[i] in FATE_ORDER[code]
        assert fates.store(i, code) == (allowed or model[i] == value)
        model[i] = value if allowed else model[i]
        assert [fates.get(k) for k in range(4)] == model


def test_fates_are_shared_grow_in_steps_and_hold_plain_bytes(folder):
    path = str(folder / "fates")
    with pytest.raises(FileNotFoundError):
        Fates(path)
    first, second = Fates(path, create=True), Fates(path)
    assert first.store(70_000, "D") and second.get(70_000) == ord("D") and second.get(10_000_000) == 0
    assert len(second) == os.path.getsize(path) == 2 * 65536
    view = second.view()
    assert view[70_000] == ord("D") and not view.flags.writeable
    second.close()
    assert np.count_nonzero(view) == 1
    assert first.get(VALIDATE_BIT | 70_000) == ord("D")
    with pytest.raises(FateRefused, match="capacity"):
        first.store(1 << 40, "D")
    first.sync()


def test_a_full_disk_fails_at_reserve_and_not_by_a_later_fault(folder):
    script = (
        "import resource, sys; from busrl.errors import DiskFull; from busrl.ring import Fates\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "fates = Fates(sys.argv[1], create=True)\n"
        "fates.store(1, 'D')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    fates.store(200_000, 'D')\nexcept DiskFull as error:\n    print(fates.get(1), 'full', len(fates))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script, str(folder / "f")], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["68", "full", "65536"], done.stderr
    assert issubclass(DiskFull, MachineError)


def test_a_role_lock_names_its_holder_and_is_free_after_death(world):
    path = str(world.folder / "role.lock")
    lock = OfdLock(path)
    assert lock.holder() is None
    script = "from busrl.ring import OfdLock; lock = OfdLock(folder + '/role.lock'); say(lock.try_acquire()); hear()"
    child = world.child(script)
    assert child.hear() == "True"
    assert not lock.try_acquire() and lock.holder() == child.process.pid
    with pytest.raises(LockTimeout, match=f"held by process {child.process.pid}"):
        lock.acquire(0.05)
    child.kill()
    lock.acquire(10.0)
    assert lock.held and lock.holder() == os.getpid()
    lock.release()
    assert lock.holder() is None


def test_an_inheritable_lock_is_held_until_the_last_child_is_gone(world):
    path = str(world.folder / "run.lock")
    script = """
    import subprocess
    from busrl.ring import OfdLock
    lock = OfdLock(folder + "/run.lock")
    lock.acquire(1)
    lock.inheritable = True
    heir = subprocess.Popen([sys.executable, "-c", "input()"], pass_fds=[lock.fileno()], stdin=sys.stdin)
    say(heir.pid)
    os._exit(0)
    """
    child = world.child(script)
    heir = int(child.hear())
    child.process.wait(timeout=30)
    lock = OfdLock(path)
    assert not lock.try_acquire() and lock.holder() == child.process.pid
    os.kill(heir, 9)
    lock.acquire(10.0)
    child.process.communicate(timeout=30)


def test_a_lock_that_lost_its_file_is_retaken_or_lost_to_others(world):
    path = world.folder / "role.lock"
    lock, other = OfdLock(str(path)), OfdLock(str(path))
    assert lock.try_acquire() and lock.stands
    lock.inheritable = True
    path.unlink()
    assert lock.held and not lock.stands
    assert lock.try_acquire() and lock.stands and lock.inheritable and not other.try_acquire()
    path.unlink()
    assert other.try_acquire() and other.stands
    assert not lock.try_acquire() and lock.held and not lock.stands
    with pytest.raises(LockTimeout):
        lock.acquire(0.05)
    other.release()
    lock.acquire(1.0)
    assert lock.stands
    path.unlink()
    path.mkdir()
    with pytest.raises(RingError, match="Is a directory"):
        lock.try_acquire()
    assert lock.held


def test_who_removes_a_ring_and_who_has_it_see_each_other(world):
    path = world.folder / "a.ring"
    path.write_bytes(bytes(64))
    launch, cleaner = RingGuard(path), RingGuard(path)
    assert launch.take() and not cleaner.try_take()
    launch.release()
    late = RingGuard(path)
    assert cleaner.try_take()
    with pytest.raises(TimeoutError, match="another process has been removing it"):
        late.take(timeout_s=0.05)
    path.unlink()
    cleaner.release()
    assert late.take() is False
    late.release()
    with pytest.raises(FileNotFoundError):
        RingGuard(path)


def test_an_address_space_limit_without_room_for_fates_is_named(folder):
    program = f"""
import resource
from busrl.ring import Fates
from busrl.states import VALIDATE_BIT
from busrl.states import VALIDATE_BIT
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
Fates({str(folder / "fates")!r}, create=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "4096 MiB of address space (not of memory)" in done.stderr, done.stderr
    assert "the limit is 3072 MiB" in done.stderr and "ulimit -v unlimited" in done.stderr
