"""Routes that are noted in vLLM's worker, in a batch and a block cache that move as vLLM's do."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.engines.vllm.capture import MARK, Capture, objection

LAYERS, TOP_K, EXPERTS, BLOCK, BLOCKS, ROWS, WIDTH = [1, 3], 2, 16, 4, 24, 4, 16


class Router:
    """A router that tells its choice to whoever asks for it."""

    def set_capture_fn(self, told: Any) -> None:
        self.told = told


class Table:
    block_size = BLOCK

    def __init__(self) -> None:
        self.blocks = np.zeros((ROWS, WIDTH), np.int32)

    def get_numpy_array(self) -> Any:
        return self.blocks


class Batch:
    """As much of vLLM's batch as is looked at: the last row moves into the hole of one that leaves."""

    def __init__(self) -> None:
        self.req_ids: list[str] = []
        self.num_computed_tokens_cpu = np.zeros(ROWS, np.int32)
        self.block_table = [Table()]

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @property
    def req_id_to_index(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.req_ids)}

    def remove_request(self, name: str) -> None:
        hole, last = self.req_ids.index(name), len(self.req_ids) - 1
        blocks = self.block_table[0].blocks
        self.req_ids[hole], blocks[hole] = self.req_ids[last], blocks[last]
        self.req_ids.pop()
        blocks[last] = 0


def runner_of(layers: list[int] = LAYERS, **changes: Any) -> Any:
    modules = [SimpleNamespace(), *(SimpleNamespace(layer_id=layer, router=Router()) for layer in layers)]
    model = SimpleNamespace(modules=lambda: modules)
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))
    runner = SimpleNamespace(
        get_model=lambda: model, input_batch=Batch(), max_num_tokens=64, max_num_reqs=ROWS, speculative_config=None,
        query_start_loc=SimpleNamespace(np=np.zeros(ROWS + 1, np.int32)), _model_forward=lambda: None,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS),
        model_config=SimpleNamespace(enforce_eager=True),
    )
    vars(runner).update(changes)
    return runner


def chosen(tokens: tuple[int, ...], version: int, layer: int) -> list[int]:
    """The experts of the last of these tokens, which depend on all of them and on the weights."""
    first = hash((tokens, version, layer)) % EXPERTS
    return [first, (first + 1 + len(tokens) % (EXPERTS - 1)) % EXPERTS]


class Request:
    def __init__(self, name: str, tokens: list[int], salt: int) -> None:
        self.name, self.tokens, self.salt, self.prompt = name, tokens, salt, len(tokens)
        self.computed, self.blocks = 0, list[int]()
        self.expected: list[list[list[int]]] = []  # rows by position, as they were first computed


class Engine:
    """A scheduler with a block cache, and a runner that computes what it schedules."""

    def __init__(self, top_k: int = TOP_K) -> None:
        self.runner, self.top_k = runner_of(), top_k
        self.capture = Capture(self.runner, LAYERS, top_k, "uint8")
        self.batch, self.version, self.count = self.runner.input_batch, 0, 0
        self.silent = False  # no router is asked
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.leaving: list[str] = []  # vLLM's runner hears of an end in the next step
        self.free = list(range(1, BLOCKS))
        self.cached: dict[Any, int] = {}  # block by the tokens up to its end, and their salt
        self.routes: dict[int, list[list[list[int]]]] = {}  # of the positions of a cached block

    def add(self, tokens: list[int]) -> None:
        self.count += 1
        self.waiting.append(Request(f"{MARK}{self.count}-abcd", tokens, self.version))

    def step(self, chunk: int) -> None:
        for name in self.leaving:
            self.batch.remove_request(name)
        self.leaving = []
        while self.waiting and len(self.running) < ROWS and self._begin(self.waiting[0]):
            self.waiting.pop(0)
        rows: list[tuple[Request, int]] = []
        for one in list(self.running):
            count = min(chunk, len(one.tokens) - one.computed)
            if self._room(one, one.computed + count):
                rows.append((one, count))
            else:
                self.preempt(one)
        for name in self.leaving:
            self.batch.remove_request(name)
        self.leaving = []
        self._compute(rows)

    def _begin(self, one: Request) -> bool:
        one.computed, one.blocks = 0, []
        while (end := one.computed + BLOCK) < len(one.tokens) and (block := self.cached.get(self._key(one, end))):
            one.blocks.append(block)
            if block in self.free:
                self.free.remove(block)
            for row in self.routes[block][len(one.expected) - one.computed if len(one.expected) < end else BLOCK :]:
                one.expected.append(row)
            one.computed = end
        self.running.append(one)
        self.batch.req_ids.append(one.name)
        return True

    @staticmethod
    def _key(one: Request, end: int) -> Any:
        return tuple(one.tokens[:end]), one.salt

    def _room(self, one: Request, end: int) -> bool:
        while len(one.blocks) * BLOCK < end:
            if not self.free:
                return False
            block = self.free.pop(0)
            self.cached = {key: held for key, held in self.cached.items() if held != block}
            one.blocks.append(block)
        return True

    def _compute(self, rows: list[tuple[Request, int]]) -> None:
        table, begins = self.batch.block_table[0].blocks, [0]
        told: list[list[list[int]]] = []
        rows.sort(key=lambda row: self.batch.req_id_to_index[row[0].name])
        for index, (one, count) in enumerate(rows):
            table[index, : len(one.blocks)] = one.blocks
            self.batch.num_computed_tokens_cpu[index] = one.computed
            begins.append(begins[-1] + count)
            for position in range(one.computed, one.computed + count):
                row = [chosen(tuple(one.tokens[: position + 1]), self.version, layer) for layer in LAYERS]
                told.append(row)
                if position == len(one.expected):
                    one.expected.append(row)
        self.runner.query_start_loc.np[: len(begins)] = begins
        for place, module in enumerate([] if self.silent else self.runner.get_model().modules()[1:]):
            module.router.told(Tensor(np.array([row[place][: self.top_k] for row in told], np.int32)
                                     .reshape(-1, self.top_k)))
        vars(self.runner)["_model_forward"]()
        at = 0
        for one, count in rows:
            self._keep(one, told[at : at + count])
            at += count

    def _keep(self, one: Request, rows: list[list[list[int]]]) -> None:
        """Cache the blocks that are whole now, and draw a token behind the last."""
        for position, row in enumerate(rows, one.computed):
            held = self.routes.setdefault(one.blocks[position // BLOCK], [])
            held[position % BLOCK :] = [row]
        one.computed += len(rows)
        for end in range(BLOCK, one.computed + 1, BLOCK):
            self.cached.setdefault(self._key(one, end), one.blocks[end // BLOCK - 1])
        if one.computed == len(one.tokens):
            one.tokens.append(hash((tuple(one.tokens), self.version)) % 7)

    def out(self, one: Request) -> None:
        self.running.remove(one)
        self.leaving.append(one.name)
        others = {block for other in self.running for block in other.blocks}
        self.free += [block for block in one.blocks if block not in others and block not in self.free]

    def preempt(self, one: Request) -> None:
        self.out(one)
        self.waiting.insert(0, one)

    def update(self) -> None:
        """New weights, and every cache is computed again: the first model runner of vLLM hears of it in a step."""
        self.version += 1
        for one in list(self.running):
            self.preempt(one)
        self.cached = {}

    def taken(self, one: Request, begin: int) -> np.ndarray:
        end = len(one.tokens) - 1
        text = self.capture.take(one.name.rpartition("-")[0], begin, end)
        return np.frombuffer(text, np.uint8).reshape(-1, len(LAYERS), self.top_k)


class Tensor:
    """What a router tells, as far as it is used."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def numpy(self) -> np.ndarray:
        return self.values


PROMPT = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6]
COMMANDS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, len(PROMPT)), st.integers(0, 2)),
    st.tuples(st.just("step"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("preempt"), st.integers(0, ROWS), st.just(0)),
    st.tuples(st.just("end"), st.integers(0, ROWS), st.integers(0, 3)),
    st.tuples(st.just("late end"), st.integers(0, ROWS), st.integers(0, 3)),
    st.tuples(st.just("update"), st.just(0), st.just(0)),
)


@given(st.lists(COMMANDS, max_size=60))
def test_every_position_has_the_route_that_it_was_first_computed_with(commands: list[tuple[str, int, int]]) -> None:
    engine = Engine()
    for command, first, second in commands:
        match command:
            case "add":
                engine.add([*PROMPT[:first], *[0] * second])
            case "step":
                engine.step(first)
            case "update":
                engine.update()
            case "preempt" if first < len(engine.running):
                engine.preempt(engine.running[first])
            case "end" | "late end" if first < len(engine.running):
                one = engine.running[first]
                engine.out(one)
                if command == "late end":  # others may have its blocks by then
                    engine.step(3)
                begin = min(second, one.prompt - 1)
                rows = engine.taken(one, begin).tolist()
                assert len(one.tokens) == one.prompt or rows == one.expected[begin : len(one.tokens) - 1]
            case _:
                pass
    while engine.running or engine.waiting:
        engine.step(8)
        for one in [one for one in engine.running if len(one.tokens) > one.prompt]:
            engine.out(one)
            assert engine.taken(one, 0).tolist() == one.expected[: len(one.tokens) - 1]
    engine.step(1)
    assert not engine.capture.kept


def test_a_request_that_nobody_takes_leaves_after_many_others() -> None:
    engine = Engine()
    for _ in range(40):
        engine.add(PROMPT[:5])
        engine.step(8)
        engine.out(engine.running[0])
        engine.step(8)
    assert engine.capture.kept == 8 * ROWS


def test_requests_without_the_mark_are_not_kept() -> None:
    engine = Engine()
    engine.waiting.append(Request("check-abcd", list(PROMPT), 0))
    engine.step(16)
    engine.out(engine.running[0])
    engine.step(1)
    assert not engine.capture.kept


@pytest.mark.parametrize(("changes", "said"), [
    ({}, ""),
    ({"speculative_config": object()}, "speculative decoding"),
    ({"model_config": SimpleNamespace(enforce_eager=False)}, "enforce_eager"),
    ({"kv_cache_config": SimpleNamespace(kv_cache_groups=[1, 2], num_blocks=1)}, "2 kinds of caches"),
    ({"layers": [1, 2]}, r"routers in the layers \[1, 2\], and the model in \[1, 3\]"),
])
def test_a_runner_whose_routes_cannot_be_noted_is_refused_with_its_reason(changes: dict[str, Any], said: str) -> None:
    why = objection(runner_of(**changes), LAYERS)
    assert re.search(said, why) if said else why == ""


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_step_without_routers_in_the_middle_gives_no_rows(top_k: int) -> None:
    """Neither zeros nor what an earlier request left there, which may look like routes."""
    engine = Engine(top_k)
    for number in range(2):  # the second has blocks of the first
        engine.add([*PROMPT, *range(8 * number)])
        engine.step(99)
        one = engine.running[0]
        engine.silent = number == 1
        engine.step(1)
        engine.silent = False
        engine.step(1)
        engine.out(one)
        engine.step(1)
        engine.update()
        assert len(engine.taken(one, 0)) == (0 if number else len(one.tokens) - 1)


def test_rows_that_are_lost_come_back_with_a_new_computation() -> None:
    engine = Engine()
    engine.add(list(PROMPT))
    engine.silent = True
    engine.step(16)
    engine.silent = False
    one = engine.running[0]
    engine.update()
    for _ in range(3):
        engine.step(16)
    engine.out(one)
    engine.step(1)
    assert len(engine.taken(one, 0)) == len(one.tokens) - 1


def test_a_kernel_that_asks_no_router_gives_nothing_instead_of_old_rows() -> None:
    engine = Engine()
    engine.add(list(PROMPT))
    engine.step(16)
    one = engine.running[0]
    engine.silent = True
    engine.step(1)
    engine.out(one)
    engine.step(1)
    assert len(engine.taken(one, 0)) == 0
