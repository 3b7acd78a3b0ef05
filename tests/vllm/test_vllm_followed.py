"""A follower whose engine is vLLM: it starts again with each checkpoint of the model that it follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import Run, running
from test_followed_in_a_run import EPISODE, TOPOLOGY, asked, scored

from busrl.quickstart.cache import ensure
from busrl.ring import Ring
from busrl.ring.calls import CallAnswer, Caller

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
START_S = 420.0
SETTINGS = (
    "model.old.process.rollout.engine=vllm", "model.old.process.rollout.count=1", "limits.ready_s=420",
    "limits.progress_s=120", "vllm.start_s=400", "vllm.rpc_s=60", "generation.max_batch=16",
    "learner.trigger.n_min=4", "agents.episodes=16", "learner.checkpoint_every=2", "model.old.follow.every=10",
)


def test_vllm_plays_a_checkpoint_of_the_followed_model(tmp_path: Path) -> None:
    files = ensure("tiny:sort")
    (tmp_path / "episode.py").write_text(EPISODE)
    (tmp_path / "t.toml").write_text(TOPOLOGY.format(train=files.train, model=files.model))
    run = Run(tmp_path / "run", *SETTINGS, config=tmp_path / "t.toml", steps=4000)
    run.settings = [setting for setting in run.settings if not setting.startswith("validation")]
    calls = run.paths.of_tag("old").calls_name
    newest: list[CallAnswer] = []
    with running(run):
        run.until("the ring of calls", lambda: Path("/dev/shm", calls).exists())
        ring = Ring.attach(calls, calls=True)
        try:
            ring.register("agent", "test/0")
            at = Caller(ring, lambda message, to: None)

            def index() -> int:
                return next((one.index for one in ring.processes() if one.label == "rollout/1"), 0)

            def plays() -> bool:
                newest.append(asked(run, at, index(), START_S))
                versions = {*newest[-1].versions.tolist()}
                return len(versions) == 1 and min(versions) >= 10

            run.until("the engine", lambda: index() > 0, START_S)
            run.until("a checkpoint is played", plays, START_S)
        finally:
            ring.close()
        (version,) = set(newest[-1].versions.tolist())
        assert version % 10 == 0
        folder = run.paths.checkpoints / f"global_step_{version}" / "model"
        assert np.abs(scored(folder, newest[-1]) - newest[-1].logprobs).max() < 1e-3
        assert np.abs(scored(Path(files.model), newest[-1]) - newest[-1].logprobs).max() > 1e-3
