"""Every number that a step tells is the one that the log and the weights give, recomputed by a program of its own."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from busrl.topology.learner import Value

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
REFERENCE: dict[str, Any] = {"its": "own"}
PADDED: dict[str, Any] = {"more": "rows"}

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "ppo_clip": {
        "learner": {"weight_decay": 0.3, "warmup_groups": 6, "decay": "linear", "decay_to": 0.1, "max_grad_norm": 0.05},
    },
    "decoupled in two mini-batches": {
        "trigger": {"n_min": 7},
        "learner": {"loss": "decoupled", "updates_per_batch": 2, "tis_cap": 1.2, "decay": "cosine",
                    "decay_groups": 9, "betas": (0.8, 0.9), "max_grad_norm": 0.5},
        "segments": {"length": 4, "global_max_length": 12},
    },
    "ppo_clip in three mini-batches": {
        "learner": {"updates_per_batch": 3, "advantage": "group_mean", "clip_low": 0.4, "clip_high": 0.1,
                    "dual_clip": 1.5, "eps": 1e-4, "max_grad_norm": 100.0},
    },
    "the last segment": {"segments": {"length": 4, "loss": "last_segment", "global_max_length": 12},
                         "weights": {"mode": "sync"}},
    "pois": {"segments": {"length": 4, "loss": "pois", "global_max_length": 12}, "weights": {"mode": "sync"}},
    "tokens that are too old": {"weights": {"max_staleness": 1}, "segments": {"length": 4, "global_max_length": 12}},
    "an adapter": {"lora": {"rank": 3, "alpha": 9}, "learner": {"checkpoint_every": 1, "keep_last": 9}},
    "an adapter from its first step on, with its base as the reference": {
        "lora": {"rank": 3, "alpha": 9}, "learner": {"kl": "k2", "kl_coef": 2.0, "lr": 1e-2, "updates_per_batch": 2},
    },
    "k3 and an entropy bonus in the loss": {"learner": {"kl": "k3", "kl_coef": 0.3, "entropy_coef": 0.1}},
    "k3_is in the loss, to the weights before the step": {
        "learner": {"kl": "k3_is", "kl_coef": 0.3, "ratio": "proximal", "updates_per_batch": 2, "lr": 1e-3},
    },
    "another reference, in the reward": {
        "model": REFERENCE, "learner": {"kl": "k1", "kl_coef": 0.2, "kl_in": "reward"}},
    "token_tis": {"learner": {"loss": "reinforce", "correction": "token_tis", "correction_high": 1.2}},
    "seq_tis": {"learner": {"loss": "reinforce", "correction": "seq_tis"}},
    "icepop in two mini-batches": {
        "learner": {"ratio": "proximal", "correction": "icepop", "updates_per_batch": 2, "lr": 1e-3}},
    "seq_mis": {
        "learner": {"loss": "reinforce", "correction": "seq_mis", "correction_low": 0.2, "correction_high": 5.0}},
    "geo_rs": {"learner": {"loss": "reinforce", "correction": "geo_rs", "correction_low": 0.8, "correction_high": 1.1}},
    "k3_rs": {"learner": {"loss": "reinforce", "correction": "k3_rs", "correction_high": 0.3}},
    "a value head": {"learner": {"advantage": "gae", "value": Value(decay=0.9, decay_of_values=0.95, gamma=0.99)}},
    "a value head, two mini-batches, a KL in the reward and checkpoints": {
        "reward": {"truncated": "mask"}, "learner": {
            "advantage": "gae", "value": Value(whiten=False, decay=0.9, coef=1.0, clip=0.05, rate=100.0),
            "updates_per_batch": 2, "kl": "k2", "kl_coef": 0.3, "kl_in": "reward", "checkpoint_every": 1}},
    "a mean of earlier groups": {"learner": {"advantage": "ema", "kl": "k1", "kl_coef": 0.2, "kl_in": "reward"}},
    "checkpoints in shards": {"learner": {"checkpoint_mode": "async", "checkpoint_every": 1, "weight_decay": 0.2}},
    "cut answers are masked": {"reward": {"truncated": "mask"}},
    "rows that no token has": {"model": PADDED, "learner": {"kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.1}},
}
MANY_TURNS: dict[str, dict[str, dict[str, Any]]] = {
    "credit by episode, cut ones masked": {"reward": {"truncated": "mask"}},
    "credit by turn, a KL in the reward": {
        "model": REFERENCE, "learner": {"credit": "turn", "kl": "k3", "kl_coef": 0.2, "kl_in": "reward"}},
    "credit by turn and by keys": {"learner": {"credit": "turn", "gamma": 0.9}},
    "tokens that are too old, a correction of whole episodes": {
        "weights": {"max_staleness": 1},
        "learner": {"loss": "reinforce", "correction": "seq_tis", "checkpoint_every": 1}},
    "a value head, cut ones masked": {
        "reward": {"truncated": "mask"}, "learner": {"advantage": "gae", "value": Value(decay=0.9), "kl": "k3",
                                                     "kl_coef": 0.1, "kl_in": "reward"}},
}


def told(lines: Sequence[str]) -> list[str]:
    """Without what the made-up ages of samples break on purpose."""
    return [text for text in lines if "max_staleness" not in text]


@pytest.fixture
def filled(folder: Path, reference: Path, padded: Path) -> Callable[[dict[str, dict[str, Any]]], dict[str, Any]]:
    """The tables with the folders of models in their places."""
    models = {"its": {"path": str(folder), "reference": str(reference)}, "more": {"path": str(padded)}}

    def fill(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {name: models[next(iter(table))] if name == "model" else table for name, table in tables.items()}

    return fill


@pytest.mark.parametrize("name", SETTINGS)
def test_the_numbers_of_a_step_are_those_that_log_and_weights_give(
    name: str, make_run: Callable[..., Any], wrong: Any, filled: Any
) -> None:
    if name.startswith("an adapter"):
        pytest.importorskip("peft")
    run = make_run(3, **filled(SETTINGS[name]))
    problems = wrong(run.paths.root)
    assert (told(problems) if name.startswith("tokens") else list(problems)) == []


@pytest.mark.parametrize("name", MANY_TURNS)
def test_a_step_of_episodes_has_the_numbers_of_log_and_weights(
    name: str, make_run: Callable[..., Any], wrong: Any, filled: Any
) -> None:
    run = make_run(3, episodes=True, keys="keys" in name, **filled(MANY_TURNS[name]))
    assert told(wrong(run.paths.root)) == []
    masked = [json.loads(line)["masked"] for line in run.paths.metrics.read_text().splitlines()]
    assert any("untrained" in line for line in masked)
    assert ("cut ones masked" in name) == any("cut" in line for line in masked)


def test_a_learner_that_starts_again_goes_on_with_the_very_numbers(make_run: Callable[..., Any], wrong: Any) -> None:
    """Once from a checkpoint, once by the log: optimiser, groups and versions are where they were."""
    settings = {"learner": {"warmup_groups": 30, "weight_decay": 0.1, "loss": "decoupled", "updates_per_batch": 2}}
    run = make_run(2, **settings)
    run.start()
    run.steps(2)
    run.stop(checkpoint=False)
    run.start()
    run.steps(1)
    run.stop()
    assert wrong(run.paths.root) == []


@pytest.mark.parametrize("seats", [(), ("first", "second")])
def test_the_mean_of_earlier_groups_goes_on_from_checkpoint_and_log(
    seats: tuple[str, ...], make_run: Callable[..., Any], wrong: Any
) -> None:
    """A step from a checkpoint, one from the log, and a micro-batch of a step that was never made."""
    run = make_run(2, learner={"advantage": "ema"}, model={"seats": seats})
    run.start()
    run.steps(1)
    run.training.accumulate(run.group(4, 0).records, run.history.step)
    run.checkpoint()
    run.stop(checkpoint=False)
    run.start()
    assert len(run.training.advantages.earlier.state()) == max(1, len(seats))
    run.steps(1)
    run.stop(checkpoint=False)
    run.start()
    run.steps(1)
    run.stop()
    assert wrong(run.paths.root) == []


def test_the_line_of_a_replayed_step_has_the_ages_of_its_groups(make_run: Callable[..., Any], wrong: Any) -> None:
    run = make_run(3, learner={"checkpoint_every": 0})
    run.start()
    run.steps(2)
    run.stop(checkpoint=False)
    path = run.paths.metrics
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # it died before it wrote this one
    run.start()
    run.stop(checkpoint=False)
    row = json.loads(path.read_text().splitlines()[-1])
    assert row["replayed"] and row["step"] == 5 and row["age_max"] >= 1 and len(row["age_by_length"]) == 4
    assert wrong(run.paths.root) == []


def counted(run: Any, step: int) -> tuple[int, int, float]:
    """Groups and samples that a step's line counts, and its headline reward."""
    rows = map(json.loads, run.paths.metrics.read_text().splitlines())
    (row,) = (row for row in rows if row["step"] == step)
    return row["groups_ended"], row["samples_ended"], row["reward"]


DIED = ("before the step", "in the middle of the drop", "before it dropped any", "after the log")


@pytest.mark.parametrize("died", DIED)
def test_groups_that_a_dead_learner_set_aside_are_counted_once(
    died: str, make_run: Callable[..., Any], wrong: Any
) -> None:
    """Four groups of rewards 0 to 2, and two flat ones of rewards of 2; one of these was set aside in another life."""
    run = make_run(2, stop=False)
    before = len(run.fates)
    run.flat_group(3, 16)
    if died == "before it dropped any":
        del run.fates[before:]
    run.start()  # nobody closed anything
    if died in ("in the middle of the drop", "before it dropped any"):
        run.flat_group(3, 16)
    run.step()
    if died == "after the log":
        rows = run.paths.metrics.read_text().splitlines(keepends=True)
        lines = (run.paths.root / "groups.jsonl").read_text().splitlines(keepends=True)
        run.paths.metrics.write_text("".join(rows[:-1]))
        (run.paths.root / "groups.jsonl").write_text("".join(lines[:-1]))
        run.start()
    run.stop(checkpoint=False)
    from oracle.check import check

    groups, samples, reward = counted(run, 3)
    assert (groups, samples) == (6, 24)
    log = next(step for step in check_log(run) if step.step == 3)
    assert reward == pytest.approx((sum(sample.reward for sample in log.samples) + 16.0) / 24)
    assert wrong(run.paths.root) == [] and check(run.paths.root).left_out == []


def check_log(run: Any) -> Any:
    from oracle.files import read_log

    return read_log(run.paths.wal)


def test_groups_that_an_earlier_life_counted_are_not_counted_again(
    make_run: Callable[..., Any], wrong: Any
) -> None:
    run = make_run(2, stop=False)
    for _ in range(3):
        run.start()
    run.step()
    run.stop(checkpoint=False)
    assert counted(run, 3)[:2] == (5, 20) and wrong(run.paths.root) == []


def test_a_run_directory_of_an_older_busrl_is_read_still(make_run: Callable[..., Any], wrong: Any) -> None:
    """Its groups.jsonl has one line per step; what a learner had set aside died with it."""
    run = make_run(3, derived={"W": 1})
    path, rows = run.paths.root / "groups.jsonl", []
    for line in map(json.loads, path.read_text().splitlines()):
        if line["fates"] == "f":
            rows.append(line)
        else:
            names = ("draws", "fates", "born", "lengths", "rewards")
            rows[-1] = {"step": line["step"], **{name: rows[-1][name] + line[name] for name in names}}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert wrong(run.paths.root) == []
    run.start()
    assert run.metrics.ended.groups == 0
    run.stop(checkpoint=False)
    for name in ("draws", "fates", "rewards", "lengths"):
        rows[0][name] = rows[0][name][1:]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.paths.root / "summary.json").write_text('{"processes": {"learner": {"restarts": 1}}}')
    run.paths.metrics.write_text("".join(run.paths.metrics.read_text().splitlines(keepends=True)[1:]))
    from oracle.check import check

    assert any("[4]: set aside by a learner that died" in text for text in check(run.paths.root).left_out)


@pytest.mark.parametrize("name", ["kl", "dropped", "value_loss", "explained_variance"])
def test_a_false_number_of_a_term_is_found(name: str, make_run: Callable[..., Any], wrong: Any) -> None:
    keys: dict[str, Any] = {"loss": "reinforce", "correction": "token_tis"} if name == "dropped" else {
        "advantage": "gae", "kl": "k3", "kl_coef": 0.1}
    run = make_run(2, learner=keys)
    path = run.paths.metrics
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[-1][name] += 2e-5
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [text.split(":")[0] for text in wrong(run.paths.root)] == [name]


def test_steps_of_other_weights_are_left_out_by_number(make_run: Callable[..., Any]) -> None:
    from oracle.check import check

    run = make_run(2)
    path = run.paths.root / "topology.json"
    topology = json.loads(path.read_text())
    topology["learner"]["start_from"] = "/elsewhere/global_step_9"
    path.write_text(json.dumps(topology))
    report = check(run.paths.root)
    assert report.left_out == [f"step {step}: nobody kept the weights before it" for step in (1, 2)]
    assert report.wrong == [] and not report.done["loss"]


FALSE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "reward": ("metrics.jsonl", lambda row: row | {"reward": row["reward_trained"]}),
    "grad_norm": ("metrics.jsonl", lambda row: row | {"grad_norm": row["grad_norm"] * 1.0001}),
    "loss": ("metrics.jsonl", lambda row: row | {"loss": row["loss"] + 2e-5}),
    "lr": ("metrics.jsonl", lambda row: row | {"lr": row["lr"] + 2e-5}),
    "mismatch": ("metrics.jsonl", lambda row: row | {"mismatch": None}),
    "age_max": ("metrics.jsonl", lambda row: row | {"age_max": row["age_max"] + 1}),
    "tokens": ("metrics.jsonl", lambda row: row | {"tokens": row["tokens"] - 1}),
    "k3": ("metrics.jsonl", lambda row: {name: value for name, value in row.items() if name != "k3"}),
    "ended": ("groups.jsonl", lambda row: row | {"rewards": [[1.0, 2.0, 2.0, 2.0], *row["rewards"][1:]]}),
    "fates": ("groups.jsonl", lambda row: row | {"rewards": [[2.0] * 3, *row["rewards"][1:]]}),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_number_that_was_changed_by_hand_is_found(name: str, make_run: Callable[..., Any], wrong: Any) -> None:
    run = make_run(2, weights={"max_staleness": 2})
    file, change = FALSE[name]
    path = run.paths.root / file
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[-1] = change(rows[-1])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert any(text.startswith(f"{name}:") for text in wrong(run.paths.root))


def test_a_flat_group_that_no_step_counted_is_found(make_run: Callable[..., Any], wrong: Any) -> None:
    run = make_run(4, derived={"W": 1})
    path = run.paths.root / "groups.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["fates"] == "f"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert any(text.startswith("fates: groups [4] are flat") for text in wrong(run.paths.root))


def test_the_program_says_so_with_its_exit_code(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(1)
    monkeypatch.setattr(sys, "argv", ["oracle", str(run.paths.root)])
    path = run.paths.root / "metrics.jsonl"
    for code, line in ((0, "all numbers are right"), (1, "1 wrong")):
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "tools" / "oracle"), run_name="__main__")
        assert (ended.value.code, capsys.readouterr().out.splitlines()[-1]) == (code, line)
        path.write_text(path.read_text().replace('"ess":0.', '"ess":0.1'))


def test_the_oracle_shares_no_code_with_the_run() -> None:
    for path in (ROOT / "tools" / "oracle").glob("*.py"):
        assert "import busrl" not in path.read_text() and "from busrl" not in path.read_text(), path


@pytest.mark.parametrize(("key", "value"), [("loss", "gspo"), ("newest_ratio", "one"), ("unit", "turn")])
def test_an_algorithm_that_is_not_recomputed_is_refused_by_name(key: str, value: str) -> None:
    from oracle.check import _only_what_is_known

    topology = {"learner": {"loss": "ppo_clip", "advantage": "group_std", key: value}}
    with pytest.raises(ValueError, match=f"learner.{key} = '{value}'"):
        _only_what_is_known(topology)
    _only_what_is_known({"learner": {"loss": "decoupled", "advantage": "group_mean"}})
