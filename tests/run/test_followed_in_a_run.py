"""A model against older versions of itself in a real run: each engine plays the checkpoint of its distance."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import LIMIT_S, Run, running
from transformers import AutoModelForCausalLM

from busrl.quickstart.cache import ensure
from busrl.ring import Ring
from busrl.ring.calls import CallAnswer, Caller, ModelCall
from busrl.states import Finish

TOPOLOGY = """\
[data]
train = "{train}"
[groups]
size = 4
[generation]
max_new_tokens = 8
[learner]
lr = 1e-3
checkpoint_every = 2
keep_last = 500
[agents]
context = 64
[[model]]
tag = "main"
path = "{model}"
[[model]]
tag = "old"
follow = {{ model = "main", every = 4 }}
[[process]]
role = "agent"
function = "episode.py:episode"
[[process]]
role = "rollout"
model = "old"
count = 2
"""
EPISODE = """\
async def episode(task, llm):
    answer = await llm.complete(task["prompt"])
    replies = [await llm["old"].complete(task["prompt"], max_tokens=2) for _ in range(2)]
    return float(len(answer.ids) % 3 + replies[1].ids[0] % 2)
"""
PROMPT = np.arange(4, 9, dtype=np.int32)


def asked(run: Run, at: Caller, engine: int, limit_s: float = LIMIT_S) -> CallAnswer:
    """The answer of this engine, which alone may take the call for a minute."""
    call = at.put(ModelCall(PROMPT, 6, uid=engine, temperature=1.0, engine=engine, affinity_s=60.0))
    assert call is not None
    run.until("an answer of an older version", lambda: at.poll() or call.done, limit_s)
    answer = call.result()
    assert answer.engine == engine
    return answer


def scored(folder: Path, answer: CallAnswer) -> np.ndarray:
    """The log-probabilities of the answer by the model in a folder."""
    ids = torch.from_numpy(np.concatenate([PROMPT, answer.ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0, len(PROMPT) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


@pytest.mark.long
def test_two_engines_play_checkpoints_of_the_model_that_learns(tmp_path: Path, quickstart: None) -> None:
    files = ensure("tiny:sort")
    (tmp_path / "episode.py").write_text(EPISODE)
    (tmp_path / "t.toml").write_text(TOPOLOGY.format(train=files.train, model=files.model))
    settings = "learner.trigger.n_min=4", "agents.episodes=16", "learner.checkpoint_every=2"
    run = Run(tmp_path / "run", *settings, config=tmp_path / "t.toml", steps=400)
    run.settings = [setting for setting in run.settings if not setting.startswith("validation")]
    calls = run.paths.of_tag("old").calls_name
    with running(run):
        run.until("the ring of calls", lambda: Path("/dev/shm", calls).exists())
        ring = Ring.attach(calls, calls=True)
        try:
            ring.register("agent", "test/0")
            at = Caller(ring, lambda message, to: None)

            def indices() -> dict[str, int]:
                return {process.label: process.index for process in ring.processes()}

            run.until("both engines", lambda: {"rollout/1", "rollout/3"} <= indices().keys())
            found = indices()
            newest: dict[str, CallAnswer] = {}

            def plays(name: str, least: int) -> bool:
                newest[name] = answer = asked(run, at, found[name])
                versions = {*answer.versions.tolist()}
                if len(versions) > 1 or min(versions) < least:  # two: a new one came while it was drawn
                    return False
                return np.abs(scored(Path(files.model), answer) - answer.logprobs).max() > 1e-4  # or no proof

            run.until("a checkpoint is played", lambda: plays("rollout/1", 8))
            run.until("one before it is played", lambda: plays("rollout/3", 4))
        finally:
            ring.close()
        for name, answer in newest.items():
            (version,) = set(answer.versions.tolist())
            assert version % 4 == 0 and answer.finish in (Finish.EOS, Finish.LENGTH)
            folder = run.paths.checkpoints / f"global_step_{version}" / "model"
            assert np.abs(scored(folder, answer) - answer.logprobs).max() < 1e-4, name
        held = sorted(path.name.partition(".")[0] for path in run.paths.of_tag("old").followed.iterdir())
        assert held == ["rollout-1", "rollout-3"]
        assert run.child is not None
        run.child.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM, run.tail()
    assert not [*run.paths.of_tag("old").followed.iterdir()], "nothing of them is left"
