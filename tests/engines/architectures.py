"""Configurations of tiny models that keep other things than keys and values, or whose attention is not sdpa."""

from __future__ import annotations

from typing import Any

LINEAR: dict[str, Any] = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
# Architectures of other kinds: class of the configuration, and what it is given besides (None = not at all).
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
    "qwen3_next": ("Qwen3NextConfig", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "falcon_h1": ("FalconH1Config", {**MAMBA, "head_dim": 8, "mamba_d_ssm": 64, "mamba_chunk_size": 8}),
    "mamba2": ("Mamba2Config", {
        "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8, "intermediate_size": None,
        "num_attention_heads": None, "num_key_value_heads": None, "max_position_embeddings": None,
    }),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOssConfig", {
        "head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
}
