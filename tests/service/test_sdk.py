"""The SDK of Tinker and its recipes, unmodified, against a whole service. They have an environment without busrl."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import ROOT, Run, running
from replays import Answers, alone, require_close, sessions

PYTHON = Path(os.environ.get("TINKER_PYTHON") or ROOT / ".venv" / "tinker" / "bin" / "python")  # of `make tinker-env`
VERSIONS = sorted(PYTHON.parents[1].glob("versions/*"))  # of `make tinker-versions`
SDK, NAME = Path(__file__).parent / "sdk", "Qwen/Qwen3-8B"
LIMIT_S = 540
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason="make tinker-env")]
BOTH = ["batch_size=4", "max_steps=2", "lora_rank=4", "learning_rate=3e-3", "save_every=1", f"model_name={NAME}"]
RECIPES = {
    "sl_loop": [*BOTH, "max_length=512"],
    "rl_loop": [*BOTH, "group_size=4", "max_tokens=8", "loss_fn=importance_sampling"],
}
Environment = Mapping[str, str]


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, SDK / "hub.py", folder], check=True, timeout=LIMIT_S)
    return folder


def clients(hub: Path, **more: str) -> dict[str, str]:
    """The environment of clients; what they keep of a data set is not taken for that of another hub."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(hub / "cache"), "OMP_NUM_THREADS": "1", **more}


def run_of(directory: Path, hub: Path, *settings: str) -> Run:
    return Run(directory, f"model.path={hub / NAME}", f"tinker.base={NAME}", "tinker.port=0", "tinker.context=1024",
               *settings, config=ROOT / "configs" / "tinker.toml")


@contextmanager
def service(directory: Path, hub: Path, *settings: str) -> Iterator[tuple[str, Environment]]:
    """The address of a service, and the environment of its clients."""
    with running(run_of(directory, hub, *settings)) as run:
        url = run.told("tinker")["base_url"]
        yield url, clients(hub, TINKER_API_KEY=(directory / "tinker.key").read_text())


def said(command: list[object], hub: Path, environment: Environment) -> str:
    """What a program of the SDK's environment prints; it must end well."""
    done = subprocess.run([PYTHON, *map(str, command)], cwd=hub, env=environment, capture_output=True, text=True,
                          timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def recipe(name: str, url: str, log: Path, *settings: str) -> list[object]:
    return ["-m", f"tinker_cookbook.recipes.{name}", f"base_url={url}", f"log_path={log}", *settings]


def test_every_call_of_the_sdk_is_answered(tmp_path: Path, hub: Path) -> None:
    with service(tmp_path / "run", hub) as (url, environment):
        said([SDK / "drive.py", url, NAME], hub, environment)


def test_the_sdk_lists_deletes_and_downloads_what_it_saved(tmp_path: Path, hub: Path) -> None:
    with service(tmp_path / "run", hub) as (url, environment):
        said([SDK / "lists.py", url, NAME, tmp_path], hub, environment)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_all_weights_are_trained_saved_and_sampled_by_the_sdk(tmp_path: Path, hub: Path) -> None:
    with service(tmp_path / "run", hub, "tinker.weights=full") as (url, environment):
        printed = said([SDK / "whole.py", url, NAME], hub, environment)
    assert "losses" in printed and "refused" in printed


@pytest.mark.skipif(not VERSIONS, reason="make tinker-versions")
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_other_versions_of_the_sdk_train_and_sample(tmp_path: Path, hub: Path, version: Path) -> None:
    with service(tmp_path / "run", hub) as (url, environment):
        printed = said([SDK / "small.py", url, NAME], hub, {**environment, "PYTHONPATH": str(version)})
    assert f"tinker {version.name}" in printed


def test_four_recipes_at_once_get_what_each_gets_alone(tmp_path: Path, hub: Path) -> None:
    """Two of each kind, to their last checkpoints; then the requests of each in a service of its own."""
    together = tmp_path / "together"
    with service(together, hub) as (url, environment):
        children = {
            f"{name}-{number}": subprocess.Popen(
                [PYTHON, *recipe(name, url, tmp_path / f"{name}-{number}", *settings)],
                cwd=hub, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for name, settings in RECIPES.items() for number in range(2)
        }
        for name, child in children.items():
            printed, _ = child.communicate(timeout=LIMIT_S)
            assert child.returncode == 0, f"{name}: {printed}"
            checkpoints = (tmp_path / name / "checkpoints.jsonl").read_text().splitlines()
            assert "final" in json.loads(checkpoints[-1])["state_path"]
    expected = Answers(together).follow()
    assert len(sessions(together)) == len(children)
    for number, session in enumerate(sessions(together)):
        directory = tmp_path / f"alone-{number}"
        asked, answers = alone(together, session, directory), Answers(directory)
        with running(run_of(directory, hub)) as run:
            run.until("all answers", lambda answers=answers, asked=asked: asked <= answers.follow().keys())
        for name in sorted(asked):
            require_close(answers.by_name[name], expected[name])


def test_a_recipe_s_reward_rises(tmp_path: Path) -> None:
    """From about 0.3, in fewer steps than the three seeds of `benchmarks service` get."""
    subprocess.run([sys.executable, SDK / "hub.py", tmp_path / "hub"], check=True, timeout=LIMIT_S)
    said([SDK / "teach.py", 0], tmp_path / "hub", clients(tmp_path / "hub"))
    settings = ["batch_size=16", "group_size=8", "max_tokens=8", "max_steps=30", "lora_rank=16", "learning_rate=3e-3",
                f"model_name={NAME}", "loss_fn=importance_sampling", "save_every=0"]
    with service(tmp_path / "run", tmp_path / "hub") as (url, environment):
        said(recipe("rl_loop", url, tmp_path / "log", *settings), tmp_path / "hub", environment)
    lines = map(json.loads, (tmp_path / "log" / "metrics.jsonl").read_text().splitlines())
    rewards = [line["reward/total"] for line in lines if "reward/total" in line]
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:3]) + 0.2, rewards


def test_kills_change_nothing_that_the_sdk_is_told(tmp_path: Path, hub: Path) -> None:
    busrl, topology = ROOT / ".venv" / "bin" / "busrl", ROOT / "configs" / "tinker.toml"
    printed = said([SDK / "crash.py", busrl, topology, hub / NAME, NAME, 30, 1.2], hub, clients(hub))
    result = json.loads(printed.splitlines()[-1])
    assert len(result["killed"]) == 5 and result["equal"] and result["audit"] == 0, result
