"""A run that can not learn anything ends by itself, with the cause and a remedy, and with what it did on record."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import own
import pytest
from commands import busrl
from harness import Run, read_lines, running

ZERO = "def score(record, completion, token_ids):\n    return 0.0\n"
RAISES = "def score(record, completion, token_ids):\n    return record['answer']\n"
RAISES_LATER = "def score(record, completion, token_ids):\n    return record['answer'] if completion else 0\n"
SETTINGS = ["learner.trigger.n_min=4"]


def ended_idle(tmp_path: Path, *settings: str, reward: str = own.REWARD) -> Run:
    """Launch it; it ends as a run does that had nothing to train."""
    topology = own.make_all(tmp_path / "mine", "llama", reward)
    run = Run(tmp_path / "run", *SETTINGS, *settings, config=topology, steps=1000)
    with running(run):
        assert run.wait() == 1, run.tail()
    assert run.leftovers() == [] and run.summary()["outcome"] == "failed", run.tail()
    report = run.audit()
    assert not report.errors and report.counts.lost == 0 and report.counts.trained == 0, report
    rows = read_lines(run.paths.metrics)
    assert not run.metrics() and {row["kind"] for row in rows} == {"idle"} and rows[-1]["idle_groups"] >= 32
    told = [line for line in read_lines(run.paths.errors) if line["where"] == "learner"]
    assert "The run ends after 32 (limits.idle_groups)" in told[0]["text"], told
    assert told[-1]["severity"] == "critical" and "nothing to train (limits.idle_groups = 32)" in told[-1]["text"], told
    assert run.restarts("learner") == 0
    return run


@pytest.mark.long
def test_a_reward_that_is_always_zero(tmp_path: Path) -> None:
    run = ended_idle(tmp_path, "generation.max_batch=128", reward=ZERO)
    text = run.text()
    assert "since the start: flat group; every reward was 0" in text and "was answered" in text, text
    (ending,) = [line for line in text.splitlines() if line.startswith("ending: ")]
    assert ending.startswith("ending: learner: nothing to train") and "was answered" in ending, "whole"
    assert text.count("nothing to train (limits.idle_groups = 32): look at what the reward compares") == 1, "once"
    assert "warning: " in text and "some rows stay empty" in text, "launch says what check does"
    last = read_lines(run.paths.metrics)[-1]
    assert last["reward"] == 0.0 and last["flat_share"] == 1.0
    assert read_lines(run.paths.samples)[-1]["kind"] == "idle"


SOLVED_LATER = """calls = 0


def score(record, completion, token_ids):
    global calls
    calls += 1
    return 1.0 if calls > 64 else calls / 100
"""


@pytest.mark.long
def test_a_task_solved_before_the_last_step_ends_the_run_as_finished(tmp_path: Path) -> None:
    topology = own.make_all(tmp_path / "mine", "llama", SOLVED_LATER)
    held_out = [f"validation.data={tmp_path / 'mine' / 'prompts.jsonl'}", "validation.samples=4"]
    run = Run(tmp_path / "run", *SETTINGS, *held_out, config=topology, steps=1000)
    with running(run):
        assert run.wait() == 0, run.tail()
    summary, text = run.summary(), run.text()
    assert summary["outcome"] == "finished" and 0 < summary["steps"] < 1000, summary
    assert f"after {summary['steps']} of 1000 steps all answers get the best reward seen" in summary["why"], summary
    assert "nothing is left to learn from these prompts" in text and "reward.extract" not in text, text
    assert (run.paths.checkpoints / f"global_step_{summary['steps']}").is_dir() and run.leftovers() == []
    assert read_lines(run.paths.validation)[-1]["round"] == summary["steps"], "the last round is of the last step"
    report = run.audit()
    assert not report.errors and report.counts.lost == 0, report


@pytest.mark.slow
def test_a_reward_that_raises_on_every_sample(tmp_path: Path) -> None:
    run = ended_idle(tmp_path, reward=RAISES_LATER)
    text = run.text()
    for part in (": reward raised", "KeyError: 'answer'", "correct the reward"):
        assert part in text, text


@pytest.mark.slow
def test_answers_that_are_all_cut_are_told_of_in_the_first_steps(tmp_path: Path) -> None:
    topology = own.make_all(tmp_path / "mine", "llama")
    without_end(tmp_path / "mine")
    run = Run(tmp_path / "run", *SETTINGS, "generation.max_new_tokens=4", config=topology, steps=40)
    with running(run):
        assert run.wait() == 0, run.tail()
    told = [line["text"] for line in read_lines(run.paths.errors)]
    cut = [text for text in told if "answers were cut at their limit" in text]
    assert len(cut) == 1 and "end token" in cut[0] and "generation.max_new_tokens" in cut[0], told


# ------------------------------------------------------------------------------------------ before anything starts


def started(verb: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """A verb on the topology of that folder; a minute is what a mistake may take."""
    more += ("--run-dir", str(folder / "run")) if verb == "launch" else ()
    return busrl(verb, folder / "own.toml", *more, cwd=folder, timeout_s=60)


def written(folder: Path, name: str, **keys: object) -> None:
    """Change keys of a JSON file of the model."""
    path = folder / "model" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def without_end(folder: Path) -> None:
    """The end token becomes one that the model can not make."""
    for name in ("config.json", "generation_config.json"):
        written(folder, name, eos_token_id=4711)
    written(folder, "tokenizer_config.json", eos_token=None)


CHAT = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
HANGS = "import time\n\n\ndef score(record, completion, token_ids):\n    time.sleep(3600)\n"


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own.make_all(tmp_path_factory.mktemp("wrong") / "mine", "llama").parent


@pytest.fixture
def folder(mine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mine, tmp_path / "mine"))


@pytest.mark.parametrize(("reward", "settings", "told"), [
    (RAISES, [], "fails for an empty answer to the first prompt: KeyError: 'answer'"),
    (HANGS, ["reward.timeout_s=1"], "fails for an empty answer to the first prompt: no result after 1 s"),
    (own.REWARD, ["generation.max_prompt_tokens=2"], "64 of the 64 prompts"),
    (own.REWARD, ["data.template=chat"], "no chat template"),
], ids=["reward raises", "reward hangs", "prompts too long", "chat without a template"])
@pytest.mark.parametrize("verb", ["check", "launch"])
def test_a_wrong_start_is_refused_by_name(
    folder: Path, verb: str, reward: str, settings: list[str], told: str
) -> None:
    (folder / "judge.py").write_text(reward)
    done = started(verb, folder, *(part for setting in settings for part in ("--set", setting)))
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (folder / "run").exists()


SHAPE = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 151936,
         "tie_word_embeddings": True}


def test_a_toy_learning_rate_for_half_a_billion_weights_is_warned_of(folder: Path) -> None:
    written(folder, "config.json", **SHAPE)
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [151936, 896], "data_offsets": [0, 0]}})
    weights = len(header).to_bytes(8, "little") + header.encode()  # check reads no more of them
    (folder / "model" / "model.safetensors").write_bytes(weights)
    done = started("check", folder)
    assert done.returncode == 0, done.stderr
    assert "learner.lr = 0.0003: 100 times what is usual for all weights of 494 M parameters" in done.stdout


def test_a_chat_whose_turns_end_with_no_end_token_is_warned_of(folder: Path) -> None:
    written(folder, "tokenizer_config.json", chat_template=CHAT)
    done = started("check", folder, "--set", "data.template=chat")
    assert done.returncode == 0, done.stderr
    assert "its chat template ends a turn with <pad> (id 0), and the end tokens are 1" in done.stdout
    right = CHAT.replace("<pad>", own.END)
    written(folder, "tokenizer_config.json", chat_template=right)
    assert "ends a turn with" not in started("check", folder, "--set", "data.template=chat").stdout


def test_a_model_without_an_end_token_of_its_own_is_warned_of(folder: Path) -> None:
    without_end(folder)
    done = started("check", folder)
    assert "its end tokens (4711) are none of its" in done.stdout and "so every answer is cut" in done.stdout
