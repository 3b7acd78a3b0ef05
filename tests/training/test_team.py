"""Rank 0 and followers as processes: any samples, one result; a failure is named."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from busrl.errors import RankLost, Stopped
from busrl.ranks.builder import TeamSettings, facts
from busrl.ranks.follower import Follower
from busrl.ranks.leader import Leader, Team
from busrl.ranks.mesh import Layout
from busrl.ranks.wire import SentRoutes, routes_of, samples_of, work_of
from busrl.training import checkpoint
from busrl.training.batch import rounds_of
from busrl.training.model import LoraSettings, load
from busrl.training.scorer import Advantages
from busrl.training.settings import TrainerSettings
from busrl.training.sharded import local
from busrl.training.trainer import Trainer
from busrl.weights.shm import ShmReceiver, ShmSender
from tests.training import follower_program, test_pieces

# A loss that reads the log-probabilities before the step.
SETTINGS: dict[str, Any] = {
    "micro_batch_tokens": 40, "max_grad_norm": 1.0, "weight_decay": 0.01, "loss": "decoupled",
}
TEACHER_K = follower_program.TEACHER_K
LENGTHS = st.lists(st.integers(2, 60), max_size=40)


# -- rounds --------------------------------------------------------------------------------------------------------


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80), st.sampled_from([0.0, 0.01]))
def test_every_sample_is_in_one_share_within_the_budget(
    lengths: list[int], ranks: int, budget: int, quadratic: float
) -> None:
    rounds = rounds_of(lengths, ranks, budget, quadratic)
    assert sorted(at for shares in rounds for share in shares for at in share) == list(range(len(lengths)))
    for shares in rounds:
        assert len(shares) == ranks and any(shares)
        for share in shares:
            assert len(share) == 1 or sum(lengths[at] for at in share) <= budget


@given(LENGTHS, st.integers(1, 5))
def test_a_round_differs_between_ranks_by_at_most_its_longest_sample(lengths: list[int], ranks: int) -> None:
    for shares in rounds_of(lengths, ranks, 10**6):
        loads = [sum(lengths[at] for at in share) for share in shares]
        assert max(loads) - min(loads) <= max(lengths)


def test_work_on_its_way_to_a_rank_stays_what_it_was(lab: Any) -> None:
    samples = lab.samples()
    work = work_of(lambda versions: 7 - versions.astype(np.int64), samples, Advantages(lab.advantages(len(samples))))
    for before, after in zip(samples, samples_of(work), strict=True):
        for name in ("uid", "group", "member", "reward", "temperature", "finish", "context"):
            assert getattr(before, name) == getattr(after, name)
        for name in ("prompt_ids", "token_ids", "behaviour_logprobs", "policy_versions"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
            assert getattr(before, name).dtype == getattr(after, name).dtype
    assert len(work.prompts) == 3, "the prompt of a group is sent once"
    assert work.ages == {3: 4, 4: 3, 5: 2}


def test_routes_travel_with_their_samples_and_shared_prompts_once(lab: Any) -> None:
    samples = lab.samples(groups=2, members=3)
    assert routes_of(samples) is UNSET
    random = np.random.default_rng(0)
    for at, sample in enumerate(samples[1:], 1):
        prompt = np.full((len(sample.prompt_ids) - 1, 2, 3), sample.group, np.uint16)
        rows = random.integers(0, 300, (sample.generated, 2, 3)).astype(np.uint16)
        samples[at] = replace(sample, routes=rows, prompt_routes=None if at == 2 else prompt)
    sent = routes_of(samples)
    assert isinstance(sent, SentRoutes) and len(sent.prompts) == 2
    there = samples_of(work_of(lambda versions: versions.astype(np.int64), samples), sent)
    for before, after in zip(samples, there, strict=True):
        for name in ("routes", "prompt_routes"):
            left, right = getattr(before, name), getattr(after, name)
            assert (left is None) == (right is None)
            assert left is None or (left.dtype == right.dtype and np.array_equal(left, right))


# -- a team --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def team_of(
    folder: Path, ranks: int = 2, collective_s: float = 60, wrong: str = "", lora: LoraSettings | None = None,
    refers: bool = False, reference: Path | None = None, tensor: int = 1,
    teacher: Path | None = None, there: Path | None = None, endpoint: tuple[str, ...] = (), **settings: Any,
) -> Iterator[Any]:
    """A team of this process and others; its followers' processes are in `processes`. `there`: where one on another
    host has its copies of what is in `folder`. `endpoint`: address of a teacher, and the trained model's folder."""
    file, values = folder / "team.sock", {**SETTINGS, **settings}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WRONG": wrong}
    more = json.dumps({"lora": lora and asdict(lora), "refers": refers, "reference": reference and str(reference),
                       "tensor": tensor, "teacher": teacher and str(teacher), "there": there and str(there),
                       "endpoint": endpoint})
    program, given = [sys.executable, follower_program.__file__], json.dumps(values, default=asdict)
    processes = [
        subprocess.Popen([*program, str(rank), str(ranks), str(file), str(collective_s), given, more],
                         env=environment, stderr=subprocess.PIPE)
        for rank in range(1, ranks)
    ]
    known = TeamSettings(ranks, file, facts("one"), torch.device("cpu"), start_s=60, collective_s=collective_s,
                         lora=lora, refers=refers, reference=reference, teacher=teacher,
                         taught=teacher is not None or bool(endpoint), teacher_k=TEACHER_K,
                         teachers=follower_program.behind(*endpoint),
                         layout=Layout(ranks, tensor=tensor), hosts=("gpu-0",) if there else (),
                         address="127.0.0.1" if there else "", note=file.with_suffix(".json"), root=folder, hosts_s=60)
    team = None
    try:
        team = Team.gathered(known)
        team.processes = processes  # type: ignore[attr-defined]
        yield team
    finally:
        if team is not None:
            team.close()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20 if team is not None else 0.1)
            process.kill()
            print(process.communicate()[1].decode()[-2000:])  # shown with a failure


def test_a_stop_while_ranks_are_awaited_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TeamSettings(3, tmp_path / "team.sock", facts("one"), torch.device("cpu"), start_s=30, collective_s=30)
    ends, greeted, looks = list[BaseException](), threading.Event(), list[bool]()

    def welcomed() -> bool:
        if not looks:  # rank 0 listens by now
            connected.start()
        looks.append(greeted.is_set())
        return sum(looks) > 1  # a connection is accepted between two looks

    def follow(rank: int, stopping: Any) -> None:
        try:
            Follower(settings, TrainerSettings(), rank, stopping)
        except BaseException as problem:
            ends.append(problem)

    connected = threading.Thread(target=follow, args=(1, greeted.set))  # set at its first look for an answer
    with pytest.raises(Stopped, match="the other ranks were waited for"):
        Team.gathered(settings, welcomed)
    connected.join(30)
    follow(2, lambda: True)
    assert [str(problem) for problem in ends] == ["rank 0 was asked to stop before all ranks were there",
                                          "while rank 0 was waited for"]
    assert all(isinstance(problem, Stopped) for problem in ends)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One for the tests after which it is whole."""
    with team_of(tmp_path_factory.mktemp("team")) as made:
        yield made


def a_step(trainer: Trainer, lab: Any, seed: int, version: int | None = None) -> Any:
    samples = lab.samples(groups=2 + seed % 3, seed=seed)
    worth = lab.advantages(len(samples), seed)
    half = len(samples) // 2  # as they arrive
    for part in (slice(0, half), slice(half, None)):
        weights = [1 / len(sample.token_ids) for sample in samples[part]]
        trainer.accumulate(samples[part], Advantages(worth[part], weights), version)
    return trainer.step(1e-2, denominator=len(samples), scale=1.5)


def assert_same_steps(found: list[Any], expected: list[Any]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine.tokens, mine.sequences, mine.skipped) == (other.tokens, other.sequences, other.skipped)
        np.testing.assert_allclose([mine.loss, mine.grad_norm], [other.loss, other.grad_norm], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mine.sums, other.sums, rtol=1e-4, atol=1e-4)


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-4)


def test_a_team_trains_scores_publishes_and_saves_as_one_rank_does(lab: Any, team: Any, tmp_path: Path) -> None:
    source = lab.folder("qwen3")
    one, trainer = lab.trainer("qwen3", double=False, **SETTINGS), team.trainer(source, TrainerSettings(**SETTINGS))
    assert_same_steps([a_step(trainer, lab, seed, 4) for seed in range(4)],
                      [a_step(one, lab, seed, 4) for seed in range(4)])
    probe = lab.samples(seed=9)
    for row, other in zip(trainer.score(probe), one.score(probe), strict=True):
        np.testing.assert_allclose(row, other, atol=1e-5)
    single = [replace(sample, token_ids=sample.token_ids[:1], behaviour_logprobs=sample.behaviour_logprobs[:1],
                      policy_versions=sample.policy_versions[:1]) for sample in probe]
    for row, other, sample, scored in zip(
        trainer.every(single), one.every(single), single, one.score(single), strict=True
    ):
        np.testing.assert_allclose(row, other, atol=1e-5)
        np.testing.assert_allclose(other[sample.token_ids], scored, atol=1e-6)
        assert np.exp(other.astype(np.float64)).sum() == pytest.approx(1.0)
    assert trainer.entropy(probe) == pytest.approx(one.entropy(probe), rel=1e-5)
    assert_same_weights(trainer.named_weights(), one.named_weights())
    saved = checkpoint.save(
        tmp_path / "checkpoints", 4, model=trainer.model, optimizer_state=trainer.optimizer_state(), meta={},
        weights=trainer.named_weights(), source=source,
    )
    after = [a_step(trainer, lab, seed) for seed in range(4, 7)]
    assert_same_steps(after, [a_step(one, lab, seed) for seed in range(4, 7)])
    again: Leader = team.trainer(saved.model, TrainerSettings(**SETTINGS))
    assert again.restore(saved) == []
    assert_same_steps([a_step(again, lab, seed) for seed in range(4, 7)], after)
    alone = Trainer(load(saved.model), TrainerSettings(**SETTINGS))
    alone.restore(saved)
    assert_same_steps([a_step(alone, lab, seed) for seed in range(4, 7)], after)


def test_a_team_trains_episodes_of_several_turns_as_one_rank_does(lab: Any, team: Any) -> None:
    """Advantages, weights and masks of turns have to reach the rank that computes them."""
    one = lab.trainer("qwen3", double=False, **SETTINGS)
    trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**SETTINGS))
    shapes = [[([(3, 2), (2, 3)], 0), ([(4, 1)], 0)], 4, [([(1, 2), (1, 1), (3, 2)], 2)], [([(3, 1)], 0)], 5]
    samples = [test_pieces.made(shape, index, seed=3) for index, shape in enumerate(shapes)]
    chance = np.random.default_rng(0)
    rows = [chance.normal(size=(2, len(sample.turn_lengths()))).tolist() for sample in samples]
    found = []
    for each in (trainer, one):
        each.accumulate(samples, Advantages([row[0] for row in rows], [row[1] for row in rows]), 4)
        found.append(each.step(1e-2, denominator=7.0))
    assert_same_steps(found[:1], found[1:])
    assert found[0].tokens == sum(sample.trained for sample in samples) < sum(sample.generated for sample in samples)
    assert_same_weights(trainer.named_weights(), one.named_weights())


def test_a_checkpoint_in_shards_is_read_by_any_number_of_ranks(lab: Any, team: Any, tmp_path: Path) -> None:
    source, settings = lab.folder("llama"), TrainerSettings(**SETTINGS)
    trainer, alone = team.trainer(source, settings), Trainer(load(source), settings)
    for seed in range(3):
        a_step(trainer, lab, seed)
    saved = in_shards(trainer, tmp_path / "two", 3)
    assert {path.name for path in (saved.path / "shards").iterdir()} == {
        "rank-0.safetensors", "rank-1.safetensors", "optimizer.json"}
    after = [a_step(trainer, lab, seed) for seed in range(3, 6)]
    again = team.trainer(source, settings)
    for one in (again, alone):
        assert one.restore(saved) == []
        np.testing.assert_allclose([a_step(one, lab, seed).loss for seed in range(3, 6)], [one.loss for one in after],
                                   atol=1e-6)
    saved = in_shards(alone, tmp_path / "one", 6)
    after = [a_step(alone, lab, seed) for seed in range(6, 8)]
    assert trainer.restore(saved) == []
    np.testing.assert_allclose([a_step(trainer, lab, seed).loss for seed in range(6, 8)], [one.loss for one in after],
                               atol=1e-6)


def in_shards(trainer: Any, root: Path, step: int) -> checkpoint.Checkpoint:
    """A checkpoint in shards, of which nothing is there before its commit."""
    pending = checkpoint.Pending(
        root, step, trainer=trainer, meta={}, source=None, extras=lambda folder: None, keep_last=1,
        on_progress=lambda: None, where=None,
    )
    assert checkpoint.latest(root) is None
    written = pending.commit(60)
    assert checkpoint.fault_of(written.path) is None and written.sharded
    return written


def test_published_bytes_are_those_of_one_rank_tensor_by_tensor(
    lab: Any, team: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainerSettings(**SETTINGS)
    trainer, one = team.trainer(lab.folder("qwen3"), settings), lab.trainer("qwen3", double=False, **SETTINGS)
    alive: set[int] = set()
    most, gather = 0, type(trainer).gather_weight

    def counted(self: Any, name: str) -> torch.Tensor:
        nonlocal most
        actual = gather(self, name)
        alive.add(id(actual))
        weakref.finalize(actual, alive.discard, id(actual))
        most = max(most, len(alive))
        return actual

    monkeypatch.setattr(type(trainer), "gather_weight", counted)
    for kind, more in (("full", {}), ("sparse", {"threshold": 0.9, "key_every": 32})):
        published = []
        for number, each in enumerate((trainer, one)):
            sender = ShmSender(tmp_path / f"{kind}{number}", **more)
            for version in (1, 2):
                sender.publish(version, version, each.named_weights())
                for _, parameter in sorted(each.model.named_parameters())[:2]:  # what a sparse version has
                    with torch.no_grad():
                        local(parameter)[: -(-parameter.shape[0] // 2)].add_(0.5 * version)  # the rows of rank 0
            receiver = ShmReceiver(tmp_path / f"{kind}{number}")
            got = {name: torch.empty_like(tensor) for name, tensor in one.named_weights().items()}
            assert receiver.fetch(got) == (2, 2)
            published.append(got)
            sender.close()
        assert all(torch.equal(published[0][name], tensor) for name, tensor in published[1].items()), kind
    assert 0 < most <= 2, "the one that is copied, and the next"


def test_an_update_with_the_old_log_probabilities_is_that_of_one_rank(lab: Any, team: Any) -> None:
    samples, stats = lab.samples(seed=3), []
    worth = lab.advantages(len(samples))
    trainer = lab.trainer("qwen3", double=False, **SETTINGS)
    for each in (team.trainer(lab.folder("qwen3"), TrainerSettings(**SETTINGS)), trainer):
        before = each.score(samples)
        each.accumulate(samples, Advantages(worth, proximal=before), 4)
        each.step(1e-2)
        each.accumulate(samples, Advantages(worth, proximal=before))
        stats.append(each.step(1e-2))
    assert_same_steps(stats[:1], stats[1:])


def test_a_sample_that_is_not_finite_is_named_whatever_rank_had_it(lab: Any, team: Any) -> None:
    trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**SETTINGS))
    before = {name: value.clone() for name, value in trainer.named_weights().items()}
    samples = lab.samples()
    worth, bad = lab.advantages(len(samples)), {3, 8}
    for uid in bad:
        worth[uid] = float("nan")
    trainer.accumulate(samples, worth)
    stats = trainer.step(1e-2)
    assert set(stats.culprits) == {f"sample {uid}" for uid in bad} and "norm is nan" in stats.skipped
    assert_same_weights(trainer.named_weights(), before)
    assert trainer.step(1e-2).skipped == "no trained token"


def test_a_rank_that_is_killed_is_named_at_once(lab: Any, team: Any) -> None:
    trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**SETTINGS))  # the last test: the team ends here
    (process,) = team.processes
    process.kill()
    process.wait()
    begun = time.monotonic()
    with pytest.raises(RankLost, match=rf"rank 1 \(pid {process.pid}\)"):
        a_step(trainer, lab, 1)
    assert time.monotonic() - begun < team.settings.collective_s / 2
