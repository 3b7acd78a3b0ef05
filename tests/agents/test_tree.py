"""The tree of turns: what a message must keep to be known again, budgets, streams of random numbers, and retries."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.agents.tree import Tree, Turn, canonical
from busrl.data.episodes import EpisodeLimits
from busrl.errors import CallRefused
from busrl.states import Finish

USER = {"role": "user", "content": "Add."}


def call_of(arguments: Any, name: str = "add", number: str = "1") -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize("message, other", [
    ({"role": "assistant", "content": "Two."}, {"content": " Two.\n", "role": "assistant", "refusal": None}),
    ({"role": "user", "content": None}, {"role": "user", "content": ""}),
    ({"role": "user", "content": "ab"},
     {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
    (call_of('{"a": 1, "b": [2.0]}'), call_of('{"b":[2],"a":1.0}', number="other")),
    (call_of({"a": 1}), call_of('{"a":1}')),
    (call_of("{broken "), call_of(" {broken")),
    ({"role": "assistant", "content": "Two.", "reasoning_content": "hm"}, {"role": "assistant", "content": "Two."}),
    ({"role": "assistant", "content": "<think>hm</think>\n\nTwo."}, {"role": "assistant", "content": "Two."}),
])
def test_a_client_may_spell_a_message_in_another_way(message: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(message) == canonical(other)


@pytest.mark.parametrize("message, other", [
    (USER, {**USER, "role": "system"}), (USER, {**USER, "content": "Add!"}),
    (call_of('{"a": 1}'), call_of('{"a": 2}')), (call_of("{}"), call_of("{}", name="sub")),
    ({"role": "tool", "content": "3", "tool_call_id": "x"}, {"role": "tool", "content": "3", "tool_call_id": "y"}),
])
def test_what_a_message_says_is_not_to_be_changed(message: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(message) != canonical(other)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1e3, 1e3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3), max_leaves=6)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.randoms(use_true_random=False))
def test_any_spelling_of_the_same_arguments_is_the_same_call(arguments: dict[str, Any], chance: Any) -> None:
    items = list(arguments.items())
    chance.shuffle(items)
    spelt = json.dumps(dict(items), ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 2]))
    assert canonical(call_of(spelt)) == canonical(call_of(json.dumps(arguments)))


@pytest.mark.parametrize("message, text", [
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
    ({"role": "user", "content": 3}, "content is a int"), ({"content": "a"}, "role None"), (b"{", "no JSON"),
    (b"[1]", "must be an object"), ({"role": "assistant", "tool_calls": 3}, "must be a list"),
    ({"role": "assistant", "tool_calls": [{}]}, "no function with a name"), ({"role": object()}, "written as JSON"),
    (b'{"role": "user", "content": ' + b"[" * 10_000, "no JSON"),
])
def test_a_message_that_cannot_be_used_is_refused_by_name(message: Any, text: str) -> None:
    with pytest.raises(CallRefused, match=text) as refused:
        Tree().read([USER, message])
    assert refused.value.code in ("invalid", "unsupported") and refused.value.param == "messages"


# -- calls without a template -----


def called(tree: Tree, parent: Turn | None = None, read: int = 2, drawn: int = 3, wanted: int = 9, **how: Any) -> Turn:
    asked = {name: how.pop(name) for name in ("trained", "key") if name in how}
    call = tree.ask(parent, np.arange(1, read + 1), wanted, **asked)
    turn = tree.answer(call, [*range(drawn)], [-0.5] * drawn, [4] * drawn, Finish.EOS, {"role": "assistant"}, **how)
    turn.delivered = True
    return turn


def test_the_arrays_of_an_episode_are_those_that_were_read_and_drawn() -> None:
    tree = Tree()
    first = called(tree, waited_ms=7, generated_ms=8)
    called(tree, first, read=1, trained=False, text="last")
    called(tree, first, read=4, drawn=2)
    first.reward = 0.5
    trajectory = tree.trajectory()
    assert trajectory is not None
    assert trajectory.ids.tolist() == [1, 2, 0, 1, 2, 1, 0, 1, 2, 1, 2, 0, 1, 2, 1, 2, 3, 4, 0, 1]
    assert trajectory.seqs.tolist() == [9, 11]
    eos = int(Finish.EOS)
    turns = trajectory.turns
    assert turns.tolist() == [[0, 2, 5, eos, 0, 7, 8, 1], [0, 6, 9, eos, 1, 0, 0, 0], [1, 9, 11, eos, 2, 0, 0, 1]]
    assert turns.flags.c_contiguous and turns.dtype == trajectory.ids.dtype == trajectory.seqs.dtype == np.int32
    assert len(trajectory.logprobs) == 8 and trajectory.logprobs.dtype == np.float32
    assert trajectory.versions.tolist() == [4] * 8 and trajectory.versions.dtype == np.uint32
    assert trajectory.turn_rewards is not None and trajectory.turn_rewards.tolist() == [0.5, 0, 0]
    assert trajectory.keys == ()


def test_keys_of_turns_stand_in_the_order_of_the_arrays() -> None:
    tree = Tree()
    first = called(tree, key="plan")
    called(tree, first, read=4, key="look")
    called(tree, first, read=1)
    trajectory = tree.trajectory()
    assert trajectory is not None and trajectory.turns[:, 4].tolist() == [0, 1, 2]
    assert trajectory.keys == ("plan", "look", "")


def test_a_turn_that_nobody_got_is_left_out_and_counted() -> None:
    tree = Tree()
    assert tree.trajectory() is None
    first, lost = called(tree), called(tree)
    lost.delivered = False
    trajectory = tree.trajectory()
    assert trajectory is not None and trajectory.undelivered == 1 and trajectory.turns[:, 4].tolist() == [first.number]
    called(tree, lost)
    trajectory = tree.trajectory()
    assert trajectory is not None and trajectory.undelivered == 0
    assert len(trajectory.turns) == 3, "a client that continues a turn has got it"


def test_the_path_of_ids_is_found_however_deep_and_the_longest_wins() -> None:
    tree = Tree()
    first = called(tree)
    deep, fork = called(tree, first), called(tree, first, read=4)
    for turn in (first, deep, fork):
        assert tree.match_ids(np.append(turn.path_ids, np.int32(99))) is turn
    assert tree.match_ids(first.path_ids) is None, "a prompt needs a token of its own"
    assert tree.match_ids(np.array([5, 6], np.int32)) is None
    twin = called(tree, first)
    assert tree.match_ids(np.append(deep.path_ids, np.int32(99))) is twin, "of equal paths the newest"


def test_forks_do_not_write_into_each_others_paths() -> None:
    tree = Tree()
    first = called(tree)
    calls = [tree.ask(first, [10 + n], 400) for n in range(3)]
    for n in (2, 0, 1):
        drawn = [20 + n] * (300 if n == 0 else 2)
        tree.answer(calls[n], drawn, [0.0] * len(drawn), [1] * len(drawn), Finish.EOS, {"role": "assistant"})
    for turn in tree.turns[1:]:
        n = turn.ids[0] - 20
        assert turn.path_ids.tolist() == [*first.path_ids.tolist(), 10 + n, *turn.ids.tolist()]
    with pytest.raises(ValueError):
        first.path_ids[0] = 3


def test_an_answer_that_does_not_fit_its_call_is_the_engines_fault() -> None:
    tree = Tree()
    call = tree.ask(None, [1], 2)
    for drawn, scores in (([1, 2, 3], 3), ([], 0), ([1], 2)):
        with pytest.raises(ValueError, match="room for 2"):
            tree.answer(call, drawn, [0.0] * scores, [1] * len(drawn), Finish.EOS, {"role": "assistant"})


@pytest.mark.parametrize("limits, text", [
    (EpisodeLimits(context=7), r"maximum context length is 7 tokens; the messages have 7 \(agents.context\)"),
    (EpisodeLimits(sampled=3), "agents.sampled 3 of 3"), (EpisodeLimits(turns=1), "agents.turns 1 of 1"),
    (EpisodeLimits(tokens=7), "agents.tokens 5 of 7"),
])
def test_a_used_up_budget_refuses_the_next_call_by_name(limits: EpisodeLimits, text: str) -> None:
    tree = Tree(limits)
    first = called(tree, wanted=3)
    with pytest.raises(CallRefused, match=text) as refused:
        called(tree, first)
    assert refused.value.code == "context_length_exceeded"


def test_a_second_sequence_is_refused_and_a_longer_one_is_not() -> None:
    tree = Tree(EpisodeLimits(sequences=1))
    first = called(tree)
    called(tree, first)
    with pytest.raises(CallRefused, match=r"agents\.sequences 1 of 1"):
        called(tree, first)


OPERATIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 5)), max_size=30)


@given(OPERATIONS)
def test_reserved_room_is_what_the_sequences_hold_when_no_call_runs(
    steps: list[tuple[int, int, int]]
) -> None:
    """Calls open, end and are cancelled in any order; then the counts are those of the arrays, and none is over."""
    limits = EpisodeLimits(context=40, sampled=60, tokens=160, turns=12, sequences=5)
    tree, under_way = Tree(limits), []
    for what, which, size in steps:
        if what < 2:
            parent = tree.turns[which % len(tree.turns)] if tree.turns and which else None
            if tree.room(parent, size, 8) >= 1:
                under_way.append(tree.ask(parent, [1] * size, 8))
        elif under_way:
            call = under_way.pop(which % len(under_way))
            if what == 2:
                drawn = min(size, call.room)
                tree.answer(call, [2] * drawn, [0.0] * drawn, [1] * drawn, Finish.EOS, {"role": "a"}).delivered = True
            else:
                tree.cancel(call)
    for call in under_way:
        tree.cancel(call)
    trajectory = tree.trajectory()
    used = dict.fromkeys(("turns", "sequences", "sampled", "tokens"), 0)
    if trajectory is not None:
        used = {"turns": len(trajectory.turns), "sequences": len(trajectory.seqs),
                "sampled": len(trajectory.logprobs), "tokens": len(trajectory.ids)}
    assert used == tree.used()
    assert all(have <= getattr(limits, key) for key, have in tree.used().items())


def test_random_numbers_follow_a_calls_prompt_and_how_often_it_was_asked() -> None:
    def streams(order: list[int]) -> dict[tuple[int, int], int]:
        tree, by_token = Tree(), {}
        first = called(tree)
        for place, token in enumerate(order):
            by_token[token, order[:place].count(token)] = tree.ask(first, [token], 5).stream
        return by_token

    assert streams([7, 8, 7, 9]) == streams([9, 7, 7, 8])
    assert len(set(streams([7, 8, 7, 9]).values())) == 4
    tree, fresh = Tree(), Tree()
    parent = called(tree, read=1, drawn=2)
    assert tree.ask(parent, [5], 3).stream == fresh.ask(None, [*parent.path_ids.tolist(), 5], 3).stream


def test_objects_and_their_json_are_the_same_history() -> None:
    tree = Tree()
    raw = [msgspec.Raw(msgspec.json.encode(USER)), msgspec.json.encode(call_of("{}"))]
    history = tree.read(raw, msgspec.Raw(b'[{"a": 1, "b": 2}]'))
    assert history.states == tree.read([USER, call_of("{}")], [{"b": 2, "a": 1}]).states
    assert history.messages() == [USER, call_of("{}")]
    assert history.states != tree.read([USER, call_of("{}")]).states, "other tools, another conversation"


def test_a_transcript_is_cut_to_its_limit_and_stays_json() -> None:
    tree = Tree()
    messages = [{"role": "user", "content": "long " * 300}, {"role": "user", "content": "Add."}]
    call = tree.ask(None, [1, 2], 5, tree.read(messages))
    tree.answer(call, [3], [0.0], [1], Finish.EOS, {"role": "assistant", "content": "3"}).delivered = True
    transcripts = json.loads(tree.transcript(1 << 16))
    assert transcripts == [[*messages, {"role": "assistant", "content": "3"}]]
    for limit in (1000, 300, 100, 10):
        cut = tree.transcript(limit)
        assert len(cut) <= limit
        assert json.loads(cut) is not None
    assert json.loads(tree.transcript(1000))[0][0]["content"].endswith("characters left out)")
