"""A vLLM for several models: the adapters of all on one base, beside each other.

`AdaptersOfModels` is the engine; `Share` is what the rollout role of one model sees of it, an engine like any other.
Talks to `busrl.engines.vllm`. Knows nothing of rings or of where versions come from.

- A model's adapters have names, ids and places of their own: a version of one moves nothing of another, and none stops
  the engine.
- A model that is not trained is drawn with the base.
- Free rows are dealt out in equal parts; what one leaves, another takes in its next turn.
- Tokens are counted for their model; computed prompts, steps and the cache are those of the whole engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from busrl.engines.base import Engine, Finished, Request, Statistics
from busrl.engines.tokens import Ids
from busrl.engines.vllm.engine import STEP_WAIT_S, Running, VllmEngine
from busrl.engines.vllm.process import Start
from busrl.engines.vllm.weights import Adapters, LoadedAdapter

if TYPE_CHECKING:
    from busrl.topology import Topology
    from busrl.weights.base import Receiver

VERSIONS = 1 << 32  # ids of one model's adapters


class AdaptersOfModels(VllmEngine):
    """The engine. `places`: how many adapters each model may have in it at a time, by tag."""

    def __init__(self, start: Start, places: dict[str, int], **settings: Any) -> None:
        super().__init__(start, **settings)
        self.lines = [Adapters(self, count, f"{tag}-v", index * VERSIONS + 1)
                      for index, (tag, count) in enumerate(places.items())]
        self.arrived = [0] * len(places)  # tokens of each model, counted by the loop
        self.shares = [Share(self, index, self._text) for index in range(len(places))]

    def adapter_for(self, request: Request) -> LoadedAdapter:
        return self.lines[request.key % len(self.lines)].newest

    def take(self, running: Running, output: Any) -> None:
        before = len(running.token_ids)
        super().take(running, output)
        self.arrived[running.request.key % len(self.lines)] += len(running.token_ids) - before

    def deliver(self, wait: bool = False) -> None:
        """Give each model what has ended of its requests; with `wait` a moment later if nothing has."""
        self._gather()
        if wait and not self._done and self._running:
            self._wake.wait(STEP_WAIT_S / len(self.shares))
            self._gather()
        self.check()
        for answer in self._take_done():
            key, index = divmod(answer.key, len(self.shares))
            self.shares[index].ended(replace(answer, key=key))

    def end_now(self, keys: list[int]) -> None:
        """End these requests with the tokens that they have, and deliver them."""
        self.deliver()
        self._end_now([key for key in keys if key in self._running])
        self.deliver()

    def load(self, index: int, receiver: Receiver) -> tuple[int, int]:
        """Load the newest version of a model beside what runs; there is a place for it."""
        assert receiver.kind == "adapter"  # `rules` refuses every other
        self.lines[index].remove_unused()
        version, step, path = receiver.take()
        self.lines[index].add(version, path)
        return version, step


class Share(Engine):
    """The engine as one model has it: the first, second, ... of those in it by `index`. Its requests have the caller's
    keys; the engine's are `key * models + index`, which are none of another model."""

    def __init__(self, whole: AdaptersOfModels, index: int, text: Any) -> None:
        super().__init__(text, whole.capacity, whole.max_length)
        self._whole, self._index, self._fresh = whole, index, 0

    def take_turn(self, closed: bool = False) -> None:
        """Have an equal part of the rows that are free now, until the next turn; none if the engine is `closed`."""
        free = 0 if closed else self._whole.capacity - self._whole.active
        self.capacity = self.active + -(-free // len(self._whole.shares))

    @property
    def is_idle(self) -> bool:
        """True if the engine has no request of any model."""
        return not self._whole.active

    @property
    def has_room(self) -> bool:
        """True if one more version finds a place."""
        return self._whole.lines[self._index].has_room

    def ended(self, answer: Finished) -> None:
        """Take an answer of this model."""
        self._running.pop(answer.key, None)
        self._done.append(answer)

    # -- the interface -----

    @property
    def decoding(self) -> int:
        self._fresh = self._whole.arrived[self._index] - self._counts.tokens
        return self._fresh

    def _begin(self, requests: list[Request]) -> None:
        self._running |= {request.key: request for request in requests}
        self._whole.submit([replace(request, key=self._joined(request.key)) for request in requests])

    def step(self) -> list[Finished]:
        self._counts.tokens += self._fresh
        self._fresh = 0
        self._whole.deliver(wait=not self._done)
        return self._take_done()

    def sampled(self, key: int, begin: int) -> Ids:
        return self._whole.sampled(self._joined(key), begin)

    def _end_now(self, keys: list[int]) -> None:
        self._whole.end_now([self._joined(key) for key in keys])

    def hold(self) -> None:
        super().hold()
        self._whole.hold()
        self._whole.deliver()

    def resume(self) -> None:
        super().resume()
        if not any(share.paused for share in self._whole.shares):
            self._whole.resume()

    def _update(self, receiver: Receiver) -> tuple[int, int]:
        return self._whole.load(self._index, receiver)

    def statistics(self) -> Statistics:
        whole = self._whole.statistics()
        return replace(
            super().statistics(), steps=whole.steps, prefill_tokens=whole.prefill_tokens,
            prefix_tokens=whole.prefix_tokens, cache_tokens=whole.cache_tokens, cache_capacity=whole.cache_capacity,
        )

    def _joined(self, key: int) -> int:
        return key * len(self._whole.shares) + self._index


def make(topologies: Sequence[Topology]) -> AdaptersOfModels:
    """The engine of these models, which have one base (`rules`)."""
    starts = [Start.of(topology) for topology in topologies]
    start = replace(
        starts[0], max_length=max(each.max_length for each in starts), lora_rank=max(each.lora_rank for each in starts),
        adapters=sum(each.adapters for each in starts),
        routing=next((each.routing for each in starts if each.routing), None),
    )
    places = {topology.tag: each.adapters for topology, each in zip(topologies, starts)}
    chat, temperature = topologies[0].data.template == "chat", topologies[0].generation.temperature
    return AdaptersOfModels(start, places, chat=chat, temperature=temperature)
