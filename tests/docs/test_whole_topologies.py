"""Files that pages show whole, under their names, pass `busrl check`; names and code that pages list are those there.

A page's reader has a tiny model in the place of each named one; everything else is the page's own text.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import tomllib
from chat_folders import make
from command_blocks import ROOT, Reader, blocks, files_of, page

from busrl.engines.base import Request
from busrl.engines.tokens import Ids
from busrl.states import Finish

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Whole:
    """A topology of a page; `says`: words of `busrl check` about it; `keys`: what this machine lacks."""

    page: str
    file: str
    says: str
    keys: tuple[str, ...] = ()


WHOLE = (
    Whole("several-models.md", "older.toml", "old (checkpoints of main, every 50 steps, 1 back)"),
    Whole("experts.md", "moe.toml", "experts: 2 of 4 in 2 layers; those of prompt and answer are the engine's",
          ("learner.log_routes=on",)),
    Whole("hosts.md", "my.toml", "on gpu-0", ("bus.keys=keys",)),
)
PLACES = {"/models/my-model": "model", "/models/my-qwen3-moe": "moe", "made/player": "model"}


def mixture(model: Path, folder: Path) -> None:
    """Make the folder of a mixture of experts, as far as `busrl check` looks into it: configuration and tokenizer."""
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
               "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
               "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    mixture(make(tmp_path / "model", positions=2048), tmp_path / "moe")
    names = {there: str(tmp_path / here) for there, here in PLACES.items()}
    someone = Reader(tmp_path, {**names, 'engine = "vllm"': 'engine = "torch"'}, ())  # no vLLM in this Python
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "stones.jsonl").write_text('{"prompt": "7="}\n')
    shutil.copy(ROOT / "examples" / "several" / "take_game.py", tmp_path)
    yield someone
    someone.leave()


@pytest.mark.parametrize("whole", WHOLE, ids=lambda whole: whole.page)
def test_a_whole_topology_of_a_page_passes_check(whole: Whole, reader: Reader) -> None:
    reader.write(files_of(whole.page))
    if "bus.keys=keys" in whole.keys:
        reader.run("busrl keys init --dir keys")
        reader.run("busrl keys add --dir keys gpu-0")
    reader.keys = [*whole.keys]
    told = reader.run(f"busrl check {whole.file} --verbose")
    assert f"{whole.file}: ok" in told and whole.says in told, told


def test_the_keys_that_turn_a_kl_term_on_pass_check(reader: Reader) -> None:
    [text] = [block.text for block in blocks("algorithms.md") if block.language == "toml" and "kl_coef" in block.text]
    tables = tomllib.loads(reader.here(text.replace("/models/ref", "/models/my-model")))
    _, head, rest = files_of("hosts.md")["my.toml"].partition("[model]")
    reader.write({"my.toml": head + rest.partition("[[process]]")[0]})  # of one host
    reader.keys = [f"{table}.{key}={value}" for table, keys in tables.items() for key, value in keys.items()]
    assert len(reader.keys) == 3 and "my.toml: ok" in reader.run("busrl check my.toml")


def test_the_page_of_the_audit_has_every_finding_by_name() -> None:
    source = "\n".join(path.read_text() for path in sorted((ROOT / "busrl" / "ledger" / "audit").glob("*.py")))
    found = set(re.findall(r"\b(?:error|note)\(\s*\"([a-z_]+)\"", source))
    assert len(found) > 30 and not found - set(re.findall(r"`([a-z_]+)`", page("audit.md")))


def ids_of(ids: list[int]) -> Ids:
    return np.array(ids, np.int32)


class Backend:
    """Counts up from the last id; its weights are a number of versions."""

    tensors: ClassVar[dict[str, Any]] = {}

    def next(self, ids: list[int], request: Request) -> tuple[int, float]:
        return ids[-1] + 1, -0.5


def request(key: int, **changed: Any) -> Request:
    settings: dict[str, Any] = {"key": key, "uid": key, "segment": 0, "prompt_ids": ids_of([5]),
                                "prefix_ids": ids_of([]), "max_new_tokens": 3, "temperature": 1.0, "top_p": 1.0,
                                "seed": 0, **changed}
    return Request(**settings)


def test_the_engine_of_the_page_draws_ends_and_takes_versions() -> None:
    [code] = [block.text for block in blocks("extend-parts.md") if "class Mine(Engine)" in block.text]
    made: dict[str, Any] = {}
    exec(code, made)
    engine = made["Mine"](Backend(), None, capacity=4, max_length=16, end_ids=[7])
    engine.submit([request(1), request(2, prompt_ids=ids_of([20])), request(3, prompt_ids=ids_of([40]))])
    assert engine.decoding == 3 and engine.step() == []
    assert engine.update_weights(SimpleNamespace(fetch=lambda tensors: (4, 2))) == (4, 2)
    [first] = engine.step()
    assert (first.key, first.finish, first.token_ids.tolist()) == (1, Finish.EOS, [6, 7])
    assert first.versions.tolist() == [0, 4] and first.logprobs.tolist() == [-0.5, -0.5]
    aborted = engine.abort(3)
    assert aborted is not None and aborted.finish == Finish.ABORTED and aborted.token_ids.tolist() == [41, 42]
    [second] = engine.step()
    assert (second.finish, second.token_ids.tolist()) == (Finish.LENGTH, [21, 22, 23]) and engine.active == 0
