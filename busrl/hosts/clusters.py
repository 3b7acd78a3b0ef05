"""Manifests that start a run on a cluster: a JobSet or LeaderWorkerSet of Kubernetes as JSON, or a job of Slurm.

Made from a topology alone; talks to nothing. One pod or node is home and runs `busrl launch`. Every other runs
`busrl host`, which in a job of Slurm is a step that launch starts. Knows nothing of a cluster: image, Secrets,
partition and the place of the run directory are only named.

- Keys reach pods as files of a Secret, copied to a place where they can have the mode that busrl requires.
- In a job of Slurm home makes its own keys, and hosts get theirs on the standard input of their step.
- A container that ends is started again in its pod, whose /dev/shm lives on: hosts and home go on with their rings.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from busrl import curve
from busrl.errors import UserError
from busrl.preflight.load import load
from busrl.topology import Topology

PORT = 5600
SECRETS, KEYS, FILES, RUN = "/etc/busrl/keys", "/tmp/keys", "/etc/busrl/run", "/run/busrl"
COPY_KEYS = f"umask 077; rm -rf {KEYS}; cp -rL {SECRETS} {KEYS}"
STEP = "--nodes=1 --ntasks=1 --nodelist=$node --overlap --cpu-bind=none --no-kill=off"
STARTS = 1_000_000  # of a pod, before its job counts as failed


def emitted(options: argparse.Namespace) -> str:
    """The manifest for `busrl launch --emit`; the cluster replaces the address and the keys."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "keys"
        curve.init(directory)
        replaced = [f'bus.endpoint="tcp://127.0.0.1:{PORT}"', f'bus.keys="{directory}"']
        overrides = [*options.overrides, *replaced, 'hosts.start=["true", "{host}"]']
        topology = load(options.topology, overrides, options.run_dir)
    if options.emit != "slurm":
        return manifest(options.emit, topology)
    if options.resume == "never":
        raise UserError(
            "--resume never with --emit slurm: a job that is queued again would forget its run; a new job has a run "
            "directory of its own, or give it one with --run-dir"
        )
    run_dir = options.run_dir or ("" if options.resume == "auto" else Path(options.resume).resolve())
    return slurm(topology, str(options.topology), options.overrides, str(run_dir))


def jobset(topology: Topology) -> dict[str, Any]:
    """`home`, a job of one pod whose end is that of the run, and `hosts`, an indexed job of the others."""
    name, hosts = _names(topology)
    host = _host(topology, f"tcp://{name}-home-0-0.{name}:{PORT}", '"$JOB_COMPLETION_INDEX"')
    return _manifest("jobset.x-k8s.io/v1alpha2", "JobSet", name, {
        "network": {"enableDNSHostnames": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["home"]},
        "replicatedJobs": [_job("home", 1, _home(topology)), _job("hosts", len(hosts), host)],
    })


def leader_worker_set(topology: Topology) -> dict[str, Any]:
    """A group whose leader is home. Containers that end are started again: delete it when the run is over."""
    name, hosts = _names(topology)
    host = _host(topology, f"tcp://$LWS_LEADER_ADDRESS:{PORT}", '"$((LWS_WORKER_INDEX - 1))"')
    return _manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, {
        "replicas": 1,
        "leaderWorkerTemplate": {
            "size": 1 + len(hosts),
            "restartPolicy": "None",  # the others' rings outlive a pod that is started again
            "leaderTemplate": {"spec": _home(topology)}, "workerTemplate": {"spec": host},
        },
    })


MANIFESTS: dict[str, Callable[[Topology], dict[str, Any]]] = {"jobset": jobset, "lws": leader_worker_set}


def slurm(topology: Topology, source: str, overrides: Sequence[str], run_dir: str) -> str:
    """A job script for sbatch, whose first node runs `busrl launch source` with the overrides.

    Without a `run_dir` its name has the job's number, so that a job that is queued again goes on with its run.
    """
    name, hosts = _names(topology)
    arguments = shlex.join([source, *(word for override in overrides for word in ("--set", override))])
    place = shlex.quote(run_dir) if run_dir else f'"runs/{name}-$SLURM_JOB_ID"'
    numbers = " ".join(f"{host}) n={number}p;;" for number, host in enumerate(hosts, 2))  # the first node is home
    node = "node=$(scontrol show hostnames | sed -n $n)"  # of all that the job had, those that it lost included
    step = f"case {{host}} in {numbers} esac; {node}; exec srun {STEP} busrl host -"
    start = "hosts.start=" + json.dumps(["sh", "-c", step])
    devices = max(_devices(topology, host) for host in ("", *hosts))
    gpus = f"#SBATCH --gpus-per-node={devices}\n" if devices else ""
    return f"""\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={1 + len(hosts)}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --no-kill  # a lost node costs what its host had, not the run
#SBATCH --open-mode=append
set -eu
keys="${{TMPDIR:-/tmp}}/{name}-$SLURM_JOB_ID.keys"
[ -d "$keys" ] || busrl keys init --dir "$keys"
address=$(hostname -I | cut -d' ' -f1)
exec busrl launch {arguments} --run-dir {place} \\
    --set "bus.endpoint=\\"tcp://$address:{PORT}\\"" --set "bus.keys=\\"$keys\\"" \\
    --set {shlex.quote(start)}
"""


def manifest(kind: str, topology: Topology) -> str:
    """A manifest of one of the kinds of `MANIFESTS` as JSON. UserError: the topology names no other host."""
    return json.dumps(MANIFESTS[kind](topology), indent=2) + "\n"


def _names(topology: Topology) -> tuple[str, tuple[str, ...]]:
    """The object's name, and the hosts. UserError: there are none."""
    if not topology.host_names:
        raise UserError('no other host: `hosts = ["gpu-0", ...]` of a [[process]] names those that get pods or nodes')
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in topology.run.name.lower())
    return name.strip("-")[:40].strip("-") or "busrl", topology.host_names


def _manifest(api: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _job(name: str, pods: int, spec: dict[str, Any]) -> dict[str, Any]:
    job = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "backoffLimit": STARTS,
           "template": {"spec": {**spec, "restartPolicy": "OnFailure"}}}
    return {"name": name, "replicas": 1, "template": {"spec": job}}


def _home(topology: Topology) -> dict[str, Any]:
    name, hosts = _names(topology)
    overrides = f"--set bus.endpoint=\\\"tcp://$POD_IP:{PORT}\\\" --set bus.keys=\\\"{KEYS}\\\""
    listed = [{"key": f"{host}.key", "path": f"allowed/{host}.key"} for host in hosts]
    pair = [{"key": file, "path": file} for file in ("server.key", "server.key_secret")]
    launch = f"exec busrl launch {FILES}/topology.toml --run-dir {RUN} {overrides}"
    return _pod(topology, [""], f"{COPY_KEYS}; {launch}", [
        Volume("keys", SECRETS, {"secret": {"secretName": f"{name}-home", "items": [*pair, *listed]}}),
        Volume("topology", FILES, {"configMap": {"name": f"{name}-topology"}}),
        Volume("run", RUN, {"persistentVolumeClaim": {"claimName": f"{name}-run"}}),
    ])


def _host(topology: Topology, endpoint: str, index: str) -> dict[str, Any]:
    """The pod of the other hosts: it finds its name in their list by its index, and has the devices that the largest
    host needs."""
    name, hosts = _names(topology)
    choice = f"set -- {shlex.join(hosts)}; shift {index}"
    run = f"exec busrl host {endpoint} --keys {KEYS}/$1.key_secret --wait 600"
    return _pod(topology, hosts, f"{choice}; {COPY_KEYS}; {run}", [
        Volume("keys", SECRETS, {"secret": {"secretName": f"{name}-hosts"}}),
    ])


class Volume(NamedTuple):
    """A volume of a pod: its name, its path in the container, and where its files come from."""

    name: str
    path: str
    source: dict[str, Any]


def _pod(topology: Topology, hosts: Sequence[str], script: str, volumes: list[Volume]) -> dict[str, Any]:
    volumes = [*volumes, Volume("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})]
    devices = max(_devices(topology, host) for host in hosts)
    container = {
        "name": "busrl", "image": "IMAGE", "command": ["sh", "-c", script],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "volumeMounts": [{"name": volume.name, "mountPath": volume.path} for volume in volumes],
        **({"resources": {"limits": {"nvidia.com/gpu": devices}}} if devices else {}),
    }
    return {"containers": [container], "volumes": [{"name": volume.name, **volume.source} for volume in volumes]}


def _devices(topology: Topology, host: str) -> int:
    """The number of devices that the entries of a host (home: "") name. Entries may share devices."""
    here = [entry for entry in topology.process if entry.is_at(host)]
    return len({device.strip() for entry in here for item in entry.devices for device in item.split(",")})
