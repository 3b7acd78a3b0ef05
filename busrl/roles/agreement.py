"""Whether engines and learner have the same model: the log-probabilities of one are compared with those of the other.

Used by the learner, with the numbers that training brings anyway. Knows nothing of engines but their names, and of no
bus: what it finds is an error or a text for a warning.

- Compared are tokens that the very weights at hand drew: those of older weights differ, and should. Where such tokens
  may stand over keys of older weights, only answers that began with the weights at hand are compared; without any,
  nothing but a difference that no arithmetic explains is told.
- Before the first step is committed a difference that no arithmetic explains (`learner.mismatch_limit`) ends the run:
  nothing of it was trained or logged then. Afterwards a difference above `tolerance` is a warning.
- Nothing is concluded of engines that are no models of busrl's own kinds; of scripted ones nothing is even said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from busrl.errors import EngineDisagrees
from busrl.ledger.wal import SampleRecord
from busrl.topology import Topology
from busrl.topology.schema import RESTARTS

SAMPLES, TOKENS = 64, 64  # at most and at least, of the first comparison
EXACT, ROUNDED = 1e-3, 0.1  # nats: mean differences of float32, and where anybody computes in 16 bits (experts too)
UNEXPLAINED = 1.0  # nats: more than old keys under new weights make
MODELS = ("torch", "vllm", "openai")

Score = Callable[[Sequence[SampleRecord]], Sequence[npt.NDArray[np.float32]]]


class Agreement:
    """`first` until it has seen enough, `warning` after each step."""

    def __init__(self, topology: Topology) -> None:
        entries = [entry for entry in topology.process if entry.role == "rollout"]
        known = all(entry.engine in MODELS and entry.count and not entry.command for entry in entries)
        self.limit = topology.learner.mismatch_limit if known else 0.0
        self.tolerance = tolerance(topology)
        self._silent = topology.scripted or bool(topology.lora.dropout)
        self._mixed = mixed(topology)
        self._engines = ", ".join(sorted({entry.engine for entry in entries}))
        self._remedy = f"give every engine the model of {topology.model.path}"
        if "openai" in self._engines:
            self._remedy += (
                f": does {topology.openai.base_url} serve {topology.openai.model or 'it'}, with log-probabilities "
                "after temperature (vLLM: --logprobs-mode processed_logprobs)?"
            )

    def first(self, records: Sequence[SampleRecord], version: int, score: Score) -> None:
        """Before a step of the present weights, `version`, is committed: EngineDisagrees if its engines can not be of
        this model. Once enough tokens were compared there is nothing more to do."""
        if not self.limit:
            return
        exact = [record for record in records if (record.version_array() == version).any()][:SAMPLES]
        if sum(int((record.version_array() == version).sum()) for record in exact) < TOKENS:
            return
        made = [record.version_array() == version for record in exact]
        theirs = np.concatenate([record.logprob_array()[one] for record, one in zip(exact, made)])
        ours = np.concatenate([row[one] for row, one in zip(score(exact), made)])
        gap = float(np.abs(theirs - ours).mean())
        if not gap <= self.limit:
            raise EngineDisagrees(
                f"engine {self._engines}, version {version}: over {len(ours)} tokens of these very weights the "
                f"engine's log-probabilities (mean {theirs.mean():.3g}) and the learner's (mean {ours.mean():.3g}) "
                f"differ by {gap:.3g} on average, more than learner.mismatch_limit = {self.limit:g}, which no "
                f"arithmetic explains; nothing was trained. {self._remedy[0].upper()}{self._remedy[1:]}"
            )
        self.limit = 0.0

    def warning(self, step: int, version: int, mismatch: float | None, begun: float | None = None) -> str:
        """What there is to say of the step after `step`, whose weights were those of `version`; mostly nothing.

        `mismatch` is over all tokens of these weights, `begun` over those of answers that began with them.
        """
        found, limit = mismatch, self.tolerance
        if self._mixed and step:
            found, limit = (begun, self.tolerance) if begun is not None else (mismatch, UNEXPLAINED)
        if found is None or self._silent or found <= limit:
            return ""
        return (
            f"step {step + 1}: the log-probabilities of engine {self._engines}, version {version}, differ from the "
            f"learner's by {found:.3g} on average (mismatch), where {limit:g} can be rounding; "
            f"{self._remedy}"
        )


def tolerance(topology: Topology) -> float:
    """The mean difference that rounding can make. In which type a server computes is not known here."""
    served = any(entry.role == "rollout" and entry.engine == "openai" for entry in topology.process)
    return EXACT if topology.model.dtype == "float32" and not served else ROUNDED


def mixed(topology: Topology) -> bool:
    """Whether tokens of new weights may be drawn over keys of old ones: then they agree with neither (docs/engines.md).

    Not before the first update: the first step can always be judged.
    """
    if topology.weights.mode == "sync" or topology.weights.transport in RESTARTS:
        return False
    how = topology.generation.on_update
    keeps = any(entry.role == "rollout" and entry.engine not in ("vllm", "openai") for entry in topology.process)
    return how == "keep" or (how == "auto" and keeps)
