"""The checkpoint of another run that a run begins with, looked at before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]


def a_checkpoint(here: Path, **meta: object) -> Path:
    """Of a run with the model of `here`, as the learner lists its files."""
    folder = here / "runs" / "global_step_4"
    shutil.copytree(here / "model", folder / "model")
    (folder / "meta.json").write_text(json.dumps({"step": 4, "optimizer": "adamw", **meta}))
    names = [path for path in folder.rglob("*") if path.is_file()]
    listed = {str(path.relative_to(folder)): [path.stat().st_size, 0] for path in names}
    (folder / "files.json").write_text(json.dumps(listed))
    return folder


def test_a_run_can_begin_with_a_whole_checkpoint_of_its_model(here: Path, loaded: Loaded) -> None:
    topology = loaded("", f"learner.start_from={a_checkpoint(here)}")
    assert topology.learner.start_from.endswith("global_step_4") and topology.learner.start_optimizer


def test_leaving_an_optimiser_behind_without_a_checkpoint_is_warned_of(here: Path, loaded: Loaded) -> None:
    left = "learner.start_optimizer=false"
    (warning,) = (text for text in loaded("", left).derived.warnings if "start_optimizer" in text)
    assert "the run begins with model.path, which has no optimiser" in warning
    assert "set start_from, or remove it" in warning
    begun = loaded("", left, f"learner.start_from={a_checkpoint(here)}")
    assert not any("start_optimizer" in text for text in begun.derived.warnings)


def test_a_first_checkpoint_that_differs_is_refused_with_both_values(
    here: Path, refused: Refused
) -> None:
    folder = a_checkpoint(here, optimizer="adafactor", lora={"rank": 8})
    start = f"learner.start_from={folder}"
    adapter, optimizer = refused("", start)
    assert "lora.rank = 8, this run has 0" in adapter
    assert "learner.optimizer = 'adafactor', this run has 'adamw'" in optimizer
    config = folder / "model" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": ', '"num_hidden_layers": 1'))
    (cut,) = refused("", start)
    assert "config.json has " in cut and " bytes, " in cut and "name another checkpoint" in cut
    listed = json.loads((folder / "files.json").read_text())
    listed["model/config.json"][0] = config.stat().st_size
    (folder / "files.json").write_text(json.dumps(listed))
    (other,) = refused("", start)
    assert "of another model: layers 1" in other and " in model.path" in other
    (none,) = refused("", f"learner.start_from={here}")
    assert "no meta.json" in none and "global_step_N" in none


def test_a_checkpoint_in_shards_is_refused_with_its_export(here: Path, refused: Refused) -> None:
    folder = a_checkpoint(here)
    (folder / "shards").mkdir()
    for path in (folder / "model").glob("*.safetensors"):
        path.unlink()
    (problem,) = refused("", f"model.path={folder}")
    assert "weights in shards" in problem and "busrl export" in problem
