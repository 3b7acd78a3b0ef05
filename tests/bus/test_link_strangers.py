"""The links of hosts among strangers: more idle connections than descriptors, and a host that asks all the same."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from busrl import curve
from busrl.hosts import questions as q
from busrl.hosts.link import Asking

DESCRIPTORS, STRANGERS, PATIENCE_S = 128, 300, 20.0
HOME = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
from pathlib import Path
from busrl.bus.broker import CurveListener
from busrl.hosts.link import Answering
from busrl.hosts import questions as q
answering = Answering(CurveListener("", Path(sys.argv[1]), ("tcp://127.0.0.1:" + sys.argv[2],)))
print("ready", flush=True)
while True:
    for asked in answering.waiting(0.1):
        answering.answer(asked, q.Declined(text="not now"))
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Where it answers, and its keys."""
    folder = tmp_path / "keys"
    curve.init(folder)
    curve.add(folder, "laptop")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    child = subprocess.Popen([sys.executable, "-c", HOME, str(folder), str(port)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    yield f"tcp://127.0.0.1:{port}", folder
    child.kill()
    child.communicate()


def test_a_host_is_answered_among_more_strangers_than_descriptors(home: tuple[str, Path]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * STRANGERS)), hard))
    place, folder = home
    client_keys = curve.load_client(curve.client_file(folder, "laptop"))
    with ExitStack() as stack:
        for _ in range(STRANGERS):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", int(place.rpartition(":")[2])))
        asking = stack.enter_context(closing(Asking(place, client_keys, "laptop")))
        assert isinstance(asking.ask(q.RanksMeet(), PATIENCE_S), q.Declined)
