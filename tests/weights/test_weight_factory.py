"""One key of the topology chooses the transport."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from busrl.errors import UserError
from busrl.topology.schema import Weights
from busrl.weights.broadcast.receiver import BroadcastReceiver
from busrl.weights.broadcast.sender import BroadcastSender
from busrl.weights.factory import TransportSettings, make_receiver, make_sender
from busrl.weights.shm import ShmReceiver, ShmSender


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Any]:
    segment = Path("/dev/shm") / f"busrl.test.{os.getpid()}.{os.urandom(4).hex()}.weights"
    yield SimpleNamespace(weights_file=segment, runtime_dir=tmp_path)
    segment.unlink(missing_ok=True)


def topology(transport: str) -> Any:
    return SimpleNamespace(weights=Weights(transport=transport, timeout_s=6.0))


@pytest.mark.parametrize(
    ("transport", "sends", "receives"),
    [("shm", ShmSender, ShmReceiver), ("broadcast", BroadcastSender, BroadcastReceiver)],
)
def test_a_version_goes_from_sender_to_receiver(paths: Any, transport: str, sends: type, receives: type) -> None:
    sender = make_sender(TransportSettings.of(topology(transport), paths))
    receiver = make_receiver(TransportSettings.of(topology(transport), paths), "rollout/0")
    assert isinstance(sender, sends) and isinstance(receiver, receives)
    sender.publish(1, 7, {"w": torch.ones(4)})
    here = {"w": torch.zeros(4)}
    assert receiver.wait_for(1, 60) == (1, 7)
    assert receiver.fetch(here) == (1, 7) == receiver.newest()
    assert bool((here["w"] == 1).all())
    receiver.close()
    sender.close()


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_another_process_rebuilds_the_receiver_from_plain_data(paths: Any, transport: str) -> None:
    sent = json.dumps(TransportSettings.of(topology(transport), paths).plain())
    sender = make_sender(TransportSettings.of(topology(transport), paths))
    sender.publish(3, 7, {"w": torch.ones(4)})
    code = (
        "import json, sys, torch\n"
        "from busrl.weights.factory import TransportSettings, make_receiver\n"
        "made = make_receiver(TransportSettings.from_plain(json.loads(sys.argv[1])), 'worker/0')\n"
        "made.wait_for(3, 60)\n"
        "here = {'w': torch.zeros(4)}\n"
        "print(made.kind, made.fetch(here), here['w'].tolist())\n"
        "made.close()"
    )
    done = subprocess.run([sys.executable, "-c", code, sent], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "tensors (3, 7) [1.0, 1.0, 1.0, 1.0]", done.stderr
    sender.close()


def test_settings_of_another_version_are_refused_by_the_name_of_the_field() -> None:
    with pytest.raises(UserError, match="'pigeons' is unknown here"):
        TransportSettings.from_plain({"transport": "shm", "segment": "", "address_file": "", "pigeons": 3})


def test_another_word_is_refused(paths: Any) -> None:
    with pytest.raises(UserError, match="'pigeon'"):
        make_sender(TransportSettings.of(topology("pigeon"), paths))
