"""Measuring a model without a run: held-out prompts through an engine and a reward, in this process.

Talks to an engine (`busrl.engines`), to reward children and to a prompt file. Knows nothing of rings, the bus or run
directories. The prompts, what is drawn for each and how the mean is taken are those of a round of validation.

- A sample is a function of seed, uid and weights: the checkpoint of step N, asked as the run's own round N, gives the
  numbers of that round (where the engine draws by the sample, see docs/engines.md).
- Every sample has one row: its reward, or why it has none; the mean is over those that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.config import Topology
from busrl.config.prompts import AskedSet
from busrl.data import JsonlStream, prompt_of
from busrl.data.figures import Figure, Figures, Judged, by_tag, standard_error, tags_of
from busrl.data.prompts import PromptLine, lines_of
from busrl.engines import Engine, Finished, Request, make_engine
from busrl.engines.tokens import NO_IDS
from busrl.errors import UserError
from busrl.rewards.kinds import finder
from busrl.rewards.pool import Item, Outcome, RewardPool
from busrl.states import VALIDATE_BIT, Finish

READY_S = 120.0


@dataclass(frozen=True)
class MeasuredRound:
    """What is measured: `of`, drawn as the round of that number draws it, in a run whose rounds have `answers`."""

    of: AskedSet
    answers: int
    round: int = 0


@dataclass
class Row:
    """One sample. `line`: of the prompt file, from 1; `finish`: "end", "length" or "aborted"; `error`: why it has no
    reward."""

    line: int
    prompt: Any
    completion: str = ""
    reward: float | None = None
    parts: dict[str, float] | None = None
    tokens: int = 0
    finish: str = ""
    error: str = ""
    answer: str | None = None  # what the reward takes from the completion, where answers of a prompt are compared


@dataclass(frozen=True)
class EvaluationFigures:
    """The figures of a measurement, over `samples` of `prompts` different prompts; `failed`: those without a reward.
    `figures`: pass@k and the others by name; `by`: the same of each tag, as in validation.jsonl."""

    mean: float
    standard_error: float | None
    samples: int
    prompts: int
    failed: int
    length: float
    cut_share: float
    figures: dict[str, Figure]
    by: dict[str, dict[str, Any]]


class Evaluation:
    """`run` once: rows by their place in the round. The engine lives in this process, or where it puts itself."""

    def __init__(self, topology: Topology, asked: MeasuredRound) -> None:
        self.topology, self.asked = topology, asked
        self.stream = JsonlStream(asked.of.data, topology.run.seed, False, topology.data.prompt_key)
        self.lines: npt.NDArray[np.int64] = lines_of(asked.of.prompts, len(self.stream), asked.of.k)
        compares = topology.reward.compares if asked.of.k > 1 else None
        self.find = None if compares is None else finder(*compares)
        self.rows: dict[int, Row] = {}
        self._waiting: list[Request] = []

    def run(self, watch: Callable[[Evaluation], None] = lambda _: None) -> list[Row]:
        """Every row in order; `watch` is called now and then while it lasts."""
        rollouts = [one.name for one in self.topology.processes() if one.role == "rollout"]
        device, prompt_key = self.topology.device_of("reward/0"), self.topology.data.prompt_key
        with RewardPool(self.topology.reward, prompt_key=prompt_key, device=device, ready_s=READY_S) as pool:
            if not pool.wait_ready(READY_S):
                raise UserError(f"reward.function: not loaded within {READY_S:g} s; see what it does when imported")
            engine = make_engine(self.topology, rollouts[0] if rollouts else "")
            try:
                self._waiting = list(self._requests(engine))[::-1]
                self._until_done(engine, pool, watch)
            finally:
                engine.close()
        return [self.rows[place] for place in range(self.asked.of.answers)]

    @property
    def rewards(self) -> dict[int, float]:
        """By place, of the samples that have one (so far)."""
        return {place: row.reward for place, row in self.rows.items() if row.reward is not None}

    def found(self) -> EvaluationFigures:
        judged = [self.rows[place] for place in self.rewards]
        figures = self._figures()
        tags = tags_of(self.stream.records(self.lines), self.topology.validation.tag_key)
        return EvaluationFigures(
            figures.mean(),
            standard_error(figures.of_prompt()),
            len(judged),
            len({row.line for row in judged}),
            sum(bool(row.error) for row in self.rows.values()),
            float(np.mean([row.tokens for row in judged])) if judged else 0.0,
            float(np.mean([row.finish == "length" for row in judged])) if judged else 0.0,
            {name: one for name, one in figures.by_name().items() if name != "reward"},
            by_tag(figures, tags),
        )

    def mean(self) -> float:
        return self._figures().mean()

    def _figures(self) -> Figures:
        k = self.asked.of.k
        judged = [
            Judged(int(self.lines[place]), place // k, reward, self.rows[place].answer)
            for place, reward in self.rewards.items()
        ]
        return Figures(judged, k, self.topology.validation.solved, self.find is not None)

    def _requests(self, engine: Engine) -> Iterator[Request]:
        """One for each sample; a prompt that cannot be asked has its row already."""
        limit = self.topology.max_prompt_tokens
        asked = self.asked.of
        first = VALIDATE_BIT | (self.asked.round * self.asked.answers + asked.first)
        for place in range(asked.answers):
            line = self.stream.at(int(self.lines[place]))
            row = self.rows[place] = Row(line.index + 1, None)
            ids = self._ids(engine, line, row)
            if not 0 < len(ids) <= limit:
                row.error = row.error or f"its prompt has {len(ids)} tokens; generation.max_prompt_tokens is {limit}"
                continue
            yield Request(
                key=place, uid=first + place, segment=0, prompt_ids=ids, prefix_ids=NO_IDS,
                max_new_tokens=asked.max_new_tokens, temperature=asked.temperature, top_p=asked.top_p,
                seed=self.topology.run.seed,
            )

    def _ids(self, engine: Engine, line: PromptLine, row: Row) -> npt.NDArray[np.int32]:
        try:
            row.prompt = prompt_of(msgspec.json.decode(line.line), self.topology.data)
            return np.asarray(engine.encode(row.prompt), np.int32)
        except Exception as problem:  # a chat template is foreign code
            row.error = f"the prompt cannot be rendered: {problem}"
            return NO_IDS

    def _until_done(self, engine: Engine, pool: RewardPool, watch: Callable[[Evaluation], None]) -> None:
        while self._waiting or engine.active or len(pool):
            room = engine.capacity - engine.active
            joining = [self._waiting.pop() for _ in range(min(room, len(self._waiting)))]
            if joining:
                engine.submit(joining)
            if engine.active:
                self._ended(engine, pool, engine.step())
            self._judged(pool.poll(0.0 if engine.active or self._waiting else 1.0))
            watch(self)

    def _ended(self, engine: Engine, pool: RewardPool, finished: Sequence[Finished]) -> None:
        items = []
        for one in finished:
            row, ids = self.rows[one.key], one.token_ids.tolist()
            if one.refused:
                row.error = f"the engine refused it: {one.refused}"
                continue
            if one.finish == Finish.ABORTED or not ids:  # as in a run: part of an answer, or none, is not judged
                row.finish = "aborted"
                gave_up = one.finish == Finish.ABORTED
                row.error = "the engine gave it up" if gave_up else "its prompt leaves no room to answer"
                continue
            row.completion = one.text if one.text is not None else engine.decode(ids, one.finish == Finish.EOS)
            row.answer = self.find(row.completion) if self.find is not None else None
            row.tokens = len(ids)
            row.finish = "end" if one.finish == Finish.EOS else "length"
            line = self.stream.at(int(self.lines[one.key]))
            items.append(Item(one.key, line.line, row.completion, ids))
        pool.submit(items)

    def _judged(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            row = self.rows[outcome.key]
            if outcome.error:
                row.error = f"reward {outcome.error}: {outcome.text}"
            else:
                row.reward, row.parts = outcome.value, outcome.parts or None


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """One line of JSON per sample; what is empty is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for row in rows:
            known = {key: value for key, value in asdict(row).items() if value not in ("", None)}
            file.write(msgspec.json.encode(known) + b"\n")
