"""Routes from workers that do not map the ring: hosts, single workers and their calls; bad ones are refused."""

from __future__ import annotations

import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from routed_ring import SHAPE, routes_at

from busrl.data.episodes import EpisodeLimits
from busrl.data.routing import Routed
from busrl.hosts import holdings
from busrl.hosts import messages as g
from busrl.hosts.desk import Desk, Refused, tensor, zipped
from busrl.hosts.holdings import routes_of, tensors_of
from busrl.hosts.ledgers import BothLedgers, CallLedger, EpisodeBounds, RingLedger, received_episode
from busrl.protocol.codec import encode
from busrl.ring import Ring, State
from busrl.ring.calls import Caller, ModelCall
from busrl.roles.answers import write_segment, write_text
from busrl.roles.episodes import write_episode
from busrl.system.clocks import Tally

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hosts"))

from away import Away
from in_memory import answer_to, settings
from on_a_ring import CUTS, LEASE_S, Keeper
from test_routed_episodes import grown

ROUTED = Routed(SHAPE, prompts=True)
PROMPT, TOKENS = 4, 3  # of the answers that the helpers make


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="busrl.test.", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def dispatch(ring: Ring, uid: int, cls: int = 0) -> None:
    assert ring.dispatch(
        uid=uid, group=0, admission=0, member=0, group_size=6, cls=cls, task=b'{"prompt": "1"}', prompt_crc=1,
        max_new_tokens=8, temperature=1.0, version=0, step=0,
    )


@pytest.fixture
def keeper(folder: Path) -> Iterator[Keeper]:
    """The keeper of a run with routes."""
    ring = Ring.create(str(folder / "ring"), slots=8, slot_bytes=4096, processes=8, uuid=bytes(16))
    keeper = Keeper(folder)
    keeper.ledger.routed = ROUTED
    keeper.desk.welcome = msgspec.structs.replace(keeper.desk.welcome, routes=[2, 3, 8])
    yield keeper
    keeper.close()
    ring.close()


# -- another host -----


@pytest.fixture
def away(folder: Path, keeper: Keeper) -> Iterator[Away]:
    host = Away.of(folder, keeper)
    host.exchange.reader.routed = True
    yield host
    host.close()


def generate(ring: Ring, segments: int, routed: bool = True) -> int:
    """What an engine of the host does with the best queued slot; its uid."""
    for segment in range(segments):
        [(slot, word)] = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
        uid, begin = int(ring.line(slot)["uid"]), PROMPT - 1 + 2 * segment
        if not segment:
            ring.put(slot, word, "prompt_ids", np.arange(PROMPT, dtype=np.int32))
            if routed:
                ring.put(slot, word, "prompt_routes", routes_at(uid & 7, 0, PROMPT - 1))
        write_segment(
            ring, slot, word, segment, np.arange(2, dtype=np.int32), np.full(2, -1, np.float32),
            np.zeros(2, np.uint32), routes_at(uid & 7, begin, begin + 2) if routed else None,
        )
        write_text(ring, slot, word, segment, "ab")
        ring.set(slot, word, finish=1)
        assert ring.commit_segment(slot, word, segment + 1 == segments)
    return uid


@pytest.mark.parametrize("segments", [1, 3])
def test_routes_of_a_host_arrive_as_they_stood_in_its_slot(away: Away, keeper: Keeper, segments: int) -> None:
    dispatch(keeper.ring, 5)
    assert away.claim(1) == 1
    uid = generate(away.ring, segments)
    away.exchange.collect()
    [slot] = (keeper.ring.lines()["uid"] == uid).nonzero()[0].tolist()
    assert keeper.ring.line(slot)["state"] == State.GENERATED and not away.problems
    rows = PROMPT - 1 + 2 * segments
    assert np.array_equal(keeper.ring.get(slot, "prompt_routes"), routes_at(5, 0, PROMPT - 1))
    assert np.array_equal(keeper.ring.get(slot, "routes", 0), routes_at(5, PROMPT - 1, rows))


def test_compressed_routes_of_a_host_arrive_as_they_stood_in_its_slot(away: Away, keeper: Keeper) -> None:
    """Those that compression makes no smaller travel as they are."""
    away.exchange.reader.zips = True
    dispatch(keeper.ring, 5)
    assert away.claim(1) == 1
    [(slot, word)] = away.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    routes, of_prompt = np.repeat(routes_at(5, 0, 1), 8, 0), routes_at(5, 0, PROMPT - 1)
    away.ring.put(slot, word, "prompt_ids", np.arange(PROMPT, dtype=np.int32))
    away.ring.put(slot, word, "prompt_routes", of_prompt)
    ids, zeros = np.arange(8, dtype=np.int32), np.zeros(8, np.uint32)
    write_segment(away.ring, slot, word, 0, ids, zeros.astype(np.float32), zeros, routes)
    write_text(away.ring, slot, word, 0, "ab")
    away.ring.set(slot, word, finish=1)
    assert away.ring.commit_segment(slot, word, True)
    away.exchange.collect()
    [pieces] = [request.routes[0] for request in away.wire.requests if isinstance(request, g.RemoteBatch)]
    assert pieces["routes"].dtype == "uint8/zlib" and len(pieces["routes"].data) < routes.nbytes
    assert pieces["prompt_routes"].dtype == "uint8"
    [slot] = (keeper.ring.lines()["uid"] == 5).nonzero()[0].tolist()
    assert keeper.ring.line(slot)["state"] == State.GENERATED and not away.problems
    assert np.array_equal(keeper.ring.get(slot, "routes", 0), routes)
    assert np.array_equal(keeper.ring.get(slot, "prompt_routes"), of_prompt)


@pytest.fixture
def compressed(away: Away, monkeypatch: pytest.MonkeyPatch) -> list[g.Tensor]:
    """Counts the pieces that a host compresses; each takes a second of its clock."""
    pieces: list[g.Tensor] = []

    def slowly(piece: g.Tensor) -> g.Tensor:
        pieces.append(piece)
        away.now += 1.0
        return zipped(piece)

    monkeypatch.setattr(holdings, "zipped", slowly)
    away.exchange.reader.zips = True
    return pieces


def test_a_host_that_compresses_many_answers_keeps_its_leases(
    away: Away, keeper: Keeper, compressed: list[g.Tensor]
) -> None:
    for uid in range(6):
        dispatch(keeper.ring, uid)
    away.claim(6)
    for _ in range(6):
        generate(away.ring, 1)
    while away.tasks.unfinished:
        before = away.now
        away.exchange.collect()
        away.exchange.send_due()
        keeper.now += away.now - before
        assert away.now - before <= 2.0 and keeper.desk.tick(keeper.now) == []
    assert len(compressed) == 2 * 6 and keeper.ring.stats().occupancy["GENERATED"] == 6 and not away.problems


def test_answers_that_are_sent_again_are_not_compressed_again(
    away: Away, keeper: Keeper, compressed: list[g.Tensor]
) -> None:
    dispatch(keeper.ring, 5)
    away.claim(1)
    generate(away.ring, 1)
    with away.wire.losing_requests():
        away.exchange.collect()
    away.beat()
    away.beat()
    batches = [request for request in away.wire.requests if isinstance(request, g.RemoteBatch)]
    assert len(batches) > 1 and batches[0].routes == batches[-1].routes and len(compressed) == 2
    assert keeper.ring.stats().occupancy["GENERATED"] == 1 and not away.tasks.by_name


def test_a_host_that_leaves_compresses_nothing_more(
    away: Away, keeper: Keeper, compressed: list[g.Tensor]
) -> None:
    for uid in range(3):
        dispatch(keeper.ring, uid)
    away.claim(3)
    for _ in range(3):
        generate(away.ring, 1)
    away.exchange.leave("stopped")
    assert not compressed and keeper.ring.stats().occupancy["GENERATED"] == 3


def test_answers_of_validation_travel_without_routes(away: Away, keeper: Keeper) -> None:
    dispatch(keeper.ring, 1 << 62, cls=1)
    assert away.claim(1) == 1
    generate(away.ring, 1, routed=False)
    away.exchange.collect()
    assert keeper.ring.stats().occupancy["GENERATED"] == 1 and not away.problems


def test_a_host_without_routes_is_told_what_is_missing(away: Away, keeper: Keeper) -> None:
    dispatch(keeper.ring, 5)
    away.claim(1)
    generate(away.ring, 1, routed=False)
    away.exchange.collect()
    assert keeper.ring.stats().occupancy["GENERATED"] == 0
    [worker] = keeper.desk.tally.plain().values()
    assert "routes is missing" in str(worker)


# -- a worker by itself -----


def routes_for(uid: int, **changed: Any) -> dict[str, g.Tensor]:
    pieces = {
        "routes": routes_at(uid, PROMPT - 1, PROMPT - 1 + TOKENS), "prompt_routes": routes_at(uid, 0, PROMPT - 1),
    }
    return {name: tensor(array) for name, array in {**pieces, **changed}.items() if array is not None}


def routed_answer(task: str, **changed: Any) -> g.Remote:
    """A sound answer with these fields; without routes an ordinary one."""
    plain = answer_to(task)
    fields = {name: getattr(plain, name) for name in plain.__struct_fields__}
    return g.RemoteRouted(**{**fields, **changed}) if "routes" in changed else plain


def test_a_worker_that_announces_routes_may_join_and_answer(keeper: Keeper) -> None:
    dispatch(keeper.ring, 3)
    [welcome] = keeper.ask("gen", g.RemoteJoin(life=1, role="rollout", routes=True))
    assert isinstance(welcome, g.GatewayWelcome) and welcome.routes == [2, 3, 8]
    [task] = keeper.claim("gen")
    assert task.routes_from == 0
    [done] = keeper.ask("gen", routed_answer(task.task, **routes_for(3)))
    assert done.code == "done"
    assert np.array_equal(keeper.ring.get(0, "routes", 0), routes_at(3, PROMPT - 1, PROMPT - 1 + TOKENS))
    assert np.array_equal(keeper.ring.get(0, "prompt_routes"), routes_at(3, 0, PROMPT - 1))


def test_a_rollout_that_does_not_announce_routes_is_refused(keeper: Keeper) -> None:
    [answer] = keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    assert isinstance(answer, g.GatewayAnswer) and answer.code == "refused" and "routes = true" in answer.text
    [welcome] = keeper.ask("judge", g.RemoteJoin(life=1, role="reward"))
    assert isinstance(welcome, g.GatewayWelcome)


@pytest.mark.parametrize(("changed", "said"), [
    ({"routes": None}, "routes is missing"),
    ({"prompt_routes": None}, "prompt_routes is missing"),
    ({"routes": routes_at(3, 3, 5)}, "routes: routes [2, 2, 3]: must be [3, 2, 3]"),
    ({"prompt_routes": routes_at(3, 0, 4)}, "prompt_routes: routes [4, 2, 3]: must be [3, 2, 3]"),
    ({"routes": routes_at(3, 3, 6).astype(np.uint16)}, "routes has dtype 'uint16': it must be uint8"),
    ({"routes": routes_at(3, 3, 6).reshape(3, 6)}, "it must have 3 dimensions"),
    ({"routes": np.full((3, 2, 3), 8, np.uint8)}, "row 0, layer 0: expert 8 of 8"),
    ({"prompt_routes": np.zeros((3, 2, 3), np.uint8)}, "row 0, layer 0: expert 0 twice"),
])
def test_bad_routes_are_refused_and_the_task_stays(keeper: Keeper, changed: dict[str, Any], said: str) -> None:
    dispatch(keeper.ring, 3)
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout", routes=True))
    [task] = keeper.claim("gen")
    [refused] = keeper.ask("gen", routed_answer(task.task, **routes_for(3, **changed)))
    assert refused.code == "refused" and said in refused.text
    [done] = keeper.ask("gen", routed_answer(task.task, **routes_for(3)))
    assert done.code == "done"


def packed(array: np.ndarray[Any, Any], cut: int = 0) -> g.Tensor:
    """The array compressed, whether it is smaller or not, without so many bytes of its end, or with more behind it."""
    data = zlib.compress(array.tobytes(), 1) + bytes(max(0, -cut))
    return g.Tensor(f"{array.dtype.name}/zlib", list(array.shape), data[: len(data) - max(0, cut)])


@pytest.mark.parametrize(("changed", "said"), [
    ({"routes": packed(routes_at(3, 3, 6), cut=1)}, "routes is cut, decompressed"),
    ({"routes": packed(routes_at(3, 3, 6), cut=-9)}, "routes has 9 bytes behind the end of what was compressed"),
    ({"routes": packed(np.zeros((1 << 22, 2, 3), np.uint8))}, "routes has more than 18 bytes, decompressed"),
    ({"routes": packed(routes_at(3, 3, 5))}, "routes: routes [2, 2, 3]: must be [3, 2, 3]"),
    ({"routes": g.Tensor("uint8/zlib", [3, 2, 3], b"routes")}, "routes cannot be decompressed"),
    ({"routes": packed(routes_at(3, 3, 6).astype(np.uint16))}, "routes has more than 18 bytes, decompressed"),
    ({"prompt_routes": packed(routes_at(3, 0, 3), cut=5)}, "prompt_routes is cut"),
    ({"tokens": packed(np.arange(3, dtype=np.int32))}, "tokens has dtype 'int32/zlib': it must be int32"),
])
def test_compressed_tensors_that_cannot_be_read_are_refused_by_name(
    keeper: Keeper, changed: dict[str, Any], said: str
) -> None:
    dispatch(keeper.ring, 3)
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout", routes=True))
    [task] = keeper.claim("gen")
    [refused] = keeper.ask("gen", routed_answer(task.task, **{**routes_for(3), **changed}))
    assert refused.code == "refused" and said in refused.text
    sound = {"routes": packed(routes_at(3, 3, 6)), "prompt_routes": packed(routes_at(3, 0, 3))}
    [done] = keeper.ask("gen", routed_answer(task.task, **sound))
    assert done.code == "done"
    assert np.array_equal(keeper.ring.get(0, "routes", 0), routes_at(3, 3, 6))


# -- episodes and calls -----


def test_an_episode_of_a_host_has_its_routes_checked(keeper: Keeper) -> None:
    bounds = EpisodeBounds(EpisodeLimits(32, 16, 64, 6, 4), 64, 100, SHAPE)
    dispatch(keeper.ring, 3)
    [(slot, word)] = keeper.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    episode = grown([(0, [1, 2], [3, 4], True), (1, [5], [6, 7], True)]).trajectory()
    assert episode is not None and episode.routes is not None
    write_episode(keeper.ring, slot, word, episode, "", None)
    pieces = tensors_of(keeper.ring, slot)
    received, arrays = received_episode(pieces, bounds, 4)
    assert np.array_equal(arrays["routes"], episode.routes) and np.array_equal(received.ids, episode.ids)
    sent = {**pieces, "routes": packed(episode.routes)}
    assert np.array_equal(received_episode(sent, bounds, 4)[1]["routes"], episode.routes)
    with pytest.raises(Refused, match="routes has more than 384 bytes, decompressed"):
        received_episode({**pieces, "routes": packed(np.zeros((65, 2, 3), np.uint8))}, bounds, 4)
    with pytest.raises(Refused, match=r"must be \[6, 2, 3\]"):
        received_episode({**pieces, "routes": tensor(episode.routes[1:])}, bounds, 4)
    with pytest.raises(Refused, match="'routes'"):
        received_episode(pieces, replace(bounds, routing=None), 4)


@pytest.fixture
def caller(folder: Path) -> Iterator[Caller]:
    ring = Ring.create(str(folder / "calls"), slots=4, slot_bytes=4096, processes=8, uuid=bytes(16), calls=True)
    ring.register("agent", "agent/0")
    yield Caller(ring, lambda message, to: None)
    ring.close()


def test_a_call_asks_a_worker_for_the_rows_that_it_needs(keeper: Keeper, caller: Caller, folder: Path) -> None:
    calls = Ring.attach(str(folder / "calls"), calls=True)
    calls.register("keeper", "keeper")
    samples = RingLedger(keeper.ring, keeper.bells.append, CUTS, 16, 100, routed=ROUTED)
    keeper.desk = Desk(BothLedgers(samples, CallLedger(calls, samples)), Tally(), 0.0, **settings(LEASE_S))
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout", routes=True))
    asked = {"gives": ["routes", "prompt_routes"], "routes_from": 2}
    routed = caller.put(ModelCall(np.arange(5, dtype=np.int32), 8, extra=asked))
    [task] = keeper.claim("gen")
    assert task.routes_from == 2
    answer = routed_answer(
        task.task, routes=tensor(routes_at(0, 4, 7)), prompt_routes=tensor(routes_at(0, 0, 4)), text="",
        prompt_ids=None,
    )
    [refused] = keeper.ask("gen", answer)
    assert refused.code == "refused" and "must be [2, 2, 3]" in refused.text
    assert isinstance(answer, g.RemoteRouted)
    answer.prompt_routes = tensor(routes_at(0, 2, 4))
    [done] = keeper.ask("gen", answer)
    assert done.code == "done" and caller.poll() == [routed]
    assert np.array_equal(routed.result().extra["prompt_routes"], routes_at(0, 2, 4))
    assert np.array_equal(routed.result().extra["routes"], routes_at(0, 4, 7))
    plain = caller.put(ModelCall(np.arange(5, dtype=np.int32), 8))
    [task] = keeper.claim("gen")
    assert task.routes_from is msgspec.UNSET
    answer = answer_to(task.task)
    answer.text, answer.prompt_ids = "", None
    [done] = keeper.ask("gen", answer)
    assert done.code == "done" and caller.poll() == [plain]
    calls.close()


# -- others -----


def test_messages_without_routes_have_the_fields_that_they_had() -> None:
    messages = [
        g.RemoteJoin(life=1, role="rollout"), answer_to("1.1.1"), g.GatewayWelcome(life=1),
        g.GatewayTasks(life=1, tasks=[g.Task("1.1.1", 1, 1, 1, "{}")]),
    ]
    for message in messages:
        assert b"routes" not in encode(message), type(message)


def test_a_tensor_that_would_grow_is_sent_as_it_is() -> None:
    assert zipped(tensor(routes_at(3, 0, 1))).dtype == "uint8"
    many = tensor(np.zeros((64, 2, 3), np.uint16))
    assert zipped(many).dtype == "uint16/zlib" and zipped(many).shape == many.shape


def test_a_slot_without_routes_gives_none(keeper: Keeper) -> None:
    dispatch(keeper.ring, 3)
    [(slot, _)] = keeper.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    assert routes_of(keeper.ring, slot, 1) == {}
