"""A step trained while it fills up, at once, or again from the log is the same step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

from busrl.algorithms import catalog
from busrl.algorithms.gae import ValueSettings
from busrl.data import JsonlStream
from busrl.errors import CannotTrain, RankFailed, UserError
from busrl.ledger.trained import TrainedSet
from busrl.ledger.wal import Record, SampleRecord, Wal
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.ring import Fates
from busrl.roles.learner.history import History
from busrl.roles.learner.metrics import _training
from busrl.roles.learner.samples import to_sample
from busrl.roles.learner.step import TrainingStep, split
from busrl.states import Finish
from busrl.system.files import json_lines
from busrl.topology import Topology
from busrl.topology.schema import Segments
from busrl.training.value_head import ValueHead

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, max_position_embeddings=64, eos_token_id=1, tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def topology(folder: Path) -> Topology:
    base = load(ROOT / "configs" / "quickstart.toml")
    return dataclasses.replace(base, model=dataclasses.replace(base.model, path=str(folder)))


def records(step: int, groups: int = 4, size: int = 4) -> list[SampleRecord]:
    chance = np.random.default_rng(step)
    made = []
    for group in range(groups):
        for member in range(size):
            length = int(chance.integers(2, 9))
            made.append(
                SampleRecord(
                    uid=step * 1000 + group * 8 + member, group=step * 100 + group, admission=group, member=member,
                    attempt=0, prompt_crc=0, reward=float(chance.integers(0, 2)), temperature=1.0, version=0, step=0,
                    finish=1, prompt_ids=chance.integers(2, 16, 5).astype("<i4").tobytes(),
                    token_ids=chance.integers(2, 16, length).astype("<i4").tobytes(),
                    logprobs=(-chance.random(length) - 2).astype("<f4").tobytes(),
                    versions=np.zeros(length, "<u4").tobytes(),
                )
            )
    return made


def weights(step: TrainingStep) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in step.weights().values()])


def test_a_step_streamed_in_parts_equals_the_step_at_once(topology: Topology) -> None:
    batch = records(1)
    step, parts = TrainingStep(topology), TrainingStep(topology)
    step.train(batch, 4, version=0)
    parts.accumulate(batch[8:], 0)
    parts.accumulate(batch[:8], 0)
    parts.finish(4)
    assert torch.allclose(weights(step), weights(parts), atol=1e-6)


def with_keys(topology: Topology, **keys: object) -> Topology:
    return dataclasses.replace(topology, learner=dataclasses.replace(topology.learner, **keys))  # type: ignore[arg-type]


def varied(step: int) -> list[SampleRecord]:
    """Rewards of many sizes, and no group that is flat."""
    chance = np.random.default_rng(step + 77)
    return [
        msgspec.structs.replace(one, reward=float(chance.random()), versions=chance.integers(
            0, 2, len(one.versions) // 4).astype("<u4").tobytes())
        for one in records(step)
    ]


class Watched(TrainingStep):
    """Keeps the gradients that the optimiser got, before clipping scales them, of weights moved off the reference."""

    def __init__(self, topology: Topology, shifted: float = 1.05) -> None:
        super().__init__(with_keys(topology, max_grad_norm=1e6))
        self.gradients: list[torch.Tensor] = []
        with torch.no_grad():
            for parameter in self.trainer.parameters:
                parameter.mul_(shifted)
        self.trainer.optimizer.register_step_pre_hook(lambda *_: self.gradients.append(self._gradient()))

    def _gradient(self) -> torch.Tensor:
        return torch.cat([parameter.grad.flatten().double() for parameter in self.trainer.parameters])


def apart(one: Watched, other: Watched) -> float:
    """The largest difference of the updates' gradients, as a share of their length."""
    pairs = zip(one.gradients, other.gradients, strict=True)
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


COMBINATIONS: dict[str, dict[str, object]] = {
    **{name: {"loss": name} for name, facts in catalog.LOSS_FACTS.items() if not facts.chooses and not facts.teacher},
    **{name: {"advantage": name} for name, made in catalog.ADVANTAGE_FACTS.items() if made == catalog.GROUP},
    **{name: {"aggregation": name, "length_norm": 7} for name in catalog.AGGREGATIONS},
    **{f"batch_std, {name}": {"advantage": "batch_std", "loss": name} for name, facts in catalog.LOSS_FACTS.items()
       if facts.homogeneous and not facts.chooses},
    **{f"{name}, reinforce": {"correction": name, "loss": "reinforce"} for name in catalog.CORRECTIONS},
    **{f"{name} in the loss": {"kl": name, "kl_coef": 0.3} for name in catalog.KL_TERMS},
    "geo_rs, reinforce": {"correction": "geo_rs", "loss": "reinforce", "correction_low": 0.9, "correction_high": 1.1},
    "k3_rs, reinforce": {"correction": "k3_rs", "loss": "reinforce", "correction_high": 0.1},
    "opsm": {"loss": "opsm", "opsm_delta": 0.05}, "two_sided": {"loss": "two_sided", "two_sided_delta": 1.1},
    "kl in the reward": {"kl": "k1", "kl_coef": 0.3, "kl_in": "reward"},
    "entropy": {"entropy_coef": 0.2}, "newest": {"newest_ratio": "one"},
}
OTHERWISE_THE_SAME = {"group_std", "ppo_clip", "token-mean", "none in the loss"}


@pytest.mark.parametrize("name", sorted(COMBINATIONS))
def test_every_algorithm_makes_the_same_step_streamed_or_from_the_log(topology: Topology, name: str) -> None:
    chosen = with_keys(topology, **COMBINATIONS[name])
    assert catalog.held_back(chosen.learner) == ""
    batch = varied(1)
    parts, whole, again = (Watched(chosen) for _ in range(3))
    parts.accumulate(batch[12:], 0)
    parts.accumulate(batch[:8], 0)
    parts.accumulate(batch[8:12], 0)
    streamed = parts.finish(4)
    at_once = whole.train(batch, 4, version=0)
    record = Record(step=1, version=0, cause="count", groups=[100, 101, 102, 103], samples=batch)
    again.replay(msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Record))
    assert streamed.loss == pytest.approx(at_once.loss, rel=1e-6, abs=1e-8)  # of tokens with losses around 1
    assert at_once.grad_norm > 1e-3
    assert apart(whole, parts) < 1e-6 and apart(whole, again) < 1e-6
    if name not in OTHERWISE_THE_SAME:
        plain = Watched(topology)
        plain.train(batch, 4, version=0)
        assert apart(whole, plain) > 1e-4, "the keys have no effect"


@pytest.mark.parametrize(
    "keys", [{"loss": "m2po"}, {"loss": "clip_cov", "clip_cov_range": (0.0, 5.0), "cov_share": 0.2},
             {"loss": "kl_cov", "cov_share": 0.2}, {"advantage": "batch_whiten"},
             {"advantage": "batch_std", "entropy_coef": 0.1}, {"loss": "dppo", "advantage": "batch_std"}],
    ids=str,
)
def test_algorithms_needing_the_whole_step_hold_back_and_replay_equally(
    topology: Topology, keys: dict[str, object]
) -> None:
    chosen, batch = with_keys(topology, **keys), varied(2)
    assert catalog.held_back(chosen.learner)
    live, again = Watched(chosen), Watched(with_keys(chosen, micro_batch_tokens=40))
    one = live.train(batch, 4, version=0)
    record = Record(step=1, version=0, cause="count", groups=[0, 1, 2, 3], samples=batch)
    other = again.replay(record)
    assert other.micro_batches > one.micro_batches
    assert apart(live, again) < 1e-6 and one.grad_norm > 1e-3


@pytest.mark.parametrize("loss", ["gspo", "m2po", "kl_cov", "decoupled"])
def test_two_updates_per_batch_are_against_the_weights_before_the_first(topology: Topology, loss: str) -> None:
    batch = varied(3)
    for ratio in ("proximal", "behaviour"):
        chosen = with_keys(topology, loss=loss, ratio=ratio, updates_per_batch=2, lr=1e-2, advantage="batch_std")
        live, again = Watched(chosen), Watched(with_keys(chosen, micro_batch_tokens=40))
        live.train(batch, 4, version=0)
        again.replay(Record(step=1, version=0, cause="count", groups=[0, 1, 2, 3], samples=batch))
        assert len(live.gradients) == 2 and apart(live, again) < 1e-4, "the second is at weights of float32 updates"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_killed_learner_returns_to_equal_weights_by_checkpoint_and_log(
    topology: Topology, tmp_path: Path, dtype: str
) -> None:
    topology = dataclasses.replace(topology, model=dataclasses.replace(topology.model, dtype=dtype))
    paths = RunPaths.of(tmp_path)
    living, history = TrainingStep(topology), History(paths, topology)
    for step in range(1, 6):
        record = Record(step=step, version=step - 1, cause="count", groups=[0, 1, 2, 3], samples=records(step))
        history.append(record)
        living.train(record.samples, 4, record.version)
        history.finished(record)
        if step == 3:
            history.checkpoint(living, step, {"more": 7}, lambda folder: None)
    history.close()

    again, successor = TrainingStep(topology), History(paths, topology)
    seen: dict[str, object] = {}
    successor.load(again, lambda meta, folder: seen.update(meta))
    assert seen["more"] == 7
    assert successor.step == 3
    for record in successor.to_replay():
        again.train(record.samples, len(record.groups), record.version)
        successor.finished(record)
    assert successor.step == 5 and successor.groups == 20 and successor.highest_version == 5
    assert len(successor.trained) == 5 * 16
    assert torch.allclose(weights(living), weights(again), atol=1e-6)
    for parameter, other in zip(living.trainer.parameters, again.trainer.parameters, strict=True):
        assert torch.allclose(parameter, other, atol=1e-6), "not the rounded weights of the folder"
    successor.close()


def with_lora(topology: Topology, **more: object) -> Topology:
    lora = dataclasses.replace(topology.lora, rank=4, **more)  # type: ignore[arg-type]
    return dataclasses.replace(topology, lora=lora)


def test_a_killed_learner_of_an_adapter_comes_back_to_the_same_weights(topology: Topology, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    topology = with_lora(topology)
    living, history = TrainingStep(topology), History(RunPaths.of(tmp_path), topology)
    started = weights(living)
    for step in range(1, 6):
        record = Record(step=step, version=step - 1, cause="count", groups=[0, 1, 2, 3], samples=records(step))
        history.append(record)
        living.train(record.samples, 4, record.version)
        history.finished(record)
        if step == 3:
            history.checkpoint(living, step, {}, lambda folder: None)
    history.close()
    assert not torch.equal(started, weights(living))
    again, successor = TrainingStep(topology), History(RunPaths.of(tmp_path), topology)
    successor.load(again, lambda meta, folder: None)
    for record in successor.to_replay():
        again.train(record.samples, len(record.groups), record.version)
        successor.finished(record)
    assert successor.step == 5
    assert torch.allclose(weights(living), weights(again), atol=1e-6)
    successor.close()
    newest = tmp_path / "checkpoints" / "global_step_3"
    model = dataclasses.replace(topology.model, path=str(newest / "model"))
    plain = TrainingStep(dataclasses.replace(topology, model=model, lora=dataclasses.replace(topology.lora, rank=0)))
    assert {name: tuple(value.shape) for name, value in plain.weights().items()} == {
        name: tuple(value.shape) for name, value in living.weights().items()
    }
    for other, why in (({"rank": 8}, "'rank': 8"), ({"rank": 0}, "give None"), ({"alpha": 4}, "'scale': 1.0")):
        changed = dataclasses.replace(topology, lora=dataclasses.replace(topology.lora, **other))
        with pytest.raises(UserError, match=f"was trained with lora .*'rank': 4.*{why}"):
            TrainingStep(changed).load_checkpoint(tmp_path / "checkpoints")


def test_dropout_goes_on_with_the_random_numbers_that_it_would_have_drawn(topology: Topology, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    topology = with_lora(topology, dropout=0.5)
    living, history = TrainingStep(topology), History(RunPaths.of(tmp_path), topology)
    for step in range(1, 5):
        record = Record(step=step, version=step - 1, cause="count", groups=[0, 1, 2, 3], samples=records(step))
        history.append(record)
        living.train(record.samples, 4, record.version)
        history.finished(record)
        if step == 2:
            history.checkpoint(living, step, {}, lambda folder: None)
    history.close()
    torch.manual_seed(12345)  # another process, with other numbers drawn
    again, successor = TrainingStep(topology), History(RunPaths.of(tmp_path), topology)
    successor.load(again, lambda meta, folder: None)
    for record in successor.to_replay():
        again.replay(record)
        successor.finished(record)
    successor.close()
    assert torch.allclose(weights(living), weights(again), atol=1e-6)


def test_several_updates_per_batch_take_whole_groups_each(topology: Topology) -> None:
    batch = records(2)
    shares = split(batch, 3)
    assert sorted(i for share in shares for i in share) == list(range(len(batch)))
    assert [len({batch[i].group for i in share}) for share in shares] == [2, 1, 1]
    config = dataclasses.replace(topology.learner, updates_per_batch=2, loss="decoupled")
    step = TrainingStep(dataclasses.replace(topology, learner=config))
    before = weights(step)
    stats = step.train(batch, 4, version=0)
    assert stats.sequences == 16 and not torch.equal(before, weights(step))
    assert stats.tokens == sum(len(record.token_array()) for record in batch)
    assert step.groups == 4


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_one_learning_rate_covers_a_step_whatever_its_update_count(topology: Topology, updates: int) -> None:
    trigger = dataclasses.replace(topology.learner.trigger, n_min=4)
    config = dataclasses.replace(
        topology.learner, updates_per_batch=updates, lr=1e-3, warmup_groups=0, trigger=trigger, decay="linear",
        decay_groups=8, decay_to=0.5,
    )
    step = TrainingStep(dataclasses.replace(topology, learner=config))
    assert step.train(records(1), 4, 0).lr == pytest.approx(1e-3)
    assert step.train(records(2), 4, 1).lr == pytest.approx(0.75e-3)


@pytest.mark.parametrize(("loss", "passes"), [("ppo_clip", 0), ("decoupled", 1)])
def test_samples_are_scored_before_updates_only_for_losses_reading_scores(
    topology: Topology, loss: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(topology.learner, updates_per_batch=2, loss=loss)
    step, calls = TrainingStep(dataclasses.replace(topology, learner=config)), []
    score = step.trainer.score
    monkeypatch.setattr(step.trainer, "score", lambda samples: calls.append(len(samples)) or score(samples))
    step.train(records(2), 4, version=0)
    assert calls == [16] * passes


def test_only_the_first_of_several_updates_is_compared_with_the_engine(topology: Topology) -> None:
    """After it no version has the weights that are trained."""
    config = dataclasses.replace(topology.learner, updates_per_batch=2, lr=0.05, warmup_groups=0)
    step = TrainingStep(dataclasses.replace(topology, learner=config))
    batch = records(2)
    exact = [
        msgspec.structs.replace(record, logprobs=row.astype("<f4").tobytes())
        for record, row in zip(batch, step.trainer.score([to_sample(one) for one in batch]), strict=True)
    ]
    stats = step.train(exact, 4, version=0)
    assert stats.diagnostics.k3 > 1e-3, "the second update was to be made with other weights"
    assert stats.diagnostics.mismatch == pytest.approx(0.0, abs=1e-5)


def test_answers_begun_with_older_weights_are_told_apart_from_current_ones(
    topology: Topology,
) -> None:
    """Their later tokens may stand over keys of the older weights, and then agree with neither."""
    step = TrainingStep(topology)
    batch = records(2)
    ours = step.trainer.score([to_sample(one) for one in batch])
    for record, row in zip(batch, ours, strict=True):
        count = len(record.token_array())
        began_before = record.member % 2 == 0
        record.versions = np.array([2 if began_before else 3] + [3] * (count - 1), "<u4").tobytes()
        record.logprobs = np.minimum(row - (0.5 if began_before else 0.001), 0).astype("<f4").tobytes()
    told = step.train(batch, 4, version=3).diagnostics
    assert told.mismatch is not None and told.mismatch > 0.1
    assert told.mismatch_begun == pytest.approx(0.001, abs=1e-4)


def with_segments(samples: list[SampleRecord]) -> list[SampleRecord]:
    """Every second answer made in two segments, the first of one token."""
    return [
        msgspec.structs.replace(sample, segments=[1, len(sample.token_array()) - 1] if sample.uid % 2 else [])
        for sample in samples
    ]


def changed(topology: Topology, loss: str = "behaviour", **learner: object) -> Topology:
    config = dataclasses.replace(topology.learner, **learner)  # type: ignore[arg-type]
    return dataclasses.replace(topology, learner=config, segments=Segments(length=4, loss=loss))


def test_the_loss_of_segments_says_which_tokens_are_trained(topology: Topology) -> None:
    batch = with_segments(records(3))
    made = {loss: TrainingStep(changed(topology, loss)) for loss in ("behaviour", "pois", "last_segment")}
    stats = {loss: step.train(batch, 4, version=0) for loss, step in made.items()}
    every = sum(len(sample.token_array()) for sample in batch)
    assert stats["behaviour"].tokens == stats["pois"].tokens == every
    assert stats["last_segment"].context_tokens == 8 and stats["last_segment"].tokens == every - 8
    assert not torch.equal(weights(made["behaviour"]), weights(made["pois"]))
    assert not torch.equal(weights(made["behaviour"]), weights(made["last_segment"]))


def test_a_step_in_segments_is_the_same_live_and_replayed(topology: Topology, tmp_path: Path) -> None:
    cut, paths = changed(topology, "last_segment"), RunPaths.of(tmp_path)
    living, history = TrainingStep(cut), History(paths, cut)
    for step in range(1, 6):
        record = Record(step=step, version=step - 1, cause="count", groups=[0, 1, 2, 3],
                        samples=with_segments(records(step)))
        history.append(record)
        living.train(record.samples, 4, record.version)
        history.finished(record)
        if step == 3:
            history.checkpoint(living, step, {}, lambda folder: None)
    history.close()

    again, successor = TrainingStep(cut), History(paths, cut)
    successor.load(again, lambda meta, folder: None)
    for record in successor.to_replay():
        again.replay(record)
        successor.finished(record)
    successor.close()
    assert successor.step == 5 and torch.allclose(weights(living), weights(again), atol=1e-6)


def test_tokens_above_the_bound_leave_every_denominator_even_in_a_replay(topology: Topology) -> None:
    batch = records(3)
    for sample in batch[:2]:  # two of group 0 began at step 0, the rest is fresh
        count = len(sample.versions) // 4
        sample.versions = np.array([0] + [5] * (count - 1), "<u4").tobytes()
    for sample in batch[2:]:
        sample.step, sample.versions = 5, np.full(len(sample.versions) // 4, 5, "<u4").tobytes()
    living, again = TrainingStep(topology), TrainingStep(topology)
    for step in (living, again):
        for version in range(6):
            step.stale.at(version, version)
    living.accumulate(batch[:8], 5)
    living.accumulate(batch[8:], 5)
    streamed = living.finish(4)
    replayed = again.train(batch, 4, 5)
    tokens = sum(len(sample.versions) // 4 for sample in batch)
    assert streamed.tokens == replayed.tokens == tokens - 2
    assert streamed.old_tokens == replayed.old_tokens == 2
    assert torch.allclose(weights(living), weights(again), atol=1e-6)


def otherwise(topology: Topology, change: str) -> Topology:
    """The topology as a later start may have it."""
    tables = {
        "a smaller bound": {"weights": {"max_staleness": 1}}, "sync": {"weights": {"mode": "sync"}},
        "cut answers trained": {"reward": {"truncated": 0.0}},
        "last segments": {"segments": {"length": 2, "loss": "last_segment"}},
    }[change]
    return dataclasses.replace(
        topology, **{name: dataclasses.replace(getattr(topology, name), **own) for name, own in tables.items()}
    )


@pytest.mark.parametrize("change", ["a smaller bound", "sync", "cut answers trained", "last segments"])
def test_a_record_is_trained_again_by_the_terms_it_was_made_by(topology: Topology, change: str) -> None:
    topology = dataclasses.replace(topology, reward=dataclasses.replace(topology.reward, truncated="mask"))
    batch = records(3)
    for at, sample in enumerate(batch):
        count = len(sample.versions) // 4
        sample.versions = np.array([0, 3, *[5] * count][:count], "<u4").tobytes()
        sample.finish, begun = Finish.LENGTH if at == 9 else Finish.EOS, min(2, count - 1)
        sample.segments = [begun, count - begun]
    living, again = TrainingStep(topology), TrainingStep(otherwise(topology, change))
    for step in (living, again):
        for version in range(6):
            step.stale.at(version, version)
    record = Record(
        step=6, version=5, cause="count", groups=[300, 301, 302, 303], samples=batch, terms=living.terms,
    )
    present = again.terms
    trained, replayed = living.train(batch, 4, 5), again.replay(record)
    assert (trained.tokens, trained.old_tokens, trained.cut_tokens) == (
        replayed.tokens, replayed.old_tokens, replayed.cut_tokens
    )
    assert torch.allclose(weights(living), weights(again), atol=1e-6)
    assert again.terms == present != record.terms, "what comes after it is trained by what is in force"


def test_a_log_no_longer_kept_is_trained_before_it_is_dropped(topology: Topology, tmp_path: Path) -> None:
    paths, living = RunPaths.of(tmp_path), TrainingStep(topology)
    with contextlib.closing(History(paths, topology)) as history:
        for step in (1, 2, 3):
            record = Record(step=step, version=step - 1, cause="count", groups=[0, 1, 2, 3], samples=records(step))
            history.append(record)
            history.finished(record)
            if step == 1:
                history.checkpoint(living, 1, {}, lambda folder: None)
    without = with_keys(topology, wal="off")
    with contextlib.closing(History(paths, without)) as successor:
        successor.load(living, lambda meta, folder: None)
        assert successor.leaves_log
        for record in successor.to_replay():
            successor.finished(record)
        successor.leave_log()
        assert successor.step == 3 and successor.leaves_log, "no checkpoint holds these steps yet"
        successor.checkpoint(living, 3, {}, lambda folder: None)
        successor.leave_log()
        assert not successor.leaves_log and not paths.wal.exists()
        successor.append(record)
    with contextlib.closing(History(paths, without)) as last:
        last.load(living, lambda meta, folder: None)
        assert last.step == 3 and len(last.trained) == 48 and not list(last.to_replay())


def test_an_entirely_old_sample_still_counts_for_its_group_advantage(topology: Topology) -> None:
    batch = records(4, groups=2)
    for sample in batch[1:]:
        sample.step, sample.versions = 5, np.full(len(sample.versions) // 4, 5, "<u4").tobytes()
    step, other = TrainingStep(topology), TrainingStep(topology)
    step.stale.at(0, 0)
    step.stale.at(5, 5)
    stats = step.train(batch, 2, 5)
    assert stats.sequences == 7
    assert stats.old_tokens == stats.context_tokens == len(batch[0].versions) // 4
    masked = _training(stats)["masked"]
    assert masked == {"earlier_segments": 0, "too_old": stats.old_tokens}
    other.trainer.accumulate([to_sample(one) for one in batch[1:]], other.advantages.per_sample(batch)[1:], 5)
    other.finish(2)
    assert torch.allclose(weights(step), weights(other), atol=1e-7)


def test_a_cut_and_old_answer_counts_once_among_the_omitted(topology: Topology) -> None:
    batch = records(4, groups=2)
    for sample in batch[1:]:
        sample.step, sample.versions = 5, np.full(len(sample.versions) // 4, 5, "<u4").tobytes()
    batch[0].finish = Finish.LENGTH
    step = TrainingStep(dataclasses.replace(topology, reward=dataclasses.replace(topology.reward, truncated="mask")))
    step.stale.at(0, 0)
    step.stale.at(5, 5)
    stats, tokens = step.train(batch, 2, 5), len(batch[0].versions) // 4
    assert (stats.cut_tokens, stats.old_tokens, stats.context_tokens) == (tokens, 0, 0)
    row = _training(stats)
    assert row["masked"]["earlier_segments"] == 0 and row["never_trained"] == tokens / (tokens + stats.tokens)


def test_an_answer_cut_by_the_limit_is_masked_but_counts_for_advantage(topology: Topology) -> None:
    batch = records(4, groups=2)
    batch[3].finish = Finish.LENGTH
    own = dataclasses.replace(topology.reward, truncated="mask")
    masks = dataclasses.replace(topology, reward=own)
    step, again, other = TrainingStep(masks), TrainingStep(masks), TrainingStep(topology)
    stats, replayed = step.train(batch, 2, 5), again.train(batch, 2, 5)
    assert stats.sequences == 7 and stats.cut_tokens == len(batch[3].versions) // 4 == replayed.cut_tokens
    kept = [place for place in range(8) if place != 3]
    advantages = other.advantages.per_sample(batch)
    samples = [to_sample(batch[place]) for place in kept]
    other.trainer.accumulate(samples, [advantages[place] for place in kept], 5)
    other.finish(2)
    assert torch.allclose(weights(step), weights(other), atol=1e-7) and step.finish(0).cut_tokens == 0


def run_to(topology: Topology, paths: RunPaths, last: int, every: int) -> TrainingStep:
    """Steps up to `last` with a checkpoint every so many; the learner is then gone."""
    living, history = TrainingStep(topology), History(paths, topology)
    for step in range(1, last + 1):
        record = Record(step=step, version=step - 1, cause="count", groups=[0, 1, 2, 3], samples=records(step))
        history.append(record)
        living.train(record.samples, 4, record.version)
        history.finished(record)
        if step % every == 0:
            history.checkpoint(living, step, {}, lambda folder: None)
    history.close()
    return living


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    topology: Topology, tmp_path: Path
) -> None:
    paths = RunPaths.of(tmp_path)
    living = run_to(topology, paths, last=7, every=2)
    change_a_byte(paths.checkpoints / "global_step_6" / "model" / "model.safetensors")
    again, successor = TrainingStep(topology), History(paths, topology)
    successor.load(again, lambda meta, folder: None)
    assert successor.step == 4
    for record in successor.to_replay():
        again.train(record.samples, len(record.groups), record.version)
        successor.finished(record)
    assert successor.step == 7 and len(successor.trained) == 7 * 16
    assert torch.allclose(weights(living), weights(again), atol=1e-6)
    [told] = successor.warnings
    assert "global_step_6 is damaged" in told and "kept as torn-global_step_6" in told and "nothing is lost" in told
    successor.checkpoint(again, 7, {}, lambda folder: None)
    successor.close()
    kept = sorted(path.name for path in paths.checkpoints.iterdir())
    assert kept == ["global_step_4", "global_step_7", "torn-global_step_6"]  # the damaged one takes nobody's place
    with Wal(paths.wal) as log:
        assert log.steps()[0] <= 5 and log.steps()[-1] == 7


def test_the_log_continues_only_from_the_checkpoint_before_the_newest(
    topology: Topology, tmp_path: Path
) -> None:
    paths = RunPaths.of(tmp_path)
    run_to(topology, paths, last=9, every=2)
    with Wal(paths.wal) as log:
        assert log.steps() == [7, 8, 9]


def test_steps_held_nowhere_are_refused_until_a_person_gives_them_up(
    topology: Topology, tmp_path: Path
) -> None:
    paths = RunPaths.of(tmp_path)
    run_to(topology, paths, last=7, every=2)
    for step in (4, 6):
        change_a_byte(paths.checkpoints / f"global_step_{step}" / "optimizer.pt")
    for _ in range(2):  # nothing is changed by being refused
        again, successor = TrainingStep(topology), History(paths, topology)
        with pytest.raises(UserError, match="4 steps from 1 to 4 cannot be restored") as refused:
            successor.load(again, lambda meta, folder: None)
        successor.close()
    for name in ("global_step_4", "global_step_6", str(paths.wal)):
        assert name in str(refused.value)
    for folder in (*paths.checkpoints.iterdir(), paths.wal):
        folder.rename(tmp_path / f"given-up-{folder.name}")
    again, successor = TrainingStep(topology), History(paths, topology)
    successor.load(again, lambda meta, folder: None)
    assert successor.step == 0 and not list(successor.to_replay())
    successor.close()


@pytest.mark.parametrize("removed", ["wal", "checkpoints"])
def test_vanished_log_or_checkpoints_are_restored_before_the_next_step(
    topology: Topology, tmp_path: Path, removed: str
) -> None:
    paths = RunPaths.of(tmp_path)
    living, history = TrainingStep(topology), History(paths, topology)

    def train(step: int) -> None:
        record = Record(step=step, version=step - 1, cause="count", groups=[0, 1, 2, 3], samples=records(step))
        history.append(record)
        living.train(record.samples, 4, record.version)
        history.finished(record)

    for step in (1, 2, 3):
        train(step)
    history.checkpoint(living, 3, {}, lambda folder: None)
    train(4)
    assert not history.fault()
    shutil.rmtree(tmp_path / removed)
    assert removed in history.fault() and "another program" in history.fault()
    history.checkpoint(living, 4, {}, lambda folder: None)
    assert not history.fault()
    train(5)
    history.close()
    again, successor = TrainingStep(topology), History(paths, topology)
    successor.load(again, lambda meta, folder: None)
    for record in successor.to_replay():
        again.train(record.samples, len(record.groups), record.version)
        successor.finished(record)
    assert successor.step == 5 and not successor.warnings
    assert torch.allclose(weights(living), weights(again), atol=1e-6)
    successor.close()


def test_a_log_that_ends_before_the_train_log_does_is_told(topology: Topology, tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    run_to(topology, paths, last=5, every=3)
    newest = max(paths.wal.glob("*.wal"))
    newest.write_bytes(newest.read_bytes()[:20])
    again, successor = TrainingStep(topology), History(paths, topology)
    successor.load(again, lambda meta, folder: None)
    assert successor.step == 3 and not list(successor.to_replay())
    [told] = successor.warnings
    assert "train.jsonl names steps up to 5, but checkpoint and log end at step 3" in told
    successor.close()


def test_fates_of_millions_of_trained_samples_are_stored_without_spelling_them_out(
    topology: Topology, tmp_path: Path
) -> None:
    count = 1 << 22
    (tmp_path / "fates.bin").write_bytes(b"T" * 1000 + b"DD" + b"T" * (count - 1004))  # and two not even dispatched
    history, fates = History(RunPaths.of(tmp_path), topology), Fates(str(tmp_path / "fates.bin"))
    TrainedSet([count - 1]).save(tmp_path / "trained.bin")
    history.trained = TrainedSet.load(tmp_path / "trained.bin")
    history.trained._bits[:] = 255
    tracemalloc.start()
    history.store_fates(fates)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    history.close()
    assert (tmp_path / "fates.bin").read_bytes()[:count] == b"T" * count
    assert sum(map(len, history.trained.blocks())) == count
    assert peak < 8 * count, peak


def garbage_at_the_end(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"}{ not json\n")


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [garbage_at_the_end, half, emptied, os.unlink])
@pytest.mark.parametrize("living", [True, False])
def test_a_damaged_train_log_is_written_again_from_checkpoint_and_log(
    topology: Topology, tmp_path: Path, damage: Callable[[Path], None], living: bool
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(k)}) + "\n" for k in range(7)))
    topology = dataclasses.replace(topology, data=dataclasses.replace(topology.data, train=str(prompts)))
    paths, stream = RunPaths.of(tmp_path / "run"), JsonlStream(prompts, topology.run.seed, topology.data.shuffle)
    paths.root.mkdir()
    run_to(topology, paths, last=7, every=2)
    history = History(paths, topology)
    if not living:
        history.close()
        damage(paths.train_log)
        history = History(paths, topology)
    again = TrainingStep(topology)
    history.load(again, lambda meta, folder: None)
    for record in history.to_replay():
        history.finished(record)
    if living:
        damage(paths.train_log)
        record = Record(step=8, version=7, cause="count", groups=[0], samples=records(8))
        history.append(record)
        history.finished(record)
    last = 8 if living else 7
    lines = {row["step"]: row["samples"] for row in json_lines(paths.train_log)}
    uids = sorted(uid for samples in lines.values() for uid, _, _ in samples)
    assert uids == sorted(one.uid for step in range(1, last + 1) for one in records(step))
    kept = [step for step in lines if step > 4]
    assert kept == list(range(5, last + 1))  # the steps of the log stand as they were
    for uid, _, crc in lines[4]:
        assert crc in (0, stream.item(uid // 16).crc)
    if not (living and damage is garbage_at_the_end):
        [told] = history.warnings
        assert "train.jsonl was damaged or removed" in told and "it was written again from checkpoint and log" in told
    history.close()
    successor = History(paths, topology)
    successor.load(TrainingStep(topology), lambda meta, folder: None)
    assert bool(successor.warnings) == (living and damage is garbage_at_the_end)  # lines were written behind it
    successor.close()


def test_under_lora_the_reference_is_the_base_and_adapters_get_gradients(topology: Topology) -> None:
    chosen = with_lora(with_keys(topology, kl="k3", kl_coef=0.5, lr=1e-2))
    step, batch = TrainingStep(chosen), varied(1)
    first = step.train(batch, 4, version=0)
    assert first.diagnostics.kl == pytest.approx(0.0, abs=1e-9), "an adapter begins as nothing"
    second = step.train(batch, 4, version=None)
    assert second.grad_norm > 1e-3 and second.diagnostics.kl is not None and second.diagnostics.kl > 1e-8
    samples = [to_sample(one) for one in batch]
    base = TrainingStep(topology).trainer.score(samples)
    referred = step.trainer.score(samples, "reference")
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(referred, base, strict=True))
    assert not all(np.allclose(a, b, atol=1e-6) for a, b in zip(step.trainer.score(samples), base, strict=True))
    plain = TrainingStep(with_lora(with_keys(topology, lr=1e-2)))
    assert plain.train(batch, 4, version=0).grad_norm == pytest.approx(first.grad_norm, rel=1e-5)


@pytest.mark.parametrize("kind", ["the base of an adapter", "the model of the start", "a folder"])
def test_a_reference_reads_whole_answers_at_the_temperature_of_their_draw(
    topology: Topology, folder: Path, other_folder: Path, kind: str
) -> None:
    """As transformers alone gives their log-probabilities, after an update that moved the trained weights."""
    chosen = with_keys(topology, kl="k3", kl_coef=0.5, lr=1e-2)
    if kind == "the base of an adapter":
        pytest.importorskip("peft")
        chosen = with_lora(chosen)
    source = other_folder if kind == "a folder" else folder
    if kind == "a folder":
        chosen = dataclasses.replace(chosen, model=dataclasses.replace(chosen.model, reference=str(source)))
    step, batch = TrainingStep(chosen), [msgspec.structs.replace(one, temperature=0.7) for one in varied(1)]
    for version in (0, None):
        step.train(batch, 4, version=version)
    plain = Qwen3ForCausalLM.from_pretrained(source)
    samples = [to_sample(one) for one in batch]
    for record, row, now in zip(batch, step.trainer.score(samples, "reference"), step.trainer.score(samples)):
        ids = torch.tensor([[*record.prompt_array().tolist(), *record.token_array().tolist()]])
        logits, begin = plain(input_ids=ids).logits[0].detach(), len(record.prompt_array())
        logs = torch.log_softmax(logits[begin - 1 : -1] / 0.7, -1)
        expected = logs.gather(-1, ids[0, begin:, None])[:, 0].numpy()
        assert row == pytest.approx(expected, abs=1e-5)
        assert float(np.abs(now - expected).max()) > 1e-3


def test_a_reference_of_another_vocabulary_ends_the_start_by_name(topology: Topology, tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=17, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=48,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    model = dataclasses.replace(topology.model, reference=str(tmp_path / "other"))
    with pytest.raises(UserError, match="17 tokens"):
        TrainingStep(dataclasses.replace(with_keys(topology, kl="k3", kl_coef=0.1), model=model))


# -- PPO: a value head -------------------------------------------------------------------------------------------


def with_values(topology: Topology, **own: object) -> Topology:
    value = dataclasses.replace(topology.learner.value, **own)  # type: ignore[arg-type]
    return with_keys(topology, advantage="gae", value=value)


class Valuing(Watched):
    """Begins with a head that is not 0."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        assert self.trainer.value_head is not None
        self.value_head = self.trainer.value_head
        torch.manual_seed(5)
        with torch.no_grad():
            self.value_head.line.weight.normal_(std=0.3)
            self.value_head.line.bias.fill_(0.2)

    def head(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.value_head.parameters])


VALUING: dict[str, dict[str, object]] = {
    "plain": {}, "decays": {"decay": 0.9, "decay_of_values": 0.8, "gamma": 0.99}, "the head alone": {"coef": 0.0},
}


@pytest.mark.parametrize("name", sorted(VALUING))
def test_a_value_head_step_is_the_same_streamed_or_from_the_log(topology: Topology, name: str) -> None:
    chosen = with_values(topology, whiten=False, **VALUING[name])
    assert catalog.held_back(chosen.learner) == ""
    batch = varied(1)
    parts, whole, again = (Valuing(chosen) for _ in range(3))
    parts.accumulate(batch[12:], 0)
    parts.accumulate(batch[:12], 0)
    streamed, at_once = parts.finish(4), whole.train(batch, 4, version=0)
    again.replay(Record(step=1, version=0, cause="count", groups=[100, 101, 102, 103], samples=batch))
    assert apart(whole, parts) < 1e-6 and apart(whole, again) < 1e-6
    assert torch.allclose(whole.head(), parts.head(), atol=1e-6) and torch.equal(whole.head(), again.head())
    told, other = streamed.diagnostics, at_once.diagnostics
    assert told.value_loss == pytest.approx(other.value_loss) and told.value_loss
    assert told.explained_variance == pytest.approx(other.explained_variance)


def test_a_value_head_step_gradient_matches_the_plain_formulas(topology: Topology) -> None:
    """In one pass over all samples: GAE of the values before, clipped surrogate and value loss per token."""
    chosen = with_values(topology, whiten=True, decay=0.9, decay_of_values=1.0, coef=0.5, clip=0.05)
    batch = varied(2)
    step, other = Valuing(chosen), Valuing(chosen)
    head = other.value_head.line
    total = torch.zeros((), dtype=torch.float32)
    rows, tokens = [], []
    model = other.trainer.model
    for record in batch:
        ids = torch.tensor([*record.prompt_array().tolist(), *record.token_array().tolist()])
        out = model(input_ids=ids[None], output_hidden_states=True)
        place = slice(len(record.prompt_array()) - 1, -1)
        logp = out.logits[0, place].log_softmax(-1).gather(-1, ids[len(record.prompt_array()):, None])[:, 0]
        hidden = out.hidden_states[-1][0, place]
        hidden = hidden.detach() + 0.5 * (hidden - hidden.detach())
        value = head(hidden)[:, 0]
        known = [*value.tolist(), 0.0]
        errors = [known[t + 1] - known[t] for t in range(len(value))]
        errors[-1] += record.reward
        own = [sum(0.9**k * e for k, e in enumerate(errors[t:])) for t in range(len(errors))]
        rows.append((record, logp, value))
        tokens.append(own)
    flat = np.concatenate(tokens)
    spread, mean, config = (flat.var(ddof=1) + 1e-8) ** 0.5, flat.mean(), chosen.learner
    for (record, logp, value), own in zip(rows, tokens, strict=True):
        worth = torch.tensor((np.array(own) - mean) / spread, dtype=torch.float32)
        ratio = (logp - torch.from_numpy(record.logprob_array().copy())).exp()
        loss = -torch.minimum(ratio * worth, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * worth)
        loss = torch.where(worth < 0, torch.minimum(loss, -config.dual_clip * worth), loss)
        error = (value - record.reward).square() / 2  # decay 1: the reward; at the values before, no clip acts
        total = total + (loss + error).sum()
    total = total / len(flat)
    grads = torch.autograd.grad(total, [*other.trainer.parameters, *head.parameters()])
    seen = {}
    step.value_head.optimizer.register_step_pre_hook(lambda *_: seen.update(
        head=torch.cat([parameter.grad.flatten() for parameter in step.value_head.parameters])))
    stats = step.train(batch, 4, version=0)
    expected = torch.cat([one.flatten().double() for one in grads[:-2]])
    assert float((step.gradients[0] - expected).norm() / expected.norm()) < 1e-5
    of_head = torch.cat([one.flatten() for one in grads[-2:]])
    assert torch.allclose(seen["head"], of_head, rtol=1e-4, atol=1e-6)
    assert stats.diagnostics.value_loss == pytest.approx(float(np.mean([float(e) for r, _, v in rows for e in (
        v.detach() - r.reward).square() / 2])), rel=1e-4)


def test_a_value_head_trains_flat_groups_and_passes_cover_all_samples(topology: Topology) -> None:
    chosen = with_keys(with_values(topology), passes_per_batch=3, updates_per_batch=2)
    assert catalog.held_back(chosen.learner) and catalog.trains_flat(chosen.learner)
    batch = [msgspec.structs.replace(one, reward=1.0) for one in records(3)]
    live, again = Valuing(chosen), Valuing(with_keys(chosen, micro_batch_tokens=40))
    stats = live.train(batch, 4, version=0)
    assert len(live.gradients) == 6 and all(one.norm() > 1e-4 for one in live.gradients)
    assert stats.tokens == sum(len(one.versions) // 4 for one in batch) and stats.sequences == 16
    again.replay(Record(step=1, version=0, cause="count", groups=[0, 1, 2, 3], samples=batch))
    assert apart(live, again) < 1e-4 and torch.allclose(live.head(), again.head(), atol=1e-4)
    plain = Watched(with_keys(topology, passes_per_batch=2))
    plain.train(varied(3), 4, version=0)
    assert len(plain.gradients) == 2


def test_the_value_head_returns_from_checkpoint_and_log_outside_any_model(
    topology: Topology, tmp_path: Path
) -> None:
    chosen = with_values(topology)
    living, history = TrainingStep(chosen), History(RunPaths.of(tmp_path), chosen)
    for step in range(1, 6):
        record = Record(step=step, version=step - 1, cause="count", groups=[0, 1, 2, 3], samples=records(step))
        history.append(record)
        living.train(record.samples, 4, record.version)
        history.finished(record)
        if step == 3:
            history.checkpoint(living, step, {}, lambda folder: None)
    history.close()
    again, successor = TrainingStep(chosen), History(RunPaths.of(tmp_path), chosen)
    successor.load(again, lambda meta, folder: None)
    for record in successor.to_replay():
        again.replay(record)
        successor.finished(record)
    successor.close()
    assert living.trainer.value_head is not None and again.trainer.value_head is not None
    for parameter, other in zip(living.trainer.value_head.parameters, again.trainer.value_head.parameters, strict=True):
        assert float(parameter.detach().abs().max()) > 1e-3 and torch.allclose(parameter, other, atol=1e-6)
    assert torch.allclose(weights(living), weights(again), atol=1e-6)
    plain = TrainingStep(topology)
    assert living.weights().keys() == plain.weights().keys()
    newest = tmp_path / "checkpoints" / "global_step_3"
    with safe_open(newest / "model" / "model.safetensors", "pt") as model:
        assert "value" not in " ".join(model.keys())
    assert (newest / "value" / "value_head.safetensors").is_file()
    fresh = TrainingStep(chosen)
    fresh.models.start_from(newest, False)
    assert fresh.trainer.value_head is not None and not fresh.trainer.value_head.optimizer.state
    assert float(fresh.trainer.value_head.line.weight.detach().abs().max()) > 1e-3
    plain.models.begin_checkpoint(tmp_path / "plain", 1, {"groups": 4}, lambda folder: None)
    assert again.load_checkpoint(tmp_path / "plain") is not None
    assert "no value head; it begins at 0" in again.models.changed[-1]


def test_a_foreign_or_non_finite_value_head_is_refused_by_name(
    topology: Topology, tmp_path: Path
) -> None:
    step = TrainingStep(with_values(topology))
    assert step.trainer.value_head is not None
    ValueHead(7, ValueSettings(), torch.float32, torch.device("cpu")).write(tmp_path / "value")
    with pytest.raises(UserError, match=r"its weight is \(1, 7\), the model needs \(1, 32\)"):
        step.trainer.value_head.load(tmp_path / "value")
    before = weights(step)
    step.trainer.value_head.line.bias.data.fill_(float("nan"))
    stats = step.train(records(1), 4, version=0)
    assert stats.skipped and torch.equal(before, weights(step))


def test_each_value_head_token_pays_its_own_kl_in_the_reward(topology: Topology) -> None:
    chosen = with_keys(with_values(topology, whiten=False), kl="k1", kl_coef=0.3, kl_in="reward")
    step, batch = Valuing(chosen), varied(1)
    actual = step.advantages.valued(batch)
    referred = step.trainer.score(step.tokens.samples(batch), "reference")
    for one, record, row in zip(actual, batch, referred, strict=True):
        own = -0.3 * (record.logprob_array().astype(np.float64) - row)
        own[-1] += record.reward
        assert one.returns == pytest.approx(np.cumsum(own[::-1])[::-1], abs=1e-6)


def test_a_rank_that_fails_again_with_the_same_samples_ends_the_run(topology: Topology, tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    History(paths, topology).failed(RankFailed("rank 1 failed: no memory", [7, 8]))
    History(paths, topology).failed(RankFailed("rank 1 failed: something else", [9, 10]))
    with pytest.raises(CannotTrain, match=r"twice with samples 9: rank 0 failed: .* \(before: rank 1 failed: some"):
        History(paths, topology).failed(RankFailed("rank 0 failed: no memory", [9, 11]))


# -- a teacher ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same tokens, with rows that no token has."""
    return another(tmp_path_factory.mktemp("teacher"), 20)


@pytest.fixture(scope="module")
def other_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same tokens."""
    return another(tmp_path_factory.mktemp("other"), 16)


def another(path: Path, words: int) -> Path:
    torch.manual_seed(9)
    config = Qwen3Config(
        vocab_size=words, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        intermediate_size=32, max_position_embeddings=64, eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(path)
    return path


def with_teacher(topology: Topology, teacher: Path, **keys: object) -> Topology:
    chosen = with_keys(topology, **{"loss": "topk_kl", "advantage": "reward", **keys})
    return dataclasses.replace(chosen, model=dataclasses.replace(chosen.model, teacher=str(teacher)))


@pytest.mark.parametrize("keys", [{}, {"loss": "ppo_clip", "advantage": "group_std", "teacher_coef": 0.5}], ids=str)
def test_a_teacher_step_is_the_same_streamed_or_from_the_log(
    topology: Topology, teacher_folder: Path, keys: dict[str, object]
) -> None:
    chosen, batch = with_teacher(topology, teacher_folder, **keys), varied(1)
    assert catalog.held_back(chosen.learner) == ""
    parts, whole, again = (Watched(chosen) for _ in range(3))
    parts.accumulate(batch[12:], 0)
    parts.accumulate(batch[:12], 0)
    parts.finish(4)
    told = whole.train(batch, 4, version=0)
    again.replay(Record(step=1, version=0, cause="count", groups=[100, 101, 102, 103], samples=batch))
    assert apart(whole, parts) < 1e-6 and apart(whole, again) < 1e-6 and told.grad_norm > 1e-3
    plain = Watched(with_keys(topology))
    plain.train(batch, 4, version=0)
    assert apart(whole, plain) > 1e-2
    assert told.diagnostics.teacher_kl and told.diagnostics.teacher_kl > 0.1


def test_a_model_teaching_itself_learns_nothing_and_another_teaches_flat_groups_too(
    topology: Topology, folder: Path, teacher_folder: Path
) -> None:
    batch = [msgspec.structs.replace(one, reward=0.0, temperature=0.8) for one in records(1)]
    same = Watched(with_teacher(topology, folder), shifted=1.0)
    told = same.train(batch, 4, version=0)
    assert told.diagnostics.teacher_kl == pytest.approx(0, abs=1e-6) and told.grad_norm < 1e-4
    step = TrainingStep(with_teacher(topology, teacher_folder, lr=1e-2, warmup_groups=0))
    apart_by = [step.train(batch, 4, version=None).diagnostics.teacher_kl for _ in range(12)]
    assert apart_by[-1] < 0.5 * apart_by[0]  # type: ignore[operator]


def test_a_loss_of_a_teacher_without_one_is_refused_with_the_key(topology: Topology) -> None:
    with pytest.raises(UserError, match=r"topk_kl.*set model.teacher"):
        TrainingStep(with_keys(topology, loss="topk_kl", advantage="reward"))
