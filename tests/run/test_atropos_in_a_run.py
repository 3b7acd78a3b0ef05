"""Runs that train the groups which environments of Atropos post, over HTTP: repeats, refusals, deaths in mid-group."""

from __future__ import annotations

import gzip
import json
import sys
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import check_end
from harness import ROOT, Run, beside, running

from busrl.ledger.wal import Wal

ATROPOS, CLIENT = ROOT / "configs" / "atropos.toml", ROOT / "examples" / "agents" / "atropos_client.py"
# Groups by hand have made-up log-probabilities.
SMALL = ("learner.checkpoint_every=0", "groups.size=8", "learner.trigger.n_min=4", "learner.mismatch_limit=1000")


def ask(url: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    data = None if body is None else gzip.compress(json.dumps(body).encode())
    head = {"Content-Type": "application/json", **({"Content-Encoding": "gzip"} if data else {})}
    try:  # a run that begins has no room until its learner is ready
        with urllib.request.urlopen(urllib.request.Request(url, data, head, method=method), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as problem:
        return ask(url, body, method) if problem.code == 503 else (problem.code, json.load(problem))


def environment(run: Run) -> AbstractContextManager[None]:
    """The example's program, which ends with the run."""
    return beside(sys.executable, CLIENT, run.directory)


def group(first: int) -> dict[str, Any]:
    """Two turns of the model in each sequence."""
    tokens = [[first, 3, 4 + i, 5, 6, 7] for i in range(8)]
    masks = [[-100, -100, 4 + i, 5, -100, 7] for i in range(8)]
    logprobs = [[1.0, 1.0, -0.5, -1.5, 1.0, -2.5]] * 8
    return {"tokens": tokens, "masks": masks, "inference_logprobs": logprobs, "scores": [float(i) for i in range(8)]}


def check_posted(run: Run, *firsts: int) -> None:
    """The groups by hand were trained once, with their ids, log-probabilities and scores."""
    samples = [sample for record in Wal(run.paths.wal).records() for sample in record.samples]
    for first in firsts:
        want = group(first)
        logprobs = np.array([-0.5, -1.5, -2.5], np.float32).tobytes()
        posted = [
            sample for sample in samples
            if np.frombuffer(sample.token_ids, np.int32)[0] == first and len(sample.turns) == 8
            and sample.logprobs == logprobs
        ]
        assert sorted(sample.reward for sample in posted) == want["scores"]
        assert sorted(np.frombuffer(sample.token_ids, np.int32).tolist() for sample in posted) == want["tokens"]
        assert len({sample.group for sample in posted}) == 1


@pytest.mark.long
def test_posted_groups_are_trained_with_their_own_ids_and_scores(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", *SMALL, config=ATROPOS, steps=3)
    with running(run):
        url = run.told("atropos")["url"]
        other = ask(f"{url}/register-env", {"desired_name": "toy", "group_size": 4})[1]["status"]
        assert other.startswith("group_size = 4")
        status, registered = ask(f"{url}/register-env", {"desired_name": "toy", "group_size": 8, "weight": 1.0})
        assert (status, registered["wandb_name"], registered["num_steps"]) == (200, "toy_0", 3)
        assert ask(f"{url[:-4]}0000/scored_data", group(1))[0] == 401
        assert ask(f"{url}/scored_data", {**group(1), "scores": [1.0]})[0] == 422
        for _ in range(2):  # the second is the first one again
            assert ask(f"{url}/scored_data", group(1)) == (200, {"status": "received"})
        several = [group(1), group(2), {**group(3), "env_id": registered["env_id"]}]
        assert ask(f"{url}/scored_data_list", several) == (200, {"status": "received", "groups_processed": 3})
        assert ask(f"{url}/latest_example", method="GET")[1]["tokens"] == group(3)["tokens"]
        status, seen = ask(f"{url}/status-env", {"env_id": 0}, "GET")
        assert status == 200 and seen["max_group_size"] == 8 and seen["queue_size"] >= 0
        with environment(run):
            check_end(run, run.wait())
    check_posted(run, 1, 2, 3)


@pytest.mark.long
@pytest.mark.parametrize("count", [3, 8])
def test_a_death_between_the_commits_of_a_group_loses_and_doubles_nothing(
    tmp_path: Path, quickstart: None, count: int
) -> None:
    """After the third commit of a group, and after its last one, whose answer its client never got."""
    crash = f'faults.crash=[{{process="atropos", point="commit.after", count={count}}}]'
    run = Run(tmp_path / "run", *SMALL, crash, config=ATROPOS, steps=2)
    with running(run):
        url = run.told("atropos")["url"]
        with pytest.raises(OSError):
            ask(f"{url}/scored_data", group(1))
        run.until("it came back", lambda: run.told("atropos")["url"] != url)
        assert ask(f"{run.told('atropos')['url']}/scored_data", group(1))[0] == 200
        with environment(run):
            check_end(run, run.wait())
    assert run.restarts("atropos") == 1
    check_posted(run, 1)


@pytest.mark.slow
def test_a_run_learns_from_groups_while_their_trainer_is_killed(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", *SMALL, config=ATROPOS, steps=12)
    with running(run), environment(run):
        for step in (2, 5, 8):
            run.until_step(step)
            run.kill("atropos")
        check_end(run, run.wait())
    assert run.restarts("atropos") == 3


@pytest.mark.long
def test_a_teacher_that_is_posted_with_groups_is_learned_from(tmp_path: Path, quickstart: None) -> None:
    taught = {
        "distill_token_ids": [[[], [3], [4 + i, 2], [5, 3], [], [7]] for i in range(8)],
        "distill_logprobs": [[[], [-0.1], [-0.5, -1.5], [-0.2, -3.0], [], [-0.4]]] * 8,
    }
    distill = ("learner.loss=topk_kl", "learner.advantage=reward", "learner.teacher=[{posted = true}]")
    settings = ("learner.teacher_k=2", "learner.checkpoint_every=1", *SMALL[1:], *distill)
    run = Run(tmp_path / "run", *settings, config=ATROPOS, steps=3)
    with running(run):
        url = run.told("atropos")["url"]
        status, reply = ask(f"{url}/scored_data", group(1))
        assert status == 422 and "its teacher is posted" in reply["detail"]
        for first in range(1, 13):
            assert ask(f"{url}/scored_data", {**group(first), **taught}) == (200, {"status": "received"})
        code = run.wait()
    check_end(run, code)
    assert all(row["teacher_kl"] > 0.1 for row in run.metrics() if "kind" not in row)
    assert len(list(run.paths.taught.iterdir())) == 4, "of the newest checkpoint's step: the log may be needed again"
