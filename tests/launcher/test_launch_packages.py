"""A package that is not installed is named with the extra that brings it, before anything of a run starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# As in a Python without these packages: nobody finds them.
BLOCKS = """
import os
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in os.environ["LACKS"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocked())
"""
ENDPOINT = """[model]
path = "tiny:sort"
[data]
train = "tiny:sort"
[learner]
lr = 1e-4
[openai]
base_url = "http://127.0.0.1:9/v1"
[[process]]
role = "rollout"
engine = "openai"
[weights]
mode = "fully-async"
"""


def busrl(folder: Path, lacks: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(BLOCKS)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "LACKS": lacks, "XDG_CACHE_HOME": str(folder / "c")}
    command = [sys.executable, "-m", "busrl.cli", *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("lacks", "verb", "told"), [
    ("torch transformers", "launch", "lacks torch, transformers, which learner cannot run without (with scripted "
                                     "engines too it trains a real model): pip install 'busrl[train]'"),
    ("torch", "check", "lacks torch, which learner cannot run without"),
])
def test_a_scripted_run_without_torch_is_refused_with_the_extra(
    tmp_path: Path, lacks: str, verb: str, told: str
) -> None:
    more = ["--run-dir", str(tmp_path / "run")] if verb == "launch" else []
    done = busrl(tmp_path, lacks, verb, str(ROOT / "configs/scripted.toml"), *more)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "run").exists() and not (tmp_path / "c").exists(), "nothing was made or started"


def test_an_endpoint_names_the_extras_of_its_client_and_the_learner(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(ENDPOINT)
    done = busrl(tmp_path, "torch aiohttp", "check", "own.toml")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    told = "lacks torch, aiohttp, which learner and rollout/0 cannot run without: pip install 'busrl[agents,train]'"
    assert told in done.stderr, done.stderr


def test_user_functions_of_a_learner_without_torch_are_no_separate_finding(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(ENDPOINT.replace("lr = 1e-4", 'lr = 1e-4\nloss = "own.py:loss"'))
    (tmp_path / "own.py").write_text("import torch\n\n\ndef loss(inputs, settings):\n    return inputs\n")
    done = busrl(tmp_path, "torch", "check", "own.toml")
    assert done.stderr.startswith("busrl: ") and "lacks torch, which learner cannot" in done.stderr.splitlines()[0]


def test_a_verb_whose_package_is_missing_names_the_extra(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    (run / "topology.json").write_text(json.dumps({}))
    done = busrl(tmp_path, "torch", "export", "run", "--out", "model")
    assert done.returncode == 2 and "`busrl export` needs torch, which " in done.stderr, done.stderr
    assert done.stderr.endswith("pip install 'busrl[train]'\n")
