"""Service times of a simulated run: how long a decoding step, a reward, an optimiser step and a publication take.

Plain numbers in seconds, with a note where each came from: stated (an assumption of the topology's [simulate] section)
or fitted (`fit`). Talks to nothing; knows nothing of events, rings or policies.

- A decoding step of an actor with n running sequences takes step_s + row_s x n; a sequence that joins costs
  sequence_s + prefill_token_s x (its prompt and what earlier segments made of it) once.
- An answer is looked at by a reward process after reward_s on average, and judged by one of its workers, which takes
  reward_call_s: workers are servers with a rate, and answers queue for them.
- A learner's step takes learner_step_s, plus learner_token_s per token, plus learner_group_s per group set aside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

STATED = "assumed"


@dataclass(frozen=True)
class Times:
    """In seconds, but for spreads, which are standard deviations of a natural log: between actors (`speed_spread`), of
    one actor over the time (`step_spread`), of the learner's work (`learner_spread`); none changes a mean.

    `busy_share`: of an actor's own time, what its counters call busy (the rest is its loop).
    """

    step_s: float = 0.004
    row_s: float = 0.00004
    sequence_s: float = 0.0002
    prefill_token_s: float = 0.000005
    weights_s: float = 0.002
    speed_spread: float = 0.0
    step_spread: float = 0.0
    reward_s: float = 0.03
    reward_call_s: float = 0.0
    learner_step_s: float = 0.01
    learner_token_s: float = 0.00003
    learner_group_s: float = 0.0003
    publish_s: float = 0.001
    learner_spread: float = 0.0
    checkpoint_s: float = 0.05
    busy_share: float = 1.0
    source: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, float) and not 0 <= value < float("inf"):
                raise ValueError(f"{one.name} = {value}: must be a number of seconds >= 0")
        if self.step_s + self.row_s <= 0:
            raise ValueError("step_s + row_s = 0: a decoding step must take some time")

    def decoding(self, rows: int) -> list[float]:
        """Seconds of one decoding step by the number of running sequences, 0 to `rows`."""
        return [self.step_s + self.row_s * active for active in range(rows + 1)]

    def with_source(self, source: Mapping[str, str], **values: float) -> Times:
        """With other values and a note on where each came from."""
        return replace(self, source={**self.source, **source}, **values)

    def notes(self) -> list[tuple[str, float, str]]:
        """Name, value and origin of every number."""
        named = [one.name for one in fields(self) if one.name != "source"]
        return [(name, getattr(self, name), self.source.get(name, STATED)) for name in named]
