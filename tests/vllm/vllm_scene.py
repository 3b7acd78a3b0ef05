"""A tiny model, a vLLM engine that runs it, and what a plain forward pass says about every token that it makes."""

from __future__ import annotations

import os
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from busrl.data.vocabulary import ALL_ROWS, TokenRows, token_rows
from busrl.engines.base import Finished, Request
from busrl.engines.vllm.engine import VllmEngine
from busrl.engines.vllm.process import Start
from busrl.topology.learner import Routing
from busrl.topology.schema import Vllm
from busrl.weights.factory import TransportSettings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
torch.set_num_threads(1)
VOCABULARY = {token: i for i, token in enumerate(["<pad>", "<eos>", *string.ascii_lowercase, *" ,=:"])}
EOS_ID = 1
LENGTH = 160
START_S = 420.0  # a machine that other tests share
EXACT = 1e-4
SLOW_STEP_S = 0.05  # 100 tokens of a slowed engine leave 5 s to catch an answer that runs


def config_of(tied: bool) -> Qwen3Config:
    """Heads of 16 are padded to the 32 that vLLM's CPU kernels know; heads of 32 are used as they are."""
    return Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16 if tied else 32, max_position_embeddings=256, tie_word_embeddings=tied,
        vocab_size=len(VOCABULARY), eos_token_id=EOS_ID, pad_token_id=0, bos_token_id=None,
    )


def model_of(config: Any, seed: int, dtype: str = "float32") -> Any:
    """Random weights, wide enough that answers differ and a wrong version is off by more than 1."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6.0)
    model.get_output_embeddings().weight[EOS_ID] = 0.0  # so that answers end seldom
    return model


def save(folder: Path, model: Any) -> Path:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    return folder


def request(key: int, prompt: list[int], tokens: int = 24, **more: Any) -> Request:
    ids = np.array(prompt, np.int32)
    given: dict[str, Any] = {"segment": 0, "prefix_ids": ids[:0], "temperature": 1.0, "top_p": 1.0, "seed": 3}
    return Request(key=key, uid=key, prompt_ids=ids, max_new_tokens=tokens, **(given | more))


class Scene:
    """The engine, and the model of every version: 0 is the folder's."""

    def __init__(
        self, folder: Path, tied: bool, lora_rank: int = 0, adapters: int = 0, tensor_parallel: int = 1,
        extra: dict[str, str] | None = None, temperature: float = 1.0, config: Any = None, dtype: str = "float32",
        routing: Routing | None = None, make: Callable[[Any, int, str], Any] = model_of, **own: Any,
    ) -> None:
        """`config`: of another model than `config_of(tied)`, `make`: of the one of a version. `routing`: of its routes,
        which come with answers."""
        self.folder, self.tied, self.config, self.dtype = folder, tied, config or config_of(tied), dtype
        self.make = make
        self.models = {0: make(self.config, 0, dtype)}
        save(folder, self.models[0])
        self.rows = token_rows(folder)
        os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{ROOT}"  # vLLM's processes import the extension by name
        self.early: dict[int, Finished] = {}
        limits = {"start_s": START_S, "rpc_s": 60.0, "silent_s": 120.0, **own}
        self.start = Start(
            str(folder), dtype, capacity=8, max_length=LENGTH, lora_rank=lora_rank, adapters=adapters,
            settings=Vllm(kv_cache_mb=16, tensor_parallel=tensor_parallel, extra=extra or {}, **limits),
            extension="vllm_breakable.Breakable", routing=routing,
        )
        self.engine = VllmEngine(self.start, temperature=temperature)

    def close(self) -> None:
        self.engine.close()

    def settings(self, transport: str, name: str = "") -> TransportSettings:
        where = self.folder / (name or transport)
        where.mkdir(exist_ok=True)
        return TransportSettings(transport, str(where / "weights"), str(where / "address"), 10.0)

    def model(self, version: int) -> Any:
        if version not in self.models:
            self.models[version] = self.make(self.config, version, self.dtype)
        return self.models[version]

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        return {name: p.data for name, p in self.model(version).named_parameters()}

    def finish(self, count: int, limit_s: float = 120.0) -> dict[int, Finished]:
        """Step until so many have ended, those included that ended while tokens were waited for."""
        found, self.early = self.early, {}
        end = time.monotonic() + limit_s
        while len(found) < count:
            assert time.monotonic() < end, f"{len(found)} of {count} ended in {limit_s} s: {self.engine.statistics()}"
            found |= {one.key: one for one in self.engine.step()}
        return found

    def run(self, *requests: Request) -> dict[int, Finished]:
        self.engine.submit(requests)
        return self.finish(len(requests))

    def off_by(self, asked: Request, made: Finished) -> float:
        """Largest difference of a log-probability to a plain forward pass with the weights of that token's version."""
        known = [*asked.prompt_ids.tolist(), *asked.prefix_ids.tolist()]
        ids = torch.tensor([known + made.token_ids.tolist()])
        worst = 0.0
        for version in set(made.versions.tolist()):
            expected = logprobs_of(self.model(version), ids, asked.temperature, asked.top_p, self.rows)
            expected = expected[len(known) - 1 :]
            mine = made.versions == version
            worst = max(worst, float(np.abs(expected - made.logprobs)[mine].max()))
        return worst

    @contextmanager
    def slow_steps(self) -> Iterator[None]:
        """Slow the engine down inside: its answers then still run when this process, which may lose its core, looks."""
        self.engine.core.rpc("busrl_slow_down", SLOW_STEP_S)
        try:
            yield
        finally:
            if not self.engine.core.lost:
                self.engine.core.rpc("busrl_full_speed")

    def pause(self) -> None:
        """Hold the running answers; what has ended by then counts as ended while tokens were waited for."""
        self.early |= {answer.key: answer for answer in self.engine.pause("keep")}
        assert self.engine.running, "all ended too early to be caught running"

    def wait_for_tokens(self, count: int) -> None:
        """Step until every running request has so many; one at least must run by then."""
        end = time.monotonic() + 120
        while any(len(running.token_ids) < count for running in self.engine.running):
            assert time.monotonic() < end
            self.early |= {answer.key: answer for answer in self.engine.step()}
        assert self.engine.running, "all ended too early to be caught running"

    def clear(self) -> None:
        """End what a test left running, so that one that failed takes no other with it."""
        self.early = {}
        if not self.engine.core.lost:
            self.engine.pause("abort")
            self.engine.resume()


def logprobs_of(
    model: Any, ids: torch.Tensor, temperature: float, top_p: float, rows: TokenRows = ALL_ROWS
) -> np.ndarray:
    from busrl.engines.torch.engine import _truncate

    with torch.inference_mode():
        found = torch.log_softmax(rows.mask(model(ids).logits[0, :-1].float()) / temperature, -1)
        if top_p < 1:
            found = _truncate(found, torch.full((len(found), 1), top_p, dtype=torch.float64))
        return found.gather(-1, ids[0, 1:, None])[:, 0].numpy()
