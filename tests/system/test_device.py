"""The kinds of devices in one place: its choice, its errors where one is missing, what processes see."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from busrl.engines import make_engine
from busrl.errors import DeviceMissing
from busrl.launcher.children import environment_of
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.roles.learner.step import TrainingStep
from busrl.system import device
from busrl.topology.schema import Process, ProcessName

ROOT = Path(__file__).resolve().parents[2] / "busrl"
HAS_CUDA = not device.missing("cuda")
without_cuda = pytest.mark.skipif(HAS_CUDA, reason="this machine has a CUDA device")


def test_no_other_module_names_a_kind_of_accelerator() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        if path == ROOT / "system" / "device.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            attribute = isinstance(node, ast.Attribute) and node.attr in ("cuda", "npu")
            is_kind = attribute and ast.unparse(node) in ("torch.cuda", "torch.npu")
            imported = isinstance(node, (ast.Import, ast.ImportFrom)) and any(
                name in ast.unparse(node) for name in ("torch.cuda", "torch_npu", "torch.npu")
            )
            assert not is_kind and not imported, f"{path}:{node.lineno}: {ast.unparse(node)}; use busrl.system.device"


@without_cuda
def test_auto_is_the_cpu_where_there_is_nothing_else() -> None:
    assert device.choose("auto") == torch.device("cpu") == device.choose("cpu")


@without_cuda
def test_an_absent_device_is_refused_with_the_cause_and_remedy() -> None:
    with pytest.raises(DeviceMissing, match=r'model\.device = "cuda": .*; set model\.device = "cpu"'):
        device.choose("cuda")
    with pytest.raises(DeviceMissing, match="torch_npu cannot be imported"):
        device.choose("npu")


def test_hiding_all_devices_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.missing("cuda") == "CUDA_VISIBLE_DEVICES is empty, so this process sees no cuda device"


def test_a_torch_npu_that_does_not_start_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise RuntimeError('libascendcl.so: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "libascendcl.so" in device.missing("npu") and "set_env.sh" in device.missing("npu")
    assert "torch_npu" not in sys.modules


def test_a_machine_with_an_npu_is_recognised_through_torch_npu_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch_npu.py").write_text(
        "import torch, types\ntorch.npu = types.SimpleNamespace(is_available=lambda: True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch, "npu", None, raising=False)
    try:
        assert device.missing("npu") == ""
    finally:
        sys.modules.pop("torch_npu", None)


def test_every_kind_has_its_own_process_group() -> None:
    assert [device.kind_of(name) for name in ("gloo", "nccl", "hccl")] == list(device.KINDS)


def test_a_process_sees_the_devices_that_its_entry_deals_to_it(tmp_path: Path) -> None:
    spec = Process("rollout", count=3, devices=("0", "1,2"))
    dealt = [ProcessName(f"rollout/{k}", "rollout", k, spec, k).devices for k in range(3)]
    assert dealt == ["0", "1,2", "0"]
    assert device.visible("cuda", "1,2") == {"CUDA_VISIBLE_DEVICES": "1,2"}
    assert device.visible("npu", "3") == {"ASCEND_RT_VISIBLE_DEVICES": "3"}
    assert device.visible("cpu", "0") == device.visible("cuda", "") == {}
    assert device.visible("auto", "0") == {"CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "0"}
    process = ProcessName("rollout/1", "rollout", 1, spec, 1)
    variables = environment_of(process, RunPaths.of(tmp_path), device.visible("cuda", process.devices))
    assert variables["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_hccl_is_given_free_ports_unless_it_was_told_which() -> None:
    """Its default is one port for all processes of an NPU."""
    auto = {"HCCL_NPU_SOCKET_PORT_RANGE": "auto", "HCCL_HOST_SOCKET_PORT_RANGE": "auto"}
    assert device.environment("npu", "3", {}) == {**auto, "ASCEND_RT_VISIBLE_DEVICES": "3"}
    present = {"HCCL_NPU_SOCKET_PORT_RANGE": "61000-61015"}
    assert "HCCL_NPU_SOCKET_PORT_RANGE" not in device.environment("npu", "", present)
    assert device.environment("cuda", "", {}) == {} == device.environment("cpu", "0", {})


def test_a_process_group_without_torch_support_for_its_device_is_refused() -> None:
    with pytest.raises(DeviceMissing, match="no process groups of gloo2"):
        device.device_group("gloo2", None, 0, 1, 1.0)


def test_waiting_for_the_host_is_nothing() -> None:
    cpu = torch.device("cpu")
    device.synchronize(cpu)
    device.empty_cache(cpu)


@without_cuda
def test_learner_and_engine_name_the_device_that_is_not_there(tmp_path: Path) -> None:
    topology = load(ROOT.parent / "configs" / "quickstart.toml", ["model.device=cuda"])
    for make in (lambda: make_engine(topology, "rollout/0"), lambda: TrainingStep(topology)):
        with pytest.raises(DeviceMissing, match=r'model\.device = "cuda": this torch'):
            make()


def test_an_accelerator_stopwatch_waits_only_when_the_time_is_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 1500.0  # milliseconds

    monkeypatch.setattr(device, "_module", lambda where: SimpleNamespace(Event=Event))
    watch = device.Stopwatch(torch.device("cuda", 0))
    begun, ended = watch.mark(), watch.mark()
    assert calls == ["record", "record"]
    assert watch.seconds(begun, ended) == 1.5 and calls[-1] == "wait"
    plain = device.Stopwatch(torch.device("cpu"))
    assert plain.seconds(plain.mark(), plain.mark()) >= 0.0
