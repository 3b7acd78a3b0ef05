"""Manifests of Kubernetes and a job of Slurm: the fields that they need, and what they run. No cluster is asked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from busrl import curve
from busrl.cli.command import main
from busrl.errors import UserError
from busrl.hosts import clusters
from busrl.preflight.load import load
from busrl.topology import Topology

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
HOSTS = ["process.rollout.hosts=['gpu-1', 'gpu-0']", "process.rollout.devices=['0', '1']", "process.rollout.count=2",
         "bus.endpoint='tcp://10.0.0.1:5600'"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("for") / "keys"
    curve.init(folder)
    for host in ("gpu-0", "gpu-1"):
        curve.add(folder, host)
    return [*HOSTS, f"bus.keys='{folder}'", "run.name='My.run'"]


@pytest.fixture(scope="module")
def topology(settings: list[str]) -> Topology:
    return load(QUICKSTART, settings)


def pods(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pods' specs by name, of either kind."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        return {job["name"]: job["template"]["spec"]["template"]["spec"] for job in spec["replicatedJobs"]}
    both = spec["leaderWorkerTemplate"]
    return {"home": both["leaderTemplate"]["spec"], "hosts": both["workerTemplate"]["spec"]}


def test_a_jobset_has_a_pod_for_home_and_each_host(topology: Topology) -> None:
    manifest = clusters.jobset(topology)
    assert (manifest["apiVersion"], manifest["metadata"]["name"]) == ("jobset.x-k8s.io/v1alpha2", "my-run")
    jobs = {job["name"]: job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]}
    assert {name: (job["parallelism"], job["completions"]) for name, job in jobs.items()} == {
        "home": (1, 1), "hosts": (2, 2),
    }
    assert all(job["completionMode"] == "Indexed" and job["backoffLimit"] > 1000 for job in jobs.values())
    assert all(job["template"]["spec"]["restartPolicy"] == "OnFailure" for job in jobs.values())
    assert manifest["spec"]["successPolicy"]["targetReplicatedJobs"] == ["home"]
    assert "tcp://my-run-home-0-0.my-run:5600" in script(pods(manifest)["hosts"])


def test_a_leader_worker_set_is_one_group_whose_rings_outlive_a_pod(topology: Topology) -> None:
    manifest = clusters.leader_worker_set(topology)
    assert (manifest["apiVersion"], manifest["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    both = manifest["spec"]["leaderWorkerTemplate"]
    assert (manifest["spec"]["replicas"], both["size"], both["restartPolicy"]) == (1, 3, "None")


@pytest.mark.parametrize("kind", clusters.MANIFESTS)
def test_every_mount_has_its_volume_and_shared_memory_is_the_pods(kind: str, topology: Topology) -> None:
    for spec in pods(clusters.MANIFESTS[kind](topology)).values():
        [container] = spec["containers"]
        assert container["image"] == "IMAGE"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume.pop("name"): volume for volume in json.loads(json.dumps(spec["volumes"]))}
        assert mounts.keys() == volumes.keys() and mounts["shm"] == "/dev/shm"
        assert volumes["shm"] == {"emptyDir": {"medium": "Memory"}} and "secret" in volumes["keys"]


def test_hosts_get_their_devices_and_home_none(topology: Topology) -> None:
    by_name = pods(clusters.jobset(topology))
    assert by_name["hosts"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert "resources" not in by_name["home"]["containers"][0]


def test_an_item_of_several_devices_counts_each(settings: list[str]) -> None:
    by_name = pods(clusters.jobset(load(QUICKSTART, [*settings, "process.rollout.devices=['0,1', '2,3']"])))
    assert by_name["hosts"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 4}}


def script(spec: dict[str, Any]) -> str:
    shell, flag, text = spec["containers"][0]["command"]
    assert (shell, flag) == ("sh", "-c")
    return str(text)


@pytest.mark.parametrize("kind, index", [("jobset", {"JOB_COMPLETION_INDEX": "1"}), ("lws", {"LWS_WORKER_INDEX": "2"})])
def test_a_pod_runs_the_command_with_its_name_and_keys(
    kind: str, index: dict[str, str], topology: Topology, tmp_path: Path
) -> None:
    by_name = pods(clusters.MANIFESTS[kind](topology))
    program = tmp_path / "busrl"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; stat -c %a keys keys/file\n')
    program.chmod(0o755)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("a key")
    texts = {}
    for name, spec in by_name.items():
        text = script(spec).replace(clusters.SECRETS, "secret").replace(clusters.KEYS, "keys")
        done = subprocess.run(
            ["sh", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "POD_IP": "10.1.2.3", "LWS_LEADER_ADDRESS": "leader", **index},
        )
        texts[name] = done.stdout.split("\n")
        assert texts[name][-3:] == ["700", "600", ""]
    assert texts["hosts"][0] == "host" and texts["hosts"][3] == "keys/gpu-1.key_secret"
    assert texts["hosts"][1] == ("tcp://leader:5600" if kind == "lws" else "tcp://my-run-home-0-0.my-run:5600")
    assert texts["home"][0] == "launch" and 'bus.endpoint="tcp://10.1.2.3:5600"' in texts["home"]
    assert 'bus.keys="keys"' in texts["home"]


def test_a_job_of_slurm_gives_each_host_its_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str]
) -> None:
    options = [part for setting in (*HOSTS[:3], "run.name='My.run'") for part in ("--set", setting)]
    assert main(["launch", str(QUICKSTART), "--emit", "slurm", *options]) == 0, "address and keys are made in the job"
    job = tmp_path / "job.sh"
    job.write_text(capsys.readouterr().out)
    directives = [line.split()[1] for line in job.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--job-name=my-run", "--nodes=3", "--gpus-per-node=2", "--no-kill"} <= set(directives)
    for name in ("busrl", "srun"):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >> {tmp_path}/said\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'first\\nsecond\\nthird\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "TMPDIR": str(tmp_path)}
    subprocess.run(["bash", job], check=True, env=environment)
    init, launched = (tmp_path / "said").read_text().split("busrl\n")[1:]
    assert init.splitlines() == ["keys", "init", "--dir", f"{tmp_path}/my-run-17.keys"]
    words = launched.splitlines()
    assert words[:2] == ["launch", str(QUICKSTART)] and words[words.index("--run-dir") + 1] == "runs/my-run-17"
    assert f'bus.keys="{tmp_path}/my-run-17.keys"' in words and HOSTS[0] in words
    [start] = [json.loads(word.removeprefix("hosts.start=")) for word in words if word.startswith("hosts.start=")]
    load(QUICKSTART, [*settings, f"hosts.start={json.dumps(start)}"])
    for host, node in (("gpu-0", "second"), ("gpu-1", "third")):
        (tmp_path / "said").unlink()
        subprocess.run([part.replace("{host}", host) for part in start], check=True, env=environment)
        step = (tmp_path / "said").read_text().split()
        assert f"--nodelist={node}" in step and step[-3:] == ["busrl", "host", "-"]


def test_a_job_of_slurm_goes_on_in_the_resumed_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str]
) -> None:
    options = [part for setting in HOSTS[:3] for part in ("--set", setting)]
    command = ["launch", str(QUICKSTART), "--emit", "slurm", *options]
    assert main([*command, "--resume", str(tmp_path / "earlier")]) == 0
    assert f"--run-dir {tmp_path}/earlier " in capsys.readouterr().out
    assert main([*command, "--resume", "never"]) != 0
    assert "would forget its run" in capsys.readouterr().err


def test_the_command_prints_it_and_a_run_on_one_host_is_refused(
    capsys: pytest.CaptureFixture[str], settings: list[str]
) -> None:
    options = [part for setting in settings for part in ("--set", setting)]
    assert main(["launch", str(QUICKSTART), "--emit", "lws", *options]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "LeaderWorkerSet"
    with pytest.raises(UserError, match="no other host"):
        clusters.jobset(load(QUICKSTART, []))
