"""A rollout worker and answers in segments, case by case, on a real ring: only the model is a script."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planned_engine import EOS_ID, PlannedEngine, logprobs_of
from role_parts import parts

from busrl.data.vocabulary import TokenRows
from busrl.engines.base import Finished, Request
from busrl.errors import ShmTooSmall, UserError
from busrl.preflight.load import load
from busrl.protocol import messages as m
from busrl.ring import Fates, Ring, State
from busrl.roles.actor import Doorbell
from busrl.roles.answers import SegmentCuts, read_generated, read_text
from busrl.roles.intake import SampleIntake
from busrl.roles.learner.groups import claim_groups
from busrl.roles.probes import Prober
from busrl.roles.reward import Reward
from busrl.roles.rollout import Pace, Rollout
from busrl.scheduling.admission import LeftBehind, derive
from busrl.states import HeaderWord
from busrl.topology.schema import Segments, Topology

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 12
EOS, LENGTH = 1, 2


class Worker(Rollout):
    """A rollout role without a process: its ring entry, its claims and its commits are the real ones."""

    intake: SampleIntake

    def __init__(self, topology: Topology, ring: Ring, engine: PlannedEngine) -> None:
        super().__init__(tempfile.mkdtemp(), "rollout/0", parts(topology, ring))
        self.engine, self.behind = engine, LeftBehind(10.0)
        self.warned: list[str] = []
        self.intake = SampleIntake(ring, topology, self.name, engine, self.warn)
        self.pace = Pace(Path(tempfile.mkdtemp()), "rollout-0", lambda: None)
        self._last_bell = 1e18  # bells are rung by hand
        self.restart, self.refused = None, 0
        self.prober = Prober(topology, only_validates=True)

    def warn(self, where: str, text: str, severity: str = "warning", kind: str = "", uids: Any = ()) -> None:
        self.warned.append(text)

    def weights(self, version: int, step: int) -> None:
        published: Any = SimpleNamespace(fetch=lambda params: (version, step))
        self.intake.loaded(*self.engine.update_weights(published))

    def run(self, steps: int = 1000) -> None:
        """So many decoding steps, or until nothing is left."""
        for _ in range(steps):
            self.take()
            if not self.engine.active:
                return
            self._commit(self.engine.step())

    def _announce(self) -> None:
        pass


def says(answers: dict[int, str], seen: list[Request] | None = None) -> Any:
    """A script that says `answers[uid]`, from where the earlier segments ended; "$" ends the sequence."""

    def script(request: Request) -> Sequence[int]:
        if seen is not None:
            seen.append(request)
        ids = [EOS_ID if letter == "$" else ord(letter) for letter in answers[request.uid]]
        return ids[len(request.prefix_ids) :]

    return script


@pytest.fixture
def rings(tmp_path: Path) -> Iterator[list[Ring]]:
    """One ring as two processes see it."""
    name = f"busrl.test.{os.getpid()}.segments"
    ring = Ring.create(name, slots=8, slot_bytes=4096, processes=8, uuid=b"s" * 16)
    handles = [ring, Ring.attach(name)]
    fates = [Fates(str(tmp_path / f"{part}.bin"), create=True) for part in ("fates", "validate")]
    for index, ring in enumerate(handles):
        ring.register("rollout", f"rollout/{index}")
        ring.bind_fates(*fates)
    yield handles
    for ring in reversed(handles):
        ring.close()
    Ring.unlink(name)


def topology(**segments: Any) -> Topology:
    base = load(ROOT / "configs" / "quickstart.toml")
    generation = dataclasses.replace(base.generation, max_new_tokens=LIMIT)
    return dataclasses.replace(
        base, generation=generation, segments=Segments(**{"length": 4, "max_segments": 3, **segments})
    )


def in_waves(n_min: int) -> Topology:
    """Synchronous rounds of segments, of so many groups each."""
    base = topology(rounds="segments")
    learner = dataclasses.replace(base.learner, trigger=dataclasses.replace(base.learner.trigger, n_min=n_min))
    limits = derive("sync", n_min, 0, base.groups.size, waves=base.segments.waves)
    derived, weights = dataclasses.replace(base.derived, limits=limits), dataclasses.replace(base.weights, mode="sync")
    return dataclasses.replace(base, learner=learner, weights=weights, derived=derived)


def dispatch(ring: Ring, uids: Sequence[int], cls: int = 0, step: int = 0, version: int = 0) -> None:
    for uid in uids:
        sent = ring.dispatch(
            uid=uid, group=uid // 4, admission=uid % 100, member=uid % 4, group_size=4, cls=cls,
            task=b'{"prompt": "ab"}', prompt_crc=1, max_new_tokens=LIMIT, temperature=1.0, version=version, step=step,
            priority=-(uid % 100),
        )
        assert sent


def line(ring: Ring, uid: int) -> Any:
    lines = ring.lines()
    return lines[(lines["uid"] == uid) & (lines["state"] != State.FREE)][0]


def slot(ring: Ring, uid: int) -> int:
    lines = ring.lines()
    return int(((lines["uid"] == uid) & (lines["state"] != State.FREE)).nonzero()[0][0])


def shown(ring: Ring, uid: int) -> tuple[State, int, int, int]:
    """State, segments, finish and length of a sample."""
    values = line(ring, uid)
    return State(int(values["state"])), int(values["segs"]), int(values["finish"]), int(values["response_tokens"])


CASES = [  # what is said -> (segments, finish, tokens)
    ("abc$", 1, EOS, 4),  # the end comes with the segment's last token: no second segment
    ("ab$", 1, EOS, 3),
    ("abcd$", 2, EOS, 5),
    ("abcdefg$", 2, EOS, 8),
    ("abcdefghij$", 3, EOS, 11),
    ("abcdefghijk$", 3, EOS, 12),  # at the limit, and by itself
    ("abcdefghijkl$", 3, LENGTH, 12),  # the limit is reached: complete, and cut
    ("abcdefghijklmnopqrst", 3, LENGTH, 12),
]


@pytest.mark.parametrize(("said", "segments", "finish", "tokens"), CASES)
def test_an_answer_ends_by_itself_or_at_the_global_limit_only(
    rings: list[Ring], said: str, segments: int, finish: int, tokens: int
) -> None:
    ring, seen = rings[0], []
    worker = Worker(topology(), ring, PlannedEngine(4, script=says({0: said}, seen)))
    dispatch(ring, [0])
    worker.run()
    assert shown(ring, 0) == (State.GENERATED, segments, finish, tokens)
    whole = read_generated(ring, slot(ring, 0), "tokens", segments)
    assert whole.tolist() == [EOS_ID if c == "$" else ord(c) for c in said[:tokens]]
    assert np.array_equal(read_generated(ring, slot(ring, 0), "logprobs", segments), logprobs_of(whole))
    assert read_text(ring, slot(ring, 0), segments) == said[:tokens].removesuffix("$")
    assert [(r.segment, len(r.prefix_ids), r.max_new_tokens) for r in seen] == [
        (k, 4 * k, 4) for k in range(segments)
    ]  # each with the random stream of its own segment
    first, later = worker.intake.bell.take(), worker.intake.segment_bell.take()
    assert isinstance(first, m.DataGenerated) and first.status == "generated" and first.count == 1
    assert (later.count if isinstance(later, m.DataGenerated) else 0) == segments - 1


def test_the_unfinished_go_before_fresh_prompts_however_early_those_were_admitted(rings: list[Ring]) -> None:
    ring, seen = rings[0], []
    answers = dict.fromkeys(range(4), "abcdefgh$")
    worker = Worker(topology(), ring, PlannedEngine(1, script=says(answers, seen)))
    dispatch(ring, [3])
    worker.run(4)
    dispatch(ring, [0, 1, 2])
    worker.run()
    assert [(r.uid, r.segment) for r in seen] == [(3, 0), (3, 1), (3, 2), *((u, k) for u in range(3) for k in range(3))]


def test_any_worker_continues_another_answer_keeping_versions_and_log_probs(
    rings: list[Ring],
) -> None:
    here, there = rings
    answers = {0: "abcdefgh$"}
    first = Worker(topology(), here, PlannedEngine(1, script=says(answers)))
    two = Worker(topology(), there, PlannedEngine(1, script=says(answers)))
    dispatch(here, [0], step=0)
    first.run(4)
    assert shown(here, 0) == (State.QUEUED, 1, 0, 4)
    two.weights(3, 2)
    two.take()
    two.engine.step()
    two.weights(5, 4)  # in the middle of the segment
    two.run()
    assert shown(here, 0) == (State.GENERATED, 3, EOS, 9)
    assert read_generated(here, slot(here, 0), "versions", 3).tolist() == [0] * 4 + [3] + [5] * 4
    assert (int(line(here, 0)["version"]), int(line(here, 0)["step"])) == (0, 0)  # the oldest token counts


def test_a_segment_of_a_dead_maker_is_remade_and_committed_ones_stay(rings: list[Ring]) -> None:
    here, there = rings
    answers, seen = {0: "abcdefgh$"}, []
    first = Worker(topology(), here, PlannedEngine(1, script=says(answers)))
    dispatch(here, [0])
    first.run(4)
    [(at, word)] = here.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    here.put(at, word, "tokens", np.arange(3, dtype=np.int32), 1)  # half of a segment, never committed
    here.release(at, word, State.QUEUED)
    two = Worker(topology(), there, PlannedEngine(1, script=says(answers, seen)))
    two.run()
    assert [(r.segment, r.prefix_ids.tolist()) for r in seen] == [
        (1, [ord(c) for c in "abcd"]), (2, [ord(c) for c in "abcdefgh"])
    ]
    assert read_generated(here, at, "tokens", 3).tolist() == [*(ord(c) for c in "abcdefgh"), EOS_ID]


def test_an_answer_of_another_worker_kind_in_odd_pieces_reaches_its_limit(rings: list[Ring]) -> None:
    ring = rings[0]
    dispatch(ring, [0])
    worker = Worker(topology(), ring, PlannedEngine(1, script=says({0: "abcdefghijklmnop"})))
    for k in range(2):
        [(at, word)] = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
        ring.put(at, word, "prompt_ids", np.array([97, 98], np.int32))
        for name, kind in (("tokens", np.int32), ("logprobs", np.float32), ("versions", np.uint32)):
            ring.put(at, word, name, np.full(1, 97 if name == "tokens" else 0, kind), k)
        ring.commit_segment(at, word, False)
    worker.run()
    assert shown(ring, 0) == (State.GENERATED, 3, LENGTH, 12)


class Faulty(PlannedEngine):
    """The last log-probability of a segment is none."""

    def step(self) -> list[Finished]:
        return [dataclasses.replace(done, logprobs=done.logprobs * np.nan) for done in super().step()]


def test_an_answer_with_a_broken_log_probability_ends_without_continuation(
    rings: list[Ring],
) -> None:
    ring = rings[0]
    worker = Worker(topology(), ring, Faulty(1, script=says({0: "abcdefgh$"})))
    dispatch(ring, [0])
    worker.run()
    assert shown(ring, 0) == (State.GENERATED, 1, LENGTH, 4)


def test_an_answer_that_fills_the_engine_ends_there(rings: list[Ring]) -> None:
    ring = rings[0]
    worker = Worker(topology(), ring, PlannedEngine(1, max_length=2 + 8, script=says({0: "abcdefghijklmn"})))
    dispatch(ring, [0])
    worker.run()
    assert shown(ring, 0) == (State.GENERATED, 2, LENGTH, 8) and not worker.warned


def test_validation_answers_are_made_in_one_go_up_to_the_same_limit(rings: list[Ring]) -> None:
    ring, uid = rings[0], 1 << 62
    worker = Worker(topology(), ring, PlannedEngine(1, script=says({uid: "abcdefghijklmnop"})))
    dispatch(ring, [uid], cls=1)
    worker.run()
    assert shown(ring, uid) == (State.GENERATED, 1, LENGTH, LIMIT)


def test_with_last_segment_age_counts_from_when_the_trained_segment_was_queued(rings: list[Ring]) -> None:
    ring = rings[0]
    worker = Worker(topology(loss="last_segment"), ring, PlannedEngine(1, script=says({0: "abcdef$"})))
    dispatch(ring, [0])
    worker.take()
    ring.set_header("version", 7)
    ring.set_header("version_step", 6)
    worker.weights(7, 6)  # tokens are of version 7, the admission is of version 0
    worker.run(4)
    assert shown(ring, 0)[:2] == (State.QUEUED, 1)
    assert (int(line(ring, 0)["version"]), int(line(ring, 0)["step"])) == (7, 6)
    worker.run()
    assert (int(line(ring, 0)["version"]), int(line(ring, 0)["step"])) == (7, 6)


def test_a_length_of_auto_follows_the_answers_and_says_so(
    rings: list[Ring], caplog: pytest.LogCaptureFixture
) -> None:
    ring = rings[0]
    cuts = SegmentCuts.of(topology(length="auto", max_segments=6))
    assert cuts.next(0, 0, LIMIT).tokens == LIMIT
    with caplog.at_level("INFO", "busrl"):
        for _ in range(100):
            cuts.finished(3)
    assert cuts.next(0, 0, LIMIT).tokens == 3 and "3 tokens now, 12 before" in caplog.text
    assert cuts.next(1, 0, LIMIT).tokens == LIMIT and ring  # validation is not cut


def test_a_group_in_segments_leaves_the_ring_with_the_bounds_of_each(rings: list[Ring]) -> None:
    ring = rings[0]
    answers = {0: "ab$", 1: "abcde$", 2: "abcdefghi$", 3: "abcdefghijklmn"}
    worker = Worker(topology(), ring, PlannedEngine(4, script=says(answers)))
    dispatch(ring, range(4))
    worker.run()
    for at, word in ring.take(State.GENERATED, State.REWARDING, cls=None, limit=4):
        ring.set(at, word, reward=float(at))
        ring.release(at, word, State.REWARDED)
    slots = [slot(ring, uid) for uid in range(4)]
    (claimed,) = claim_groups(ring, ring.lines(), [slots], lambda records: None)
    assert [record.segments for record in claimed.records] == [[], [4, 2], [4, 4, 2], [4, 4, 4]]
    assert [record.earlier for record in claimed.records] == [0, 4, 8, 8]
    assert [record.finish for record in claimed.records] == [EOS, EOS, EOS, LENGTH]


def test_in_rounds_of_segments_every_unfinished_answer_gets_one_segment_per_wave(rings: list[Ring]) -> None:
    ring, seen = rings[0], []
    answers = {0: "ab$", 1: "abcdefghi$", 2: "abcdef$"}
    worker = Worker(in_waves(1), ring, PlannedEngine(4, script=says(answers, seen)))
    waves, rounds = worker.intake.waves, []
    assert waves is not None
    for admission in range(3):
        dispatch(ring, [admission])
        worker.run()  # dispatched, but its round is not admitted whole
        assert not waves.over(ring.lines(), admission)
        ring.set_header("next_admission", admission + 1)
        assert not waves.over(ring.lines(), admission + 1)
        worker.run()
        rounds.append([(r.uid, r.segment) for r in seen])
        seen.clear()
        for at, word in ring.take(State.GENERATED, State.REWARDING, cls=None, limit=4):
            assert not waves.over(ring.lines(), admission + 1)  # it is being judged
            ring.release(at, word, State.REWARDED)
        assert waves.over(ring.lines(), admission + 1)
    ring.set_header("next_admission", 4)
    worker.run()
    rounds.append([(r.uid, r.segment) for r in seen])
    assert rounds == [[(0, 0)], [(1, 0)], [(1, 1), (2, 0)], [(1, 2), (2, 1)]]



def test_an_answer_without_memory_stays_claimed_until_memory_lets_it_commit(
    rings: list[Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch(rings[0], [1])
    worker = Worker(topology(), rings[0], PlannedEngine(1, script=says({1: "ab$"})))
    commit, tries = worker.intake.segments.commit, []

    def full_at_first(*args: Any, **keys: Any) -> Any:
        tries.append(shown(rings[0], 1)[0])
        if len(tries) == 1:
            raise ShmTooSmall("no memory is left")
        return commit(*args, **keys)

    def until_written(what: str, write: Any) -> bool:
        with pytest.raises(ShmTooSmall):
            write()
        assert list(worker.intake.claimed) == [slot(rings[0], 1)]
        write()
        return True

    monkeypatch.setattr(worker.intake.segments, "commit", full_at_first)
    monkeypatch.setattr(worker, "write_or_wait", until_written)
    worker.run()
    assert tries == [State.GENERATING] * 2 and shown(rings[0], 1) == (State.GENERATED, 1, EOS, 3)


def test_a_sample_needing_weights_published_during_its_claim_stays_queued(
    rings: list[Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = rings[0]
    derived = dataclasses.replace(topology().derived, limits=derive("sync", 1, 0, 4))
    worker = Worker(dataclasses.replace(topology(), derived=derived), ring, PlannedEngine(4, script=says({0: "ab$"})))
    worker.receiver = SimpleNamespace(newest=lambda: (0, 0))  # type: ignore[assignment]
    claim = worker.intake.claim

    def late(room: int) -> tuple[list[tuple[int, int]], bool]:
        """The learner publishes, and the scheduler dispatches, between the look at the version and the claim."""
        ring.set_header(HeaderWord.VERSION_STEP, 1)
        ring.set_header(HeaderWord.VERSION, 1)
        dispatch(ring, [0], step=1, version=1)
        return claim(room)

    monkeypatch.setattr(worker.intake, "claim", late)
    assert not worker.take() and shown(ring, 0)[0] == State.QUEUED
    monkeypatch.undo()
    assert not worker.take(), "it has the old weights still"
    worker.weights(1, 1)
    worker.run()
    assert shown(ring, 0) == (State.GENERATED, 1, EOS, 3) and line(ring, 0)["step"] == 1


@pytest.mark.parametrize(("said", "wrong"), [("abz$", 1), ("zbz$", 2), ("abcdez$", 1)])  # the last: in a later segment
def test_an_answer_with_an_invalid_token_id_is_dropped_and_named(
    rings: list[Ring], tmp_path: Path, said: str, wrong: int
) -> None:
    ring, base = rings[0], topology()
    letters = {chr(code): code for code in range(ord("z"))}  # all but the last letter
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128, "eos_token_id": EOS_ID}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": letters}}))
    known = dataclasses.replace(base, model=dataclasses.replace(base.model, path=str(tmp_path)))
    worker = Worker(known, ring, PlannedEngine(4, script=says({0: said, 1: "abc$"})))
    dispatch(ring, [0, 1])
    worker.run()
    lines = ring.lines()
    assert lines["uid"][np.isin(lines["state"], (State.GENERATED, State.QUEUED))].tolist() == [1]
    assert shown(ring, 1)[0] == State.GENERATED
    assert worker.warned == [
        f"sample 0 is dropped: {wrong} of its ids stand for no token of the tokenizer, the first is {ord('z')} "
        '(engine = "torch" of rollout/0 drew them)'
    ]


def test_an_invalid_token_id_is_found_before_the_reward_whoever_wrote_it(
    rings: list[Ring], tmp_path: Path
) -> None:
    """Programs that map the ring commit answers themselves: here a worker whose folder has no tokenizer."""
    ring = rings[0]
    worker = Worker(topology(), ring, PlannedEngine(4, script=says({0: "abz$", 1: "abc$", 2: "abcdez$"})))
    dispatch(ring, [0, 1, 2])
    worker.run()
    judge: Any = Reward(tmp_path, "reward/0", parts(ring=ring))
    judge.claimed, judge.wants_ids, judge.bell = {}, False, Doorbell()
    judge.known, said = TokenRows(end=ord("z"), rows=128), []
    judge.warn = lambda where, text, **more: said.append(text)
    items = judge.items(list(ring.take(State.GENERATED, State.REWARDING, cls=None, limit=8)))
    assert [item.completion for item in items] == ["abc"]
    why = "1 of its ids stand for no token of the tokenizer, the first is 122"
    assert sorted(said) == [f"sample {uid} is dropped: {why}" for uid in (0, 2)]


def crowded(tmp_path: Path, limit: int | str, lengths: Sequence[int]) -> Topology:
    """Prompts of so many letters, which are tokens, and room for `limit` or for what "auto" came to."""
    base = topology()
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{"a" * length}"}}\n' for length in lengths))
    return dataclasses.replace(
        base, generation=dataclasses.replace(base.generation, max_prompt_tokens=limit),
        data=dataclasses.replace(base.data, train=str(tmp_path / "train.jsonl")),
        derived=dataclasses.replace(base.derived, prompt_tokens=20),
    )


@pytest.mark.parametrize(("limit", "said"), [
    (20, "generation.max_prompt_tokens is 20"),
    ("auto", '"auto" made room for 20, as `busrl check` counts them'),
])
def test_a_rollout_does_not_start_without_a_prompt_fitting_its_engine(
    rings: list[Ring], tmp_path: Path, limit: int | str, said: str
) -> None:
    worker = Worker(crowded(tmp_path, limit, [24, 30, 22]), rings[0], PlannedEngine(4))
    with pytest.raises(UserError) as refused:
        worker.intake.require_room()
    counted = f'by the tokenizer of engine = "torch" of rollout/0 the first 3 of {tmp_path}/train.jsonl have 22 to 30'
    remedy = "give generation.max_prompt_tokens a number that fits them"
    assert str(refused.value) == f"no prompt fits: {counted} tokens, and {said}; {remedy}"


def test_a_rollout_starts_where_one_prompt_fits_or_none_can_be_read(rings: list[Ring], tmp_path: Path) -> None:
    for lengths in ([24, 20, 22], []):
        Worker(crowded(tmp_path, 20, lengths), rings[0], PlannedEngine(4)).intake.require_room()
    (tmp_path / "train.jsonl").unlink()  # as on another host
    Worker(topology(), rings[0], PlannedEngine(4)).intake.require_room()


def test_an_overlong_prompt_is_named_by_what_the_user_wrote(rings: list[Ring], tmp_path: Path) -> None:
    worker = Worker(crowded(tmp_path, "auto", [3]), rings[0], PlannedEngine(4, script=says({0: "a$"})))
    worker.topology = worker.intake.topology = dataclasses.replace(
        worker.topology, derived=dataclasses.replace(worker.topology.derived, prompt_tokens=1))
    dispatch(rings[0], [0])
    worker.run()
    limit = '"auto" made room for 1, as `busrl check` counts them'
    assert worker.warned == [f"sample 0 is dropped: its prompt has 2 tokens; {limit}"]
