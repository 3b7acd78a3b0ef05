"""Run directories made in this process, with the learner's own parts and answers that nobody drew: quick, and as wild
as a test wants them. What processes do is left to the whole run of `test_oracle_run`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from busrl.algorithms import catalog
from busrl.ledger.wal import Record, SampleRecord
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.roles.learner.groups import Claimed
from busrl.roles.learner.history import History
from busrl.roles.learner.metrics import StepMetrics
from busrl.roles.learner.samples import to_sample
from busrl.roles.learner.step import TrainingStep
from busrl.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

GROUPS, SIZE, LIMIT = 4, 4, 12
JUDGE = "judge.py:score"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 16 tokens, two of which end an answer, and a tokenizer that knows one of them."""
    return _folder(tmp_path_factory.mktemp("oracle-model"), 0)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one."""
    return _folder(tmp_path_factory.mktemp("oracle-reference"), 1)


@pytest.fixture(scope="session")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with rows that no token has."""
    return _folder(tmp_path_factory.mktemp("oracle-padded"), 0, 20)


def _folder(path: Path, seed: int, rows: int = 16) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=rows, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, max_position_embeddings=64, eos_token_id=1, tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(16)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1").save_pretrained(path)
    return path


class MadeRun:
    """A learner without processes. Every step gets `GROUPS` groups of made-up answers and one that is flat."""

    def __init__(
        self, root: Path, folder: Path, episodes: bool = False, keys: bool = False, **tables: dict[str, Any]
    ) -> None:
        """`episodes`: every second sample is one of three turns in two sequences, of which one may be an opponent's.
        `keys`: its turns have some."""
        self.topology, self.paths, self.episodes = _topology(root, folder, tables), RunPaths.of(root), episodes
        self.keys = keys
        root.mkdir(exist_ok=True)
        (root / "topology.json").write_text(self.topology.to_json())
        self.fates = bytearray()
        self.start()

    def start(self) -> None:
        """As a learner starts: from the newest checkpoint and the log, if there are any."""
        self.training, self.history = TrainingStep(self.topology), History(self.paths, self.topology)
        self.metrics = StepMetrics(self.paths, lambda draw, fate: fate.encode() in self.fates[draw * 2 * SIZE :][:SIZE])
        self.history.load(self.training, lambda meta, folder: None)
        for record in self.history.to_replay():
            self.training.stale.at(record.version, record.step - 1)
            stats = self.training.replay(record)
            self.history.finished(record)
            self.metrics.replayed(record, stats)
        self.metrics.resume(self.history.step)

    def checkpoint(self) -> None:
        self.history.checkpoint(self.training, self.history.step, {}, lambda folder: None)

    def stop(self, checkpoint: bool = True) -> None:
        if checkpoint:
            self.checkpoint()
        self.history.commit()
        self.history.close()
        self.metrics.close()
        (self.paths.root / "fates.bin").write_bytes(bytes(self.fates))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        """One step as the learner makes it: micro-batches while it fills up where the loss allows it."""
        step, version = self.history.step + 1, self.history.step
        groups = [self.group(step, number) for number in range(GROUPS)]
        samples = [record for group in groups for record in group.records]
        record = Record(
            step=step, version=version, cause="count", groups=[group.group for group in groups], samples=samples,
        )
        self.flat_group(step)
        self.history.append(record)
        self.training.stale.at(version, step - 1)
        if not catalog.held_back(self.topology.learner):
            self.training.accumulate([record for group in groups[:2] for record in group.records], version)
            self.training.accumulate([record for group in groups[2:] for record in group.records], version)
            stats = self.training.finish(GROUPS)
        else:
            stats = self.training.train(samples, GROUPS, version)
        self.history.finished(record)
        more = {"groups_total": self.history.groups}
        self.metrics.step(record, stats, {}, version + 1, 0.0, more)
        if self.topology.learner.checkpoint_every:
            self.checkpoint()

    def group(self, step: int, number: int) -> Claimed:
        chance = np.random.default_rng([step, number])
        group = (step - 1) * (GROUPS + 1) + number
        records = [self._record(chance, step, group, member) for member in range(SIZE)]
        records[0].reward, records[1].reward = 0.0, 1.0  # never flat
        logps = self.training.trainer.score([to_sample(record) for record in records])
        for record, logp in zip(records, logps):  # far from what was drawn, on both sides
            record.logprobs = np.minimum(logp + chance.normal(0, 0.8, len(logp)), -1e-3).astype("<f4").tobytes()
        self._fate(group, "T")
        return Claimed((), tuple(records))

    def _record(self, chance: np.random.Generator, step: int, group: int, member: int) -> SampleRecord:
        length, cut = int(chance.integers(3, LIMIT)), bool(chance.random() < 0.3)
        tokens = chance.integers(3, 16, LIMIT if cut else length)
        if not cut:
            tokens[-1] = chance.integers(1, 3)
        oldest = max(0, step - 1 - int(chance.integers(0, 3 if self.topology.weights.mode != "sync" else 1)))
        versions = np.sort(chance.integers(oldest, step, len(tokens)))
        versions[0] = oldest
        record = SampleRecord(
            uid=2 * SIZE * group + member, group=group, admission=group, member=member, attempt=0, prompt_crc=0,
            reward=float(chance.integers(0, 3)), temperature=float(np.float32(self.topology.generation.temperature)),
            version=oldest, step=oldest, finish=2 if cut else 1,
            prompt_ids=np.full(5, 3 + group % 12).astype("<i4").tobytes(), token_ids=tokens.astype("<i4").tobytes(),
            logprobs=b"\0" * 4 * len(tokens), versions=versions.astype("<u4").tobytes(),
            segments=_segments(chance, len(tokens)) if self.topology.segments.on else [],
        )
        if not self.episodes or member % 2 == 0:
            return record
        made = _episode(chance, record)
        return msgspec.structs.replace(made, keys=chance.choice(["", "a", "b"], 3).tolist()) if self.keys else made

    def flat_group(self, step: int, draw: int = -1) -> None:
        """Set a flat group aside for the coming `step`, as the learner does: metrics first, then its fates."""
        draw = (step - 1) * (GROUPS + 1) + GROUPS if draw < 0 else draw
        lines = np.zeros(SIZE, [("group", "i8"), ("step", "i8"), ("reward", "f8"), ("response_tokens", "i8")])
        lines["group"], lines["step"], lines["reward"], lines["response_tokens"] = draw, max(0, step - 2), 2.0, 7
        self.metrics.set_aside(lines, "f", step)
        self._fate(draw, "f")

    def _fate(self, draw: int, fate: str) -> None:
        self.fates.extend(bytes(max(0, 2 * SIZE * (draw + 1) - len(self.fates))))
        self.fates[2 * SIZE * draw : 2 * SIZE * draw + SIZE] = fate.encode() * SIZE

    def weights(self) -> torch.Tensor:
        return torch.cat([tensor.detach().flatten().double() for tensor in self.training.weights().values()])


def _episode(chance: np.random.Generator, answer: SampleRecord) -> SampleRecord:
    """The tokens of an answer, of at least three, as those of three turns: two of a sequence, with the word of a tool
    between them, and one of a sequence that was forked."""
    tokens, versions = answer.token_array().tolist(), answer.version_array()
    first, second = sorted(chance.choice(np.arange(1, len(tokens)), 2, replace=False).tolist())
    ids = [3, 4, *tokens[:first], 7, *tokens[first:second], 5, *tokens[second:]]
    marks = [1, 4 + int(chance.random() < 0.5), 3]  # in the order of the log; the last one's call was the second
    ends = [2 + first, 3 + second, len(tokens) - second + 1]
    turns = [0, 2, ends[0], marks[0], 0, ends[0] + 1, ends[1], marks[1], 1, 1, ends[2], marks[2]]
    oldest = versions[: first].min() if marks[1] % 2 == 0 else versions.min()
    return msgspec.structs.replace(
        answer, prompt_ids=b"", token_ids=np.array(ids, "<i4").tobytes(), segments=[], seqs=[ends[1], ends[2]],
        turns=turns, turn_rewards=chance.random(3).round(2).tolist(), step=int(min(oldest, versions[second:].min())),
    )


def _segments(chance: np.random.Generator, tokens: int) -> list[int]:
    """Up to three segments."""
    if tokens < 3 or chance.random() < 0.3:
        return []
    first, second = sorted(chance.choice(np.arange(1, tokens), 2, replace=False).tolist())
    return [first, second - first, tokens - second]


def _topology(root: Path, folder: Path, tables: dict[str, dict[str, Any]]) -> Topology:
    base = load(ROOT / "configs" / "quickstart.toml")
    # Answers that no engine drew.
    mock = tuple(dataclasses.replace(process, engine="mock") for process in base.process)
    overrides: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder)}, "groups": {"size": SIZE},
        "run": {"max_steps": 6}, "generation": {"temperature": 0.7, "max_new_tokens": LIMIT},
        "reward": {"kind": "python", "function": JUDGE}, "learner": {}, "trigger": {"n_min": GROUPS},
    }
    if "derived" in tables:
        tables = {**tables, "derived": {"limits": dataclasses.replace(base.derived.limits, **tables["derived"])}}
    for name, values in tables.items():
        overrides[name] = {**overrides.get(name, {}), **values}
    trigger = dataclasses.replace(base.learner.trigger, **overrides.pop("trigger"))
    overrides["learner"] = {"checkpoint_every": 0, "trigger": trigger, "lr": 3e-4, **overrides["learner"]}
    changed = {name: dataclasses.replace(getattr(base, name), **values) for name, values in overrides.items()}
    return dataclasses.replace(base, **changed, process=mock)


@pytest.fixture
def make_run(tmp_path: Path, folder: Path) -> Callable[..., MadeRun]:
    """Makes a finished run of so many steps with these tables of the topology."""

    def make(
        steps: int = 3, name: str = "run", stop: bool = True, episodes: bool = False, keys: bool = False,
        **tables: dict[str, Any],
    ) -> MadeRun:
        run = MadeRun(tmp_path / name, folder, episodes, keys, **tables)
        run.steps(steps)
        if stop:
            run.stop()
        return run

    return make


@pytest.fixture
def wrong() -> Callable[[Path], Sequence[str]]:
    """What the oracle finds wrong in a run directory."""
    return _wrong


def _wrong(root: Path) -> Sequence[str]:
    from oracle.check import check

    report = check(root)
    assert report.done["ages"] > 0 and report.done["loss"] > 0, report.text()
    return report.wrong
