"""Claims of another host between its ring and home's: what home has ended ends there too."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from on_a_ring import Keeper

from busrl.hosts import messages as g
from busrl.hosts.desk import NoMemory
from busrl.hosts.holdings import AnswerReader
from busrl.hosts.satellite import NAME_AFTER, RESEND_S, Satellite
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.protocol import messages as m
from busrl.ring import Fates, Ring, State
from busrl.roles.answers import read_parts, write_parts, write_segment, write_text
from busrl.states import Fate, HeaderWord

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
ROWS = 4


class Away(Satellite):
    """A satellite on a ring of its own, whose messages reach the keeper at once and are answered at once."""

    def __init__(self, folder: Path, keeper: Keeper, config: Path = QUICKSTART, here: str = "", *more: str) -> None:
        self.keeper, self.answers, self.asked = keeper, list[m.Message](), list[g.Remote]()
        self.topology = replace(load(config, [f"generation.max_batch={ROWS}", "groups.size=2", *more]), here=here)
        self.ring = Ring.create(str(folder / "away"), slots=16, slot_bytes=4096, processes=8, uuid=bytes(16))
        self.ring.register("satellite", "satellite")
        self.fates, self.validate_fates = (
            Fates(str(folder / name), create=True, capacity=1 << 16) for name in ("away.f", "away.v")
        )
        self.ring.bind_fates(self.fates, self.validate_fates)
        self.source = SimpleNamespace(life=1, name="gpu-0")  # type: ignore[assignment]
        self.home = SimpleNamespace(heartbeat=lambda *said: None, send=lambda message: None)  # type: ignore[assignment]
        self.paths = RunPaths.of(folder)
        self.begin()
        self.joined, self.request = True, 0
        self.reader = AnswerReader(self.ring, self.reader.plays, judges=self.reader.plays)
        keeper.ask("gpu-0", g.RemoteJoin(life=1, role="host"))

    def claim(self, wanted: int) -> int:
        """Claim as `_claim` does, but for so many; how many slots are queued here then."""
        living = self.tasks.names()
        self._ask(g.RemoteClaim(life=1, capacity=len(living) + wanted, holding=living))
        self._dispatch()
        return self.ring.stats().occupancy["QUEUED"]

    def beat(self) -> None:
        """As many rounds of its timers as it takes to be sure of what home has."""
        for _ in range(NAME_AFTER + 1):
            self._next_presence = self._next_claim = 0.0
            self._send_due()

    def _ask(self, message: g.Remote) -> None:
        self.asked.append(message)
        self.request += 1
        message.req = self.request
        for answer in self.keeper.ask("gpu-0", message):
            self.answers.append(answer)
            answer.life = 1  # type: ignore[attr-defined]
            self._from_home(answer)


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
def away() -> Iterator[Away]:
    folder = Path(tempfile.mkdtemp(prefix="busrl.test.", dir="/dev/shm"))
    ring = Ring.create(str(folder / "ring"), slots=8, slot_bytes=4096, processes=8, uuid=bytes(16))
    keeper = Keeper(folder)
    for uid in range(6):
        assert keeper.ring.dispatch(
            uid=uid, group=0, admission=0, member=uid, group_size=6, cls=0, task=b'{"prompt": "1"}', prompt_crc=uid,
            max_new_tokens=8, temperature=1.0, version=0, step=0,
        )
    made = Away(folder, keeper)
    yield made
    made.ring.close()
    keeper.close()
    ring.close()
    shutil.rmtree(folder)


def test_tasks_whose_lease_has_ended_leave_the_queue_of_the_host(away: Away) -> None:
    assert away.claim(3) == 3
    assert len(away.keeper.pass_lease()) == 3
    away.beat()
    assert away.ring.stats().occupancy["QUEUED"] == 0
    away._report_dropped()
    assert not away.tasks.held and away.claim(2) == 2
    assert len(away.keeper.desk.leases.by_task) == 2, "home counts what is alive, and gives no more than is asked for"


def test_a_task_waits_until_the_host_knows_its_version(away: Away) -> None:
    away.keeper.ring.set_header(HeaderWord.VERSION_STEP, 1)
    away.keeper.ring.set_header(HeaderWord.VERSION, 7)
    assert away.claim(2) == 0 and len(away.tasks.waiting) == 2
    away.ring.set_header(HeaderWord.VERSION_STEP, 1)  # as the relay does
    away.ring.set_header(HeaderWord.VERSION, 7)
    away._dispatch()
    lines = away.ring.lines()
    queued = lines[lines["state"] == State.QUEUED]
    assert queued["version"].tolist() == [7, 7] and queued["step"].tolist() == [1, 1] and not away.tasks.waiting


def test_a_lost_task_in_an_engine_takes_no_room_of_claims(away: Away) -> None:
    assert away.claim(2) == 2
    [(slot, word)] = away.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    away.keeper.pass_lease()
    away.beat()
    assert [one.lost for one in away.tasks.held.values()].count(True) == 1 + 1
    away._report_dropped()
    assert away.claim(3) == 2
    assert len(away.keeper.desk.leases.by_task) == 3, "the third is the sample that the engine still has"
    away.ring.drop(slot, word, Fate.OLD)
    away._report_dropped()
    away._dispatch()
    assert len(away.tasks.held) == 3 and away.ring.stats().occupancy["QUEUED"] == 3


def test_equal_digests_keep_leases_without_names(away: Away) -> None:
    assert away.claim(3) == 3
    away.beat()
    away.asked.clear()
    for _ in range(30):
        away.keeper.now += 1.0
        assert away.keeper.desk.tick(away.keeper.now) == []
        away.beat()
    assert {type(one) for one in away.asked} == {g.RemoteClaim}
    assert all(one.digest is not None and not one.holding for one in away.asked)  # type: ignore[attr-defined]


def test_a_task_lost_on_its_way_is_sent_again(away: Away) -> None:
    away.beat()
    assert len(away.keeper.claim("gpu-0", capacity=2, req=1 << 40)) == 2, "the bus loses this answer"
    away.request = 1 << 40
    away.beat()
    away._dispatch()
    assert len(away.tasks.held) == 2 and away.ring.stats().occupancy["QUEUED"] == 2


def test_an_answer_that_home_had_no_memory_for_stays_leased(away: Away) -> None:
    """It is in no digest, so it is named."""
    assert away.claim(2) == 2
    generate(away.ring)
    commit, away.keeper.ledger.commit_answer = away.keeper.ledger.commit_answer, no_memory  # type: ignore[method-assign]
    assert away._collect() == 1 and len(away.tasks.held) == 2
    for _ in range(30):
        away.keeper.now += 1.0
        assert away.keeper.desk.tick(away.keeper.now) == []
        away.beat()
    away.keeper.ledger.commit_answer = commit  # type: ignore[method-assign]
    away._send([one for one in away.tasks.held.values() if one.ended])
    assert len(away.tasks.held) == 1 and away.keeper.ring.stats().occupancy["GENERATED"] == 1


@pytest.mark.parametrize("named", [False, True], ids=["digests alone", "all claims named"])
def test_a_sample_claimed_again_is_drawn_again(
    away: Away, named: bool
) -> None:
    """Home's claims end while a cable is out. Both digests are then the same, without the answers that wait here."""
    assert away.claim(2) == 2
    uids = {generate(away.ring), generate(away.ring)}
    lose, away._ask = away._ask, lambda message: None  # type: ignore[method-assign]
    assert away._collect() == 2
    away._ask = lose  # type: ignore[method-assign]
    assert len(away.keeper.pass_lease()) == 2
    if named:
        away._name_all()
        assert not away.tasks.held, "home has given them up: nothing here keeps their slots"
    for one in away.tasks.held.values():
        one.sent_at -= 2 * RESEND_S
    assert away.claim(6) == (6 if named else 4), "a uid that is still here waits"
    away.differing = 0
    away.beat()
    away._dispatch()
    stats = away.ring.stats().occupancy
    assert (stats["QUEUED"], stats["TRAINING"]) == (6, 0)
    assert uids <= {one.uid for one in away.tasks.held.values()} and not away.tasks.waiting
    again, away.rung = {generate(away.ring) for _ in range(6)}, True
    assert away._collect() == 6 and uids <= again and not away.tasks.held
    assert away.keeper.ring.stats().occupancy["GENERATED"] == 6


def test_a_sample_that_is_given_up_here_is_reported_once(away: Away) -> None:
    assert away.claim(1) == 1
    [(slot, word)] = away.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    away.ring.drop(slot, word, Fate.MALFORMED)
    assert away._report_dropped() == 1
    assert not away.tasks.held and len(away.tasks.over) == 1
    assert away._report_dropped() == 0
    assert [getattr(one, "code", "") for one in away.answers].count("done") == 1


def test_answers_go_home_together_in_a_message_that_claims_as_many_more(away: Away) -> None:
    assert away.claim(2) == 2
    away.wanted = 3
    generate(away.ring), generate(away.ring, segments=2)
    assert away._collect() == 2
    batches = [one for one in away.answers if isinstance(one, g.GatewaySettled)]
    assert len(batches) == 1 and len(batches[0].done) == 2
    stats = away.keeper.ring.stats().occupancy
    assert (stats["GENERATED"], stats["GENERATING"], len(away.tasks.held)) == (2, 3, 3)
    lengths = [len(away.keeper.ring.get(slot, "tokens", 0)) for slot in (0, 1)]
    assert sorted(lengths) == [3, 6], "segments of this host are one at home"
    away._dispatch()
    assert away.ring.stats().occupancy == {**away.ring.stats().occupancy, "QUEUED": 3, "TRAINING": 0}


def test_a_host_with_rewards_sends_judged_answers_and_their_parts(away: Away) -> None:
    away.reader = AnswerReader(away.ring, plays=False, judges=True)
    assert away.claim(2) == 2
    first, second = generate(away.ring), generate(away.ring)
    assert away._collect() == 0, "nobody has judged them"
    [one, other] = away.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=2)
    write_parts(away.ring, *one, {"half": 0.25})
    away.ring.commit_rewards([one], [0.5])
    away.ring.drop(*other, Fate.REWARD_RAISED)
    away.rung = True
    assert away._collect() == 1 and away._report_dropped() == 1 and not away.tasks.held
    line = away.keeper.ring.line(0)
    assert line["state"] == State.REWARDED and line["reward"] == 0.5
    assert read_parts(away.keeper.ring, 0) == {"half": 0.25}
    assert {int(line["uid"]), second} == {first, second}
    assert away.keeper.fates[0].get(second) == Fate.REWARD_RAISED


def test_a_dropped_sample_is_reported_though_its_slot_is_taken(away: Away) -> None:
    assert away.claim(1) == 1
    [(slot, word)] = away.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    uid = int(away.ring.line(slot)["uid"])
    away.ring.drop(slot, word, Fate.MALFORMED)
    away.claim(1)
    away.claim(1)
    assert away._report_dropped() <= 1 and away.keeper.fates[0].get(uid) == Fate.MALFORMED
    assert uid not in {one.uid for one in away.tasks.held.values()}


def test_an_unreadable_answer_is_handed_back_alone(away: Away) -> None:
    away.warn = lambda *said, **more: None  # type: ignore[method-assign]
    assert away.claim(2) == 2
    generate(away.ring)
    [(slot, word)] = away.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    assert away.ring.commit_segment(slot, word, True), "it has no tensors"
    assert away._collect() == 2 and not away.tasks.held
    stats = away.keeper.ring.stats().occupancy
    assert (stats["GENERATED"], stats["QUEUED"]) == (1, 5)
