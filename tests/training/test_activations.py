"""What a forward keeps for its backward: layers computed again, logits in pieces, and attentions by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from busrl.errors import ModelNotLoaded
from busrl.training.batch import flatten
from busrl.training.forward import checkpoint_layers, choose_forward
from busrl.training.model import Adapter, LoraSettings, attention_of, load
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Trainer


def kept_bytes(trainer: Trainer, samples: Any) -> int:
    """What autograd saves of a forward, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.forward.score(samples, flatten(samples, torch.float32, torch.device("cpu")))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("way", ["packed", "padded", "full"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])  # gpt2 drops out wherever it can
def test_layers_computed_again_give_the_same_loss_and_gradient(lab: Any, apart: Any, kind: str, way: str) -> None:
    if (kind, way) == ("gpt2", "packed"):
        pytest.skip("gpt2 has no packed rows")
    samples = lab.samples()
    advantages = lab.advantages(len(samples))
    expected, before = lab.step(lab.trainer(kind, way), [(samples, advantages)])
    gradient, stats = lab.step(lab.trainer(kind, way, activation_checkpointing="full"), [(samples, advantages)])
    assert stats.loss == pytest.approx(before.loss, abs=1e-6)
    assert apart(gradient, expected) < 1e-6


def test_it_acts(lab: Any) -> None:
    samples = lab.samples(groups=6)
    none, full = (
        kept_bytes(lab.trainer("llama", double=False, activation_checkpointing=given), samples)
        for given in ("none", "full")
    )
    assert full < none / 3
    on_a_cpu = lab.trainer("llama", double=False, activation_checkpointing="auto")
    assert kept_bytes(on_a_cpu, samples) == none and not on_a_cpu.model.training


def test_dropout_of_the_model_is_off_and_that_of_an_adapter_stays(lab: Any) -> None:
    pytest.importorskip("peft")
    model = load(lab.folder("qwen3"))
    adapter = Adapter(model, LoraSettings(4, 2.0, dropout=0.5))
    trainer = Trainer(model, TrainerSettings(activation_checkpointing="full"), adapter=adapter)
    samples = lab.samples()
    for _ in range(2):
        trainer.accumulate(samples, lab.advantages(len(samples)))
        trainer.step(1e-2)
    assert all((a == b).all() for a, b in zip(trainer.score(samples), trainer.score(samples), strict=True))
    ids = torch.arange(9)[None]
    assert not torch.equal(trainer.model(ids).logits, trainer.model(ids).logits)


def test_a_model_that_draws_in_training_mode_all_the_same_is_refused(lab: Any) -> None:
    model = lab.model("qwen3", double=False)
    way = choose_forward(model)
    layer = model.base_model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda rows: plain(rows) * (1 + torch.rand(1)) if layer.training else plain(rows)
    with pytest.raises(ModelNotLoaded, match=r"computes something else in training mode; .*= \"none\""):
        checkpoint_layers(way)


def test_a_model_that_cannot_is_refused_by_name(lab: Any) -> None:
    model = lab.model("qwen3", double=False)
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelNotLoaded, match=r"Qwen3ForCausalLM cannot compute its layers again; .*= \"none\""):
        checkpoint_layers(choose_forward(model))


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_rows_of_the_head_change_nothing_but_its_pieces(lab: Any, apart: Any, rows: int) -> None:
    samples = lab.samples()
    advantages = lab.advantages(len(samples))
    expected, _ = lab.step(lab.trainer("qwen3"), [(samples, advantages)])
    gradient, _ = lab.step(lab.trainer("qwen3", head_rows=rows), [(samples, advantages)])
    assert apart(gradient, expected) < 1e-9


def test_a_head_in_float32_has_the_bits_that_a_rounded_one_loses(lab: Any) -> None:
    samples = lab.samples()
    trainers = [lab.trainer("llama", double=False, compute_dtype="bfloat16", head_dtype=one)
                for one in ("model", "float32")]
    flat = flatten(samples, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        rounded, exact = (trainer.forward.score(samples, flat)[0] for trainer in trainers)
        way = trainers[1].forward
        hidden, head = way.states(samples).float(), trainers[1].model.lm_head.weight.float()
    expected = torch.log_softmax(hidden @ head.t(), -1).gather(-1, flat.targets[:, None])[:, 0]
    assert float((exact - expected).abs().max()) < 1e-5 < float((rounded - expected).abs().max())


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_an_attention_by_name_computes_one_row_of_whole_samples(
    lab: Any, apart: Any, kind: str, name: str
) -> None:
    samples = lab.samples()
    advantages = lab.advantages(len(samples))
    expected, _ = lab.step(lab.trainer(kind), [(samples, advantages)])
    model = load(lab.folder(kind), attention=name).to(torch.float64)
    trainer = Trainer(model, TrainerSettings(max_grad_norm=1e9, micro_batch_tokens=60, attention=name))
    assert trainer.forward.name == "joined" and attention_of(model) == name
    gradient, stats = lab.step(trainer, [(samples, advantages)])
    assert apart(gradient, expected) < 1e-6 and stats.padding == 0  # transformers' softmax is float32


def test_an_attention_that_is_not_there_is_named_with_a_remedy(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoaded, match=r"learner.memory.attention = 'flash_attention_2': .* set it to \"auto\""):
        load(lab.folder("qwen3"), attention="flash_attention_2")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch hides it where it compiles
@pytest.mark.slow
@pytest.mark.timeout(900)  # the first layer that is compiled takes minutes where others compute too
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_layers_give_the_same_loss_and_gradient(
    lab: Any, apart: Any, checkpointing: str
) -> None:
    import torch._dynamo as dynamo

    again = {"activation_checkpointing": checkpointing}
    plain, compiled = (lab.trainer("qwen3", "", double=False, compile=given, **again) for given in (False, True))
    graphs = dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs and all(parameter.grad is None for parameter in compiled.parameters)
    for groups in (1, 3, 6):
        samples = lab.samples(groups=groups)
        advantages = lab.advantages(len(samples))
        expected, before = lab.step(plain, [(samples, advantages)])
        gradient, stats = lab.step(compiled, [(samples, advantages)])
        assert stats.loss == pytest.approx(before.loss, abs=1e-5)
        assert apart(gradient, expected) < 1e-5
        for row, other in zip(compiled.score(samples), plain.score(samples), strict=True):
            assert abs(row - other).max() < 1e-5
    assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "compiled again for another micro-batch"


def test_layers_without_a_compiler_are_refused_by_name(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **_: setattr(layer, "forward", broken))
    with pytest.raises(ModelNotLoaded, match=r"cannot be compiled here: RuntimeError: no compiler .*compile = false"):
        lab.trainer("qwen3", "", double=False, compile=True)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no compiler")
