"""A tag that follows another: what it begins with, which checkpoints there have to be, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.data import pretrained
from busrl.errors import TopologyError
from busrl.preflight.load import load
from busrl.several.rules import findings_of_follower
from busrl.topology import Topology

MAIN = """\
[run]
max_steps = 9
[data]
train = "tiny:sort"
[groups]
size = 4
[learner]
lr = 1e-4
checkpoint_every = 5
keep_last = 4
[learner.trigger]
n_min = 4
[agents]
context = 96
[[process]]
role = "agent"
function = "episode.py:episode"
[[process]]
role = "rollout"
model = "old"
count = 3
[[model]]
tag = "main"
path = "tiny:sort"
[[model]]
tag = "old"
"""
FOLLOW = 'follow = { model = "main", every = 10, back = 1 }\n'
Read = Callable[..., Topology]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    (tmp_path / "episode.py").write_text("async def episode(task, llm):\n    return 1.0\n")

    def run(text: str, *overrides: str) -> Topology:
        (tmp_path / "t.toml").write_text(text)
        return load(tmp_path / "t.toml", overrides)

    return run


def test_a_follower_serves_and_begins_with_the_path_of_the_followed(read: Read) -> None:
    t = read(MAIN + FOLLOW, "learner.keep_last=8")
    old = t.of("old")
    assert old.frozen and old.model.path == t.model.path and t.trained_tags == ("main",)
    (follow,) = old.follows
    assert (follow.model, follow.every, follow.back) == ("main", 10, 1) and t.follows == ()
    again = Topology.from_json(t.to_json())
    assert again == t and again.of("old").follows == old.follows
    assert "follows" not in t.to_dict()
    assert [process.name for process in old.processes()] == ["rollout/1", "rollout/3", "rollout/5"]
    assert [old.place_of(process.name) for process in old.processes()] == [0, 1, 2]


@pytest.mark.parametrize("change, rule", [
    (lambda text: text, "main keeps 4 checkpoints, and the last process of old plays one that is up to 8 back"),
    (lambda text: text.replace("every = 10", "every = 12"), "checkpoints of main come every 5 steps, and it plays"),
    (lambda text: text.replace("checkpoint_every = 5", "checkpoint_every = 0"), "checkpoints of main come at the end"),
    (lambda text: text.replace("n_min = 4", "n_min = 4\nt_max_s = 5.0"), "checkpoints of main come by groups"),
])
def test_checkpoints_that_would_not_be_there_are_refused(
    read: Read, change: Callable[[str], str], rule: str
) -> None:
    with pytest.raises(TopologyError) as refused:
        read(change(MAIN + FOLLOW))
    assert any(rule in str(problem) and "old" in str(problem) for problem in refused.value.problems), refused.value
    assert all(problem.place and problem.remedy for problem in refused.value.problems)


@pytest.mark.parametrize("kept, every", [(8, 10), (4, 5)])
def test_so_many_checkpoints_are_enough_as_the_rule_asks_for(read: Read, kept: int, every: int) -> None:
    text = (MAIN + FOLLOW).replace("every = 10", f"every = {every}")
    assert read(text, f"learner.keep_last={kept}").of("old").follows[0].every == every
    with pytest.raises(TopologyError, match=f"keep_last = {kept}"):
        read(text, f"learner.keep_last={kept - 1}")


def test_another_shape_and_engines_that_take_no_checkpoints_are_refused(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = read(MAIN + FOLLOW, "learner.keep_last=8")
    hidden = {"tiny:sort": 64, "like": 64, "narrow": 32}
    monkeypatch.setattr(pretrained, "model_at", Path)
    monkeypatch.setattr(pretrained, "read_config", lambda folder: {
        "hidden_size": hidden[str(folder)], "num_hidden_layers": 2, "vocab_size": 16})

    def rules(path: str, engine: str, rank: int = 0) -> list[str]:
        (own,) = t.models[1].own
        entries = tuple(dataclasses.replace(entry, engine=engine) for entry in own.process)
        own = dataclasses.replace(own, model=dataclasses.replace(own.model, path=path), process=entries)
        row = dataclasses.replace(t.models[1], own=(own,))
        changed = dataclasses.replace(t, models=(t.models[0], row), lora=dataclasses.replace(t.lora, rank=rank))
        return [finding.rule for finding in findings_of_follower(changed, row)]

    assert rules("like", "torch") == []
    assert rules("narrow", "torch") == ["the model at narrow has another shape than main's at tiny:sort"]
    assert rules("like", "vllm") == rules("like", "torch", 4) == []
    assert rules("like", "openai") == ["an engine of openai takes no checkpoints of another tag"]
    (adapters,) = rules("like", "vllm", 4)
    assert adapters == "checkpoints of main are adapters, and vLLM starts again with whole models here"
