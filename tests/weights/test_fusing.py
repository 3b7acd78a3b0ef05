"""Rows of an engine's fused tensors by the checkpoint's names, for the names and shapes that vLLM gives its models."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from busrl.errors import UserError
from busrl.weights.one_copy import FusedRows, Shape, fused_rows

HEADS, KV_HEADS, WIDTH, HIDDEN, INNER, VOCABULARY = 4, 2, 8, 32, 48, 30
LAYER = "model.layers.0."


def checkpoint(bias: bool = False, tied: bool = True) -> dict[str, Shape]:
    """Names of one Hugging Face layer, as Qwen3 (norms on heads), Qwen2 (biases) and Llama (an own head) have them."""
    attention = LAYER + "self_attn."
    names: dict[str, Shape] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        attention + "q_proj.weight": (HEADS * WIDTH, HIDDEN),
        attention + "k_proj.weight": (KV_HEADS * WIDTH, HIDDEN),
        attention + "v_proj.weight": (KV_HEADS * WIDTH, HIDDEN),
        attention + "o_proj.weight": (HIDDEN, HEADS * WIDTH),
        attention + "q_norm.weight": (WIDTH,),
        LAYER + "mlp.gate_proj.weight": (INNER, HIDDEN),
        LAYER + "mlp.up_proj.weight": (INNER, HIDDEN),
        LAYER + "mlp.down_proj.weight": (HIDDEN, INNER),
        "model.norm.weight": (HIDDEN,),
    }
    if bias:
        names |= {attention + f"{p}_proj.bias": (names[attention + f"{p}_proj.weight"][0],) for p in "qkv"}
    return names if tied else {**names, "lm_head.weight": (VOCABULARY, HIDDEN)}


def engine(bias: bool = False, tied: bool = True, padding: int = 0) -> dict[str, Shape]:
    """The same, fused."""
    shapes = checkpoint(bias, tied)
    fused = {name: shape for name, shape in shapes.items() if "_proj" not in name or "o_proj" in name or "down" in name}
    rows = (HEADS + 2 * KV_HEADS) * WIDTH
    fused[LAYER + "self_attn.qkv_proj.weight"] = (rows, HIDDEN)
    fused[LAYER + "mlp.gate_up_proj.weight"] = (2 * INNER, HIDDEN)
    if bias:
        fused[LAYER + "self_attn.qkv_proj.bias"] = (rows,)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in fused:
            fused[name] = (VOCABULARY + padding, HIDDEN)
    return fused


def test_each_projection_has_its_rows_of_the_fused_tensor() -> None:
    parts = {part.name.removeprefix(LAYER): part for part in fused_rows(engine(), checkpoint())}
    assert parts.keys() == {name.removeprefix(LAYER) for name in checkpoint()}
    qkv = LAYER + "self_attn.qkv_proj.weight"
    assert parts["self_attn.q_proj.weight"] == FusedRows(LAYER + "self_attn.q_proj.weight", qkv, 0, 32)
    assert (parts["self_attn.k_proj.weight"].start, parts["self_attn.k_proj.weight"].stop) == (32, 48)
    assert (parts["self_attn.v_proj.weight"].start, parts["self_attn.v_proj.weight"].stop) == (48, 64)
    assert (parts["mlp.up_proj.weight"].tensor, parts["mlp.up_proj.weight"].start) == (
        LAYER + "mlp.gate_up_proj.weight", INNER,
    )


def test_biases_are_fused_like_weights_and_padding_belongs_to_nobody() -> None:
    parts = {part.name: part for part in fused_rows(engine(True, False, padding=34), checkpoint(True, False))}
    assert (parts[LAYER + "self_attn.v_proj.bias"].start, parts[LAYER + "self_attn.v_proj.bias"].stop) == (48, 64)
    assert parts["lm_head.weight"].stop == parts["model.embed_tokens.weight"].stop == VOCABULARY


def without(name: str) -> Callable[[dict[str, Shape]], None]:
    return lambda names: names.__delitem__(name)


def resized(name: str, shape: Shape) -> Callable[[dict[str, Shape]], None]:
    return lambda names: names.update({name: shape})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without(LAYER + "self_attn.qkv_proj.weight"), "the engine has no model.layers.0.self_attn.q_proj.weight"),
        (resized(LAYER + "self_attn.qkv_proj.weight", (32, HIDDEN)), "make 64 rows .* split over several devices"),
        (resized(LAYER + "mlp.down_proj.weight", (HIDDEN, 24)), r"down_proj.weight is \[32, 24\] in the engine"),
        (resized("model.embed_tokens.weight", (VOCABULARY - 1, HIDDEN)), r"embed_tokens.weight is \[29, 32\]"),
        (resized("lm_head.weight", (VOCABULARY, HIDDEN)), "lm_head.weight of the engine is no tensor of the checkp"),
        (resized(LAYER + "self_attn.qkv_proj.weight_scale", (64,)), "weight_scale of the engine is no tensor"),
    ],
)
def test_what_would_not_be_trained_or_not_be_right_is_refused(
    change: Callable[[dict[str, Shape]], None], text: str
) -> None:
    shapes = engine()
    change(shapes)
    with pytest.raises(UserError, match=text):
        fused_rows(shapes, checkpoint())


def test_a_checkpoint_without_one_of_the_fused_projections_is_refused() -> None:
    wanted = checkpoint()
    del wanted[LAYER + "self_attn.v_proj.weight"]
    with pytest.raises(UserError, match=r"holds model.layers.0.self_attn.v_proj.weight too"):
        fused_rows(engine(), wanted)
