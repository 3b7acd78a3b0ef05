"""The SDK of Tinker and its recipes, unmodified, against a whole service. They have an environment without busrl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import ROOT, Run, running

PYTHON = Path(os.environ.get("TINKER_PYTHON") or ROOT / ".venv" / "tinker" / "bin" / "python")  # of `make tinker-env`
SDK, NAME = Path(__file__).parent / "sdk", "Qwen/Qwen3-8B"
LIMIT_S = 540
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason="make tinker-env")]
BOTH = ["batch_size=4", "max_steps=2", "lora_rank=4", "learning_rate=3e-3", "save_every=1", f"model_name={NAME}"]
RECIPES = {
    "sl_loop": [*BOTH, "max_length=512"],
    "rl_loop": [*BOTH, "group_size=4", "max_tokens=8", "loss_fn=importance_sampling"],
}


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, SDK / "hub.py", folder], check=True, timeout=LIMIT_S)
    return folder


@contextmanager
def service(directory: Path, hub: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a service, and the environment of its clients."""
    run = Run(directory, f"model.path={hub / NAME}", f"tinker.base={NAME}", "tinker.port=0", "tinker.context=1024",
              config=ROOT / "configs" / "tinker.toml")
    with running(run):
        url = run.told("tinker")["base_url"]
        key = (directory / "tinker.key").read_text()
        yield url, {**os.environ, "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def test_every_call_of_the_sdk_is_answered(tmp_path: Path, hub: Path) -> None:
    with service(tmp_path / "run", hub) as (url, environment):
        done = subprocess.run([PYTHON, SDK / "drive.py", url, NAME], cwd=hub, env=environment, capture_output=True,
                              text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_sdk_lists_deletes_and_downloads_what_it_saved(tmp_path: Path, hub: Path) -> None:
    with service(tmp_path / "run", hub) as (url, environment):
        done = subprocess.run([PYTHON, SDK / "lists.py", url, NAME, tmp_path], cwd=hub, env=environment,
                              capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_both_recipes_run_to_their_end_side_by_side(tmp_path: Path, hub: Path) -> None:
    with service(tmp_path / "run", hub) as (url, environment):
        children = {
            name: subprocess.Popen(
                [PYTHON, "-m", f"tinker_cookbook.recipes.{name}", f"base_url={url}", f"log_path={tmp_path / name}",
                 *settings],
                cwd=hub, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for name, settings in RECIPES.items()
        }
        for name, child in children.items():
            said, _ = child.communicate(timeout=LIMIT_S)
            assert child.returncode == 0, f"{name}: {said}"
            checkpoints = (tmp_path / name / "checkpoints.jsonl").read_text().splitlines()
            assert "final" in json.loads(checkpoints[-1])["state_path"]


def test_kills_change_nothing_that_the_sdk_is_told(tmp_path: Path, hub: Path) -> None:
    command = [PYTHON, SDK / "crash.py", ROOT / ".venv" / "bin" / "busrl", ROOT / "configs" / "tinker.toml",
               hub / NAME, NAME, "5", "2"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=hub, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
                          check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] > 2 and result["equal"], result
