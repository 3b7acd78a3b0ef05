"""Runs whose hosts are started by Slurm and by Ray, each a real cluster of three nodes on this machine: a host that is
killed and a node that is lost cost no sample. `make test-all` installs both; without them these tests are skipped."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from checks import check_end
from harness import ROOT, Run, running
from host_scene import Home
from test_placement import HOST, said, start

from busrl.quickstart import ensure

RAY_PYTHON = ROOT / ".venv" / "ray" / "bin" / "python"  # of `make ray-env`
STEPS = 60
NODES = ("n1", "n2", "n3")


class RayCluster:
    def __init__(self, environment: dict[str, str]) -> None:
        self.child = subprocess.Popen(
            [RAY_PYTHON, Path(__file__).with_name("ray_cluster.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment,
        )
        self.address = self.said()

    def said(self) -> str:
        assert self.child.stdout is not None
        return next(line for line in self.child.stdout).strip()

    def tell(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{line}\n")
        self.child.stdin.flush()
        assert self.said() == "done"

    def close(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait(60)


def last_pid(file: Path) -> int:
    """The last pid in a file of one a line; 0 before the first."""
    return int(file.read_text().split()[-1]) if file.exists() else 0


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not RAY_PYTHON.exists(), reason="make ray-env")
def test_ray_hosts_return_after_their_actor_or_node_is_gone(
    tmp_path: Path, quickstart: None
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short,  # paths of sockets have at most 107 bytes
        contextlib.closing(RayCluster({**environment, "RAY_TMPDIR": short})) as cluster,
    ):
        pids = {name: tmp_path / f"pids-{name}" for name in ("gpu-0", "gpu-1")}
        command = ["sh", "-c", f"echo $$ >> {tmp_path}/pids-$0; {HOST} {tmp_path}/scratch-$0", "{host}"]
        placed = start([str(RAY_PYTHON), str(ROOT / "examples" / "ray_host.py"), "{host}", *command])
        home = Home(tmp_path, placed, names=("gpu-0", "gpu-1"), steps=STEPS)
        home.env["RAY_ADDRESS"] = cluster.address
        with running(home):
            home.until_step(5)
            host = last_pid(pids["gpu-0"])
            os.kill(psutil.Process(host).ppid(), signal.SIGKILL)
            home.until("gpu-0 is back", lambda: last_pid(pids["gpu-0"]) != host)
            assert not alive(host), "the kernel ends what the actor ran"
            home.until_step(home.step() + 5)
            cluster.tell("remove gpu-1")
            home.until("gpu-1 is missed", lambda: said(home, r"host gpu-1 ended \(exit code 1\): gpu-1: "))
            home.until_step(home.step() + 5)
            cluster.tell("add gpu-1")
            home.until("gpu-1 works again", lambda: alive(last_pid(pids["gpu-1"])))
            assert home.wait(300) == 0, home.tail()
    check_end(home, 0)
    assert not [file for file in pids.values() if alive(last_pid(file))]


class Slurm:
    """One slurmctld and three slurmd with an authentication of their own, as root on loopback."""

    def __init__(self, folder: Path) -> None:
        missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
        if missing or os.geteuid() != 0:
            pytest.skip(f"no Slurm here ({', '.join(missing) or 'it needs root'}): install slurm-wlm and munge")
        self.folder, self.children = folder, dict[str, subprocess.Popen[bytes]]()
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        host = os.uname().nodename
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        socket = folder / "munge.socket"
        (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmdTimeout=10
ReturnToService=2
KillWait=5
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[16821-16823] CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        options = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
        self.begin("munged", "--foreground", "--force", f"--socket={socket}", *options)
        self.begin("slurmctld", "-D")
        for node in NODES:
            self.begin("slurmd", "-D", "-N", node, name=node)

    def begin(self, *command: str, name: str = "") -> None:
        with open(self.folder / "daemons.out", "ab") as out:
            self.children[name or command[0]] = subprocess.Popen(
                command, stdout=out, stderr=out, env=self.environment, start_new_session=True
            )

    def ask(self, *command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False).stdout

    def close(self) -> None:
        self.ask("scancel", "--full", "--user=root")
        end = time.monotonic() + 20
        while self.ask("squeue", "--noheader") and time.monotonic() < end:
            continue  # the answer of slurmctld is what paces this
        for child in self.children.values():
            child.kill()
            child.wait(30)


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Slurm(Path(folder))) as cluster:
        yield cluster


class Job(Run):
    """A run that is a job of Slurm, as `busrl launch --emit slurm` prints it."""

    def __init__(self, folder: Path, cluster: Slurm) -> None:
        super().__init__(folder / "run", 'process.rollout.hosts=["gpu-0", "gpu-1"]', steps=2 * STEPS)
        (folder / "bin").mkdir()
        busrl = folder / "bin" / "busrl"
        self.pids = {node: folder / f"pids-{node}" for node in NODES}  # of hosts
        busrl.write_text(
            f'#!/bin/sh\n[ "$1" != host ] || echo $$ >> {folder}/pids-$SLURMD_NODENAME\n'
            f'PYTHONPATH={ROOT} exec {sys.executable} -m busrl.cli "$@"\n'
        )
        busrl.chmod(0o755)
        self.env |= {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_CONF": cluster.environment["SLURM_CONF"]}
        self.env |= {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder)}
        model = ensure("tiny:sort").model.parent  # a cache of the job's own, but for what takes minutes to make
        (folder / "cache" / "busrl").mkdir(parents=True)
        (folder / "cache" / "busrl" / model.name).symlink_to(model)
        self.script = folder / "job.sh"

    def start(self, *arguments: str) -> Run:
        emit = ["busrl", *self.command(), "--emit", "slurm"]
        self.forget()
        environment = {**os.environ, **self.env}
        self.script.write_text(subprocess.run(
            emit, check=True, capture_output=True, text=True, env=environment, cwd=ROOT
        ).stdout)
        self.child = subprocess.Popen(
            ["sbatch", "--wait", f"--output={self.output}", self.script], cwd=ROOT, env=environment,
        )
        self.pidfd = os.pidfd_open(self.child.pid)
        return self


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slurm_job_keeps_its_run_despite_killed_steps_and_lost_nodes(
    tmp_path: Path, quickstart: None, slurm: Slurm
) -> None:
    job = Job(tmp_path, slurm)
    started: Callable[[str], int] = lambda host: len(said(job, f"host {host}: started"))  # noqa: E731
    with running(job):
        job.until_step(5)
        os.kill(last_pid(job.pids["n2"]), signal.SIGKILL)
        job.until("the host is started again", lambda: started("gpu-0") == 2)
        job.until_step(job.step() + 5)
        before = started("gpu-1")
        slurm.children["n3"].kill()
        host = last_pid(job.pids["n3"])
        for pid in (psutil.Process(host).ppid(), host):  # the step's own daemon, and what it ran
            os.kill(pid, signal.SIGKILL)
        slurm.ask("scontrol", "update", "nodename=n3", "state=down", "reason=test")
        job.until("its host is missed", lambda: said(job, r"host gpu-1 ended \(exit code "))
        job.until_step(job.step() + 5)
        slurm.begin("slurmd", "-D", "-N", "n3", name="n3")
        slurm.ask("scontrol", "update", "nodename=n3", "state=resume")
        job.until("its host is started again", lambda: started("gpu-1") > before)
        assert job.wait(300) == 0, job.tail()
    check_end(job, 0)
    assert not slurm.ask("squeue", "--noheader"), shlex.quote(job.text()[-500:])
