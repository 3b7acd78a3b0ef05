"""The end of a vLLM engine's updates: workers are told, with a deadline, and an engine that fails then hurts nobody."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from busrl.engines.vllm.weights import Line, Page, Updates
from busrl.errors import EngineLost
from busrl.topology.schema import Vllm
from busrl.weights.factory import TransportSettings


class Core:
    """Stands for a vLLM with one worker."""

    def __init__(self, page: Path) -> None:
        self.page, self.over, self.fails, self.calls = page, False, False, []  # type: ignore[var-annotated]

    def rpc(self, method: str, *args: Any, timeout_s: float = 0.0) -> list[str]:
        self.calls.append((method, timeout_s))
        if self.fails:
            raise EngineLost("died")
        return [str(self.page)]


@pytest.fixture
def core(tmp_path: Path) -> Core:
    Page(tmp_path / "page", create=True).write(Line())
    return Core(tmp_path / "page")


def updates(core: Core, transport: str) -> tuple[Updates, Any]:
    start = SimpleNamespace(lora_rank=0, model="m", dtype="float32")
    loaded = Updates(SimpleNamespace(core=core, settings=Vllm(), start=start), "auto")  # type: ignore[arg-type]
    settings = TransportSettings(transport, "segment", str(core.page.parent / "address"), timeout_s=7.0)
    return loaded, loaded.receiver(settings, "rollout/0")


@pytest.mark.parametrize(("transport", "seconds"), [("shm", 5.0), ("broadcast", 5.0), ("cuda_ipc", 12.0)])
def test_workers_are_told_to_leave_within_a_deadline(core: Core, transport: str, seconds: float) -> None:
    loaded, receiver = updates(core, transport)
    assert receiver.newest() == (-1, -1)
    loaded.close()
    assert core.calls[-1] == ("busrl_close", seconds)


def test_an_engine_that_dies_meanwhile_is_a_line_in_the_log(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    loaded, _ = updates(core, "shm")
    core.fails = True
    loaded.close()
    assert "rollout/0: its workers did not leave: died" in caplog.text


def test_an_engine_that_is_over_is_asked_nothing(core: Core) -> None:
    loaded, _ = updates(core, "shm")
    core.over = True
    loaded.close()
    assert [method for method, _ in core.calls] == ["busrl_open"]
