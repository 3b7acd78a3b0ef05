"""Weights from host to host, by real relays: whole versions in order whatever dies, over links that are slow."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from relay_scene import HOME, Net, Relays

import busrl
from busrl.bus.addresses import relay_endpoint
from busrl.errors import WeightsTimeout
from busrl.hosts import questions as q
from busrl.hosts.link import Asking
from busrl.hosts.membership import HostSource
from busrl.status.reader import RunReader
from busrl.status.words import host_lines, hosts
from busrl.system import files
from busrl.weights.folders import DRAFT, FolderReceiver, versions
from busrl.weights.shm import LOGGED, SEQ, WRITING, ShmReceiver, attach_segment

NAMES = ("a", "b", "c")


@contextmanager
def engines(relays: Relays) -> Iterator[list[str]]:
    """Read every host's newest version all the time; the problems that they see."""
    problems, over = list[str](), threading.Event()

    def read(name: str) -> None:
        receiver = ShmReceiver(relays.runs[name].paths.weights_file, timeout_s=0.2)
        values, last = {"w": torch.empty(relays.count)}, -1
        while not over.wait(0.01):
            try:
                version, _ = receiver.fetch(values)
            except WeightsTimeout:
                continue  # none is there yet, or a buffer was written over twice
            low, high = float(values["w"].min()), float(values["w"].max())
            if not low == high == version:
                problems.append(f"{name}: version {version} has values from {low} to {high}")
            if version < last:
                problems.append(f"{name}: version {version} after {last}")
            last = version
        receiver.close()

    threads = [threading.Thread(target=read, args=(name,)) for name in relays.names]
    for thread in threads:
        thread.start()
    try:
        yield problems
    finally:
        over.set()
        for thread in threads:
            thread.join()


def begun(relays: Relays, name: str, version: int) -> bool:
    """Whether this host writes that version, or has it."""
    segment = attach_segment(relays.runs[name].paths.weights_file)
    if segment is None:
        return False
    is_writing = any(int(words[SEQ]) & 1 and int(words[WRITING]) == version for words in segment.buffer)
    segment.close()
    return is_writing or relays.newest(name) >= version


@pytest.mark.long
def test_versions_stay_whole_and_in_order_while_relays_die(tmp_path: Path) -> None:
    chance = random.Random(7)
    with Relays(tmp_path, NAMES, 12) as relays, engines(relays) as problems:
        relays.publish(1)
        relays.until_all_have(1)
        for version in range(2, 8):
            relays.publish(version)
            victim, seen = chance.choice([HOME, *NAMES]), chance.choice(NAMES)
            relays.until("a host that writes it", partial(begun, relays, seen, version))
            relays.kill(victim)
            relays.until_all_have(version)
        assert not problems


def folder_begun(relays: Relays, name: str, version: int) -> bool:
    """Whether this host writes the folder of that version, or has it."""
    drafts = relays.folders[name].glob(f"{DRAFT}v{version:012d}*")
    return any(drafts) or relays.newest(name) >= version


@pytest.mark.slow
def test_folders_stay_whole_and_in_order_while_relays_die(tmp_path: Path) -> None:
    chance = random.Random(5)
    with Relays(tmp_path, NAMES, 4, "weights.transport=checkpoint_restart") as relays:
        engines = {name: FolderReceiver(relays.folders[name], "rollout/0", kind="folder") for name in NAMES}
        for version in range(1, 7):
            relays.publish(version)
            if version > 1:
                relays.until("a host that writes it", partial(folder_begun, relays, chance.choice(NAMES), version))
                relays.kill(chance.choice([HOME, *NAMES]))
            relays.until_all_have(version)
            for engine in engines.values():
                taken, step, folder = engine.take()
                assert taken == step == version
                parts = sorted(folder.glob("part-*"))
                assert len(parts) == 3
                for part in parts:
                    values = torch.frombuffer(bytearray(part.read_bytes()), dtype=torch.float32)
                    assert len(values) == relays.count and bool((values == version).all())
        for name in NAMES:
            assert len(versions(relays.folders[name])) <= 2


@pytest.mark.slow
def test_sparse_updates_reach_hosts_as_whole_versions_while_relays_are_killed(tmp_path: Path) -> None:
    chance, wanted = random.Random(3), torch.empty(0)
    with Relays(tmp_path, NAMES, 4, "weights.sparse.enabled=true") as relays:
        receivers = {name: ShmReceiver(relays.runs[name].paths.weights_file) for name in NAMES}
        for version in range(1, 9):
            at = slice(None) if version == 1 else slice(version, None, 97)
            relays.publish(version, at)
            wanted = torch.full((relays.count,), 1.0) if version == 1 else wanted
            wanted[at] = float(version)
            if version % 2:
                relays.kill(chance.choice([HOME, *NAMES]))
            relays.until_all_have(version)
            for receiver in receivers.values():
                values = {"w": torch.empty(relays.count)}
                assert receiver.fetch(values)[0] == version and torch.equal(values["w"], wanted)
        segment = attach_segment(relays.runs[HOME].paths.weights_file)
        assert segment is not None
        assert segment.buffer[segment.newest() or 0][LOGGED], "nothing was sent sparsely"


@pytest.mark.long
def test_home_numbers_the_starts_of_its_hosts_upwards(tmp_path: Path) -> None:
    with Relays(tmp_path, ("a", "b"), 0.1) as relays:
        home, lives = relays.runs[HOME], list[int]()

        def join(name: str) -> q.Welcome:
            source = HostSource.read(relays.runs[name].paths.host_source)
            link = Asking(relay_endpoint(source.endpoint), source.client, name)
            reply = link.ask(q.HostJoin(build=busrl.__version__), 60.0)
            link.close()
            assert isinstance(reply, q.Welcome), reply
            lives.append(reply.life)
            return reply

        relays.publish(3)
        relays.until_all_have(3)
        shown = home.paths.hosts_now
        relays.until("home to show both", lambda: {row.get("weights") for row in files.read_map(shown).values()} == {3})
        reader = RunReader(home.paths)
        reader.refresh(0.0)
        joining, _ = hosts(reader.run)
        assert joining.startswith("a · joining · heard"), joining
        assert joining.endswith(f"weights 3 · busrl {busrl.__version__}"), joining
        assert [line.split()[0] for line in host_lines(reader.run, "b")] == ["b", "relay"]
        reader.close()
        join("a")
        join("b")
        relays.kill(HOME)
        assert join("a").holds == 0
        home.ring.register("keeper", "keeper")
        entry = home.ring.enter_remote("host", "a", life=10**6)
        assert join("a").holds == 10**6
        home.ring.leave_remote(entry)
        home.paths.hosts.unlink()
        join("b")
        assert lives == sorted(set(lives)) and lives[3] > 10**6, lives


@pytest.mark.long
def test_over_slow_links_home_sends_a_version_once(
    tmp_path: Path,
) -> None:
    megabytes = 50
    with Net(NAMES) as net, Relays(tmp_path, NAMES, megabytes, address=net.home, before=net.before) as relays:
        relays.publish(1)
        relays.until_all_have(1)
        net.limit("200mbit")
        for version in range(2, 7):
            before = net.sent()
            relays.publish(version)
            relays.until_all_have(version)
            if net.sent() - before < 1.3 * megabytes * 1e6:
                break
        else:
            raise AssertionError(f"no version left home once\n{relays.logs()}")
        first = next(name for name in NAMES if relays.fetched(name)[version][1] == HOME)
        with engines(relays) as problems:
            before = net.sent()
            relays.publish(version + 1)
            relays.until("a version half way", lambda: net.sent() - before > megabytes * 0.5e6)
            relays.kill(first)
            relays.until_all_have(version + 1)
        assert not problems
        sent = (net.sent() - before) / 1e6
        # Half to the first before its death, all of it to the one in its place, the rest to the others.
        assert sent < 3.2 * megabytes, f"{sent:.0f} MB left home\n{relays.logs()}"


@pytest.mark.long
def test_hosts_that_cannot_reach_one_another_fetch_from_home(tmp_path: Path) -> None:
    with Net(NAMES, apart=True) as net, Relays(tmp_path, NAMES, 2, address=net.home, before=net.before) as relays:
        for version in (1, 2, 3):
            relays.publish(version)
            relays.until_all_have(version)
        for name in NAMES:
            assert {source for _, source in relays.fetched(name).values()} == {HOME}, relays.logs()
            tried = [relays.log(name).count(f"nothing heard of {other} for") for other in NAMES]
            assert max(tried) <= 1, "each is tried once"


@pytest.mark.long
def test_an_unlisted_host_gets_nothing_from_another_host(tmp_path: Path) -> None:
    with Relays(tmp_path, ("a", "b"), 2) as relays:
        relays.publish(1)
        relays.until_all_have(1)
        (tmp_path / "keys" / "allowed" / "b.key").unlink()
        relays.kill("b")  # its connections end
        relays.publish(2)
        relays.until("version 2 on a", lambda: relays.newest("a") == 2)
        relays.until("b to be refused", lambda: "nothing heard of the run" in relays.log("b"))
        assert relays.newest("b") == 1
