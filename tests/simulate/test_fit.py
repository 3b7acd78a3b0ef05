"""What is learned of a finished run, from files that were written with known times."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from busrl.cli import main
from busrl.data.trace import TracedPrompt, write
from busrl.errors import NoSuchRun, UserError
from busrl.preflight.load import load, load_for_simulation
from busrl.simulate.fit import fit, nonnegative
from busrl.simulate.settings import make
from busrl.simulate.world import World
from busrl.topology import Topology
from busrl.topology.schema import Simulate

ROOT = Path(__file__).resolve().parents[2]


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run directory with 2 rollout processes whose steps take 5 ms + 0.1 ms per row, and 2 ms per sequence."""
    prompts = tmp_path / "prompts.jsonl"
    write(prompts, [TracedPrompt(f"p{i}", (10 + i,), answer="1") for i in range(20)])
    overrides = [f"data.train={prompts}", "groups.size=4", "run.max_steps=40"]
    topology = load(ROOT / "configs" / "quickstart.toml", overrides)
    run = tmp_path / "run"
    run.mkdir()
    (run / "topology.json").write_text(topology.to_json())
    random = np.random.default_rng(0)
    for name in ("rollout-0", "rollout-1"):
        rows = []
        for _ in range(60):
            steps, active, joined = (int(random.integers(low, high)) for low, high in ((10, 40), (1, 64), (0, 9)))
            busy = steps * 0.005 + steps * active * 0.0001 + joined * 0.002
            rows.append({
                "wall_s": busy + 0.1 + 0.02, "step_s": 0.9 * busy, "weights_s": 0.02, "idle_s": 0.1, "steps": steps,
                "tokens": steps * active, "joined": joined, "updates": 2,
            })
        write_rows(run / "pace" / f"{name}.jsonl", rows)
    steps = []
    for step in range(1, 41):
        tokens, aside = int(random.integers(500, 900)), int(random.integers(0, 9))
        steps.append({
            "step": step, "tokens": tokens, "groups": 8, "groups_ended": 8 + aside, "publish_s": 0.004,
            "checkpoint_s": 0.0, "forward_s": tokens * 0.00008, "backward_s": tokens * 0.00012,
            "seconds": 0.03 + tokens * 0.0002 + aside * 0.001 + 0.004 + 0.5,
            "wait_s": {"groups": 0.3, "window": 0.2},
        })
    write_rows(run / "metrics.jsonl", steps)
    slots = {"generated": {"stay_s": 0.02}, "rewarding": {"stay_s": 0.03}}
    (run / "summary.json").write_text(json.dumps({"slots": slots}))
    write_rows(run / "groups.jsonl", [
        {"step": step + 1, "draws": [2 * step, 2 * step + 1], "fates": "TT", "born": [step, step],
         "lengths": [[step + 1] * 4, [step + 2] * 4], "rewards": [[0, 1, 0, 1], [0, 1, 0, 1]]}
        for step in range(40)
    ])
    return run


def test_a_fit_finds_the_times_that_the_files_were_written_with(recorded: Path) -> None:
    times = fit(recorded).times
    assert times.step_s == pytest.approx(0.005, rel=1e-3)
    assert times.row_s == pytest.approx(0.0001, rel=1e-3)
    assert times.sequence_s == pytest.approx(0.002, rel=1e-3)
    assert times.weights_s == pytest.approx(0.01)
    assert times.busy_share == pytest.approx(0.9)
    assert times.speed_spread == pytest.approx(0.0, abs=1e-6)
    assert times.learner_step_s == pytest.approx(0.03, rel=1e-3)
    assert times.learner_token_s == pytest.approx(0.0002, rel=1e-3)
    assert times.learner_group_s == pytest.approx(0.001, rel=1e-3)
    assert times.publish_s == pytest.approx(0.004)
    assert times.reward_s == pytest.approx(0.05) and times.reward_call_s == 0.0


@pytest.mark.parametrize(("busy", "workers", "call_s"), [(0.5, 1, 0.02), (0.5, 4, 0.08), (0.99, 1, 0.0396)])
def test_a_fit_finds_what_a_call_of_the_reward_takes(recorded: Path, busy: float, workers: int, call_s: float) -> None:
    fields = json.loads((recorded / "topology.json").read_text())
    fields["reward"]["workers"] = workers
    (recorded / "topology.json").write_text(json.dumps(fields))
    slots = {"generated": {"stay_s": 0.02}, "rewarding": {"stay_s": 0.1, "per_s": 25.0}}
    processes = {"reward/0": {"busy_share": busy}, "learner": {"busy_share": 0.1}}
    (recorded / "summary.json").write_text(json.dumps({"slots": slots, "processes": processes}))
    times = fit(recorded).times
    assert times.reward_call_s == pytest.approx(call_s)
    queued_s = busy / (2 * max(0.02, 1 - busy)) * call_s / workers
    assert times.reward_s == pytest.approx(max(0.0, 0.12 - call_s - queued_s))


def test_recorded_answers_follow_prompt_and_step(recorded: Path) -> None:
    fitted = fit(recorded)
    answers = fitted.answers(fitted.topology, seed=0)
    # Draw 30 was recorded with the weights of step 15; 20 prompts per epoch, so draw 10 is the same line or another.
    assert answers.answer(30, 15).lengths == (16,) * 4
    assert answers.answer(30, 15) == answers.answer(30, 15)
    late = [answers.answer(draw, 38).lengths[0] for draw in range(20)]
    early = [answers.answer(draw, 1).lengths[0] for draw in range(20)]
    assert min(late) > max(early)
    prompt = answers.prompt(3)
    assert prompt is not None and prompt.prompt.startswith("p")


def test_groups_of_seats_share_a_prompt_and_answer_as_that_seat_did(recorded: Path) -> None:
    topology = Topology.from_json((recorded / "topology.json").read_text())
    seated = dataclasses.replace(topology, model=dataclasses.replace(topology.model, seats=("first", "second")))
    (recorded / "topology.json").write_text(seated.to_json())
    write_rows(recorded / "groups.jsonl", [
        {"step": step + 1, "draws": [2 * step, 2 * step + 1], "fates": "TT", "born": [step, step],
         "lengths": [[1 + step] * 4, [21 + step] * 4], "rewards": [[0, 1, 0, 1], [1, 0, 1, 0]]}
        for step in range(40)
    ])
    fitted = fit(recorded)
    answers = fitted.answers(seated, seed=0)
    for draw in range(20):
        asked = [answers.prompt(2 * draw + seat) for seat in (0, 1)]
        assert asked[0] is not None and asked[0] == asked[1]
        assert [set(answers.answer(2 * draw + seat, draw).lengths) for seat in (0, 1)] == [{1 + draw}, {21 + draw}]
    alone = fitted.answers(topology, seed=0)  # without seats: as the first one was
    assert set(alone.answer(3, 3).lengths) == {4}
    assert fit(recorded).answers(seated, seed=0).answer(7, 3).rewards == (1, 0, 1, 0)


def test_a_fitted_run_can_be_simulated_with_other_settings(recorded: Path) -> None:
    fitted = fit(recorded)
    topology = load(ROOT / "configs" / "quickstart.toml", ["learner.trigger.n_min=8", "groups.size=4",
                                                           f"data.train={fitted.topology.data.train}"])
    setting = make(topology, fitted, steps=10, actors=3)
    figures = World(topology, setting.times, setting.answers, actors=3, steps=10, seed=0).run()
    assert figures.steps == 10
    assert 1 <= figures.length_drawn <= 40


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("topology.json", "not a run directory"),
        ("pace/rollout-0.jsonl", "60 intervals"),
        ("metrics.jsonl", "0 steps after the first"),
        ("groups.jsonl", "no line in it"),
        ("summary.json", "written when a run ends in order"),
    ],
)
def test_a_run_without_the_needed_files_is_refused_by_file_name(
    recorded: Path, broken: str, message: str
) -> None:
    (recorded / broken).unlink()
    if broken.startswith("pace"):
        assert fit(recorded).times.step_s > 0  # the other process is enough
        (recorded / "pace" / "rollout-1.jsonl").write_text("")
        with pytest.raises(UserError, match="pace: 0 intervals"):
            fit(recorded)
        return
    with pytest.raises((UserError, NoSuchRun), match=message):
        fit(recorded)


def test_a_line_that_is_not_json_is_named(recorded: Path) -> None:
    with open(recorded / "metrics.jsonl", "a") as file:
        file.write("{oops\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:41: a line is not JSON"):
        fit(recorded)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("pace/rollout-0.jsonl", '{"wall_s": 1.0}\n', r"rollout-0.jsonl:1: no step_s, weights_s"),
        ("metrics.jsonl", '{"step": 3, "seconds": 1.0}\n', r"metrics.jsonl:1: no wait_s"),
        ("groups.jsonl", "[1]\n", r"groups.jsonl:1: no draws"),
        ("summary.json", '{"slots": ', r"summary.json: damaged"),
        ("summary.json", "{}", r"summary.json: no `slots`"),
        ("topology.json", "{", r"topology.json: not what busrl wrote"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name_and_line(recorded: Path, file: str, text: str, message: str) -> None:
    (recorded / file).write_text(text)
    with pytest.raises(UserError, match=message):
        fit(recorded)


def test_steps_of_one_size_still_tell_what_a_token_costs(recorded: Path) -> None:
    rows = [json.loads(line) for line in (recorded / "metrics.jsonl").read_text().splitlines()]
    random = np.random.default_rng(1)
    for row in rows:  # noise that a slope over the steps would take for the whole cost
        row |= {"tokens": 700, "forward_s": 0.02, "backward_s": 0.05, "seconds": 0.604 + random.uniform(0, 0.03)}
    write_rows(recorded / "metrics.jsonl", rows)
    fitted = fit(recorded)
    assert fitted.times.learner_token_s == pytest.approx(0.0001)
    assert 0.025 < fitted.times.learner_step_s + 4 * fitted.times.learner_group_s < 0.05
    assert fitted.seen.tokens == (700, 700)


def test_keys_that_are_set_override_the_fit_and_no_others(recorded: Path) -> None:
    fitted = fit(recorded)
    default = str(Simulate().row_s)
    topology, written = load_for_simulation(
        ROOT / "configs" / "quickstart.toml", ["simulate.step_spread=0.3", f"simulate.row_s={default}", "groups.size=4"]
    )
    times = make(topology, fitted, written, steps=1).times
    assert (times.step_spread, times.row_s, times.step_s) == (0.3, float(default), fitted.times.step_s)
    assert times.source["row_s"] == times.source["step_spread"] == "set in [simulate]"
    assert times.source["step_s"] == "fitted, run"


def test_a_sweep_that_leaves_what_the_run_showed_says_so(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--fit", str(recorded), "--steps", "6", "--set", "groups.size=4", "--out", str(tmp_path / "out")]
    sweep = ["--sweep", "learner.trigger.n_min=2,8"]
    assert main(["simulate", str(ROOT / "configs" / "quickstart.toml"), *options, *sweep]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert any(line.startswith("WARNING: 2: ") and "tokens per step (the fitted run: 5" in line for line in warnings)


def test_least_squares_gives_the_best_fit_without_negative_numbers() -> None:
    random = np.random.default_rng(1)
    sums = random.uniform(1, 2, (50, 3))
    line = nonnegative(sums, sums @ np.array([2.0, 0.0, 1.0]))
    assert line.values == pytest.approx((2.0, 0.0, 1.0), abs=1e-9)
    worse = nonnegative(sums, sums @ np.array([2.0, -0.5, 1.0]))
    assert min(worse.values) >= 0 and worse.values[1] == 0
