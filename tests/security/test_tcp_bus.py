"""The TCP side of the broker lets listed keys in and nobody else, while the local side goes on."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from busrl import curve
from busrl.bus import Endpoint
from busrl.bus.broker import MAX_REFUSED, CurveListener, StopRequest, run_broker
from busrl.curve import ClientKeys, Pair
from busrl.errors import BadKeys, BusNotReady, RunInUse
from busrl.protocol import messages as m
from busrl.protocol.codec import Fault, topic
from busrl.ring import OfdLock

PATIENCE_S, REFUSED_S = 30.0, 0.7
HEARD = topic(m.Goodbye)


@pytest.fixture
def endpoint() -> Iterator[Callable[..., Endpoint]]:
    opened: list[Endpoint] = []

    def open_one(name: str, pair: tuple[str, str], *subscribe: str, **options: object) -> Endpoint:
        opened.append(Endpoint(name, *pair, subscribe=subscribe, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for end in opened:
        end.close()


def laptop(broker) -> ClientKeys:
    return curve.load_client(curve.client_file(broker.keys, "laptop"))


def stranger(broker) -> ClientKeys:
    public, secret = zmq.curve_keypair()
    return ClientKeys(Pair(public.decode(), secret.decode()), curve.server_pair(broker.keys).public)


def test_a_listed_key_talks_with_local_processes_in_both_directions(broker, endpoint):
    near, far = endpoint("near", broker.ipc, HEARD), endpoint("far", broker.tcp, HEARD, keys=laptop(broker))
    for end in (near, far):
        end.ready(PATIENCE_S)
    far.send(m.Goodbye(reason="from far"))  # first: who came later knows who listens
    assert [end.recv(PATIENCE_S).reason for end in (near, far)] == ["from far"] * 2
    near.send(m.Goodbye(reason="from near"))
    assert [end.recv(PATIENCE_S).reason for end in (near, far)] == ["from near"] * 2


def test_an_unlisted_key_is_refused_counted_and_named(broker, endpoint):
    far = endpoint("far", broker.tcp, keys=laptop(broker))
    far.ready(PATIENCE_S)
    unknown = stranger(broker)
    with pytest.raises(BusNotReady):
        endpoint("stranger", broker.tcp, keys=unknown).ready(REFUSED_S)
    line = broker.until("refused")
    assert "127.0.0.1" in line and unknown.pair.public in line and "busrl keys add" in line
    far.ready(PATIENCE_S)
    broker.beat()


def test_a_broker_with_another_key_is_not_talked_to(broker, endpoint):
    other = zmq.curve_keypair()[0].decode()
    with pytest.raises(BusNotReady):
        endpoint("fooled", broker.tcp, keys=ClientKeys(laptop(broker).pair, other)).ready(REFUSED_S)
    broker.beat()


@pytest.mark.parametrize("side", [0, 1])
def test_a_peer_without_encryption_is_refused_on_both_ports(broker, endpoint, side):
    listener = endpoint("near", broker.ipc, HEARD)
    listener.ready(PATIENCE_S)
    with zmq.Context() as context, context.socket((zmq.PUB, zmq.SUB)[side]) as bare:
        bare.setsockopt(zmq.LINGER, 0)
        if side == 1:
            bare.setsockopt(zmq.SUBSCRIBE, b"")
        bare.connect(broker.tcp[side])
        deadline = 12
        while deadline and not (side == 1 and bare.poll(50)):
            deadline -= 1
            if side == 0:
                bare.send_multipart([HEARD.encode(), b"\x81\xa4type\xa7GOODBYE"])
            listener.ready(PATIENCE_S)
        assert side == 0 or not bare.poll(0)
    assert listener.drain() == [] and listener.faults[Fault.MALFORMED] == 0


def test_an_encrypting_client_does_not_fall_back_on_the_local_socket(broker, endpoint):
    with pytest.raises(BusNotReady):
        endpoint("far", broker.ipc, keys=laptop(broker)).ready(REFUSED_S)


def test_a_key_that_is_added_while_the_broker_runs_is_let_in(broker, endpoint):
    unknown = stranger(broker)
    with pytest.raises(BusNotReady):
        endpoint("early", broker.tcp, keys=unknown).ready(REFUSED_S)
    curve.add(broker.keys, "later", unknown.pair.public)
    endpoint("later", broker.tcp, keys=unknown).ready(PATIENCE_S)


def test_a_listed_key_tries_again_while_the_list_is_unreadable(key_directory: Path):
    door = CurveListener("tcp://127.0.0.1:1", key_directory)
    (key_directory / "allowed").rename(key_directory / "away")
    verdict = door.verdict([b"1.0", b"7", b"busrl", b"10.0.0.1", b"", b"CURVE", bytes(32)])
    assert verdict[1:3] == [b"7", b"300"] and door.refusals() == []


def test_a_removed_key_can_not_connect_again(broker, endpoint):
    endpoint("far", broker.tcp, keys=laptop(broker)).ready(PATIENCE_S)
    file = curve.client_file(broker.keys, "laptop")
    before = curve.load_client(file)
    curve.remove(broker.keys, "laptop")
    assert not file.exists()
    with pytest.raises(BusNotReady):
        endpoint("again", broker.tcp, keys=before).ready(REFUSED_S)
    broker.until("refused")


def test_clients_come_back_after_the_broker_was_killed(broker, endpoint):
    far = endpoint("far", broker.tcp, HEARD, keys=laptop(broker))
    far.ready(PATIENCE_S)
    broker.kill()
    broker.start()
    far.ready(PATIENCE_S)
    with pytest.raises(BusNotReady):
        endpoint("stranger", broker.tcp, keys=stranger(broker)).ready(REFUSED_S)
    broker.until("refused")


def test_a_second_broker_is_refused_with_the_holder_of_the_address(broker, tmp_path):
    (tmp_path / "other").mkdir()
    second = type(broker)(tmp_path / "other", broker.keys, broker.endpoint).spawn()
    text = second.communicate(timeout=PATIENCE_S)[1]
    assert second.returncode != 0
    assert "RunInUse" in text and f"in use by process {broker.process.pid} (" in text and broker.tcp[0] in text
    broker.beat()


def test_the_holder_of_a_port_is_named_whatever_it_is(short_dir, key_directory):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(RunInUse, match=rf"{address}: .* in use by process {os.getpid()} \("):
            run_broker(
                f"ipc://{short_dir}/pub", f"ipc://{short_dir}/sub", OfdLock(str(short_dir / "lock")),
                StopRequest(), listener=CurveListener(address, key_directory),
            )


def test_a_door_without_keys_does_not_open(tmp_path):
    with pytest.raises(BadKeys, match="busrl keys init"):
        CurveListener("tcp://127.0.0.1:1", tmp_path)


def test_a_flood_of_unknown_keys_is_counted_in_bounded_memory(key_directory: Path):
    door = CurveListener("tcp://127.0.0.1:1", key_directory)
    for number in range(MAX_REFUSED * 3):
        frames = [b"1.0", b"7", b"busrl", f"10.0.{number % 256}.9".encode(), b"", b"CURVE", number.to_bytes(32, "big")]
        assert door.verdict(frames)[1:3] == [b"7", b"400"]
    refusals = door.refusals()
    assert len(refusals) == MAX_REFUSED + 1 and sum(refusal.count for refusal in refusals) == MAX_REFUSED * 3
    assert door.refusals() == []


@pytest.mark.parametrize("frames", [[], [b"1.0"], [b""] * 7, [b"1.0", b"1", b"", b"", b"", b"NULL"], [b"x"] * 9])
def test_a_request_that_is_none_is_refused(key_directory: Path, frames):
    assert b"400" in CurveListener("tcp://127.0.0.1:1", key_directory).verdict(frames)
