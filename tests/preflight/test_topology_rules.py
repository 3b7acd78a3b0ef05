"""Derived values, and combinations that are refused or warned about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.launcher.children import command_of
from busrl.paths import RunPaths
from busrl.preflight.explain import report
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]


def test_the_limits_are_those_of_the_worked_example(loaded: Loaded) -> None:
    derived = loaded().derived
    limits = derived.limits
    assert (limits.B, limits.W, limits.n_lo, limits.g_min, limits.n_floor) == (75, 22, 32, 6, 8)
    assert derived.train_slots == derived.slots == 600 and derived.val_reserve == 0
    assert derived.horizon == 64


def test_sync_admits_one_round_and_fully_async_has_no_bound(loaded: Loaded) -> None:
    sync = loaded('[weights]\nmode = "sync"\n').derived.limits
    assert (sync.B, sync.W) == (32, 32)
    free = loaded('[weights]\nmode = "fully-async"\n').derived.limits
    assert (free.B, free.W) == (128, 38)


def test_validation_gets_slots_of_its_own(loaded: Loaded) -> None:
    topology = loaded('[validation]\ndata = "tiny:sort"\nsamples = 50\n')
    assert topology.validates and topology.derived.val_samples == 50
    assert topology.derived.val_reserve == 50 and topology.derived.slots == 650
    many = loaded('[validation]\ndata = "tiny:sort"\nsamples = 5000\n', "process.rollout.count=2").derived
    assert many.val_reserve == 256  # no more than the engines run at once
    off = loaded("[validation]\nsamples = 50\n")
    assert not off.validates and off.derived.val_reserve == 0


@settings(max_examples=60)
@given(n_min=st.integers(1, 300), stale=st.integers(0, 9), size=st.integers(2, 64))
def test_every_accepted_run_keeps_the_bound_and_can_fire(loaded: Loaded, n_min: int, stale: int, size: int) -> None:
    text = f"[learner.trigger]\nn_min = {n_min}\n[weights]\nmax_staleness = {stale}\n[groups]\nsize = {size}\n"
    derived = loaded(text).derived
    bound = (stale + 1) * n_min + 1
    assert bound >= derived.limits.B + derived.limits.W
    assert n_min <= derived.limits.B and derived.limits.W >= 1
    assert derived.slots >= size * derived.limits.B
    assert 2 <= derived.limits.g_min <= size and 1 <= derived.limits.n_floor <= n_min


def test_too_few_slots_show_the_sum_and_an_accepted_number(loaded: Loaded, refused: Refused) -> None:
    (problem,) = refused("[ring]\nslots = 599\n")
    assert problem == (
        "t.toml:12: ring.slots = 599: fewer than the groups in flight need: "
        'G x B + validation reserve = 8 x 75 + 0 = 600; set it to 600 or more, or "auto"'
    )
    assert loaded("[ring]\nslots = 700\n").derived.slots == 700


REFUSED = [
    ('[learner]\nloss = "decoupled"', "the clip never acts", 12),
    ("[generation]\ntop_p = 0.9", "does not know which tokens top_p cut", 12),
    ('[learner.trigger]\nt_max_s = 0.5\n[weights]\nmode = "sync"', "ends with its groups, not by time", 12),
    ("[learner]\ndeterministic = true\n[learner.trigger]\nt_max_s = 5", "depends on the load of the machine", 14),
    ("[learner.trigger]\nn_floor = 33\nt_max_s = 5", "n_floor <= n_min", 12),
    ("[experiments]\nforced_age = 2", "in rounds only", 12),
    ("[learner]\nupdates_per_batch = 40", "at most n_min updates", 12),
    ("[learner]\npublish_every = 3", "3 x n_min = 96 > B = 75; publish_every <= 2", 12),
    ('[learner]\npublish_every = 2\n[weights]\nmode = "sync"', "2 x n_min = 64 > B = 32; publish_every <= 1", 12),
    ('[scheduler]\npolicy = "ljf"\nhorizon = 1', "ljf has nothing to choose from within a horizon of one draw", 13),
    (
        '[scheduler]\npolicy = "adaptive"\nhorizon = 31\n[weights]\nmode = "sync"',
        "adaptive sorts a whole round, which has n_min = 32 draws; set it to 32 or more",
        13,
    ),
    ('[reward]\nkind = "python"', "needs a function as package.module:name or file.py:name", 12),
    ('[reward]\nkind = "exact_match"\nfunction = "a:b"', "exact_match calls no function", 13),
    ('[reward]\nextract = "("', "not a regular expression", 12),
    ('[run]\nname = "../x"', "it names a directory", 12),
    ("[validation]\nevery = 5", "no prompts are named", 12),
    ('[[process]]\nrole = "validator"', "validation.data names no prompts", 12),
    ('[[process]]\nrole = "learner"', "one learner per run", 12),
    ('[validation]\ndata = "tiny:sort"\n[[process]]\nrole = "validator"\ncount = 2', "one validator per run", 15),
    (
        '[validation]\ndata = "tiny:sort"\n[[process]]\nrole = "validator"\ncommand = ["x"]',
        "only rollout and reward may be another program",
        15,
    ),
    ('[[process]]\nrole = "reward"\ncommand = ["sh", "{rundir}"]', "{rundir} is not one of the words", 13),
    ('[[process]]\nrole = "reward"\ncommand = ["{here}/judge"]', "judge is not an executable program", 13),
    ("[ring]\nprocesses = 8", "11 entries are needed", 12),
    ("[bus]\nmax_message_bytes = 4096\n", "do not fit; set it to", 12),
]


@pytest.mark.parametrize(("text", "message", "line"), REFUSED, ids=[case[1][:30] for case in REFUSED])
def test_an_impossible_combination_is_refused_with_a_reason(
    loaded: Loaded, refused: Refused, here: Path, text: str, message: str, line: int
) -> None:
    if "max_message_bytes" in text:
        (here / "train.jsonl").write_text('{"prompt": "' + "x" * 4000 + '", "answer": "y"}\n')
    (problem,) = refused(text + "\n")
    assert problem.startswith(f"t.toml:{line}: ") and message in problem


NO_ROUNDS = '[validation]\ndata = "tiny:sort"\nat_start = false\nat_end = false'
WARNED = [
    (
        '[experiments]\nforced_age = 2\n[learner]\nloss = "decoupled"\n[weights]\nmode = "sync"',
        "the clip never acts",
        2,
    ),
    ("[learner]\nmicro_batch_tokens = 70", "the longest sample (71 tokens)", 1),
    ("[learner]\ndeterministic = true", "weights arrive when the machine lets them", 1),
    ('[learner]\nwal = "off"', "a crash rolls back", 1),
    ("[learner.trigger]\nn_floor = 3", "used by t_max_s only", 1),
    ('[weights]\nmode = "fully-async"\nover_age = "drop"', "nothing is ever over age", 2),
    ("[generation]\nmax_batch = 700", "so some rows stay empty", 1),
    ('[validation]\ndata = "train.jsonl"', "these are the training prompts", 1),
    (NO_ROUNDS, "nothing to do", 1),
    ("[weights]\nmax_staleness = 0", "one slow group holds up nearly everything", 1),
    ("[weights]\nmax_staleness = 40\nwindow = 1", "raise weights.window, or set it to 0", 1),
]


@pytest.mark.parametrize(("text", "message", "count"), WARNED, ids=[case[1][:30] for case in WARNED])
def test_a_doubtful_combination_is_warned_about(loaded: Loaded, text: str, message: str, count: int) -> None:
    warnings = loaded(text + "\n").derived.warnings
    assert len(warnings) == count and any(message in warning for warning in warnings)


def test_decoupled_is_allowed_where_its_clip_can_act(loaded: Loaded) -> None:
    assert not loaded('[learner]\nloss = "decoupled"\nupdates_per_batch = 2\n').derived.warnings
    assert not loaded('[learner]\nloss = "decoupled"\n[weights]\nmode = "sync"\n').derived.warnings


def test_a_rule_is_not_reported_for_a_key_that_is_wrong_itself(refused: Refused) -> None:
    (problem,) = refused('[weights]\nmode = "synchronous"\n[experiments]\nforced_age = 2\n')
    assert 'weights.mode = "synchronous"' in problem


def test_roles_that_join_from_outside_are_declared_with_count_zero(loaded: Loaded) -> None:
    topology = loaded("", "process.rollout.count=0")
    assert [process.role for process in topology.processes()] == ["bus", "keeper", "scheduler", "learner", "reward"]


def test_a_foreign_program_gets_run_and_name_relative_to_the_file(loaded: Loaded, here: Path) -> None:
    (here / "judge").write_text("#!/bin/sh\n")
    (here / "judge").chmod(0o755)
    topology = loaded('[[process]]\nrole = "reward"\ncommand = ["{here}/judge", "{run_dir}", "as={name}", "{}"]\n')
    process = next(process for process in topology.processes() if process.name == "reward/1")
    assert process.spec.command == (f"{here}/judge", "{run_dir}", "as={name}", "{}")
    command = command_of(process, RunPaths.of(here / "run"))
    assert command == [f"{here}/judge", f"{here}/run", "as=reward/1", "{}"]


def test_check_says_which_prompts_the_run_will_leave_out(loaded: Loaded) -> None:
    assert "is left out" not in report(loaded())
    page = report(loaded("", "data.skip.max_pass_rate=0.9", "data.skip.min_pass_rate=0.1", "data.skip.after=16"))
    assert "whose pass rate over 16 answers of its newest groups is 0.9 or more or less than 0.1 (right: a" in page
    assert "it rests for 3 passes over them and is tried again" in page
    assert "it is never tried again" in report(loaded("", "data.skip.max_pass_rate=0.9", "data.skip.rest=0"))


def test_a_band_of_pass_rates_that_holds_none_is_refused(refused: Refused) -> None:
    (text,) = refused("", "data.skip.max_pass_rate=0.5", "data.skip.min_pass_rate=0.5")
    assert "no prompt is at least the one and below the other" in text
