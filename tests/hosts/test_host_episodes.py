"""Episodes of another host: they arrive as they stood in its slot, and hostile ones cost themselves."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from away import Away
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import batch_of
from on_a_ring import Keeper

from busrl import curve
from busrl.agents.tree import Trajectory, Tree
from busrl.data.episodes import TYPES, EpisodeLimits, fault_of
from busrl.hosts import messages as g
from busrl.hosts.desk import Refused, tensor
from busrl.hosts.holdings import tensors_of
from busrl.hosts.ledgers import EpisodeBounds, received_episode
from busrl.hosts.satellite import CLAIM_S, UNASKED_S
from busrl.ring import Ring, State
from busrl.roles.answers import read_parts, read_text, write_parts
from busrl.roles.episodes import commit_episode, messages_of, read_episode, write_episode
from busrl.states import Fate
from busrl.weights.base import VersionSteps

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BOUNDS = EpisodeBounds(EpisodeLimits(32, 16, 64, 6, 4), 64, 100)
MESSAGES = b'[[{"role": "user"}],[]]'


def played() -> Trajectory:
    """A call, one that continues it, an untrained fork, and a reward for a turn."""
    tree = Tree()
    first = tree.answer(tree.ask(None, [5, 6], 4), [7, 8], [-1.0, -2.0], [0, 0], 1, {}, "first", step=3)
    last = tree.answer(tree.ask(first, [9], 4, key="look"), [3], [-0.5], [1], 1, {}, "last", step=4)
    fork = tree.answer(tree.ask(None, [4], 4, None, None, False), [2], [-0.25], [1], 2, {}, "fork", step=4)
    first.delivered = last.delivered = fork.delivered = True
    first.reward = -0.25
    trajectory = tree.trajectory()
    assert trajectory is not None and len(trajectory.seqs) == 2
    return trajectory


def play(ring: Ring) -> int:
    """Play the best queued slot as an agent does, and commit the reward as its process would; the uid."""
    [(slot, word)] = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    episode = played()
    write_episode(ring, slot, word, episode, episode.text, {"length": 1.5, "odd": -0.5}, MESSAGES, (9, 4, 0, 0, 0))
    write_parts(ring, slot, word, {"length": 1.5})
    assert commit_episode(ring, slot, word, episode, episode.step) is not None
    [(slot, word)] = ring.take(State.GENERATED, State.REWARDING, cls=None, limit=1)
    ring.commit_rewards([(slot, word)], [0.75])
    return int(ring.line(slot)["uid"])


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="busrl.test.", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def keeper(folder: Path) -> Iterator[Keeper]:
    ring = Ring.create(str(folder / "ring"), slots=8, slot_bytes=4096, processes=8, uuid=bytes(16))
    keeper = Keeper(folder, BOUNDS)
    keeper.ring.set_header("version_step", 4)
    keeper.ring.set_header("version", 1)
    keeper.ledger.steps = VersionSteps()
    keeper.ledger.note_version()
    for uid in range(3):
        assert keeper.ring.dispatch(
            uid=uid, group=0, admission=0, member=uid, group_size=3, cls=0, task=b'{"prompt": "1"}', prompt_crc=uid,
            max_new_tokens=8, temperature=1.0, version=1, step=4,
        )
    yield keeper
    keeper.close()
    ring.close()


@pytest.fixture
def away(folder: Path, keeper: Keeper, tmp_path: Path) -> Iterator[Callable[..., Away]]:
    """Hosts with agents ("agents") or a server ("serve")."""
    curve.init(tmp_path / "keys")
    hosts: list[Away] = []

    def make(kind: str) -> Away:
        role = {"agents": "agent"}.get(kind, kind)
        host = Away.of(
            folder, keeper, CONFIGS / f"{kind}.toml", "gpu-0", 'bus.endpoint="tcp://127.0.0.1:5600"',
            f'bus.keys="{tmp_path}/keys"', 'process.rollout.hosts=["gpu-0"]', f'process.{role}.hosts=["gpu-0"]',
            "agents.episodes=4",
        )
        hosts.append(host)
        host.ring.set_header("version_step", 4)
        host.ring.set_header("version", 1)
        return host

    yield make
    for host in hosts:
        host.close()


def test_an_episode_is_the_same_at_home_as_on_its_host(
    away: Callable[..., Away], keeper: Keeper
) -> None:
    host = away("agents")
    assert host.claim(2) == 2
    uids = {play(host.ring), play(host.ring)}
    slots = host.ring.lines()["state"].nonzero()[0].tolist()
    there = {int(host.ring.line(slot)["uid"]): tensors_of(host.ring, slot) for slot in slots}
    assert host.exchange.collect() == 2 and not host.tasks.by_name
    lines = keeper.ring.lines()
    at_home = {int(lines["uid"][slot]): slot for slot in range(3) if lines["state"][slot] == State.REWARDED}
    assert at_home.keys() == there.keys() == uids
    for uid, slot in at_home.items():
        assert tensors_of(keeper.ring, slot) == there[uid] and len(there[uid]) == len(TYPES)
        episode, line = read_episode(keeper.ring, slot), keeper.ring.line(slot)
        assert episode is not None and episode.logged()["seqs"] == [6, 2] and episode.keys == ("", "look", "")
        assert (line["reward"], line["version"], line["step"]) == (0.75, 0, 3), "as old as its oldest trained token"
        assert (line["prompt_tokens"], line["response_tokens"], line["finish"]) == (2, 4, 2)
        assert read_parts(keeper.ring, slot) == {"length": 1.5}
        assert messages_of(keeper.ring, slot) == [[{"role": "user"}], []] and read_text(keeper.ring, slot, 1) == "fork"
    assert [type(bell).__name__ for bell in keeper.bells] == ["RewardComputed"] * 2


def test_an_episode_without_an_end_has_the_same_fate_at_home(
    away: Callable[..., Away], keeper: Keeper
) -> None:
    host, fates = away("agents"), [Fate.POISON, Fate.REWARD_RAISED, Fate.REWARD_HUNG]
    assert host.claim(3) == 3
    ended = {}
    for fate in fates:
        [(slot, word)] = host.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
        ended[int(host.ring.line(slot)["uid"])] = fate
        host.ring.drop(slot, word, fate)
    assert host.exchange.report_dropped() == 3
    assert {uid: Fate(keeper.fates[0].get(uid)) for uid in ended} == ended


def test_a_sample_that_was_begun_before_is_played_beside_others(away: Callable[..., Away], keeper: Keeper) -> None:
    host = away("agents")
    for _ in range(3):
        assert host.claim(3) == 3
        assert len(keeper.pass_lease()) == 3
        host.beat()
        host.exchange.report_dropped()
    assert keeper.ring.lines()["attempt"][:3].min() == 3
    assert host.claim(3) == 3, "none of them has to be alone"


def test_what_no_client_asks_for_any_more_goes_back_to_home(
    away: Callable[..., Away], keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = away("serve")
    host.exchange.return_unasked()  # clients ask for all that is here
    assert host.claim(3) == 3
    [(slot, word)] = host.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    host.exchange.note_rows("serve/0", 2)
    host.exchange.wanted = 2  # one that is played, and one that a client waits for
    host.now += 1.0
    host.exchange.return_unasked()
    assert host.exchange.report_dropped() == 0, "clients come and go"
    host.now += UNASKED_S
    host.exchange.return_unasked()
    assert host.exchange.report_dropped() == 1
    assert keeper.ring.stats().occupancy == {**keeper.ring.stats().occupancy, "GENERATING": 2, "QUEUED": 1}
    assert int(keeper.ring.lines()["attempt"][:3].max()) == 1 and host.ring.stats().occupancy["QUEUED"] == 1
    host.ring.release(slot, word, State.QUEUED)


@pytest.mark.parametrize("kind, count", [("serve", 1), ("agents", 3)])
def test_a_server_fetches_what_clients_ask_for_an_agent_some_ahead(
    kind: str, count: int, away: Callable[..., Away], keeper: Keeper, folder: Path
) -> None:
    host, relay = away(kind), Ring.attach(str(folder / "away"))
    relay.register("relay", "relay")
    relay.set_ready()
    host.exchange.send_due()
    host.exchange.note_rows(f"{kind}/0", 1)
    host.wire.requests.clear()
    host.exchange.send_due()
    assert len(host.wire.requests) == (1 if kind == "serve" else 0), "a client that waits makes the host ask at once"
    host.now += CLAIM_S
    host.exchange.send_due()
    host.exchange.dispatch()
    relay.close()
    assert len(host.tasks.by_name) == len(keeper.desk.leases.by_task) == count


# -- hostile bytes --------------------------------------------------------------------------------------------------


def sound() -> dict[str, np.ndarray[Any, Any]]:
    episode = played()
    return {
        "ids": episode.ids, "seqs": episode.seqs, "turns": episode.turns, "logprobs": episode.logprobs,
        "versions": episode.versions, "turn_rewards": np.array(episode.turn_rewards), "reward": np.array([1.0, 1.0]),
        "messages": np.frombuffer(MESSAGES, np.uint8), "context": np.arange(5, dtype=np.uint64),
        "keys": np.frombuffer(b"a\nb\n", np.uint8),
    }


def changed(name: str, place: Any, value: Any) -> dict[str, g.Tensor]:
    arrays = {key: array.copy() for key, array in sound().items()}
    arrays[name][place] = value
    return {key: tensor(array) for key, array in arrays.items()}


def with_(**tensors: g.Tensor | None) -> dict[str, g.Tensor]:
    """A sound episode with other tensors in place of its own; None: without."""
    episode = {**{key: tensor(array) for key, array in sound().items()}, **tensors}
    return {key: piece for key, piece in episode.items() if piece is not None}


HOSTILE = [
    (changed("ids", 0, 100), "ids from 2 to 100: the model knows 100"),
    (changed("ids", 0, -1), "ids from -1 to 9"),
    (changed("versions", 0, 2), "the newest version that was published is 1"),
    (changed("logprobs", 0, np.nan), "not a finite number"),
    (changed("logprobs", 0, 0.5), "above 0"),
    (changed("seqs", 0, 5), "must be the 8 that there are"),
    (changed("seqs", slice(None), [2**31 - 1, -(2**31) + 9]), "must be the 8"),
    (changed("turns", (0, 0), 7), "turns are of the sequences"),
    (changed("turns", (0, 2), 99), "turn 0 is from 2 to 99"),
    (changed("turns", (0, 3), 3), "turns end by 3"),
    (changed("turns", (0, 4), -1), "call numbers"),
    (changed("turns", (0, 5), -1), "a time below 0"),
    (changed("turn_rewards", 0, np.inf), "turn_rewards"),
    (changed("keys", 0, 0), "a turn's key of 1 bytes"),
    (changed("keys", 0, ord("\n")), "4 keys of 3 turns"),
    (changed("reward", 0, np.nan), "the reward is nan"),
    (with_(ids=None), "tensor ids is missing"),
    (with_(more=tensor(np.zeros(1, np.int8))), "tensor 'more'"),
    (with_(ids=tensor(np.zeros(8, np.int64))), "ids has dtype 'int64'"),
    (with_(turns=tensor(np.zeros(8, np.int32))), "turns has shape [8]"),
    (with_(turns=g.Tensor("int32", [0, 2**63], b"")), "turns says shape"),
    (with_(turns=g.Tensor("int32", [2**40, 8], b"1234")), "and has 4 bytes"),
    (with_(turns=tensor(np.zeros((3, 7), np.int32))), "turns of 8 numbers"),
    (with_(context=tensor(np.zeros(4, np.uint64))), "context has 4 numbers"),
    (with_(messages=tensor(np.full(65, 91, np.uint8))), "agents.transcript_bytes allows 64"),
    (with_(reward=tensor(np.zeros(0))), "the reward is "),
    ({}, "tensor ids is missing"),
]


def test_a_hostile_episode_costs_itself_and_no_other_of_its_message(keeper: Keeper) -> None:
    keeper.ask("gpu-0", g.RemoteJoin(life=1, role="host"))
    good, bad, _ = (task.task for task in keeper.claim("gpu-0", capacity=3))
    nothing = {
        name: tensor(np.zeros(0, dtype))
        for name, dtype in (("tokens", "i4"), ("logprobs", "f4"), ("versions", "u4"), ("prompt_ids", "i4"))
    }

    def send(tasks: list[str], episodes: list[dict[str, g.Tensor]], **more: Any) -> Any:
        none = [0] * len(tasks)
        message = batch_of(tasks, **{"lengths": none, "prompt_lengths": none, **nothing, "episodes": episodes, **more})
        return keeper.ask("gpu-0", message)[0]

    for episode, reason in HOSTILE:
        settled = send([bad], [episode], rewards=[1.0])
        assert [refusal.task for refusal in settled.refused] == [bad] and reason in settled.refused[0].text, settled
        assert settled.refused[0].code == "refused"
    settled = send([bad, good], [changed("ids", 0, 100), with_()], rewards=[1.0, 1.0])
    assert settled.done == [good] and [refusal.task for refusal in settled.refused] == [bad]
    assert send([good], [with_()]).done == [good], "a copy counts once"
    [settled] = keeper.ask("gpu-0", batch_of([bad]))
    assert "the samples of this run are episodes" in settled.refused[0].text  # type: ignore[attr-defined]
    assert "all of them must be 0" in send([bad], [with_()], lengths=[3]).text
    assert "one item for each" in send([bad], [with_(), with_()]).text
    assert send([bad], [with_()], texts=["x" * 5000]).refused[0].text.count("ring.slot_bytes")
    states = keeper.ring.lines()["state"][:3].tolist()
    assert sorted(states) == sorted([State.REWARDED, State.GENERATING, State.GENERATING])
    keeper.ask("gpu-0", g.RemoteFail(life=1, task=bad, drop="malformed"))
    assert keeper.fates[0].get(int(bad.rpartition(".")[2])) == Fate.MALFORMED


@settings(max_examples=300)
@given(data=st.data())
def test_whatever_a_host_sends_is_a_sound_episode_or_refused(data: st.DataObject) -> None:
    arrays = {key: array.copy() for key, array in sound().items()}
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(arrays)))
        flat = arrays[name].reshape(-1).view(np.uint8)
        if data.draw(st.booleans()) and len(flat):
            flat[data.draw(st.integers(0, len(flat) - 1))] = data.draw(st.sampled_from([0, 1, 2, 127, 128, 255]))
        else:
            arrays[name] = arrays[name][: data.draw(st.integers(0, len(arrays[name])))].copy()
    try:
        episode, _ = received_episode({key: tensor(array) for key, array in arrays.items()}, BOUNDS, 1)
    except Refused:
        return
    assert not fault_of(episode) and episode.ids.max() < 100 and episode.versions.max() <= 1
    assert len(episode.turns) <= 6 and int(episode.turns[:, 4].min()) >= 0


def test_brackets_in_brackets_are_no_messages(keeper: Keeper) -> None:
    [(slot, word)] = keeper.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    keeper.ring.put(slot, word, "messages", np.frombuffer(b'[[{"a":' + b"[" * 3000, np.uint8), 0)
    assert messages_of(keeper.ring, slot) == []
