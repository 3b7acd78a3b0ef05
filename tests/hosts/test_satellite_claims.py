"""Claims of another host between its ring and home's: what home has ended ends there too."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from away import QUICKSTART, Away
from on_a_ring import Keeper

from busrl.hosts import messages as g
from busrl.hosts.desk import NoMemory
from busrl.hosts.satellite import RESEND_S
from busrl.preflight.load import load
from busrl.protocol import messages as m
from busrl.ring import Ring, State
from busrl.roles.answers import read_parts, write_parts, write_segment, write_text
from busrl.states import Fate, HeaderWord


def generate(ring: Ring, segments: int = 1) -> int:
    """What an engine of the host does with the best queued slot: an answer of three tokens a segment; its uid."""
    for segment in range(segments):
        [(slot, word)] = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
        if not segment:
            ring.put(slot, word, "prompt_ids", np.arange(4, dtype=np.int32))
        tokens = np.arange(3, dtype=np.int32) + 3 * segment
        write_segment(ring, slot, word, segment, tokens, np.full(3, -1, np.float32), np.zeros(3, np.uint32))
        write_text(ring, slot, word, segment, "abc")
        ring.set(slot, word, finish=1)
        assert ring.commit_segment(slot, word, segment + 1 == segments)
    return int(ring.line(slot)["uid"])


def no_memory(*args: object) -> None:
    raise NoMemory("/dev/shm is full")


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="busrl.test.", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def keeper(folder: Path) -> Iterator[Keeper]:
    ring = Ring.create(str(folder / "ring"), slots=8, slot_bytes=4096, processes=8, uuid=bytes(16))
    keeper = Keeper(folder)
    for uid in range(6):
        assert keeper.ring.dispatch(
            uid=uid, group=0, admission=0, member=uid, group_size=6, cls=0, task=b'{"prompt": "1"}', prompt_crc=uid,
            max_new_tokens=8, temperature=1.0, version=0, step=0,
        )
    yield keeper
    keeper.close()
    ring.close()


@pytest.fixture
def away(folder: Path, keeper: Keeper) -> Iterator[Away]:
    host = Away.of(folder, keeper)
    yield host
    host.close()


def test_tasks_whose_lease_has_ended_leave_the_queue_of_the_host(away: Away) -> None:
    assert away.claim(3) == 3
    assert len(away.keeper.pass_lease()) == 3
    away.beat()
    assert away.queued() == 0
    away.exchange.report_dropped()
    assert not away.tasks.by_name and away.claim(2) == 2
    assert len(away.keeper.desk.leases.by_task) == 2, "home counts what is alive, and gives no more than is asked for"


def test_a_task_waits_until_the_host_knows_its_version(away: Away) -> None:
    away.keeper.ring.set_header(HeaderWord.VERSION_STEP, 1)
    away.keeper.ring.set_header(HeaderWord.VERSION, 7)
    assert away.claim(2) == 0 and len(away.tasks.waiting) == 2
    away.ring.set_header(HeaderWord.VERSION_STEP, 1)  # as the relay does
    away.ring.set_header(HeaderWord.VERSION, 7)
    away.exchange.dispatch()
    lines = away.ring.lines()
    queued = lines[lines["state"] == State.QUEUED]
    assert queued["version"].tolist() == [7, 7] and queued["step"].tolist() == [1, 1] and not away.tasks.waiting


def test_a_lost_task_in_an_engine_takes_no_room_of_claims(away: Away) -> None:
    assert away.claim(2) == 2
    [(slot, word)] = away.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    away.keeper.pass_lease()
    away.beat()
    assert [task.lost for task in away.tasks.by_name.values()].count(True) == 1 + 1
    away.exchange.report_dropped()
    assert away.claim(3) == 2
    assert len(away.keeper.desk.leases.by_task) == 3, "the third is the sample that the engine still has"
    away.ring.drop(slot, word, Fate.OLD)
    away.exchange.report_dropped()
    away.exchange.dispatch()
    assert len(away.tasks.by_name) == 3 and away.queued() == 3


def test_equal_digests_keep_leases_without_names(away: Away) -> None:
    assert away.claim(3) == 3
    away.beat()
    away.wire.requests.clear()
    for _ in range(30):
        away.keeper.now += 1.0
        assert away.keeper.desk.tick(away.keeper.now) == []
        away.beat()
    claims = [request for request in away.wire.requests if isinstance(request, g.RemoteClaim)]
    assert len(claims) == len(away.wire.requests)
    assert all(claim.digest is not None and not claim.holding for claim in claims)


def test_a_task_lost_on_its_way_is_sent_again(away: Away) -> None:
    with away.wire.losing_replies():
        assert away.claim(2) == 0
    assert len(away.keeper.desk.leases.by_task) == 2
    away.beat()
    away.exchange.dispatch()
    assert len(away.tasks.by_name) == 2 and away.queued() == 2


def test_an_answer_that_home_had_no_memory_for_stays_leased(away: Away) -> None:
    """It is in no digest, so it is named."""
    assert away.claim(2) == 2
    generate(away.ring)
    commit, away.keeper.ledger.commit_answer = away.keeper.ledger.commit_answer, no_memory  # type: ignore[method-assign]
    assert away.exchange.collect() == 1 and len(away.tasks.by_name) == 2
    for _ in range(30):
        away.keeper.now += 1.0
        assert away.keeper.desk.tick(away.keeper.now) == []
        away.beat()
    away.keeper.ledger.commit_answer = commit  # type: ignore[method-assign]
    away.beat()
    assert len(away.tasks.by_name) == 1 and away.keeper.ring.stats().occupancy["GENERATED"] == 1


@pytest.mark.parametrize("by_name", [False, True], ids=["digests alone", "all claims named"])
def test_a_sample_claimed_again_is_drawn_again(away: Away, by_name: bool) -> None:
    """Home's claims end while a cable is out. Both digests are then the same, without the answers that wait here."""
    assert away.claim(2) == 2
    uids = {generate(away.ring), generate(away.ring)}
    with away.wire.losing_requests():
        assert away.exchange.collect() == 2
    assert len(away.keeper.pass_lease()) == 2
    if by_name:
        away.exchange.name_all()
        assert not away.tasks.by_name, "home has given them up: nothing here keeps their slots"
    away.now += 2 * RESEND_S
    assert away.claim(6) == (6 if by_name else 4), "a uid that is still here waits"
    away.beat()
    away.exchange.dispatch()
    stats = away.ring.stats().occupancy
    assert (stats["QUEUED"], stats["TRAINING"]) == (6, 0)
    assert uids <= {task.uid for task in away.tasks.by_name.values()} and not away.tasks.waiting
    again = {generate(away.ring) for _ in range(6)}
    away.exchange.note_answer()
    assert away.exchange.collect() == 6 and uids <= again and not away.tasks.by_name
    assert away.keeper.ring.stats().occupancy["GENERATED"] == 6


def test_a_sample_that_is_given_up_here_is_reported_once(away: Away) -> None:
    assert away.claim(1) == 1
    [(slot, word)] = away.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    away.ring.drop(slot, word, Fate.MALFORMED)
    away.wire.replies.clear()
    assert away.exchange.report_dropped() == 1
    assert not away.tasks.by_name and len(away.tasks.over) == 1
    assert away.exchange.report_dropped() == 0
    assert [getattr(reply, "code", "") for reply in away.wire.replies] == ["done"]


def test_answers_go_home_together_in_a_message_that_claims_as_many_more(away: Away) -> None:
    assert away.claim(2) == 2
    away.exchange.wanted = 3
    generate(away.ring), generate(away.ring, segments=2)
    assert away.exchange.collect() == 2
    batches = [reply for reply in away.wire.replies if isinstance(reply, g.GatewaySettled)]
    assert len(batches) == 1 and len(batches[0].done) == 2
    stats = away.keeper.ring.stats().occupancy
    assert (stats["GENERATED"], stats["GENERATING"], len(away.tasks.by_name)) == (2, 3, 3)
    lengths = [len(away.keeper.ring.get(slot, "tokens", 0)) for slot in (0, 1)]
    assert sorted(lengths) == [3, 6], "segments of this host are one at home"
    away.exchange.dispatch()
    assert away.ring.stats().occupancy == {**away.ring.stats().occupancy, "QUEUED": 3, "TRAINING": 0}


def test_a_host_with_rewards_sends_judged_answers_and_their_parts(folder: Path, keeper: Keeper) -> None:
    away = Away(folder, keeper, load(QUICKSTART), judges=True)
    assert away.claim(2) == 2
    first, second = generate(away.ring), generate(away.ring)
    assert away.exchange.collect() == 0, "nobody has judged them"
    judged, hopeless = away.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=2)
    write_parts(away.ring, *judged, {"half": 0.25})
    away.ring.commit_rewards([judged], [0.5])
    away.ring.drop(*hopeless, Fate.REWARD_RAISED)
    away.exchange.note_answer()
    assert away.exchange.collect() == 1 and away.exchange.report_dropped() == 1 and not away.tasks.by_name
    line = keeper.ring.line(0)
    assert line["state"] == State.REWARDED and line["reward"] == 0.5
    assert read_parts(keeper.ring, 0) == {"half": 0.25}
    assert {int(line["uid"]), second} == {first, second}
    assert keeper.fates[0].get(second) == Fate.REWARD_RAISED
    away.close()


def test_a_dropped_sample_is_reported_though_its_slot_is_taken(away: Away) -> None:
    assert away.claim(1) == 1
    [(slot, word)] = away.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    uid = int(away.ring.line(slot)["uid"])
    away.ring.drop(slot, word, Fate.MALFORMED)
    away.claim(1)
    away.claim(1)
    assert away.exchange.report_dropped() <= 1 and away.keeper.fates[0].get(uid) == Fate.MALFORMED
    assert uid not in {task.uid for task in away.tasks.by_name.values()}


def test_an_unreadable_answer_is_handed_back_alone(away: Away) -> None:
    assert away.claim(2) == 2
    generate(away.ring)
    [(slot, word)] = away.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    assert away.ring.commit_segment(slot, word, True), "it has no tensors"
    assert away.exchange.collect() == 2 and not away.tasks.by_name
    assert len(away.problems) == 1 and "cannot be read" in away.problems[0]
    stats = away.keeper.ring.stats().occupancy
    assert (stats["GENERATED"], stats["QUEUED"]) == (1, 5)


def test_a_host_whose_name_a_later_start_has_taken_is_replaced(away: Away) -> None:
    away.keeper.ask("gpu-0", g.RemoteJoin(life=2, role="host"))
    away.beat()
    assert "replaced" in away.problems


def test_messages_to_an_earlier_start_of_the_host_change_nothing(away: Away) -> None:
    away.exchange.receive(g.GatewayTasks(life=7, tasks=[g.Task("0.1.5", 0, 1, 5, "{}")]))
    away.exchange.receive(m.Goodbye(reason="of no life"))
    assert not away.tasks.by_name and not away.problems
