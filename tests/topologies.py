"""A small topology on disk: prompts, a model folder that looks like one, and a way to write and load variants."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.errors import TopologyError
from busrl.preflight.load import load
from busrl.topology import Topology

LR = "learner.lr=3e-4"  # the one key without a default that texts of [learner] can leave out here
BASE = """\
[model]
path = "model"
[data]
train = "train.jsonl"
[[process]]
role = "rollout"
[[process]]
role = "learner"
[[process]]
role = "reward"
"""


def write_model(folder: Path, context: int = 512) -> Path:
    """A model folder as far as a check without torch can tell: 6 parameters, tokens of up to 7 bytes."""
    folder.mkdir()
    config = {"architectures": ["TestLM"], "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 3}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    vocabulary = {"a": 0, "bb": 1, "ccccccc": 2}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with `model/` and `train.jsonl`."""
    write_model(tmp_path / "model")
    lines = [json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


Loader = Callable[..., Topology]


@pytest.fixture
def loaded(here: Path) -> Loader:
    """Load BASE with text appended, after overrides."""

    def run(extra: str = "", *overrides: str, base: str = BASE) -> Topology:
        (here / "t.toml").write_text(base + extra)
        given = "[learner]\nlr =" in base + extra or any(
            one.startswith(("learner.lr=", "learner.lr.")) for one in overrides
        )
        return load(here / "t.toml", overrides if given else (LR, *overrides))

    return run


@pytest.fixture
def refused(here: Path, loaded: Loader) -> Callable[..., list[str]]:
    """The messages of a topology that must be refused, without the folder's name."""

    def run(extra: str = "", *overrides: str, base: str = BASE) -> list[str]:
        with pytest.raises(TopologyError) as caught:
            loaded(extra, *overrides, base=base)
        return [str(problem).replace(f"{here}/", "") for problem in caught.value.problems]

    return run
