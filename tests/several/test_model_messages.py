"""What says of which model it is: the field `model` of messages, left out for the lead, and names in sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from busrl.observe.sinks import RunCard
from busrl.observe.sinks.feed import Feed
from busrl.paths import RunPaths
from busrl.protocol import codec
from busrl.protocol import messages as m

TAGGED = (m.CallCancel, m.CallTokens, m.ProbeDrawn, m.LearnerStateUpdate, m.WeightsPublished, m.WeightsGroup)


def update(sender: str, tag: str) -> m.LearnerStateUpdate:
    message = m.LearnerStateUpdate(step=1, model=m.of_model(tag))
    message.sender = sender
    return message


@pytest.mark.parametrize("kind", TAGGED)
def test_a_map_names_every_model_but_the_lead(kind: type[m.Message]) -> None:
    needed = {"lengths": [], "prompt_lengths": [], "temperatures": [], "worker_id": "w", "prompt_ids": b"",
              "tokens": b"", "logprobs": b"", "versions": b"", "slot_id": 1, "seq": 2, "at": 0, "version": 1, "step": 1,
              "epoch": 1}
    fields = {name: value for name, value in needed.items() if name in kind.__struct_fields__}
    if kind is m.LearnerStateUpdate:
        fields = {}
    lead, judge = kind(**fields, model=m.of_model("")), kind(**fields, model=m.of_model("judge"))
    assert "model" not in msgspec.msgpack.decode(codec.encode(lead))
    for message, tag in ((lead, ""), (judge, "judge")):
        read = codec.decode(kind, codec.encode(message), 1 << 20)
        assert m.model_of(read) == tag and read == message


def test_a_broadcast_about_another_model_is_told_from_ones_own() -> None:
    for tag, other in (("", "judge"), ("judge", ""), ("judge", "old")):
        message = update("learner", tag)
        assert not m.is_of_another_model(message, tag) and m.is_of_another_model(message, other)
    assert not m.is_of_another_model(m.CallCancel(slot_id=1, seq=1, model="judge"), "")  # it is addressed


@pytest.mark.parametrize("sender,tag,forged", [
    ("learner", "", False), ("learner-judge", "judge", False), ("learner", "judge", True),
    ("learner-judge", "", True), ("learner-judge", "old", True), ("rollout-1", "judge", True),
])
def test_an_update_counts_from_the_learner_of_its_model_alone(sender: str, tag: str, forged: bool) -> None:
    assert m.is_from_another(update(sender, tag)) is forged
    assert not m.is_from_another(m.Ping(token="x"))


class Taker:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, dict[str, float]]] = []

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.taken.append((step, dict(values)))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def test_a_sink_gets_the_numbers_of_other_models_under_their_tags_once(tmp_path: Path) -> None:
    paths, sink = RunPaths.of(tmp_path), Taker()
    judge = paths.of_tag("judge")
    judge.root.mkdir(parents=True)
    folder = tmp_path / "sink"
    folder.mkdir()
    for each, reward in ((paths, 0.5), (judge, 0.25)):
        each.metrics.write_text("".join(f'{{"step": {step}, "reward": {reward * step}}}\n' for step in (1, 2)))
    for _ in range(2):  # two starts
        card = RunCard("run", "5a" * 16, "tests", folder, {})
        feed = Feed("own", lambda _: sink, card, paths, lambda *_: None, {"judge": judge})
        feed.start()
        feed.finish()
        feed.join(60)
    assert sorted(sink.taken, key=str) == [
        (1, {"judge/reward": 0.25}), (1, {"reward": 0.5}), (2, {"judge/reward": 0.5}), (2, {"reward": 1.0}),
    ]
