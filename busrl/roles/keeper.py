"""The gateway's ledger on the ring: what the keeper does in the name of workers that do not map it.

Talks to the ring through stand-ins (handles that act for a REMOTE entry) and announces commits by doorbells, which the
worker itself would ring if it could. Knows nothing of leases or of the bus.

- A stand-in is refused by the ring as soon as its entry is another's, so nothing is written in a wrong name.
- A reward that was claimed `MOST_TRIES` times and never came is an accident (H), as with workers of our own.

The keeper's side of the gateway: requests from the bus to the desk, its answers and doorbells back to the bus.

Talks to the bus, to the ring through `RemoteBook`, and to `gateway.json`, which `busrl status` shows. All decisions are
made by `busrl.gateway`, whose module `desk` says why the wire is the bus and what holds under loss and death. Knows
nothing of the keeper's other work.

- Nothing that arrives can end the keeper: what can not be read is answered by name where there is one, and counted.

The keeper reclaims what dead processes held and completes drops that they left half done, promptly.

Talks to the ring; in this it publishes nothing that anybody needs, and any process may do the same at any time: the
keeper only makes it prompt. Knows nothing of prompts or tokens. It clears the validation hold of a dead validator, and
says on the bus and in errors.jsonl what was reclaimed and from whom.

It is also the one gateway for workers that do not map the ring (`busrl.roles.keeper`): it claims, writes and commits
in their names. Those claims are not its own: they stand in REMOTE entries, which its death does not touch.
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
from busrl.gateway import BAD, Answer, Desk, Gone, Held, Limits, Member, Room, Settings, Tally
from busrl.gateway.checks import tensor
from busrl.paths import RunPaths
from busrl.protocol import Fault, Rejected, address, is_address, kind_of
from busrl.protocol import gateway as g
from busrl.protocol import messages as m
from busrl.ring import UID_NONE, FateRefused, NotOwner, Ring, RingError, RingFull, SlotTooSmall, State, state_of
from busrl.ring.locks import taken_back
from busrl.roles import version_pin
from busrl.roles.actor import Actor, Doorbell
from busrl.roles.segments import SegmentCuts, take_queued
from busrl.roles.trajectory import (
    Generated,
    read_generated,
    read_task,
    read_text,
    segments_of,
    seq_of,
    write_parts,
    write_segment,
    write_text,
)
from busrl.states import Fate, HeaderWord
from busrl.weights.base import VersionSteps

# -- The gateway's ledger on the ring: what the keeper does in the name of workers that do not map it -----------------


log = logging.getLogger("busrl")
WORKS_IN = {"rollout": (State.QUEUED, State.GENERATING), "reward": (State.GENERATED, State.REWARDING)}
RESTS_IN = {State.GENERATING: State.QUEUED, State.REWARDING: State.GENERATED}
ALONE = 1 << 31  # of the field `flags`: the claimer holds nothing else
MOST_TRIES = 3
ANY_ATTEMPT = 255
TENSORS = ("tokens", "logprobs", "versions")


class RemoteBook:
    """`busrl.gateway.Book` on a ring that this process is registered in. `announce` rings a doorbell."""

    def __init__(
        self, ring: Ring, steps: VersionSteps, announce: Callable[[m.Message], None], cuts: SegmentCuts
    ) -> None:
        self.ring, self.steps, self.announce, self.cuts = ring, steps, announce, cuts
        self._hands: dict[int, Ring] = {}

    # -- entries --------------------------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        return [Member(p.index, p.role, p.label, p.life) for p in self.ring.processes() if p.remote]

    def held(self) -> list[tuple[int, Held]]:
        remote = [member.index for member in self.members()]
        lines = self.ring.lines()
        theirs = np.isin(lines["state"], list(RESTS_IN)) & np.isin(lines["owner"], remote)
        return [(int(lines["owner"][slot]), self._held(slot, lines[slot])) for slot in theirs.nonzero()[0].tolist()]

    def enter(self, role: str, name: str, life: int) -> int:
        try:
            return self.ring.enter_remote(role, name, life=life)
        except RingFull as problem:
            raise Room(str(problem)) from None

    def leave(self, index: int) -> None:
        hand = self._hands.pop(index, None)
        if hand is not None:
            hand.close()
        self.ring.leave_remote(index)

    def heard(self, index: int, tasks: int) -> None:
        hand = self._hand(index)
        hand.activity(f"remote, holds {tasks}")
        hand.progress()

    def _hand(self, index: int) -> Ring:
        if index not in self._hands:
            self._hands[index] = self.ring.stand_in(index)
        return self._hands[index]

    # -- claims ---------------------------------------------------------------------------------------------------

    def take(self, index: int, role: str, limit: int, idle: bool) -> list[Held]:
        """As a worker of our own takes: a sample that was tried twice only by a worker that holds nothing else."""
        hand, (rest, work) = self._hand(index), WORKS_IN[role]
        if role == "reward":
            taken = hand.take(rest, work, cls=None, limit=limit, max_attempt=1)
        else:
            taken = take_queued(hand, self.cuts.waves, limit, 1)
        if not taken and idle and role == "rollout":
            taken = take_queued(hand, self.cuts.waves, 1, ANY_ATTEMPT)
            for slot, word in taken:
                hand.mark_alone(slot, word)
        return [self._held(slot, self.ring.line(slot)) for slot, _ in taken]

    def _held(self, slot: int, line: np.void) -> Held:
        word = int(line["word"])
        return Held(slot, word, seq_of(word), int(line["uid"]), bool(int(line["flags"]) & ALONE))

    def task(self, index: int, held: Held) -> g.Task | None:
        try:
            return self._task(held)
        except (RingError, ValueError) as problem:
            log.warning("sample %d can not be sent to a remote worker: %s", held.uid, problem)
            self.drop(index, held, Fate.MALFORMED)
            return None

    def _task(self, held: Held) -> g.Task:
        line, segments = self.ring.line(held.slot), segments_of(held.word)
        rewarding = state_of(held.word) == State.REWARDING
        most, _ = (0, 0) if rewarding else self.most_tokens(held)
        cut = self.cuts.next(int(line["cls"]), segments, most)
        return g.Task(
            task=held.task, slot_id=held.slot, seq=held.seq, uid=held.uid,
            record=read_task(self.ring, held.slot).decode("utf-8", "replace"), segment=segments,
            attempt=int(line["attempt"]), max_new_tokens=most, temperature=float(line["temperature"]),
            top_p=float(line["top_p"]), version=self.ring.header(HeaderWord.VERSION),
            completion=read_text(self.ring, held.slot, segments) if rewarding else "",
            tensors=self._tensors(held.slot, segments), segment_tokens=0 if cut.last else cut.tokens,
        )

    def _tensors(self, slot: int, segments: int) -> dict[str, g.Tensor]:
        if not segments:
            return {}
        arrays = {name: read_generated(self.ring, slot, name, segments) for name in TENSORS}
        arrays["prompt_ids"] = self.ring.get(slot, "prompt_ids")
        return {name: tensor(array) for name, array in arrays.items()}

    def most_tokens(self, held: Held) -> tuple[int, int]:
        segments = segments_of(held.word)
        done = len(read_generated(self.ring, held.slot, "tokens", segments)) if segments else 0
        return int(self.ring.line(held.slot)["max_new_tokens"]) - done, segments

    # -- ends -----------------------------------------------------------------------------------------------------

    def commit_answer(self, index: int, held: Held, answer: Answer) -> None:
        hand, slot, word = self._hand(index), held.slot, held.word
        segment, whole = segments_of(word), self._whole(held, answer)
        try:
            if answer.prompt_ids is not None:
                hand.put(slot, word, "prompt_ids", answer.prompt_ids)
            write_segment(hand, slot, word, segment, Generated(answer.tokens, answer.logprobs, answer.versions))
            if whole:
                write_text(hand, slot, word, segment, answer.text)
        except SlotTooSmall as problem:
            raise Room(str(problem)) from None
        except NotOwner:
            raise Gone from None
        notes = self._notes(hand, held, answer, whole)
        hand.set(slot, word, **notes)
        done = _moved(hand.commit_segment(slot, word, whole))
        hand.add(tokens=len(answer.tokens), samples=int(whole))
        if whole:
            self.cuts.finished(notes["response_tokens"])
        version, status = int(answer.versions[-1]), "generated" if whole else "segment"
        self.announce(m.DataGenerated(slot_id=slot, seq=seq_of(done), uid=held.uid, version=version, status=status))

    def _whole(self, held: Held, answer: Answer) -> bool:
        """Whether the answer ends with this segment; `Room` where it must but says that it does not."""
        left, segment = self.most_tokens(held)
        if answer.done or len(answer.tokens) >= left:
            return True
        if segment + 1 < self.cuts.plan.most:
            return False
        raise Room(
            f"segment {segment} is the last that an answer may have here (segments.max_segments = "
            f"{self.cuts.plan.most}, 1 with segments off): send the answer to its end, with done = true"
        )

    def _notes(self, hand: Ring, held: Held, answer: Answer, whole: bool) -> dict[str, Any]:
        """Fields of the line. The oldest version is that of admission, or of older weights that made a token."""
        line, earlier = self.ring.line(held.slot), 0
        if segments := segments_of(held.word):
            earlier = len(read_generated(self.ring, held.slot, "tokens", segments))
        version, step, oldest = int(line["version"]), int(line["step"]), int(answer.versions.min())
        if oldest < version:
            version, step = oldest, min(step, self.steps.step_of(oldest))
        if not whole and self.cuts.trains_last_only:  # as if it were admitted now: what is trained is still to come
            step, version = self.ring.header(HeaderWord.VERSION_STEP), self.ring.header(HeaderWord.VERSION)
        return {
            "version": version, "step": step, "finish": answer.finish if whole else 0,
            "response_tokens": earlier + len(answer.tokens),
            "prompt_tokens": len(hand.get(held.slot, "prompt_ids")),
        }

    def commit_reward(self, index: int, held: Held, reward: float, parts: dict[str, float]) -> None:
        hand, slot, word = self._hand(index), held.slot, held.word
        try:
            write_parts(hand, slot, word, parts)
            hand.set(slot, word, reward=reward, reward_parts=1)
        except SlotTooSmall as problem:
            raise Room(str(problem)) from None
        except NotOwner:
            raise Gone from None
        done = _moved(hand.release(slot, word, State.REWARDED))
        hand.add(samples=1)
        self.announce(m.RewardComputed(slot_id=slot, seq=seq_of(done), uid=held.uid, reward=reward))

    def give_back(self, index: int, held: Held) -> None:
        self._hand(index).release(held.slot, held.word, RESTS_IN[state_of(held.word)])

    def expire(self, index: int, held: Held) -> bool:
        rewarding = state_of(held.word) == State.REWARDING
        if rewarding and int(self.ring.line(held.slot)["attempt"]) + 1 >= MOST_TRIES:
            self.drop(index, held, Fate.REWARD_HUNG)
            return True
        self._hand(index).expire(held.slot, held.word)
        return False

    def drop(self, index: int, held: Held, fate: Fate) -> None:
        self._hand(index).drop(held.slot, held.word, fate)
        if state_of(held.word) == State.REWARDING:  # whoever waits for its group should look
            self.announce(m.RewardComputed(slot_id=held.slot, seq=held.seq, uid=held.uid))

    def committed(self, slot: int, seq: int, uid: int) -> bool:
        if slot >= self.ring.n_slots or uid == UID_NONE:
            return False
        line = self.ring.line(slot)
        return int(line["uid"]) == uid and int(line["last_commit_seq"]) == seq


def _moved(word: int) -> int:
    if not word:
        raise Gone
    return word


# -- The keeper's side of the gateway: requests from the bus to the desk, its answers and doorbells back to the bus ---


SAVE_EVERY_S = 1.0
MOST_NAMED = 16
CODES = {
    Fault.MALFORMED: "malformed",
    Fault.UNKNOWN_TYPE: "malformed",
    Fault.WRONG_VERSION: "version",
    Fault.OVERSIZE: "oversize",
}
Warn = Callable[[str, str, str, str, Sequence[int]], None]  # where, text, severity, kind, samples


class Gateway:
    """`handle` every message of a subscribed kind, `tick` in every pass, `close` at an orderly end."""

    def __init__(self, ring: Ring, bus: Endpoint, paths: RunPaths, topology: Topology, warn: Warn) -> None:
        self.ring, self.bus, self.paths, self.warn = ring, bus, paths, warn
        self.steps = VersionSteps()
        self.tally = Tally(read_counts(paths.gateway))
        self._bells: dict[type[m.Message], Doorbell] = {m.DataGenerated: Doorbell(), m.RewardComputed: Doorbell()}
        book = RemoteBook(ring, self.steps, self._announce, SegmentCuts.of(topology))
        self.desk = Desk(book, settings_of(topology), self.tally, time.monotonic())
        self._prompt_tokens = topology.max_prompt_tokens
        self._vocabulary = model_facts(Path(topology.model.path)).vocabulary
        self._next_save = 0.0
        self._named: set[str] = set()
        self._look_at_version()
        bus.on_reject = self._unreadable

    def handle(self, message: m.Message) -> None:
        """A request, or any worker's sign of life."""
        now = time.monotonic()
        if isinstance(message, g.Remote):
            self._look_at_version()
            answers = self.desk.handle(message, now)
            self._tell_drop(message, answers)
            self._send(message.sender, answers)
        elif isinstance(message, m.Heartbeat):
            self.desk.heartbeat(message.sender, now)

    def tick(self) -> None:
        """Ring for what was committed, end leases that are over, and save the counts now and then."""
        self._ring_bells()
        now = time.monotonic()
        self._look_at_version()
        for lease in self.desk.tick(now):
            text = f"sample {lease.held.uid} was taken back from {lease.name}, which did not extend its lease"
            self.warn("gateway", text, "warning", f"lease of {lease.name}", [lease.held.uid])
        if self.tally.changed and now >= self._next_save:
            self._next_save = now + SAVE_EVERY_S
            self._save()

    def close(self) -> None:
        """Nobody holds anything after an orderly end."""
        self.desk.goodbye()
        if self.tally.workers:
            self._save()

    def _announce(self, message: m.Message) -> None:
        self._bells[type(message)].add(lambda: message)

    def _ring_bells(self) -> None:
        """What was committed in this pass, as one doorbell of each kind."""
        for bell in self._bells.values():
            message = bell.take()
            if message is not None:
                self.bus.send(message)

    def _tell_drop(self, message: g.Remote, answers: list[m.Message]) -> None:
        """A sample that was given up is an accident that a person should read about."""
        if isinstance(message, g.RemoteFail) and message.drop:
            for answer in answers:
                if isinstance(answer, g.GatewayAnswer) and answer.code == "done":
                    text = f"task {message.task} was given up by {message.sender}: {message.drop}: {message.text}"
                    self.warn("gateway", text, "warning", f"{message.drop} {message.sender}", uids_of(message.task))

    def _look_at_version(self) -> None:
        step, version = self.ring.header(HeaderWord.VERSION_STEP), self.ring.header(HeaderWord.VERSION)
        self.steps.add(version, step)
        self.desk.limits = Limits(self._prompt_tokens, self._vocabulary, version)

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
                self.warn("gateway", text, "warning", f"{answer.code} {self._told_apart(to)}", ())
            if not is_address(to):
                return  # a name that no topic can hold: it was counted, and nobody can hear the answer
            try:
                self.bus.send(answer, to)
            except MessageTooLarge as problem:
                self.tally.add(to, "too_large", text=str(problem))

    def _told_apart(self, name: str) -> str:
        """The first names that were refused something have lines of their own in errors.jsonl; all others share one."""
        if len(self._named) < MOST_NAMED:
            self._named.add(name)
        return name if name in self._named else "(others)"

    def _save(self) -> None:
        self.tally.changed = False
        files.show(self.paths.gateway, {"workers": self.tally.plain()})


def settings_of(topology: Topology) -> Settings:
    """What the desk needs of a topology. Workers from outside never take the entries that the run itself may need."""
    data = topology.data
    return Settings(
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


# -- The keeper reclaims what dead processes held and completes drops that they left half done, promptly --------------


POISON_DEATHS = 2
LOOK_EVERY_S = 0.02  # requests may come by the thousand; the dead are looked for at most so often


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
        """A slot whose uid names no sample can not be settled: that costs the slot, not the keeper."""
        try:
            self.ring.finish_drops()
        except FateRefused as problem:
            self.warn("keeper", f"a dropped sample can not be recorded, its slot is out of use: {problem}", "error")

    def _drop_poison(self) -> None:
        """A prompt that killed two workers which held nothing else is given up; it is re-rolled as any accident."""
        lines = self.ring.lines()
        for slot in ((lines["state"] == State.QUEUED) & (lines["alone_deaths"] >= POISON_DEATHS)).nonzero()[0].tolist():
            if self.ring.drop(slot, int(lines["word"][slot]), Fate.POISON):
                uid = int(lines["uid"][slot])
                self.warn("keeper", f"sample {uid} is poison: two workers died on it alone", "error", uids=[uid])

    def _clear_hold(self) -> None:
        if version_pin.clear_stale(self.ring):
            self.warn("keeper", "cleared the validation hold of a dead process: publication goes on")


def main(run_dir: str, name: str) -> int:
    return Keeper(run_dir, name).main()
