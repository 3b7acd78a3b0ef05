"""What a monitor is told, as plain records: facts of a run, one look at its ring, numbers of a step, an error.

Talks to nothing. These are the inputs of `Picture`; looks and facts also stand in recordings, so that a replay shows
the ring as well. Times are seconds; an age is measured at the moment of the look.
"""

from __future__ import annotations

import math

import msgspec


class Facts(msgspec.Struct, frozen=True):
    """What does not change while a run goes on. Zeros and empty texts: not known."""

    name: str = ""
    run_id: str = ""
    uuid: str = ""
    run_dir: str = ""
    launch_pid: int = 0
    started: float = 0.0  # wall clock
    max_steps: int = 0
    group_size: int = 0
    n_min: int = 0
    t_max_s: float = math.inf
    mode: str = ""
    max_staleness: int = 0
    progress_s: float = 30.0
    slots: int = 0


class ProcessSeen(msgspec.Struct, frozen=True):
    """One entry of the process table."""

    name: str
    role: str
    pid: int
    state: str  # "starting", "ready" or "dead"
    activity: str
    deadline_s: float
    progress_age_s: float
    activity_age_s: float
    busy_ns: int
    tokens: int
    samples: int
    version: int
    remote: bool = False  # it works through the gateway, and stays listed after everything here was killed


class RingSeen(msgspec.Struct, frozen=True):
    """One look at the ring; group counts are -1 where the fate table could not be read."""

    slots: int
    occupancy: dict[str, int]
    words: dict[str, int]
    dispatched: int
    finished: int
    dropped: int
    reaps: int
    tokens: int
    drops: dict[str, int]
    groups_open: int
    groups_ready: int
    processes: tuple[ProcessSeen, ...]

    @property
    def living(self) -> int:
        """How many processes of this host are not dead."""
        return sum(process.state != "dead" and not process.remote for process in self.processes)


class StepSeen(msgspec.Struct, frozen=True):
    """One optimiser step: a line of metrics.jsonl, or the numbers of a LEARNER_STATE_UPDATE."""

    step: int
    version: int = 0
    reward: float = 0.0
    length_ended: float = 0.0
    length_mean: float = 0.0
    age_mean: float = 0.0
    age_p95: float = 0.0
    age_max: float = 0.0
    entropy: float = 0.0
    flat_share: float | None = None  # of the groups that ended
    cut_share: float | None = None  # of the trained answers
    k3: float | None = None
    ess: float | None = None
    seconds: float = 0.0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    n_min: float = 0.0  # in force, 0: not told
    control_n_min: float = 0.0  # what the controller would have or has set; 0: there is none
    control_moves: float = 0.0
    entropy_ratio: float = 0.0  # H / H_ref on the probe set, 0: not known yet
    eta: float = -1.0  # admission bound that a controller moves, -1: none does

    @property
    def length(self) -> float:
        """Mean tokens of an answer: of all that ended, where that is known."""
        return self.length_ended or self.length_mean


class MetricsLine(StepSeen, frozen=True):
    """A line of metrics.jsonl: a step, or with `kind` "idle" groups that ended without one."""

    kind: str = ""


class RoundSeen(msgspec.Struct, frozen=True, rename={"mean": "val/reward"}):
    """One round of validation: a line of validation.jsonl, or a VALIDATION_DONE."""

    round: int
    version: int = 0
    mean: float | None = None  # none of its samples was judged


class ErrorSeen(msgspec.Struct, frozen=True):
    """A warning or an error that some process reported."""

    time: float
    process: str
    severity: str
    where: str = ""
    text: str = ""
