"""Many models in a whole service: more than its memory holds at the same time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from service_messages import read_forward_backward_result
from test_a_service import Client, service, supervised


def numbers_of(client: Client, models: list[str], steps: int) -> dict[str, list[float]]:
    """Losses and norms of each model; the models' requests come in turns, and each waits for its answer."""
    seen: dict[str, list[float]] = {model: [] for model in models}
    for step in range(steps):
        for data in ([5, 6, 7, 8, 9], [9, 8, 7 - step % 3]):
            for model in models:
                future = client.forward_backward(model, supervised(data))
                seen[model].append(read_forward_backward_result(client.result(future))[1]["loss:sum"])
        for model in models:
            metrics = json.loads(client.result(client.step(model)))["metrics"]
            seen[model].append(metrics["unclipped_grad_l2:mean"])
    return seen


@pytest.mark.long
def test_models_that_take_turns_in_one_models_memory_lose_nothing(tmp_path: Path, quickstart: None) -> None:
    with service(tmp_path / "run", "tinker.resident_mb=0") as (run, client):
        alone = numbers_of(client, [client.model(0)], 4)
        together = numbers_of(client, [client.model(number) for number in (1, 2, 3)], 4)
        (expected,) = alone.values()
        assert list(together.values()) == [expected] * 3
        assert "run again" not in run.tail()
