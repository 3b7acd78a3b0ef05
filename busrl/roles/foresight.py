"""What the scheduler's policy is told, and what it tells: the side of it that meets prompts and files.

Talks to the prompts (`busrl.data`) and to `scheduler.jsonl` of the run directory. Decisions are the policy's; slots and
messages are the role's. Knows nothing of credit or admission.

- A policy that does not learn is told nothing, so that it costs nothing.
- What is lost here with the process costs order, never a sample.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence

from busrl.data import JsonlStream, plain_text
from busrl.paths import RunPaths
from busrl.scheduling.finished import FinishedAnswers
from busrl.scheduling.groups import GroupView, Lines
from busrl.scheduling.inflight import Record
from busrl.scheduling.policy import Policy, make_policy
from busrl.scheduling.predictors import Candidate, Guard
from busrl.topology import Topology

RECORDS_A_LINE = 64
TAG_KEY = "tag"


class Foresight:
    """The policy of a run, which asks `predictor`. `warn` is told of what can not be written."""

    def __init__(
        self,
        topology: Topology,
        paths: RunPaths,
        stream: JsonlStream,
        predictor: Guard,
        warn: Callable[[str], None],
    ) -> None:
        self.topology, self.paths, self.stream = topology, paths, stream
        self.predictor, self._warn = predictor, warn
        scheduler, derived = topology.scheduler, topology.derived
        self.policy: Policy = make_policy(
            scheduler.policy, derived.horizon, self.predictor, scheduler.aging,
            tail_share=scheduler.tail_share, window=derived.W, group_size=topology.groups.size,
            round_groups=topology.learner.trigger.n_min if topology.weights.mode == "sync" else 0,
        )  # fmt: skip
        self._answers = FinishedAnswers()
        self._records: list[Record] = []

    # -- told to the policy ---------------------------------------------------------------------------------------

    def look(self, view: GroupView, lines: Lines, rows: int) -> None:
        """What finished since the last look, what is open, and how much workers can run."""
        if not self.policy.learns:
            return
        open_draws = view.draws.tolist()
        self.policy.adopt(self.candidates(self.policy.unknown(open_draws)))
        uids, tokens = self._answers.look(lines)
        if len(uids):
            self.policy.finished((uids // (2 * view.group_size)).tolist(), tokens.tolist())
        self.policy.look(open_draws, (view.running + view.due).tolist(), rows)
        self._write(self.policy.take_records())

    def offer(self, view: GroupView, groups: int, arrived: int) -> None:
        """Supply the policy with what lies within its horizon and is there: draws below `arrived`."""
        draws = view.unopened_draws(self.policy.horizon + groups)
        missing = self.policy.missing(draw for draw in draws if draw < arrived)
        if missing:
            self.policy.offer(self.candidates(missing))

    def candidates(self, draws: Sequence[int]) -> list[Candidate]:
        """The groups of these draws, read from the prompts."""
        return [self._candidate(draw) for draw in draws]

    def _candidate(self, draw: int) -> Candidate:
        record = self.stream.record(self.stream.item(draw))
        prompt = plain_text(record[self.topology.data.prompt_key])
        return Candidate(draw, prompt, self.topology.generation.max_new_tokens, str(record.get(TAG_KEY, "")))

    # -- told by it -----------------------------------------------------------------------------------------------

    def told(self) -> dict[str, float]:
        """Numbers about policy and predictor, for SCHEDULER_STATE and `scheduler.jsonl`."""
        if not self.policy.learns:
            return {}
        measures = self.predictor.measures()
        return self.policy.told() | {name: value for name, value in measures.items() if math.isfinite(value)}

    def _write(self, records: Sequence[Record], least: int = RECORDS_A_LINE) -> None:
        """Append ended groups to `scheduler.jsonl`, one list per number and line, and how good the predictions are."""
        self._records += records
        if len(self._records) < max(1, least):
            return
        columns = ("draw", "wait", "predicted", "actual", "longest", "members")
        line = {name: [round(getattr(record, name), 2) for record in self._records] for name in columns}
        self._records = []
        head = {"time": round(time.time(), 3), "policy": self.policy.name, "predictor": self.predictor.name}
        try:
            with open(self.paths.scheduler_log, "a", encoding="utf-8") as file:
                file.write(json.dumps(head | self.told() | line) + "\n")
        except OSError as problem:
            self._warn(f"{len(line['draw'])} groups are missing from {self.paths.scheduler_log.name}: {problem}")

    def close(self) -> None:
        """The last records."""
        self._write(self.policy.take_records(), least=1)
