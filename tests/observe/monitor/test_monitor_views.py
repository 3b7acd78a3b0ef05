"""What a person sees fits the terminal, whatever the run is called and however much there is to show."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from busrl.observe.monitor import phrases
from busrl.observe.monitor.screen import view
from busrl.protocol import messages as m
from busrl.status import words as plain
from busrl.status.state import ErrorRecord, Facts, ProcessRecord, RingRecord, RunState, StepRecord, step_of


def picture(processes: int = 7, errors: int = 3, steps: int = 120, name: str = "quickstart") -> RunState:
    facts = Facts(name=name, max_steps=150, n_min=32, mode="batch-async", max_staleness=2, started=1000.0)
    state = RunState(facts=facts)
    entries = tuple(
        ProcessRecord(
            f"rollout/{i}", "rollout", 1000 + i, "ready", "", 0.0, 99.0 if i == 3 else 0.1, i * 10**9, 10, 5, 80
        )
        for i in range(processes)
    )
    occupancy = {"free": 300, "queued": 20, "generating": 256, "rewarded": 90, "training": 100, "dropped": 0}
    words = {"step": steps, "version": steps + 1, "run_state": 0}
    for second in (0.0, 1.5):
        state.look(RingRecord(766, occupancy, words, 0, 9, 60, 21, entries), second)
        state.traffic.tick(second)
    for step in range(1, steps + 1):
        told = {"flat_share": 0.8, "cut_share": 0.25, "entropy": 0.5, "k3": 0.001}
        state.step(StepRecord(step, step + 1, step / 200, 14.0 - step / 100, age_mean=step % 7 / 7, **told), None)
    state.sample = "'1+1=' → '3', reward 0"
    for number in range(errors):
        trouble = ErrorRecord(1000.0 + number, f"rollout/{number}", "warning", "rollout", f"trouble {number}")
        state.errors.add(trouble, "file")
    for name_ in ("DATA_GENERATED", "REWARD_COMPUTED"):
        state.traffic.received(name_, 100)
    return state


def shown(state: RunState, width: int, height: int, errors_only: bool = False) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(view(state, 2.0, 1100.0, width, height, errors_only), end="")
    return captured.get().rstrip("\n").split("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (60, 15), (30, 8)])
@pytest.mark.parametrize("processes", [0, 7, 60])
def test_the_screen_is_as_large_as_the_terminal(width: int, height: int, processes: int) -> None:
    lines = shown(picture(processes), width, height)
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)


def test_80_by_24_shows_every_section() -> None:
    text = "\n".join(shown(picture(), 80, 24))
    for wanted in (
        "quickstart · running", "step 120/150", "reward", "length", "rollout/0", "LATE", "generating 256",
        "flat groups 80% · cut answers 25% · entropy 0.50 · k3 0.001", "'1+1=' → '3', reward 0",
        "21/32 groups ready", "batch-async (bound 2)", "messages/s", "trouble 2", "q quit",
    ):
        assert wanted in text, text


def test_120_by_40_also_shows_ages_and_messages_by_name() -> None:
    text = "\n".join(shown(picture(), 120, 40))
    assert "age of samples" in text and "data_generated" in text


def test_the_list_of_errors_takes_the_screen_when_it_is_asked_for() -> None:
    lines = shown(picture(errors=60), 80, 24, errors_only=True)
    assert sum("trouble" in line for line in lines) >= 18 and len(lines) == 24


def test_more_processes_than_lines_are_counted() -> None:
    assert any("more" in line for line in shown(picture(processes=60), 80, 24))


@settings(max_examples=30)
@given(st.text(max_size=300))
def test_names_and_texts_from_outside_cannot_break_the_screen_or_lines(text: str) -> None:
    state = picture(name=text)
    state.errors.add(ErrorRecord(1.0, text, text, text, f"\x1b[2J[bold]{text}"), "bus")
    state.waiting = text
    lines = shown(state, 80, 24)
    assert len(lines) == 24 and not any("\x1b[2J" in line for line in lines)
    assert not any("\x1b" in line or "\n" in line for line in phrases.lines(state, 2.0, 1100.0))


def test_plain_lines_tell_the_same() -> None:
    text = "\n".join(phrases.lines(picture(), 2.0, 1100.0))
    for wanted in ("quickstart · running", "step 120/150", "reward", "21/32 groups ready", "LATE", "trouble 2"):
        assert wanted in text, text
    assert "LATE: rollout/3" in plain.line(picture(), 2.0)


def test_a_controller_shows_what_it_wants_and_what_is_in_force() -> None:
    state = picture()
    assert not any("H/H_ref" in line for line in phrases.lines(state, 2.0, 1010.0))
    state.step(StepRecord(121, n_min=32, control_n_min=64, control_moves=1, entropy_ratio=0.55), 1.0)
    assert any("H/H_ref 0.55 · n_min 32, advises 64 · 1 moves" in line for line in phrases.lines(state, 2.0, 1010.0))
    assert any("advises 64" in line for line in shown(state, 120, 40))
    state.step(StepRecord(122, n_min=64, control_n_min=64, control_moves=1, entropy_ratio=0.55), 1.0)
    lines = phrases.lines(state, 2.0, 1010.0)
    assert any("n_min 64 · 1 moves" in line for line in lines)
    assert any("/64 groups ready" in line for line in lines)


def test_lines_and_data_show_what_was_thrown_away_and_a_sample() -> None:
    state = picture()
    text = "\n".join(phrases.lines(state, 2.0, 1100.0))
    assert "policy    flat groups 80% · cut answers 25%" in text and "sample    '1+1=' → '3', reward 0" in text
    shares = {"flat_share": pytest.approx(0.8), "cut_share": 0.25, "entropy": 0.5}
    assert state.steps.policy(state.idle) == {**shares, "ess": None, "k3": pytest.approx(0.001)}
    assert RunState().steps.policy()["flat_share"] is None


def test_prompts_that_the_scheduler_leaves_out_are_shown() -> None:
    state = picture()
    state.handle(m.SchedulerState(values={"left_out": 0.0, "resting": 0.0}), 1.0)
    assert not any("left out" in line for line in phrases.lines(state, 2.0, 1010.0)), "nothing was"
    state.handle(m.SchedulerState(values={"left_out": 12.0, "resting": 5.0, "left_out/a": 12.0}), 1.0)
    assert any("left out  12 draws by pass rate · 5 prompts rest" in line for line in phrases.lines(state, 2.0, 1010.0))


def test_prompts_of_several_sources_are_shown_with_reward_and_pass_rate_each() -> None:
    state = picture()
    assert not any("sources" in line for line in phrases.lines(state, 2.0, 1010.0)), "one source is the whole"
    by = {"gsm8k": {"reward": 0.5, "pass_rate": 0.25, "groups": 9.0}, "a/b": {"reward": -1.0, "groups": 30.0}}
    metrics = {f"by/{tag}/{name}": value for tag, of in by.items() for name, value in of.items()}
    update = m.LearnerStateUpdate(
        entropy=0.1, version=3, step=121, groups=4, reward=0.1, tokens=9, samples=8, age_mean=0.0, metrics=metrics
    )
    state.step(step_of(update), 1.0)
    assert any("sources   a/b -1.00 (0%) · gsm8k 0.50 (25%)" in line for line in phrases.lines(state, 2.0, 1010.0))
