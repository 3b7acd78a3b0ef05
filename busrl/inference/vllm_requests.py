"""One request inside vLLM: what it asks for, the tokens that came, and which weights made them.

Used by `vllm_engine`: its loop thread adds, the caller's thread reads under the engine's lock. Turns what vLLM gives
into `Finished` and `Event`. Imports vLLM inside functions only.

- A sample's random stream hangs on (seed, uid, segment, tokens so far). vLLM draws with it from logits whose last bits
  depend on what is batched with what, so equal requests give equal tokens nearly always, not by contract.
- Versions come from vLLM where it notes them for every token, else from the counts at each update.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.inference.base import ABORTED, EOS, LENGTH, Event, Finished, Request

ENDS = {"stop": EOS, "length": LENGTH, "abort": ABORTED}


@dataclass
class Running:
    """A request from `submit` to its end; `limit` is how many tokens it may have."""

    request: Request
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: int | None = None
    told: int = 0  # tokens that `events` has handed over,
    told_end: bool = False  # and whether it told the end
    counted: int = 0  # tokens that `drawing` has counted
    started_with: int = 0  # tokens that it had when it was last handed to vLLM
    again: int = 0  # how often it was cut by a restart of the engine
    task: Any = None  # what follows it in the loop
    adapter: Any = None  # the adapter (`vllm_updates.Adapter`) that makes its tokens

    @property
    def known(self) -> list[int]:
        """All tokens that there are, in order."""
        parts = (self.request.prompt_ids, self.request.prefix_ids)
        return [int(i) for part in parts for i in part] + self.tokens

    @property
    def id(self) -> str:
        return f"{self.request.key}.{self.request.uid}.{self.request.segment}.{self.again}"

    def add(self, output: Any, version: int) -> None:
        """Take what vLLM sent: new tokens with their log-probabilities, and perhaps the end."""
        one = output.outputs[0]
        new = [int(token) for token in one.token_ids]
        if new:
            self.tokens += new
            self.logprobs += [float(place[token].logprob) for place, token in zip(one.logprobs, new)]
            self.versions += [version] * len(new)
        if one.finish_reason is None:
            return
        self.finish = ENDS.get(one.finish_reason, ABORTED)
        if self.adapter is None:
            self._correct(getattr(one, "weight_versions", None))

    def _correct(self, spans: Iterable[Any] | None) -> None:
        """vLLM's own note of the weights of every token, which counts from the request's last start."""
        for span in spans or ():
            if span.version.isdigit():
                at = slice(self.started_with + span.start, self.started_with + span.end)
                self.versions[at] = [int(span.version)] * len(self.versions[at])

    def finished(self) -> Finished:
        assert self.finish is not None
        return Finished(self.request.key, *self._arrays(0), self.finish)

    def event(self) -> Event | None:
        """What is new since the last event; None if nothing is."""
        finish = self.finish if not self.told_end else None
        if self.told == len(self.tokens) and finish is None:
            return None
        arrays = self._arrays(self.told)
        self.told, self.told_end = len(self.tokens), finish is not None
        return Event(self.request.key, *arrays, finish)

    def _arrays(
        self, begin: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.uint32]]:
        logprobs = np.minimum(np.array(self.logprobs[begin:], np.float32), np.float32(0.0))
        if self.request.temperature == 0:  # a distribution with one point
            logprobs[~np.isnan(logprobs)] = 0.0
        return np.array(self.tokens[begin:], np.int32), logprobs, np.array(self.versions[begin:], np.uint32)


def empty(request: Request) -> Finished:
    """The end of a request that has no room for a token."""
    nothing = np.empty(0, np.int32)
    return Finished(request.key, nothing, nothing.astype(np.float32), nothing.astype(np.uint32), LENGTH)


def settings_of(running: Running, stops: list[int], seeded: bool) -> Any:
    """vLLM's sampling settings of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request = running.request
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=running.limit - len(running.tokens),
        seed=seed_of(request, len(running.tokens)) if seeded and request.temperature > 0 else None,
        stop_token_ids=stops,
        ignore_eos=True,  # the ids above are all of them
        logprobs=0,  # the drawn token's alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def seed_of(request: Request, produced: int) -> int:
    """63 bits that are the sample's own."""
    mask = (1 << 64) - 1
    text = struct.pack("<QQQQ", request.seed & mask, request.uid & mask, request.segment, produced)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
