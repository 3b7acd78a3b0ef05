"""Groups leave the ring whole or not at all, and a malformed sample costs itself only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from msgspec import structs

from busrl.errors import SlotTooSmall
from busrl.ledger.trained import TrainedSet
from busrl.paths import RunPaths
from busrl.ring import Fates, Ring, State
from busrl.roles.answers import read_parts, read_task, write_parts, write_segment, write_text
from busrl.roles.learner.excerpts import Excerpts
from busrl.roles.learner.groups import (
    Claimed,
    Claims,
    Malformed,
    claim_groups,
    end,
    give_back,
    parts_of,
    tag_at,
)
from busrl.roles.learner.metrics import Ended, GroupsLine, StepMetrics
from busrl.states import Fate
from busrl.topology.prompts import Data
from busrl.topology.rewards import Reward
from busrl.topology.schema import Generation, Groups, Log, Openai

GROUP = 4


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    name = f"busrl.test.{os.getpid()}.gather"
    made = Ring.create(name, slots=8, slot_bytes=2048, processes=8, uuid=b"g" * 16)
    made.register("learner", "test")
    made.bind_fates(Fates(str(tmp_path / "fates.bin"), create=True), None)
    yield made
    made.close()
    Ring.unlink(name)


def rewarded_group(
    ring: Ring, lengths: tuple[int, ...] = (3, 4, 5, 6), logprob: float = -1.0, group: int = 0, lost: int = 0,
    parts: tuple[dict[str, float], ...] = (),
) -> list[int]:
    """Take one group through dispatch, generation and reward; its slots by member."""
    for member in range(GROUP):
        ring.dispatch(
            uid=2 * GROUP * group + member, group=group, admission=7 + group, member=member, group_size=GROUP,
            cls=0, task=b'{"prompt": "ab"}',
            prompt_crc=1, max_new_tokens=8, temperature=1.0, version=3, step=2,
        )
    slots = []
    for slot, word in ring.take(State.QUEUED, State.GENERATING, cls=None, limit=GROUP):
        size = lengths[len(slots)]
        ring.put(slot, word, "prompt_ids", np.arange(2, dtype=np.int32))
        part = (
            np.arange(size, dtype=np.int32), np.full(size, logprob, np.float32), np.full(size - lost, 3, np.uint32)
        )
        write_segment(ring, slot, word, 0, *part)
        write_text(ring, slot, word, 0, "x" * size)
        ring.commit_segment(slot, word, True)
        slots.append(slot)
    for slot, word in ring.take(State.GENERATED, State.REWARDING, cls=None, limit=GROUP):
        if parts:
            write_parts(ring, slot, word, parts[slots.index(slot)])
        ring.set(slot, word, reward=float(slot))
        ring.release(slot, word, State.REWARDED)
    return slots


def claim(ring: Ring, slots: list[int], lines=None, fault=lambda records: None):  # type: ignore[no-untyped-def]
    claimed = claim_groups(ring, ring.lines() if lines is None else lines, [slots], fault)
    return claimed[0] if isinstance(claimed, list) else claimed


def words(ring: Ring, slots: list[int]) -> list[int]:
    return [int(ring.lines()["word"][slot]) for slot in slots]


def states(ring: Ring, slots: list[int]) -> list[int]:
    return [int(ring.lines()["state"][slot]) for slot in slots]


class CountedRing:
    """A ring that counts the copies of its lines."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.copies = ring, 0

    def lines(self):  # type: ignore[no-untyped-def]
        self.copies += 1
        return self.ring.lines()

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self.ring, name)


def claims_of(ring: object) -> Claims:
    topology = SimpleNamespace(reward=Reward(), generation=Generation(), derived=SimpleNamespace(routing=None))
    return Claims(ring, topology, lambda records: None)  # type: ignore[arg-type]


def test_a_pass_copies_the_lines_once_also_with_claimed_groups(ring: Ring) -> None:
    counted, slots = CountedRing(ring), rewarded_group(ring)
    claims = claims_of(counted)
    assert isinstance(claim(ring, slots), Claimed)
    counted.copies = 0
    for _ in range(3):
        claims.look(TrainedSet())
    assert counted.copies == 3


def test_slots_of_samples_trained_by_a_dead_learner_are_freed_first(ring: Ring) -> None:
    slots, trained = rewarded_group(ring), TrainedSet()
    trained.add([int(ring.lines()["uid"][slots[0]])])
    lines = claims_of(ring).look(trained)
    assert [int(lines["state"][slot]) for slot in slots] == [State.FREE] + [State.REWARDED] * (GROUP - 1)


def test_groups_that_are_set_aside_together_share_one_copy_of_their_lines(ring: Ring) -> None:
    groups = [rewarded_group(ring), rewarded_group(ring, group=1)]
    claims = claims_of(ring)
    claims.look(TrainedSet())
    first, second = claims.lines_of(groups)
    assert first.base is second.base is not None and claims.lines_of([]) == []
    assert [first["group"].tolist(), second["group"].tolist()] == [[0] * GROUP, [1] * GROUP]


def excerpts(
    kept: int | str = 1, model: str = "nowhere", tag: str = "", seats: dict[str, tuple[str, ...]] | None = None,
    **data: str,
) -> Excerpts:
    topology = SimpleNamespace(
        data=Data("train.jsonl", **data), log=Log(kept), openai=Openai(), model=SimpleNamespace(path=model), tag=tag,
        seats=("policy",), groups=Groups(GROUP),
    )
    return Excerpts(topology, seats)  # type: ignore[arg-type]


def test_a_shown_sample_names_its_seat_and_its_siblings(ring: Ring) -> None:
    slots = rewarded_group(ring, group=3)  # of a model with two seats: the second one of draw 1
    claimed = claim(ring, slots)
    assert isinstance(claimed, Claimed)
    seats = {"solver": ("first", "second"), "judge": ("judge",)}
    shown = excerpts("all", tag="solver", seats=seats).of_step(ring, [claimed])
    assert [row["seat"] for row in shown] == ["second"] * GROUP
    assert [row["siblings"] for row in shown] == [
        {"first": 2 * 2 * GROUP + member, "judge": 1 * 2 * GROUP + member} for member in range(GROUP)]
    assert not {"seat", "siblings"} & excerpts("all").of_step(ring, [claimed])[0].keys()


def test_requested_samples_are_kept_starting_with_one_of_every_group(ring: Ring) -> None:
    claimed = claim(ring, rewarded_group(ring))
    again = replace(claimed, records=tuple(structs.replace(record, group=1) for record in claimed.records))
    for kept, count in ((0, 0), (1, 1), (3, 3), (100, 2 * GROUP), ("all", 2 * GROUP)):
        rows = excerpts(kept).of_step(ring, [claimed, again])
        assert len(rows) == count
    assert [row["tokens"] for row in rows] == [3, 3, 4, 4, 5, 5, 6, 6]
    assert len({row["uid"] for row in rows}) == GROUP


def test_a_prompt_is_shown_as_the_model_was_given_it(tmp_path: Path) -> None:
    line = '{"q": "1+1", "answer": 2}'
    assert excerpts(prompt_key="q").prompt(line) == ("1+1", {"answer": 2})
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<A>")
    asked = {"prompt_key": "q", "template": "chat", "system": "Be short."}
    assert excerpts(**asked).prompt(line) == ("1+1", {"answer": 2}), "no template to be read: the words"
    chat = excerpts(model=str(tmp_path), **asked)
    assert chat.prompt(line) == ("<system>Be short.<user>1+1<A>", {"answer": 2})
    assert chat.prompt("(no task)") == ("(no task)", {})


def test_a_claimed_group_is_a_copy_that_outlives_its_slots(ring: Ring) -> None:
    slots = rewarded_group(ring)
    claimed = claim(ring, slots)
    assert isinstance(claimed, Claimed)
    assert states(ring, slots) == [State.TRAINING] * GROUP
    (shown,) = excerpts().of_step(ring, [claimed])
    end(ring, claimed, "T")
    assert states(ring, slots) == [State.FREE] * GROUP
    assert [len(record.token_array()) for record in claimed.records] == [3, 4, 5, 6]
    assert [(record.step, record.admission) for record in claimed.records] == [(2, 7)] * GROUP
    assert shown["completion"] == "xxx" and shown["versions"] == [3]


def test_a_slot_that_moved_gives_the_whole_group_back(ring: Ring) -> None:
    slots = rewarded_group(ring)
    before = ring.lines()
    stolen = ring.claim(slots[2], int(before["word"][slots[2]]), State.TRAINING)
    assert stolen
    assert claim(ring, slots, before) is None
    assert states(ring, slots) == [State.REWARDED, State.REWARDED, State.TRAINING, State.REWARDED]


def test_an_untrainable_sample_is_dropped_and_the_others_return(ring: Ring) -> None:
    slots = rewarded_group(ring)
    claimed = claim(ring, slots, fault=lambda records: (1, "bad id"))
    assert isinstance(claimed, Malformed) and str(claimed) == "sample 1: bad id"
    assert states(ring, slots) == [State.REWARDED, State.FREE, State.REWARDED, State.REWARDED]
    assert ring.stats().drops == {"M": 1} or sum(ring.stats().drops.values()) == 1


def test_counts_that_differ_make_a_sample_malformed(ring: Ring) -> None:
    slots = rewarded_group(ring)
    word = ring.claim(slots[0], words(ring, slots)[0], State.TRAINING)
    with pytest.raises(Exception, match="segment"):
        ring.put(slots[0], word, "logprobs", np.zeros(1, np.float32), 0)
    give_back(ring, [(slots[0], word)])
    assert states(ring, slots)[0] == State.REWARDED


def test_the_culprit_of_a_group_is_dropped_wherever_it_stands(ring: Ring) -> None:
    slots = rewarded_group(ring)
    assert str(claim(ring, slots, fault=lambda records: (3, "no prompt"))) == "sample 3: no prompt"
    assert states(ring, slots)[3] == State.FREE and states(ring, slots)[:3] == [State.REWARDED] * 3


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.zeros(3, np.int64), "tensor prompt_ids is int64 with 1 dimensions, expected int32 with 1"),
        (np.zeros((3, 1), np.int32), "tensor prompt_ids is int32 with 2 dimensions, expected int32 with 1"),
    ],
)
def test_a_tensor_of_another_type_or_rank_costs_its_sample_only(ring, array, why):
    for member in range(GROUP):
        ring.dispatch(
            uid=member, group=0, admission=7, member=member, group_size=GROUP, cls=0, task=b"{}", prompt_crc=1,
            max_new_tokens=8, temperature=1.0, version=3, step=2,
        )
    slots = []
    for slot, word in ring.take(State.QUEUED, State.GENERATING, cls=None, limit=GROUP):
        ids = array if not slots else np.arange(2, dtype=np.int32)
        ring.put(slot, word, "prompt_ids", ids)
        part = np.arange(3, dtype=np.int32), np.full(3, -1.0, np.float32), np.full(3, 3, np.uint32)
        write_segment(ring, slot, word, 0, *part)
        ring.commit_segment(slot, word, True)
        slots.append(slot)
    for slot, word in ring.take(State.GENERATED, State.REWARDING, cls=None, limit=GROUP):
        ring.release(slot, word, State.REWARDED)
    claimed = claim(ring, slots)
    assert claimed is not None and why in str(claimed)
    assert states(ring, slots) == [int(State.FREE), *[int(State.REWARDED)] * 3]
    left = claim(ring, slots[1:])
    assert isinstance(left, Claimed)
    (row,) = excerpts().of_step(ring, [left])
    assert "has no tensor" in str(row["completion"])  # nobody wrote a text: trained all the same


def sound(records):  # type: ignore[no-untyped-def]
    return None


def test_several_groups_at_once_are_what_each_alone_would_be(ring: Ring) -> None:
    groups = [rewarded_group(ring), rewarded_group(ring, (1, 2, 3, 4), group=1)]
    several = claim_groups(ring, ring.lines(), groups, sound)
    assert several is not None
    for slots, claimed in zip(groups, several):
        give_back(ring, claimed.slots)
        alone = claim(ring, slots)
        assert isinstance(alone, Claimed)
        assert (alone.group, alone.records) == (claimed.group, claimed.records)
        assert [slot for slot, _ in alone.slots] == [slot for slot, _ in claimed.slots] == slots
        assert states(ring, slots) == [State.TRAINING] * GROUP


@pytest.mark.parametrize("trouble", ["moved", "malformed", "fault"])
def test_several_groups_are_all_given_back_if_one_is_in_the_way(trouble: str, ring: Ring) -> None:
    groups = [rewarded_group(ring), rewarded_group(ring, group=1, lost=int(trouble == "malformed"))]
    lines, fault = ring.lines(), sound
    if trouble == "moved":
        slot = groups[1][2]
        word = ring.claim(slot, int(lines["word"][slot]), State.TRAINING)
        ring.release(slot, word, State.REWARDED)
    elif trouble == "fault":
        fault = lambda records: (3, "bad")  # noqa: E731
    assert (claim_groups(ring, lines, groups, fault) is None) == (trouble == "moved")
    culprit = {"malformed": GROUP, "fault": 3}.get(trouble)
    expected = [State.FREE if at == culprit else State.REWARDED for at in range(2 * GROUP)]
    assert states(ring, [*groups[0], *groups[1]]) == expected


PARTS: tuple[dict[str, float], ...] = (
    {"format": 1.0, "right": 0.5}, {"format": 0.0, "right": 0.25}, {}, {"format": 0.5, "Länge, in Worten": -1.0},
)


def test_reward_parts_return_by_name_and_stand_beside_the_sample(ring: Ring) -> None:
    slots = rewarded_group(ring, parts=PARTS)
    assert [read_parts(ring, slot) for slot in slots] == list(PARTS)
    claimed = claim(ring, slots)
    assert isinstance(claimed, Claimed)
    assert excerpts().of_step(ring, [claimed])[0]["reward_parts"] == PARTS[0] and parts_of(ring, slots) == list(PARTS)
    (without,) = excerpts().of_step(ring, [claim(ring, rewarded_group(ring, group=1))])
    assert "reward_parts" not in without


def test_nameless_parts_of_another_program_are_numbered_and_too_many_refused(ring: Ring) -> None:
    slot = rewarded_group(ring)[0]
    word = ring.claim(slot, int(ring.line(slot)["word"]), State.TRAINING)
    ring.put(slot, word, "reward_parts", np.array([0.25, np.nan, 1.0], np.float32))
    assert read_parts(ring, slot) == {"part_1": 0.25, "part_3": 1.0}
    with pytest.raises(SlotTooSmall):
        write_parts(ring, slot, word, {str(n): 0.0 for n in range(4096)})


def test_the_metrics_average_each_part_over_all_samples_that_have_it(tmp_path: Path) -> None:
    metrics = StepMetrics(RunPaths.of(tmp_path))
    metrics.trained(0, PARTS)
    assert metrics.ended.row()["reward_parts"] == {"format": 0.5, "right": 0.375, "Länge, in Worten": -1.0}
    metrics.begin_step()
    assert "reward_parts" not in metrics.ended.row()
    metrics.close()


def test_the_tag_of_a_group_is_that_of_its_line(ring: Ring) -> None:
    slot = rewarded_group(ring)[0]
    line = msgspec.json.decode(read_task(ring, slot))
    assert tag_at(ring, slot, "") == str(line.get("tag", "")) and tag_at(ring, slot, "no such key") == ""
    assert tag_at(ring, slot, "prompt") == line["prompt"]


def test_tag_figures_cover_all_groups_with_that_tag_even_set_aside_ones(tmp_path: Path) -> None:
    metrics = StepMetrics(RunPaths.of(tmp_path), solved=0.5)
    own = np.zeros(2, [("reward", "f8"), ("response_tokens", "u4"), ("group", "u8"), ("step", "u8")])
    own["response_tokens"] = 7
    metrics.set_aside(own, Fate.FLAT.letter, 1, tag="easy")
    own["reward"] = 1, 0.25
    metrics.set_aside(own, Fate.OLD.letter, 1, tag="easy")
    metrics.set_aside(own, Fate.OLD.letter, 1)
    by = metrics.ended.row()["by"]
    assert by == {"easy": {
        "groups": 2, "samples": 4, "reward": 1.25 / 4, "pass_rate": 0.25, "length": 7.0, "flat_share": 0.5}}
    again = StepMetrics(RunPaths.of(tmp_path), solved=0.5)
    again.resume(0)
    assert again.ended.row()["by"] == by, "a successor reads the tags of what was set aside before it"
    for one in (metrics, again):
        one.close()


def test_no_more_tags_are_told_than_a_person_reads(tmp_path: Path) -> None:
    ended = Ended()
    for number in range(100):
        ended.add_line(GroupsLine(
            step=1, draws=[number], fates="T", born=[0], lengths=[[1]], rewards=[[1.0]], tags=[str(number)]))
    assert len(ended.row()["by"]) == 32 and ended.groups == 100


def test_a_sample_that_nobody_claimed_can_be_shown(ring: Ring) -> None:
    slot = rewarded_group(ring)[1]
    shown = excerpts().glimpse(ring, slot, ring.line(slot))
    assert (shown["completion"], shown["reward"], shown["version"]) == ("xxxx", float(slot), 3)
    assert "ab" in str(shown["prompt"])
