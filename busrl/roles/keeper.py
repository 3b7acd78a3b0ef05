"""The keeper: takes back what dead processes held, completes their half-done drops, and serves remote workers.

Talks to the ring. Any process may reap at any time; the keeper only makes it prompt. It clears the validation hold of a
dead validator, and reports on the bus and in errors.jsonl what was taken back and from which process. Knows nothing of
prompts or tokens.

It is also the gateway for workers that do not map the ring: requests come from the bus, `busrl.gateway.desk` decides
(its head says why the wire is the bus and what holds under loss and death), and `RingLedger` claims, writes and commits
in the names of the workers. Those claims stand in REMOTE entries of the process table, which the keeper's death does
not touch. `gateway.json` holds the counts that `busrl status` shows.

- A stand-in (a handle that acts for a REMOTE entry) is refused by the ring as soon as another worker has the entry, so
  nothing is written in a wrong name.
- A reward that was claimed `MOST_TRIES` times and never came is an accident (H), as with local workers.
- Nothing that arrives can end the keeper: what cannot be read is answered where its sender is known, and counted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from busrl import files
from busrl.bus import Endpoint
from busrl.config import Topology
from busrl.config.machine import model_facts
from busrl.config.rules import RESERVE_PROCESSES
from busrl.errors import MessageTooLarge
from busrl.gateway.desk import BAD, Desk, GatewaySettings, Tally
from busrl.gateway.ledger import Answer, AnswerLimits, Claim, ClaimGone, NoRoom, RemoteWorker, tensor
from busrl.paths import RunPaths
from busrl.protocol import Fault, Rejected, address, is_address, kind_of
from busrl.protocol import gateway as g
from busrl.protocol import messages as m
from busrl.ring import (
    UID_NONE,
    FateRefused,
    NotOwner,
    Ring,
    RingError,
    RingFull,
    SlotTooSmall,
    State,
    segments_of,
    seq_of,
    state_of,
)
from busrl.ring.locks import taken_back
from busrl.roles import version_pin
from busrl.roles.actor import Actor, Doorbell
from busrl.roles.segments import SegmentCuts, take_queued
from busrl.roles.trajectory import (
    Generated,
    read_generated,
    read_task,
    read_text,
    write_parts,
    write_segment,
    write_text,
)
from busrl.states import Fate, HeaderWord
from busrl.weights.base import VersionSteps

log = logging.getLogger("busrl")
WORKS_IN = {"rollout": (State.QUEUED, State.GENERATING), "reward": (State.GENERATED, State.REWARDING)}
RESTS_IN = {State.GENERATING: State.QUEUED, State.REWARDING: State.GENERATED}
ALONE = 1 << 31  # of the field `flags`: the claimer holds nothing else
MOST_TRIES = 3
ANY_ATTEMPT = 255
TENSORS = ("tokens", "logprobs", "versions")
SAVE_EVERY_S = 1.0
MOST_NAMED = 16
CODES = {
    Fault.MALFORMED: "malformed",
    Fault.UNKNOWN_TYPE: "malformed",
    Fault.WRONG_VERSION: "version",
    Fault.OVERSIZE: "oversize",
}
POISON_DEATHS = 2
LOOK_EVERY_S = 0.02  # requests may come by the thousand; the dead are looked for at most so often
Warn = Callable[[str, str, str, str, Sequence[int]], None]  # where, text, severity, kind, samples


# -- the gateway's ledger on the ring ----------------------


class RingLedger:
    """A `RemoteLedger` on the ring of this process. `announce` rings the doorbell that the worker itself would ring."""

    def __init__(
        self, ring: Ring, steps: VersionSteps, announce: Callable[[m.Message], None], cuts: SegmentCuts
    ) -> None:
        self.ring, self.steps, self.announce, self.cuts = ring, steps, announce, cuts
        self._hands: dict[int, Ring] = {}

    # -- entries --------------------------------------------------------------------------------------------------

    def members(self) -> list[RemoteWorker]:
        return [RemoteWorker(p.index, p.role, p.label, p.life) for p in self.ring.processes() if p.remote]

    def held(self) -> list[tuple[int, Claim]]:
        remote = [member.index for member in self.members()]
        lines = self.ring.lines()
        theirs = np.isin(lines["state"], list(RESTS_IN)) & np.isin(lines["owner"], remote)
        return [(int(lines["owner"][slot]), _claim(slot, lines[slot])) for slot in theirs.nonzero()[0].tolist()]

    def enter(self, role: str, name: str, life: int) -> int:
        try:
            return self.ring.enter_remote(role, name, life=life)
        except RingFull as problem:
            raise NoRoom(str(problem)) from None

    def leave(self, index: int) -> None:
        hand = self._hands.pop(index, None)
        if hand is not None:
            hand.close()
        self.ring.leave_remote(index)

    def show(self, index: int, tasks: int) -> None:
        hand = self._hand(index)
        hand.activity(f"remote, holds {tasks}")
        hand.progress()

    def _hand(self, index: int) -> Ring:
        if index not in self._hands:
            self._hands[index] = self.ring.stand_in(index)
        return self._hands[index]

    # -- claims ---------------------------------------------------------------------------------------------------

    def take(self, index: int, role: str, limit: int, idle: bool) -> list[Claim]:
        """As a local worker claims: a sample that was tried before goes only to a worker that holds nothing else."""
        hand, (rest, work) = self._hand(index), WORKS_IN[role]
        if role == "reward":
            taken = hand.take(rest, work, cls=None, limit=limit, max_attempt=1)
        else:
            taken = take_queued(hand, self.cuts.waves, limit, 1)
        if not taken and idle and role == "rollout":
            taken = take_queued(hand, self.cuts.waves, 1, ANY_ATTEMPT)
            for slot, word in taken:
                hand.mark_alone(slot, word)
        return [_claim(slot, self.ring.line(slot)) for slot, _ in taken]

    def task(self, index: int, claim: Claim) -> g.Task | None:
        try:
            return self._task(claim)
        except (RingError, ValueError) as problem:
            log.warning("sample %d cannot be sent to a remote worker: %s", claim.uid, problem)
            self.drop(index, claim, Fate.MALFORMED)
            return None

    def _task(self, claim: Claim) -> g.Task:
        line, segments = self.ring.line(claim.slot), segments_of(claim.word)
        rewarding = state_of(claim.word) == State.REWARDING
        most, _ = (0, 0) if rewarding else self.most_tokens(claim)
        cut = self.cuts.next(int(line["cls"]), segments, most)
        return g.Task(
            task=claim.task, slot_id=claim.slot, seq=claim.seq, uid=claim.uid,
            record=read_task(self.ring, claim.slot).decode("utf-8", "replace"), segment=segments,
            attempt=int(line["attempt"]), max_new_tokens=most, temperature=float(line["temperature"]),
            top_p=float(line["top_p"]), version=self.ring.header(HeaderWord.VERSION),
            completion=read_text(self.ring, claim.slot, segments) if rewarding else "",
            tensors=self._tensors(claim.slot, segments), segment_tokens=0 if cut.last else cut.tokens,
        )

    def _tensors(self, slot: int, segments: int) -> dict[str, g.Tensor]:
        if not segments:
            return {}
        arrays = {name: read_generated(self.ring, slot, name, segments) for name in TENSORS}
        arrays["prompt_ids"] = self.ring.get(slot, "prompt_ids")
        return {name: tensor(array) for name, array in arrays.items()}

    def most_tokens(self, claim: Claim) -> tuple[int, int]:
        most = int(self.ring.line(claim.slot)["max_new_tokens"])
        return most - self._earlier(claim), segments_of(claim.word)

    def _earlier(self, claim: Claim) -> int:
        """Tokens of the committed segments."""
        segments = segments_of(claim.word)
        return len(read_generated(self.ring, claim.slot, "tokens", segments)) if segments else 0

    # -- ends -----------------------------------------------------------------------------------------------------

    def commit_answer(self, index: int, claim: Claim, answer: Answer) -> None:
        hand, slot, word = self._hand(index), claim.slot, claim.word
        segment, whole = segments_of(word), self._whole(claim, answer)
        try:
            if answer.prompt_ids is not None:
                hand.put(slot, word, "prompt_ids", answer.prompt_ids)
            write_segment(hand, slot, word, segment, Generated(answer.tokens, answer.logprobs, answer.versions))
            if whole:
                write_text(hand, slot, word, segment, answer.text)
        except SlotTooSmall as problem:
            raise NoRoom(str(problem)) from None
        except NotOwner:
            raise ClaimGone from None
        notes = self._notes(hand, claim, answer, whole)
        hand.set(slot, word, **notes)
        done = _moved(hand.commit_segment(slot, word, whole))
        hand.add(tokens=len(answer.tokens), samples=int(whole))
        if whole:
            self.cuts.finished(notes["response_tokens"])
        version, status = int(answer.versions[-1]), "generated" if whole else "segment"
        self.announce(m.DataGenerated(slot_id=slot, seq=seq_of(done), uid=claim.uid, version=version, status=status))

    def _whole(self, claim: Claim, answer: Answer) -> bool:
        """Whether the answer ends with this segment; `NoRoom` where it must end but has done = false."""
        left, segment = self.most_tokens(claim)
        if answer.done or len(answer.tokens) >= left:
            return True
        if segment + 1 < self.cuts.plan.most:
            return False
        raise NoRoom(
            f"segment {segment} is the last that an answer may have here (segments.max_segments = "
            f"{self.cuts.plan.most}, 1 with segments off): send the answer to its end, with done = true"
        )

    def _notes(self, hand: Ring, claim: Claim, answer: Answer, whole: bool) -> dict[str, Any]:
        """Fields of the line. The oldest version is that of admission, or of older weights that made a token."""
        line = self.ring.line(claim.slot)
        version, step, oldest = int(line["version"]), int(line["step"]), int(answer.versions.min())
        if oldest < version:
            version, step = oldest, min(step, self.steps.step_of(oldest))
        if not whole and self.cuts.trains_last_only:  # as if it were admitted now: what is trained is still to come
            step, version = self.ring.header(HeaderWord.VERSION_STEP), self.ring.header(HeaderWord.VERSION)
        return {
            "version": version, "step": step, "finish": answer.finish if whole else 0,
            "response_tokens": self._earlier(claim) + len(answer.tokens),
            "prompt_tokens": len(hand.get(claim.slot, "prompt_ids")),
        }

    def commit_reward(self, index: int, claim: Claim, reward: float, parts: dict[str, float]) -> None:
        hand, slot, word = self._hand(index), claim.slot, claim.word
        try:
            write_parts(hand, slot, word, parts)
            hand.set(slot, word, reward=reward, reward_parts=1)
        except SlotTooSmall as problem:
            raise NoRoom(str(problem)) from None
        except NotOwner:
            raise ClaimGone from None
        done = _moved(hand.release(slot, word, State.REWARDED))
        hand.add(samples=1)
        self.announce(m.RewardComputed(slot_id=slot, seq=seq_of(done), uid=claim.uid, reward=reward))

    def give_back(self, index: int, claim: Claim) -> None:
        self._hand(index).release(claim.slot, claim.word, RESTS_IN[state_of(claim.word)])

    def expire(self, index: int, claim: Claim) -> bool:
        rewarding = state_of(claim.word) == State.REWARDING
        if rewarding and int(self.ring.line(claim.slot)["attempt"]) + 1 >= MOST_TRIES:
            self.drop(index, claim, Fate.REWARD_HUNG)
            return True
        self._hand(index).expire(claim.slot, claim.word)
        return False

    def drop(self, index: int, claim: Claim, fate: Fate) -> None:
        self._hand(index).drop(claim.slot, claim.word, fate)
        if state_of(claim.word) == State.REWARDING:  # the learner looks at its group again
            self.announce(m.RewardComputed(slot_id=claim.slot, seq=claim.seq, uid=claim.uid))

    def committed(self, slot: int, seq: int, uid: int) -> bool:
        if slot >= self.ring.n_slots or uid == UID_NONE:
            return False
        line = self.ring.line(slot)
        return int(line["uid"]) == uid and int(line["last_commit_seq"]) == seq


def _claim(slot: int, line: np.void) -> Claim:
    word = int(line["word"])
    return Claim(slot, word, seq_of(word), int(line["uid"]), bool(int(line["flags"]) & ALONE))


def _moved(word: int) -> int:
    if not word:
        raise ClaimGone
    return word


# -- the gateway's side of the bus ------------------------


class Gateway:
    """`handle` every message of a subscribed kind, `tick` in every pass, `close` at an orderly end."""

    def __init__(self, ring: Ring, bus: Endpoint, paths: RunPaths, topology: Topology, warn: Warn) -> None:
        self.ring, self.bus, self.paths, self.warn = ring, bus, paths, warn
        self.steps = VersionSteps()
        self.tally = Tally(read_counts(paths.gateway))
        self._bells: dict[type[m.Message], Doorbell] = {m.DataGenerated: Doorbell(), m.RewardComputed: Doorbell()}
        book = RingLedger(ring, self.steps, self._announce, SegmentCuts.of(topology))
        self.desk = Desk(book, settings_of(topology), self.tally, time.monotonic())
        self._prompt_tokens = topology.max_prompt_tokens
        self._vocabulary = model_facts(Path(topology.model.path)).vocabulary
        self._next_save = 0.0
        self._named: set[str] = set()
        self._look_at_version()
        bus.on_reject = self._unreadable

    def handle(self, message: m.Message) -> None:
        """A request, or a heartbeat of any worker."""
        now = time.monotonic()
        if isinstance(message, g.Remote):
            self._look_at_version()
            answers = self.desk.handle(message, now)
            self._warn_of_drop(message, answers)
            self._send(message.sender, answers)
        elif isinstance(message, m.Heartbeat):
            self.desk.heartbeat(message.sender, now)

    def tick(self) -> None:
        """Ring for what was committed, end leases that are over, and save the counts now and then."""
        self._ring_bells()
        now = time.monotonic()
        self._look_at_version()
        for lease in self.desk.tick(now):
            text = f"sample {lease.claim.uid} was taken back from {lease.name}, which did not extend its lease"
            self.warn("gateway", text, "warning", f"lease of {lease.name}", [lease.claim.uid])
        if self.tally.changed and now >= self._next_save:
            self._next_save = now + SAVE_EVERY_S
            self._save()

    def close(self) -> None:
        """Take every claim back and save the counts."""
        self.desk.goodbye()
        if self.tally.workers:
            self._save()

    def _announce(self, message: m.Message) -> None:
        self._bells[type(message)].add(lambda: message)

    def _ring_bells(self) -> None:
        """Announce what was committed in this pass, by one doorbell of each kind."""
        for bell in self._bells.values():
            message = bell.take()
            if message is not None:
                self.bus.send(message)

    def _warn_of_drop(self, message: g.Remote, answers: list[m.Message]) -> None:
        """Report a sample that a worker gave up."""
        done = any(isinstance(answer, g.GatewayAnswer) and answer.code == "done" for answer in answers)
        if isinstance(message, g.RemoteFail) and message.drop and done:
            text = f"task {message.task} was given up by {message.sender}: {message.drop}: {message.text}"
            self.warn("gateway", text, "warning", f"{message.drop} {message.sender}", uids_of(message.task))

    def _look_at_version(self) -> None:
        step, version = self.ring.header(HeaderWord.VERSION_STEP), self.ring.header(HeaderWord.VERSION)
        self.steps.add(version, step)
        self.desk.limits = AnswerLimits(self._prompt_tokens, self._vocabulary, version)

    def _unreadable(self, rejected: Rejected, target: bytes) -> None:
        about = target.decode("ascii", "replace")
        name = about.partition("/")[0]
        try:
            asked = issubclass(kind_of(f"{name}/"), g.Remote)
        except ValueError:
            return
        if asked:
            code = CODES[rejected.fault]
            self._send(rejected.sender, self.desk.unreadable(rejected.sender, code, name, str(rejected)))

    def _send(self, to: str, answers: list[m.Message]) -> None:
        for answer in answers:
            if isinstance(answer, g.GatewayAnswer) and answer.code in BAD:
                text = f"{to or 'an unnamed sender'}: {answer.text}"
                self.warn("gateway", text, "warning", f"{answer.code} {self._line_of(to)}", ())
            if not is_address(to):
                return  # no topic can hold the name: the request was counted, and an answer would reach no process
            try:
                self.bus.send(answer, to)
            except MessageTooLarge as problem:
                self.tally.add(to, "too_large", text=str(problem))

    def _line_of(self, name: str) -> str:
        """The first refused names have lines of their own in errors.jsonl; all others share one."""
        if len(self._named) < MOST_NAMED:
            self._named.add(name)
        return name if name in self._named else "(others)"

    def _save(self) -> None:
        self.tally.changed = False
        files.show(self.paths.gateway, {"workers": self.tally.plain()})


def settings_of(topology: Topology) -> GatewaySettings:
    """What the desk needs of a topology. Remote workers never take the entries that the run itself may need."""
    data = topology.data
    return GatewaySettings(
        lease_s=topology.limits.lease_s,
        max_message_bytes=topology.bus.max_message_bytes,
        biggest=topology.task_message_bytes,
        most_members=max(0, topology.ring.processes - len(topology.processes()) - RESERVE_PROCESSES),
        reserved=frozenset(address(p.name) for p in topology.processes() if not p.spec.command) | {"launch"},
        welcome=g.GatewayWelcome(
            life=0,
            max_prompt_tokens=topology.max_prompt_tokens,
            seed=topology.run.seed,
            model=topology.model.path,
            prompt_key=data.prompt_key,
            answer_key=topology.reward.answer_key or data.answer_key,
            template=data.template,
        ),
    )


def uids_of(task: str) -> list[int]:
    """The sample of a claim, from its name `slot.seq.uid`; none if it is no such name."""
    digits = task.rpartition(".")[2]
    return [int(digits)] if digits.isascii() and digits.isdigit() else []


def read_counts(path: Path) -> dict[str, Any]:
    """The counts in gateway.json by worker; empty where there are none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    workers = found.get("workers") if isinstance(found, dict) else None
    return workers if isinstance(workers, dict) else {}


# -- the role ----------------------------------------------


class Keeper(Actor):
    role = "keeper"
    singleton = True
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.Heartbeat, *g.REMOTE)
    tick_s: ClassVar[float] = 0.1

    def setup(self) -> None:
        self._next_look = 0.0
        self.gateway = Gateway(self.ring, self.bus, self.paths, self.topology, self.warn)

    def handle(self, message: m.Message) -> None:
        self.gateway.handle(message)

    def teardown(self) -> None:
        self.gateway.close()

    def step(self) -> bool:
        self.gateway.tick()
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_EVERY_S
        return self._look()

    def _look(self) -> bool:
        reaped = self.ring.reap()
        self._finish_drops()
        self._clear_hold()
        self._drop_poison()
        for text, uids in taken_back(self.ring, reaped):
            self.warn("keeper", text, uids=uids)
        return bool(reaped)

    def _finish_drops(self) -> None:
        """A slot whose uid names no sample cannot be settled: that costs the slot, not the keeper."""
        try:
            self.ring.finish_drops()
        except FateRefused as problem:
            self.warn("keeper", f"a dropped sample cannot be recorded, its slot is out of use: {problem}", "error")

    def _drop_poison(self) -> None:
        """Give up a sample that killed two workers which held nothing else; it is re-rolled as any accident."""
        lines = self.ring.lines()
        for slot in ((lines["state"] == State.QUEUED) & (lines["alone_deaths"] >= POISON_DEATHS)).nonzero()[0].tolist():
            if self.ring.drop(slot, int(lines["word"][slot]), Fate.POISON):
                uid = int(lines["uid"][slot])
                self.warn("keeper", f"sample {uid} is poison: two workers died on it alone", "error", uids=[uid])

    def _clear_hold(self) -> None:
        if version_pin.clear_stale(self.ring):
            self.warn("keeper", "cleared the validation hold of a dead process: publication continues")


def main(run_dir: str, name: str) -> int:
    return Keeper(run_dir, name).main()
