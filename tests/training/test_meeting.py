"""Where ranks of other hosts meet rank 0: who is let in, and what a rank has that shares no files with it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from busrl.errors import DeviceMissing, RanksDiffer
from busrl.ranks import meeting, mesh
from busrl.ranks.follower import place_of
from busrl.ranks.meeting import Away, Place
from busrl.system import files
from busrl.system.listener import shut
from busrl.training import checkpoint
from busrl.training.checkpoint import Checkpoint
from busrl.training.settings import TrainerSettings
from busrl.training.state import MASTER
from tests.training.test_team import SETTINGS, a_step, assert_same_steps, team_of

HERE = "127.0.0.1"


def away(place: Place | None) -> Away:
    return Away("gpu-0", lambda: place, Path("unused"))


def test_only_who_knows_the_secret_of_this_attempt_comes_in(tmp_path: Path) -> None:
    file, note, came = tmp_path / "ranks.sock", tmp_path / "ranks.json", list[Any]()
    with meeting.door(file, note, HERE, 10) as door:
        place = Place(**files.read_map(note))
        earlier = Place(place.address, place.port, "00" * meeting.SIZE)
        stranger = socket.create_connection((place.address, place.port))
        stranger.sendall(bytes(2 * meeting.SIZE))
        visitor = threading.Thread(target=lambda: came.append(door.accept(10)))
        visitor.start()
        visitor.join(20)
        for whose, welcome in ((earlier, False), (place, True)):
            visitor = threading.Thread(target=lambda: came.append(door.accept(10)))
            visitor.start()
            if welcome:
                meeting.connect(file, away(whose), 10).close()
            else:
                with pytest.raises(ConnectionRefusedError):
                    meeting.connect(file, away(whose), 10)
            visitor.join(20)
        assert [one is not None for one in came] == [False, False, True]
        stranger.close()
        came[-1].close()
    assert not file.exists() and not note.exists()
    with pytest.raises(ConnectionRefusedError):
        meeting.connect(file, away(place), 10)
    with pytest.raises(ConnectionRefusedError):
        meeting.connect(file, away(None), 10)


def test_a_stranger_who_sends_slowly_is_left_while_he_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "PROOF_S", 0.4)
    over, sent = threading.Event(), list[int]()
    with meeting.door(tmp_path / "ranks.sock", note := tmp_path / "ranks.json", HERE, 10) as door:
        place = Place(**files.read_map(note))

        def dribble() -> None:
            with socket.create_connection((place.address, place.port)) as stranger:
                while len(sent) < 2 * meeting.SIZE and not over.is_set():
                    stranger.sendall(b"x")
                    sent.append(1)
                    over.wait(0.2)

        stranger = threading.Thread(target=dribble)
        stranger.start()
        assert door.accept(10) is None
        over.set()
        stranger.join(10)
    assert len(sent) < 2 * meeting.SIZE


def test_without_other_hosts_nothing_listens_but_the_socket_of_this_user(tmp_path: Path) -> None:
    file, note = tmp_path / "ranks.sock", tmp_path / "ranks.json"
    with meeting.door(file, note, "", 10):
        assert file.stat().st_mode & 0o777 == 0o600 and not note.exists()


def test_the_interface_of_an_address_is_found_or_named() -> None:
    assert meeting.interface_of(HERE) == "lo"
    with pytest.raises(DeviceMissing, match=r"no network interface has 192\.0\.2\.7 .*GLOO_SOCKET_IFNAME"):
        meeting.interface_of("192.0.2.7")


@pytest.mark.slow
def test_a_rank_elsewhere_goes_on_from_copies_of_a_gathered_checkpoint(lab: Any, tmp_path: Path) -> None:
    there, settings = tmp_path / "there", TrainerSettings(**SETTINGS, compute_dtype="bfloat16")
    (home := tmp_path / "home").mkdir()
    with team_of(home, there=there, compute_dtype="bfloat16") as team:
        trainer = team.trainer(lab.folder("qwen3"), settings)
        a_step(trainer, lab, 0)
        saved = checkpoint.save(
            home / "checkpoints", 1, model=trainer.model, optimizer_state=trainer.optimizer_state(), meta={},
            weights=trainer.named_weights(),
        )
        (saved.path / "trained.bin").write_bytes(b"of rank 0 alone")
        expected = [a_step(trainer, lab, seed) for seed in (1, 2)]
        masters = trainer.optimizer_state()[MASTER]
        again = team.trainer(saved.model, settings)
        again.restore(Checkpoint(saved.path, 1, {}))
        assert_same_steps([a_step(again, lab, seed) for seed in (1, 2)], expected)
        torch.testing.assert_close(again.optimizer_state()[MASTER], masters, rtol=0, atol=0)
    copies = {path.relative_to(there): path.read_bytes() for path in there.rglob("*") if path.is_file()}
    assert copies == {path.relative_to(home): path.read_bytes() for path in saved.path.rglob("*")
                      if path.is_file() and path.name != "trained.bin"}


@pytest.mark.parametrize("name", ["/etc/passwd", "../beside", "step_1/../../beside", ".."])
def test_a_copy_of_a_file_of_home_never_leaves_its_folder(tmp_path: Path, name: str) -> None:
    assert place_of(tmp_path, "step_1/model.safetensors") == tmp_path / "step_1" / "model.safetensors"
    with pytest.raises(RanksDiffer, match="no name below its run directory"):
        place_of(tmp_path, name)


def test_strangers_who_say_nothing_keep_no_rank_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are let in at the same time, for longer than anybody waits."""
    came = list[Any]()
    with meeting.door(tmp_path / "ranks.sock", note := tmp_path / "ranks.json", HERE, 10) as door:
        place = Place(**files.read_map(note))
        strangers = [socket.create_connection((place.address, place.port)) for _ in range(meeting.MOST_VISITORS + 30)]
        monkeypatch.setattr(meeting, "PROOF_S", 60.0)

        def waits() -> None:
            while not came:
                came.extend(filter(None, [door.accept(1)]))

        visitor = threading.Thread(target=waits, daemon=True)
        visitor.start()
        with meeting.connect(tmp_path / "ranks.sock", away(place), 10) as rank:
            visitor.join(30)
            assert len(came) == 1
            rank.sendall(b"hello")
            assert came[0].recv(5) == b"hello"
        for one in (*strangers, *came):
            one.close()


def test_nobody_connects_to_a_store_for_which_all_have_come() -> None:
    store, listening = mesh.open_store(2, 20)
    rank = mesh.find_store(store.port, 2, 20)
    shut(listening)
    stranger = socket.socket()
    stranger.settimeout(0.5)
    with pytest.raises(OSError):
        stranger.connect((mesh.HOST, store.port))
    rank.set("word", "kept")
    assert store.get("word") == b"kept", "those that are there stay"
    stranger.close()
    listening.close()
