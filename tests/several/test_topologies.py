"""How `[[model]]` is read: the topology of each tag, what is refused with place and remedy, and that [model] stays."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tagged import AGENT, HEAD, JUDGE, SERVED, SOLVER, Read

from busrl import capabilities
from busrl.cli import main
from busrl.errors import TopologyError, UserError
from busrl.preflight import explain
from busrl.preflight.load import load, materialise
from busrl.topology import Topology
from busrl.topology.schema import Own

ROOT = Path(__file__).resolve().parents[2]


def own_of(t: Topology, rollouts: int) -> Own:
    """The tables of a model with so many rollouts."""
    (own,) = t.models[1].own
    return dataclasses.replace(own, process=(dataclasses.replace(own.process[0], count=rollouts),))


def refused(read: Read, text: str, *overrides: str, head: str = HEAD) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        read(text, *overrides, head=head)
    return [str(problem) for problem in caught.value.problems]


def line_of(text: str, part: str, head: str = HEAD) -> int:
    return next(number for number, line in enumerate((head + text).splitlines(), 1) if part in line)


# -- what a tag's topology is -----


def test_the_first_trained_model_is_the_lead_whose_topology_is_the_runs(read: Read) -> None:
    t = read(SERVED + SOLVER + AGENT)
    assert t.tags == ("judge", "solver") and t.lead == t.tag == "solver" and t.trained_tags == ("solver",)
    assert t.of("solver") is t and t.of("") is t and not t.beside
    judge = t.of("judge")
    assert judge.frozen and judge.beside == judge.tag == "judge" and not judge.models and not judge.trained_tags
    with pytest.raises(KeyError, match="no model 'else'"):
        t.of("else")


def test_rows_override_tables_for_their_tag_alone(read: Read) -> None:
    rows = SOLVER + JUDGE + "max_steps = 5\n[model.learner]\nlr = 5e-4\n[model.learner.trigger]\nn_min = 8\n"
    t = read(rows + "[model.generation]\nmax_new_tokens = 7\n" + AGENT)
    judge = t.of("judge")
    assert (t.learner.lr, t.learner.trigger.n_min, t.generation.max_new_tokens, t.run.max_steps) == (1e-4, 4, 64, 9)
    assert (judge.learner.lr, judge.learner.trigger.n_min, judge.generation.max_new_tokens) == (5e-4, 8, 7)
    assert judge.run.max_steps == 5 and judge.groups == t.groups and judge.agents == t.agents
    assert judge.derived.limits.n_min == 8 and t.derived.limits.n_min == 4
    assert judge.derived.slots == 4 * judge.derived.limits.B > t.derived.slots


def test_processes_are_numbered_through_all_tags_and_known_by_name(read: Read) -> None:
    entries = '[[process]]\nrole = "rollout"\nmodel = "judge"\ncount = 2\n[[process]]\nrole = "rollout"\ncount = 2\n'
    t = read(SOLVER + JUDGE + AGENT + entries)
    names = [process.name for process in t.processes() if process.role in ("rollout", "learner")]
    assert names == ["learner", "rollout/0", "rollout/2", "learner/judge", "rollout/1", "rollout/3"]
    assert [t.tag_of(name) for name in names] == ["solver"] * 3 + ["judge"] * 3
    assert t.tag_of("agent/0") == t.tag_of("scheduler") == "solver"
    assert [process.name for process in t.of("judge").processes()] == ["learner/judge", "rollout/1", "rollout/3"]


def test_a_model_with_more_or_fewer_rollouts_changes_no_name_of_others(read: Read) -> None:
    t = read(SOLVER + SERVED + AGENT)

    def names(counts: list[int]) -> list[list[str]]:
        """The rollouts of each of some models, with so many."""
        rows = [dataclasses.replace(t.models[1], tag=f"m{at}", first=at, own=(own_of(t, number),))
                for at, number in enumerate(counts[1:], 1)]
        lead = dataclasses.replace(t.models[0], tag="m0")
        whole = dataclasses.replace(t, tag="m0", models=(lead, *rows), process=own_of(t, counts[0]).process)
        every = [process.name for process in whole.processes() if process.role == "rollout"]
        of_each = [[name for name in every if whole.tag_of(name) == tag] for tag in whole.tags]
        for tag, own in zip(whole.tags, of_each):
            assert [whole.of(tag).place_of(name) for name in own] == [*range(len(own))]
        assert {name for own in of_each for name in own} == {*every} and len({*every}) == sum(counts)
        return of_each

    @settings(deadline=None)
    @given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 6))
    def check(counts: list[int], which: int, count: int) -> None:
        which %= len(counts)
        before, after = names(counts), names([count if at == which else each for at, each in enumerate(counts)])
        assert [len(own) for own in before] == counts and len(after[which]) == count
        assert before[which][:count] == after[which][: counts[which]]
        del before[which], after[which]
        assert before == after

    check()


def test_a_tag_without_an_entry_has_one_rollout(read: Read) -> None:
    t = read(SOLVER + SERVED + AGENT)
    assert [process.name for process in t.of("judge").processes()] == ["rollout/1"]
    assert "learner" in [process.name for process in t.processes()]


def test_a_device_of_a_process_is_that_of_its_own_model(read: Read) -> None:
    entry = '[[process]]\nrole = "rollout"\nmodel = "judge"\n'
    t = read(SOLVER + 'device = "cpu"\n' + SERVED + 'device = "cuda"\n' + AGENT + entry)
    assert t.device_of("rollout/0") == t.device_of("learner") == "cpu" and t.device_of("rollout/1") == "cuda"


def test_a_model_that_only_serves_has_one_slot_and_calls(read: Read) -> None:
    judge = read(SOLVER + SERVED + AGENT + '[data.skip]\nmax_pass_rate = 0.9\n').of("judge")
    assert judge.derived.slots == 1 and judge.derived.call_slots > 0 and judge.derived.val_samples == 0
    assert judge.has_callers and judge.longest == 96


def test_every_topology_of_several_models_comes_back_from_json(read: Read) -> None:
    t = materialise(read(SOLVER + JUDGE + 'seats = ["one", "two"]\n' + SERVED.replace("judge", "old") + AGENT))
    for each in (t, t.of("judge"), t.of("old")):
        assert Topology.from_json(each.to_json()) == each
    assert t.of("judge").seats == ("one", "two") and t.of("old").seats == ("old",) and t.seats == ("solver",)
    assert Path(t.of("old").model.path, "config.json").exists()


def test_overrides_reach_one_model_by_its_tag_and_all_without(read: Read) -> None:
    t = read(SOLVER + JUDGE + AGENT, "model.judge.learner.lr=3e-3", "model.dtype=float32", "learner.lr=2e-3")
    assert (t.learner.lr, t.of("judge").learner.lr) == (2e-3, 3e-3)
    assert t.model.dtype == t.of("judge").model.dtype == "float32"


@pytest.mark.parametrize("key", ["path=tiny:sort", 'seats=["a"]', "max_steps=5", "trained=false", "follow.every=5"])
def test_an_override_of_what_each_model_has_for_itself_names_one(read: Read, key: str) -> None:
    [problem] = refused(read, SOLVER + JUDGE + AGENT, f"model.{key}")
    assert "each of the 2 models has its own" in problem and f"model.solver.{key.partition('=')[0]}" in problem
    assert read(SOLVER + AGENT, "model.seats=[\"a\"]").seats == ("a",), "of one model it needs no tag"


def test_one_model_as_a_tag_has_the_tables_of_a_plain_one(read: Read) -> None:
    plain = read(SOLVER.replace("[[model]]\ntag = \"solver\"", "[model]") + AGENT)
    tagged = read(SOLVER + AGENT)
    assert tagged.tags == ("solver",)
    old, new = plain.to_dict(), tagged.to_dict()
    assert {key for key in new if key not in old or old[key] != new[key]} == {"models", "tag"}


@pytest.mark.parametrize("name", ["quickstart", "agents", "scripted"])
def test_a_plain_model_says_nothing_of_tags_or_seats(name: str) -> None:
    t = load(ROOT / "configs" / f"{name}.toml", ["model.path=tiny:sort"] if name == "agents" else [])
    data = json.loads(t.to_json())
    assert not {"models", "tag", "frozen", "first"} & data.keys() and "seats" not in data["model"]
    assert not any("model" in entry for entry in data["process"])
    assert t.tags == ("",) and t.of("") is t and not t.beside and t.seats == ("policy",) and t.trained_tags == ("",)


# -- what is refused -----

REFUSED: list[tuple[str, str, str]] = [
    # rows and processes, the line at which it stands, and the words of the refusal
    (SOLVER + SOLVER + AGENT, "", "two models of one name"),
    (SOLVER.replace("solver", "learner") + AGENT, 'tag = "learner"', "this is the name of a role; choose another"),
    (SOLVER.replace("solver", "policy") + AGENT, 'tag = "policy"', "the seat of a plain [model]"),
    (SOLVER.replace("solver", "../up") + AGENT, 'tag = "../up"', "a small letter, then at most 15"),
    (SOLVER.replace("solver", "x" * 17) + AGENT, "tag = ", "a small letter, then at most 15"),
    (SOLVER.replace("solver", "söl") + AGENT, "tag = ", "a small letter, then at most 15"),
    ('[[model]]\npath = "tiny:sort"\n' + AGENT, "[[model]]", "model.0.tag is missing"),
    ('[[model]]\ntag = "a"\n' + AGENT, "[[model]]", "model.path is missing"),
    (SERVED + AGENT, "[[model]]", "no [[model]] is trained"),
    ("".join(SOLVER.replace("solver", f"s{n}") for n in range(9)) + AGENT, "[[model]]", "9 models: at most 8"),
    (SOLVER + SERVED + "[model.learner]\nlr = 1.0\n" + AGENT, "[model.learner]", "only serves has no learner"),
    (SOLVER + "[model.agents]\ncontext = 9\n" + AGENT, "[model.agents]", "[agents] is the run's"),
    (SOLVER + 'weird = 1\n' + AGENT, "weird", "unknown key in [model]"),
    (SOLVER + 'seats = ["a", "a"]\n' + AGENT, "seats", "a seat is named twice"),
    (SOLVER + JUDGE + 'seats = ["solver"]\n' + AGENT, "[[model]]", "the seat 'solver' is named twice"),
    (SOLVER + 'seats = ["A"]\n' + AGENT, "seats", '"A" is no name of a seat'),
    (SOLVER + SERVED, "[[model]]", "no process plays one"),
    (SOLVER + 'seats = ["one", "two"]\n', "seats", "only an episode has several sides"),
    (SOLVER + SERVED + '[[process]]\nrole = "atropos"\n', "[[process]]", "answers of one seat"),
    (SOLVER + JUDGE + AGENT + '[reward]\nkind = "exact_match"\n', "kind = ", "come from the episode"),
    (SOLVER + JUDGE + AGENT + "[data.skip]\nmax_pass_rate = 0.5\n", "[data.skip]", "has one pass rate"),
    (SOLVER + JUDGE + AGENT + '[scheduler]\npolicy = "sjf"\n', "policy", "that of one model"),
    (SOLVER + SERVED + AGENT + '[[process]]\nrole = "rollout"\nmodel = "none"\n', 'model = "none"',
     "no [[model]] has this tag; there are solver, judge"),
    (SOLVER + SERVED + AGENT + '[[process]]\nrole = "reward"\nmodel = "judge"\n', 'model = "judge"',
     "only learner and rollout are of one model"),
    (SOLVER + SERVED + AGENT + '[[process]]\nrole = "learner"\nmodel = "judge"\n', 'model = "judge"',
     "only serves has no learner"),
    (SOLVER + JUDGE + AGENT + '[[process]]\nrole = "rollout"\nmodel = ["solver", "judge"]\n', "model = [",
     'engine = "torch" has one model'),
    (SOLVER + SERVED + AGENT + '[[process]]\nrole = "rollout"\nmodel = "judge"\ncount = 0\n', "[[process]]",
     "no process serves judge"),
    (SOLVER + JUDGE + AGENT + '[[process]]\nrole = "learner"\nmodel = "judge"\nranks = 2\n', "[[process]]",
     "has several ranks"),
    (SOLVER + SERVED + "max_steps = 5\n" + AGENT, "max_steps = 5",
     "a model that only serves makes no steps; remove it"),
    (SOLVER + JUDGE + 'trained = true\nfollow = { model = "solver" }\n' + AGENT, "trained = true",
     "a model that follows another is not trained; remove this"),
    (SOLVER + SERVED + "follow = { every = 5 }\n" + AGENT, "follow", "it names no model to follow"),
    (SOLVER + SERVED + 'follow = { model = "judge" }\n' + AGENT, "follow", "a model cannot follow itself"),
    (SOLVER + SERVED + 'follow = { model = "other" }\n' + AGENT, "follow", "it follows a trained [[model]]"),
    (SOLVER + SERVED + SERVED.replace("judge", "old") + 'follow = { model = "judge" }\n' + AGENT, "follow",
     "it follows a trained [[model]]; there are solver"),
    (SOLVER + 'seats = ["a", "b"]\n' + AGENT + '[weights]\nmode = "sync"\nmax_staleness = 0\n', "n_min", "a multiple"),
]


@pytest.mark.parametrize("text,at,words", REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_several_models_cannot_be_is_refused_with_its_place(read: Read, text: str, at: str, words: str) -> None:
    head = HEAD.replace("n_min = 4", "n_min = 5") if words == "a multiple" else HEAD
    problems = refused(read, text, head=head)
    right = [problem for problem in problems if words in problem]
    assert right, problems
    if at:
        assert f"t.toml:{line_of(text, at, head)}:" in right[0], right


NO_NAMES = [
    "", ".", "..", "../..", "a/b", "/tmp", "a\\b", "A", "a b", "a\n", "-a", "1", "\u0000", "sölver", "a\u202e",
    "\u0430", "😀", "a.", "a" * 17, "x" * 100_000,
]


@pytest.mark.parametrize("name", NO_NAMES, ids=[ascii(name[:20]) for name in NO_NAMES])
def test_what_is_no_name_of_a_folder_names_no_model_or_seat(tmp_path: Path, read: Read, name: str) -> None:
    """A tag becomes a folder and names of processes; nothing is made before it is one."""
    before = sorted(tmp_path.parent.iterdir())
    text = json.dumps(name, ensure_ascii=False)
    for rows in (SOLVER.replace('"solver"', text) + JUDGE + AGENT, SOLVER + JUDGE + f"seats = [{text}]\n" + AGENT):
        problems = refused(read, rows)
        assert all(len(problem) < 1000 for problem in problems) and "t.toml:" in problems[0], problems
        assert any("a small letter" in problem or "[a-z]" in problem for problem in problems), problems
    assert sorted(tmp_path.parent.iterdir()) == before


def test_scripted_engines_of_several_models_are_refused(read: Read) -> None:
    text = SOLVER + JUDGE + AGENT + '[[process]]\nrole = "rollout"\nengine = "mock"\n'
    head = HEAD.replace('"tiny:sort"', json.dumps(str(ROOT / "configs" / "scripted.jsonl")))
    assert any("scripted engines play one seat" in problem for problem in refused(read, text, head=head))


def test_models_that_play_on_another_host_are_refused(tmp_path: Path, read: Read) -> None:
    keys, engine, there = tmp_path / "keys", '[[process]]\nrole = "rollout"\n', 'hosts = ["b"]\n'
    assert [main(["keys", *what, "--dir", str(keys)]) for what in (["init"], ["add", "b"])] == [0, 0]
    bus = f'[bus]\nendpoint = "tcp://127.0.0.1:5999"\nkeys = {json.dumps(str(keys))}\n'
    problems = refused(read, SOLVER + SERVED + AGENT + AGENT + there + engine + engine + there + bus)
    assert len(problems) == 1 and "several seats play on one host; remove hosts" in problems[0], problems


def test_groups_of_one_are_refused_for_the_model_that_compares(read: Read) -> None:
    head, compares = HEAD.replace("size = 4", "size = 1"), "groups.size = 1"
    assert any(compares in problem for problem in refused(read, SOLVER + JUDGE + AGENT, head=head))
    alone = SOLVER + '[model.learner]\nadvantage = "reward"\n'
    assert any(compares in problem for problem in refused(read, alone + JUDGE + AGENT, head=head))
    t = read(alone + alone.replace("solver", "judge") + AGENT, head=head)
    assert t.groups.size == 1 and t.of("judge").learner.advantage == "reward"


def test_a_model_without_a_tokenizer_is_refused_at_its_own_path(tmp_path: Path, read: Read) -> None:
    folder = Path(materialise(read(SOLVER + SERVED + AGENT)).of("judge").model.path)
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    text = SOLVER + SERVED.replace("tiny:sort", "bare") + AGENT
    [problem] = refused(read, text)
    assert "no tokenizer" in problem and f"t.toml:{line_of(text, 'bare')}:" in problem


def test_a_wrong_value_is_reported_once_for_all_tags_with_its_line(read: Read) -> None:
    problems = refused(read, SOLVER + JUDGE + AGENT, head=HEAD.replace("lr = 1e-4", 'lr = "fast"'))
    assert len(problems) == 1 and f"t.toml:{line_of('', 'lr =')}" in problems[0]
    text = SOLVER + JUDGE + '[model.learner]\nlr = "fast"\n' + AGENT
    [problem] = refused(read, text)
    assert f"t.toml:{len((HEAD + SOLVER + JUDGE).splitlines()) + 2}:" in problem


def test_both_forms_of_a_model_in_one_file_are_named(read: Read) -> None:
    [problem] = refused(read, '[model]\npath = "tiny:sort"\n' + SOLVER)
    assert "[model] and [[model]] in one file" in problem


def test_a_process_of_a_tag_needs_tags(read: Read) -> None:
    text = '[model]\npath = "tiny:sort"\n' + AGENT + '[[process]]\nrole = "rollout"\nmodel = "judge"\n'
    assert any("write [[model]] for each" in problem for problem in refused(read, text))


def test_rounds_of_other_sizes_are_warned_of(read: Read) -> None:
    sync = '[weights]\nmode = "sync"\nmax_staleness = 0\n'
    rows = SOLVER + JUDGE + "[model.learner.trigger]\nn_min = 6\n"
    assert any("rounds are uneven" in text for text in read(rows + AGENT + sync).derived.warnings)
    assert not any("uneven" in text for text in read(rows.replace("= 6", "= 8") + AGENT + sync).derived.warnings)


def test_without_its_folder_the_missing_part_is_named(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities.Capability, "here", property(lambda part: part.name != "several"))
    capabilities.plugs.cache_clear()
    try:
        for rows in (SOLVER + SERVED, '[model]\npath = "tiny:sort"\nseats = ["a", "b"]\n'):
            with pytest.raises(UserError, match=r"several seats or models need busrl/several, which is not part"):
                read(rows + AGENT)
    finally:
        capabilities.plugs.cache_clear()


# -- what check says -----


def test_check_prints_the_sums_of_each_tag_and_adds_up_shared_memory(read: Read) -> None:
    t = read(SOLVER + JUDGE + SERVED.replace("judge", "old") + AGENT)
    page = explain.report(t)
    assert "solver (the lead)" in page and "old (only serves)" in page and "learning rate 0.0001" in page
    names = [name for name, _ in explain.shared_memory(t)]
    assert {"ring", "ring of judge", "ring of old"} <= set(names) and "weights of old" not in names
    explain.require_memory(t)


def test_files_of_a_model_lie_in_its_folder(tmp_path: Path, read: Read) -> None:
    from busrl.paths import RunPaths

    t, paths = read(SOLVER + SERVED + AGENT), RunPaths.of(tmp_path)
    judge: Any = t.paths_of("judge", paths)
    assert t.paths_of("solver", paths) is paths and judge.root == paths.root / "models" / "judge"
    assert judge.fates == judge.root / "fates.bin" and judge.lock("learner").parent == judge.root
    for name in ("errors", "control", "serve_key", "frontend", "backend", "tap", "runtime_dir", "logs", "data"):
        assert getattr(judge, name) == getattr(paths, name)
    assert judge.lock("run") == paths.lock("run") and judge.ring_name != paths.ring_name
    shutil.rmtree(tmp_path / "models", ignore_errors=True)
