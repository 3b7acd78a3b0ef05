"""The parity gate: engines and learner give the same tokens the same log-probabilities, or the difference is named.

Used by the learner, which feeds it the probes that engines answer (`roles/probes.py`), the samples of its first step
and the mismatch that training measures. Talks to the trainer, which scores. Knows nothing of the ring and of the bus:
its results are texts for warnings, and errors.

- Every update is proved. The log-probability of each token behind a few made-up prompts is computed when a version is
  published, so an engine's answer can be judged at any time, and nothing waits for it. An engine that fails at one
  version is a warning; one that also fails at the next version ends the run.
- Longer answers are compared now and then, with the weights that drew them, while the learner has these: a step waits
  for the engines that answered under the version before, `learner.parity.wait_s` at most.
- A cause is named if it predicts the engine's numbers: under it a quarter of the difference is left, at most. Fewer
  bits predict none; they are named by the size of the differences, if nothing else explains them.
- Only log-probabilities are compared: a fault that changes none of them (a sampler that draws others) is not found.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from busrl.data.pretrained import read_config
from busrl.data.routing import Routing, routing_of
from busrl.data.routing import first_fault as fault_of_routes
from busrl.engines.tokens import Ids
from busrl.errors import CannotTrain
from busrl.ledger.wal import SampleRecord
from busrl.protocol import messages as m
from busrl.roles import probes
from busrl.roles.learner.models import Models
from busrl.roles.learner.samples import to_sample
from busrl.topology import Topology
from busrl.topology.kinds import ENGINES, RESTARTS, SERVED
from busrl.training import earlier
from busrl.training.batch import Sample, first_fault

log = logging.getLogger("busrl")
Rows = Sequence[npt.NDArray[np.float32]]  # of each sample the log-probabilities of its tokens; NaN: not compared

# -- causes of a difference ----------------------------

CLEARLY = 0.25  # of the difference may be left where a cause explains it
FACTOR = 3.0  # by which the differences of two ways to round to one type may be larger; float16 has 8 times less
LARGEST, HALVINGS = 8.0, 16  # temperatures are sought between 1/8 and 8 times the one asked for
GOLDEN = (math.sqrt(5) - 1) / 2


class Alternative(NamedTuple):
    """Log-probabilities that the learner would have given if `cause` were so; `text` completes "they are those of ...".
    """

    cause: str
    text: str
    rows: Rows


class Explained(NamedTuple):
    """The cause that predicts best ("" = none does), and the rest of the difference under it."""

    cause: str
    text: str
    left: float


def gap_of(theirs: Rows, ours: Rows) -> float:
    """Mean size of the differences; infinite if one is not finite, or if there is nothing to compare."""
    engine, learner = np.concatenate(theirs).astype(np.float64), np.concatenate(ours).astype(np.float64)
    compared = ~np.isnan(learner)
    differences = np.abs(engine[compared] - learner[compared])
    return float(differences.mean()) if len(differences) and np.isfinite(differences).all() else math.inf


def explain(theirs: Rows, gap: float, alternatives: Iterable[Alternative]) -> Explained:
    """The alternative that leaves least of `gap`, if that is little enough; of equal ones the first."""
    best = Explained("", "", gap)
    for alternative in alternatives:
        left = gap_of(theirs, alternative.rows)
        if left <= CLEARLY * gap and left < best.left:
            best = Explained(alternative.cause, alternative.text, left)
    return best


def looks_rounded(theirs: Rows, ours: Rows, rounded: Rows) -> bool:
    """True if their differences from ours are like those of our numbers in fewer bits: as large, and on both sides.
    (They are not equal: kernels round in another order.)"""
    size, gap = gap_of(rounded, ours), gap_of(theirs, ours)
    engine, learner = np.concatenate(theirs).astype(np.float64), np.concatenate(ours).astype(np.float64)
    leaning = abs(float(np.nanmean(engine - learner)))
    return size / FACTOR <= gap <= size * FACTOR and leaning <= gap / 2


def shifted(ours: Rows, by: int) -> list[npt.NDArray[np.float32]]:
    """Each token with the number of the one `by` places before it."""
    rows = []
    for row in ours:
        moved = np.full(len(row), np.nan, np.float32)
        if by > 0:
            moved[by:] = row[:-by]
        else:
            moved[:by] = row[-by:]
        rows.append(moved)
    return rows


def fitted(theirs: Rows, score_at: Callable[[float], Rows]) -> float:
    """The factor on the temperature under which the squared differences are smallest."""
    wanted = np.concatenate(theirs).astype(np.float64)

    def error(power: float) -> float:
        return float(np.nansum(np.square(wanted - np.concatenate(score_at(math.exp(power))))))

    grid = np.linspace(-math.log(LARGEST), math.log(LARGEST), 13).tolist()
    middle = min(range(1, len(grid) - 1), key=lambda i: error(grid[i]))
    low, high = grid[middle - 1], grid[middle + 1]
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = error(left), error(right)
    for _ in range(HALVINGS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = error(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = error(right)
    return math.exp((low + high) / 2)


# -- limits --------------------------------------------

SAMPLES, TOKENS = 64, 64  # at most and at least, of the comparison before the first step
FEWEST = 8  # tokens of a probe that are enough
WIDER = 3.0  # the mean of 8 tokens scatters so much more than that of 64
PROVABLE = 8  # versions: an engine that answers later says nothing
EXACT, ROUNDED = 1e-3, 0.1  # nats: mean differences of float32, and where 16 bits (or experts) are involved
UNEXPLAINED = 1.0  # nats: more than old keys under new weights make


def tolerance(topology: Topology) -> float:
    """The mean difference that rounding can make. The number type of a server is unknown here."""
    served = any(entry.role == "rollout" and entry.engine in SERVED for entry in topology.process)
    return EXACT if topology.model.dtype == "float32" and not served else ROUNDED


def mixed(topology: Topology) -> bool:
    """True if tokens of new weights may be drawn over keys of old ones: they agree with neither (docs/engines.md).

    That never happens in a probe, nor before the first update, so the first step can always be judged.
    """
    if topology.weights.mode == "sync" or topology.weights.transport in RESTARTS:
        return False
    how = topology.generation.on_update
    keeps = any(entry.role == "rollout" and not ENGINES[entry.engine].recomputes for entry in topology.process)
    return how == "keep" or (how == "auto" and keeps)


def has_experts(topology: Topology) -> bool:
    """True if engine and learner may choose other experts: those of a mixture of experts in few bits."""
    folder = Path(topology.model.path)
    return topology.model.dtype != "float32" and routing_of(read_config(folder)) is not None


# -- the gate ------------------------------------------

REMEDIES = {
    "temperature": "let the engine tell log-probabilities after temperature (vLLM: --logprobs-mode processed_logprobs)",
    "shift": "each token has to come with its own log-probability",
    "version tag": "new weights do not reach it when it says so, or it counts versions by itself",
    "layer": "the engine did not load all of an update: compare its names of parameters with those of the learner",
    "prefix cache": "the engine has to drop what it cached when it loads weights (vLLM: /reset_prefix_cache)",
    "dtype": "model.dtype has to be the number type that the engine computes in",
    "tokenizer": "give it the tokenizer of the model folder",
    "values": "the engine computes something that is no number",
    "routes": 'it has to say which experts it took, layer by layer; learner.routes = "own" trains without that',
}
UNKNOWN = "unknown"


class Verdict(NamedTuple):
    """A difference between an engine and the learner, and its cause. `text` is for people."""

    cause: str
    gap: float
    text: str


DTYPES = ("<i4", "<i4", "<f4", "<u4")
ROUTED_REMEDY = (
    '; or the model is a mixture of experts, whose engine and learner may choose others: learner.routes = "replay"'
)


@dataclass
class Answered:
    """A probe as an engine answered it under the weights of `version`."""

    worker: str
    version: int
    samples: list[Sample]

    @classmethod
    def of(cls, message: m.ProbeDrawn, routing: Routing | None = None) -> Answered | None:
        """None if its parts do not fit together: a message may have any content. `routing`: of a run with routes."""
        parts = [
            np.frombuffer(raw[: len(raw) // 4 * 4], dtype)
            for raw, dtype in zip((message.prompt_ids, message.tokens, message.logprobs, message.versions), DTYPES)
        ]
        ends = [np.cumsum(lengths, dtype=np.int64) for lengths in (message.prompt_lengths, *[message.lengths] * 3)]
        if {len(places) for places in ends} != {len(message.temperatures)} or not message.temperatures:
            return None
        if any(len(part) != end[-1] for part, end in zip(parts, ends)):
            return None
        rows = [np.split(part, end[:-1]) for part, end in zip(parts, ends)]
        samples = [
            Sample(i, i, 0, prompt, tokens, logprobs, versions, temperature=temperature)
            for i, (prompt, tokens, logprobs, versions, temperature) in enumerate(zip(*rows, message.temperatures))
        ]
        if any(sample.fault() for sample in samples):
            return None
        if routing is not None and isinstance(message, m.ProbeRouted):
            try:
                samples = list(_routed(samples, message.routes, routing))
            except ValueError:
                return None
        return cls(message.worker_id, message.version, samples)

    @property
    def tokens(self) -> int:
        return sum(sample.generated for sample in self.samples)

    @property
    def proves(self) -> bool:
        """True if it answers the prompts that prove an update: their number is another than that of a probe."""
        return len(self.samples) == probes.PROOFS * probes.DRAWS


def _routed(samples: Sequence[Sample], routes: bytes, routing: Routing) -> Iterator[Sample]:
    """The samples with their routes; ValueError for others than so many rows."""
    rows = np.frombuffer(routes, routing.dtype.newbyteorder("<")).astype(routing.dtype).reshape(-1, *routing.shape)
    ends = np.cumsum([sample.length - 1 for sample in samples])
    if len(rows) != ends[-1]:
        raise ValueError(f"{len(rows)} rows of routes for {ends[-1]} tokens")
    for sample, of_sample in zip(samples, np.split(rows, ends[:-1]), strict=True):
        first = len(sample.prompt_ids) - 1
        yield replace(sample, prompt_routes=of_sample[:first], routes=of_sample[first:])


@dataclass
class Proof:
    """Log-probabilities of each token behind each of the prompts that prove an update, at `temperature`."""

    version: int
    temperature: float
    rows: dict[bytes, npt.NDArray[np.float32]]  # by the ids of the prompt

    @classmethod
    def of(
        cls, version: int, prompts: Sequence[Ids], temperature: float, every: Callable[[list[Sample]], Rows]
    ) -> Proof:
        none = np.zeros(1, np.float32)
        samples = [
            Sample(i, i, 0, ids, np.zeros(1, np.int32), none, none.astype(np.uint32), temperature=temperature)
            for i, ids in enumerate(prompts)
        ]
        return cls(version, temperature, {ids.tobytes(): row for ids, row in zip(prompts, every(samples), strict=True)})

    def gap(self, samples: Sequence[Sample]) -> float | None:
        """Mean size of the differences, infinite for an id of no token or another version; None for other prompts or
        another temperature."""
        rows = [self.rows.get(sample.prompt_ids.tobytes()) for sample in samples]
        if any(row is None or sample.temperature != self.temperature for sample, row in zip(samples, rows)):
            return None
        theirs, ours = [sample.behaviour_logprobs for sample in samples], []
        for sample, row in zip(samples, rows):
            assert row is not None
            comparable = 0 <= int(sample.token_ids[0]) < len(row) and (sample.policy_versions == self.version).all()
            ours.append(row[sample.token_ids] if comparable else np.full(1, -np.inf, np.float32))
        return gap_of(theirs, ours)


class Parity:
    """Compares engines and learner, names what differs, and ends a run that may not go on.

    - Before the first step is committed a difference above `learner.mismatch_limit` ends the run: nothing has been
      trained or logged by then. Afterwards one above `learner.parity.end` does, if that is set.
    - Of the trained tokens only those that the present weights sampled are compared. Where these may stand over keys of
      older weights, only those of answers that began with the present weights; without any of these, only a difference
      that no arithmetic explains is reported.
    - The first step ends no run for engines of other kinds than busrl's own, and nothing does for scripted ones.
    """

    def __init__(self, topology: Topology, models: Models) -> None:
        self.config, self._models = topology.learner.parity, models
        entries = [entry for entry in topology.process if entry.role == "rollout"]
        started = all((entry.count or entry.model) and not entry.command for entry in entries)  # for several: elsewhere
        with_model = started and all(ENGINES[entry.engine].model for entry in entries)
        self.mismatch_limit = topology.learner.mismatch_limit if with_model else 0.0
        self.tolerance = self.config.limit or tolerance(topology)
        self._silent, self._mixed = not probes.comparable(topology), mixed(topology)
        self._temperature = topology.generation.temperature
        self._float32 = topology.model.dtype == "float32"
        self._engines = ", ".join(sorted({entry.engine for entry in entries}))
        self._remedy = f"give every engine the model of {topology.model.path}"
        if "openai" in self._engines:
            self._remedy += (
                f": does {topology.openai.base_url} serve {topology.openai.model or 'it'}, with log-probabilities "
                "after temperature (vLLM: --logprobs-mode processed_logprobs)?"
            )
        self._answers: list[Answered] = []
        self._awaited = set() if self._silent else probes.workers(topology)  # those that are worth waiting for
        self._had: set[str] = set()  # have answered `_version`
        self._version, self._since = -1, 0.0  # the newest version seen, and since when
        self._judged = -1  # the newest version of which something was found
        self._earlier = earlier.Earlier()
        self._copies = self.config.copy
        self._named: dict[str, tuple[int, Explained]] = {}  # of a worker that differs: since which version, and why
        self._gaps: dict[str, float] = {}  # since the last step
        self._topology = topology
        self._routes_hint = topology.derived.routing is None and has_experts(topology)
        self._provable: dict[int, Proof] = {}
        self._failed: dict[str, int] = {}  # of a worker: the version at which its newest answer was wrong

    # -- waiting for engines -----------------------------------------------------------------------------------------

    def take(self, message: m.ProbeDrawn) -> None:
        """Keep an engine's answer for `look`."""
        if self._silent or len(self._answers) >= SAMPLES:
            return
        if (answer := Answered.of(message, self._topology.derived.routing)) is not None:
            self._answers.append(answer)
        else:
            log.warning("parity: an answer of %s under version %d is left out: its parts do not fit together",
                        message.worker_id, message.version)

    def holds(self, version: int | None) -> bool:
        """True if the weights have to stay for the moment: engines are about to answer under them."""
        if self._silent or version is None or not probes.due(self.config.every, version):
            return False
        self._at(version)
        missing = self._awaited - self._had
        if not missing:
            return False
        if time.monotonic() < self._since + self.config.wait_s:
            return True
        self._awaited -= missing  # until they answer again
        return False

    def published(self, version: int) -> None:
        """The present weights are `version` from now on: compute the numbers that engines with them must give."""
        if prompts := probes.proofs(self._topology, version):
            self._provable[version] = Proof.of(version, prompts, self._temperature, self._models.trainer.every)
            for old in sorted(self._provable)[:-PROVABLE]:
                del self._provable[old]

    def _at(self, version: int) -> None:
        if version != self._version:
            self._version, self._since, self._had = version, time.monotonic(), set()

    def before_update(self, version: int | None) -> None:
        """The weights, which are of `version`, are about to change: keep a copy if the next version is compared."""
        alone = self._models.team is None  # the parts of a model are with their ranks
        if self._copies and alone and version is not None and probes.due(self.config.every, version + 1):
            self._earlier.keep(self._models.trainer.model, version)

    # -- comparisons -------------------------------------------------------------------------------------------------

    def look(self, version: int | None) -> Iterator[Verdict]:
        """Judge the answers since the last call. `version`: that of the present weights. CannotTrain above
        `learner.parity.end`."""
        answers, self._answers = self._answers, []
        if version is not None:
            self._at(version)
        for answer in answers:
            if answer.proves:
                yield from self._look_at_proof(answer, version)
                continue
            self._awaited.add(answer.worker)
            if version is None or answer.version < version or answer.tokens < FEWEST:
                continue  # too late: these weights are gone
            if answer.version == version:
                self._had.add(answer.worker)
            verdict = self.judge(answer.samples, answer.version, answer.worker, self.tolerance)
            if verdict is not None:
                yield verdict
                if self.config.end and verdict.gap > self.config.end:
                    raise CannotTrain(f"{verdict.text} (above learner.parity.end = {self.config.end:g})")

    def _look_at_proof(self, answer: Answered, version: int | None) -> Iterator[Verdict]:
        """CannotTrain if the answer before was wrong too, of an earlier version."""
        proof = self._provable.get(answer.version)
        if proof is None or (verdict := self._proven(answer, proof, version)) is None:
            self._failed.pop(answer.worker, None)
            return
        yield verdict
        before = self._failed.setdefault(answer.worker, answer.version)
        if before < answer.version and self.config.updates == "end":
            raise CannotTrain(
                f"{verdict.text}. So it was at version {before}: the run ends, as what this engine draws cannot be "
                'trained; its checkpoint is sound (learner.parity.updates = "warn": the run goes on)'
            )
        self._failed[answer.worker] = answer.version

    def _proven(self, answer: Answered, proof: Proof, version: int | None) -> Verdict | None:
        """None if the engine has the weights of the version. Else the cause is looked for, while the learner has these
        weights."""
        limit, routed = WIDER * self.tolerance, answer.samples[0].routes is not None
        if routed and answer.version != version:  # with other experts than the engine's
            limit = max(limit, UNEXPLAINED)
        if (gap := proof.gap(answer.samples)) is None:
            return None
        self._gaps[answer.worker] = max(gap, self._gaps.get(answer.worker, 0.0))
        if gap <= limit:
            return None
        if answer.version == version:
            verdict = self.judge(answer.samples, version, answer.worker, limit)
            if verdict is not None or routed:
                return verdict
        return Verdict(UNKNOWN, gap, (
            f"engine {self._engines} of {answer.worker}, version {answer.version}: over {answer.tokens} tokens behind "
            f"made-up prompts its log-probabilities differ from those of that version by {gap:.3g} on average, where "
            f"{limit:.3g} can be rounding: the update did not reach it whole. "
            f"{self._remedy[0].upper()}{self._remedy[1:]}, and compare its names of parameters with the learner's"
        ))

    def numbers(self) -> dict[str, float | int | None]:
        """For metrics.jsonl: the largest difference since the last step, and of how many engines."""
        figures = {"parity": max(self._gaps.values(), default=None), "parity_engines": len(self._gaps)}
        self._gaps.clear()
        return figures

    def first(self, records: Sequence[SampleRecord], version: int, step: int) -> Verdict | None:
        """Before a step of the present weights, `version`, is committed: CannotTrain if its engines cannot run this
        model. Once enough tokens were compared the check is over."""
        if not self.mismatch_limit:
            return None
        of_version = [(record, record.version_array() == version) for record in records]
        compared = [(to_sample(record), mask) for record, mask in of_version if mask.any()][:SAMPLES]
        if sum(int(mask.sum()) for _, mask in compared) < TOKENS:
            return None
        limit, self.mismatch_limit = self.mismatch_limit, 0.0
        own_only = [
            replace(sample, behaviour_logprobs=np.where(mask, sample.behaviour_logprobs, np.nan).astype(np.float32))
            for sample, mask in compared
        ]
        within = UNEXPLAINED if self._silent or (self._mixed and step) else self.tolerance
        verdict = self.judge(own_only, version, "", min(within, limit))
        if verdict is not None and not verdict.gap <= limit:
            raise CannotTrain(
                f"{verdict.text}. That is more than learner.mismatch_limit = {limit:g}, which no arithmetic explains; "
                "nothing was trained"
            )
        return verdict

    def trained(self, step: int, version: int, mismatch: float | None, begun: float | None = None) -> str:
        """The warning for the step after `step`, whose weights were those of `version`; mostly "".

        `mismatch` is over all tokens of these weights, `begun` over those of answers that began with them. A version
        that was judged gets no second warning.
        """
        gap, limit = mismatch, self.tolerance
        if self._mixed and step:
            gap, limit = (begun, limit) if begun is not None else (mismatch, UNEXPLAINED)
        if gap is None or self._silent or gap <= limit or self._judged == version:
            return ""
        return (
            f"step {step + 1}: the log-probabilities of engine {self._engines}, version {version}, differ from the "
            f"learner's by {gap:.3g} on average (mismatch), where {limit:g} can be rounding; {self._remedy}"
        )

    # -- causes ------------------------------------------------------------------------------------------------------

    def judge(self, samples: list[Sample], version: int, worker: str, limit: float) -> Verdict | None:
        """None if they agree. `first` sets the log-probabilities of other versions to NaN: these are not compared."""
        name = f"engine {self._engines}{f' of {worker}' if worker else ''}, version {version}"
        theirs = [sample.behaviour_logprobs for sample in samples]
        if (wrong := self._impossible(samples, version, worker)) is not None:
            self._judged = version
            text = f"{name}: {wrong.text}. Probable cause: {wrong.cause}; {REMEDIES[wrong.cause]}"
            return Verdict(wrong.cause, math.inf, text)
        masked = [np.isnan(row) & (not worker) for row in theirs]

        def hidden(rows: Rows) -> list[npt.NDArray[np.float32]]:
            return [np.where(mask, np.nan, row).astype(np.float32) for row, mask in zip(rows, masked)]

        ours = hidden(self._score(samples))
        gap = gap_of(theirs, ours)
        if worker:
            self._gaps[worker] = max(gap, self._gaps.get(worker, 0.0))
        if gap <= limit:
            self._named.pop(worker, None)
            return None
        self._judged = version
        self._copies = True  # from now on: a fault in the weights or in a cache shows at the next version
        explained = self._explained(samples, theirs, ours, hidden)
        if explained.cause:
            self._named[worker] = (version, explained)
        elif worker in self._named:  # a fault that once had a cause moves away from it with each version
            since, explained = self._named[worker]
            explained = explained._replace(text=f"{explained.text} (at version {since})")
        compared = ~np.concatenate(masked)
        means = [float(np.concatenate(rows)[compared].mean()) for rows in (theirs, ours)]
        text = (
            f"{name}: over {compared.sum()} tokens of these very weights the engine's log-probabilities (mean "
            f"{means[0]:.3g}) and the learner's (mean {means[1]:.3g}) differ by {gap:.3g} on average, where {limit:g} "
            f"can be rounding. {self._because(explained)}"
        )
        return Verdict(explained.cause or UNKNOWN, gap, text)

    def _impossible(self, samples: list[Sample], version: int, worker: str) -> Explained | None:
        """Find numbers that are wrong without a comparison: no score is needed."""
        without_logprobs = [
            replace(sample, behaviour_logprobs=np.zeros_like(sample.behaviour_logprobs)) for sample in samples
        ]
        fault = first_fault(without_logprobs, self._models.token_rows)
        if fault is not None:
            return Explained("tokenizer", fault[1], math.inf)
        if (text := self._fault_of_routes(samples)) is not None:
            return Explained("routes", text, math.inf)
        if not worker:
            return None
        if version > self._version >= 0:
            return Explained("version tag", f"the newest version is {self._version}", math.inf)
        tags = sorted({int(tag) for sample in samples for tag in np.unique(sample.policy_versions)} - {version})
        if tags:
            return Explained("version tag", f"it had that version and tagged its tokens with {tags[0]}", math.inf)
        values = np.concatenate([sample.behaviour_logprobs for sample in samples])
        if not (np.isfinite(values) & (values <= 0)).all():
            return Explained("values", "a log-probability is above 0 or not a finite number", math.inf)
        return None

    def _fault_of_routes(self, samples: list[Sample]) -> str | None:
        """Routes that must not be given to the model."""
        if (routing := self._topology.derived.routing) is None:
            return None
        rows = [(sample.prompt_routes, sample.routes) for sample in samples]
        faults = (f"{text} (probe {number})" for number, parts in enumerate(rows) for part in parts
                  if part is not None and (text := fault_of_routes(part, len(part), routing)))
        return next(faults, None)

    def _because(self, explained: Explained) -> str:
        if explained.cause:
            return f"Probable cause: {explained.cause}: they are those of {explained.text}; {REMEDIES[explained.cause]}"
        if self._earlier.version is None and self._models.team is None:
            later = "weights and caches are looked at from the next version on (learner.parity.copy = true: at once)"
        else:
            later = "neither temperature, shift, number type, the weights before nor a stale cache explains it"
        if self._routes_hint:
            later += ROUTED_REMEDY
        return f"{self._remedy[0].upper()}{self._remedy[1:]}; {later}"

    def _score(self, samples: Sequence[Sample]) -> Rows:
        return self._models.trainer.score(samples)

    def _explained(self, samples: list[Sample], theirs: Rows, ours: Rows, hidden: Callable[[Rows], Rows]) -> Explained:
        """The cause of a difference. Rounding is tried last: a small difference of another kind may look like it."""
        gap = gap_of(theirs, ours)
        explained = explain(theirs, gap, self._alternatives(samples, theirs, ours, hidden))
        nothing_before = not any(sample.policy_versions.any() for sample in samples)
        if not explained.cause and self._float32 and (nothing_before or self._earlier.version is not None):
            for dtype, rows in self._in_types(samples):
                if looks_rounded(theirs, ours, hidden(rows)):
                    return Explained("dtype", f"products in {dtype}, by their size", gap)
        return explained

    def _alternatives(
        self, samples: list[Sample], theirs: Rows, ours: Rows, hidden: Callable[[Rows], Rows]
    ) -> Iterator[Alternative]:
        """Yield possible causes, the simplest first; those that cannot be computed here are left out."""
        def at(factor: float) -> Rows:
            return hidden(self._score([replace(sample, temperature=sample.temperature * factor) for sample in samples]))

        if any(sample.routes is not None for sample in samples):
            text = "the experts that the learner chooses by itself, while the routes that came lead elsewhere"
            alone = [replace(sample, routes=None, prompt_routes=None) for sample in samples]
            yield Alternative("routes", text, hidden(self._score(alone)))
        for by in (1, -1):
            yield Alternative("shift", f"the token {'before' if by > 0 else 'after'} each", shifted(ours, by))
        factor = fitted(theirs, at)
        text = f"temperature {factor * samples[0].temperature:.3g} where {samples[0].temperature:.3g} was asked for"
        yield Alternative("temperature", text, at(factor))
        yield from self._of_earlier(samples, hidden)

    def _in_types(self, samples: list[Sample]) -> Iterator[tuple[str, Rows]]:
        if self._models.team is not None:
            return
        for dtype in ("bfloat16", "float16"):
            try:
                with earlier.in_type(self._models.trainer.model, dtype):
                    rows = self._score(samples)
            except Exception as problem:  # a kernel that does not know the type, or no memory for it
                log.info("parity: no log-probabilities in %s: %s", dtype, problem)
                continue
            yield dtype, rows

    def _of_earlier(self, samples: list[Sample], hidden: Callable[[Rows], Rows]) -> Iterator[Alternative]:
        """The weights before in the place of the present ones: of all layers, of one, or under a cached prompt."""
        before, model = self._earlier, self._models.trainer.model
        if before.version is None or self._models.team is not None:
            return
        with before.in_place(model):
            rows = hidden(self._score(samples))
        yield Alternative("version tag", f"version {before.version}", rows)
        for part, names in before.parts().items():
            with before.in_place(model, names):
                rows = hidden(self._score(samples))
            yield Alternative("layer", f"{part} of version {before.version}, all else of this one", rows)
        yield from self._of_cached_prompts(samples, hidden)

    def _of_cached_prompts(self, samples: list[Sample], hidden: Callable[[Rows], Rows]) -> Iterator[Alternative]:
        """Keys and values of the weights before under whole blocks of each prompt."""
        before, trainer, token_rows = self._earlier, self._models.trainer, self._models.token_rows
        model, replay = trainer.model, trainer.forward.replay
        for block in probes.BLOCKS:
            cached = [(len(sample.prompt_ids) - 1) // block * block for sample in samples]
            if not any(cached) or any(sample.turns is not None for sample in samples):
                continue
            try:
                rows = hidden([
                    earlier.over_old_keys(model, before, sample, count, token_rows, replay) if count
                    else self._score([sample])[0] for sample, count in zip(samples, cached)
                ])
            except Exception as problem:  # a model whose cache is another one
                log.info("parity: no log-probabilities over old keys: %s", problem)
                continue
            yield Alternative("prefix cache", f"prompts that were cached under version {before.version}", rows)
