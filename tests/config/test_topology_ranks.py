"""A learner of several ranks: its processes, and what is refused with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.config import Topology, machine
from busrl.errors import UserError

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
TWO = "process.learner.ranks=2"


def test_each_rank_but_the_first_is_a_process_on_the_learners_device(loaded: Loaded) -> None:
    t = loaded("", TWO, 'process.learner.devices=["0", "1"]', "model.device=cuda")
    ranks = {one.name: one for one in t.processes() if one.role in ("learner", "rank")}
    assert list(ranks) == ["learner", "rank/1"] and t.ranks == 2
    assert [one.devices for one in ranks.values()] == ["0", "1"] and t.device_of("rank/1") == "cuda"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((TWO, 'process.learner.devices=["0"]', "model.device=cuda"), "1 items for 2 ranks"),
        (("process.rollout.ranks=2",), "a rollout trains none"),
        ((TWO, "learner.parallel.tensor=3"), "1 x 3 does not divide 2"),
        ((TWO, "learner.parallel.expert=2", "learner.parallel.replicate=2"), "a replica, which has 1 ranks"),
        ((TWO, "learner.parallel.tensor=2", "lora.rank=4", "lora.dropout=0.1"), "would each drop other values"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(refused: Refused, settings: tuple[str, ...], said: str) -> None:
    assert any(said in problem for problem in refused("", *settings))


def test_heads_and_experts_that_cannot_be_dealt_out_evenly_are_named(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6, "num_key_value_heads": 3}))
    monkeypatch.setattr(machine, "model_at", lambda path: tmp_path)
    machine.require_axes(loaded("", "process.learner.ranks=3", "learner.parallel.tensor=3"))
    with pytest.raises(UserError, match=r"learner.parallel.tensor = 2: .* num_key_value_heads = 3"):
        machine.require_axes(loaded("", TWO, "learner.parallel.tensor=2"))
    with pytest.raises(UserError, match=r"num_experts = 0, .*; set 1"):
        machine.require_axes(loaded("", TWO, "learner.parallel.expert=2"))
