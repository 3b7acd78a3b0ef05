"""Questions of a host to the run's relay or another host's, and the answers: topology, state of the run, weights.

Talks to nothing. These travel between a DEALER and a ROUTER (`busrl.hosts.link`), not on the bus: each question has a
number, its answer repeats the number, and a question without an answer is sent again. A piece of weights is a frame
behind its answer.

- Every answer is a function of the present state of the run. Any question may be repeated; none changes anything but
  the count of the starts of hosts.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from busrl.protocol.messages import Count, Name, Text

Manifest = Annotated[bytes, Meta(max_length=1 << 26)]


class Question(Struct, tag_field="type", kw_only=True):
    """A question of host `host`; the answer repeats `number`."""

    number: Count = 0
    host: Name = ""


class HostJoin(Question, tag="HOST_JOIN"):
    """The host wants to work for the run, with this version of busrl. Answered by WELCOME or REFUSED."""

    build: Name = ""


class HostProcess(Struct, frozen=True, array_like=True):
    """A process of a host as its ring shows it, for people."""

    name: Name
    state: Name
    activity: Text
    pid: Count
    version: Count
    samples: Count
    tokens: Count


class HostLook(Question, tag="HOST_LOOK"):
    """Ask for the state of the run. Answered by STATE: as soon as the state differs from `known`, or after `wait_s`
    seconds. `have`: the version that engines there find (-1: none). `processes`: those of the host."""

    known: HomeState | None = None
    wait_s: float = 0.0
    have: int = -1
    build: Name = ""
    processes: Annotated[list[HostProcess], Meta(max_length=1024)] = msgspec.field(default_factory=list)


class WeightsHead(Question, tag="WEIGHTS_HEAD"):
    """Ask for a version above `have`, and its layout. Answered by VERSION; REFUSED while there is none. While other
    hosts fetch two older versions it is one of these, so that no host's question ends the fetch of another. `place`:
    where this host answers others; empty: nowhere."""

    have: int = -1
    place: Name = ""


class WeightsPiece(Question, tag="WEIGHTS_PIECE"):
    """Ask for the bytes `at` to `at + size` of the version with this `digest`. Answered by PIECE with one frame;
    REFUSED if the version is overtaken. A host that still fetches the version answers WAITING now and then until it has
    the piece."""

    version: Count = 0
    digest: Count = 0
    at: Count = 0
    size: Count = 0


class RanksMeet(Question, tag="RANKS_MEET"):
    """Ask where the learner meets its ranks of this host. Answered by RANKS_PLACE; REFUSED while it waits for none."""


class Reply(Struct, tag_field="type", kw_only=True):
    """An answer to question `number`."""

    number: Count = 0


class Declined(Reply, tag="REFUSED"):
    """A refusal, for now or for this host for good: the reason, and what to do."""

    text: Text = ""


class Welcome(Reply, tag="WELCOME"):
    """The topology of this host as JSON, and the id of the ring that it claims from (16 bytes). `life`: the number of
    this start, above those of all earlier ones of the run. `holds`: the number of the start whose claims home has, 0:
    none."""

    topology: bytes = b""
    ring: bytes = b""
    life: Count = 0
    holds: Count = 0


class HomeState(Struct, frozen=True, array_like=True):
    """Words of the ring's header that engines read, and the newest version whose weights can be fetched (-1: none).
    `over`: the run has ended in order, and hosts end too. `topology`: a number that changes with home's topology."""

    ring: bytes = b""
    over: bool = False
    topology: Count = 0
    step: Count = 0
    version_step: Count = 0
    version: Count = 0
    pause: Count = 0
    weights: int = -1


class State(Reply, tag="STATE"):
    state: HomeState = msgspec.field(default_factory=HomeState)


class Peer(Struct, frozen=True, array_like=True):
    """A host of the run: its public key, and where it answers other hosts (empty: nowhere)."""

    name: Name
    key: Name
    place: Name = ""


class Version(Reply, tag="VERSION"):
    """A version of weights: `nbytes` in the order of `manifest` (JSON); `checksum` 0: it has none. `digests`: 8 bytes
    for each `piece` bytes; `digest`: of all of them. `above`: the hosts to fetch it from, in this order, before home;
    `peers`: these, and the hosts that may fetch it from this one."""

    version: Count = 0
    step: Count = 0
    nbytes: Count = 0
    checksum: Count = 0
    manifest: Manifest = b""
    piece: Count = 0
    digest: Count = 0
    digests: Manifest = b""
    above: list[Name] = msgspec.field(default_factory=list)
    peers: list[Peer] = msgspec.field(default_factory=list)


class Piece(Reply, tag="PIECE"):
    version: Count = 0
    at: Count = 0


class RanksPlace(Reply, tag="RANKS_PLACE"):
    """A TCP port of home. Both sides prove there that they have `secret`, which is in hexadecimal digits."""

    address: Name = ""
    port: Count = 0
    secret: Name = ""


class Waiting(Reply, tag="WAITING"):
    """The piece is not here yet; PIECE or REFUSED follows."""


AnyQuestion = HostJoin | HostLook | WeightsHead | WeightsPiece | RanksMeet
AnyReply = Declined | Welcome | State | Version | Piece | RanksPlace | Waiting
encode = msgspec.msgpack.encode  # of a question or a reply
_questions: msgspec.msgpack.Decoder[AnyQuestion] = msgspec.msgpack.Decoder(AnyQuestion)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def question(data: bytes) -> AnyQuestion | None:
    """Decode a question; None for bytes that are none."""
    with contextlib.suppress(msgspec.MsgspecError):
        return _questions.decode(data)
    return None


def reply(data: bytes) -> AnyReply | None:
    """Decode an answer; None for bytes that are none."""
    with contextlib.suppress(msgspec.MsgspecError):
        return _replies.decode(data)
    return None
