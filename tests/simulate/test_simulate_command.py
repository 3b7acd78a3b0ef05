"""`busrl simulate` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from busrl.cli import main
from busrl.data import trace
from busrl.data.trace import TracedPrompt, write
from busrl.simulate import command as command

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")
SCRIPTED = str(ROOT / "configs" / "scripted.toml")


def test_the_quickstart_is_near_its_real_run_and_assumes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    # Its times are of a quiet machine of two cores (60 steps of an earlier model, simulator_accuracy.json in
    # benchmarks/experiments/results): 37k tokens/s, learner busy for 65 %. More groups of today's model are flat.
    assert main(["simulate", QUICKSTART, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["figures"]["generated_tokens_per_s"] == pytest.approx(37e3, rel=0.15)
    assert shown["figures"]["learner_busy"] == pytest.approx(0.65, abs=0.15)
    assert {time["source"] for time in shown["times"].values()} == {"measured, quickstart on two cores"}


def test_a_missing_model_is_simulated_and_its_assumptions_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text()
    example = readme[readme.index("```toml") + 7 :]
    path = tmp_path / "my.toml"
    path.write_text(example[: example.index("```")])
    for engine in ("torch", "vllm"):
        assert main(["simulate", str(path), "--steps", "3", "--set", f"process.rollout.engine={engine}"]) == 0
        text = capsys.readouterr().out
        for word in ("samples/s", "busy", "age", "waiting", "skew", "assumed", "--fit RUN_DIR", "is not there"):
            assert word in text
        assert text.startswith("ASSUMED, not measured: step_s, row_s, reward_call_s, learner_step_s, learner_token_s")
        assert "bottleneck" not in text and "try --actors" not in text
    # What decides in a simulation is checked as ever.
    assert main(["simulate", str(path), "--set", "segments.rounds=segments"]) == 2
    assert "segments are off" in capsys.readouterr().err


def test_advice_is_given_where_the_decisive_times_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", QUICKSTART, "--steps", "10"]) == 0
    text = capsys.readouterr().out
    assert "ASSUMED" not in text and "Generation is the bottleneck" in text
    assert main(["simulate", QUICKSTART, "--steps", "4", "--set", "simulate.reward_call_s=0.1"]) == 0
    text = capsys.readouterr().out
    assert "reward      100% busy: calls of 100 ms, 1 at a time" in text and "The reward is the bottleneck" in text
    assert main(["simulate", SCRIPTED, "--steps", "4"]) == 0
    assert capsys.readouterr().out.startswith("ASSUMED, not measured: reward_call_s, learner_step_s")


def test_scripted_engines_have_the_pace_that_is_written_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "simulate.row_s=0.001", "--set", "mock.learner_s_per_token=0.0005"]
    assert main(["simulate", SCRIPTED, "--steps", "4", "--json", *options]) == 0
    times = json.loads(capsys.readouterr().out)["times"]
    assert times["step_s"] == {"value": 0.008, "source": "stated in [mock]"}
    assert times["prefill_token_s"] == {"value": 0.0002, "source": "stated in [mock]"}
    assert times["row_s"] == {"value": 0.001, "source": "set in [simulate]"}
    assert times["learner_token_s"] == {"value": 0.0005, "source": "stated in [mock]"}


def test_a_trace_that_is_cut_or_repeated_is_named_for_each_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    write(path, [TracedPrompt("a", (30, 70)), TracedPrompt("b", (50,) * 8)])
    options = ["--trace", str(path), "--steps", "2", "--out", str(tmp_path / "out")]
    assert main(["simulate", QUICKSTART, *options, "--sweep", "generation.max_new_tokens=64,128"]) == 0
    text = capsys.readouterr().out
    assert "answers: 64: trace" in text and "4 of 16 answers cut by generation.max_new_tokens = 64" in text
    assert "1 of 2 groups have fewer lengths than groups.size = 8: they repeat" in text
    assert "cut by generation.max_new_tokens = 128" not in text


def test_a_trace_of_flat_groups_ends_with_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flat.jsonl"
    write(path, [TracedPrompt("a", (5,), "1", rewards=(1.0,))])
    assert main(["simulate", QUICKSTART, "--trace", str(path), "--steps", "1"]) == 2
    assert "groups in a row ended with equal rewards" in capsys.readouterr().err


def test_a_long_simulation_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PATIENCE_S", 0.0)
    assert main(["simulate", QUICKSTART, "--steps", "12", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) and "of 12 after" in err and "of virtual time" in err


@pytest.mark.parametrize("arrivals", [False, True])
def test_prompts_arrive_as_in_a_live_run(tmp_path: Path, arrivals: bool, capsys: pytest.CaptureFixture[str]) -> None:
    # 8 lines over 7 s; 3 steps of 4 groups take the stream into its second epoch.
    path = tmp_path / "stream.jsonl"
    rewards = (0.0, 1.0, 0.0, 1.0)
    write(path, [TracedPrompt(f"p{i}", (10, 20, 30, 40), "1", rewards=rewards, arrival_s=float(i)) for i in range(8)])
    overrides = [f"data.train={path}", f"data.arrivals={str(arrivals).lower()}", "learner.trigger.n_min=4"]
    options = [part for override in overrides for part in ("--set", override)]
    assert main(["simulate", SCRIPTED, "--steps", "3", "--json", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert ("arrivals obeyed" in shown["answers"]) == arrivals
    assert (shown["figures"]["seconds"] > 11.0) == arrivals
    for name in ("reward_call_s", "learner_step_s", "learner_token_s"):  # what is assumed is no ground for advice
        options += ["--set", f"simulate.{name}=0.00001"]
    assert main(["simulate", SCRIPTED, "--steps", "3", *options]) == 0
    assert ("Too few prompts arrive" in capsys.readouterr().out) == arrivals


def test_arrivals_that_are_missing_or_out_of_order_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stream.jsonl"
    options = ["--set", f"data.train={path}", "--set", "data.arrivals=true"]
    for times, message in (((2.0, 1.0), ":2: arrival_s = 1.0, after 2.0"), ((None, None), "no line has arrival_s")):
        write(path, [TracedPrompt("p", (5,), arrival_s=time) for time in times])
        assert main(["simulate", SCRIPTED, *options]) == 2
        assert message in capsys.readouterr().err


def test_json_holds_every_figure_and_where_each_time_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", QUICKSTART, "--steps", "5", "--json", "--seed", "7", "--actors", "2"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["actors"] == 2 and shown["seed"] == 7 and shown["figures"]["steps"] == 5
    assert sum(shown["figures"]["ages"].values()) == pytest.approx(1.0)
    assert shown["times"]["step_s"]["source"].startswith("measured")


def test_a_sweep_writes_a_table_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    sweeps = ["--sweep", "learner.trigger.n_min=8,16", "--sweep", "simulate.actors=1,2,3"]
    assert main(["simulate", QUICKSTART, "--steps", "3", "--out", str(out), *sweeps]) == 0
    rows = (out / "sweep.csv").read_text().splitlines()
    assert len(rows) == 7 and rows[0].startswith("learner.trigger.n_min,simulate.actors,samples/s")
    assert [row.split(",")[:2] for row in rows[1:3]] == [["8", "1"], ["8", "2"]]
    assert (out / "sweep.md").read_text() in capsys.readouterr().out


def test_a_generated_trace_simulates_and_is_equal_for_equal_seeds(tmp_path: Path) -> None:
    first, second = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for path in (first, second):
        assert main(["simulate", "--generate", str(path), "--prompts", "40", "--group-size", "4", "--seed", "3",
                     "--median", "20", "--limit", "60", "--arrivals", "50"]) == 0
    assert first.read_bytes() == second.read_bytes()
    tasks = trace.read(first)
    assert len(tasks) == 40 and all(len(task.lengths) == 4 and max(task.lengths) <= 60 for task in tasks)
    assert main(["simulate", QUICKSTART, "--trace", str(first), "--set", "groups.size=4"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--actors", "0"], "--actors 0: must be 1 to"),
        (["--actors", "-3"], "--actors -3: must be 1 to"),
        (["--steps", "0"], "--steps 0: must be >= 1"),
        (["--seed", "-1"], "--seed -1: must be >= 0"),
        (["--sweep", "learner.trigger.n_mim=1,2"], "--sweep learner.trigger.n_mim: n_mim: unknown key"),
        (["--sweep", "learner.trigger.n_min=8,lots"], '--sweep learner.trigger.n_min: learner.trigger.n_min = "lots"'),
        (["--sweep", "n_min"], "--sweep n_min: must be key=a,b,c"),
        (["--sweep", "run.seed=1,,2"], "must be key=a,b,c"),
        (["--sweep", "run.seed=1,2", "--sweep", "run.seed=3"], "given twice"),
        (["--sweep", "simulate.actors=1,2", "--actors", "4"], "contradict each other"),
        (["--fit", "/nowhere"], "/nowhere: not a run directory"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--set", "simulate.step_s=0", "--set", "simulate.row_s=0"], "a decoding step must take some time"),
        (["--set", "simulate.step_s=-1"], "simulate.step_s"),
        (["--generate", "x"], "TOPOLOGY belongs to a simulation"),
        (["--median", "9"], "--median belongs to --generate"),
        (["--group-size", "8"], "--group-size belongs to --generate"),
    ],
)
def test_what_can_not_be_simulated_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", QUICKSTART, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/trace.jsonl"], "cannot be written"),
        (["x", "--prompts", "0"], "--prompts 0: must be >= 1"),
        (["x", "--median", "900", "--limit", "100"], "--median 900: must be 1 to --limit"),
        (["x", "--seed", "-4"], "--seed -4: must be >= 0"),
        (["x", "--trace", "y"], "--trace belongs to a simulation"),
        (["x", "--actors", "0"], "--actors belongs to a simulation"),
        ([__file__], "exists already"),
    ],
)
def test_what_can_not_be_generated_is_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "--generate", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_trace_with_a_negative_length_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "lengths": [3, 4]}\n{"prompt": "b", "lengths": [3, -4]}\n')
    assert main(["simulate", QUICKSTART, "--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}:2" in error and "-4" in error


def test_a_topology_without_a_file_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "give a topology file" in capsys.readouterr().err


def test_a_controller_that_would_act_is_refused_before_anything_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "weights.max_staleness=5", "--sweep", "learner.controller.mode=off,act"]
    assert main(["simulate", str(QUICKSTART), "--steps", "2", *options]) == 2
    out, err = capsys.readouterr()
    assert "a simulation trains none" in err and "learner.controller.mode=off" in err and "samples/s" not in out


def test_prompts_left_out_by_pass_rate_are_refused_naming_the_keys(
    capsys: pytest.CaptureFixture[str]
) -> None:
    off = ["--set", "data.skip.max_pass_rate=0"]
    assert main(["simulate", str(QUICKSTART), "--steps", "2", "--set", "learner.recipe=scalerl"]) == 2
    assert " ".join(off) in capsys.readouterr().err
    assert main(["simulate", str(QUICKSTART), "--steps", "2", "--set", "learner.recipe=scalerl", *off]) == 0


def test_a_fit_file_beside_a_topology_serves_only_its_model_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology, beside = tmp_path / "my.toml", tmp_path / "my.fit.jsonl"
    topology.write_text(Path(QUICKSTART).read_text())
    assert main(["simulate", str(topology), "--steps", "2"]) == 0
    assert capsys.readouterr().out.startswith("ASSUMED")
    beside.write_text(Path(QUICKSTART).with_suffix(".fit.jsonl").read_text())
    assert main(["simulate", str(topology), "--steps", "2"]) == 0
    assert "200 groups of it, by step" in capsys.readouterr().out
    beside.write_text(beside.read_text().replace('"model":"tiny:sort"', '"model":"another"', 1))
    assert main(["simulate", str(topology), "--steps", "2"]) == 0
    assert capsys.readouterr().out.startswith("ASSUMED")
    beside.write_text('{"source": "mine", "model": "tiny:sort", "data": "tiny:sort", "times": {}}\n[0, "12=", 5]\n')
    assert main(["simulate", str(topology), "--steps", "2"]) == 2
    assert f"{beside}: damaged" in capsys.readouterr().err
