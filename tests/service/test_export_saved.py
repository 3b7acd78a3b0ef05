"""What clients saved, exported: a whole model computes as the model of the service does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from bases import data_of, supervised, train, write_base

from busrl.errors import UserError
from busrl.service.adapters import Adapter
from busrl.service.export import export_saved
from busrl.service.folders import ServiceFolders
from busrl.service.operations import write_folder
from busrl.service.tenants import Tenants
from busrl.topology.schema import Model

torch.set_num_threads(1)


class Topology:
    """All of a topology that matters here."""

    def __init__(self, base: Path) -> None:
        self.model = Model(path=str(base), dtype="float32")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tenants]:
    """A run directory in which a trained model was saved in each way."""
    directory = tmp_path_factory.mktemp("export")
    tenants, where = Tenants(write_base(directory / "base")), ServiceFolders(directory)
    tenants.create("s:train:0", Adapter(rank=4, seed=1))
    train(tenants, "s:train:0", 1)
    about = {"by": "s:train:0:1", "weights": 0, "adapter": {"rank": 4}}

    def snapshot(folder: Path) -> None:
        tenants.snapshot("s:train:0", folder)

    write_folder(where.saved_as("s:train:0", "weights", "a"), about,
                 lambda folder: tenants.save_state("s:train:0", folder))
    write_folder(where.saved_as("s:train:0", "external_weights", "a"), about, snapshot)
    write_folder(where.snapshot(5), {"by": "s:train:0:1"}, snapshot)
    write_folder(where.saved_as("s:train:0", "sampler_weights", "a"), {**about, "weights": 5}, lambda folder: None)
    return directory, tenants


def logprobs(tenants: Tenants, name: str) -> list[Any]:
    outputs, _ = tenants.forward_backward(name, supervised(data_of(9)), "cross_entropy", {}, True)
    return [output["logprobs"] for output in outputs]


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_an_exported_model_computes_as_the_model_of_its_client(
    kind: str, run: tuple[Path, Tenants], tmp_path: Path
) -> None:
    directory, tenants = run
    (tmp_path / "out").mkdir()
    export_saved(directory, Topology(directory / "base"), f"tinker://s:train:0/{kind}/a",  # type: ignore[arg-type]
                 tmp_path / "out", "", False)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    exported = Tenants(tmp_path / "out")
    exported.create("untrained", Adapter(rank=1, seed=0))
    for ours, theirs in zip(logprobs(exported, "untrained"), logprobs(tenants, "s:train:0"), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs), atol=1e-4, rtol=0)


def test_an_adapter_of_a_state_is_that_of_its_snapshot(run: tuple[Path, Tenants], tmp_path: Path) -> None:
    directory, _ = run
    files = []
    for kind in ("weights", "sampler_weights"):
        (tmp_path / kind).mkdir()
        export_saved(directory, Topology(directory / "base"), f"tinker://s:train:0/{kind}/a",  # type: ignore[arg-type]
                     tmp_path / kind, "", True)
        files.append((tmp_path / kind / "adapter_model.safetensors").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(("path", "said"), [
    ("tinker://s:train:0/weights/b", "external_weights/a, sampler_weights/a, weights/a"),
    ("tinker://s:train:1/weights/a", "there are: none"), ("weights/a", "not a path of saved weights"),
])
def test_what_was_never_saved_is_refused_by_its_name(
    path: str, said: str, run: tuple[Path, Tenants], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        export_saved(run[0], Topology(run[0] / "base"), path, tmp_path / "out", "", False)  # type: ignore[arg-type]
