"""weights.transport and [lora]: what cannot work together is refused before anything starts, costs are told."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from busrl.errors import DiskFull
from busrl.preflight import engine_rules, machine
from busrl.preflight.explain import report
from busrl.preflight.findings import Finding
from busrl.topology import Topology
from busrl.topology.kinds import TransportKind
from busrl.topology.schema import Lora

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]

REFUSED = [
    ('[weights]\ntransport = "lora_hotswap"', "its versions are LoRA adapters, and none is trained; set lora.rank"),
    ('[weights]\ntransport = "lora_restart"', "none is trained"),
    ('[lora]\nrank = 4\ntargets = ["q_proj"]', "no layer 'q_proj' that an adapter could be put on; it has fc"),
    ('[lora]\nrank = 4\ntargets = ["embed"]', "no layer 'embed' that an adapter could be put on"),
    ('[lora]\nrank = 4\ntargets = ["layers.0.fc"]', "is not the last name of a layer"),
    ('[lora]\nrank = 4\ntargets = ["fc", "fc"]', "a layer is named twice"),
    (
        '[lora]\nrank = 4\ndropout = 0.1\n[learner]\ndeterministic = true\n[weights]\nmode = "sync"',
        "dropout differs in a step that is trained again",
    ),
    (
        '[weights]\ntransport = "checkpoint_restart"\nrestart_every = 3',
        "weights.restart_every = 3, learner.publish_every = 1, learner.trigger.n_min = 32, "
        'weights.mode = "batch-async": credit returns when a step is published: 3 x n_min = 96 > B = 75; '
        "publish_every x restart_every <= 2",
    ),
    ('[weights]\ntransport = "checkpoint_restart"\nrestart_every = 2\nmode = "sync"', "credit returns when"),
    ('[weights]\ntransport = "lora"', "one of"),
    ('[lora]\nrank = 4\nlayers = "fc"', "'fc' is no number of a layer; lora.targets has names"),
    ('[lora]\nrank = 4\nlayers = "3-1"', "'3-1' begins after its end"),
    ('[lora]\nrank = 4\nexperts = true', "lora.experts = true: the model has no experts; experts = false"),
]
WARNED = [
    ("[lora]\nalpha = 8", "lora.alpha = 8, lora.rank = 0: LoRA is off"),
    ('[lora]\nlayers = "1"', 'lora.layers = "1", lora.rank = 0: LoRA is off'),
    ("[lora]\nrank = 4\ndropout = 0.1", "even the ratio of a fresh sample is not 1"),
    ("[weights]\nrestart_every = 2", "shm restarts no engine; use learner.publish_every"),
    ('[weights]\non_restart = "finish"', "shm restarts no engine"),
    ("[weights]\nbucket_mb = 4", "shm sends nothing in pieces"),
    ("[weights.sparse]\nthreshold = 0.2", "weights.sparse.threshold = 0.2, weights.sparse.enabled = false: sparse"),
    ("[weights.sparse]\nkey_every = 2", "sparse updates are off; enabled = true, or remove it"),
    ("[vllm]\nrpc_s = 5.0", 'vllm.rpc_s = 5.0: no [[process]] has engine = "vllm"; remove [vllm]'),
]
IGNORED = [
    ("cuda_ipc", "checksum = true", "cuda_ipc sends nothing: there are no bytes to check"),
    ("cuda_ipc", "sparse.enabled = true", "cuda_ipc cannot send changed values alone"),
    ("lora_hotswap", "checksum = true", "lora_hotswap always checks the CRC-32 of each file"),
    ("lora_hotswap", "sparse.enabled = true", "lora_hotswap cannot send changed values alone"),
    ("checkpoint_restart", "sparse.enabled = true", "checkpoint_restart cannot send changed values alone"),
    ("checkpoint_restart", "bucket_mb = 4", "checkpoint_restart sends nothing in pieces"),
]


@pytest.fixture
def with_layers(here: Path) -> Path:
    """The model folder with tensors of a model's names."""
    shapes = {"embed.weight": [3, 8], "layers.0.fc.weight": [16, 8], "layers.1.fc.weight": [16, 8],
              "norm.weight": [8], "lm_head.weight": [3, 8]}
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    (here / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
    return here / "model"


@pytest.mark.parametrize(("extra", "why"), REFUSED)
def test_what_can_not_work_is_refused(with_layers: Path, refused: Refused, extra: str, why: str) -> None:
    assert any(why in line for line in refused(f"\n{extra}\n")), refused(f"\n{extra}\n")


@pytest.mark.parametrize(("extra", "why"), WARNED)
def test_what_does_nothing_or_costs_something_is_a_warning(
    with_layers: Path, loaded: Loaded, extra: str, why: str
) -> None:
    assert any(why in line for line in loaded(f"\n{extra}\n").derived.warnings)


@pytest.mark.parametrize(("transport", "setting", "why"), IGNORED)
def test_keys_that_a_transport_does_not_read_are_warned_of(
    with_layers: Path, loaded: Loaded, transport: str, setting: str, why: str
) -> None:
    rank = "[lora]\nrank = 4\n" if transport.startswith("lora") else ""
    topology = loaded(f'\n{rank}[weights]\ntransport = "{transport}"\n{setting}\n')
    assert any(why in line for line in topology.derived.warnings), topology.derived.warnings


def test_what_a_transport_reads_is_not_warned_of(with_layers: Path, loaded: Loaded) -> None:
    for transport in ("shm", "broadcast"):
        sparse = "sparse = { enabled = true, threshold = 0.2 }"
        text = f'\n[weights]\ntransport = "{transport}"\nchecksum = true\n{sparse}\n'
        assert not [line for line in loaded(text).derived.warnings if "weights." in line]


def transport_findings(topology: Topology) -> list[Finding]:
    findings = (finding for check in engine_rules.CHECKS for finding in check(topology))
    return [finding for finding in findings if "this transport gives weights to" in finding.rule]


def test_a_transport_that_an_engine_cannot_take_is_refused(loaded: Loaded) -> None:
    plain = loaded()
    entry = next(entry for entry in plain.process if entry.role == "rollout")
    vllm = dataclasses.replace(entry, engine="vllm")
    both = dataclasses.replace(plain, process=(vllm, *plain.process[1:]))
    assert not transport_findings(both)
    tables = {**engine_rules.TRANSPORTS, "shm": TransportKind("weights.shm", ("torch",))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_rules, "TRANSPORTS", tables)
        (finding,) = transport_findings(both)
    assert finding.rule == "this transport gives weights to torch only"
    assert "broadcast" in finding.remedy and "shm" not in finding.remedy


def test_a_run_without_peft_is_refused_at_the_key(
    with_layers: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = refused("\n[lora]\nrank = 4\n")
    assert "lora.rank = 4: LoRA needs the package peft; pip install 'busrl[lora]'" in problem


def test_alpha_defaults_to_a_scale_of_two() -> None:
    assert (Lora(rank=4).scale, Lora(rank=4, alpha=4).scale, Lora(rank=8, alpha=4).scale) == (2.0, 1.0, 0.5)


def test_publications_are_rare_only_where_engines_restart(with_layers: Path, loaded: Loaded) -> None:
    weights = '\n[weights]\nrestart_every = 2\ntransport = "checkpoint_restart"\n'
    assert loaded(weights).publish_every == 2
    assert loaded().publish_every == 1


def test_a_broadcast_costs_blocks_at_both_ends(with_layers: Path, loaded: Loaded) -> None:
    page = report(loaded('\n[weights]\ntransport = "broadcast"\n'))
    assert "broadcast (memory of the host, besides the models)" in page
    assert "learner, two blocks: 2 x " in page and "each engine, front and back: 2 x " in page
    page = report(loaded('\n[weights]\ntransport = "broadcast"\nsparse.enabled = true\n'))
    assert "learner, two blocks and frames of changes: 2.5 x " in page
    assert "broadcast (" not in report(loaded())


def test_an_adapter_costs_its_matrices_and_as_many_versions_as_may_live(with_layers: Path, loaded: Loaded) -> None:
    swap = loaded('\n[lora]\nrank = 4\n[weights]\ntransport = "lora_hotswap"\nmax_staleness = 3\n')
    cost = machine.weight_cost(swap, with_layers)
    assert cost is not None
    assert cost.version - machine.SMALL_FILES == 4 * 4 * 2 * (16 + 8), "two layers, neither embedding nor head"
    assert (cost.kept, cost.most) == (4, 4 + 1 + 4)
    page = report(swap)
    assert "published versions (in /dev/shm)" in page and "4 are kept" in page and "adapters: " in page
    chosen = loaded('\n[lora]\nrank = 4\ntargets = ["fc"]\n[weights]\ntransport = "lora_restart"\n')
    chosen_cost = machine.weight_cost(chosen, with_layers)
    assert chosen_cost is not None and (chosen_cost.kept, chosen_cost.most) == (2, 2 + 1 + 1)
    assert chosen_cost.version - machine.SMALL_FILES == 4 * 4 * 2 * 24


def test_checkpoints_that_do_not_fit_the_disk_are_refused_with_the_sum(
    with_layers: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    topology = loaded('\n[weights]\ntransport = "checkpoint_restart"\n')
    cost = machine.weight_cost(topology, with_layers)
    assert cost is not None and cost.version == 4 * (24 + 256 + 8 + 24) and cost.most == 4
    machine.require_disk(topology, with_layers, tmp_path / "runs" / "new")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=cost.total - 1))
    with pytest.raises(DiskFull, match="checkpoint_restart needs 4 versions"):
        machine.require_disk(topology, with_layers, tmp_path / "runs" / "new")
    machine.require_disk(loaded(), with_layers, tmp_path)
