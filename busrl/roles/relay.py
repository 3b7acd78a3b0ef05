"""The relay: at home it answers what other hosts ask for; on another host it keeps ring and weights up to date.

At home it talks to the ring's header (reading), the segment of weights and the hosts' relays. On a host it writes the
words of the local ring's header that engines go by, and the local segment. Knows nothing of samples.

- Words before weights, steps before versions: an engine may wait for weights, and a sample look too old, never too new.
- A version reaches engines whole or not at all; one that is overtaken on its way is given up for the newer one.
- A host whose home has another ring than the one it claimed from ends: its samples are nobody's.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections import deque
from collections.abc import Callable

import busrl
from busrl import keys
from busrl.bus.broker import CurveListener
from busrl.bus.link import Answering, Asked, Asking
from busrl.bus.security import relay_endpoint
from busrl.config import HostSource, of_host
from busrl.config.hosts import SILENT, claimed_from
from busrl.errors import PeerLost, WeightsRefused
from busrl.protocol import hosts as h
from busrl.roles.actor import Actor
from busrl.states import PAUSE_STARTING, HeaderWord, RunPhase
from busrl.weights.relay import SegmentCopy, Snapshot

log = logging.getLogger("busrl")
LOOK_S = 0.02
WAIT_S = 1.0  # for which home holds a question about the state
ANSWER_S = 2.5  # beyond that, before home counts as silent
AHEAD = 4  # pieces asked for at the same time
SHOWN = (HeaderWord.STEP, HeaderWord.VERSION_STEP, HeaderWord.VERSION, HeaderWord.GENERATION_PAUSE)
FAREWELL_S = 2.0  # in which hosts that were heard of lately are told that the run is over
LATELY_S = 10.0
LOOK_MEANWHILE_S = 0.5


class Relay(Actor):
    role = "relay"
    singleton = True

    def setup(self) -> None:
        self._side: Home | Away = Away(self) if self.topology.here else Home(self)

    def work(self) -> bool:
        return self._side.work()

    def idle(self, timeout_s: float) -> None:
        """The next pass waits at the other side's socket."""

    def teardown(self) -> None:
        self._side.close()


# -- at home -----


class Home:
    """Answers hosts: who may join with which topology, the state of the run, pieces of the newest weights."""

    def __init__(self, actor: Relay) -> None:
        self.actor, self.ring, self.topology = actor, actor.ring, actor.topology
        own = self.topology.bus
        place = relay_endpoint(own.endpoint)
        self.link = Answering(CurveListener(own.endpoint, keys.directory_of(own.keys), (place,)))
        self.weights = Snapshot(actor.paths.weights_file)
        self.claimed_from = claimed_from(actor.paths.run_json)
        self._waiting: dict[str, tuple[float, Asked]] = {}  # by host, its last question about the state
        self._seen: dict[str, float] = {}  # hosts, and when each last asked for the state
        self._fetching: dict[str, float] = {}  # those that asked for a piece since then, and when
        self._over, self._topology = False, zlib.crc32(self.topology.to_json().encode())

    def work(self) -> bool:
        for asked in self.link.waiting(LOOK_S):
            self._answer(asked)
        self._tell_changes()
        for refusal in self.link.listener.refusals():
            self.actor.warn("relay", str(refusal), kind=f"refused {refusal.address}")
        return True

    def close(self) -> None:
        """Where the run ends hosts learn of it first; one that does not ask in time finds out by its silence."""
        now, self._over = time.monotonic(), self.ring.header(HeaderWord.RUN_STATE) != RunPhase.RUNNING
        untold = {name for name, seen in self._seen.items() if self._over and now - seen < LATELY_S}
        while untold and time.monotonic() < now + FAREWELL_S:
            untold -= self._waiting.keys()
            self.work()
        self.weights.close()
        self.link.close()

    def state(self) -> h.HomeState:
        words = {word.value: self.ring.header(word) for word in SHOWN}
        pause = words.pop(HeaderWord.GENERATION_PAUSE.value)
        newest, _ = self.weights.newest()
        return h.HomeState(
            ring=self.claimed_from, over=self._over, topology=self._topology, pause=pause, weights=newest, **words
        )

    def _answer(self, asked: Asked) -> None:
        question = asked.question
        if (why := self._objection(asked)) is not None:
            self.actor.warn("relay", f"{asked.name}: {why.text}", kind=f"refused {asked.name}")
            self.link.answer(asked, why)
        elif isinstance(question, h.HostJoin):
            made = of_host(self.topology, question.host).to_json().encode()
            self.link.answer(asked, h.Welcome(topology=made, ring=self.claimed_from))
        elif isinstance(question, h.HostLook):
            self._seen[asked.name] = time.monotonic()
            self._waiting[asked.name] = time.monotonic() + min(question.wait_s, WAIT_S), asked
        elif isinstance(question, h.WeightsHead):
            self._head(asked, question.have)
        else:
            self._piece(asked, question)

    def _objection(self, asked: Asked) -> h.Refused | None:
        """Why this host cannot take part, whatever it asks for."""
        host, known = asked.question.host, self.topology.host_names
        if host not in known:
            text = f"no host {host!r} in this run: `hosts` of its [[process]] entries name {', '.join(known)}"
            return h.Refused(text=text)
        if asked.name != host:
            text = (f"the key is {asked.name}'s, the name {host}'s: make a key of its own with `busrl keys add {host}`,"
                    " or start it with the name that the key has")
            return h.Refused(text=text)
        if isinstance(asked.question, h.HostJoin) and asked.question.build != busrl.__version__:
            build = asked.question.build
            return h.Refused(
                text=f"this host has busrl {build}, the run's {busrl.__version__}: install the same on both"
            )
        return None

    def _head(self, asked: Asked, have: int) -> None:
        own, now = self.topology.weights.timeout_s, time.monotonic()
        others = any(now - at < own for name, at in self._fetching.items() if name != asked.name)
        with self.actor.activity("copy weights", self.topology.limits.work_s):
            taken = self.weights.take(refresh=not others)
        if taken is None or taken.version <= have:
            self.link.answer(asked, h.Refused(text="no newer version just now"))
            return
        head = h.Version(version=taken.version, step=taken.step, nbytes=len(taken.data), checksum=taken.checksum,
                         manifest=taken.manifest)
        self.link.answer(asked, head)

    def _piece(self, asked: Asked, question: h.WeightsPiece) -> None:
        found, end = self.weights.piece(question.version, question.at, question.size), question.at + question.size
        if found is None or self.weights.taken is None or end == len(self.weights.taken.data):
            self._fetching.pop(asked.name, None)  # it has asked for all
        else:
            self._fetching[asked.name] = time.monotonic()
        reply = h.Refused(text="overtaken") if found is None else h.Piece(version=question.version, at=question.at)
        self.link.answer(asked, reply, found)

    def _tell_changes(self) -> None:
        """Answer those whose state is not today's, and those that have waited long enough."""
        if not self._waiting:
            return
        now, state = time.monotonic(), self.state()
        for name, (until, asked) in list(self._waiting.items()):
            known = asked.question.known if isinstance(asked.question, h.HostLook) else None
            if known != state or not now < until:
                del self._waiting[name]
                self.link.answer(asked, h.State(state=state))


# -- on another host -----


class Away:
    """Mirrors the state of the run, then fetches weights that are newer than those here."""

    def __init__(self, actor: Relay) -> None:
        self.actor, self.ring, self.topology = actor, actor.ring, actor.topology
        source = HostSource.read(actor.paths.host_source)
        self.claimed_from = source.ring
        self.link = Asking(relay_endpoint(source.endpoint), source.client, source.name)
        self.weights = SegmentCopy(actor.paths.weights_file)
        self.piece = self.topology.hosts.piece_mb << 20
        self.state: h.HomeState | None = None
        self._heard, self._next_look = time.monotonic(), 0.0

    def work(self) -> bool:
        if self.ring.header(HeaderWord.RUN_STATE) != RunPhase.RUNNING:
            self.actor.bus.recv(LOOK_S)  # it is over: launch stops this process in its turn
            return True
        try:
            reply = self.link.ask(h.HostLook(known=self.state, wait_s=WAIT_S), WAIT_S + ANSWER_S)
        except PeerLost as problem:
            self._silent(str(problem))
            return True
        self._heard = time.monotonic()
        self.ring.activity("")
        if isinstance(reply, h.Refused):
            self._end(f"refused: {reply.text}")
        elif isinstance(reply, h.State):
            self._mirror(reply.state)
        return True

    def close(self) -> None:
        self.weights.close()
        self.link.close()

    def _silent(self, why: str) -> None:
        self.ring.activity(SILENT, math.inf)  # the satellite takes nothing meanwhile
        silent_s, limit_s = time.monotonic() - self._heard, self.topology.hosts.orphan_s
        self.actor.warn("relay", f"nothing heard of the run for {silent_s:.0f} s: {why}", kind="silent")
        if silent_s > limit_s:
            self._end(f"nothing heard of the run for {silent_s:.0f} s (hosts.orphan_s = {limit_s:g})")

    def _meanwhile(self, reply: h.AnyReply) -> None:
        """Engines must know how far they are behind, however long a version takes. What else has changed is asked for
        again after it."""
        self.ring.progress()
        if isinstance(reply, h.State) and reply.state.ring == self.claimed_from:
            self._set_words(reply.state)
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_MEANWHILE_S
            self.link.post(h.HostLook())

    def _end(self, why: str) -> None:
        """The processes of this host go by the ring: it says that the run is over for them."""
        if self.ring.header(HeaderWord.RUN_STATE) == RunPhase.RUNNING:
            self.actor.warn("relay", f"this host ends: {why}", "error")
            self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.STOPPING)

    def _mirror(self, state: h.HomeState) -> None:
        if state.ring != self.claimed_from:
            self._end("the run has a new ring, in which nothing is claimed from here")
            return
        if self.state is not None and state.topology != self.state.topology:
            self._end("the topology of the run has changed")
            return
        self.state = state
        self._set_words(state)
        if state.over:
            self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
        elif state.weights > max(self.weights.newest(), 0):
            self._fetch()

    def _set_words(self, state: h.HomeState) -> None:
        for word in (HeaderWord.STEP, HeaderWord.VERSION_STEP, HeaderWord.VERSION):
            self.ring.set_header(word, getattr(state, word.value))
        self.ring.set_header(HeaderWord.GENERATION_PAUSE, state.pause & ~PAUSE_STARTING)

    def _fetch(self) -> None:
        """Bring the newest version here; without an answer, or overtaken, it is tried again at the next look."""
        try:
            head = self.link.ask(h.WeightsHead(have=self.weights.newest()), self.topology.weights.timeout_s)
        except PeerLost as problem:
            self.actor.warn("relay", f"weights: {problem}", kind="weights")
            return
        if not isinstance(head, h.Version) or head.version <= self.weights.newest():
            return
        begun = time.monotonic()
        try:
            self.weights.begin(head.version, head.step, head.checksum, head.manifest)
            limit_s = self.topology.weights.timeout_s
            if fetch_pieces(self.link, self.weights, head.version, head.nbytes, self.piece, limit_s, self._meanwhile):
                self.weights.done()
                took = time.monotonic() - begun
                log.info("version %d: %.1f MB in %.2f s", head.version, head.nbytes / 1e6, took)
        except (PeerLost, WeightsRefused) as problem:
            self.actor.warn("relay", f"version {head.version} is not here yet: {problem}", kind="weights")
        finally:
            self.weights.abandon()


def fetch_pieces(
    link: Asking, copy: SegmentCopy, version: int, nbytes: int, size: int, timeout_s: float,
    meanwhile: Callable[[h.AnyReply], None],
) -> bool:
    """Ask for all pieces of a version, some ahead, and write each as it comes; `meanwhile` is called with each answer.
    False: a newer version has overtaken it. PeerLost: no piece came for `timeout_s`, whatever else did."""
    wanted, asked = deque(range(0, nbytes, size)), dict[int, int]()
    end = time.monotonic() + timeout_s
    while wanted or asked:
        while wanted and len(asked) < AHEAD:
            at = wanted.popleft()
            asked[link.post(h.WeightsPiece(version=version, at=at, size=min(size, nbytes - at)))] = at
        found, left = None, end - time.monotonic()
        if left > 0:
            found = link.receive(left)
        if found is None:
            raise PeerLost(f"no piece of it for {timeout_s:g} s (weights.timeout_s)")
        reply, data = found
        meanwhile(reply)
        if asked.pop(reply.number, None) is None:
            continue  # an answer to an earlier question
        if not isinstance(reply, h.Piece):
            return False
        copy.write(reply.at, data)
        end = time.monotonic() + timeout_s
    return True
