"""The files of a run directory, read by their documented formats alone.

Knows nothing of formulas or models. A file that is not there gives an empty result; a damaged one is an error.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

EOS, LENGTH = 1, 2
HEAD, FRAME = struct.Struct("<8sII"), struct.Struct("<4sII")


@dataclass
class Sample:
    """One trained answer as the log has it; arrays have one entry per generated token."""

    uid: int
    group: int
    member: int
    prompt_crc: int
    reward: float
    temperature: float
    version: int  # at admission (older if a token is),
    step: int  # and the learner's step of it
    finish: int
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    segments: list[int]  # tokens of each
    ids: np.ndarray  # all sequences of an episode, one after another; prompt and tokens of an answer
    seqs: list[int]  # their lengths
    turns: np.ndarray  # [turns, 4]: sequence, begin, end, 2 x call + 1 where it is trained
    turn_rewards: list[float]
    keys: list[str]  # of the turns, "" for none; empty where no turn has one

    @property
    def is_episode(self) -> bool:
        return not len(self.prompt)

    @property
    def trained(self) -> np.ndarray:
        """Of each generated token whether its turn is trained."""
        return np.repeat(self.turns[:, 3] % 2 == 1, self.turns[:, 2] - self.turns[:, 1])

    def sequences(self) -> list[tuple[np.ndarray, list[tuple[int, int]]]]:
        """The ids of each sequence, with begin and end of what was generated in it."""
        ends = np.cumsum(self.seqs)
        return [
            (self.ids[end - length : end], [(b, e) for s, b, e, _ in self.turns.tolist() if s == number])
            for number, (end, length) in enumerate(zip(ends.tolist(), self.seqs))
        ]

    @property
    def last_begins(self) -> int:
        """Where the last segment begins."""
        return sum(self.segments[:-1])


@dataclass
class Step:
    """One record of the log: the samples of a step in the order trained, and the newest version before it."""

    step: int
    version: int
    cause: str
    groups: list[int]
    samples: list[Sample]
    terms: dict[str, Any] | None = None  # what decided what is trained: in records of older runs it is not there

    def members(self, group: int) -> list[int]:
        return [i for i, sample in enumerate(self.samples) if sample.group == group]


@dataclass
class RunFiles:
    """Everything that the checks read."""

    root: Path
    topology: dict[str, Any]
    steps: list[Step]
    rows: dict[int, dict[str, Any]]  # metrics.jsonl, by step
    ended: dict[int, dict[str, Any]]  # groups.jsonl, by the step that counts them
    uncounted: set[int]  # draws of groups that were set aside after the last step
    at_once: bool  # whether groups.jsonl has each group set aside when it was (older runs: only with the next step)
    fates: bytes
    validation: list[dict[str, Any]]  # validation.log
    rounds: list[dict[str, Any]]  # validation.jsonl
    learner_died: bool = False
    checkpoints: dict[int, Path] = field(default_factory=dict)


def read(root: Path) -> RunFiles:
    rows = [row for row in _lines(root / "metrics.jsonl") if row.get("lr") is not None]
    lines = [row for row in _lines(root / "groups.jsonl") if "draws" in row]
    ended, uncounted = _ended(lines)
    return RunFiles(
        root=root,
        topology=json.loads((root / "topology.json").read_text()),
        steps=read_log(root / "wal"),
        rows={row["step"]: row for row in rows},
        ended=ended,
        uncounted=uncounted,
        at_once=any("T" not in row["fates"] for row in lines),
        fates=(root / "fates.bin").read_bytes() if (root / "fates.bin").exists() else b"",
        validation=_lines(root / "validation.log"),
        rounds=_lines(root / "validation.jsonl"),
        learner_died=_restarts(root / "summary.json", "learner") > 0,
        checkpoints={
            int(found[1]): path
            for path in (root / "checkpoints").glob("*")
            if (found := re.fullmatch(r"global_step_(\d+)", path.name))
        },
    )


def _ended(lines: list[dict[str, Any]]) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """The groups that each step counts: those of its own line, which has fates T, and those that lines before it set
    aside for it; of a group with several lines since the last step the last one holds. And the draws that are left."""
    ended: dict[int, dict[str, Any]] = {}
    aside: dict[int, tuple[int, str, list[int], list[float]]] = {}
    for row in lines:
        groups = zip(row["draws"], row["fates"], row["lengths"], row["rewards"])
        if "T" not in row["fates"]:
            aside |= {draw: (row["step"], *rest) for draw, *rest in groups}
            continue
        # What was set aside for an earlier step belongs to one whose line was lost; for a later one: the run went back.
        counted = [(draw, *rest) for draw, (step, *rest) in aside.items() if step >= row["step"]]
        every = [*counted, *groups]
        names = ("draws", "fates", "lengths", "rewards")
        one = dict(zip(names, (list(values) for values in zip(*every)), strict=True))
        ended[row["step"]] = one | {"fates": "".join(one["fates"])}
        aside = {}
    last = max(ended, default=0)
    return ended, {draw for draw, (step, *_) in aside.items() if step > last}


def _restarts(summary: Path, process: str) -> int:
    told = json.loads(summary.read_text()) if summary.exists() else {}
    return int(told.get("processes", {}).get(process, {}).get("restarts", 0))


def _lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data.split(b"\n")[:-1] if line.strip()]


def read_log(directory: Path) -> list[Step]:
    """All records of `<number>.wal`, in order; half a record at the very end is left out."""
    steps = []
    for path in sorted(directory.glob("*.wal"), key=lambda path: int(path.stem)):
        data = path.read_bytes()
        if len(data) < HEAD.size:
            continue
        magic, layout, crc = HEAD.unpack_from(data)
        if magic != b"BUSRLWAL" or layout not in (3, 4) or crc != zlib.crc32(data[:12]):
            raise ValueError(f"{path}: no log of layout 3 or 4")
        steps += [_step(payload) for payload in _payloads(path, data)]
    return steps


def _payloads(path: Path, data: bytes) -> list[bytes]:
    found, at = [], HEAD.size
    while at + FRAME.size <= len(data):
        mark, length, crc = FRAME.unpack_from(data, at)
        payload = data[at + FRAME.size : at + FRAME.size + length]
        if mark != b"WREC" or len(payload) < length or zlib.crc32(data[at + 4 : at + 8] + payload) != crc:
            if data.find(b"WREC", at + 1) >= 0:
                raise ValueError(f"{path}: the record at byte {at} is damaged")
            break
        found.append(payload)
        at += FRAME.size + length
    return found


def _step(payload: bytes) -> Step:
    raw = msgspec.msgpack.decode(payload)
    samples = [_sample(one) for one in raw["samples"]]
    return Step(raw["step"], raw["version"], raw["cause"], raw["groups"], samples, raw.get("terms"))


def _sample(raw: dict[str, Any]) -> Sample:
    prompt, ids = (np.frombuffer(raw[name], "<i4").astype(np.int64) for name in ("prompt_ids", "token_ids"))
    ids = np.concatenate([prompt, ids])
    seqs = list(raw.get("seqs") or [len(ids)])
    turns = np.array(raw.get("turns") or [0, len(prompt), len(ids), 1], np.int64).reshape(-1, 4)
    begins = (np.cumsum(seqs) - seqs)[turns[:, 0]]
    tokens = np.concatenate([ids[at + b : at + e] for at, (_, b, e, _) in zip(begins.tolist(), turns.tolist())])
    same = ("uid", "group", "member", "prompt_crc", "reward", "temperature", "version", "step", "finish")
    return Sample(
        **{name: raw[name] for name in same},
        prompt=prompt,
        tokens=tokens,
        logprobs=np.frombuffer(raw["logprobs"], "<f4").astype(np.float64),
        versions=np.frombuffer(raw["versions"], "<u4").astype(np.int64),
        segments=list(raw.get("segments") or [len(tokens)]),
        ids=ids, seqs=seqs, turns=turns, turn_rewards=list(raw.get("turn_rewards") or []),
        keys=list(raw.get("keys") or []),
    )
