"""vLLM behind the engine interface, for real: what it generates, and what it says about every token."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_scene import EOS_ID, EXACT, LENGTH, Scene, request

from busrl.states import Finish

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_log_probabilities_match_a_plain_forward_pass_at_the_drawing_settings(scene: Scene) -> None:
    asked = [request(1, [5, 6, 7]), request(2, [8, 9], temperature=0.7), request(3, [3, 4, 5, 6], 40, top_p=0.8)]
    made = scene.run(*asked)
    assert max(scene.off_by(one, made[one.key]) for one in asked) < EXACT
    assert all((made[one.key].versions == scene.engine.version).all() for one in asked)


def test_greedy_tokens_are_the_likeliest_and_have_log_probability_zero(scene: Scene) -> None:
    made = scene.run(request(1, [5, 6, 7], temperature=0.0))[1]
    assert (made.logprobs == 0).all()
    again = scene.run(request(9, [5, 6, 7], temperature=0.0, seed=99))[9]
    assert (again.token_ids == made.token_ids).all()


def test_a_sample_is_a_function_of_seed_uid_and_segment(scene: Scene) -> None:
    one = scene.run(request(1, [5, 6, 7]))[1]
    crowd = scene.run(request(1, [5, 6, 7]), *(request(k, [5, 6, k]) for k in range(2, 7)))
    other = scene.run(request(1, [5, 6, 7], seed=4))[1]
    assert (crowd[1].token_ids == one.token_ids).all()
    assert other.token_ids.tolist() != one.token_ids.tolist()


def test_a_prompt_taken_in_pieces_gives_the_same_sample_as_whole(scene: Scene, tmp_path: Path) -> None:
    """Eight prompts of 120 tokens, and 96 tokens in a step: the streams of rows that wait for the rest are set back."""
    asked = [request(k, [5 + (k + j) % 11 for j in range(120)]) for k in range(2, 10)]
    whole = scene.run(*asked)
    narrow = Scene(tmp_path / "narrow", scene.tied, extra={"max_num_batched_tokens": "96"})
    try:
        pieces = narrow.run(*asked)
        assert max(narrow.off_by(one, pieces[one.key]) for one in asked) < EXACT
    finally:
        narrow.close()
    assert [pieces[one.key].token_ids.tolist() for one in asked] == [whole[one.key].token_ids.tolist() for one in asked]


def test_an_answer_ends_at_its_end_token_or_at_its_limit(scene: Scene) -> None:
    made = scene.run(*(request(k, [5, k], 30, temperature=2.0) for k in range(2, 10)))
    assert {one.finish for one in made.values()} == {Finish.EOS, Finish.LENGTH}
    for one in made.values():
        assert (one.finish == Finish.EOS) == (one.token_ids[-1] == EOS_ID)
        assert EOS_ID not in one.token_ids[:-1]
        assert one.finish == Finish.EOS or (one.finish == Finish.LENGTH and len(one.token_ids) == 30)


def test_a_segment_goes_on_behind_the_tokens_of_those_before(scene: Scene) -> None:
    first = request(1, [5, 6, 7], 10, temperature=0.0)
    one = scene.run(first)[1]
    whole = scene.run(request(1, [5, 6, 7], 20, temperature=0.0))[1]
    second = request(1, [5, 6, 7], 10, temperature=0.0, segment=1, prefix_ids=one.token_ids)
    if one.finish == Finish.LENGTH:
        two = scene.run(second)[1]
        assert [*one.token_ids, *two.token_ids] == whole.token_ids.tolist()


def test_a_prompt_without_room_ends_empty_and_long_ones_at_the_limit(scene: Scene) -> None:
    full = [5 + k % 7 for k in range(LENGTH)]
    made = scene.run(request(1, full), request(2, full[:-3], 50))
    assert len(made[1].token_ids) == 0 and made[1].finish == Finish.LENGTH
    assert 1 <= len(made[2].token_ids) <= 3


def test_an_aborted_request_gives_its_tokens_so_far_and_frees_its_row(scene: Scene) -> None:
    asked = request(1, [5, 6, 7], 150, temperature=0.0)
    with scene.slow_steps():
        scene.engine.submit([asked])
        scene.wait_for_tokens(3)
        cut = scene.engine.abort(1)
    assert cut is not None and cut.finish == Finish.ABORTED and len(cut.token_ids) >= 3
    assert scene.engine.active == 0 and scene.engine.abort(1) is None
    assert len(scene.run(request(1, [5, 6, 7], 4))[1].token_ids) <= 4


def test_a_pause_keeps_waits_or_aborts(scene: Scene) -> None:
    long = [request(k, [5, 6, k + 5], 150, temperature=0.0) for k in (1, 2)]
    with scene.slow_steps():
        scene.engine.submit(long)
        scene.wait_for_tokens(2)
        assert scene.engine.pause("keep") == []
        before = scene.engine.statistics()
        assert before.paused and scene.engine.step() == [] and scene.engine.statistics().tokens == before.tokens
        scene.engine.resume()
        ended = {answer.key for answer in scene.engine.pause("abort")}
    assert ended == {1, 2} and scene.engine.active == 0
    scene.engine.resume()
    scene.engine.submit([request(1, [5, 6], 8)])
    waited = scene.engine.pause("wait")
    assert [one.key for one in waited] == [1] and waited[0].finish in (Finish.EOS, Finish.LENGTH)
    scene.engine.resume()


def test_statistics_count_tokens_steps_and_the_cache(scene: Scene) -> None:
    before = scene.engine.statistics()
    made = scene.run(request(1, [5, 6, 7], 20, temperature=0.0))[1]
    scene.engine.step()
    after = scene.engine.statistics()
    assert after.tokens - before.tokens == len(made.token_ids)
    assert after.steps - before.steps >= len(made.token_ids)
    assert after.prefill_tokens - before.prefill_tokens in range(4)
    assert after.cache_capacity >= 8 * LENGTH and after.active == 0


def test_more_requests_than_rows_are_refused(scene: Scene) -> None:
    with pytest.raises(ValueError, match="submit at most capacity"):
        scene.engine.submit([request(k, [5, 6]) for k in range(20, 29)])
    assert scene.engine.active == 0
