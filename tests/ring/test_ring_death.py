"""Who is dead, who may reap, and what a successor finds: with real processes, signals and forks."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import pytest

from busrl.errors import RingFull
from busrl.ring import Ring, State

HOLD = """
ring.register("holder", "holder")
held = take(State.QUEUED, State.GENERATING, 99)
say(ring.index, *(slot for slot, _ in held))
hear()
"""


def test_slots_of_a_living_process_are_never_taken_even_while_stopped(world):
    world.dispatch(1)
    holder = world.child(HOLD)
    index = int(holder.hear().split()[0])
    os.kill(holder.process.pid, signal.SIGSTOP)
    assert world.ring.reap() == [] and not world.ring.is_dead(index)
    assert world.states() == {"GENERATING": 1, "FREE": 7}
    holder.kill()
    assert [(r.frm, r.to, r.pid) for r in world.ring.reap()] == [(State.GENERATING, State.QUEUED, holder.process.pid)]
    assert world.ring.is_dead(index)


def test_a_zombie_counts_as_dead(world):
    world.dispatch(1)
    holder = world.child(HOLD)
    index = int(holder.hear().split()[0])
    os.kill(holder.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now and stays one
    assert world.ring.is_dead(index)
    assert len(world.ring.reap()) == 1


def test_several_reapers_at_once_return_each_slot_exactly_once(world):
    for uid in range(8):
        world.dispatch(uid)
    holder = world.child(HOLD)
    assert holder.hear().split()[1:] == list("01234567")
    reap = "ring.register('reaper', 'reaper'); say('ready'); hear(); say(*(r.slot for r in ring.reap()), '.')"
    reapers = [world.child(reap) for _ in range(3)]
    for reaper in reapers:
        assert reaper.hear() == "ready"
    holder.kill()
    for reaper in reapers:
        reaper.tell()
    slots = [slot for reaper in reapers for slot in reaper.hear().split() if slot != "."]
    assert sorted(slots) == list("01234567")
    assert world.states() == {"QUEUED": 8}


def test_an_orderly_close_hands_everything_back_and_frees_the_entry(world):
    world.dispatch(1)
    other = Ring.attach(world.path)
    other.bind_fates(world.train, world.validate)
    other.register("other", "other")
    assert other.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    other.close()
    assert world.states() == {"QUEUED": 1, "FREE": 7}
    assert world.ring.line(0)["attempt"] == 0
    assert [p.label for p in world.ring.processes()] == ["parent"]


def test_a_successor_adopts_the_ring_of_a_dead_creator_with_all_samples(world):
    script = """
    adopted = Ring.create(folder + "/second", slots=4, slot_bytes=1024, uuid=b"u" * 16)
    adopted.bind_fates(train, validate)
    adopted.register("launch", "launch")
    adopted.set_header("version", 41)
    assert dispatch(1, adopted) and dispatch(2, adopted)
    assert adopted.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    os.kill(os.getpid(), 9)
    """
    world.child(script).dies_by_sigkill()
    heir = Ring.attach(str(world.folder / "second"))
    heir.bind_fates(world.train, world.validate)
    assert heir.uuid == b"u" * 16 and heir.header("version") == 41
    assert [r.label for r in heir.reap()] == ["launch"]
    assert heir.stats().occupancy["QUEUED"] == 2
    assert bytes(heir.get(0, "task")) == b'{"prompt": "1"}'


def test_an_entry_of_the_process_table_is_reused_with_a_higher_epoch(world):
    epochs = []
    for _ in range(3):
        child = world.child("say(ring.register('c', 'c')); hear()")
        index = int(child.hear())
        epochs += [p.epoch for p in world.ring.processes() if p.index == index]
        child.kill()
        world.ring.reap()
    assert epochs == [1, 2, 3]


def test_token_counts_survive_the_reuse_of_a_dead_process_entry(world):
    for _ in range(2):
        child = world.child("ring.register('rollout', 'c'); ring.add(tokens=30); ring.add(tokens=12); say(1); hear()")
        child.hear()
        child.kill()
        world.ring.reap()
    assert world.ring.stats().tokens == 84


def test_a_full_process_table_is_reported_after_freeing_dead_entries(folder):
    ring = Ring.create(str(folder / "small"), slots=1, slot_bytes=64, processes=3, uuid=bytes(16))
    others = [Ring.attach(str(folder / "small")) for _ in range(3)]
    for other in others[:2]:
        other.register("x", "x")
    with pytest.raises(RingFull, match=r"all 2 entries .* raise ring\.processes"):
        others[2].register("x", "x")
    others[0].close()
    assert others[2].register("x", "x") == 1
    ring.close()


def test_entries_of_the_dead_do_not_fill_the_table(folder, world):
    small = Ring.create(str(folder / "small"), slots=1, slot_bytes=64, processes=2, uuid=bytes(16))
    for _ in range(2):
        world.child("Ring.attach(folder + '/small').register('c', 'c'); os.kill(os.getpid(), 9)").dies_by_sigkill()
    assert small.register("me", "me") == 1


def test_a_forked_child_cannot_use_the_handle_or_keep_its_parent_alive(world):
    world.dispatch(1)
    script = """
    ring.register("forker", "forker")
    held = take(State.QUEUED, State.GENERATING)
    if os.fork() == 0:
        try:
            ring.lines()
        except Exception as error:
            say(type(error).__name__)
        hear()  # lives on, as an idle child
    os.waitpid(-1, 0)
    """
    parent = world.child(script)
    assert parent.hear() == "RingClosed"
    parent.process.kill()
    parent.process.wait(timeout=30)
    assert [r.label for r in world.ring.reap()] == ["forker"]
    parent.tell()


def test_slots_wait_until_the_bare_forked_child_of_their_owner_ends(world):
    """It shares the lock of its parent's entry, and nobody can tell what it does: the safe side is to wait for it."""
    world.dispatch(1)
    script = """
    import ctypes
    ring.register("forker", "forker")
    held = take(State.QUEUED, State.GENERATING)
    child = ctypes.CDLL(None).syscall({"x86_64": 57}[os.uname().machine])  # fork(2) without the C library's handlers
    if child == 0:
        hear()
        os._exit(0)
    say(ring.index, child)
    os.waitpid(child, 0)
    """
    if os.uname().machine != "x86_64":
        pytest.skip("the number of the system call is that of x86_64")
    parent = world.child(script)
    index, child = map(int, parent.hear().split())
    pidfd = os.pidfd_open(child)
    parent.process.kill()
    parent.process.wait(timeout=30)
    assert not world.ring.is_dead(index) and world.ring.reap() == []
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)
    assert world.ring.is_dead(index)
    assert [r.label for r in world.ring.reap()] == ["forker"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a pid namespace of its own, in which pids can be chosen")
def test_an_owner_whose_pid_is_another_process_by_now_is_dead(world):
    script = """
    import signal
    r, w = os.pipe()
    owner = os.fork()
    if owner == 0:
        mine = Ring.attach(folder + "/ring")
        os.write(w, b"%d" % mine.register("holder", "holder"))
        signal.pause()
    index = int(os.read(r, 20))

    def forked():
        pid = os.fork()
        return pid or signal.pause()

    def born(pid):
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[19]

    def end(pid):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    at = born(owner)
    while (one := forked()) and born(one) == at:  # times of birth are told in hundredths of a second
        end(one)
    end(one)
    end(owner)
    open("/proc/sys/kernel/ns_last_pid", "w").write(str(owner - 1))
    other = forked()
    say(other == owner, ring.is_dead(index))
    end(other)
    """
    command = ["unshare", "-p", "--fork", "--mount-proc"]
    if subprocess.run([*command, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("no pid namespace can be had here")
    assert world.child(script, prefix=command).hear() == "True True"


def test_a_forked_child_that_touches_an_inherited_view_faults_instead_of_writing(world):
    script = """
    ring.register("forker", "forker")
    dispatch(1)
    [(slot, word)] = take(State.QUEUED, State.GENERATING)
    view = ring.alloc(slot, word, "x", np.int64, 4)
    view[:] = 7
    pid = os.fork()
    if pid == 0:
        view[:] = 9
        os._exit(0)
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), *view)
    """
    assert world.child(script).hear() == f"{-signal.SIGSEGV} 7 7 7 7"
