"""Hosts that launch starts: over ssh to a real server, by another command, and what is said where that fails."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, read_lines, running
from host_scene import Home, free_ports

from busrl import curve
from busrl.paths import RunPaths

HOST = f"PYTHONPATH={ROOT} exec {sys.executable} -m busrl.cli host - --scratch"


class Sshd:
    """An ssh server of this user on loopback with a key of its own. Skips the test where there is none to start."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_ports()
        program = shutil.which("sshd", path="/usr/sbin:/usr/bin:" + os.environ.get("PATH", ""))
        if program is None or shutil.which("ssh") is None:
            pytest.skip("no ssh server here: install openssh-server")
        for name in ("server", "client"):
            subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", folder / name], check=True)
        shutil.copy(folder / "client.pub", folder / "allowed")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        options = {"Port": self.port, "ListenAddress": "127.0.0.1", "HostKey": folder / "server", "StrictModes": "no",
                   "AuthorizedKeysFile": folder / "allowed", "PidFile": "none", "UsePAM": "no"}
        words = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        self.log = open(folder / "sshd.log", "wb")  # noqa: SIM115
        self.server = subprocess.Popen([program, "-D", "-e", "-f", "/dev/null", *words], stderr=self.log)

    def reach(self, scratch: Path) -> str:
        """The value of hosts.start that reaches a host through this server."""
        ssh = ["ssh", "-T", "-F", "none", "-i", str(self.folder / "client"), "-p", str(self.port),
               "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
               "-o", "HostKeyAlias={host}", "127.0.0.1", f"{HOST} {scratch}-{{host}}"]
        return start(ssh)

    def connections(self) -> list[int]:
        """Pids of the server's processes that each serve one connection."""
        done = subprocess.run(["pgrep", "-P", str(self.server.pid)], capture_output=True, check=False)
        return [int(pid) for pid in done.stdout.split()]

    def close(self) -> None:
        self.server.terminate()
        self.server.wait(10)
        self.log.close()


@contextmanager
def sshd() -> Iterator[Sshd]:
    with tempfile.TemporaryDirectory() as folder:
        server = Sshd(Path(folder))
        try:
            yield server
        finally:
            server.close()


def start(command: list[str]) -> str:
    return f"hosts.start={json.dumps(command)}"


def said(home: Home, pattern: str) -> list[str]:
    return re.findall(pattern, home.text())


@pytest.mark.long
def test_hosts_start_over_ssh_and_broken_connections_cost_no_sample(
    tmp_path: Path, quickstart: None
) -> None:
    scratch = tmp_path / "host"
    with sshd() as server:
        home = Home(tmp_path, server.reach(scratch), names=("gpu-0", "gpu-1"), steps=30)
        with running(home):
            home.until_step(5)
            [first, *_] = home.until("connections", lambda: server.connections())
            os.kill(first, signal.SIGKILL)  # as a cable does: the host itself works on
            home.until("it is started again", lambda: len(said(home, r"host (gpu-\d): started")) == 3)
            assert home.wait() == 0, home.tail()
    check_end(home, 0)
    assert len(said(home, r"host gpu-\d: ended \(exit code 0\)")) == 2, home.text()
    assert not [name for name in ("gpu-0", "gpu-1") if RunPaths.of(f"{scratch}-{name}").ring_file.exists()]


@pytest.mark.long
def test_launch_starts_hosts_by_any_command_with_keys_and_ends_them(
    tmp_path: Path, quickstart: None
) -> None:
    command = ["env", "-u", "XDG_CACHE_HOME", f"HOME={tmp_path}", "sh", "-c", f"{HOST} {tmp_path}/scratch-{{host}}"]
    home = Home(tmp_path, start(command), steps=100_000)
    curve.remove(home.keys, "gpu-0")
    with running(home):
        home.until_step(3)
        assert "gpu-0" in curve.allowed(home.keys)
        host = RunPaths.of(tmp_path / "scratch-gpu-0")
        pid = int(said(home, r"host gpu-0: started \(pid (\d+)\)")[0])
        os.kill(pid, signal.SIGKILL)
        home.until("it is started again", lambda: len(said(home, "host gpu-0: started")) == 2)
        home.until_step(home.step() + 5)
        assert home.child is not None
        home.child.send_signal(signal.SIGTERM)
        assert home.wait() == 128 + signal.SIGTERM, home.tail()
    assert not host.ring_file.exists() and home.audit().counts.lost == 0
    secret = curve.client_file(home.keys, "gpu-0").read_text()
    assert not [line for line in (*home.text().splitlines(), shlex.join(command)) if line and line in secret]


@pytest.mark.slow
def test_a_command_outliving_its_host_is_ended_and_the_host_returns(
    tmp_path: Path, quickstart: None
) -> None:
    command = ["sh", "-c", f"({HOST} {tmp_path}/scratch-{{host}}); sleep 900"]
    home = Home(tmp_path, start(command), steps=100_000)
    with running(home):
        home.until_step(3)
        pid = int(said(home, r"host gpu-0: started \(pid (\d+)\)")[0])
        below = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, check=True).stdout.split()
        os.kill(int(below[0]), signal.SIGKILL)
        home.until("it is said", lambda: said(home, "nothing is heard of it for 60 s: its command is ended"))
        home.until("it is started again", lambda: len(said(home, "host gpu-0: started")) == 2)
        home.until_step(home.step() + 5)
        assert not Path(f"/proc/{pid}").exists()
        assert home.child is not None
        home.child.send_signal(signal.SIGTERM)
        assert home.wait() == 128 + signal.SIGTERM, home.tail()
    assert home.audit().counts.lost == 0
    assert not subprocess.run(["pgrep", "-f", "^sleep 900"], capture_output=True, check=False).stdout


@pytest.mark.long
def test_a_host_needing_repair_is_named_once_and_the_run_continues(tmp_path: Path, quickstart: None) -> None:
    mend = ["sh", "-c", "echo busrl: no model at /models/x >&2; exit 2 # {host}"]
    lost = ["sh", "-c", "cat >/dev/null; echo the connection to {host} broke; exit 255"]
    for command, pattern, count in (
        (mend, "host gpu-0 is not started again: busrl: no model at /models/x", 1),
        (lost, r"host gpu-0 ended \(exit code 255\): the connection to gpu-0 broke; again in", 2),
    ):
        (folder := tmp_path / str(count)).mkdir()
        home = Home(folder, start(command), steps=1)
        with running(home):
            home.until("it is said", lambda home=home, pattern=pattern, n=count: len(said(home, pattern)) >= n)
            assert home.child is not None and home.child.poll() is None, home.text()
            home.until("it is an error of the run", lambda home=home, pattern=pattern: [
                row for row in read_lines(home.paths.errors) if re.search(pattern, row["text"])])
