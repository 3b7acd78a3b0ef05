"""Episodes of agents with engine = "vllm": what is trained is what vLLM drew, over new weights and a death."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_run import make_all
from checks import check_end
from harness import Run, running
from test_agents_in_a_run import TALK, slots_of_calls
from test_vllm_run import LIMIT_S, SETTINGS, core_of

from busrl.ledger.wal import Wal

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
NO_ROUNDS = [one for one in SETTINGS if not one.startswith("validation.")]


def talk(folder: Path, model: Path, play: str = TALK) -> Path:
    """A topology whose samples are three-turn conversations."""
    config = make_all(folder, model)
    (folder / "talk.py").write_text(play)
    text = config.read_text().replace('[reward]\nkind = "python"\nfunction = "judge.py:score"\n', "")
    text = text.replace('role = "reward"\n', 'role = "agent"\nfunction = "talk.py:episode"\n')
    config.write_text(f"{text}[agents]\ncontext = 256\n")
    return config


def test_conversations_train_on_vllm_draws_across_new_weights_and_engine_death(
    chat_folder: Callable[..., Path], tmp_path: Path
) -> None:
    config = talk(tmp_path / "mine", chat_folder("chatml"))
    run = Run(tmp_path / "run", *NO_ROUNDS, "validation.samples=0", "learner.checkpoint_every=0",
              "generation.on_update=recompute", config=config, steps=8)
    with running(run):
        run.until("a step", lambda: run.step() >= 2, LIMIT_S)
        os.kill(core_of(run), signal.SIGKILL)
        run.until("a step after it", lambda: run.step() >= 3, LIMIT_S)
        run.until("no call is without a caller", lambda: slots_of_calls(run).get("RESERVED", 0) == 0)
        check_end(run, run.wait(LIMIT_S))
    assert run.restarts("rollout/0") == 1, run.tail()
    samples = [one for record in Wal(run.paths.wal).records() for one in record.samples]
    assert len(samples) >= 8 * 8 * 4 and {len(one.seqs) for one in samples} == {1}
    assert {len(one.turn_array()) for one in samples} == {3}
    measured = [row["mismatch"] for row in run.metrics() if row["mismatch"] is not None]
    assert measured and max(measured) < 1e-3, f"what was trained is not what was drawn: {measured}"
    versions = {int(version) for one in samples for version in one.version_array()}
    assert len(versions) >= 4, f"new weights reach conversations: {versions}"
