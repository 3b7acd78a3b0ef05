"""Accelerators that processes share: what they need together, and what is refused because it cannot work."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.errors import UserError
from busrl.preflight import colocation, explain, memory
from busrl.preflight.colocation import MOST_SHARE, Tenant, faults
from busrl.preflight.load import load
from busrl.system import device
from busrl.topology import Topology
from busrl.topology.schema import Process, Vllm

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
shares = st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.45, 0.5, 0.85]), min_size=2, max_size=4)


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with accelerators of 80 GiB."""
    monkeypatch.setattr(device, "expected", lambda wanted: "cuda" if wanted == "auto" else wanted)
    monkeypatch.setattr(memory, "memory_of", lambda kind: 80 * GIB)


def sharing(*entries: Process, share: float = 0.3, cache: int | str = "auto") -> Topology:
    base = load(ROOT / "configs" / "quickstart.toml")
    vllm = dataclasses.replace(base.vllm, gpu_memory_utilization=share, kv_cache_mb=cache)
    assert isinstance(vllm, Vllm)
    model = dataclasses.replace(base.model, device="auto")
    return dataclasses.replace(base, vllm=vllm, model=model, process=(Process("reward"), *entries))


def on(number: str, role: str = "rollout", engine: str = "vllm", count: int = 1) -> Process:
    return Process(role, engine=engine if role == "rollout" else "torch", devices=(number,) if number else (),
                   count=count)


@given(shares=shares, sizes=st.lists(st.integers(0, 60), min_size=4, max_size=4), limit=st.integers(0, 100))
def test_only_what_cannot_work_is_refused(shares: list[float], sizes: list[int], limit: int) -> None:
    tenants = [Tenant(f"rollout/{i}", share, size * GIB) for i, (share, size) in enumerate(zip(shares, sizes))]
    reserving = [share for share in shares if share]
    too_many = len(reserving) > 1 and sum(reserving) > MOST_SHARE
    too_large = 0 < limit < sum(tenant.nbytes for tenant in tenants) // GIB
    texts = [*faults("cuda 0", tenants, limit * GIB)]
    assert bool(texts) == (too_many or too_large)
    assert all(tenant.name in text for text in texts for tenant in tenants)


def test_engines_that_reserve_too_much_are_refused_with_a_share_that_works() -> None:
    t = sharing(on("1", "learner"), on("0", count=2), share=0.6)
    with pytest.raises(UserError, match=r"cuda 0: engines of vLLM reserve 1\.2 of it \(rollout/0 48\.00 .*share 0\.6"
                                        r".*vllm\.gpu_memory_utilization = 0\.47 or less"):
        colocation.require(t)
    colocation.require(dataclasses.replace(t, vllm=dataclasses.replace(t.vllm, gpu_memory_utilization=0.47)))


def test_a_learner_beside_an_engine_counts_with_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    t = sharing(on("", "learner"), on("0"), share=0.9)
    monkeypatch.setattr(memory, "of_topology", lambda topology: {"weights": 6 * GIB, "optimiser": 4 * GIB})
    with pytest.raises(UserError, match=r"cuda 0 has 80\.00 GiB, its processes need at least learner 10\.00 GiB \+ "
                                        r"rollout/0 72\.00 GiB \(share 0\.9\) = 82\.00 GiB; give them other `devices`"):
        colocation.require(t)
    assert explain.report(sharing(on("0", "learner"), on("0"))).count("cuda 0: learner 10.00 GiB + rollout/0 24.00 GiB")


@pytest.mark.parametrize("entries", [
    (on("0", "learner"), on("1"), on("2")), (on("0", "learner"), on("1,2")),
    (on("0", "learner"), on("0", engine="mock")),
])
def test_a_device_of_one_process_is_not_summed(entries: tuple[Process, ...]) -> None:
    t = sharing(*entries, share=1.0)
    colocation.require(t)
    assert colocation.lines(t) == []


def test_a_cache_of_fixed_size_counts_beside_the_weights() -> None:
    t = sharing(on("0", "learner"), on("0"), on("0"), share=0.9, cache=50 << 10)
    with pytest.raises(UserError, match=r"rollout/0 50\.\d\d GiB \+ rollout/1 50"):
        colocation.require(t)


def test_processes_on_the_cpu_are_not_summed() -> None:
    assert colocation.lines(load(ROOT / "configs" / "quickstart.toml")) == []
