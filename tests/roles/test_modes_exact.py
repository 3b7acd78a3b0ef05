"""From the learner's adapter or model, over a published folder, into an engine that generates: each token has the
log-probability that a plain forward pass of the version it carries gives, to 1e-4."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from busrl.engines import Finished, Request
from busrl.engines.torch.engine import TorchEngine
from busrl.errors import WeightsRefused
from busrl.roles.rollout import EngineRestart
from busrl.training import checkpoint
from busrl.training.model import Adapter, LoraSettings, load
from busrl.weights.folders import FolderReceiver, FolderSender
from busrl.weights.tensors import fingerprint

# Not imported where tests are only collected: it takes seconds.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install peft")
MODES = ("lora_hotswap", "lora_restart", "checkpoint_restart")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, max_position_embeddings=64, eos_token_id=15, tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("base")
    Qwen3ForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(16)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t15").save_pretrained(path)
    return path


class Learner:
    """Publishes a new random adapter, alone or merged; keeps a model of every version."""

    def __init__(self, base: Path, root: Path, mode: str) -> None:
        self.adapter, self.whole = Adapter(load(base), LoraSettings(4, 2.0)), mode == "checkpoint_restart"
        self.base, self.models = base, {0: load(base)}
        mark = "" if self.whole else fingerprint(base)
        kind = "checkpoint" if self.whole else "adapter"
        self.sender = FolderSender(root, self.write, kind=kind, kept=2, base=mark)

    def write(self, folder: Path, named: Any) -> None:
        if self.whole:
            checkpoint.export(self.adapter.model, folder, self.base, named)
        else:
            self.adapter.write(folder, named)

    def publish(self, version: int) -> None:
        torch.manual_seed(version)
        for value in self.adapter.tensors().values():
            value.normal_(std=0.3)
        merged = self.adapter.merged(self.adapter.model)
        self.sender.publish(version, version, dict(merged if self.whole else self.adapter.tensors()))
        model = load(self.base)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(merged[name])
        self.models[version] = model

    def logprobs(self, request: Request, tokens: Any, version: int) -> Any:
        """Of all tokens after the prompt, by one plain forward pass."""
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, tokens]).astype(np.int64))[None]
        with torch.no_grad():
            rows = self.models[version](ids).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        return rows.gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0].numpy()


def request(key: int, tokens: int = 20) -> Request:
    return Request(
        key=key, uid=key, segment=0, prompt_ids=np.array([3, 4, 5 + key], np.int32), prefix_ids=np.empty(0, np.int32),
        max_new_tokens=tokens, temperature=1.0, top_p=1.0, seed=0,
    )


@pytest.mark.parametrize("mode", MODES)
def test_tokens_before_across_and_after_an_update_have_the_right_log_probabilities(
    mode: str, base: Path, tmp_path: Path
) -> None:
    learner, root = Learner(base, tmp_path / "published", mode), tmp_path / "published"
    kind: Any = "adapter" if mode == "lora_hotswap" else "folder"
    receiver = FolderReceiver(root, "rollout/0", kind=kind, base=None if learner.whole else base)
    engine, restart = TorchEngine.load(base, capacity=8, max_length=32), EngineRestart(finish=False)
    asked = {key: request(key) for key in range(6)}
    done: dict[int, Finished] = {}

    def submit(*keys: int) -> None:
        restart.submitted([asked[key] for key in keys])
        engine.submit([asked[key] for key in keys])

    def steps(count: int) -> None:
        for _ in range(count):
            done.update({answer.key: restart.merged(answer) for answer in engine.step()})

    submit(0, 1)
    for version in (1, 2):
        steps(4)
        learner.publish(version)
        if mode != "lora_hotswap":
            assert not restart.take_out(engine)
        assert engine.update_weights(receiver) == (version, version)
        if mode != "lora_hotswap":
            restart.resume(engine)
        submit(2 * version, 2 * version + 1)
    while engine.active:
        steps(1)

    assert sorted(done) == list(range(6))
    compared: set[int] = set()
    for key, answer in done.items():
        first = int(answer.versions[0])
        for version in sorted(set(answer.versions.tolist())):
            if mode == "lora_hotswap" and version != first:
                continue  # the keys and values of older weights are kept: no single forward pass has these numbers
            mine = answer.versions == version
            expected = learner.logprobs(asked[key], answer.token_ids, version)
            np.testing.assert_allclose(answer.logprobs[mine], expected[mine], atol=1e-4)
            compared.add(version)
    assert compared == {0, 1, 2}
    learner.sender.close()


def test_a_refused_version_leaves_the_engine_with_its_own(base: Path, tmp_path: Path) -> None:
    learner = Learner(base, tmp_path / "published", "lora_hotswap")
    receiver = FolderReceiver(tmp_path / "published", "rollout/0", kind="adapter", base=base)
    engine = TorchEngine.load(base, capacity=2, max_length=32)
    learner.publish(1)
    engine.update_weights(receiver)
    other = Adapter(load(base), LoraSettings(4, 2.0, ("q_proj",)))
    tensors = {name.replace("q_proj", "qkv"): value for name, value in other.tensors().items()}
    learner.adapter = other
    learner.sender.publish(2, 2, tensors)
    with pytest.raises(WeightsRefused, match="qkv"):
        engine.update_weights(receiver)
    assert engine.statistics().version == 1
    engine.submit([request(0, tokens=6)])
    done: list[Finished] = []
    while engine.active:
        done += engine.step()
    assert set(done[0].versions.tolist()) == {1}
    expected = learner.logprobs(request(0), done[0].token_ids, 1)
    np.testing.assert_allclose(done[0].logprobs, expected, atol=1e-4)
