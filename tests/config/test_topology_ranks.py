"""A learner of several ranks: its processes, and what is refused with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from busrl.config import Topology

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
        ((TWO, "learner.optimizer=adafactor"), "it updates a part of a matrix in another way"),
        ((TWO, 'process.learner.devices=["0"]', "model.device=cuda"), "1 items for 2 ranks"),
        (("process.rollout.ranks=2",), "a rollout trains none"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(refused: Refused, settings: tuple[str, ...], said: str) -> None:
    assert any(said in problem for problem in refused("", *settings))
