"""What a step does with its gradient: division, clipping, AdamW, steps that are skipped, and what it tells."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from busrl.algorithms.gae import ValueSettings
from busrl.training.settings import TrainerSettings
from busrl.training.step_stats import combined
from busrl.training.trainer import Hooks, Trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.named_weights().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_every_micro_batch_is_told_of_whatever_it_is_for(lab: Any) -> None:
    told: list[int] = []
    trainer = lab.trainer("qwen3", micro_batch_tokens=12, hooks=Hooks(lambda: told.append(1)))
    samples = lab.samples()
    trainer.accumulate(samples, lab.advantages(len(samples)))
    stats = trainer.step(1e-3)
    assert stats.micro_batches > 3 and len(told) == stats.micro_batches
    for scoring in (trainer.score, trainer.entropy):
        told.clear()
        scoring(samples)
        assert len(told) == stats.micro_batches


def test_the_update_is_that_of_adamw_on_the_clipped_gradient(lab: Any) -> None:
    trainer = lab.trainer("qwen3", max_grad_norm=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    samples = lab.samples(model=trainer.model)
    advantages = lab.advantages(len(samples))
    expected, _ = lab.reference(trainer.model, samples, advantages)
    norm = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    before = weights(trainer)
    trainer.accumulate(samples, advantages)
    stats = trainer.step(1e-2)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0.01
    for name, value in trainer.named_weights().items():
        gradient = expected[name] * 0.01 / norm
        decayed = before[name] * (1 - 1e-2 * (0.1 if value.ndim >= 2 else 0.0))
        torch.testing.assert_close(value, decayed - 1e-2 * gradient / (gradient.abs() + 1e-8), atol=2e-5, rtol=0)


def test_a_step_begins_with_nothing_left_of_the_one_before(lab: Any, apart: Any) -> None:
    trainer = lab.trainer("qwen3")
    samples = lab.samples()
    advantages = lab.advantages(len(samples))
    first, before = lab.step(trainer, [(samples, advantages)])
    second, after = lab.step(trainer, [(samples, advantages)])
    assert apart(second, first) == 0.0
    assert (after.tokens, after.loss, after.diagnostics) == (before.tokens, before.loss, before.diagnostics)


def test_a_step_without_samples_is_skipped_and_says_so(lab: Any) -> None:
    trainer = lab.trainer("qwen3")
    before = weights(trainer)
    stats = trainer.step(1e-3)
    assert (stats.skipped, stats.culprits, stats.tokens) == ("no trained token", (), 0)
    assert same(weights(trainer), before)
    assert trainer.optimizer_state()["state"] == {}


def test_a_step_of_several_updates_says_whether_some_of_them_were_made(lab: Any) -> None:
    trainer, samples = lab.trainer("qwen3"), lab.samples()
    skipped = trainer.step(1e-3)
    trainer.accumulate(samples, lab.advantages(len(samples)))
    stats = trainer.step(1e-3)
    assert skipped.skipped and not stats.skipped
    assert combined([skipped, stats]).partly and combined([stats, skipped]).skipped == skipped.skipped
    assert not combined([skipped, skipped]).partly and not combined([stats, stats]).partly


@pytest.mark.parametrize("way", ["padded", "packed"])
def test_an_infinite_gradient_skips_the_step_and_names_the_sample(lab: Any, way: str) -> None:
    trainer = lab.trainer("qwen3", way)
    samples = lab.samples()
    advantages = lab.advantages(len(samples))
    advantages[4] = float("nan")
    before = weights(trainer)
    trainer.accumulate(samples, advantages)
    stats = trainer.step(1e-3)
    assert stats.culprits == ("sample 4",)
    assert "nan" in stats.skipped
    assert same(weights(trainer), before)
    advantages[4] = 1.0
    trainer.accumulate(samples, advantages)
    assert not trainer.step(1e-3).skipped
    assert not same(weights(trainer), before)


def test_parameters_with_a_broken_gradient_are_named_if_samples_are_fine(lab: Any) -> None:
    trainer = lab.trainer("qwen3")
    samples = lab.samples()
    trainer.accumulate(samples, lab.advantages(len(samples)))
    trainer.model.model.norm.weight.grad[3] = float("inf")
    assert trainer.step(1e-3).culprits == ("parameter model.norm.weight",)


def test_a_ratio_without_bounds_leaves_the_gradient_finite(lab: Any, with_logprobs: Any) -> None:
    trainer = lab.trainer("qwen3", double=False)
    samples = [with_logprobs(sample, sample.behaviour_logprobs * 0 - 500.0) for sample in lab.samples()]
    trainer.accumulate(samples, [-1.0] * len(samples))
    stats = trainer.step(1e-3)
    assert not stats.skipped
    assert stats.loss == pytest.approx(3.0, rel=1e-6)
    assert stats.diagnostics.dual_clip == 1.0


def test_fewer_advantages_than_samples_are_refused(lab: Any) -> None:
    with pytest.raises(ValueError, match="12 samples need as many advantages and proximal rows, got 11"):
        lab.trainer("qwen3").accumulate(lab.samples(), [0.0] * 11)


@pytest.mark.parametrize("way", ["padded", "packed"])
def test_without_drift_entropy_is_that_at_the_sampling_temperature(
    lab: Any, with_logprobs: Any, way: str
) -> None:
    trainer = lab.trainer("qwen3", way)
    samples = lab.samples(temperatures=(0.6, 1.4))
    samples = [with_logprobs(sample, row) for sample, row in zip(samples, trainer.score(samples), strict=True)]
    expected, count = 0.0, 0
    for sample in samples:
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.token_ids.tolist()])
        with torch.no_grad():
            logits = trainer.model(input_ids=ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1] / sample.temperature
        expected += float(torch.distributions.Categorical(logits=logits).entropy().sum())
        count += len(sample.token_ids)
    _, stats = lab.step(trainer, [(samples, lab.advantages(len(samples)))], version=4)
    told = stats.diagnostics
    assert told.entropy == pytest.approx(expected / count, rel=1e-6)
    assert (told.log_ratio_mean, told.k3, told.mismatch) == pytest.approx((0, 0, 0), abs=1e-6)
    assert told.ess == pytest.approx(1.0)
    assert (told.clip_low, told.clip_high, told.dual_clip) == (0, 0, 0)


def test_the_mismatch_counts_tokens_of_the_present_version_alone(lab: Any, with_logprobs: Any) -> None:
    trainer = lab.trainer("qwen3")
    samples = lab.samples()
    moved = []
    for sample, row in zip(samples, trainer.score(samples), strict=True):
        moved.append(with_logprobs(sample, row - np.where(sample.policy_versions == 5, 0.25, 2.0)))
    _, stats = lab.step(trainer, [(moved, lab.advantages(len(moved)))], version=5)
    assert stats.diagnostics.mismatch == pytest.approx(0.25, rel=1e-5)


def test_of_watched_samples_it_tells_how_each_token_differs_from_the_engine(lab: Any) -> None:
    trainer, samples = lab.trainer("qwen3"), lab.samples()
    watched = samples[1::2]
    expected = [row - one.behaviour_logprobs for one, row in zip(watched, trainer.score(watched), strict=True)]
    trainer.tally.watch({one.uid for one in watched})
    for _ in range(2):  # of a sample that is trained twice in a step the first time counts
        trainer.accumulate(samples, lab.advantages(len(samples)))
        trainer.step(1e-2)
    gaps = trainer.tally.gaps()
    assert gaps.keys() == {one.uid for one in watched} and trainer.tally.gaps() == {}
    for one, wanted in zip(watched, expected, strict=True):
        np.testing.assert_allclose(gaps[one.uid], wanted, atol=1e-6)


def test_in_bfloat16_parameters_and_gradients_stay_float32_and_published_weights_are_rounded(
    lab: Any, apart: Any
) -> None:
    exact = lab.trainer("qwen3", double=False)
    trainer = lab.trainer("qwen3", double=False, compute_dtype="bfloat16")
    samples = lab.samples()
    advantages = lab.advantages(len(samples))
    gradient, _ = lab.step(trainer, [(samples, advantages)])
    assert {value.dtype for value in gradient.values()} == {torch.float32}
    assert 1e-6 < apart(gradient, lab.step(exact, [(samples, advantages)])[0]) < 0.1
    published = trainer.named_weights()
    assert {value.dtype for value in published.values()} == {torch.bfloat16}
    assert published.keys() == dict(trainer.model.named_parameters()).keys()
    assert trainer.named_weights()["model.norm.weight"].data_ptr() == published["model.norm.weight"].data_ptr()


def test_a_publication_in_bfloat16_copies_nothing(lab: Any) -> None:
    trainer = lab.trainer("qwen3", double=False, compute_dtype="bfloat16")
    places = {name: parameter.data_ptr() for name, parameter in trainer.model.named_parameters()}
    assert {name: value.data_ptr() for name, value in trainer.named_weights().items()} == places


def test_times_of_forward_and_backward_are_those_of_the_device(lab: Any) -> None:
    """A clock that the device moves: a launch takes no time, what was launched does."""
    trainer, samples = lab.trainer("qwen3"), lab.samples()

    class Watch:
        marks = 0

        def mark(self) -> int:
            self.marks += 1
            return self.marks

        def seconds(self, before: int, after: int) -> float:
            return {(1, 2): 10.0, (2, 3): 100.0}[((before - 1) % 3 + 1, (after - 1) % 3 + 1)]

    trainer.tally.stopwatch = Watch()
    trainer.accumulate(samples, lab.advantages(len(samples)))
    stats = trainer.step(1e-3)
    assert (stats.forward_s, stats.backward_s) == (10.0 * stats.micro_batches, 100.0 * stats.micro_batches)


def test_settings_are_read_from_a_topology_by_name() -> None:
    from busrl.preflight.load import load

    given = ["learner.clip_high=0.5", "learner.updates_per_batch=2", "learner.loss=decoupled", "model.dtype=bfloat16"]
    settings = TrainerSettings.of(load(Path(__file__).parents[2] / "configs" / "quickstart.toml", given))
    assert (settings.clip_high, settings.loss, settings.compute_dtype, settings.micro_batch_tokens) == (
        0.5, "decoupled", "bfloat16", 4096,
    )


def test_the_defaults_of_a_trainer_are_those_of_the_topology() -> None:
    from busrl.topology.learner import Learner
    from busrl.topology.schema import Experiments

    learner = Learner(lr=1.0)
    tables = (learner.memory, learner, Experiments())
    settings = TrainerSettings(activation_checkpointing="auto")  # what "auto" comes to depends on the model
    named = [field.name for field in fields(settings) if field.name != "value"]  # None where advantages need no values
    shared = [(one, name) for name in named for one in tables if hasattr(one, name)]
    assert len(shared) > 30
    assert {name: getattr(settings, name) for _, name in shared} == {name: getattr(one, name) for one, name in shared}
    assert vars(ValueSettings()) == {name: getattr(learner.value, name) for name in vars(ValueSettings())}


def test_two_trainers_with_the_same_samples_end_with_the_same_bits(lab: Any) -> None:
    ends = []
    for _ in range(2):
        trainer = lab.trainer("qwen3", double=False)
        for seed in range(3):
            samples = lab.samples(seed=seed)
            trainer.accumulate(samples, lab.advantages(len(samples), seed))
            trainer.step(1e-3)
        ends.append(weights(trainer))
    assert same(*ends)


def test_padding_is_told_where_there_is_any(lab: Any) -> None:
    samples = lab.samples()
    real, wide = sum(sample.length for sample in samples), max(sample.length for sample in samples)
    for way, expected in (("padded", 1 - real / (wide * len(samples))), ("packed", 0.0)):
        trainer = lab.trainer("qwen3", way, micro_batch_tokens=10**6)
        assert lab.step(trainer, [(samples, lab.advantages(len(samples)))])[1].padding == pytest.approx(expected)
