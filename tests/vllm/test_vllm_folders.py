"""Versions that are folders: adapters in a running vLLM, and whole models by a restart that answers survive."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_scene import EXACT, SLOW_STEP_S, Scene, model_of, request, save

from busrl.engines import Request
from busrl.errors import WeightsRefused
from busrl.roles.rollout import EngineRestart
from busrl.weights.factory import make_receiver, make_sender

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
RANK, ALPHA = 4, 8
LAYERS = {"self_attn.q_proj": "q_proj", "mlp.down_proj": "down_proj"}


class Folders:
    """A receiver whose newest version the test names."""

    def __init__(self, kind: str) -> None:
        self.kind, self.version, self.path = kind, 0, Path()

    def take(self) -> tuple[int, int, Path]:
        return self.version, 10 * self.version, self.path


def adapter(scene: Scene, folder: Path, version: int, rank: int = RANK, layer_list: tuple[int, ...] = ()) -> Path:
    """An adapter as peft writes it, of these layers or all; the scene's model of that version is the base with the
    adapter merged."""
    folder.mkdir(exist_ok=True)
    model, tensors = model_of(scene.config, 0), {}
    torch.manual_seed(1000 + version)
    for name, weight in dict(model.named_parameters()).items():
        layer = name.removesuffix(".weight")
        here = not layer_list or int(next(filter(str.isdigit, layer.split(".")), -1)) in layer_list
        if here and any(layer.endswith(part) for part in LAYERS):
            a, b = torch.randn(rank, weight.shape[1]), torch.randn(weight.shape[0], rank)
            tensors |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
            weight += ALPHA / rank * (b @ a)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": sorted(LAYERS.values()),
              "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": None}
    config |= {"layers_to_transform": list(layer_list), "layers_pattern": ["layers"]} if layer_list else {}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    scene.models[version] = model
    return folder


def begun(scene: Scene, asked: Request) -> EngineRestart:
    """What takes the request, which runs, out of an engine that starts again."""
    cut = EngineRestart(finish=False)
    scene.engine.core.rpc("busrl_slow_down", SLOW_STEP_S)
    scene.engine.submit([asked])
    cut.submitted([asked])
    scene.wait_for_tokens(10)
    return cut


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = Scene(tmp_path_factory.mktemp("adapters"), tied=False, lora_rank=8, adapters=3)
    yield made
    made.close()


def test_answers_keep_their_first_adapter_and_new_ones_use_the_newest(
    adapters: Scene, tmp_path: Path
) -> None:
    engine, source = adapters.engine, Folders("adapter")
    assert engine.receiver(adapters.settings("lora_hotswap"), "rollout-0") is None
    for version in (1, 2, 3, 4):
        asked = [request(10 * version + k, [5, 6, 7 + k], 100) for k in range(6)]
        source.version, source.path = version, adapter(adapters, tmp_path / f"v{version}", version)
        with adapters.slow_steps():
            engine.submit(asked)
            adapters.wait_for_tokens(5)
            assert engine.update_weights(source) == (version, 10 * version)
        after = request(10 * version + 9, [5, 6, 7], 30)
        engine.submit([after])
        made = adapters.finish(7)
        assert {v for one in asked for v in made[one.key].versions.tolist()} == {version - 1}
        assert set(made[after.key].versions.tolist()) == {version}
        assert max(adapters.off_by(one, made[one.key]) for one in (*asked, after)) < EXACT


def test_an_adapter_of_some_layers_is_swapped_exactly(adapters: Scene, tmp_path: Path) -> None:
    """As lora.layers writes it."""
    source, version = Folders("adapter"), 50
    source.version, source.path = version, adapter(adapters, tmp_path / "upper", version, layer_list=(1,))
    assert adapters.engine.update_weights(source) == (version, 10 * version)
    asked = request(1, [5, 6, 7], 40)
    made = adapters.run(asked)[1]
    assert set(made.versions.tolist()) == {version} and adapters.off_by(asked, made) < EXACT


def test_an_unfitting_adapter_is_refused_and_the_previous_one_stays(adapters: Scene, tmp_path: Path) -> None:
    engine, source, version = adapters.engine, Folders("adapter"), adapters.engine.version
    source.version, source.path = 900, adapter(adapters, tmp_path / "large", 900, rank=64)
    with pytest.raises(WeightsRefused, match=r"the adapter .*large was refused"):
        engine.update_weights(source)
    asked = request(1, [5, 6, 7], 20)
    made = adapters.run(asked)[1]
    assert engine.version == version and set(made.versions.tolist()) == {version}
    assert adapters.off_by(asked, made) < EXACT


def test_an_adapter_in_use_by_an_answer_never_yields_to_another(
    adapters: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, source = adapters.engine, Folders("adapter")
    monkeypatch.setattr(engine, "settings", replace(engine.settings, rpc_s=0.3))

    def update(version: int) -> None:
        source.version, source.path = version, adapter(adapters, tmp_path / f"v{version}", version)
        assert engine.update_weights(source) == (version, 10 * version)

    update(21)
    asked = {21: request(21, [5, 6, 7], 140)}
    with adapters.slow_steps():
        engine.submit([asked[21]])
        adapters.wait_for_tokens(3)
        adapters.pause()
    for version in (22, 23):  # these wait for their turn: nothing of theirs is decoded while others come
        update(version)
        asked[version] = request(version, [8, 9, version], 30)
        engine.submit([asked[version]])
    with pytest.raises(WeightsRefused, match=r"versions \[21, 22, 23\], and vLLM has 3 places; .*for request 21\.21\."):
        update(24)
    assert engine.version == 23
    engine.resume()
    made = adapters.finish(3)
    for version, one in asked.items():
        assert set(made[version].versions.tolist()) == {version}
        assert adapters.off_by(one, made[version]) < EXACT
    update(24)
    assert len(engine.core.call("list_loras", engine.core.engine.list_loras)) == 2, "the newest, and the one before"


def test_adapters_by_restart_keep_the_model_and_survive_a_refusal(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "model", tied=False, lora_rank=8, adapters=2)
    try:
        engine = scene.engine
        settings = replace(
            scene.settings("lora_restart"), folders=str(tmp_path / "published"), base=str(scene.folder),
            kept_by_engine=2,
        )
        sends = make_sender(settings, write=lambda folder, named: adapter(scene, folder, *named["what"]) and None)
        assert engine.receiver(settings, "rollout/0") is None
        takes, first = make_receiver(settings, "rollout/0"), engine.core.pids()
        sends.publish(1, 10, {"what": (1,)})
        assert engine.update_weights(takes) == (1, 10)
        assert engine.core.pids() == first, "there was no adapter to be rid of"
        asked = request(1, [5, 6, 7], 140)
        cut = begun(scene, asked)
        sends.publish(2, 20, {"what": (2,)})
        assert cut.take_out(engine) == [] and engine.update_weights(takes) == (2, 20)
        cut.resume(engine)
        assert not set(first) & set(engine.core.pids()) and engine.start == scene.start
        made = cut.merged(scene.finish(1)[1])
        assert set(made.versions.tolist()) == {1, 2} and scene.off_by(asked, made) < EXACT
        sends.publish(3, 30, {"what": (3, 64)})
        with pytest.raises(WeightsRefused, match=r"was refused"):
            engine.update_weights(takes)
        asked = request(4, [5, 6, 7], 20)
        made = scene.run(asked)[4]
        assert set(made.versions.tolist()) == {2} and scene.off_by(asked, made) < EXACT
        takes.close()
        sends.close()
    finally:
        scene.close()


def test_an_answer_survives_a_restart_with_a_new_checkpoint(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "model", tied=True)
    try:
        engine, source = scene.engine, Folders("folder")
        assert engine.receiver(scene.settings("checkpoint_restart"), "rollout-0") is None
        asked = request(1, [5, 6, 7], 140)
        cut = begun(scene, asked)
        old = engine.core.pids()
        source.version, source.path = 7, save(tmp_path / "new", scene.model(7))
        assert cut.take_out(engine) == [] and engine.update_weights(source) == (7, 70)
        cut.resume(engine)
        assert not set(old) & set(engine.core.pids())
        made = cut.merged(scene.finish(1)[1])
        assert set(made.versions.tolist()) == {0, 7} and scene.off_by(asked, made) < EXACT
        assert replace(engine.start, model=str(scene.folder)) == scene.start
    finally:
        scene.close()
