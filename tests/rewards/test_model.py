"""A reward model in its child: what transformers gives for one text alone, whatever it is computed beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.errors import RewardNotLoaded
from busrl.rewards.base import Item, Outcome, Setup
from busrl.rewards.pool import RewardPool
from busrl.topology.rewards import Reward, RewardPart

transformers = pytest.importorskip("transformers")
TEXTS = [("ab" * (3 * n % 17 + 1))[: 1 + 5 * n % 23] for n in range(24)]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def write(folder: Path, template: str = "", context: int = 128) -> Path:
    """A tiny classifier of random weights with a tokenizer of letters, as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz<>"]
    core = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=template or None
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=context, num_labels=1, pad_token_id=0,
    )
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def judged(folder: Path, texts: list[str], **more: Any) -> list[Outcome]:
    part = RewardPart("model", "model", path=str(folder), timeout_s=120.0, **more)
    with RewardPool(Reward(part=(part,)), base_dir=".", device="cpu") as pool:
        pool.submit([Item(key, b'{"prompt": "abc"}', text, []) for key, text in enumerate(texts)])
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(texts):
            outcomes |= {outcome.key: outcome for outcome in pool.poll(10.0)}
    return [outcomes[key] for key in range(len(texts))]


def alone(folder: Path, text: str) -> float:
    """What transformers itself gives."""
    import torch

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0])


def test_a_score_is_that_of_the_text_alone(tmp_path: Path) -> None:
    from busrl.rewards.model import Scorer

    folder = write(tmp_path / "model")
    scorer = Scorer(Setup("model", path=str(folder), device="cpu", batch_tokens=64))
    scores = scorer([{"prompt": "abc"}] * len(TEXTS), TEXTS, [[]] * len(TEXTS))
    assert scores == pytest.approx([alone(folder, f"abc{text}") for text in TEXTS[:6]] + scores[6:], abs=1e-5)
    assert len({round(score, 6) for score in scores}) > 10


@pytest.mark.slow
def test_in_its_child_it_scores_every_text_as_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    outcomes = judged(folder, TEXTS, batch_tokens=64)
    assert all(outcome.error == "" for outcome in outcomes)
    scores = [outcome.value for outcome in outcomes]
    assert scores == pytest.approx([alone(folder, f"abc{text}") for text in TEXTS], abs=1e-5)
    assert len({round(score, 6) for score in scores}) > 10


@pytest.mark.slow
def test_a_chat_template_writes_both_turns_and_keeps_a_long_texts_end(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", TEMPLATE, context=40)
    short, long = judged(folder, ["xyz", "k" * 300 + "m"])
    assert short.value == pytest.approx(alone(folder, "<user>abc<assistant>xyz"), abs=1e-5)
    assert long.value == pytest.approx(alone(folder, "k" * 39 + "m"), abs=1e-5)


@pytest.mark.slow
def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    headless = transformers.AutoModel.from_pretrained(folder)
    headless.save_pretrained(folder)
    with pytest.raises(RewardNotLoaded, match=r"reward.part 'model'.path = .*it has no weights score.weight"):
        judged(folder, ["a"])


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_batches_hold_every_row_once_and_keep_to_their_tokens(lengths: list[int], tokens: int) -> None:
    batches = pytest.importorskip("busrl.rewards.model").batches
    drawn = list(batches(lengths, tokens))
    assert sorted(place for batch in drawn for place in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or max(lengths[place] for place in batch) * len(batch) <= tokens for batch in drawn)
