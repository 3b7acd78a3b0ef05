"""Torch engine for many adapters: each row of the cache carries the place of its adapter, each layer adds it.

`RowsEngine` is driven as every engine is; a request names the folder of its adapter (`weights`, empty: the base). Talks
to folders of peft's format whose names are numbers, and to the decoder. Knows nothing of clients, logs or training.

- A and B of the adapters in use are stacked by place, padded with zeros to the largest rank; place 0 is the base, all
  zeros. The base is computed once for all rows. On a CPU, in float32 and with one thread, each row's change is added in
  C++ (`_adapters`); else a step gathers its rows by place, multiplies twice (`bmm`) and adds the rows back.
- Where requests name whole models, the engine has the weights of one: requests of another wait until none uses them.
- An adapter in use keeps its place. A request whose adapter finds none waits, in the order of arrival, and never fails.
- Sequences of different adapters share no prompt, and no row is kept for a later request.
- On a CPU, in float32 and with the fast decoder, an answer and its log-probabilities are the same to the bit, whatever
  is drawn beside it: a step has as many rows at least as the products of this machine need for that (`steady_rows`),
  prompts are padded to whole vectors. It costs larger batches nothing.
- Rows get their places by their order: a layer has to see all tokens of a forward in the order of the rows. Adapters of
  layers that may not, as the experts of a mixture, are refused, and a layer that does not ends the engine.
- The version of a token is the number of its adapter's folder; 0 is the base.
- A folder that cannot be used refuses its requests, and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from busrl import _adapters
from busrl.engines.base import Finished, Request
from busrl.engines.torch import lora
from busrl.engines.torch.decoder import Decoder, FastDecoder, RowCache, WholeDecoder
from busrl.engines.torch.engine import PREFILL_TOKENS, Index, Prefill, Sampling, TorchEngine
from busrl.engines.torch.prefix import KeptRow
from busrl.errors import BugError, UserError, WeightsRefused
from busrl.service.adapters import is_of_expert
from busrl.service.beside import BASE, Beside, weights_of, whole_turn
from busrl.service.model_folders import read_into
from busrl.service.sampling import PLACES
from busrl.training.batch import numbered

VECTOR = 16  # attention sums a prompt in vectors of so many positions at most: its padding begins with a whole one
LEAST_RANK = 8  # that A and B are padded to: products with few columns sum in another order
SMALL = 400  # numbers: products of fewer torch takes in a loop of its own
LOOKED_AT = 4096  # outputs of a weight: its products are tried at the start
MOST_STEADY = 32  # rows that a step may be padded to


# -- products that do not depend on what is beside a row -----


@torch.inference_mode()
def steady_rows(weights: Iterable[Tensor], most: int = MOST_STEADY) -> int:
    """The least number of rows from which on each row's product with each of these weights [out, in] is the same to the
    bit, whatever the other rows are and however many. 0 if that is so for no number, or was not looked at: on devices
    whose libraries choose their kernels by more than the shape."""
    shapes = {(weight.shape, weight.dtype): weight for weight in weights}.values()
    if any(weight.device.type != "cpu" or weight.dtype != torch.float32 for weight in shapes):
        return 0
    needed = [_steady_from(partial(F.linear, weight=weight[:LOOKED_AT]), weight.shape[1:], most) for weight in shapes]
    return max(needed) if max(needed) <= most else 0


@torch.inference_mode()
def steady_lines(weights: Iterable[Tensor], most: int = MOST_STEADY) -> int:
    """The least number of rows of a place, in the same sense: products with A and B are of several places at a time.
    0 if there is none."""
    ranks = (LEAST_RANK, 2 * LEAST_RANK)
    sides = {side for weight in weights for side in weight.shape}
    shapes = {shape for side in sides for rank in ranks for shape in ((side, rank), (rank, min(side, LOOKED_AT)))}
    needed = max(_steady_from(_product_by_place(shape), (2, shape[0]), most) for shape in sorted(shapes))
    return needed if needed <= most else 0


def _product_by_place(shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    weight = torch.randn((2, *shape), generator=torch.Generator().manual_seed(1))
    return lambda rows: torch.bmm(rows.transpose(0, 1).contiguous(), weight).transpose(0, 1)


def _steady_from(product: Callable[[Tensor], Tensor], of_row: Sequence[int], most: int) -> int:
    """The least number of rows, each of shape `of_row`, from which on the product of a row is always the same."""
    rows = torch.randn((2 * most, *of_row), generator=torch.Generator().manual_seed(0))
    whole = product(rows)
    for count in range(most, 0, -1):
        front, back = product(rows[:count]), product(rows[-count:])
        if not (torch.equal(front, whole[:count]) and torch.equal(back, whole[-count:])):
            return count + 1
    return 1


# -- which rows use which place -----


@dataclass(frozen=True)
class Spread:
    """The places of the rows of one forward, and the cells in which they are multiplied: one line for each place from
    `first` to before `end`, as long as the longest, and as `least`: a product of few rows sums in another order.
    `cells`: the row in each cell; `back`: the cell of each row; both None where the rows are in that order already."""

    rows: int
    first: int
    end: int
    cells: Tensor | None
    back: Tensor | None
    places: Tensor  # [rows]
    views: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by stack: what `Stack.between` gave

    @classmethod
    def of(cls, places: Sequence[int], device: torch.device, least: int) -> Spread:
        of_rows = np.array(places, np.int64)
        first, end = int(of_rows.min()), int(of_rows.max()) + 1
        counts = np.bincount(of_rows - first, minlength=end - first)
        longest, order = max(least, int(counts.max())), np.argsort(of_rows, kind="stable")
        cells, back = np.zeros((end - first) * longest, np.int64), np.empty_like(of_rows)
        taken = (of_rows[order] - first) * longest + numbered(counts)
        cells[taken], back[order] = order, taken
        in_order = np.array_equal(cells, np.arange(len(of_rows)))
        cells_of, back_of, places_of = (torch.from_numpy(part).to(device) for part in (cells, back, of_rows))
        return cls(
            len(of_rows), first, end, None if in_order else cells_of, None if in_order else back_of, places_of
        )

    @classmethod
    def as_they_are(cls, places: Sequence[int]) -> Spread:
        """Rows that are multiplied where they are, on the CPU."""
        return cls(len(places), min(places), max(places) + 1, None, None, torch.tensor(places, dtype=torch.int64))

    @property
    def plain(self) -> bool:
        """True if all rows are of the base."""
        return self.end == 1


# -- what is added to a layer -----


class Stack:
    """A and B of every place for one weight of the decoder: [places, in, parts, rank] and [places, parts, rank, out].
    A decoder may have fused several layers into a weight: each is a part of it. B has the adapter's scale."""

    def __init__(self, weight: Tensor, places: int) -> None:
        self.outputs, self.inputs = weight.shape
        self.weight, self._places = weight, places
        self._parts: list[slice] = []  # rows of the weight, by part
        self.down = self.up = weight.new_empty(0)
        self.rank = 0

    def part_of(self, weight: Tensor) -> int | None:
        """The number of the part whose rows that layer's weight are; None if it lies elsewhere, or is another layer's
        too."""
        row_bytes = self.inputs * weight.element_size()
        begin, beyond = divmod(weight.data_ptr() - self.weight.data_ptr(), row_bytes)
        rows = slice(begin, begin + len(weight))
        if beyond or not 0 <= begin < self.outputs or weight.shape[1] != self.inputs or rows in self._parts:
            return None
        self._parts.append(rows)
        return len(self._parts) - 1

    def rows_of(self, part: int) -> slice:
        return self._parts[part]

    def shape_of(self, part: int) -> tuple[int, int]:
        rows = self._parts[part]
        return rows.stop - rows.start, self.inputs

    def put(self, place: int, part: int, low: lora.Low) -> None:
        rank = len(low.down)
        if rank > self.rank:
            self._widen(max(rank, LEAST_RANK))
        self.down[place, :, part, :rank] = low.down.T
        self.up[place, part, :rank, self._parts[part]] = low.up.T.float() * low.scale

    def clear(self, place: int) -> None:
        if self.rank:
            self.down[place] = 0
            self.up[place] = 0

    def add(self, output: Tensor, rows: Tensor, spread: Spread, part: slice | None) -> Tensor:
        """Add what the rows' adapters give to the output of this weight, or of a part of it; on the CPU, in float32."""
        output, rows, columns = output.contiguous(), rows.contiguous(), part or slice(0, self.outputs)
        count, each = rows.numel() // self.inputs, rows.numel() // self.inputs // spread.rows
        _adapters.add(
            output.data_ptr(), rows.data_ptr(), spread.places.data_ptr(), self.down.data_ptr(),
            self.up.data_ptr() + columns.start * self.up.element_size(), spread.rows, len(self.down), count, each,
            self.inputs, len(self._parts) * self.rank, columns.stop - columns.start, self.outputs,
        )
        return output

    def between(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """A [places, in, parts x rank] and B [places, parts x rank, out] of these places; views."""
        return self.down[first:end].flatten(2), self.up[first:end].flatten(1, 2)

    def _widen(self, rank: int) -> None:
        before, parts = self.rank, len(self._parts)
        down = self.weight.new_zeros((self._places, self.inputs, parts, rank))
        up = self.weight.new_zeros((self._places, parts, rank, self.outputs))
        if before:
            down[..., :before], up[:, :, :before] = self.down, self.up
        self.down, self.up, self.rank = down, up, rank


class Adapters:
    """The adapters in places 1 to `places`, stacked, and what they add to the layers of a model under a decoder.
    `steady`: the least number of rows from which on a row's products are the same to the bit; 0 if they never are."""

    def __init__(self, model: Any, decoder: Decoder, places: int) -> None:
        if isinstance(decoder, WholeDecoder):
            raise UserError(f"{type(model).__name__}: a service needs a decoder with a cache; use engine = vllm")
        self._device: torch.device = next(model.parameters()).device
        self._places: dict[str, int] = {}  # by folder, the one used longest ago first
        self._users: dict[int, int] = dict.fromkeys(range(1, places + 1), 0)  # requests that run or wait for a step
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        multiplied = [layer.weight.detach() for layer in layers.values()]
        if isinstance(decoder, FastDecoder):
            decoder.linear = self.linear
            multiplied = [model.lm_head.weight.detach()]
            for block in decoder.blocks:
                multiplied += [block.qkv, block.output.detach(), block.gate_up, block.down.detach()]
        self._stacks = [Stack(weight, places + 1) for weight in multiplied]
        self._stack_at = {stack.weight.data_ptr(): stack for stack in self._stacks}  # for `linear`
        self._layers: dict[str, tuple[Stack, int]] = {}  # stack and part of each layer's weight, by its name
        for place, (name, layer) in enumerate(layers.items()):
            # Where the model calls its layers each has its own, also of those that share a weight.
            among = self._stack_at.values() if isinstance(decoder, FastDecoder) else self._stacks[place : place + 1]
            for stack in among:
                if (part := stack.part_of(layer.weight)) is not None:
                    self._layers[f"{name}.weight"] = stack, part
                    layer.register_forward_hook(partial(self._after, name, stack, stack.rows_of(part)))
                    break
        exact = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in multiplied)
        self._in_place = exact and torch.get_num_threads() == 1
        self.steady = steady_rows(multiplied) if isinstance(decoder, FastDecoder) else 0
        lines = 1 if self._in_place else steady_lines(multiplied) if self.steady else 0
        self.steady = self.steady if lines else 0
        narrowest = min(min(weight.shape) for weight in multiplied)
        self._least = max(2, lines, -(-SMALL // (narrowest * LEAST_RANK))) if self.steady else 1  # rows of a place
        width = model.base_model.layers[0].self_attn.head_dim if self.steady else SMALL
        self.least_span = -(-SMALL // width)  # positions that a step looks at
        self._spread: Spread | None = None
        self._forward = 0, 0  # sequences and tokens of each, while there is a spread

    # -- places -----

    def next_of(self, waiting: Mapping[int, str]) -> list[int]:
        """The keys of requests that may ask for a place, of those that wait, by key, each with its adapter."""
        return list(waiting)

    def take(self, folder: str) -> int | None:
        """The place of an adapter, which is kept until as many calls of `release`; None if all places are in use.
        WeightsRefused if the folder cannot be used."""
        if folder == BASE:
            return 0
        place = self._places.pop(folder, None)
        if place is None and (place := self._vacant()) is not None:
            self._load(Path(folder), place)
        if place is not None:
            self._places[folder] = place
            self._users[place] += 1
        return place

    def release(self, folder: str) -> None:
        if folder != BASE:
            self._users[self._places[folder]] -= 1

    def place_of(self, folder: str) -> int:
        return self._places[folder] if folder != BASE else 0

    def _vacant(self) -> int | None:
        """The lowest place that never had an adapter, or that of the one used longest ago, which goes."""
        if unused := self._users.keys() - set(self._places.values()):
            return min(unused)
        folder = next((folder for folder, place in self._places.items() if not self._users[place]), None)
        return None if folder is None else self._places.pop(folder)

    @torch.inference_mode()
    def _load(self, folder: Path, place: int) -> None:
        adapter = lora.read(folder)
        for name, low in adapter.items():
            if is_of_expert(name):
                raise WeightsRefused(
                    f"{folder}: the adapter changes {name!r}, an expert, which sees the tokens of all rows that are "
                    "routed to it, and not whose they are; create the model with train_mlp=False"
                )
            shape = (low.up.shape[0], low.down.shape[1])
            if name not in self._layers or self._layers[name][0].shape_of(self._layers[name][1]) != shape:
                raise WeightsRefused(f"{folder}: the adapter changes {name!r} of shape {list(shape)}, which is not a "
                                     "linear layer of this model")
        for stack in self._stacks:
            stack.clear(place)
        for name, low in adapter.items():
            stack, part = self._layers[name]
            stack.put(place, part, low)

    # -- layers -----

    @contextlib.contextmanager
    def using(self, spread: Spread, sequences: int = 1, length: int = 0) -> Iterator[None]:
        """Within it a forward of so many sequences (or rows, of one token) of this length uses these places. The length
        of one alone may be anything."""
        if spread.rows != sequences:
            raise BugError(f"a forward of {sequences} rows, and places for {spread.rows}")
        self._spread, self._forward = None if spread.plain else spread, (sequences, length)
        try:
            yield
        finally:
            self._spread = None

    def spread(self, folders: Iterable[str]) -> Spread:
        places = [self.place_of(folder) for folder in folders]
        return Spread.as_they_are(places) if self._in_place else Spread.of(places, self._device, self._least)

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Product of a layer, in the place of `F.linear`, with what the adapters add."""
        output, spread, stack = F.linear(rows, weight, bias), self._spread, self._stack_at[weight.data_ptr()]
        return output if spread is None or not stack.rank else self._added(output, stack, rows, spread, None)

    def _after(
        self, name: str, stack: Stack, part: slice, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """Add to what a layer gave, a part of the stack's weight, where the model itself has called it."""
        if self._spread is None or not stack.rank or not output.numel():
            return output
        if inputs[0].shape[:-1] == self._forward:
            return self._added(output, stack, inputs[0], self._spread, part)
        rows = self._by_sequence(name, inputs[0])
        lines = output.reshape(*rows.shape[:-1], -1)
        return self._added(lines, stack, rows, self._spread, part).view(output.shape)

    def _by_sequence(self, name: str, rows: Tensor) -> Tensor:
        """The rows that a layer was given as [sequences, length, in]."""
        sequences, length = self._forward
        if sequences > 1 and len(rows) != sequences * length and tuple(rows.shape[:2]) != (sequences, length):
            raise UserError(
                f"{name}: rows of shape {list(rows.shape)} in a forward of {sequences} sequences of {length} tokens; a "
                "layer that does not see every token once cannot have another adapter for each row; use engine = vllm"
            )
        return rows.reshape(sequences, -1, rows.shape[-1])

    def _added(self, output: Tensor, stack: Stack, rows: Tensor, spread: Spread, part: slice | None) -> Tensor:
        """Add what the adapters of rows [rows, in], or [sequences, length, in], change."""
        if self._in_place:
            return stack.add(output, rows, spread, part)
        change = self._change(stack, rows, spread)
        return output.add_(change if part is None else change[..., part])

    def _change(self, stack: Stack, rows: Tensor, spread: Spread) -> Tensor:
        """The sum to add for such rows; all outputs of the stack's weight."""
        if rows.ndim == 3 and rows.shape[1] > 1:
            return self._of_sequences(stack, rows, spread)
        if id(stack) not in spread.views:
            spread.views[id(stack)] = stack.between(spread.first, spread.end)
        down, up = spread.views[id(stack)]
        flat = rows.reshape(spread.rows, stack.inputs)
        cells = flat if spread.cells is None else flat.index_select(0, spread.cells)
        change = torch.bmm(torch.bmm(cells.view(spread.end - spread.first, -1, stack.inputs), down), up).flatten(0, 1)
        if spread.back is not None:
            change = change.index_select(0, spread.back)
        return change.view(*rows.shape[:-1], -1)

    def _of_sequences(self, stack: Stack, rows: Tensor, spread: Spread) -> Tensor:
        down, up = stack.between(spread.first, spread.end)
        if len(down) > 1:
            which = spread.places - spread.first
            down, up = down[which], up[which]
        count = len(rows)
        return torch.bmm(torch.bmm(rows, down.expand(count, -1, -1)), up.expand(count, -1, -1))


class WholeModel(Adapters):
    """The weights of one folder, in the place of the model's own: all that run use them, without an adapter. Other
    folders have their turn when those have ended. `base`: the folder of the model as it was loaded."""

    def __init__(self, model: Any, decoder: Decoder, base: Path | None) -> None:
        super().__init__(model, decoder, 0)
        self._parameters = dict(model.named_parameters())
        self._base, self._used = base, 0
        self._loaded: str | None = BASE  # None while another folder is read, and after that failed

    def next_of(self, waiting: Mapping[int, str]) -> list[int]:
        chosen = whole_turn(waiting.values(), self._loaded, self._used)
        return [key for key, folder in waiting.items() if folder == chosen]

    def take(self, folder: str) -> int:
        if folder != self._loaded:
            assert not self._used
            self._loaded = None
            read_into(Path(folder) if folder != BASE else self._folder_of_base(), self._parameters)
            self._loaded = folder
        self._used += 1
        return 0

    def release(self, folder: str) -> None:
        self._used -= 1

    def place_of(self, folder: str) -> int:
        return 0

    def _folder_of_base(self) -> Path:
        if self._base is None:
            raise WeightsRefused("the engine's model was not loaded from a folder; it has no base to go back to")
        return self._base


class AdaptedDecoder(Decoder):
    """A decoder whose rows use adapters: `fill` tells those of the next prefill, `seat` those of the next steps.
    Rows that pad a step write to the last position of the cache, where no sequence has a token: its last one enters no
    step."""

    cache: RowCache

    def __init__(self, decoder: Decoder, adapters: Adapters) -> None:
        assert isinstance(decoder.cache, RowCache)
        self._decoder, self._adapters = decoder, adapters
        self.cache, self.equal_lengths = decoder.cache, decoder.equal_lengths
        self._least = adapters.steady
        self.cache.reserve(0, self._least)
        self._folders: dict[int, str] = {}  # of the rows that were filled last
        self._seated = adapters.spread([BASE])

    def fill(self, row: int, folder: str) -> None:
        """The next prefill of that row is for this adapter."""
        self._folders[row] = folder

    def seat(self, folders: Iterable[str]) -> None:
        """The rows of the next steps are of these adapters."""
        seated = list(folders)
        self._seated = self._adapters.spread([*seated, *seated[-1:] * (self._least - len(seated))])

    def prefill(self, ids: Tensor, rows: Tensor) -> None:
        if self._least:
            whole = max(VECTOR, self._least)
            padded = min(-(-ids.shape[1] // whole) * whole, self.cache.max_length)
            ids = F.pad(ids, (0, padded - ids.shape[1]))
            self._reserve(padded)
        with self._adapters.using(self._filled(rows), *ids.shape):
            self._decoder.prefill(ids, rows)

    def extend(self, ids: Tensor, rows: Tensor, positions: Tensor, span: int) -> None:
        self._reserve(span)
        with self._adapters.using(self._filled(rows), *ids.shape):
            self._decoder.extend(ids, rows, positions, span)

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        count, more = len(tokens), max(0, self._least - len(tokens))
        if self._least:
            span = max(span, self._adapters.least_span)
            span = min(-(-span // VECTOR) * VECTOR, self.cache.max_length)
            self._reserve(span)
            tokens = F.pad(tokens, (0, more))
            positions = F.pad(positions, (0, more), value=self.cache.room - 1)
        with self._adapters.using(self._seated, len(tokens), 1):
            return self._decoder.step(tokens, positions, span)[:count]

    def _reserve(self, span: int) -> None:
        """Keep a position behind all that sequences have."""
        self.cache.reserve(min(span + 1, self.cache.max_length))

    def _filled(self, rows: Tensor) -> Spread:
        return self._adapters.spread(self._folders[row] for row in rows.tolist())


class AdaptedPrefill(Prefill):
    """The queue of sequences without a cache row, of several adapters."""

    def _piece(self, long: Any) -> None:
        assert isinstance(self._decoder, AdaptedDecoder)
        self._decoder.fill(long.kept.row, self._seats.weights[long.seats[0]])
        super()._piece(long)


# -- the engine -----


class RowsEngine(Beside, TorchEngine):
    """A torch engine whose requests name their adapter; at most `places` adapters are in use at once. With `whole` they
    name the folder of a whole model."""

    def __init__(
        self, model: Any, tokenizer: Any, *, places: int = PLACES, prefill_tokens: int = PREFILL_TOKENS,
        whole: bool = False, **settings: Any,
    ) -> None:
        super().__init__(model, tokenizer, **{**settings, "prefix_keep_s": 0.0})
        self.adapters = (WholeModel(model, self.decoder, settings.get("base")) if whole
                         else Adapters(model, self.decoder, places))
        self._adapted = self.decoder = AdaptedDecoder(self.decoder, self.adapters)
        self._waiting = AdaptedPrefill(
            self._seats, self._adapted, self._kept, max(1, prefill_tokens), self._device, self._take_row,
            self._free_rows,
        )
        self._folders: dict[int, str] = {}  # weights of the requests that have them, by key

    # -- weights of requests -----

    def _begin(self, requests: list[Request]) -> None:
        for request in requests:
            self._check(request)
        self._beside |= {request.key: request for request in requests}
        self._admit()

    def _advance(self) -> None:
        self._admit()

    def _admit(self) -> None:
        """Let requests begin whose weights are there, or can be had now."""
        held = {key: weights_of(request) for key, request in self._beside.items() if key not in self._folders}
        starting = []
        for key in self.adapters.next_of(held):
            try:
                place = self.adapters.take(held[key])
            except WeightsRefused as problem:
                self._done.append(self._given_up(key, refused=str(problem)))
                continue
            if place is not None:
                self._folders[key] = held[key]
                starting.append(self._beside[key])
        if starting:
            self._start(starting)

    def _start(self, requests: list[Request]) -> None:
        """Let requests begin that have their weights."""
        for request in requests:
            del self._beside[request.key]
        super()._begin(requests)

    def _decode(self) -> list[Finished]:
        return [self._ended(finished) for finished in super()._decode()]

    def _end_now(self, keys: list[int]) -> None:
        super()._end_now(keys)
        ended = set(keys)
        self._done = [self._ended(finished) if finished.key in ended else finished for finished in self._done]

    def _given_up(self, key: int, refused: str = "") -> Finished:
        finished = super()._given_up(key, refused)
        return self._ended(finished) if key in self._folders else finished

    def _ended(self, finished: Finished) -> Finished:
        """Give up the place; the tokens get the number of their weights."""
        folder = self._folders.pop(finished.key)
        self.adapters.release(folder)
        return replace(finished, versions=np.full_like(finished.versions, int(Path(folder).name) if folder else 0))

    # -- rows -----

    def _take_row(self, seat: int, kept: KeptRow | None) -> int:
        row = super()._take_row(seat, kept)
        self._adapted.fill(row, self._seats.weights[seat])
        return row

    def _make_sampling(self, running: Index) -> Sampling:
        """Called whenever the running rows are others than before."""
        self._adapted.seat(self._seats.weights[seat] for seat in running.tolist())
        return super()._make_sampling(running)
