"""The relay: at home it answers the questions of other hosts; on another host it keeps ring and weights up to date.

At home it talks to the ring (reading), the segment or folders of weights and the hosts' relays. On a host it writes the
words of the local ring's header that engines read, and a segment or folders, from which it answers other hosts. Knows
nothing of samples.

- The words are written before the weights, steps before versions: an engine may wait for weights, and a sample may look
  too old, never too new.
- A version reaches engines whole or not at all; one that is overtaken on its way is given up for the newer one.
- Home sends a version once where hosts reach one another: each fetches from the one before it while that still fetches.
- A host that sends no more pieces is left for the next; home is the last. Pieces that are here are not fetched again.
- A host ends when home has another ring than the one that it claimed from: its samples belong to no claim.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import busrl
from busrl import curve
from busrl.bus.addresses import check_endpoint, relay_endpoint
from busrl.bus.broker import Admission, CurveListener
from busrl.curve import ClientKeys, Pair
from busrl.errors import BadEndpoint, WeightsRefused, WeightsTimeout
from busrl.hosts import questions as q
from busrl.hosts.link import Answering, Asking, Request, address_towards, wait
from busrl.hosts.membership import SILENT, HostSource, Starts, claimed_from, of_host
from busrl.hosts.versions import Chain, Pieces, SegmentCopy, Snapshot, Sources
from busrl.roles.actor import Actor
from busrl.states import PAUSE_STARTING, HeaderWord, RunPhase
from busrl.system import files
from busrl.weights.factory import TransportSettings

if TYPE_CHECKING:
    from busrl.hosts.folders import FolderCopy

    Copy = SegmentCopy | FolderCopy

log = logging.getLogger("busrl")
LOOK_S = 0.02
WAIT_S = 1.0  # for which home may delay the answer to a question about the state
ANSWER_S = 2.5  # beyond WAIT_S, before home counts as silent
AGAIN_S = 1.5  # beyond WAIT_S, before the question counts as lost
PASS_S = 0.1
AHEAD_BYTES, MOST_AHEAD = 16 << 20, 32  # bytes and pieces that are requested ahead; they must fit the link's queues
MOST_OPEN = 4096
WORD_S = 0.5  # between two WAITING to a host that waits for pieces
SHOW_S = 1.0
AVOID_S = 600.0  # for which a host that never answered gets no question: there may be no way from here to there
PATIENCE_S = 1.0  # for which questions for a version wait that this host has not begun to fetch
SHOWN = (HeaderWord.STEP, HeaderWord.VERSION_STEP, HeaderWord.VERSION, HeaderWord.GENERATION_PAUSE)
FAREWELL_S = 2.0  # for which home waits at the end, so that hosts which asked lately learn that the run is over
LATELY_S = 10.0


class Relay(Actor):
    role = "relay"
    singleton = True

    def setup(self) -> None:
        self._side: HomeSide | HostSide = HostSide(self) if self.topology.here else HomeSide(self)

    def work(self) -> bool:
        return self._side.work()

    def idle(self, timeout_s: float) -> None:
        """Return at once: the next pass waits at the other side's socket."""

    def teardown(self) -> None:
        self._side.close()


# -- at home -----


class HomeSide:
    """Answers hosts: lets them join and gives each its topology, the state of the run, pieces of the newest weights."""

    def __init__(self, actor: Relay) -> None:
        self.actor, self.ring, self.topology = actor, actor.ring, actor.topology
        bus = self.topology.bus
        place = relay_endpoint(bus.endpoint)
        self.keys = curve.directory_of(bus.keys)
        self.link = Answering(CurveListener(bus.endpoint, self.keys, (place,)))
        settings, piece = TransportSettings.of(self.topology, actor.paths), self.topology.hosts.piece_mb << 20
        self.weights = snapshot_of(settings, piece)
        self.chain = Chain(max(LATELY_S, self.topology.weights.timeout_s))
        self.claimed_from = claimed_from(actor.paths.run_json)
        self.starts = Starts(actor.paths)
        self._waiting: dict[str, tuple[float, Request]] = {}  # by host: its last question about the state, and its end
        self._seen: dict[str, float] = {}  # by host: when it last asked for the state
        self._hosts: dict[str, dict[str, Any]] = {name: {} for name in self.topology.host_names}  # for `busrl status`
        self._next_show = 0.0
        self._over, self._topology = False, zlib.crc32(self.topology.to_json().encode())

    def work(self) -> bool:
        for request in self.link.waiting(LOOK_S):
            self._answer(request)
        self._answer_waiting()
        if (now := time.monotonic()) >= self._next_show:
            self._next_show = now + SHOW_S
            files.show(self.actor.paths.hosts_now, self._hosts)
        for refusal in self.link.listener.refusals():
            self.actor.warn("relay", str(refusal), kind=f"refused {refusal.address}")
        return True

    def close(self) -> None:
        """Close. At the end of the run, hosts that asked lately get that answer first; others find out by silence."""
        now, self._over = time.monotonic(), self.ring.header(HeaderWord.RUN_STATE) != RunPhase.RUNNING
        unaware = {name for name, seen in self._seen.items() if self._over and now - seen < LATELY_S}
        while unaware and time.monotonic() < now + FAREWELL_S:
            unaware -= self._waiting.keys()
            self.work()
        self.weights.close()
        self.link.close()

    def state(self) -> q.HomeState:
        words = {word.value: self.ring.header(word) for word in SHOWN}
        pause = words.pop(HeaderWord.GENERATION_PAUSE.value)
        newest, _ = self.weights.newest()
        return q.HomeState(
            ring=self.claimed_from, over=self._over, topology=self._topology, pause=pause, weights=newest, **words
        )

    def _answer(self, request: Request) -> None:
        question = request.question
        if (why := self._objection(request)) is not None:
            self.actor.warn("relay", f"{request.name}: {why.text}", kind=f"refused {request.name}")
            self.link.answer(request, why)
        elif isinstance(question, q.HostJoin):
            self._welcome(request)
        elif isinstance(question, q.HostLook):
            self._note_look(request, question)
        elif isinstance(question, q.WeightsHead):
            self._head(request, question)
        elif isinstance(question, q.RanksMeet):
            place = files.read_map(self.actor.paths.rank_place) if request.name in self.topology.rank_hosts else {}
            self.link.answer(request, q.RanksPlace(**place) if place else q.Declined(text="no learner waits for ranks"))
        else:
            self._piece(request, question)

    def _note_look(self, request: Request, question: q.HostLook) -> None:
        """Note what a host shows of itself; its question waits for another state."""
        now = time.monotonic()
        self._seen[request.name] = now
        self._hosts[request.name] = {
            "time": time.time(), "weights": question.have, "busrl": question.build,
            "processes": [msgspec.structs.asdict(process) for process in question.processes],
        }
        self.chain.looked(request.name, question.have, now)
        self._waiting[request.name] = now + min(question.wait_s, WAIT_S), request

    def _welcome(self, request: Request) -> None:
        name = request.name
        topology = of_host(self.topology, name).to_json().encode()
        lives = {entry.label: entry.life for entry in self.ring.processes() if entry.remote}
        life, holds = self.starts.count(name, max(lives.values(), default=0)), lives.get(name, 0)
        self.link.answer(request, q.Welcome(topology=topology, ring=self.claimed_from, life=life, holds=holds))

    def _objection(self, request: Request) -> q.Declined | None:
        """The reason why this host cannot take part, whatever it asks for; None if it can."""
        host, hosts = request.question.host, self.topology.host_names
        build = request.question.build if isinstance(request.question, q.HostJoin) else busrl.__version__
        if host not in hosts:
            text = f"no host {host!r} in this run: `hosts` of its [[process]] entries name {', '.join(hosts)}"
        elif request.name != host:
            remedy = f"make a key of its own with `busrl keys add {host}`, or start it with the name that the key has"
            text = f"the key is {request.name}'s, the name {host}'s: {remedy}"
        elif build != busrl.__version__:
            text = f"this host has busrl {build}, the run's {busrl.__version__}: install the same on both"
        else:
            return None
        return q.Declined(text=text)

    def _head(self, request: Request, question: q.WeightsHead) -> None:
        now, name = time.monotonic(), request.name
        with self.actor.activity("copy weights", self.topology.limits.work_s):
            copy = self.weights.take(self.chain.fetched(name, now))
        if copy is None or copy.version <= question.have:
            self.link.answer(request, q.Declined(text="no newer version just now"))
            return
        place = question.place if _is_place(question.place) else ""
        head = q.Version(
            version=copy.version, step=copy.step, nbytes=len(copy.data), checksum=copy.checksum,
            manifest=copy.manifest, piece=self.weights.size, digest=copy.digest, digests=copy.digests,
            above=self.chain.asks(name, place, copy.version, len(copy.data), now), peers=self._peers(),
        )
        self.link.answer(request, head)

    def _peers(self) -> list[q.Peer]:
        listed = curve.allowed(self.keys)
        names = [name for name in self.topology.host_names if name in listed]
        return [q.Peer(name, listed[name], self.chain.place(name)) for name in names]

    def _piece(self, request: Request, question: q.WeightsPiece) -> None:
        data = self.weights.piece(question.digest, question.at, question.size)
        reply = q.Declined(text="overtaken") if data is None else q.Piece(version=question.version, at=question.at)
        self.link.answer(request, reply, data)

    def _answer_waiting(self) -> None:
        """Answer the hosts that have an older state, and those that have waited long enough."""
        if not self._waiting:
            return
        now, state = time.monotonic(), self.state()
        for name, (until, request) in list(self._waiting.items()):
            before = request.question.known if isinstance(request.question, q.HostLook) else None
            if before != state or not now < until:
                del self._waiting[name]
                self.link.answer(request, q.State(state=state))


def snapshot_of(settings: TransportSettings, piece: int) -> Snapshot:
    """The newest weights of the learner, in pieces of this size: from its folders or its segment."""
    if not settings.folders:
        return Snapshot(Path(settings.segment), piece)
    from busrl.hosts.folders import FolderSnapshot

    return FolderSnapshot(Path(settings.folders), piece)


def copy_for(settings: TransportSettings) -> Copy:
    """The writer of versions for the engines of this host: into folders or a segment."""
    if not settings.folders:
        return SegmentCopy(Path(settings.segment))
    from busrl.hosts.folders import FolderCopy

    return FolderCopy(Path(settings.folders), settings.kept)


def _is_place(text: str) -> bool:
    with contextlib.suppress(BadEndpoint):
        check_endpoint(text, keys=True)
        return text.startswith("tcp:")
    return False


# -- on another host -----


class HostSide:
    """Mirrors the state of the run, fetches newer weights, and answers other hosts from them."""

    def __init__(self, actor: Relay) -> None:
        self.actor, self.ring, self.topology = actor, actor.ring, actor.topology
        self.source = HostSource.read(actor.paths.host_source)
        home = relay_endpoint(self.source.endpoint)
        self.link = Asking(home, self.source.client, self.source.name)
        self.weights = copy_for(TransportSettings.of(self.topology, actor.paths))
        self.generates = any(process.role == "rollout" for process in self.topology.processes())
        self.sharing = self._open_sharing(home) if self.generates else None
        self.links = Links(self.source)
        self.fetch: Fetch | None = None
        self.state: q.HomeState | None = None
        self._replied_at, self._next_look, self._next_head, self._usual = time.monotonic(), 0.0, 0.0, 0.0
        self._heads = set[int]()  # numbers of questions for weights

    def work(self) -> bool:
        if self.ring.header(HeaderWord.RUN_STATE) != RunPhase.RUNNING:
            self.actor.bus.recv(LOOK_S)  # the run is over: launch stops this process in its turn
            return True
        self._ask(time.monotonic())
        wait(PASS_S, self._ends())
        for reply, _ in self.link.here():
            self._take_reply(reply)
        if self.fetch is not None:
            self._advance(self.fetch, time.monotonic())
        if self.sharing is not None:
            self.sharing.work()
        if (silent_s := time.monotonic() - self._replied_at) > WAIT_S + ANSWER_S:
            self._silent(silent_s)
        return True

    def close(self) -> None:
        for part in (self.links, self.sharing, self.weights, self.link):
            if part is not None:
                part.close()

    def _open_sharing(self, home: str) -> Sharing | None:
        if not self.topology.hosts.chain:
            return None
        try:
            return Sharing(address_towards(home), self.source.client.pair, self.weights)
        except (OSError, BadEndpoint) as problem:
            self.actor.warn("relay", f"other hosts cannot fetch weights from this one: {problem}")
            return None

    def _ends(self) -> list[Asking | Answering]:
        fetching = None if self.fetch is None else self.fetch.link
        sharing = None if self.sharing is None else self.sharing.link
        return [link for link in (self.link, fetching, sharing) if link is not None]

    def _ask(self, now: float) -> None:
        """Ask for the state, and for newer weights where none are on their way; again if the question was lost."""
        if now >= self._next_look:
            self.link.post(q.HostLook(
                known=self.state, wait_s=WAIT_S, have=self.weights.newest(), build=busrl.__version__,
                processes=self._processes(),
            ))
            self._next_look = now + WAIT_S + AGAIN_S
        idle = self.fetch is None or self.fetch.sources is None
        if idle and self.generates and self.state is not None and now >= self._next_head:
            have = self.weights.newest()
            if self.state.weights > max(have, 0):
                place = self.sharing.link.place if self.sharing is not None else ""
                self._heads.add(self.link.post(q.WeightsHead(have=have, place=place)))
                self._next_head = now + AGAIN_S

    def _processes(self) -> list[q.HostProcess]:
        return [
            q.HostProcess(entry.label, "dead" if self.ring.is_dead(entry.index) else entry.state, entry.activity,
                          entry.pid, entry.version, entry.samples, entry.tokens)
            for entry in self.ring.processes() if not entry.remote
        ]

    def _take_reply(self, reply: q.AnyReply) -> None:
        self._replied_at = time.monotonic()
        self.ring.activity("")
        if isinstance(reply, q.State):
            self._next_look = 0.0
            self._mirror(reply.state)
        elif isinstance(reply, q.Version):
            self._heads.clear()
            self._next_head = 0.0
            self._begin(reply)
        elif isinstance(reply, q.Declined) and reply.number in self._heads:
            self._next_head = self._replied_at + WAIT_S
        elif isinstance(reply, q.Declined):
            self._end(f"refused: {reply.text}")

    def _silent(self, silent_s: float) -> None:
        self.ring.activity(SILENT, math.inf)  # the satellite takes no tasks meanwhile
        limit_s = self.topology.hosts.orphan_s
        text = (f"nothing heard of the run for {silent_s:.0f} s: see that it is there (`busrl status`), that this host "
                f"can reach {self.link.endpoint}, and that {self.link.host}'s key is listed (`busrl keys list`)")
        self.actor.warn("relay", text, kind="silent")
        if silent_s > limit_s:
            self._end(f"nothing heard of the run for {silent_s:.0f} s (hosts.orphan_s = {limit_s:g})")

    def _end(self, why: str) -> None:
        """Write into the ring that the run is over for the processes of this host, which read it there."""
        if self.ring.header(HeaderWord.RUN_STATE) == RunPhase.RUNNING:
            self.actor.warn("relay", f"this host ends: {why}", "error")
            self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.STOPPING)

    def _mirror(self, state: q.HomeState) -> None:
        if state.ring != self.source.ring:
            self._end("the run has a new ring, in which nothing is claimed from here")
        elif self.state is not None and state.topology != self.state.topology:
            self._end("the topology of the run has changed")
        else:
            self.state = state
            for word in (HeaderWord.STEP, HeaderWord.VERSION_STEP, HeaderWord.VERSION):
                self.ring.set_header(word, getattr(state, word.value))
            self.ring.set_header(HeaderWord.GENERATION_PAUSE, state.pause & ~PAUSE_STARTING)
            if state.over:
                self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)

    def _begin(self, head: q.Version) -> None:
        """Fetch this version; pieces of it that are here are not fetched again."""
        if self.sharing is not None:
            self.sharing.list_peers(head.peers)
        fetch, now = self.fetch, time.monotonic()
        if fetch is None or fetch.head.digest != head.digest:
            if head.version <= self.weights.newest():
                return
            self._give_up()
            pieces = Pieces(head.nbytes, head.piece, head.digests)
            try:
                with self.actor.activity("make room for weights", self.topology.limits.work_s):
                    self.weights.begin(head.version, head.step, head.checksum, head.manifest, head.digest, pieces)
            except (WeightsRefused, WeightsTimeout) as problem:
                self.actor.warn("relay", f"version {head.version} is not here yet: {problem}", kind="weights")
                self._next_head = now + WAIT_S
                return
            fetch = self.fetch = Fetch(self.links, pieces, now)
        above = self.links.worth_asking(head, now)
        fetch.begin(head, Sources(above, self._usual, self.topology.weights.timeout_s, now))

    def _advance(self, fetch: Fetch, now: float) -> None:
        if why := fetch.advance(self.weights, now):
            self.actor.warn("relay", f"version {fetch.head.version}: {why}", kind="weights")
        if fetch.pieces.left:
            return
        self.weights.done()
        took, head, sources = now - fetch.begun, fetch.head, fetch.sources
        log.info("version %d: %.1f MB in %.2f s from %s", head.version, head.nbytes / 1e6, took, fetch.source)
        self._usual = sources.usual(now) if sources is not None else self._usual
        self._give_up()
        self._next_look = 0.0  # home learns of it at once

    def _give_up(self) -> None:
        self.weights.abandon()
        self.fetch = None


class Links:
    """Connections to home and other hosts for pieces of weights, so that answers about the state wait behind none of
    these. The last connection stays for the next version."""

    def __init__(self, source: HostSource) -> None:
        self._endpoint, self._keys, self._name = relay_endpoint(source.endpoint), source.client, source.name
        self._open: dict[tuple[str, str], Asking] = {}
        self._avoided: dict[str, float] = {}  # by place: the time until which it gets no question

    def worth_asking(self, head: q.Version, now: float) -> list[str]:
        """The hosts above this one, without those that never answered."""
        self._avoided = {place: until for place, until in self._avoided.items() if now < until}
        places = {peer.name: peer.place for peer in head.peers}
        return [name for name in head.above if name in places and places[name] not in self._avoided]

    def avoid(self, peer: q.Peer, now: float) -> None:
        self._avoided[peer.place] = now + AVOID_S

    def to(self, peer: q.Peer | None) -> Asking:
        """The connection to this host, or to home (None); others are closed."""
        place, key = (peer.place, peer.key) if peer is not None else (self._endpoint, self._keys.server)
        link = self._open.pop((place, key), None) or Asking(place, ClientKeys(self._keys.pair, key), self._name)
        self.close()
        self._open[place, key] = link
        return link

    def close(self) -> None:
        for link in self._open.values():
            link.close()
        self._open.clear()


class Fetch:
    """A version on its way here, from one host after another. Where `sources` is None, home has to name hosts again."""

    head: q.Version
    sources: Sources | None = None
    link: Asking | None = None

    def __init__(self, links: Links, pieces: Pieces, now: float) -> None:
        self._links, self.pieces, self.begun = links, pieces, now
        self._numbers = set[int]()  # of the questions on this link
        self._peer: q.Peer | None = None  # the host at its other end, None: home
        self._answers = False

    @property
    def source(self) -> str:
        """The host that sends pieces now."""
        return (self.sources.current if self.sources is not None else "") or "home"

    def begin(self, head: q.Version, sources: Sources) -> None:
        self.head, self.sources = head, sources
        self._turn()

    def advance(self, copy: Copy, now: float) -> str:
        """Take the pieces that came and ask for more; returns why the host that sent them was left, or ""."""
        if self.sources is None or self.link is None:
            return ""
        why = self._take(copy, self.sources, now)
        if why:
            self.sources.lost(now)
        why = why or self.sources.look(now)
        if why and self._peer is not None and not self._answers:
            self._links.avoid(self._peer, now)
        if self.sources.over:
            self.sources = None
        elif why:
            self._turn()
        ahead = max(2, min(MOST_AHEAD, AHEAD_BYTES // max(1, self.head.piece)))
        while self.sources is not None and self.pieces.open < ahead and (place := self.pieces.want()) is not None:
            at, size = place
            question = q.WeightsPiece(version=self.head.version, digest=self.head.digest, at=at, size=size)
            self._numbers.add(self.link.post(question))
        return why

    def _take(self, copy: Copy, sources: Sources, now: float) -> str:
        """Write the pieces that came; returns why this host sends no more, or ""."""
        assert self.link is not None
        for reply, data in self.link.here():
            sources.received(now)
            self._answers = True
            if isinstance(reply, q.Declined) and reply.number in self._numbers:
                return f"{self.source}: {reply.text}"
            if isinstance(reply, q.Piece) and reply.version == self.head.version:
                try:
                    new = self.pieces.came(reply.at, data)
                except WeightsRefused as problem:
                    return f"{self.source}: {problem}"
                if new:
                    copy.write(reply.at, data)
                    sources.received(now, len(data))
        return ""

    def _turn(self) -> None:
        """Ask another host from now on, first for the pieces that were on their way."""
        assert self.sources is not None
        self.pieces.again()
        self._numbers.clear()
        self._peer = next((peer for peer in self.head.peers if peer.name == self.sources.current), None)
        self.link, self._answers = self._links.to(self._peer), False


class Sharing:
    """Answers other hosts, whose keys home lists, with the pieces of a version that are here: all, or those so far."""

    def __init__(self, address: str, pair: Pair, copy: Copy) -> None:
        self.listed: dict[str, str] = {}
        place = f"tcp://{address}:*"
        self.link = Answering(CurveListener(place, Admission(pair, lambda: self.listed), (place,)))
        self._copy = copy
        # Questions for pieces that are not here, and since when they wait.
        self._open = deque[tuple[float, Request]](maxlen=MOST_OPEN)
        self._next_word = 0.0

    def list_peers(self, peers: Sequence[q.Peer]) -> None:
        """Let these hosts, and no others, fetch from here."""
        self.listed = {peer.name: peer.key for peer in peers}

    def work(self) -> None:
        now = time.monotonic()
        self._open.extend((now, request) for request in self.link.waiting(0))
        self._open = deque((entry for entry in self._open if not self._answer(*entry, now)), MOST_OPEN)
        if self._open and now >= self._next_word:
            self._next_word = now + WORD_S
            for request in {request.peer: request for _, request in self._open}.values():
                self.link.answer(request, q.Waiting())

    def _answer(self, since: float, request: Request, now: float) -> bool:
        """Answer if the piece is here, or will not come; True if the question needs no more."""
        question = request.question
        if not isinstance(question, q.WeightsPiece):
            return True
        data = self._copy.piece(question.digest, question.at, question.size)
        if data is not None:
            self.link.answer(request, q.Piece(version=question.version, at=question.at), data)
        elif not self._copy.holds(question.digest) and now - since > PATIENCE_S:
            self.link.answer(request, q.Declined(text="it has not this version"))
        else:
            return False
        return True

    def close(self) -> None:
        self.link.close()
