"""What the torch engine draws is what the weights, the temperature of each request and its own random numbers give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from busrl.engines import Finished, Request
from busrl.engines.torch.engine import TorchEngine
from busrl.roles.learner.publish import Publisher
from busrl.roles.scheduler import Scheduler

SEED, NEAR = 5, 1e-4
TEMPERATURES = (0.7, 1.0, 1.6, 0.0)


def request(key: int, temperature: float, segment: int = 0, prefix: Any = ()) -> Request:
    return Request(
        key=key, uid=1000 + key, segment=segment, prompt_ids=np.array([3, 4 + key % 8], np.int32),
        prefix_ids=np.array(prefix, np.int32), max_new_tokens=24, temperature=temperature, top_p=1.0, seed=SEED,
    )


@pytest.fixture(scope="module")
def drawn(folder: Path) -> dict[int, tuple[Request, Finished]]:
    """Forty answers of all temperatures in one batch, some of them continued from a first segment."""
    engine = TorchEngine.load(folder, capacity=64, max_length=64)
    asked = [request(key, TEMPERATURES[key % 4], *((2, (5, 6, 7)) if key % 5 == 0 else ())) for key in range(40)]
    engine.submit(asked)
    done = {}
    while engine.active:
        done.update({answer.key: answer for answer in engine.step()})
    return {request.key: (request, done[request.key]) for request in asked}


def test_each_token_is_the_one_that_its_random_number_draws(
    drawn: dict[int, tuple[Request, Finished]], folder: Path
) -> None:
    from oracle import maths
    from oracle.model import Model

    model = Model(folder)
    weights, looked_at = model.weights(), 0
    for asked, answer in drawn.values():
        before = [*asked.prompt_ids.tolist(), *asked.prefix_ids.tolist()]
        ids = torch.tensor([[*before, *answer.token_ids.tolist()]])
        logits = model.logits(weights, ids)[0, len(before) - 1 :].numpy()
        numbers = maths.uniforms(SEED, asked.uid, asked.segment, len(answer.token_ids))
        for at, token in enumerate(answer.token_ids.tolist()):
            chosen, room = maths.drawn(logits[at], asked.temperature, float(numbers[at]))
            assert chosen == token or room < NEAR, (asked, at)
            scores = torch.from_numpy(logits[at] / (asked.temperature or 1.0))
            expected = float(scores.log_softmax(-1)[token]) if asked.temperature else 0.0
            assert answer.logprobs[at] == pytest.approx(expected, abs=1e-5)
            looked_at += 1
    assert looked_at > 200


def test_every_end_token_of_the_generation_config_ends_an_answer(drawn: dict[int, tuple[Request, Finished]]) -> None:
    last = set()
    for _, answer in drawn.values():
        ends = [at for at, token in enumerate(answer.token_ids.tolist()) if token in (1, 2)]
        assert ends == ([len(answer.token_ids) - 1] if answer.finish == 1 else [])
        assert answer.finish == 1 or len(answer.token_ids) == 24
        last.add(int(answer.token_ids[-1]))
    assert {1, 2} <= last


def test_dropout_goes_on_after_a_restart_where_it_was(make_run: Callable[..., Any]) -> None:
    """The random state is a part of the checkpoint: a learner that starts again drops the same inputs as one that
    lives on."""
    pytest.importorskip("peft")
    weights = []
    for restarted in (False, True):
        torch.manual_seed(7)
        run = make_run(2, f"run-{restarted}", stop=False, lora={"rank": 3, "dropout": 0.5})
        run.checkpoint()
        if restarted:
            run.stop(checkpoint=False)
            torch.manual_seed(8)  # another process draws other numbers
            run.start()
        run.steps(1)
        weights.append(run.weights().clone())
        run.stop(checkpoint=False)
    assert torch.equal(*weights)


@pytest.mark.parametrize(("version_step", "expected"), [(4, 9), (3, None), (5, None)])
def test_a_version_is_present_only_if_published_after_the_newest_step(
    version_step: int, expected: int | None
) -> None:
    ring = SimpleNamespace(header={"version_step": version_step}.__getitem__)
    publisher: Any = SimpleNamespace(ring=ring, version=9)
    assert Publisher.present(publisher, 4) == expected


@pytest.mark.parametrize("before", range(3))
def test_a_sample_admitted_during_a_publication_never_looks_younger(before: int) -> None:
    """Between any two reads of the header the learner may publish, which writes the step first."""
    writes = iter([("version_step", 1), ("version", 1), ("version_step", 2), ("version", 2)])
    header = {"version": 0, "version_step": 0} | dict(next(writes) for _ in range(before))

    def read(name: str) -> int:
        value = header[name]
        header.update([next(writes)])
        return value

    generation = SimpleNamespace(max_new_tokens=8, temperature=1.0, top_p=1.0)
    scheduler: Any = SimpleNamespace(
        topology=SimpleNamespace(generation=generation, groups=SimpleNamespace(size=4)),
        ring=SimpleNamespace(header=read),
        stream=SimpleNamespace(item=lambda draw: SimpleNamespace(line=b"", crc=0)),
        policy=SimpleNamespace(priority=lambda *of: 0),
    )
    fields = Scheduler.fields_of_group(scheduler, 0, 0)
    assert fields["step"] <= fields["version"]  # version n is of step n here
