"""The field `model` of messages: left out for the lead, taken by the processes of that model, from that model's own."""

from __future__ import annotations

import msgspec
import pytest

from busrl.protocol import codec
from busrl.protocol import messages as m

TAGGED = (m.CallCancel, m.CallTokens, m.ProbeDrawn, m.LearnerStateUpdate, m.WeightsPublished, m.WeightsGroup)


def update(sender: str, tag: str) -> m.LearnerStateUpdate:
    message = m.LearnerStateUpdate(step=1, model=m.of_model(tag))
    message.sender = sender
    return message


@pytest.mark.parametrize("kind", TAGGED)
def test_the_lead_is_left_out_of_the_map_and_others_are_in_it(kind: type[m.Message]) -> None:
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
