"""What a wrong key costs its author: one message with place, value, rule and remedy, all of them at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from topologies import BASE

from busrl.errors import TopologyError
from busrl.preflight.load import load
from busrl.topology import Topology, foreign_names
from busrl.topology.declare import items, tables
from busrl.topology.reader import SECTIONS

Refused = Callable[..., list[str]]
Loaded = Callable[..., Topology]

LINES = 10  # of BASE that the cases are appended to

CASES = [
    ("[run]\nmax_steps = true", "run.max_steps = true: expected a whole number >= 1; the default is 200", 2),
    ('[run]\nseed = "7"', 'run.seed = "7": expected a whole number >= 0 and <= 2147483647; the default is 0', 2),
    ("[run]\nseed = 1.0", "run.seed = 1.0: expected a whole number", 2),
    ("[validation]\nat_start = 1", "validation.at_start = 1: expected true or false; the default is true", 2),
    ("[groups]\nsize = 0", "groups.size = 0: expected a whole number >= 1", 2),
    ("[groups]\nsize = 1", 'groups.size = 1, learner.advantage = "group_std": a single answer has none', 2),
    (
        '[learner]\nlr = "fast"',
        'learner.lr = "fast": expected a number > 0 and <= 10; lr is: learning rate for n_min groups',
        2,
    ),
    ("[learner]\nlr = nan", "learner.lr = NaN: expected a number > 0", 2),
    ("[learner]\nlr = inf", "learner.lr = inf: expected a number > 0", 2),
    ("[learner]\nbetas = [0.9]", "learner.betas = [0.9]: expected a list of two numbers", 2),
    ("[learner]\n\nlrr = 1", "lrr: unknown key in [learner]; did you mean lr?", 3),
    ("[learner]\nmax_staleness = 1", "max_staleness: unknown key in [learner]; it belongs to [weights]", 2),
    ('[learner]\nloss = "ppoclip"', '"topk_kl", or a function as package.module:name or file.py:name; did you mean '
     '"ppo_clip"?', 2),
    ('[scheduler]\npolicy = "x"', 'scheduler.policy = "x": expected one of "fifo", "sjf", "ljf", "adaptive"', 2),
    ("[scheduler]\ntail_share = 0.95", "scheduler.tail_share = 0.95: expected a number >= 0 and <= 0.9", 2),
    ("[lerner]\nlr = 1", "lerner: unknown section; did you mean learner?", 1),
    ("[learner.triger]\nn_min = 1", "triger: unknown key in [learner]; did you mean trigger?", 1),
    ('[ring]\nslots = "aut"', 'ring.slots = "aut": expected a whole number >= 1 and <= 1048576 or "auto"', 2),
    ("[learner]\ntrigger = 3", "learner.trigger = 3: is a table, not a value; write [learner.trigger]", 2),
    ("[[process]]\nrole = 'rollot'", 'process.3.role = "rollot": expected one of "learner"', 2),
    ("[[process]]\nrole = 'reward'\ncommand = 'node x'", "expected a list of strings; for example [\"node x\"]", 3),
    ("[[process]]\nrole = 'rollout'\ndevice = 'gpu'", 'did you mean "cuda"?', 3),
    ("[[process]]\nrole = 'reward'\nenv = { A = 1 }", "expected a table of strings; for example", 3),
    ("[[process]]\ncount = 2", "process.3.role is missing; add role = ... to [[process]]: what the process does", 1),
]


@pytest.mark.parametrize(("text", "message", "line"), CASES, ids=[case[1][:40] for case in CASES])
def test_a_wrong_key_has_its_line_rule_and_remedy(
    refused: Refused, text: str, message: str, line: int
) -> None:
    (problem,) = refused(text)
    assert problem.startswith(f"t.toml:{LINES + line}: ")
    assert message in problem


def test_all_problems_of_a_file_come_together_in_its_order(refused: Refused) -> None:
    problems = refused("[run]\nseed = -1\nmax_steps = 0\n[ring]\nslotz = 3\n", "learner.lr=abc")
    places = [message.split(": ")[0] for message in problems]
    assert places == [f"t.toml:{LINES + 2}", f"t.toml:{LINES + 3}", f"t.toml:{LINES + 5}", "--set learner.lr"]


def test_a_text_that_is_no_toml_is_refused_with_its_line(refused: Refused) -> None:
    (problem,) = refused("[run]\nname = quickstart\n")
    assert problem.startswith(f"t.toml:{LINES + 2}: name = quickstart: not TOML: ")


def test_a_key_that_stands_twice_is_refused_with_its_line(refused: Refused) -> None:
    (problem,) = refused("[run]\nseed = 1\nseed = 2\n")
    twice = f"seed appears twice, first on line {LINES + 2}; remove one"
    assert problem.startswith(f"t.toml:{LINES + 3}: seed = 2: {twice}")


@pytest.mark.parametrize(("text", "expected"), [
    ("[run]\nseed = 1\n[learner]\n[run] # again", f"4: [run] # again: [run] appears twice, first on line {LINES + 1};"),
    ("[process]\nrole = 'rollout'\n", "1: [process]: processes are an array of tables, and [process] is one table; "
                                        "write [[process]] every time"),
    ("[run]\nname = \u201cmine\u201d",
     "2: name = \u201cmine\u201d: not TOML: \u201c is a typographic quote; write a straight one"),
])
def test_slips_of_toml_are_told_in_words(refused: Refused, text: str, expected: str) -> None:
    (problem,) = refused(text)
    line, _, rest = expected.partition(":")
    assert problem.startswith(f"t.toml:{LINES + int(line)}:{rest}")


def test_two_tables_of_processes_with_single_brackets_are_told_in_words(refused: Refused) -> None:
    base = "[model]\npath = 'model'\n[data]\ntrain = 'train.jsonl'\n[process]\nrole = 'rollout'\n[process]\ncount = 2\n"
    (problem,) = refused(base=base)
    assert problem.startswith("t.toml:7: [process]: processes are an array of tables")
    once = base.partition("[process]\ncount")[0]
    (problem,) = refused(base=once)
    assert "processes are an array of tables; write [[process]], twice bracketed" in problem


def test_a_number_of_processes_without_a_model_is_no_crash(refused: Refused) -> None:
    base = "[data]\ntrain = 'train.jsonl'\n[[process]]\nrole = 'rollout'\n"
    problems = refused("", "process.rollout.count=2", base=base)
    assert any("model.path is missing" in problem for problem in problems), problems


@pytest.mark.parametrize(("key", "expected"), [
    ("learner.learning_rate", "unknown key in [learner]; did you mean learner.lr?"),
    ("learner.target_kl", "unknown key in [learner]; did you mean learner.kl_coef"),
    ("learner.beta", "unknown key in [learner]; did you mean learner.kl_coef"),
    ("learner.batch_size", "did you mean learner.trigger.n_min?"),
    ("learner.temperature", "it belongs to [generation] or [validation]"),
    ("run.epochs", "did you mean run.max_steps?"),
    ("run.gpus", 'give a [[process]] entry devices = ["0"]'),
    ("generation.stop", "there is none yet: an answer ends with an end token"),
    ("generation.max_length", "did you mean generation.max_new_tokens?"),
    ("groups.num_generations", "did you mean groups.size?"),
    ("grpo.size", "unknown section; did you mean learner.advantage?"),
    ("actor_rollout_ref.model.path", "unknown section; tables are [model]"),
])
def test_names_of_other_trainers_are_told_what_they_are_called_here(refused: Refused, key: str, expected: str) -> None:
    (problem,) = refused("", f"{key}=1")
    assert expected in problem


def test_a_key_outside_of_any_table_is_told_where_it_belongs(refused: Refused) -> None:
    (problem,) = refused(base="learning_rate = 1e-6\n" + BASE)
    assert problem.startswith("t.toml:1: learning_rate: a key outside of any table; did you mean learner.lr?")
    (problem,) = refused(base="max_steps = 7\n" + BASE)
    assert problem.startswith("t.toml:1: max_steps: a key outside of any table; it belongs to [run]")
    (problem,) = refused("", "learning_rate=1")
    assert "an override is section.key=value; did you mean learner.lr?" in problem


def test_every_key_that_is_named_to_people_of_other_trainers_is_one() -> None:
    sections = (table for section, cls in SECTIONS.items() for table in tables(section, cls))
    declared = {f"{name}.{key}" for name, cls in sections for key in items(cls)}
    assert {key for keys in foreign_names.KEYS for key in keys.split(" and ")} <= declared


def test_a_reward_function_needs_no_kind(loaded: Loaded, refused: Refused, here: Path) -> None:
    (here / "judge.py").write_text("def score(record, completion, token_ids):\n    return 1.0\n")
    assert loaded('[reward]\nfunction = "judge.py:score"\n').reward.kind == "python"
    (problem,) = refused('[reward]\nkind = "exact_match"\nfunction = "judge.py:score"\n')
    assert "exact_match calls no function" in problem


def test_a_problem_of_the_reward_stands_beside_those_of_data(refused: Refused, here: Path) -> None:
    (here / "train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(9500)))
    (problem,) = refused('[reward]\nkind = "exact_match"\nfunction = "judge.py:score"\n')
    assert "exact_match calls no function" in problem
    (problem,) = refused('[reward]\nfunction = "judge.py:score"\n')
    assert "there is no file" in problem


def test_a_file_that_is_not_there_suggests_a_near_name(here: Path) -> None:
    (here / "sort.toml").write_text("")
    with pytest.raises(TopologyError, match=r"sot\.toml: no such file; did you mean .*/sort\.toml\?"):
        load(here / "sot.toml")


def test_required_keys_are_asked_for_by_name(refused: Refused) -> None:
    entries = (f"[[process]]\nrole = '{role}'\n" for role in ("rollout", "learner", "reward"))
    problems = refused(base="".join(entries))
    rules = [message.split(";")[0] for message in problems]
    assert rules == ["t.toml: model.path is missing", "t.toml: data.train is missing"]


def test_one_process_of_each_role_is_implied_and_an_entry_says_otherwise(loaded: Loaded) -> None:
    base = '[model]\npath = "model"\n[data]\ntrain = "train.jsonl"\n'
    common = ["bus", "keeper", "scheduler", "learner", "reward/0"]
    assert [process.name for process in loaded(base=base).processes()] == [*common, "rollout/0"]
    (rollout,) = (entry for entry in loaded(base=base).process if entry.role == "rollout")
    assert (rollout.count, rollout.engine) == (1, "torch")
    two = loaded('[[process]]\nrole = "rollout"\ncount = 2\nthreads = 3\n', base=base)
    assert [process.name for process in two.processes()] == [*common, "rollout/0", "rollout/1"]
    assert {process.spec.threads for process in two.processes() if process.role == "rollout"} == {3}
    none = loaded("", "process.rollout.count=0", base=base)
    assert [process.name for process in none.processes()] == common


def test_a_validator_follows_from_validation_prompts(loaded: Loaded) -> None:
    measured = loaded('[validation]\ndata = "tiny:sort"\n')
    assert measured.validates and [process.name for process in measured.processes()][-1] == "validator"
    assert not loaded("[validation]\nsamples = 7\n").validates
    threads = loaded('[validation]\ndata = "tiny:sort"\n[[process]]\nrole = "validator"\nthreads = 2\n')
    assert [process.spec.threads for process in threads.processes() if process.role == "validator"] == [2]


# --------------------------------------------------------------------------------------------------------- --set


def test_an_override_takes_toml_values_and_bare_words(loaded: Loaded) -> None:
    topology = loaded(
        "", "run.name=a-b", "learner.lr=1e-5", "learner.betas=[0.8, 0.9]", 'scheduler.policy="sjf"',
        "learner.trigger.n_min=16", "learner.trigger.t_max_s=inf", "validation.at_start=false", "run.name=7",
    )
    assert topology.run.name == "7"  # a string needs no quotes, even where it looks like a number
    assert topology.learner.lr == 1e-5 and topology.learner.betas == (0.8, 0.9)
    assert topology.scheduler.policy == "sjf" and topology.learner.trigger.n_min == 16
    assert math.isinf(topology.learner.trigger.t_max_s) and not topology.validation.at_start


def test_an_override_of_a_process_goes_by_its_role(loaded: Loaded) -> None:
    topology = loaded(
        "", "process.rollout.count=3", "process.validator.threads=2", "process.rollout.env.A=b",
        "validation.data=tiny:sort",
    )
    assert [p.name for p in topology.processes() if p.role in ("rollout", "validator")] == [
        "rollout/0", "rollout/1", "rollout/2", "validator",
    ]
    specs = {process.name: process.spec for process in topology.processes()}
    assert specs["rollout/1"].env == {"A": "b"} and specs["validator"].threads == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lrr=1", "--set learner.lrr: lrr: unknown key in [learner]; did you mean lr?"),
        ("lr=1", "--set lr=1: an override is section.key=value"),
        ("learner.lr", "--set learner.lr: an override is section.key=value"),
        ("process.rewrd.count=2", 'process.3.role = "rewrd": expected one of "learner"'),
        ("process.rollout=2", "--set process.rollout: names a whole process, not one of its keys"),
        ("learner.lr.x=2", "--set learner.lr.x: learner.lr = {"),
        ("groups.size=8.0", "--set groups.size: groups.size = 8.0: expected a whole number"),
    ],
)
def test_a_wrong_override_is_named_as_it_was_typed(refused: Refused, override: str, message: str) -> None:
    (problem,) = refused("", override)
    assert message in problem and problem.startswith("--set ")


def test_paths_are_relative_to_the_file_or_to_the_command(
    here: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "other").mkdir()
    (here / "other" / "p.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    monkeypatch.chdir(here / "other")
    topology = loaded("", "data.train=p.jsonl")
    assert topology.model.path == str(here / "model")
    assert topology.data.train == str(here / "other" / "p.jsonl")
