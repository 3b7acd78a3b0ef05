"""What may be asked of a running run: who may, what is refused, what is done once, and what is in force afterwards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.errors import TopologyError, UserError
from busrl.launcher.control import NO_PROOF, ControlDesk
from busrl.launcher.rundir import OpenRun
from busrl.ledger.controls import ControlLine, Controls, read_lines
from busrl.paths import RunPaths
from busrl.preflight import changeable
from busrl.preflight.load import load
from busrl.protocol import messages as m
from busrl.protocol.codec import address
from busrl.states import PAUSE_STARTING, PAUSED, HeaderWord, RunPhase
from busrl.system.clocks import PausedClock
from busrl.topology import ProcessName, Topology

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = load(ROOT / "configs" / "quickstart.toml")


class Words(dict[HeaderWord, int]):
    """The header of a ring."""

    def header(self, word: HeaderWord) -> int:
        return self.get(word, 0)

    def set_header(self, word: HeaderWord, value: int) -> None:
        self[word] = value


class FileRun(SimpleNamespace):
    """A run of files and header words alone."""

    use, every, trained, of_models = OpenRun.use, OpenRun.every, OpenRun.trained, OpenRun.of_models
    beside: tuple[Any, ...] = ()


class Desk(ControlDesk):
    """The desk of a run without processes."""

    def __init__(self, root: Path, topology: Topology = QUICKSTART, pause: int = 0) -> None:
        self.ring = Words({HeaderWord.GENERATION_PAUSE: pause, HeaderWord.STEP: 7})
        self.said: list[str] = []
        run: Any = FileRun(paths=RunPaths.of(root), topology=topology, ring=self.ring, written={})
        self.run, processes = run, {process.name: process for process in topology.processes()}
        super().__init__(run, processes, self, self.said.append)

    def adopt(self, topology: Topology) -> None:
        self.adopted = topology

    def unsettled(self) -> list[str]:
        return []

    def ask(self, verb: str, key: str = "", value: str = "", number: str = "") -> m.ControlDone:
        self._count = getattr(self, "_count", 0) + 1
        message = m.Control(id=number or f"{id(self)}-{self._count}", verb=verb, key=key, value=value, who="a test")
        message.proof = message.proof_with(self.run.paths.control_key.read_bytes())
        return self.handle(message)

    def everybody_follows(self) -> None:
        for name in self._processes:
            beat = m.Heartbeat(control=self.run.paths.control.stat().st_size)
            beat.sender = address(name)
            self.note_heartbeat(beat)

    @property
    def pause_word(self) -> int:
        return self.ring.header(HeaderWord.GENERATION_PAUSE)


# -- who may ask --------------------------------------------------------------------------------------------------

texts = st.text(max_size=20)


@given(texts, texts, texts, texts, texts, st.binary(min_size=1, max_size=64), st.data())
def test_a_proof_is_of_every_field_and_of_the_key(
    number: str, verb: str, key: str, value: str, who: str, secret: bytes, data: st.DataObject
) -> None:
    request = m.Control(id=number, verb=verb, key=key, value=value, who=who)
    request.proof = request.proof_with(secret)
    unambiguous = not any("\0" in text for text in (number, verb, key, value, who))
    assert request.is_proved(secret) == unambiguous
    assert not request.is_proved(secret + b"x")
    name = data.draw(st.sampled_from(("id", "verb", "key", "value", "who")))
    other = data.draw(texts.filter(lambda text: text != getattr(request, name)))
    setattr(request, name, other)
    assert not request.is_proved(secret), f"{name} can be another one with the same proof"


def test_what_is_not_proved_changes_nothing_and_leaves_no_line(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for proof in ("", "0" * 64, "ä"):
        answer = desk.handle(m.Control(id="x", verb="stop", value="now", proof=proof))
        assert not answer.ok and answer.text == NO_PROOF and answer.id == "x"
    assert desk.outcome is None and not desk.at_once and not list(read_lines(desk.run.paths))
    assert desk.run.paths.control_key.stat().st_mode & 0o777 == 0o600
    before = desk.run.paths.control_key.read_bytes()
    assert Desk(tmp_path).run.paths.control_key.read_bytes() != before, "an earlier start's messages are still good"


def test_a_signal_that_ends_the_run_is_recorded_as_the_request(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.signalled("SIGTERM")
    (line,) = read_lines(desk.run.paths)
    assert (line.verb, line.ok, line.who, line.step) == ("stop", True, "a signal (SIGTERM)", 7)
    assert Controls.read(desk.run.paths).paused is None


def test_a_signal_ends_a_run_whose_disk_is_full(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run.paths.control.symlink_to("/dev/full")
    desk.signalled("SIGINT")


# -- what is done -------------------------------------------------------------------------------------------------

ASKED = st.sampled_from((
    ("pause", "", ""), ("resume", "", ""), ("checkpoint", "", ""), ("set", "learner.lr", "1e-5"),
    ("set", "learner.lr", "2e-5"), ("set", "learner.lr", "-1"), ("set", "log.samples", "all"), ("set", "x.y", "1"),
    ("scale", "rollout", "2"), ("scale", "rollout", "1"), ("scale", "learner", "2"), ("dance", "", ""),
))


@settings(max_examples=25, deadline=None)
@given(asked=st.lists(st.tuples(ASKED, st.integers(1, 3)), max_size=8))
def test_a_repeated_id_acts_once_and_the_next_start_keeps_its_effect(
    asked: list[tuple[tuple[str, str, str], int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("run")
    desk = Desk(root)
    for number, (what, times) in enumerate(asked):
        answers = {(done.ok, done.text) for done in (desk.ask(*what, number=str(number)) for _ in range(times))}
        assert len(answers) == 1
    lines = list(read_lines(desk.run.paths))
    assert [line.id for line in lines] == [str(number) for number in range(len(asked))]
    turns = [what[0] for what, _ in asked if what[0] in ("pause", "resume")]
    assert desk.pause_word == (PAUSED if turns[-1:] == ["pause"] else 0)
    rates = [what[2] for what, _ in asked if what[1] == "learner.lr" and what[2] != "-1"]
    assert desk.run.topology.learner.lr == (float(rates[-1]) if rates else QUICKSTART.learner.lr)
    if desk.run.topology is not QUICKSTART:
        assert Topology.from_json(desk.run.paths.topology.read_text()) == desk.run.topology
        assert desk.run.written[desk.run.paths.topology] == desk.run.paths.topology.read_bytes()
    more = Controls.read(desk.run.paths).overrides()
    again = Desk(root, load(ROOT / "configs" / "quickstart.toml", ["learner.lr=3e-5", *more]))
    assert again.pause_word == desk.pause_word and list(read_lines(again.run.paths)) == lines
    for key in desk.controls.settings:
        assert changeable.value_of(again.run.topology, key) == changeable.value_of(desk.run.topology, key)


def test_the_word_is_the_learners_until_it_has_cleared_its_bit(tmp_path: Path) -> None:
    desk = Desk(tmp_path, pause=PAUSE_STARTING)
    assert desk.ask("pause").ok
    desk.look()
    assert desk.pause_word == PAUSE_STARTING
    desk.ring.set_header(HeaderWord.GENERATION_PAUSE, 0)  # as the learner does
    desk.look()
    assert desk.pause_word == PAUSED
    assert Desk(tmp_path, pause=PAUSE_STARTING).pause_word == PAUSE_STARTING | PAUSED, "held from the first moment"


def test_it_is_answered_who_has_not_taken_it_up(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first = desk.ask("set", "learner.lr", "1e-5", number="a")
    assert first.ok and first.waits == ["learner"]
    assert desk.ask("pause").waits == ["scheduler", "rollout/0"]
    desk.everybody_follows()
    assert not desk.ask("set", "learner.lr", "1e-5", number="a").waits
    done = desk.ask("checkpoint")
    assert done.ok and done.waits == ["learner"]
    desk.everybody_follows()
    lost = desk.ask("checkpoint", number=done.id)
    assert not lost.ok and "could not write it" in lost.text
    folder = desk.run.paths.checkpoints / "global_step_7"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    assert desk.ask("checkpoint", number=done.id).text == f"{folder} is written"


@pytest.mark.parametrize(("what", "why"), [
    (("set", "learner.lrr", "1"), "did you mean lr"),
    (("set", "run.seed", "1"), "run.seed cannot change while the run runs"),
    (("set", "learner.trigger.n_min", "0"), "expected a whole number >= 1"),
    (("set", "weights.max_staleness", "9"), "slots are needed, and the ring of the run has"),
    (("set", "learner", "1"), "section.key=value"),
    (("set", "lr", "5e-4"), "lr has no section; did you mean learner.lr?"),
    (("set", "learning_rate", "5e-4"), "did you mean learner.lr?"),
    (("set", "learner.lr", "fast"), 'learner.lr = "fast": expected a number'),
    (("scale", "learner", "2"), "a run has one of them"),
    (("scale", "bus", "2"), 'role = "bus": expected one of "learner"'),
    (("scale", "agent", "2"), "the run has none"),
    (("scale", "rollout", "two"), "expected a whole number"),
    (("stop", "", "later"), 'expected nothing, or "now"'),
    (("dance", "", ""), "nothing that can be asked of a run"),
])
def test_what_makes_no_sense_is_refused_with_the_reason(
    what: tuple[str, str, str], why: str, tmp_path: Path
) -> None:
    desk = Desk(tmp_path)
    answer = desk.ask(*what)
    assert not answer.ok and why in answer.text and "--set" not in answer.text, answer.text
    assert desk.run.topology is QUICKSTART and desk.outcome is None and not desk.run.paths.topology.exists()
    [line] = read_lines(desk.run.paths)
    assert not line.ok and line.who == "a test" and line.text == answer.text


def test_a_resume_without_pause_is_reported_and_an_ending_run_takes_stop(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.ask("resume").text == "it is not paused"
    assert desk.ask("pause").ok and "paused already, by a test" in desk.ask("pause").text
    assert desk.ask("stop").ok and desk.outcome is not None and not desk.at_once
    assert desk.ask("resume").text == "the run is ending"
    assert desk.ask("stop", "", "now").ok and desk.at_once


def test_a_run_is_not_ending_while_another_model_learns(tmp_path: Path) -> None:
    desk, judge = Desk(tmp_path), Words()
    desk.run.beside = (FileRun(topology=QUICKSTART, ring=judge),)
    desk.ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
    assert desk.ask("pause").ok and judge.header(HeaderWord.GENERATION_PAUSE) and desk.ask("resume").ok
    judge.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
    assert desk.ask("pause").text == "the run is ending"


def test_before_the_first_step_there_is_nothing_to_keep(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.ring.set_header(HeaderWord.STEP, 0)
    assert "no step is done yet" in desk.ask("checkpoint").text


def test_a_service_is_asked_for_no_checkpoint(tmp_path: Path) -> None:
    answer = Desk(tmp_path, load(ROOT / "configs" / "tinker.toml")).ask("checkpoint")
    assert not answer.ok and "tinker.state_every_s" in answer.text


def test_a_full_disk_refuses_it_and_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from busrl.errors import DiskFull

    desk = Desk(tmp_path)

    def full(line: ControlLine) -> None:
        raise DiskFull("no space")

    monkeypatch.setattr(desk, "_record", full)
    answer = desk.ask("set", "learner.lr", "1e-5", number="a")
    assert not answer.ok and "cannot be written down" in answer.text
    assert desk.run.topology == QUICKSTART and desk.ask("pause").ok is False and desk.pause_word == 0
    monkeypatch.undo()
    assert desk.ask("set", "learner.lr", "1e-5", number="a").ok, "the same id is tried again"


# -- values -------------------------------------------------------------------------------------------------------

@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(changeable.KEYS)), st.sampled_from(("-1", "nonsense", "true", "[1]", "1e9", "nan")))
def test_a_wrong_value_has_the_message_that_it_has_in_a_topology(key: str, text: str) -> None:
    def said(call: Any) -> str:
        try:
            call()
        except UserError as problem:
            return str(problem)
        return ""

    at_start = said(lambda: load(ROOT / "configs" / "quickstart.toml", [f"{key}={text}"]))
    in_flight = said(lambda: changeable.changed(QUICKSTART, key, text))
    if in_flight and "ring of the run" not in in_flight:
        assert in_flight == at_start
    else:
        assert in_flight or not at_start


def test_thresholds_stay_the_controllers_and_rounds_stay_what_they_are() -> None:
    controller = dataclasses.replace(QUICKSTART.learner.controller, mode="act")
    learner = dataclasses.replace(QUICKSTART.learner, controller=controller)
    with pytest.raises(UserError, match="what the controller moves"):
        changeable.changed(dataclasses.replace(QUICKSTART, learner=learner), "learner.trigger.n_min", "4")
    weights = dataclasses.replace(QUICKSTART.weights, mode="sync")
    with pytest.raises(UserError, match="rounds are counted by it"):
        changeable.changed(dataclasses.replace(QUICKSTART, weights=weights), "learner.trigger.n_min", "4")
    with pytest.raises(TopologyError, match=r"ring\.processes"):
        changeable.changed(QUICKSTART, "process.rollout.count", "1000")


def test_an_existing_ring_keeps_its_size_where_the_limits_fit() -> None:
    derived = QUICKSTART.derived
    bigger = dataclasses.replace(QUICKSTART, derived=dataclasses.replace(derived, slots=derived.slots + 8))
    assert changeable.with_sizes_of(QUICKSTART, bigger).derived.slots == derived.slots + 8
    small = dataclasses.replace(QUICKSTART, derived=dataclasses.replace(derived, slots=8))
    assert changeable.with_sizes_of(QUICKSTART, small) is QUICKSTART


def test_every_process_that_follows_a_key_is_one_of_a_run() -> None:
    roles = {process.role for process in QUICKSTART.processes()}
    assert {role for key in changeable.KEYS for role in changeable.followers(key)} <= roles
    assert isinstance(QUICKSTART.processes()[0], ProcessName)


# -- time ---------------------------------------------------------------------------------------------------------

@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=30))
def test_the_trigger_clock_counts_time_without_pauses_and_never_goes_back(
    spans: list[tuple[int, bool]]
) -> None:
    clock, now, counted, before = PausedClock(), 100, 100, False
    for passed, paused in spans:
        now += passed
        counted += 0 if before else passed
        before = paused
        assert clock.time(now, paused) == counted
