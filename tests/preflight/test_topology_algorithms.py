"""Recipes set what a file leaves out; combinations that train something else than was asked for are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.algorithms import catalog
from busrl.data import pretrained
from busrl.preflight import memory
from busrl.preflight.explain import report
from busrl.preflight.findings import lookup
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]


def a_model(folder: Path, words: int = 16, **tokens: int) -> Path:
    """A folder as `check` reads it: no weights are looked at."""
    path = folder / f"model{len(list(folder.iterdir()))}"
    path.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": words, "hidden_size": 8, "num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    (path / "pytorch_model.bin").write_bytes(b"-")
    if tokens:
        added = [{"content": "<eos>", "id": 0}]
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": added}))
    else:
        (path / "tokenizer.model").write_bytes(b"-")
    return path


@pytest.mark.parametrize("recipe", sorted(catalog.RECIPES))
def test_a_recipe_is_accepted_and_check_prints_all_it_set(
    loaded: Loaded, recipe: str, tmp_path: Path
) -> None:
    more = [f"model.teacher={a_model(tmp_path, 3)}"] if recipe == "distill" else []
    topology = loaded("", f"learner.recipe={recipe}", *more)
    facts = catalog.LOSS_FACTS[topology.learner.loss]
    page, plain = report(topology), loaded()
    for key, value in {**facts.settings, **catalog.RECIPES[recipe]}.items():
        if isinstance(value, catalog.OfLimit):
            value = topology.generation.max_new_tokens // value.parts
        assert lookup(topology, key) == value
        if lookup(plain, key) != value:
            assert f"  {key} = " in page


def test_the_file_wins_over_recipe_and_loss_and_check_says_so(loaded: Loaded) -> None:
    topology = loaded("", "learner.recipe=grpo", "learner.kl_coef=0.001", "learner.clip_high=0.3")
    assert (topology.learner.kl, topology.learner.kl_coef, topology.learner.clip_high) == ("k3", 0.001, 0.3)
    assert "learner.kl_coef = 0.001 is the file's; recipe \"grpo\" would set 0.04" in report(topology)
    skip = loaded("", "learner.recipe=scalerl", "data.skip.max_pass_rate=0").data.skip
    assert (skip.on, skip.rest) == (False, 0), "a 0 that is written down is what it says"
    learner = loaded("", "learner.loss=gspo", "learner.clip_low=0.01").learner
    assert (learner.clip_low, learner.clip_high, learner.aggregation) == (0.01, 4e-4, "seq-mean-token-mean")


def test_dr_grpo_divides_its_sum_by_the_limit_of_answers(loaded: Loaded) -> None:
    topology = loaded("", "learner.recipe=dr_grpo")
    assert topology.learner.length_norm == topology.generation.max_new_tokens
    assert loaded("", "learner.recipe=dr_grpo", "learner.length_norm=7").learner.length_norm == 7


def test_a_recorded_topology_keeps_what_the_recipe_set(loaded: Loaded) -> None:
    topology = loaded("", "learner.recipe=cispo")
    assert Topology.from_json(topology.to_json()) == topology


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("correction=token_tis",), "count it twice"),
        (("loss=dppo", "correction=icepop"), "count them twice"),
        (("loss=decoupled", "updates_per_batch=2", "correction=icepop"), "count them twice"),
        (("ratio=proximal",), "nothing corrects for old samples"),
        (("newest_ratio=one", "updates_per_batch=2"), "not 1 any more"),
        (("newest_ratio=one", "loss=reinforce", "correction=token_tis"), "hides from the correction"),
        (("newest_ratio=one", "ratio=proximal", "updates_per_batch=2"), "recorded log-probabilities"),
        (("loss=gspo", "aggregation=token-mean"), "ratio is of whole samples"),
        (("kl_coef=0.1",), "no KL is computed"),
        (("kl=k3_is", "kl_coef=0.1", "kl_in=reward"), "no gradient"),
        (("loss=reinforce", "correction=icepop", "correction_low=6"), "everything would be dropped"),
        (("loss=clip_cov", "clip_cov_range=[5, 1]"), "no covariance"),
        (("recipe=grpoo",), "grpo"),
    ],
    ids=str,
)
def test_a_combination_that_trains_something_else_is_refused_by_name(
    refused: Refused, keys: tuple[str, ...], words: str
) -> None:
    problems = refused("", *(f"learner.{key}" for key in keys))
    assert any(words in text for text in problems), problems


def test_a_reference_is_looked_at_before_a_start(refused: Refused) -> None:
    problems = refused("", "learner.kl=k3", "learner.kl_coef=0.1", "model.reference=/nowhere")
    assert any("model.reference" in text and "no such folder" in text for text in problems), problems


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ((), ""), (("recipe=scalerl",), ""), (("recipe=reinforce_pp",), "compares all samples"),
        (("recipe=m2po",), "chooses among all tokens"),
        (("recipe=scalerl", "entropy_coef=0.01"), "divides by a number of the step"),
    ],
    ids=str,
)
def test_check_says_why_a_step_is_not_streamed(loaded: Loaded, keys: tuple[str, ...], why: str) -> None:
    page = report(loaded("", *(f"learner.{key}" for key in keys)))
    assert ("computed at once" in page) == bool(why) and why in page


def test_check_tells_what_old_samples_ask_of_the_learning_rate(loaded: Loaded) -> None:
    assert "careful start" not in report(loaded())
    assert "of age up to 8 a careful start is 1.5e-04" in report(loaded("", "weights.max_staleness=8"))
    assert "samples of any age" in report(loaded("", "weights.mode=fully-async"))


def test_a_value_head_goes_with_ranks_and_its_keys_need_it(
    loaded: Loaded, refused: Refused
) -> None:
    """It may go with single answers, which have no siblings to be compared with; nothing else may."""
    assert catalog.held_back(loaded("", "learner.recipe=ppo").learner)
    assert not catalog.held_back(loaded("", "learner.recipe=ppo", "learner.value.whiten=false").learner)
    for advantage in ("gae", "reward"):
        assert loaded("", f"learner.advantage={advantage}", "groups.size=1").derived.limits.g_min == 1
    [problem] = refused("", "groups.size=1")
    assert "a single answer has none to be compared with" in problem
    assert loaded("", "learner.recipe=ppo", "process.learner.ranks=2").ranks == 2
    warnings = loaded("", "learner.value.gamma=0.9").derived.warnings
    assert any("only a value head reads it" in str(problem) for problem in warnings), warnings
    for key in ("segments.loss=pois", "learner.newest_ratio=one"):
        problems = refused("", key, "weights.mode=sync", "learner.passes_per_batch=2")
        assert any("after the first pass" in text for text in problems), problems
    loaded("", "learner.loss=decoupled", "learner.passes_per_batch=2")


def test_a_teacher_has_the_tokens_of_the_model_and_a_reader(
    loaded: Loaded, refused: Refused, tmp_path: Path
) -> None:
    base, same = a_model(tmp_path, a=1, b=2), a_model(tmp_path, 20, a=1, b=2)
    swapped, more = a_model(tmp_path, a=2, b=1), a_model(tmp_path, a=1, b=2, c=3)
    distill, path = "learner.recipe=distill", f"model.path={base}"

    def found(*keys: str) -> str:
        return "\n".join(refused("", path, *keys))

    assert "there is no teacher to learn from" in found(distill)
    assert "no such folder" in found(distill, "model.teacher=/nowhere")
    assert "other ids for 2 tokens; 'a' is 2, in model.path 1" in found(distill, f"model.teacher={swapped}")
    assert "other ids for 1 tokens; 'c' is 3, in model.path no token" in found(distill, f"model.teacher={more}")
    assert "other ids for 2" in found("learner.kl=k3", "learner.kl_coef=0.1", f"model.reference={swapped}")
    assert "count it twice" in found(distill, f"model.teacher={same}", "learner.teacher_coef=1")
    assert loaded("", path, distill, f"model.teacher={same}", "process.learner.ranks=2").ranks == 2
    without, other = a_model(tmp_path), a_model(tmp_path, 20)
    told = refused("", distill, f"model.path={without}", f"model.teacher={other}")
    assert any("its vocabulary has 20 tokens, that of model.path 16" in text for text in told), told
    topology = loaded("", path, f"model.teacher={same}", distill)  # rows that no token has
    assert topology.learner.advantage == "reward" and catalog.trains_flat(topology.learner)
    told = loaded("", path, f"model.teacher={same}").derived.warnings
    assert any("nothing reads the teacher" in str(problem) for problem in told), told


TEACHERS = [
    ("[[learner.teacher]]", "a teacher is one of these: path, base_url, posted; set one of them"),
    ('[[learner.teacher]]\nbase_url = "localhost:8000"', 'no address of an endpoint; for example "http://127.0.0.1'),
    ('[[learner.teacher]]\nposted = true', 'nothing posts it; add a [[process]] with role = "atropos"'),
    ('[[learner.teacher]]\nbase_url = "http://a/v1"\n[[learner.teacher]]\nbase_url = "http://b/v1"',
     "two teachers have this tag; give each its own"),
    ('[[learner.teacher]]\nbase_url = "http://a/v1"\n[generation]\ntemperature = 0.7',
     "an endpoint gives log-probabilities at temperature 1"),
    ('[[learner.teacher]]\npath = "/nowhere"', "no such folder"),
    ('[learner]\nteacher_top = "student"', "there is no teacher to learn from"),
]


@pytest.mark.parametrize(("text", "rule"), TEACHERS)
def test_teachers_that_cannot_work_are_refused(refused: Refused, text: str, rule: str) -> None:
    distill = () if "teacher_top" in text else ("learner.recipe=distill",)
    assert any(rule in problem for problem in refused(text, *distill)), refused(text, *distill)


def test_the_limit_of_collectives_says_nothing_of_a_teacher(loaded: Loaded) -> None:
    rows = '[[learner.teacher]]\nbase_url = "http://a/v1"\npatience_s = 900\n'
    keys, waits = ("learner.recipe=distill", "process.learner.ranks=2"), "learner.parallel.collective_timeout_s"
    assert loaded(rows, *keys).learner.parallel.collective_timeout_s == 120
    assert loaded(rows, *keys, f"{waits}=30").learner.parallel.collective_timeout_s == 30


def test_teachers_are_recorded_only_where_there_are_any(loaded: Loaded) -> None:
    plain = json.loads(loaded().to_json())
    assert not {"teacher", "teacher_top"} & plain["learner"].keys() and not {"layers", "experts"} & plain["lora"].keys()
    rows = '[[learner.teacher]]\nbase_url = "http://a/v1"\ntag = "maths"\n[[learner.teacher]]\nbase_url = "http://b/v1"'
    topology = loaded(rows, "learner.recipe=distill", "learner.teacher_top=student")
    assert [row.tag for row in topology.learner.teacher] == ["maths", ""]
    assert Topology.from_json(topology.to_json()) == topology


def test_the_memory_of_a_teacher_is_counted(loaded: Loaded, tmp_path: Path) -> None:
    base, other = a_model(tmp_path, a=1), a_model(tmp_path, 20, a=1)
    keys = f"model.path={base}", "model.dtype=float32"
    plain = memory.of_topology(loaded("", *keys))
    taught = memory.of_topology(loaded("", *keys, "learner.recipe=distill", f"model.teacher={other}"))
    assert taught.keys() - plain.keys() == {"teacher model"}
    assert taught["teacher model"] == 4 * pretrained.estimate(pretrained.read_config(other)) > 0
