"""Groups as they follow from lines and fates: members, re-rolls, resolved, usable, finished."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.scheduling.groups import NOT_STARTED, UNKNOWN, GroupScanner, least_survivors
from busrl.states import uid_of

FREE, RESERVED, QUEUED, GENERATING, GENERATED, REWARDING, REWARDED, TRAINING, DROPPED = range(9)
G = 4


@pytest.fixture
def ring(table: Any) -> Any:
    return table(G, 40)


def test_a_complete_group_is_resolved_usable_and_lists_its_slots_by_member(ring: Any) -> None:
    slots = [ring.put(3, member, state=REWARDED, reward=member, step=7) for member in (2, 0, 3, 1)]
    view = ring.view()
    assert (view.draws.tolist(), view.resolved.tolist(), view.usable.tolist()) == ([3], [True], [True])
    assert view.slots_of(3) == [slots[1], slots[3], slots[0], slots[2]]
    assert (view.oldest_step[0], view.flat[0], view.free_slots, len(view)) == (7, False, 36, 1)
    with pytest.raises(KeyError, match="group 2 is not open"):
        view.slots_of(2)


@pytest.mark.parametrize("state", [QUEUED, GENERATING, GENERATED, REWARDING, DROPPED])
def test_one_member_on_its_way_keeps_a_group_unresolved(ring: Any, state: int) -> None:
    ring.put_group(0, [1.0, 0.0, 1.0])
    ring.put(0, 3, state=state)
    view = ring.view()
    assert not view.resolved[0] and view.running[0] == 1 and view.oldest_unresolved() == 0


def test_members_that_were_never_dispatched_are_due_under_the_groups_admission_index(ring: Any) -> None:
    ring.put(5, 1, admission=9)
    assert [(t.uid, t.draw, t.attempt, t.member, t.admission) for t in ring.view().todo] == [
        (uid_of(5, 0, member, G), 5, 0, member, 9) for member in (0, 2, 3)
    ]


@pytest.mark.parametrize("fate", "PRHMX")
def test_an_accident_is_rerolled_once_and_the_reroll_takes_the_members_place(ring: Any, fate: str) -> None:
    slots = ring.put_group(2, [0.0, 1.0, 0.5, 0.25], admission=8)
    ring.end(slots[1], fate)
    view = ring.view()
    assert [(t.uid, t.attempt, t.member, t.admission) for t in view.todo] == [(uid_of(2, 1, 1, G), 1, 1, 8)]
    assert not view.resolved[0]
    again = ring.put(2, 1, attempt=1, state=REWARDED, admission=8)
    view = ring.view()
    assert view.usable[0] and view.slots_of(2) == [slots[0], again, slots[2], slots[3]]
    ring.end(again, fate)
    view = ring.view()
    assert view.resolved[0] and view.usable[0] and not view.todo and view.survivors[0] == 3


def test_below_g_min_survivors_a_resolved_group_is_not_usable(ring: Any) -> None:
    ring.put_group(0, [1.0, 0.0])
    for member in (2, 3):
        for attempt in (0, 1):
            ring.end(ring.put(0, member, attempt=attempt), "R")
    view = ring.view()
    assert view.resolved[0] and not view.usable[0] and view.survivors[0] == 2


@pytest.mark.parametrize("fate", "foielsT")
def test_a_group_that_is_ending_takes_no_new_member(ring: Any, fate: str) -> None:
    slots = ring.put_group(0, [1.0, 0.0, 0.5])
    ring.end(slots[0], fate)
    ring.end(slots[1], "R")
    view = ring.view()
    assert view.resolved[0] and not view.usable[0] and not view.todo
    assert chr(view.closed_by[0]) == fate


def test_an_unused_seat_closes_no_group_and_is_not_rolled_again(ring: Any) -> None:
    slots = ring.put_group(0, [1.0, 0.0, 0.5], admission=2)
    ring.end(ring.put(0, 3), "u")
    view = ring.view()
    assert view.resolved[0] and view.usable[0] and not view.todo and view.closed_by[0] == 0
    assert view.slots_of(0) == slots
    ring.end(slots[0], "P")
    assert [todo.uid for todo in ring.view().todo] == [uid_of(0, 1, 0, G)]


@pytest.mark.parametrize(("unused", "lost", "usable"), [(1, 0, True), (1, 1, False), (2, 0, True), (3, 0, False)])
def test_survivors_are_counted_against_the_members_that_took_part(
    ring: Any, unused: int, lost: int, usable: bool
) -> None:
    for member in range(unused):
        ring.end(ring.put(0, member), "u")
    for member in range(unused, unused + lost):
        for attempt in (0, 1):
            ring.end(ring.put(0, member, attempt=attempt), "R")
    for member in range(unused + lost, G):
        ring.put(0, member, state=REWARDED, reward=member)
    view = ring.view()
    assert (view.resolved[0], view.usable[0]) == (True, usable)


def test_groups_that_no_seat_was_used_in_end_by_themselves(ring: Any) -> None:
    for member in range(G):
        ring.end(ring.put(0, member), "u")
    view = ring.view()
    assert len(view) == 0 and len(view.ended_fates) == 0, "a new scanner does not look at it again"


def test_a_finished_group_leaves_the_view_and_lost_ones_keep_their_index(ring: Any) -> None:
    scanner = GroupScanner(ring.fates, G)
    slots = ring.put_group(0, [1.0, 0.0, 0.5, 0.1], admission=4)
    lost = [ring.put(1, member, admission=5) for member in range(G)]
    scanner.scan(ring.lines.copy())
    for slot in slots:
        ring.end(slot, "T")
    for slot in lost:
        ring.end(slot, "P")
    view = scanner.scan(ring.lines.copy())
    assert view.draws.tolist() == [1] and {t.admission for t in view.todo} == {5}
    assert {t.admission for t in ring.view().todo} == {UNKNOWN}  # a new scheduler never saw its lines


def test_age_counts_from_admission_time_in_the_queue_included(ring: Any) -> None:
    ring.put(0, 0, state=GENERATING, step=6)
    assert ring.view().oldest_step[0] == 6
    ring.put(0, 2, state=QUEUED, segs=1, step=4)
    assert ring.view().oldest_step[0] == 4
    ring.put(0, 1, step=1)
    assert ring.view().oldest_step[0] == 1
    ring.lines["state"][:] = 0
    assert ring.view().oldest_step[0] == NOT_STARTED


def test_other_classes_and_validation_uids_are_no_groups(ring: Any) -> None:
    ring.put(0, 0, cls=1)
    ring.fates[:] = 0
    slot = ring.put(1, 0)
    ring.lines["uid"][slot] |= np.uint64(1 << 62)
    ring.fates[:] = 0
    view = ring.view()
    assert len(view) == 0 and view.unopened(3).tolist() == [0, 1, 2] and view.free_slots == 38


def test_a_slot_under_reservation_does_not_revive_its_last_tenant(ring: Any) -> None:
    for slot in ring.put_group(0, [0.0, 1.0, 0.5, 0.5]):
        ring.end(slot, "T")
    ring.lines["state"][0] = RESERVED
    view = ring.view()
    assert (len(view), view.free_slots) == (0, 39)
    ring.lines["uid"][0] = uid_of(1, 0, 0, G)
    ring.fates[uid_of(1, 0, 0, G)] = ord("D")
    view = ring.view()
    assert (view.draws.tolist(), view.running.tolist(), view.due.tolist()) == ([1], [1], [3])


def test_unopened_draws_come_in_order_with_the_holes_that_a_policy_left(ring: Any) -> None:
    for draw in (1, 4):
        ring.put(draw, 0)
    assert ring.view().unopened(5).tolist() == [0, 2, 3, 5, 6]


def test_a_new_scanner_finds_its_place_behind_many_finished_groups(ring: Any) -> None:
    ring.fates.reshape(-1, 2, G)[:3000, 0] = ord("T")
    ring.put(3001, 0)
    view = ring.view()
    assert view.draws.tolist() == [3001] and view.unopened(2).tolist() == [3000, 3002]


MEMBER = st.sampled_from(
    ["", "queued", "rewarded", "training", *"TRPfi", *["R+" + x for x in ("", "queued", "rewarded", *"TRf")]]
)


@settings(max_examples=150)
@given(groups=st.lists(st.lists(MEMBER, min_size=G, max_size=G), min_size=1, max_size=6))
def test_the_view_agrees_with_a_plain_reading_of_the_rules(table: Any, groups: list[list[str]]) -> None:
    ring = table(G, 60)
    states = {"queued": QUEUED, "rewarded": REWARDED, "training": TRAINING}

    def place(draw: int, member: int, attempt: int, what: str) -> None:
        if what in states:
            ring.put(draw, member, attempt=attempt, state=states[what])
        elif what:
            ring.end(ring.put(draw, member, attempt=attempt), what)

    want = {}
    for draw, members in enumerate(groups):
        last = []
        for member, what in enumerate(members):
            first, plus, second = what.partition("+")
            place(draw, member, 0, first)
            place(draw, member, 1, second if plus else "")
            last.append((second if plus or first in ("R", "P") else first, bool(plus) or first in ("R", "P")))
        want[draw] = expected(members, last)
    view = ring.view()
    assert view.draws.tolist() == [draw for draw, is_open in want.items() if is_open]
    for i, draw in enumerate(view.draws.tolist()):
        due, running, survivors, resolved, usable = want[draw]  # type: ignore[misc]
        assert sorted(t.member for t in view.todo if t.draw == draw) == due
        assert (view.due[i], view.running[i], view.survivors[i]) == (len(due), running, survivors)
        assert (view.resolved[i], view.usable[i], len(view.slots_of(draw))) == (resolved, usable, survivors)


def expected(members: list[str], last: list[tuple[str, bool]]) -> tuple[list[int], int, int, bool, bool] | None:
    """What the ledger's rules say of one group, member by member; None if it is not open."""
    if not any(members):
        return None
    now = [what for what, _ in last]
    closed = any(what in ("T", "f", "i") for what in now)
    due = [] if closed else [m for m, what in enumerate(now) if what == ""]
    running, survivors = now.count("queued"), now.count("rewarded") + now.count("training")
    resolved = not due and not running
    if resolved and not survivors:
        return None
    return due, running, survivors, resolved, resolved and not closed and survivors >= least_survivors(G)


@pytest.mark.parametrize("state", [QUEUED, GENERATING, GENERATED, REWARDING, REWARDED, TRAINING, DROPPED])
def test_a_sample_in_a_slot_without_a_fate_is_counted_as_unrecorded(
    ring: Any, state: int
) -> None:
    ring.put_group(0, [1.0, 0.0, 0.5, 0.25])
    ring.put(1, 2, state=state)
    assert ring.view().unrecorded == 0
    ring.fates[uid_of(1, 0, 2, G)] = 0
    assert ring.view().unrecorded == 1
    ring.put(2, 0, state=RESERVED)
    ring.fates[uid_of(2, 0, 0, G)] = 0  # its dispatch is being written
    assert ring.view().unrecorded == 1


@settings(max_examples=60)
@given(data=st.data())
def test_a_scanner_skipping_ended_groups_sees_what_a_full_scanner_sees(
    data: Any, table: Any
) -> None:
    codes = st.sampled_from([*b"TTTT fTTT TPTT DTTT TTTD PPPP".split(), bytes(4), b"D" + bytes(3), b"o" + bytes(3)])
    rows = data.draw(st.lists(st.tuples(codes, st.sampled_from([bytes(4), b"\0T\0\0", b"\0D\0\0"])), max_size=40))
    fates = np.frombuffer(b"".join(first + second for first, second in rows) + bytes(3 * 2 * G), np.uint8).copy()
    lines = table(G, 8).lines
    views = []
    for skips in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("busrl.scheduling.groups.LOOKAHEAD", 4)
            if not skips:
                patched.setattr(GroupScanner, "_skip_ended", lambda self: None)
            views.append(GroupScanner(fates, G, horizon=4).scan(lines))
    first, other = views
    assert first.draws.tolist() == other.draws.tolist() and first.due.tolist() == other.due.tolist()
    assert first.unopened(5).tolist() == other.unopened(5).tolist()
    assert first.closed_by.tolist() == other.closed_by.tolist()


def test_a_start_beside_a_long_table_of_ended_groups_takes_little_memory(table: Any) -> None:
    fates = np.zeros((1 << 20, 2 * G), np.uint8)
    fates[:, :G] = ord("T")
    fates[-3, 0] = ord("D")
    tracemalloc.start()
    view = GroupScanner(fates.reshape(-1), G).scan(table(G, 8).lines)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert view.draws.tolist() == [(1 << 20) - 3]
    assert peak < fates.nbytes / 4, peak


def test_a_look_copies_the_fates_of_no_group_that_has_ended(table: Any) -> None:
    ring, ended = table(16, 4), 100_000
    ring.fates = np.zeros(32 * (ended + 8192), np.uint8)
    ring.fates.reshape(-1, 2, 16)[1:ended, 0] = ord("T")
    ring.put(0, 0)
    scanner = GroupScanner(ring.fates, 16)
    scanner.scan(ring.lines)
    tracemalloc.start()
    view = scanner.scan(ring.lines)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert view.draws.tolist() == [0] and most < 16 * ended


def test_ended_groups_are_told_once_with_the_last_fate_of_members(ring: Any) -> None:
    scanner = GroupScanner(ring.fates, G)

    def ended() -> list[tuple[int, bytes]]:
        view = scanner.scan(ring.lines.copy())
        return list(zip(view.ended_draws.tolist(), map(bytes, view.ended_fates)))

    first, second = ring.put_group(0, [1.0, 0.0, 1.0, 0.0]), ring.put_group(1, [0.5] * G)
    assert ended() == []
    ring.end(first[2], "R")
    assert ended() == [], "the member that raised is rolled once more"
    again = ring.put(0, 2, attempt=1, state=REWARDED)
    for slot in (*first[:2], first[3], again):
        ring.end(slot, "f")
    for slot in second:
        ring.end(slot, "T")
    assert ended() == [(0, b"ffff"), (1, b"TTTT")] and ended() == []
    for slot in ring.put_group(2, [0.5] * G):
        ring.end(slot, "f")
    assert ended() == [(2, b"ffff")], "numbers are of the run, whatever lies behind"
