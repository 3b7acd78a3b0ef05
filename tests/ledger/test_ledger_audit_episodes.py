"""Episodes in the log: the audit reads where turns begin and end, and whose weights count as their age."""

from __future__ import annotations

import json

import numpy as np
import pytest

SEQS, TURNS = [7, 5], [0, 2, 4, 1, 0, 6, 7, 2, 1, 3, 5, 5]  # the second turn is not trained


def episode(**lies: object) -> dict[str, object]:
    """Twelve ids, of which five were sampled."""
    five = {"logprobs": np.full(5, -1.0, "<f4").tobytes(), "versions": np.zeros(5, "<u4").tobytes()}
    whole = {"prompt_ids": b"", "token_ids": np.arange(12, dtype="<i4").tobytes(), "seqs": SEQS, "turns": TURNS}
    return {**five, **whole, "version": 0, "step": 0, **lies}


def test_an_episode_of_several_turns_and_sequences_is_no_broken_payload(run) -> None:
    lies = {uid: episode(turn_rewards=[0.5, 0.0, 1.0]) for uid in run.group(0)[:2]}
    run.step(1, run.group(0), lies=lies)
    run.step(2, run.group(1), lies={run.uid(1, 0): episode(keys=["plan", "", "code"])})
    run.open()
    assert [path.read_bytes()[8] for path in sorted((run.root / "wal").glob("*.wal"))] == [3, 4]
    assert run.audit().errors == ()


@pytest.mark.parametrize(
    "lie",
    [
        {"seqs": [7, 4]},  # not all of its ids
        {"seqs": []},
        {"turns": []},
        {"turns": TURNS[:-1]},
        {"turns": [0, 0, 2, 1, *TURNS[4:]]},  # nothing was read before it
        {"turns": [0, 2, 4, 1, 0, 3, 4, 3, *TURNS[8:]]},  # one within the other
        {"turns": [0, 2, 4, 1, 0, 6, 8, 3, *TURNS[8:]]},  # beyond its sequence
        {"turns": [*TURNS[8:], *TURNS[:8]]},
        {"turns": [*TURNS[:8], 2, 3, 5, 5]},
        {"logprobs": np.full(6, -1.0, "<f4").tobytes()},
        {"versions": np.zeros(4, "<u4").tobytes()},
        {"turn_rewards": [1.0]},
        {"keys": ["plan", "code"]},
    ],
)
def test_turns_that_do_not_lie_in_their_sequences_are_found(run, lie: dict[str, object]) -> None:
    run.step(1, run.group(0), lies={run.uid(0, 2): episode(**lie)})
    run.open()
    report = run.audit()
    assert report.kinds == {"bad_payload"} and report.errors[0].examples == (run.uid(0, 2),)


def test_the_age_of_an_episode_counts_from_its_oldest_trained_token(run) -> None:
    path = run.root / "topology.json"
    content = json.loads(path.read_text())
    content["weights"] = {"mode": "batch-async", "max_staleness": 9, "over_age": "drop"}
    path.write_text(json.dumps(content))
    run.step(1, run.group(0))
    run.step(2, run.group(1))
    old = [2, 2, 1, 2, 2]  # the third id is of the turn that is not trained

    def versions(drawn_by: list[int]) -> dict[str, object]:
        return episode(versions=np.array(drawn_by, "<u4").tobytes(), version=2, step=2)

    run.step(3, run.group(2), lies={run.uid(2, 0): versions(old), run.uid(2, 1): versions([2, 2, 2, 1, 2])})
    run.open()
    report = run.audit()
    assert report.kinds == {"wrong_age"} and report.errors[0].examples == (run.uid(2, 1),)
