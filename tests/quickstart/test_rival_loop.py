"""The rival loop of the benchmarks is honest: it samples from the very model that busrl starts from."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from busrl.quickstart import task
from busrl.quickstart.task import Recipe


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    pytest.importorskip("torch")
    return importlib.import_module("benchmarks.rivals.loop")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from busrl.quickstart.maker import new_model, new_tokenizer, save

    root = tmp_path_factory.mktemp("rival")
    save(root / "model", Recipe(), new_tokenizer(Recipe()), new_model(Recipe()))
    lines = [
        json.dumps({"prompt": prompt, "answer": task.answer_of(prompt)}) for prompt in ("312=", "9081726354=")
    ]
    (root / "train.jsonl").write_text("\n".join(lines) + "\n")
    return root


def vocabulary_of(folder: Path) -> dict[str, int]:
    vocabulary: dict[str, int] = json.loads((folder / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    return vocabulary


def test_its_sampler_and_its_forward_give_the_models_own_log_probabilities(loop: ModuleType, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    vocabulary = vocabulary_of(folder)
    ours, theirs = loop.Model(folder / "model"), AutoModelForCausalLM.from_pretrained(folder / "model")
    sampler = loop.Sampler(ours, vocabulary["<eos>"], vocabulary["<pad>"], 4, torch.Generator().manual_seed(0))
    prompts = [[vocabulary[char] for char in prompt] for prompt in ("312=", "9081726354=")]
    rollout = sampler(prompts)
    assert len(set(rollout.lengths.tolist())) > 1  # rows ended at different times, so the cache was packed
    for row, length in enumerate(rollout.lengths.tolist()):
        prompt = prompts[row // 4]
        ids = torch.tensor([prompt + rollout.tokens[row, :length].tolist()])
        with torch.no_grad():
            all_logprobs = theirs(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
            mask = torch.arange(ids.shape[1] - 1)[None] >= len(prompt) - 1
            again = ours(ids[:, :-1], mask).log_softmax(-1)
        wanted = all_logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(rollout.logprobs[row, :length], wanted, atol=1e-4, rtol=0)
        torch.testing.assert_close(again, all_logprobs, atol=1e-4, rtol=0)


def test_a_step_counts_all_samples_and_trains_only_groups_with_an_advantage(loop: ModuleType, folder: Path) -> None:
    import torch

    vocabulary = vocabulary_of(folder)
    options = argparse.Namespace(seed=0, group=2, groups=2, lr=1e-3, beta2=0.95, micro=2)
    prompts = loop.Prompts(folder / "train.jsonl", vocabulary, 0)
    run = loop.Loop(options, loop.Model(folder / "model"), vocabulary, prompts)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.step()
    assert run.samples == 4 and run.rewards == [0.0]  # an untrained model: every group is flat
    assert all(torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True))
    drawn = prompts.draw(2)
    rollout = run.sampler([prompt for prompt, _ in drawn])
    run.train([prompt for prompt, _ in drawn], rollout, torch.tensor([0.7, -0.7, 0.0, 0.0]))
    assert any(not torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True))


def test_its_reward_is_that_of_the_extract_pattern(loop: ModuleType, folder: Path) -> None:
    import torch

    vocabulary = vocabulary_of(folder)
    options = argparse.Namespace(seed=0, group=4, groups=1, lr=1e-3, beta2=0.95, micro=2)
    run = loop.Loop(
        options, loop.Model(folder / "model"), vocabulary, loop.Prompts(folder / "train.jsonl", vocabulary, 0)
    )
    texts = [["..", "|", *"123"], ["|", *"132"], [*"..", "|", *"123"], ["|", *"1", "|", *"123"]]
    ends = [True, True, False, True]
    rows = []
    for text, end in zip(texts, ends, strict=True):
        ids = [vocabulary[char] for char in "".join(text)] + [vocabulary["<eos>"]] * end
        rows.append(ids)
    width = max(map(len, rows))
    tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows])
    rollout = loop.Rollout(tokens, torch.zeros(4, width), torch.tensor([len(ids) for ids in rows]))
    judged = run.judge(rollout, [[vocabulary[digit] for digit in "123"]])[0].tolist()
    expected = []
    for text, end in zip(texts, ends, strict=True):
        match = re.search(task.EXTRACT, "".join(text) + ("<eos>" if end else ""))
        expected.append(float(match is not None and match[1] == "123"))
    assert judged == expected == [1.0, 0.0, 0.0, 1.0]
