"""What the learner writes down per step: one line of metrics.jsonl, one of samples.jsonl, and LEARNER_STATE_UPDATE; and
a line for groups that end without a step.

Pure counting plus two append-only files. Knows nothing of the ring or of torch. `reward` is the mean over all samples
of all groups that ended since the last step, flat ones included; `reward_trained` over the trained ones.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.errors import MachineError
from busrl.inference.base import LENGTH
from busrl.ledger.files import LineFile
from busrl.ledger.trainlog import last_step
from busrl.ledger.wal import Record, SampleRecord
from busrl.paths import RunPaths
from busrl.roles.gather import Claimed
from busrl.roles.idling import Idling

if TYPE_CHECKING:
    from busrl.training.settings import StepStats

QUARTILES = 4
IDLE = "idle"  # `kind` of a line about groups without a step; a step's line has none


class StepMetrics:
    """Counts since the last step, and the files they are written to."""

    def __init__(self, paths: RunPaths) -> None:
        self._told = last_step(paths.metrics)
        self._metrics = LineFile(paths.metrics)
        self._samples = LineFile(paths.samples)
        self._groups = LineFile(paths.groups)
        self._started: float | None = None
        self._last = time.monotonic()
        self._row: dict[str, Any] = {}
        self.checkpoint_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._aside: Counter[str] = Counter()
        self._aside_rewards: list[float] = []
        self._aside_lengths: list[int] = []
        self._parts: dict[str, list[float]] = {}  # of the rewards of all samples that ended
        self._ended: list[tuple[int, str, int, list[int], list[float]]] = []  # draw, fate, step of birth, each member
        self._waited: Counter[str] = Counter()
        self._waiting_for = "start"
        self._blocker: int | None = None

    # -- events -------------------------------------------------------------------------------------------------

    def first_claim(self) -> None:
        """The clock of the run starts with the first group that is claimed."""
        if self._started is None:
            self._started = self._last = time.monotonic()

    def set_aside(self, lines: npt.NDArray[Any], fate: str) -> None:
        """A group's survivors were dropped by a rule."""
        rewards, lengths = lines["reward"].tolist(), lines["response_tokens"].tolist()
        self._aside[fate] += 1
        self._aside_rewards += rewards
        self._aside_lengths += lengths
        if rewards:
            self._ended.append((int(lines["group"][0]), fate, int(lines["step"].min()), lengths, rewards))

    def reward_parts(self, found: Iterable[Mapping[str, float]]) -> None:
        """Parts of the rewards of samples that ended, trained or not."""
        for parts in found:
            for name, value in parts.items():
                self._parts.setdefault(name, []).append(value)

    def _part_means(self) -> dict[str, dict[str, float]]:
        means = {name: float(np.mean(values)) for name, values in self._parts.items()}
        return {"reward_parts": means} if means else {}

    @property
    def groups_aside(self) -> int:
        """Groups set aside since the last step."""
        return sum(self._aside.values())

    def waiting(self, reason: str, group: int | None) -> None:
        self._waiting_for, self._blocker = reason, group

    def waited(self, seconds: float) -> None:
        self._waited[self._waiting_for] += seconds  # type: ignore[assignment]

    # -- a step -------------------------------------------------------------------------------------------------

    def step(
        self,
        record: Record,
        groups: Sequence[Claimed],
        stats: StepStats,
        samples: Iterable[Mapping[str, object]],
        version: int,
        published_s: float,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Write the lines of a finished step, with what others counted (`more`). Returns the row."""
        now = time.monotonic()
        rewards = np.array([sample.reward for sample in record.samples])
        lengths = _lengths(record.samples)
        ended = np.concatenate([rewards, self._aside_rewards])
        row: dict[str, Any] = {
            "step": record.step,
            "version": version,
            "cause": record.cause,
            "time_s": round(now - (self._started or now), 4),
            "seconds": round(now - self._last, 4),
            "groups_ended": len(groups) + self.groups_aside,
            "samples_ended": len(ended),
            "tokens": stats.tokens,
            "reward": float(ended.mean()),
            **self._part_means(),
            "flat_share": self._aside["f"] / (len(groups) + self.groups_aside),
            "set_aside": dict(self._aside),
            "skipped": stats.skipped,
            "culprits": list(stats.culprits),
            "length_ended": float(np.concatenate([lengths, self._aside_lengths]).mean()),
            **_trained(record),
            **_training(stats),
            "wait_s": {reason: round(seconds, 4) for reason, seconds in self._waited.items()},
            "blocked_by": self._blocker,
            "publish_s": round(published_s, 5),
            "checkpoint_s": round(self.checkpoint_s, 4),
            **more,
        }
        self._write(row, [{"step": record.step, **sample} for sample in samples])
        self._write_groups(record.step, groups)
        self._row, self._last, self.checkpoint_s = row, now, 0.0
        self._clear()
        return row

    def idle(self, step: int, version: int, idling: Idling) -> None:
        """Write the line of groups that ended and gave no step, cumulated since the last step: `kind` is "idle"; and an
        answer of them for samples.jsonl. The counts go on: the next step's line has these groups too."""
        now = time.monotonic()
        row: dict[str, Any] = {
            "kind": IDLE, "step": step, "version": version, "time_s": round(now - (self._started or now), 4),
            "seconds": round(now - self._last, 4), "groups": 0, "groups_ended": self.groups_aside, "samples": 0,
            "samples_ended": len(self._aside_rewards), "tokens": 0, "set_aside": dict(self._aside),
            "idle_groups": idling.streak, "idle_limit": idling.patience, "idle_causes": dict(idling.causes),
            "wait_s": {reason: round(seconds, 4) for reason, seconds in self._waited.items()},
        }  # fmt: skip
        if self._aside_rewards:
            row |= {
                "reward": float(np.mean(self._aside_rewards)), "length_ended": float(np.mean(self._aside_lengths)),
                "flat_share": self._aside["f"] / max(1, self.groups_aside), **self._part_means(),
            }  # fmt: skip
        with contextlib.suppress(MachineError, OSError):
            self._metrics.append(msgspec.json.encode(row))
            if idling.flat.last is not None:
                self._samples.append(msgspec.json.encode({"kind": IDLE, "step": step, **idling.flat.last}))

    def replayed(self, record: Record, stats: StepStats) -> None:
        """The line of a step that a predecessor logged, but died before it wrote it; what only it knew is left out."""
        if record.step <= self._told:
            return
        rewards = [sample.reward for sample in record.samples]
        row = {
            "step": record.step, "version": record.version, "cause": record.cause, "replayed": True,
            "time_s": 0.0, "seconds": 0.0, "groups_ended": len(record.groups), "samples_ended": len(rewards),
            "tokens": stats.tokens, "reward": float(np.mean(rewards)), **_trained(record), **_training(stats),
        }  # fmt: skip
        with contextlib.suppress(MachineError, OSError):
            self._metrics.append(msgspec.json.encode(row))

    def _write(self, row: dict[str, Any], samples: Sequence[dict[str, object]]) -> None:
        # A full disk must not stop training here: these lines are for people, the log is for the ledger.
        with contextlib.suppress(MachineError, OSError):
            self._metrics.append(msgspec.json.encode(row))
            if samples:
                self._samples.append(b"\n".join(map(msgspec.json.encode, samples)))

    def _write_groups(self, step: int, groups: Sequence[Claimed]) -> None:
        """Lengths and rewards of all groups that ended since the last step: what a simulation draws from."""
        for group in groups:
            lengths = [len(record.token_ids) // 4 for record in group.records]
            self._ended.append((group.group, "T", group.step, lengths, group.rewards.tolist()))
        draws, fates, born, lengths_of, rewards_of = zip(*self._ended)
        row = {
            "step": step, "draws": draws, "fates": "".join(fates), "born": born, "lengths": lengths_of,
            "rewards": rewards_of,
        }  # fmt: skip
        with contextlib.suppress(MachineError, OSError):
            self._groups.append(msgspec.json.encode(row))

    def update(self, more: Mapping[str, float]) -> dict[str, Any]:
        """Fields of LEARNER_STATE_UPDATE for the step just written, and numbers that hold from now on."""
        row = self._row
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
        numbers.update({f"reward_parts/{name}": value for name, value in row.get("reward_parts", {}).items()})
        numbers.update(more)
        return {
            "entropy": row["entropy"],
            "version": row["version"],
            "step": row["step"],
            "groups": row["groups"],
            "reward": row["reward"],
            "tokens": row["tokens"],
            "samples": row["samples"],
            "age_mean": row["age_mean"],
            "metrics": numbers,
        }

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        self._groups.close()


def _segments(sample: SampleRecord) -> int:
    return len(sample.segments) or 1


def _training(stats: StepStats) -> dict[str, Any]:
    told = stats.diagnostics
    earlier = stats.context_tokens - stats.old_tokens
    masked = stats.context_tokens + stats.mastered_tokens
    return {
        "masked": {"earlier_segments": earlier, "too_old": stats.old_tokens, "mastered": stats.mastered_tokens},
        "never_trained": masked / max(1, stats.tokens + stats.context_tokens),  # of the tokens of the step's samples
        "lr": stats.lr,
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "entropy": told.entropy,
        "log_ratio_mean": told.log_ratio_mean,
        "k3": told.k3,
        "ess": told.ess,
        "clip_low": told.clip_low,
        "clip_high": told.clip_high,
        "dual_clip": told.dual_clip,
        "mismatch": told.mismatch,
        "mismatch_begun": told.mismatch_begun,
        "micro_batches": stats.micro_batches,
        "padding": stats.padding,
        "forward_s": round(stats.forward_s, 5),
        "backward_s": round(stats.backward_s, 5),
        "update_s": round(stats.step_s, 5),
    }


def _trained(record: Record) -> dict[str, Any]:
    """What the record alone says of the groups of its step: the same live and replayed."""
    lengths = _lengths(record.samples)
    members = [list(own) for _, own in groupby(record.samples, key=lambda sample: sample.group)]
    # A group is as old as its oldest member.
    ages = np.array([record.step - 1 - min(sample.step for sample in own) for own in members])
    return {
        "groups": len(record.groups),
        "samples": len(record.samples),
        "reward_trained": float(np.mean([sample.reward for sample in record.samples])),
        "length_mean": float(lengths.mean()),
        "length_p95": float(np.percentile(lengths, 95)),
        "segments_mean": float(np.mean([_segments(sample) for sample in record.samples])),
        "segments_max": max(map(_segments, record.samples)),
        "cut_share": float(np.mean([sample.finish == LENGTH for sample in record.samples])),
        "age_mean": float(ages.mean()),
        "age_p95": float(np.percentile(ages, 95)),
        "age_max": int(ages.max()),
        "age_by_length": _by_quartile(members, ages),
    }


def _lengths(samples: Sequence[SampleRecord]) -> npt.NDArray[np.int64]:
    return np.array([len(sample.token_ids) // 4 for sample in samples])


def _by_quartile(groups: Sequence[Sequence[SampleRecord]], ages: npt.NDArray[np.int64]) -> list[float]:
    """Mean age of the groups in each quartile of mean length, shortest first."""
    lengths = np.array([_lengths(group).mean() for group in groups])
    order = np.argsort(lengths, kind="stable")
    return [float(ages[part].mean()) if len(part) else 0.0 for part in np.array_split(order, QUARTILES)]
