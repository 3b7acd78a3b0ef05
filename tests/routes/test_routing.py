"""Which layers of a model have experts, by its config; and routes with a fault, which are named by row and layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from busrl.data.routing import Routing, first_fault, routing_of

QWEN = {"num_hidden_layers": 6, "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK = {"num_hidden_layers": 5, "n_routed_experts": 320, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
SHAPE = Routing((0, 2, 5), 6, 2)


@pytest.mark.parametrize(("config", "layers"), [
    ({**QWEN, "mlp_only_layers": [1, 4]}, (0, 2, 3, 5)),
    ({**QWEN, "decoder_sparse_step": 2}, (1, 3, 5)),
    ({"text_config": QWEN}, (0, 1, 2, 3, 4, 5)),
    ({**DEEPSEEK, "moe_layer_freq": 1}, (3, 4)),
    ({**DEEPSEEK, "moe_layer_freq": 2, "first_k_dense_replace": 0}, (0, 2, 4)),
    ({**DEEPSEEK, "moe_layer_freq": [0, 1, 1, 0], "first_k_dense_replace": 0}, (1, 2)),
    ({**DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "hash_moe"]}, (1, 3, 4)),
    ({"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}, (0, 1)),
])
def test_layers_with_experts_are_those_of_the_config(config: dict[str, Any], layers: tuple[int, ...]) -> None:
    routing = routing_of(config)
    assert routing is not None and routing.layers == layers


@pytest.mark.parametrize("config", [
    {}, {"num_hidden_layers": 6}, {**QWEN, "num_experts": 0}, {**QWEN, "num_experts_per_tok": 0},
    {**QWEN, "mlp_only_layers": list(range(6))}, {**QWEN, "num_experts": "many"},
])
def test_a_config_without_experts_has_no_routing(config: dict[str, Any]) -> None:
    assert routing_of(config) is None


def test_ids_take_one_byte_up_to_256_experts_and_else_two() -> None:
    assert Routing((0, 1), 256, 8).dtype == np.uint8 and Routing((0, 1), 257, 8).dtype == np.uint16
    assert Routing(tuple(range(48)), 128, 8).bytes_per_token == 384
    assert Routing(tuple(range(48)), 512, 10).bytes_per_token == 960


@given(of_numpy.arrays(np.uint8, st.tuples(st.integers(0, 5), st.just(3), st.just(2)), elements=st.integers(0, 8)))
def test_the_first_fault_is_what_a_slow_look_finds(routes: Any) -> None:
    said = first_fault(routes, len(routes), SHAPE)
    beyond = [(row, at) for row, layers in enumerate(routes) for at, ids in enumerate(layers) if max(ids) >= 6]
    twice = [(row, at) for row, layers in enumerate(routes) for at, ids in enumerate(layers) if ids[0] == ids[1]]
    if beyond:
        row, at = beyond[0]
        assert said.startswith(f"row {row}, layer {SHAPE.layers[at]}: expert ") and said.endswith(" of 6")
    elif twice:
        row, at = twice[0]
        assert said == f"row {row}, layer {SHAPE.layers[at]}: expert {routes[row, at, 0]} twice"
    else:
        assert said == ""


def test_an_expert_twice_among_many_is_found_too() -> None:
    many = Routing((4, 9), 64, 20)
    routes = np.tile(np.arange(20, dtype=np.uint8), (3, 2, 1))
    assert first_fault(routes, 3, many) == ""
    routes[2, 1, 0] = 19
    assert first_fault(routes, 3, many) == "row 2, layer 9: expert 19 twice"


@pytest.mark.parametrize("shape", [(3, 3, 2), (5, 3, 2), (4, 2, 2), (4, 3, 3), (4, 6), (24,)])
def test_routes_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    assert "must be [4, 3, 2]" in first_fault(np.zeros(shape, np.uint8), 4, SHAPE)


def test_routes_of_another_type_are_refused() -> None:
    sound = np.tile(np.array([0, 1], np.uint16), (4, 3, 1))
    assert "routes are uint16: must be uint8" in first_fault(sound, 4, SHAPE)
    assert first_fault(sound, 4, Routing((0, 2, 5), 257, 2)) == ""
