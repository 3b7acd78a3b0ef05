"""What somebody who comes from another trainer writes first: one message each, with what to write instead."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from busrl.algorithms import catalog
from busrl.cli import main
from busrl.errors import UserError
from busrl.launcher import pythons
from busrl.preflight import changeable
from busrl.system import device
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]

# -- algorithms by name --------------------------------------


@pytest.mark.parametrize(("key", "name", "remedy"), [
    ("loss", "grpo", 'recipe = "grpo" sets loss = "ppo_clip", advantage = "group_std"'),
    ("loss", "ppo", 'recipe = "ppo" sets loss = "ppo_clip", advantage = "gae"'), ("loss", "dapo", 'recipe = "dapo"'),
    ("loss", "Dr.GRPO", 'recipe = "dr_grpo"'), ("loss", "rloo", 'recipe = "rloo"'),
    ("loss", "gae", 'advantage = "gae"'), ("loss", "PPO-Clip", 'did you mean "ppo_clip"?'),
    ("advantage", "grpo", 'recipe = "grpo"'),
    ("advantage", "reinforce++", 'recipe = "reinforce_pp"'), ("advantage", "ppo_clip", 'loss = "ppo_clip"'),
    ("recipe", "reinforce", 'loss = "reinforce"'), ("recipe", "GRPO", 'did you mean "grpo"?'),
])
def test_an_algorithm_by_its_name_says_where_it_is_set(refused: Refused, key: str, name: str, remedy: str) -> None:
    (problem,) = refused("", f"learner.{key}={name}")
    assert remedy in problem and f'learner.{key} = "{name}"' in problem, problem


@pytest.mark.parametrize(("key", "names"), [
    ("loss", catalog.LOSS_FACTS), ("advantage", catalog.ADVANTAGE_FACTS), ("recipe", catalog.RECIPES),
    ("aggregation", catalog.AGGREGATIONS), ("correction", catalog.CORRECTIONS), ("kl", catalog.KL_TERMS),
])
def test_no_other_algorithm_is_suggested_for_a_slip(refused: Refused, key: str, names: Any) -> None:
    for name in filter(None, names):
        for slip in (f"{name}x", f"{name[:-1]}", f"q{name[1:]}"):
            if slip and slip not in names and slip not in catalog.RECIPES:
                (problem,) = refused("", f"learner.{key}={slip}")
                assert "did you mean" not in problem, problem


# -- names of the hub ----------------------------------------


@pytest.mark.parametrize("name", [
    "openai/gsm8k", "hf://datasets/openai/gsm8k", "https://huggingface.co/datasets/openai/gsm8k",
])
def test_a_data_set_of_the_hub_is_told_how_it_is_fetched(refused: Refused, name: str) -> None:
    fetch = "`hf download openai/gsm8k --repo-type dataset --local-dir gsm8k`"
    validation = f'train = "train.jsonl"\n[validation]\ndata = "{name}"'
    texts = (f'train = "{name}"', f'[[data.source]]\npath = "{name}"', validation)
    for text in texts:
        (problem,) = refused(f"\n[data]\n{text}\n", base='[model]\npath = "model"\n')
        assert fetch in problem and "no such file" in problem.lower(), problem


@pytest.mark.parametrize("name", ["data/train.jsonl", "train.jsonl.gz", "gone.parquet", "../gone", "model/gone"])
def test_a_path_is_not_taken_for_a_name_of_the_hub(refused: Refused, name: str) -> None:
    problems = refused(f'\n[data]\ntrain = "{name}"\n', base='[model]\npath = "model"\n')
    assert problems and "hf download" not in "".join(problems)


def test_a_model_of_the_hub_is_one_problem_with_the_command(refused: Refused) -> None:
    text = '[model]\npath = "Qwen/Qwen2.5-0.5B"\n[data]\ntrain = "train.jsonl"\ntemplate = "chat"\n'
    (problem,) = refused("", "lora.rank=8", 'lora.targets=["nothing"]', base=text)
    assert "`hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B`" in problem and "no such folder" in problem


# -- keys of the data ----------------------------------------


def test_a_misspelt_prompt_key_is_one_problem_with_known_keys(refused: Refused, here: Path) -> None:
    rows = [{"question": f"{n}", "answer": n} for n in range(340)]
    (here / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (problem,) = refused("", "data.prompt_key=questoin")
    assert problem.startswith("--set data.prompt_key: data.prompt_key = \"questoin\": the key 'questoin' is missing in")
    assert problem.endswith('they have answer, question; did you mean "question"?')
    (problem,) = refused()  # where nothing was written, the file is named
    assert problem.startswith("t.toml:4: ") and "data.prompt_key = \"prompt\"" in problem


def test_a_misspelt_answer_key_is_one_problem_too(refused: Refused) -> None:
    (problem,) = refused("", "reward.answer_key=solution")
    assert "the key 'solution' is missing in all 40 lines" in problem and "answer, prompt" in problem


def test_a_misspelt_column_of_a_source_is_one_problem(refused: Refused) -> None:
    text = '[model]\npath = "model"\n[[data.source]]\npath = "train.jsonl"\nprompt_key = "promt"\n'
    (problem,) = refused("", base=text)
    assert problem == "train.jsonl:1: no column 'promt'; the columns are answer, prompt; did you mean 'prompt'?"


def test_a_key_that_some_lines_lack_is_told_by_line(refused: Refused, here: Path) -> None:
    with (here / "train.jsonl").open("a") as file:
        file.write('{"text": "a"}\n')
    (problem,) = refused()
    assert problem.startswith("train.jsonl:41: ") and "the key 'prompt' is missing" in problem


# -- rewards of other trainers -------------------------------

FOREIGN = """\
def trl(prompts, completions, **kwargs):
    return [float(text == answer) for text, answer in zip(completions, kwargs["answer"])]

def columns(completions, answer, completion_ids, **kwargs):
    return [float(text == right and len(ids) == 1) for text, right, ids in zip(completions, answer, completion_ids)]

def bare(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer)]

async def late(prompts, completions, **kwargs):
    return [float(text == answer) for text, answer in zip(completions, kwargs["answer"])]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def reward_func(queries, prompts, labels):
    return [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels)]

def own(record, completion, token_ids, **more):
    return float(completion == record["answer"])
"""


@pytest.mark.parametrize(("name", "whose"), [
    ("trl", "TRL"), ("columns", "TRL"), ("bare", "TRL"), ("late", "TRL"), ("compute_score", "verl"),
    ("reward_func", "OpenRLHF"),
])
def test_a_reward_of_another_trainer_gets_the_line_that_adapts_it(
    refused: Refused, loaded: Loaded, here: Path, name: str, whose: str
) -> None:
    (here / "theirs.py").write_text(FOREIGN)
    (problem,) = refused(f'[reward]\nfunction = "theirs.py:{name}"\n')
    assert f"it takes what {whose} gives a reward" in problem and "importable" not in problem, problem
    line = re.findall(r"`(.*)`", problem)[0]
    (here / "mine.py").write_text(f"{FOREIGN}\n{line}\n")
    names: dict[str, Any] = {}
    exec((here / "mine.py").read_text(), names)
    for completion, worth in (("7", 1.0), ("8", 0.0)):
        value = names["score"]({"prompt": "3+4=", "answer": "7"}, completion, [5])
        assert (asyncio.run(value) if name == "late" else value) == worth
    loaded('[reward]\nfunction = "mine.py:score"\n')


def test_a_reward_of_ones_own_may_take_more(loaded: Loaded, here: Path) -> None:
    (here / "theirs.py").write_text(FOREIGN)
    loaded('[reward]\nfunction = "theirs.py:own"\n')


# -- a key of a running run ----------------------------------


@pytest.mark.parametrize(("key", "meant"), [
    ("lr", "learner.lr"), ("n_min", "learner.trigger.n_min"),
    ("temperature", "generation.temperature"),
])
def test_a_key_without_its_section_is_told_which_was_meant(loaded: Loaded, key: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        changeable.changed(loaded(), key, "5e-4")
    assert str(caught.value).endswith(f"and {key} has no section; did you mean {meant}?")
    assert "--set" not in str(caught.value)


# -- devices and packages ------------------------------------


@pytest.mark.parametrize("key", ["model.device", "process.learner.device", "process.rollout.device"])
def test_a_device_that_is_not_here_ends_check(
    here: Path, loaded: Loaded, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    if not device.missing("cuda"):
        pytest.skip("this machine has one")
    loaded()  # writes the file
    assert main(["check", str(here / "t.toml"), "--set", "learner.lr=1e-4", "--set", f"{key}=cuda"]) == 2
    printed = capsys.readouterr().err
    assert 'device = "cuda": ' in printed and device.missing("cuda") in printed and '"auto"' in printed


def test_a_device_of_another_host_is_not_looked_for(loaded: Loaded) -> None:
    topology = loaded("", "process.rollout.device=cuda")
    away = (replace(entry, hosts=("far",)) if entry.role == "rollout" else entry for entry in topology.process)
    pythons.require_devices(replace(topology, process=tuple(away)))


def test_vllm_without_the_package_says_how_to_get_it(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrl.engines.vllm_versions.vllm_installed", lambda: ("", ""))
    (problem,) = refused("", "process.rollout.engine=vllm")
    assert "this Python has no vLLM" in problem
    assert "pip install 'busrl[vllm]'" in problem and 'engine = "torch"' in problem
