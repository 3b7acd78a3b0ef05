"""The embedded engine: continuous batching of any Hugging Face causal language model, without a server.

The rollout role drives it through `busrl.engines.base.Engine`; a receiver of weights writes into `parameters()`. Talks
to a decoder, which computes. Knows nothing of slots, the bus or rewards.

- Sequences join and leave between decoding steps. `Prefill` computes the prompts of those that join in a separate
  batch, one row for all requests with the same prompt, and copies it into the rows of the running batch.
- With `prefix_keep_s` the row of a sequence that ended is kept for a request that continues it (`prefix`).
- New weights enter between steps. Running sequences keep the keys and values that older weights made, or, with
  `on_update = "recompute"`, wait until theirs are computed again.
- One transfer from the device and no Python per row in a step, apart from rows that begin or end in it. Routes of
  experts, where a run carries them (`busrl/routes`), cost one more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from busrl import capabilities
from busrl.data.pretrained import import_classes, require_whole
from busrl.data.vocabulary import ALL_ROWS, TokenRows, token_rows
from busrl.engines.base import Engine, Finished, Request, Routes, Statistics, Streams
from busrl.engines.tokens import NO_IDS, Ids, Tokens, eos_ids_of
from busrl.engines.torch.decoder import Decoder, choose_decoder
from busrl.engines.torch.lora import WeightLoader
from busrl.engines.torch.prefix import Copies, KeptRow, KeptRows
from busrl.errors import UserError, cause
from busrl.states import Finish, shown_uid
from busrl.system.device import choose as choose_device
from busrl.topology.kinds import ONE_COPY
from busrl.weights.base import SharedReceiver
from busrl.weights.factory import make_receiver

if TYPE_CHECKING:
    from busrl.data.routing import Routing
    from busrl.topology import Topology
    from busrl.weights.base import Receiver
    from busrl.weights.factory import TransportSettings

Index = npt.NDArray[np.intp]
OnUpdate = Literal["keep", "recompute"]
PADDING = 256  # tokens of padding: another forward pass would cost more
GATHERED = 1 << 16  # positions of rows that are continued together, which bounds the copies of their keys and values
COLDEST = 1e-5  # a lower temperature draws the likeliest token: logits that are divided by it are no numbers
SPAN_STEP = 8  # attended prefixes grow in steps, so that fewer shapes occur
PREFILL_TOKENS = 2048  # keeps a step with a full prefill within some ten times one without, and still fills a GPU
DEFAULT_MAX_LENGTH = 4096  # where neither the caller nor the model sets one
quiet: Any = transformers_logging  # it has no type hints


# -- sampling -----

@dataclass(frozen=True)
class Sampling:
    """Settings of all rows, [rows, 1] each; None where no row needs the step."""

    inverse_temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    top_p: torch.Tensor | None


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, settings: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and float32 log-probabilities, [rows] each, for logits [rows, vocabulary] and uniforms [rows, 1].

    Inverts the cumulative distribution of all rows at once. Sums are taken in float64, so that a token is drawn with
    its probability even from a vocabulary of 10**5, whatever the order of additions. The log-probability is that of the
    distribution drawn from, after temperature and top-p. Logits that are not finite give NaN and some token: the caller
    has to check for NaN. Temperature 0 is greedy: the first largest logit, log-probability 0 (one point).
    """
    scores = logits.float()
    if settings.inverse_temperature is not None:
        scores = scores * settings.inverse_temperature
    logprobs = torch.log_softmax(scores, dim=-1)
    if settings.top_p is not None:
        logprobs = _truncate(logprobs, settings.top_p)
    cdf = logprobs.double().exp_().cumsum_(dim=-1)
    tokens = torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)  # a row with a NaN gives an index beyond the vocabulary
    chosen = logprobs.gather(-1, tokens)
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, logits.argmax(dim=-1, keepdim=True), tokens)
        chosen = chosen.masked_fill(settings.greedy & ~chosen.isnan(), 0.0)
    return tokens.squeeze(-1), chosen.squeeze(-1).clamp_(max=0.0)


def _truncate(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the likeliest tokens until their mass reaches top_p, the token that reaches it included; renormalise."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().exp_().cumsum_(dim=-1) - ordered.double().exp_()
    beyond = (before >= top_p) & (top_p < 1.0)
    beyond[:, 0] = False
    truncated = logprobs.masked_fill(torch.zeros_like(beyond).scatter_(-1, order, beyond), -torch.inf)
    return torch.where(top_p < 1.0, torch.log_softmax(truncated, dim=-1), logprobs)


# -- sequences -----

class Seats:
    """The host's record of up to `capacity` sequences of up to `max_length` tokens: arrays with a line ("seat") each.

    A sequence has its seat from its submission to its end, and a cache row only while its keys and values are there.
    `rows` maps rows to seats. Random numbers are drawn when a sequence sits down, one per token that it may produce,
    from its own stream.
    """

    def __init__(self, capacity: int, max_length: int, eos: npt.NDArray[np.bool_]) -> None:
        self.rows: Index = np.zeros(capacity, np.intp)  # the seat of each cache row; the first `active` are in use
        self.active, self.max_length = 0, max_length
        self.free = list(range(capacity - 1, -1, -1))
        self.key = np.zeros(capacity, np.int64)
        self.last = np.zeros(capacity, np.int64)  # the token that enters the next step
        self.position = np.zeros(capacity, np.int64)  # of that token: so many tokens are in the cache before it
        self.produced = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)
        self.computed = np.zeros(capacity, np.int64)  # tokens of its prompt, and of what was computed again
        self.routes_from = np.zeros(capacity, np.int64)  # tokens whose routes the caller has
        self.temperature = np.zeros(capacity, np.float32)
        self.top_p = np.zeros(capacity, np.float64)
        self._prompts: list[Ids] = [NO_IDS] * capacity  # with the prefix
        self.weights = [""] * capacity  # the adapter of each: with another one a prompt has other keys and values
        self._stops: dict[int, frozenset[int]] = {}  # seat -> ids that end its answer as the model's own do
        self._ends = np.ones(capacity, np.bool_)  # False: the model's own do not end it
        self._eos = eos
        self._streams = Streams()
        # Untouched pages cost nothing, so the longest case may be allowed for.
        self._uniforms = np.empty((capacity, max_length), np.float64)
        self._tokens = np.empty((capacity, max_length), np.int32)
        self._logprobs = np.empty((capacity, max_length), np.float32)
        self._versions = np.empty((capacity, max_length), np.uint32)

    def sit(self, request: Request) -> int:
        """Give a request a seat; it has no cache row yet."""
        seat, limit = self.free.pop(), request.max_new_tokens
        ids = np.concatenate((request.prompt_ids, request.prefix_ids))
        self._prompts[seat], self.weights[seat] = ids, request.extra.get("weights", "")
        self._ends[seat] = request.extra.get("ends", True)
        self.key[seat], self.routes_from[seat] = request.key, request.routes_from
        self.last[seat] = ids[-1]
        self.position[seat] = len(ids) - 1
        self.produced[seat] = self.computed[seat] = 0
        self.limit[seat] = limit
        self.temperature[seat] = request.temperature
        self.top_p[seat] = request.top_p
        if request.stop_ids:
            self._stops[seat] = frozenset(request.stop_ids)
        if request.temperature > 0:
            self._uniforms[seat, :limit] = self._streams.uniforms(request.seed, request.uid, request.segment, limit)
        else:
            self._uniforms[seat, :limit] = 0.5
        return seat

    def cached(self, seat: int) -> Ids:
        """The tokens whose keys and values its cache row has to hold: all tokens so far but the last."""
        ids = np.concatenate((self._prompts[seat], self._tokens[seat, : self.produced[seat]]))
        return ids[:-1].astype(np.int32, copy=False)

    def stand_up(self) -> None:
        """No sequence has a cache row any more."""
        self.active = 0

    def close_up(self, holes: list[int]) -> tuple[list[int], list[int]]:
        """Make the rows in use the first ones again; `holes` are the free rows among them, sorted. Returns from which
        rows to which the sequences move."""
        remaining, free = self.active - len(holes), set(holes)
        sources = [row for row in range(remaining, self.active) if row not in free]
        targets = [hole for hole in holes if hole < remaining]
        self.rows[targets] = self.rows[sources]
        self.active = remaining
        return sources, targets

    def uniforms(self, seats: Index) -> npt.NDArray[np.float64]:
        """The next random number of each, [seats, 1]."""
        return self._uniforms[seats, self.produced[seats]][:, None]

    def record(
        self, seats: Index, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32], version: int
    ) -> npt.NDArray[np.bool_]:
        """Write down one token for each; True where the sequence has ended."""
        produced = self.produced[seats]
        self._tokens[seats, produced] = tokens
        self._logprobs[seats, produced] = logprobs
        self._versions[seats, produced] = version
        self.produced[seats] = produced + 1
        self.position[seats] += 1
        self.last[seats] = tokens
        ended: npt.NDArray[np.bool_] = self._eos[tokens] & self._ends[seats]
        ended |= (produced + 1 >= self.limit[seats]) | np.isnan(logprobs)
        if self._stops:
            for place, seat in enumerate(seats.tolist()):
                if seat in self._stops:
                    ended[place] |= int(tokens[place]) in self._stops[seat]
        return ended

    def sampled(self, seat: int, begin: int) -> Ids:
        ids: Ids = self._tokens[seat, begin : self.produced[seat]].copy()
        return ids

    def leave(self, seat: int, aborted: bool = False, routes: Routes | None = None) -> Finished:
        """Free the seat; returns copies of what its sequence produced. `routes`: those of all tokens in its cache."""
        span = slice(0, int(self.produced[seat]))
        tokens = self._tokens[seat, span].copy()
        stops = self._stops.pop(seat, frozenset())
        stopped = not aborted and ((self._eos[tokens[-1]] and self._ends[seat]) or int(tokens[-1]) in stops)
        finish = Finish.ABORTED if aborted else Finish.EOS if stopped else Finish.LENGTH
        self.free.append(seat)
        logprobs, versions = self._logprobs[seat, span].copy(), self._versions[seat, span].copy()
        ended = Finished(int(self.key[seat]), tokens, logprobs, versions, finish, computed=int(self.computed[seat]))
        if routes is None or not len(tokens):
            return ended
        prompt = len(routes) - len(tokens)
        return replace(ended, routes=routes[prompt:], prompt_routes=routes[self.routes_from[seat] : prompt])


# -- prefill -----

@dataclass
class _Long:
    """A prompt that is computed in pieces, the seats that wait for it, and the row with its pieces so far."""

    ids: Ids
    seats: list[int]
    kept: KeptRow

    @property
    def left(self) -> int:
        return len(self.ids) - len(self.kept.ids)


@dataclass
class _Joining:
    """Rows of sequences with the same prompt; the first of them has `begin` tokens of it already."""

    ids: Ids
    rows: list[int]
    begin: int

    @property
    def left(self) -> int:
        return len(self.ids) - self.begin


TakeRow = Callable[[int, KeptRow | None], int]


class Prefill:
    """The queue of sequences without a cache row; `budget` is the tokens of one step, padding left out.

    - First come, first served. All that fit into the budget join at the next step; equal prompts are computed once.
    - A prompt that continues a kept row begins with the tokens of that row.
    - A prompt over the budget is computed in pieces, one per step, while running sequences continue. Its pieces are in
      a kept row, because a sequence that waits has a seat but no row.
    - Sequences whose cache is stale stand up and wait again, in front, with all of their tokens.
    """

    def __init__(self, seats: Seats, decoder: Decoder, kept: KeptRows, budget: int, device: torch.device,
                 take_row: TakeRow, free_rows: Callable[[], list[int]]) -> None:
        """`take_row` gives a seat a row, which begins with the tokens of a kept row; `free_rows` lists the rows without
        a running sequence."""
        self._seats, self._decoder, self._budget, self._device = seats, decoder, budget, device
        self._kept, self._take_row, self._free_rows = kept, take_row, free_rows
        self._queue: deque[int] = deque()
        self._begun: dict[int, KeptRow] = {}  # seat -> the kept row that its prompt begins with
        self._long: _Long | None = None
        self.computed = self.reused = 0  # tokens

    def __len__(self) -> int:
        return len(self._queue) + (len(self._long.seats) if self._long else 0)

    @property
    def joining(self) -> int:
        """Sequences that have their cache after the next `fill`."""
        if self._long is not None:
            return len(self._long.seats) if self._long.left <= self._budget else 0
        return sum(map(len, self._next().values()))

    def wait(self, seat: int) -> None:
        self._queue.append(seat)
        kept = self._kept.find(self._seats.cached(seat))
        if kept is not None:
            self._begun[seat] = kept

    def wait_again(self, seats: Iterable[int]) -> None:
        """New weights make every kept row stale. The sequences of `seats`, which lost their cache, wait in front of all
        others, shortest first; a long prompt begins again."""
        if self._long is not None:
            self._queue.extendleft(reversed(self._end_long()))
        self._kept.clear()
        self._begun.clear()
        self._queue.extendleft(sorted(seats, key=lambda seat: -int(self._seats.position[seat])))

    def forget(self, seat: int) -> bool:
        """Forget a seat; False if it was not waiting."""
        if self._long is not None and seat in self._long.seats:
            self._long.seats.remove(seat)
            self._long.kept.waiting -= 1
            if not self._long.seats:
                self._end_long()
        elif seat in self._queue:
            self._queue.remove(seat)
            if seat in self._begun:
                self._kept.release(self._begun.pop(seat))
        else:
            return False
        return True

    def fill(self) -> int:
        """Compute what the budget allows; sequences whose prompt is complete take rows. Returns their number."""
        if self._long is not None:
            count = self.joining
            self._piece(self._long)
            return count
        seats_of = self._next()
        if seats_of:
            self._join(seats_of)
        elif self._queue:
            self._begin_long()
        return sum(map(len, seats_of.values()))

    def _left(self, seat: int) -> int:
        """Tokens of the prompt that are still to be computed."""
        return int(self._seats.position[seat]) - (len(self._begun[seat].ids) if seat in self._begun else 0)

    def _next(self) -> dict[tuple[str, bytes], list[int]]:
        """The seats at the front of the queue that fit into the budget, by adapter and prompt (as bytes)."""
        seats_of: dict[tuple[str, bytes], list[int]] = {}
        left = self._budget
        for seat in self._queue:
            prompt = self._seats.weights[seat], self._seats.cached(seat).tobytes()
            if prompt not in seats_of:
                left -= self._left(seat)
                if left < 0:
                    break
            seats_of.setdefault(prompt, []).append(seat)
        return seats_of

    def _source(self, seats: Iterable[int], wanted: int) -> KeptRow | None:
        """The longest kept row that one of these seats, all with the same prompt, waits for. From here on `wanted` of
        them wait for it, and none for another row."""
        claims = [self._begun.pop(seat) for seat in seats if seat in self._begun]
        best = max(claims, key=lambda kept: len(kept.ids), default=None)
        for kept in claims:
            self._kept.release(kept)
        if best is not None:
            best.waiting += wanted
        return best

    def _join(self, seats_of: dict[tuple[str, bytes], list[int]]) -> None:
        joining: list[_Joining] = []
        for (_, ids), seats in seats_of.items():
            for _ in seats:
                self._queue.popleft()
            kept = self._source(seats, 1)
            begin = len(kept.ids) if kept else 0
            rows = [self._take_row(seats[0], kept), *(self._take_row(seat, None) for seat in seats[1:])]
            joining.append(_Joining(np.frombuffer(ids, np.int32), rows, begin))
            self._seats.computed[seats[0]] += joining[-1].left
        self.reused += sum(group.begin for group in joining)
        self.computed += sum(group.left for group in joining)
        if empty := [row for group in joining if not len(group.ids) for row in group.rows]:
            self._decoder.cache.begin(self._tensor(empty))
        self._batches([group for group in joining if group.left and not group.begin])
        self._batches([group for group in joining if group.left and group.begin])
        self._share([group for group in joining if not group.left])

    def _begin_long(self) -> None:
        """Begin the first prompt of the queue, which alone is over the budget, for all seats that have it."""
        ids, weights = self._seats.cached(self._queue[0]), self._seats.weights[self._queue[0]]
        alike = [seat for seat in self._queue if self._seats.weights[seat] == weights]
        same = [seat for seat in alike if np.array_equal(self._seats.cached(seat), ids)]
        self._queue = deque(seat for seat in self._queue if seat not in set(same))
        kept, copies = self._kept.open(self._source(same, len(same)), len(same), self._free_rows())
        self.copy(copies)
        self.reused += len(kept.ids)
        self._long = _Long(ids, same, kept)
        self._piece(self._long)

    def _piece(self, long: _Long) -> None:
        begin, kept = len(long.kept.ids), long.kept
        end = min(begin + self._budget, len(long.ids))
        ids = torch.from_numpy(long.ids[None, begin:end].astype(np.int64)).to(self._device)
        if begin:
            self._decoder.extend(ids, self._tensor([kept.row]), self._tensor(range(begin, end))[None], end)
        else:
            self._decoder.prefill(ids, self._tensor([kept.row]))
        self.computed += end - begin
        self._seats.computed[long.seats[0]] += end - begin
        kept.ids = long.ids[:end]
        if not long.left:
            for seat in long.seats:
                self._take_row(seat, kept)
            self._end_long()

    @torch.inference_mode()
    def _end_long(self) -> list[int]:
        """Give the long prompt up or end it; returns its seats. The row of its pieces is cleared unless a sequence has
        it: numbers that are not finite must not stay."""
        assert self._long is not None
        long, self._long = self._long, None
        self._kept.drop(long.kept)
        if long.kept.row in self._free_rows() and not self._kept.has(long.kept.row):
            self._decoder.cache.clear(self._tensor([long.kept.row]))
        return long.seats

    def _batches(self, joining: list[_Joining]) -> None:
        """Compute in batches, the shortest first. A batch ends where its padding would be more than its tokens."""
        batch: list[_Joining] = []
        real = furthest = 0
        for group in sorted(joining, key=lambda group: group.left):
            padded = (len(batch) + 1) * group.left - (real + group.left)
            most = max(real, PADDING)
            if self._decoder.equal_lengths:
                most = -1 if group.begin else 0
            reach = max(furthest, group.begin) + group.left
            too_far = reach > self._seats.max_length or (group.begin > 0 and (len(batch) + 1) * reach > GATHERED)
            if batch and (padded > most or too_far):
                self._compute(batch)
                batch, real, furthest = [], 0, 0
            batch.append(group)
            real, furthest = real + group.left, max(furthest, group.begin)
        if batch:
            self._compute(batch)

    def _compute(self, batch: list[_Joining]) -> None:
        """Compute the missing tokens of each group into its first row, and copy that into its other rows."""
        rows = self._tensor([group.rows[0] for group in batch])
        length = batch[-1].left  # the longest is the last
        ids = np.zeros((len(batch), length), np.int64)
        for k, group in enumerate(batch):
            ids[k, : group.left] = group.ids[group.begin :]
        padded = torch.from_numpy(ids).to(self._device)
        if batch[0].begin:
            begins = np.array([group.begin for group in batch])
            positions = torch.from_numpy(begins[:, None] + np.arange(length)).to(self._device)
            self._decoder.extend(padded, rows, positions, int(begins.max()) + length)
        else:
            self._decoder.prefill(padded, rows)
        self._share(batch)

    def _share(self, joining: list[_Joining]) -> None:
        self.copy([(group.rows[0], row, len(group.ids)) for group in joining for row in group.rows[1:]])

    def copy(self, copies: Copies) -> None:
        if copies:
            sources, targets, lengths = zip(*copies)
            self._decoder.cache.move(self._tensor(sources), self._tensor(targets), max(lengths))

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


# -- the engine -----

class TorchEngine(Engine):
    """`capacity` rows of one model on one device. `load` makes an engine for a model folder."""

    draw = staticmethod(sample_tokens)

    def __init__(
        self, model: Any, tokenizer: Any, *, capacity: int, max_length: int = 0, fast: bool = True, chat: bool = False,
        on_update: OnUpdate = "keep", prefill_tokens: int = PREFILL_TOKENS, prefix_keep_s: float = 0.0,
        known: TokenRows = ALL_ROWS, base: Path | None = None, clock: Callable[[], float] = time.monotonic,
        routing: Routing | None = None,
    ) -> None:
        """`known`: rows of the logits that stand for a token; no other id is ever drawn. `base`: the model's folder,
        None if it was not loaded from one. `routing`: of a mixture of experts, where answers are to have routes."""
        self._model = model.eval().requires_grad_(False)
        self._device: torch.device = next(model.parameters()).device
        eos_ids = eos_ids_of(model, tokenizer)
        super().__init__(Tokens(tokenizer, eos_ids, chat), capacity, _max_length(model, max_length), clock)
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self._known = known
        eos = np.zeros(max(self._vocabulary, *eos_ids, 0) + 1, np.bool_)
        eos[list(eos_ids)] = True
        self.decoder = choose_decoder(model, capacity, self.max_length, fast)
        self._routes: Any = None  # of all rows
        if routing is not None:
            routed = capabilities.plug("routes", "capture", "learner.routes")
            self._routes = self.decoder = routed(self.decoder, model, routing, capacity, self.max_length)
        self._seats = Seats(capacity, self.max_length, eos)  # `_running` has the seat of each key
        self._kept = KeptRows(prefix_keep_s, clock)
        self._waiting = Prefill(self._seats, self.decoder, self._kept, max(1, prefill_tokens), self._device,
                                self._take_row, self._free_rows)
        self._on_update = on_update
        self._holes: list[int] = []
        self._sampling: Sampling | None = None
        self._loader = WeightLoader(model, base)

    @classmethod
    def load(
        cls, path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu", **settings: Any
    ) -> TorchEngine:
        """An engine for a model folder; nothing is downloaded. `settings` are those of the constructor."""
        quiet.disable_progress_bar()  # this process has a log, no terminal
        try:
            read: Any = AutoModelForCausalLM.from_pretrained  # whose types leave out what it returns then
            model, info = read(str(path), local_files_only=True, output_loading_info=True)
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as problem:  # of any type: the library's readers have many
            what = "no causal language model and tokenizer"
            raise UserError(f"{path}: {what} ({cause(problem)}); see model.path") from problem
        require_whole(path, info)
        model = model.to(device=device, dtype=getattr(torch, dtype))
        return cls(model, tokenizer, known=token_rows(Path(path)), base=Path(path), **settings)

    # -- the interface -----

    @property
    def decoding(self) -> int:
        return 0 if self.paused else self._seats.active - len(self._holes) + self._waiting.joining

    def _begin(self, requests: list[Request]) -> None:
        for request in requests:
            self._check(request)
        for request in requests:
            self._running[request.key] = seat = self._seats.sit(request)
            self._waiting.wait(seat)

    def step(self) -> list[Finished]:
        finished = self._take_done()
        if not self.paused:
            with torch.inference_mode():
                if self._waiting.fill():  # before the rows close up, so that joining sequences fill the holes
                    self._sampling = None
                self._close_up()
                if self._seats.active:
                    finished.extend(self._decode())
        return finished

    def _end_now(self, keys: list[int]) -> None:
        for key in keys:
            seat, row = self._running.pop(key), None
            if not self._waiting.forget(seat):
                row = next(row for row in self._used_rows() if self._seats.rows[row] == seat)
                self._holes = sorted([*self._holes, row])
            self._done.append(self._seats.leave(seat, aborted=True, routes=self._routes_of(seat, row)))

    def _routes_of(self, seat: int, row: int | None) -> Routes | None:
        """Take the routes of a sequence that ends; `row` is None where it waits."""
        if self._routes is None:
            return None
        routes: Routes = self._routes.taken(seat, row, int(self._seats.position[seat]))
        return routes

    def sampled(self, key: int, begin: int) -> Ids:
        return self._seats.sampled(self._running[key], begin) if key in self._running else NO_IDS

    def receiver(self, settings: TransportSettings, name: str) -> Receiver | None:
        """Share one copy, where the learner trains these very tensors; else None, for the ordinary receiver."""
        if settings.transport != ONE_COPY:
            return None
        receiver = make_receiver(settings, name)
        assert isinstance(receiver, SharedReceiver)
        receiver.share(self.parameters())
        return receiver

    def _update(self, receiver: Receiver) -> tuple[int, int]:
        stamp = self._loader.update(receiver)
        if self._on_update == "recompute":  # all that run give their rows back and wait for new keys and values
            seats = self._seats.rows[self._used_rows()]
            if self._routes is not None:
                self._routes.remember(seats, self._used_rows(), self._seats.position[seats])
            self._waiting.wait_again(seats.tolist())
            self._seats.stand_up()
            self._holes = []
        return stamp

    def parameters(self) -> dict[str, torch.Tensor]:
        """Live tensors, written in place between two steps."""
        return dict(self._model.named_parameters())

    def statistics(self) -> Statistics:
        statistics = super().statistics()
        return replace(
            statistics, waiting=len(self._waiting), prefill_tokens=self._waiting.computed,
            prefix_tokens=self._waiting.reused,
            cache_tokens=int(self._seats.position[self._seats.rows[self._used_rows()]].sum()) + self._kept.tokens,
            cache_capacity=self.capacity * self.max_length, pause_s=statistics.pause_s + statistics.update_s,
        )

    # -- joining and leaving -----

    def _used_rows(self) -> list[int]:
        holes = set(self._holes)
        return [row for row in range(self._seats.active) if row not in holes]

    def _free_rows(self) -> list[int]:
        """Rows without a running sequence."""
        return [*self._holes, *range(self._seats.active, self.capacity)]

    def _close_up(self) -> None:
        """Make the rows in use the first ones."""
        if not self._holes:
            return
        seats = self._seats
        span = int(seats.position[seats.rows[: seats.active]].max())
        sources, targets = seats.close_up(self._holes)
        self._holes, self._sampling = [], None
        moved = [(source, target, span) for source, target in zip(sources, targets) if span]
        self._waiting.copy([*moved, *self._kept.closed_up(sources, targets)])

    def _take_row(self, seat: int, kept: KeptRow | None) -> int:
        seats = self._seats
        if self._holes:
            row = self._holes.pop(0)
        else:
            row, seats.active = seats.active, seats.active + 1
        seats.rows[row] = seat
        if len(self._kept):
            self._waiting.copy(self._kept.occupy(row, kept, self._free_rows()))
        return row

    # -- one decoding step -----

    def _decode(self) -> list[Finished]:
        seats = self._seats
        running: Index = seats.rows[: seats.active]
        positions = seats.position[running]
        span = min(-(-(int(positions.max()) + 1) // SPAN_STEP) * SPAN_STEP, self.max_length)
        if self._sampling is None:
            self._sampling = self._make_sampling(running)
        logits = self.decoder.step(self._to_device(seats.last[running]), self._to_device(positions), span)
        uniforms = self._to_device(seats.uniforms(running))
        tokens, logprobs = self.draw(self._known.mask(logits), uniforms, self._sampling)
        sampled, measured = tokens.cpu().numpy(), logprobs.cpu().numpy()
        ended = seats.record(running, sampled, measured, self.version)
        self._counts.steps += 1
        self._counts.tokens += len(running)
        if not ended.any():
            return []
        self._holes = ended.nonzero()[0].tolist()
        if (spoilt := np.isnan(measured)).any():
            self.decoder.cache.clear(self._to_device(spoilt.nonzero()[0]))
        if self._kept.keep_s:
            for row in self._holes:
                if not np.isnan(measured[row]):
                    self._kept.park(row, seats.cached(int(running[row])))
        rows = zip(running[ended].tolist(), self._holes, strict=True)
        finished = [seats.leave(seat, routes=self._routes_of(seat, row)) for seat, row in rows]
        for sequence in finished:
            del self._running[sequence.key]
        return finished

    def _make_sampling(self, running: Index) -> Sampling:
        """Settings of the running rows, for as long as no sequence joins or leaves."""
        temperature, top_p = self._seats.temperature[running], self._seats.top_p[running]
        greedy = temperature < COLDEST
        inverse = 1.0 / np.where(greedy, 1.0, temperature)
        return Sampling(
            inverse_temperature=self._to_device(inverse[:, None]) if (inverse != 1.0).any() else None,
            greedy=self._to_device(greedy[:, None]) if greedy.any() else None,
            top_p=self._to_device(top_p[:, None]) if (top_p < 1.0).any() else None,
        )

    def _check(self, request: Request) -> None:
        """ValueError that names a request without tokens, or with an id beyond the model's vocabulary."""
        ids = np.concatenate((request.prompt_ids, request.prefix_ids))
        name = f"request {request.key} (uid {shown_uid(request.uid)})"
        if not len(ids):
            raise ValueError(f"{name} has no tokens; a prompt needs at least one")
        if len(wrong := ids[(ids < 0) | (ids >= self._vocabulary)]):
            raise ValueError(f"{name} has token id {wrong[0]}; the model knows 0 to {self._vocabulary - 1}")

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _max_length(model: Any, wanted: int) -> int:
    """The smaller of the wanted length and the model's number of positions."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return min((int(limit) for limit in (wanted, positions) if limit), default=DEFAULT_MAX_LENGTH)


def warm(topology: Topology) -> None:
    """Import what `make` imports when it loads the model's folder."""
    import_classes(topology.model.path)


def make(topology: Topology, process: str) -> TorchEngine:
    generation = topology.generation
    return TorchEngine.load(
        topology.model.path, capacity=generation.max_batch, max_length=topology.longest, dtype=topology.model.dtype,
        device=choose_device(topology.device_of(process)), chat=topology.data.template == "chat",
        on_update="recompute" if generation.on_update == "recompute" else "keep",
        prefill_tokens=generation.prefill_tokens, prefix_keep_s=topology.prefix_keep_s,
        routing=topology.derived.routing,
    )
