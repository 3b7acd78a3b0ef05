"""Where models run, as a topology says it: the keys, what they mean for each process, what contradicts itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from busrl.engines import vllm_versions
from busrl.preflight.explain import report
from busrl.system import device
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
TWO = '[[process]]\nrole = "rollout"\ncount = 2\n'


def test_a_process_runs_where_its_entry_or_else_the_model_says(loaded: Loaded) -> None:
    t = loaded(TWO + 'device = "cpu"\n', "model.device=cuda")
    assert [t.device_of(name) for name in ("learner", "rollout/0", "rollout/1", "rollout/2")] == [
        "cuda", "cuda", "cpu", "cpu",
    ]
    assert t.device_of("rollout/outside") == "cuda"


def test_the_page_names_the_device_of_each_process_which_sees_no_other(loaded: Loaded) -> None:
    t = loaded(TWO + 'devices = ["0", "1"]\n', "model.device=cuda")
    page = report(t)
    assert "rollout/1    torch    cuda:0 " in page and "rollout/2    torch    cuda:1 " in page
    assert "reward/0     -        - " in page
    rollouts = [process for process in t.processes() if process.role == "rollout"]
    shown = [device.environment(t.device_of(process.name), process.devices, {}) for process in rollouts]
    assert shown == [{}, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ('[[process]]\nrole = "validator"\ndevice = "cuda"\n', "a validator of busrl's own runs no model"),
        (TWO + 'devices = ["first"]\n', "'first' is not a list of devices"),
        (TWO + 'devices = ["0,"]\n', "'0,' is not a list of devices"),
        (TWO + 'device = "gpu"\n', 'process.3.device = "gpu": expected one of'),
    ],
)
def test_what_can_not_be_meant_is_refused(refused: Refused, extra: str, expected: str) -> None:
    assert any(expected in message for message in refused(extra))


def test_items_that_nobody_gets_are_warned_of(loaded: Loaded) -> None:
    t = loaded(TWO + 'devices = ["0", "1", "2"]\n', "model.device=cuda")
    assert any("3 items for 2 processes" in text for text in t.derived.warnings)
    t = loaded(TWO + 'devices = ["0"]\n', "model.device=cpu")
    assert any("its model runs on the CPU" in text for text in t.derived.warnings)


ONE_COPY = '[weights]\ntransport = "cuda_ipc"\n'


@pytest.mark.parametrize(
    ("extra", "overrides", "expected"),
    [
        ("", ("process.rollout.count=2",), "owns the weights that the learner trains, and 2 are started"),
        ("", ("process.rollout.count=0",), "and 0 are started here"),
        ("", ("process.learner.device=cpu", "model.device=cuda"), "the learner works on cpu, the engine on cuda"),
        ("", ("model.device=npu",), "memory of an NPU is not shared"),
        ("", ('process.learner.devices=["0"]', 'process.rollout.devices=["1"]'), "see other devices"),
        ("", ("learner.publish_every=2",), "the weights of every step at once"),
        ("", ("learner.updates_per_batch=2",), "between two updates of a step"),
        ("", ("experiments.forced_age=1", "weights.mode=sync"), "and no older ones"),
        ("[lora]\nrank = 8\n", (), "there is nothing to share"),
        (
            "",
            ("process.rollout.engine=openai", "weights.mode=fully-async", "openai.base_url=http://127.0.0.1:1/v1"),
            "it has no tensors that a learner could train",
        ),
        ("", ("process.rollout.engine=mock",), "it has no tensors that a learner could train"),
    ],
)
def test_one_copy_of_the_weights_refuses_what_can_not_work_with_it(
    refused: Refused, extra: str, overrides: tuple[str, ...], expected: str
) -> None:
    problems = refused(ONE_COPY + extra, *overrides)
    assert any(expected in message and "weights.transport" in message for message in problems), problems


def test_one_copy_is_refused_where_vllm_shares_out_its_tensors(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_versions, "vllm_installed", lambda: ("vllm", "0.30.0"))
    problems = refused(ONE_COPY + "[vllm]\ntensor_parallel = 2\n", "process.rollout.engine=vllm")
    assert any("the learner trains whole ones" in message for message in problems), problems


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_copy_on_one_device_is_accepted(loaded: Loaded, dtype: str) -> None:
    assert not any("cuda_ipc" in text for text in loaded(ONE_COPY, f"model.dtype={dtype}").derived.warnings)


GROUPS = (
    '[weights]\ntransport = "broadcast"\nbackend = "nccl"\n',
    "model.device=cuda",
    'process.learner.devices=["0"]',
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model.device=cpu",), "nccl connects cuda devices, and learner works on cpu"),
        (('process.rollout.devices=["0"]',), "learner and rollout/0 work on device 0"),
        (("process.rollout.count=2", 'process.rollout.devices=["1"]'), "rollout/0 and rollout/1 work on device 1"),
        (("process.rollout.devices=[]",), "rollout/0 sees all devices"),
        (("weights.sparse.enabled=true",), "found and packed in the host's memory"),
        (("process.rollout.engine=vllm",), "vLLM is given its weights through the host's memory"),
    ],
)
def test_a_broadcast_between_devices_that_can_not_work_is_refused(
    refused: Refused, overrides: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_versions, "vllm_installed", lambda: ("vllm", "0.30.0"))
    extra, *usual = GROUPS
    problems = refused(extra, *usual, 'process.rollout.devices=["1"]', *overrides)
    assert any(expected in message for message in problems), problems


def test_a_broadcast_between_devices_that_each_have_one_process_is_accepted(loaded: Loaded) -> None:
    extra, *usual = GROUPS
    t = loaded(extra, *usual, "process.rollout.count=2", 'process.rollout.devices=["1", "2"]')
    assert not any("weights.backend" in text for text in t.derived.warnings)
    other = loaded('[weights]\nbackend = "nccl"\n')
    assert any("shm forms no groups" in text for text in other.derived.warnings)
