"""Episodes of several models in real runs: a solver and a judge that both learn, and a third that only serves."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check_end
from harness import Run, read_lines, running
from safetensors.torch import load_file, save_file
from test_models_in_a_run import judged_run

from busrl.ledger.wal import SampleRecord, Wal
from busrl.paths import RunPaths
from busrl.states import episode_of

SIZE = 4
MODELS = '''[[model]]
tag = "old"
path = "{copy}"
trained = false
[[process]]
role = "rollout"
model = "old"
'''
EPISODE = '''
async def episode(task, llm):
    """The solver draws, the judge reads what it drew, and so does an older model, for nothing."""
    answer = await llm["solver"].complete(task["prompt"], max_tokens=6)
    verdict = await llm["judge"].complete([*answer.ids, 1], max_tokens=4)
    older = await llm["old"].complete([*answer.ids, 1], max_tokens=4)
    assert llm["old"].version == 0 and not llm["old"].trained and older.ids
    return {"solver": float(llm.uid % 4), "judge": {"odd": float(llm.uid % 2), "read": 0.5 * len(verdict.ids) / 4}}
'''


def sharper(folder: Path) -> None:
    """Another model than the one that it is a copy of: log-probabilities of the one are none of the other."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({name: tensor * 1.25 for name, tensor in weights.items()}, file, {"format": "pt"})


def three_models(folder: Path, *settings: str, steps: int) -> Run:
    run = judged_run(folder, steps)
    (folder / "episode.py").write_text(EPISODE)
    sharper(folder / "judge")
    text = run.config.read_text().replace("trained = false\n", "")
    run.config.write_text(text + MODELS.format(copy=folder / "judge"))
    run.settings += ["learner.checkpoint_every=5", *settings]
    return run


def samples_of(paths: RunPaths) -> dict[int, SampleRecord]:
    """The trained samples of a model, by the number of their episode."""
    samples = (sample for record in Wal(paths.wal).records() for sample in record.samples)
    return {episode_of(sample.uid, SIZE, 1): sample for sample in samples}


@pytest.mark.long
def test_a_solver_and_a_judge_learn_each_from_its_own_turns(tmp_path: Path, quickstart: None) -> None:
    # Keys of weights that were replaced would be a difference of their own.
    run = three_models(tmp_path, "generation.on_update=recompute", steps=4)
    judge = run.paths.of_tag("judge")
    with running(run):
        check_end(run, run.wait())
    assert run.step() == 4 and read_lines(judge.metrics)[-1]["step"] == 4
    solved, judged = samples_of(run.paths), samples_of(judge)
    both = solved.keys() & judged.keys()
    assert both and {len(sample.turn_array()) for sample in [*solved.values(), *judged.values()]} == {1}
    for paths in (run.paths, judge):
        measured = [row["mismatch"] for row in read_lines(paths.metrics) if row.get("mismatch") is not None]
        assert measured and max(measured) < 1e-4, "each model's engine drew what its learner trains"
    for number in both:
        drawn = solved[number].turn_array()[0].tolist()
        ids = [int(token) for token in memoryview(solved[number].token_ids).cast("i")][drawn[1] : drawn[2]]
        read = [int(token) for token in memoryview(judged[number].token_ids).cast("i")]
        assert read[: len(ids)] == ids, "the judge read what the solver drew in the same episode"
        assert solved[number].reward == number % 4 and int(judged[number].reward) in (number % 2, 1)
    rows = read_lines(run.paths.samples)
    assert rows and any(message.get("seat") == "old" for row in rows for said in row["messages"] for message in said)
    for row in rows:
        assert row["seat"] == "solver" and {*row["siblings"]} == {"judge"} and row["uid"] in row["siblings"].values()
    assert all(row["episodes"]["partner_age"] >= 0 and not row["episodes"]["alone"] for row in run.metrics())
