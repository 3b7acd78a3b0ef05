"""New weights in a running vLLM: every token carries the version that made it, and what does not fit is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from proof_scene import Proving
from transformers import Qwen3MoeConfig
from vllm_scene import EOS_ID, EXACT, VOCABULARY, Scene, config_of, request

from busrl.errors import CannotTrain, UserError, WeightsTimeout
from busrl.weights import factory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_tokens_before_across_and_after_an_update_are_those_of_their_version(scene: Scene, transport: str) -> None:
    engine, settings = scene.engine, scene.settings(transport)
    sender, receiver = factory.make_sender(settings), engine.receiver(settings, "rollout-0")
    assert receiver is not None
    first = engine.version + 1
    try:
        for version in (first, first + 1):
            asked = [request(k, [5, 6, k], 120) for k in range(2, 8)]
            with scene.slow_steps():
                engine.submit(asked)
                scene.wait_for_tokens(12)
                scene.pause()  # a loaded machine may take longer to send than the answers are long
                sender.publish(version, 10 * version, scene.tensors(version))
                receiver.wait_for(version, 60)
                engine.resume()
                assert engine.update_weights(receiver) == (version, 10 * version)
            made = scene.finish(len(asked))
            assert all(set(one.versions.tolist()) <= {version - 1, version} for one in made.values())
            assert any(set(one.versions.tolist()) == {version - 1, version} for one in made.values())
            assert all((one.versions[1:] >= one.versions[:-1]).all() for one in made.values())
            assert max(scene.off_by(one, made[one.key]) for one in asked) < EXACT
            after = request(1, [5, 6, 2], 30)
            one = scene.run(after)[1]
            assert set(one.versions.tolist()) == {version} and scene.off_by(after, one) < EXACT
    finally:
        receiver.close()
        sender.close()


@pytest.mark.parametrize("recompute", [True, False])
def test_a_continuing_request_finds_its_blocks_unless_older_weights_made_them(
    scene: Scene, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, settings = scene.engine, scene.settings("shm", f"prefix-{recompute}")
    monkeypatch.setattr(engine._updates, "_recompute", recompute)
    sender, receiver = factory.make_sender(settings), engine.receiver(settings, "rollout-0")
    assert receiver is not None
    version, path, computed = engine.version + 1, [5 + (k * k + 3 * recompute) % 11 for k in range(70)], []
    try:
        for turn in range(4):
            if turn == 2:
                sender.publish(version, version, scene.tensors(version))
                receiver.wait_for(version, 60)
                assert engine.update_weights(receiver) == (version, version)
            asked = request(turn, path, 8)
            made = scene.run(asked)[turn]
            assert scene.off_by(asked, made) < EXACT
            computed.append((made.computed, len(path)))
            path = [*path, *made.token_ids.tolist(), 6, 7]
    finally:
        receiver.close()
        sender.close()
    assert [new == length for new, length in computed] == [True, False, True, False]
    assert all(new <= 32 + 10 for new, length in computed[1::2]), "more than a block beside what is new"


def _without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(list(tensors.items())[1:])


def _with_more(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "model.layers.9.mlp.up_proj.weight": torch.zeros(4, 4)}


def _reshaped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t[:-1].clone() if "up_proj" in name else t for name, t in tensors.items()}


def _other_type(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.to(torch.bfloat16) for name, t in tensors.items()}


def _other_architecture(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("self_attn", "attention"): t for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without, "are not published"), (_with_more, "are not in this model"), (_reshaped, "up_proj"),
        (_other_type, "bfloat16"), (_other_architecture, "are not in this model"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_engine_lives_on(
    scene: Scene, spoil: Callable[[Any], Any], said: str
) -> None:
    engine, settings = scene.engine, scene.settings("shm", spoil.__name__)
    sender, receiver = factory.make_sender(settings), engine.receiver(settings, "rollout-0")
    assert receiver is not None
    old = engine.version
    try:
        sender.publish(old + 1, 1, spoil(scene.tensors(old + 1)))
        with pytest.raises(WeightsTimeout, match=said):
            receiver.wait_for(old + 1, 1.0)
        with pytest.raises(WeightsTimeout, match=said):
            engine.update_weights(receiver)
        asked = request(1, [5, 6, 7], 30)
        made = scene.run(asked)[1]
        assert set(made.versions.tolist()) == {old} and scene.off_by(asked, made) < EXACT
        sender.publish(old + 2, 2, scene.tensors(old + 2))
        receiver.wait_for(old + 2, 60)
        assert engine.update_weights(receiver) == (old + 2, 2)
        assert scene.off_by(asked, scene.run(asked)[1]) < EXACT
    finally:
        receiver.close()
        sender.close()


def test_an_engine_after_a_failed_load_answers_nothing_until_a_whole_one(scene: Scene) -> None:
    engine, settings = scene.engine, scene.settings("shm", "half")
    sender, receiver = factory.make_sender(settings), engine.receiver(settings, "rollout-0")
    assert receiver is not None
    version = engine.version + 1
    try:
        sender.publish(version, 1, scene.tensors(version))
        receiver.wait_for(version, 60)
        engine.core.rpc("busrl_break")
        with pytest.raises(UserError, match="loading new weights failed"):
            engine.update_weights(receiver)
        with pytest.raises(UserError, match="has to be loaded first"):
            engine.resume()
        engine.core.rpc("busrl_mend")
        receiver.wait_for(version, 60)
        assert engine.update_weights(receiver)[0] == version
        asked = request(1, [5, 6, 7], 30)
        assert scene.off_by(asked, scene.run(asked)[1]) < EXACT
    finally:
        receiver.close()
        sender.close()


def test_a_learner_training_vllm_tensors_changes_them_only_between_steps(scene: Scene) -> None:
    """weights.transport = "cuda_ipc", on the CPU through shared memory: one copy, views of vLLM's fused tensors."""
    pytest.importorskip("busrl.weights.one_copy")
    engine, settings = scene.engine, scene.settings("cuda_ipc")
    receiver, sender = engine.receiver(settings, "rollout-0"), factory.make_sender(settings)
    assert receiver is not None
    views = sender.connect(scene.tensors(engine.version), torch.device("cpu"), 60.0)
    assert all(torch.equal(views[name], tensor) for name, tensor in scene.tensors(engine.version).items())

    def change(version: int) -> None:
        sender.pause_engines(version, 10 * version)
        for name, tensor in scene.tensors(version).items():
            views[name].copy_(tensor)
        sender.publish(version, 10 * version, views)

    try:
        for version in (engine.version + 1, engine.version + 2):
            asked = [request(k, [5, 6, k], 120) for k in range(2, 8)]
            with scene.slow_steps():
                engine.submit(asked)
                scene.wait_for_tokens(12)
                scene.pause()
                learner = threading.Thread(target=change, args=(version,))
                learner.start()
                receiver.wait_for(version, 60)
                engine.resume()
                assert engine.update_weights(receiver) == (version, 10 * version)
                learner.join(60)
            made = scene.finish(len(asked))
            assert {v for one in made.values() for v in one.versions.tolist()} == {version - 1, version}
            assert max(scene.off_by(one, made[one.key]) for one in asked) < EXACT
    finally:
        sender.close()
        receiver.close()


def test_an_update_that_goes_wrong_later_is_found_at_its_version(scene: Scene) -> None:
    engine, settings = scene.engine, scene.settings("shm", "proofs")
    sender, receiver = factory.make_sender(settings), engine.receiver(settings, "rollout-0")
    proving = Proving(scene.folder, scene.models[0])
    assert receiver is not None
    first, said = engine.version + 1, []
    try:
        for version in range(first, first + 4):
            if version == first + 2:  # from here on all is new but the output head
                engine.core.rpc("busrl_corrupt")
            proving.publish(version, scene.tensors(version))
            sender.publish(version, version, scene.tensors(version))
            receiver.wait_for(version, 60)
            assert engine.update_weights(receiver) == (version, version)
            proving.answer(engine, version)
            if version == first + 3:
                with pytest.raises(CannotTrain, match=rf"So it was at version {first + 2}"):
                    proving.judged(version)
            else:
                said += [(version, one.text) for one in proving.judged(version)]
    finally:
        engine.core.rpc("busrl_mend")
        receiver.close()
        sender.close()
    assert [version for version, _ in said] == [first + 2]


# -- kernels of a CPU, which read packed weights ----

ROUNDED = 0.5  # nats, of one token: wrong experts are off by several
AMX = " amx_tile " in Path("/proc/cpuinfo").read_text()
PACKED_AWAY = """
import torch
from torch import nn
torch.cpu._is_amx_tile_supported = lambda: True
from busrl.engines.vllm import cpu_patches
cpu_patches.apply()
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
layer.weight.zero_()
assert not layer.cpu_linear(torch.ones(1, 64, dtype=torch.bfloat16), layer.weight, None).any()
"""



def experts(width: int) -> Qwen3MoeConfig:
    """Four experts of that width, two of which a token takes."""
    return Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=width, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
        tie_word_embeddings=False, vocab_size=len(VOCABULARY), eos_token_id=EOS_ID, pad_token_id=0, bos_token_id=None,
    )


def furthest(scene: Scene, updates: int) -> list[float]:
    """After each of so many updates, how far a token's log-probability is from a plain forward pass."""
    settings = scene.settings("shm", "kernels")
    sender, receiver = factory.make_sender(settings), scene.engine.receiver(settings, "rollout-0")
    assert receiver is not None
    found = []
    try:
        for version in range(1, 1 + updates):
            sender.publish(version, version, scene.tensors(version))
            receiver.wait_for(version, 60)
            assert scene.engine.update_weights(receiver) == (version, version)
            asked = [request(k, [5, 6, k], 30) for k in range(2, 6)]
            made = scene.run(*asked)
            assert {v for one in made.values() for v in one.versions.tolist()} == {version}
            found.append(max(scene.off_by(one, made[one.key]) for one in asked))
    finally:
        receiver.close()
        sender.close()
    return found


@pytest.mark.parametrize(("dtype", "width", "limit"), [
    ("float32", 48, EXACT),  # which kernels pad to 64
    ("bfloat16", 32, ROUNDED),
    pytest.param("bfloat16", 0, ROUNDED, marks=pytest.mark.skipif(not AMX, reason="this processor has no AMX")),
])
def test_new_weights_of_experts_and_of_16_bits_reach_the_kernels(
    tmp_path: Path, dtype: str, width: int, limit: float
) -> None:
    config = experts(width) if width else config_of(tied=False)
    # Without the check of the first weights: it ends a small model's run, and larger models have none.
    scene = Scene(tmp_path / "model", tied=False, config=config, dtype=dtype, check_parameters=0)
    try:
        assert max(furthest(scene, 3)) < limit
    finally:
        scene.close()


def test_a_processor_with_amx_packs_no_dense_weight_away() -> None:
    done = subprocess.run([sys.executable, "-c", PACKED_AWAY], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_rows_without_tokens_are_never_drawn_before_or_after_an_update(tmp_path: Path) -> None:
    """A third of the rows have no token, and are as likely as others; vLLM's own check of new weights agrees too."""
    config = config_of(tied=True)
    config.vocab_size = 48
    scene = Scene(tmp_path / "wide", True, config=config)
    settings = scene.settings("shm")
    sender, receiver = factory.make_sender(settings), scene.engine.receiver(settings, "rollout-0")
    assert receiver is not None and scene.rows.without == 48 - len(VOCABULARY)
    try:
        for version in (0, 1):
            if version:
                sender.publish(version, version, scene.tensors(version))
                receiver.wait_for(version, 60)
                scene.engine.update_weights(receiver)
            asked = [request(k, [5, 6, k], 40, temperature=0.7) for k in range(2, 10)]
            made = scene.run(*asked)
            assert max(int(one.token_ids.max()) for one in made.values()) < len(VOCABULARY)
            assert max(scene.off_by(one, made[one.key]) for one in asked) < EXACT
    finally:
        receiver.close()
        sender.close()
        scene.close()
