"""The gradient of a step against a plain loop over tokens, for every architecture and every way through the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.training import packing
from busrl.training.head import Head
from busrl.training.model import attention_of

WAYS = [
    ("qwen3", "full"),
    ("qwen3", "padded"),
    ("qwen3", "packed"),
    ("qwen2", "packed"),
    ("llama", "padded"),
    ("llama", "packed"),
    ("gpt2", "full"),
    ("gpt2", "padded"),
    ("gpt2", "packed"),
    ("granite", "padded"),
    ("granite", "packed"),
]
quick = settings(max_examples=12)


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_the_gradient_of_a_step_is_that_of_a_plain_loop(
    lab: Any, apart: Any, kind: str, way: str
) -> None:
    trainer = lab.trainer(kind, way)
    samples = lab.samples(temperatures=(1.0, 0.7, 1.6), model=trainer.model)
    advantages = lab.advantages(len(samples))
    gradient, stats = lab.step(trainer, [(samples[:5], advantages[:5]), (samples[5:], advantages[5:])])
    expected, value = lab.reference(trainer.model, samples, advantages)
    assert apart(gradient, expected) < 1e-6
    assert stats.loss == pytest.approx(value, rel=1e-6)
    assert stats.grad_norm == pytest.approx(sum(float(g.square().sum()) for g in expected.values()) ** 0.5, rel=1e-5)
    assert (stats.tokens, stats.sequences) == (sum(len(s.token_ids) for s in samples), len(samples))


@pytest.mark.parametrize("way", ["padded", "packed"])
def test_the_decoupled_loss_uses_the_scores_from_the_start_of_the_step(lab: Any, apart: Any, way: str) -> None:
    trainer = lab.trainer("qwen3", way, loss="decoupled")
    samples = lab.samples(model=trainer.model)
    advantages = lab.advantages(len(samples))
    proximal = trainer.score(samples)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.05)
    gradient, _ = lab.step(trainer, [(samples, advantages)], proximal=proximal)
    expected, _ = lab.reference(trainer.model, samples, advantages, loss="decoupled", prox=proximal)
    assert apart(gradient, expected) < 1e-6
    plain, _ = lab.step(trainer, [(samples, advantages)])
    assert apart(plain, lab.reference(trainer.model, samples, advantages, loss="decoupled")[0]) < 1e-6
    assert apart(plain, expected) > 1e-3


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "gpt2", "granite"])
def test_rows_are_packed_where_the_log_probabilities_stay_the_models_own(lab: Any, kind: str) -> None:
    assert lab.trainer(kind, double=False).forward.name == "packed"


def test_a_way_that_gives_other_log_probabilities_is_never_chosen(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = packing.visible
    monkeypatch.setattr(packing, "visible", lambda before, *rest: seen(before + 1, *rest))
    trainer = lab.trainer("qwen3", double=False)
    assert (trainer.forward.name, attention_of(trainer.model)) == ("padded", "sdpa")
    monkeypatch.setattr(Head, "of", lambda *_: Head(scale=2.0))
    assert lab.trainer("qwen3", double=False).forward.name == "full"


@quick
@given(budget=st.integers(1, 400), seed=st.integers(0, 1000), way=st.sampled_from(["padded", "packed"]), data=st.data())
def test_neither_the_cut_nor_the_order_nor_the_calls_change_the_gradient(
    lab: Any, apart: Any, budget: int, seed: int, way: str, data: Any
) -> None:
    samples = lab.samples(seed=seed, groups=4, members=3)
    advantages = lab.advantages(len(samples), seed)
    gradient, stats = lab.step(lab.trainer("qwen3", way, micro_batch_tokens=10**6), [(samples, advantages)])
    order = data.draw(st.permutations(range(len(samples))))
    edge = data.draw(st.integers(0, len(samples)))
    parts = [([samples[i] for i in part], [advantages[i] for i in part]) for part in (order[:edge], order[edge:])]
    pieces, cut_stats = lab.step(lab.trainer("qwen3", way, micro_batch_tokens=budget), parts)
    assert apart(pieces, gradient) < 1e-6
    for name in ("loss", "tokens", "sequences"):
        assert getattr(cut_stats, name) == pytest.approx(getattr(stats, name), rel=1e-6)
    actual, expected = vars(cut_stats.diagnostics), vars(stats.diagnostics)
    known = [name for name, value in expected.items() if value is not None]
    assert known == [name for name, value in actual.items() if value is not None] and len(known) > 5
    assert [actual[name] for name in known] == pytest.approx([expected[name] for name in known], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@pytest.mark.parametrize("way", ["full", "padded"])
def test_what_stands_in_the_padding_changes_nothing(
    lab: Any, apart: Any, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from busrl.training import forward

    samples = lab.samples()
    advantages = lab.advantages(len(samples))
    clean, _ = lab.step(lab.trainer(kind, way, micro_batch_tokens=10**6), [(samples, advantages)])
    good = forward.pad

    def dirty(part: Any) -> Any:
        ids, rows, columns = good(part)
        lengths = torch.tensor([sample.length for sample in part])
        ids = torch.where(torch.arange(ids.shape[1]) < lengths[:, None], ids, 17)
        return torch.cat([ids, torch.full((len(part), 5), 3)], 1), rows, columns

    monkeypatch.setattr(forward, "pad", dirty)
    padded, _ = lab.step(lab.trainer(kind, way, micro_batch_tokens=10**6), [(samples, advantages)])
    assert apart(padded, clean) < 1e-6


def test_scores_keep_the_order_of_samples_and_equal_the_plain_ones(lab: Any, scored: Any) -> None:
    trainer = lab.trainer("qwen3", micro_batch_tokens=40)
    samples = lab.samples(temperatures=(1.0, 0.5))[::-1]
    for sample, row in zip(samples, trainer.score(samples), strict=True):
        assert row.tolist() == pytest.approx(scored(trainer.model, sample).tolist(), abs=1e-5)
