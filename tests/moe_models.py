"""Random Qwen3-MoE folders with the tokenizer of the quickstart: small, and of sizes that vLLM takes on a CPU.

Weights are wide enough that answers differ and that routers decide: their logits have a deviation of about 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

LAYERS, EXPERTS, TOP_K, HIDDEN = 2, 8, 2, 64


def moe_folder(
    folder: Path, *, dtype: str = "float32", layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K,
    hidden: int = HIDDEN, seed: int = 0, **changes: Any,
) -> Path:
    """Write a random model into `folder`. `changes` are further keys of its configuration, as `mlp_only_layers`."""
    import torch

    from busrl.quickstart import maker, task

    model = moe_model(layers=layers, experts=experts, top_k=top_k, hidden=hidden, seed=seed, **changes)
    recipe = task.Recipe()
    maker.save(folder, recipe, maker.new_tokenizer(recipe), model.to(getattr(torch, dtype)))
    return folder


def moe_model(
    *, layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K, hidden: int = HIDDEN, seed: int = 0,
    **changes: Any,
) -> Any:
    """A random model in float32, the same for the same `seed`."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from busrl.quickstart import task

    settings: dict[str, Any] = {
        "vocab_size": len(task.VOCABULARY), "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "num_experts": experts, "num_experts_per_tok": top_k,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
        "max_position_embeddings": 1024, "bos_token_id": None,
        "eos_token_id": task.VOCABULARY.index(task.END_TOKEN), "pad_token_id": task.VOCABULARY.index(task.PAD_TOKEN),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**{**settings, **changes}), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    scale = 2.0 if "lm_head" in name or "gate.weight" in name else 1.0
                    parameter.normal_(0, scale / parameter.shape[-1] ** 0.5)
    return model


def routing_at(folder: Path) -> Any:
    """The shape of the routes of that folder's model."""
    import json

    from busrl.data.routing import routing_of

    routing = routing_of(json.loads((folder / "config.json").read_text()))
    assert routing is not None
    return routing


def routes_of(model: Any, ids: Any) -> Any:
    """The experts that a whole forward pass over one sequence takes: [tokens, layers, experts of a token]."""
    import numpy as np
    import torch

    found: list[Any] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[2])) for router in routers]
    with torch.no_grad():
        model(torch.tensor(np.asarray(ids).tolist())[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()
