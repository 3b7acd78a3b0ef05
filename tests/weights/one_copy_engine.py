"""The engine's process of the tests of one copy: owns a model, shares it, and answers orders.

    {"do": "share"}  {"do": "logprobs", "ids": [...]}  {"do": "fetch", "above": 0}  {"do": "generate", ...}
    {"do": "close"}

`fused`: the model's tensors are fused as vLLM's are; `torch`: they are those of the torch engine.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from busrl.engines.base import Request
from busrl.engines.torch.engine import TorchEngine
from busrl.weights.one_copy import OneCopyReceiver

PADDING = 34
FUSED = ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj"))


class Fused:
    """A model whose tensors are laid out as vLLM's: one for q, k, v, one for gate and up, a padded vocabulary."""

    def __init__(self, folder: str) -> None:
        self.config = AutoConfig.from_pretrained(folder)
        parameters = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
        self.wanted = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensor in parameters.items():
            for pieces, fused in FUSED:
                if f".{pieces[0]}." in name:
                    all_of = [parameters[name.replace(pieces[0], piece)].detach() for piece in pieces]
                    self.tensors[name.replace(pieces[0], fused)] = torch.cat(all_of)
            if not any(f".{piece}." in name for piece in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                tensor = tensor.detach().clone()
                if name in ("model.embed_tokens.weight", "lm_head.weight"):
                    tensor = torch.cat([tensor, torch.zeros(PADDING, tensor.shape[1])])
                self.tensors[name] = tensor

    def logprobs(self, ids: list[int]) -> list[float]:
        """From the fused tensors as they are now, split by hand."""
        config = self.config
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            if "qkv_proj" in name:
                for piece, rows in zip(("q_proj", "k_proj", "v_proj"), tensor.split([q, kv, kv])):
                    state[name.replace("qkv_proj", piece)] = rows
            elif "gate_up_proj" in name:
                for piece, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2)):
                    state[name.replace("gate_up_proj", piece)] = rows
            else:
                state[name] = tensor[: config.vocab_size] if tensor.shape[0] == config.vocab_size + PADDING else tensor
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, strict=False)
        model.tie_weights()
        return logprobs(model, ids)


def logprobs(model: Any, ids: list[int]) -> list[float]:
    """Of every token after the first, under a plain forward."""
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(logits, ids[1:])]


def main(orders: Connection, kind: str, folder: str, bridge: str, fence: str, timeout_s: float) -> None:
    """Serve until the other end is closed."""
    torch.set_num_threads(1)
    receiver = OneCopyReceiver(bridge, fence, "rollout-0", timeout_s=timeout_s)
    fused = Fused(folder) if kind == "fused" else None
    engine = TorchEngine.load(folder, capacity=4, max_length=64) if kind == "torch" else None
    orders.send("loaded")
    while True:
        order = orders.recv()
        answer: Any = "done"
        try:
            if order["do"] == "share":
                if fused is not None:
                    receiver.share(fused.tensors, fused.wanted)
                elif engine is not None:
                    receiver.share(engine.parameters())
            elif order["do"] == "logprobs" and fused is not None:
                answer = fused.logprobs(order["ids"])
            elif order["do"] == "fetch":
                while receiver.newest()[0] <= order.get("above", -2):
                    pass
                answer = receiver.fetch({})
            elif order["do"] == "generate" and engine is not None:
                answer = generate(engine, receiver, order, orders)
            elif order["do"] == "close":
                receiver.close()
        except Exception as problem:
            answer = f"{type(problem).__name__}: {problem}"
        orders.send(answer)


def generate(engine: TorchEngine, receiver: OneCopyReceiver, order: dict[str, Any], orders: Connection) -> Any:
    """Four sequences, a look for new weights between any two steps; after `tell` steps it says so and waits."""
    nothing = np.empty(0, np.int32)
    prompt = np.asarray(order["prompt"], np.int32)
    requests = [Request(k, k, 0, prompt, nothing, order["tokens"], 1.0, 1.0, 1) for k in range(4)]
    (engine.submit if hasattr(engine, "submit") else engine.add)(requests)
    finished, steps, seen = [], 0, 0
    while engine.active:
        if receiver.newest()[0] > seen:
            if hasattr(engine, "update_weights"):
                seen, _ = engine.update_weights(receiver)
            else:
                seen, step = receiver.fetch(engine.parameters())
                engine.set_weights(seen, step)
        finished += engine.step()
        steps += 1
        if steps == order["tell"]:
            orders.send("in the middle")
            while receiver.newest()[0] <= seen:
                pass
    return [[f.token_ids.tolist(), f.logprobs.tolist(), f.versions.tolist()] for f in finished]

