"""`busrl export`: a checkpoint's model loads anywhere, in the number type asked for; nothing is overwritten."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from busrl.cli import evaluate, main
from busrl.errors import DiskFull
from busrl.preflight.load import load as load_topology
from busrl.training import checkpoint
from busrl.training.model import Adapter, LoraSettings, load
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Trainer

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


def a_run(lab: Any, root: Path, kind: str = "qwen3", steps: tuple[int, ...] = (1, 2)) -> tuple[Path, Trainer, Adapter]:
    """A run directory with checkpoints of a model under an adapter, as the learner writes them; the last is of now."""
    source = lab.folder(kind)
    (source / "tokenizer.json").write_text("{}")
    run, model = root / "run", load(source)
    run.mkdir()
    topology = load_topology(QUICKSTART)
    named = dataclasses.replace(topology, model=dataclasses.replace(topology.model, path=str(source)))
    (run / "topology.json").write_text(named.to_json())
    adapter = Adapter(model, LoraSettings(rank=4, scale=2.0))
    trainer = Trainer(model, TrainerSettings(), adapter=adapter)
    for step in steps:
        samples = lab.samples(seed=step)
        trainer.accumulate(samples, lab.advantages(len(samples)))
        assert not trainer.step(1e-1).skipped
        checkpoint.save(
            run / "checkpoints", step, model=model, optimizer_state=trainer.optimizer_state(), meta={},
            weights=trainer.named_weights(), source=source,
        )
    return run, trainer, adapter


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_the_folder_is_base_and_adapter_as_one_without_missing_keys(lab: Any, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run, trainer, _ = a_run(lab, tmp_path, kind)
    out = tmp_path / "out"
    assert main(["export", str(run), "--out", str(out)]) == 0
    actual, told = AutoModelForCausalLM.from_pretrained(str(out), output_loading_info=True, local_files_only=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    ids = torch.arange(9)[None]
    with torch.no_grad():
        ours, theirs = trainer.model(ids).logits, actual.eval()(ids).logits
        assert (ours - theirs).abs().max() < 1e-4 < (load(lab.folder(kind))(ids).logits - theirs).abs().max()
    assert (out / "tokenizer.json").read_text() == "{}"
    (plain := tmp_path / "plain").mkdir()
    assert out.stat().st_mode == plain.stat().st_mode


def test_a_step_and_a_number_type_are_those_that_were_asked_for(lab: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run, trainer, _ = a_run(lab, tmp_path)
    out = tmp_path / "out"
    assert main(["export", str(run), "--step", "1", "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    actual = AutoModelForCausalLM.from_pretrained(str(out), dtype="auto", local_files_only=True)
    first = load(run / "checkpoints" / "global_step_1" / "model").state_dict()
    for name, value in actual.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, first[name].to(torch.bfloat16)), name
    now = trainer.named_weights()
    assert any(not torch.equal(now[name], first[name]) for name in now), "step 2 is another model"


def test_what_cannot_be_exported_is_refused_with_the_remedy(
    lab: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    run, _, _ = a_run(lab, tmp_path)
    out = tmp_path / "out"

    def refused(*arguments: str) -> str:
        assert main(["export", str(run), *arguments]) == 2
        assert not out.exists() and not list(tmp_path.glob(".out*"))
        return capsys.readouterr().err

    assert "--step 7" in (text := refused("--step", "7", "--out", str(out))) and "of steps 1, 2" in text
    assert "is there, and nothing is overwritten" in refused("--out", str(run))
    assert "is no folder that can be written" in refused("--out", str(tmp_path / "none" / "out"))
    weights = run / "checkpoints" / "global_step_2" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "damaged" in (text := refused("--out", str(out))) and "--step" in text
    assert "no topology.json" in (main(["export", str(tmp_path), "--out", str(out)]) and capsys.readouterr().err)


def test_a_full_disk_leaves_nothing(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    a_checkpoint = tmp_path.parent / f"{tmp_path.name}-saved"
    shutil.copytree(lab.folder("qwen3"), a_checkpoint / "model")
    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(DiskFull, match="nothing of it is left"), evaluate.new_folder(tmp_path / "out") as folder:
        checkpoint.export_checkpoint(a_checkpoint, folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_checkpoint_in_shards_becomes_the_same_folder(lab: Any, tmp_path: Path, kind: str) -> None:
    source = lab.folder(kind)
    (source / "tokenizer.json").write_text("{}")
    trainer = Trainer(load(source), TrainerSettings(compute_dtype="bfloat16"))
    saved = checkpoint.Pending(
        tmp_path, 1, trainer=trainer, meta={"dtype": "bfloat16"}, source=source, extras=lambda folder: None,
        keep_last=1, on_progress=lambda: None, where=None,
    ).commit()
    assert not list(saved.model.glob("*.safetensors")) and (saved.model / "tokenizer.json").exists()
    for dtype in ("", "float32"):
        out = tmp_path / f"out{dtype}"
        out.mkdir()
        checkpoint.export_checkpoint(saved.path, out, dtype)
        actual, told = AutoModelForCausalLM.from_pretrained(
            str(out), dtype="auto", output_loading_info=True, local_files_only=True)
        assert not told["missing_keys"] and not told["unexpected_keys"]
        assert (out / "tokenizer.json").exists()
        for name, value in actual.named_parameters():
            assert value.dtype == (torch.float32 if dtype else torch.bfloat16)
            assert torch.equal(value, trainer.trained_tensors()[name].to(value.dtype)), name
