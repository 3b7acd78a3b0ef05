"""Checkpoints: whole or absent, continued bit for bit, pruned, and what a kill or a full disk leaves behind."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forks
from safetensors.torch import load_file, save_file

from busrl.errors import DiskFull
from busrl.training import checkpoint
from busrl.training.model import load
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Trainer


def save(root: Path, step: int, trainer: Any, **extra: Any) -> checkpoint.Checkpoint:
    return checkpoint.save(root, step, model=trainer.model, optimizer_state=trainer.optimizer_state(),
                           meta={"version": step + 10, "groups": 32 * step}, **extra)


def train(lab: Any, trainer: Any, seed: int) -> None:
    samples = lab.samples(seed=seed)
    trainer.accumulate(samples, lab.advantages(len(samples), seed))
    trainer.step(1e-3)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(lab: Any, tmp_path: Path, kind: str) -> None:
    trainer = lab.trainer(kind, double=False)
    train(lab, trainer, 0)
    train(lab, trainer, 1)
    save(tmp_path, 2, trainer)
    after_save = torch.rand(3)
    train(lab, trainer, 2)
    torch.manual_seed(99)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and (newest.step, newest.meta) == (2, {"version": 12, "groups": 64, "step": 2})
    again = Trainer(load(newest.model), TrainerSettings(max_grad_norm=1e9, micro_batch_tokens=60))
    again.load_optimizer_state(newest.optimizer_state())
    newest.restore_random()
    assert torch.equal(torch.rand(3), after_save)
    train(lab, again, 2)
    for name, value in trainer.named_weights().items():
        assert torch.equal(value, again.named_weights()[name]), name


def test_a_bfloat16_folder_is_half_as_large_and_training_goes_on(lab: Any, tmp_path: Path) -> None:
    def made(model: Any) -> Any:
        return Trainer(model, TrainerSettings(compute_dtype="bfloat16", max_grad_norm=1e9, micro_batch_tokens=60))

    trainer = made(lab.model("qwen3", double=False))
    train(lab, trainer, 0)
    written = save(tmp_path, 1, trainer, weights=trainer.named_weights())
    described = json.loads((written.model / "config.json").read_text())
    assert described.get("dtype", described.get("torch_dtype")) == "bfloat16"
    stored = load_file(written.model / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    again = made(load(written.model))
    again.load_optimizer_state(written.optimizer_state())
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, dict(again.model.named_parameters())[name]), name
    train(lab, trainer, 1)
    train(lab, again, 1)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, dict(again.model.named_parameters())[name]), name


def test_a_checkpoint_of_before_without_master_weights_is_read(lab: Any, tmp_path: Path) -> None:
    trainer = lab.trainer("qwen3", double=False, compute_dtype="bfloat16")
    train(lab, trainer, 0)
    written = checkpoint.save(tmp_path, 1, model=trainer.model, optimizer_state=trainer.optimizer.state_dict(), meta={})
    again = Trainer(load(written.model), trainer.settings)
    again.load_optimizer_state(written.optimizer_state())
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, dict(again.model.named_parameters())[name]), name


def test_the_generator_of_an_accelerator_goes_on_as_well(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, state, put = torch.device("cuda", 0), torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(checkpoint.device, "random_state", lambda device: state if device == where else None)
    monkeypatch.setattr(checkpoint.device, "restore_random", lambda device, told: put.append((device, told)))
    written = save(tmp_path, 1, lab.trainer("qwen3", double=False), where=where)
    written.restore_random(torch.device("cpu"))
    assert put == []
    written.restore_random(where)
    assert [device for device, _ in put] == [where] and torch.equal(put[0][1], state)


def test_settings_of_the_optimiser_are_those_of_now_changes_are_told(lab: Any, tmp_path: Path) -> None:
    trainer = lab.trainer("qwen3", double=False)
    train(lab, trainer, 0)
    written = save(tmp_path, 1, trainer)
    again = lab.trainer("qwen3", double=False, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-5)
    told = again.load_optimizer_state(written.optimizer_state())
    assert [(group["weight_decay"], group["betas"], group["eps"]) for group in again.optimizer.param_groups] == [
        (0.3, (0.8, 0.95), 1e-5), (0.0, (0.8, 0.95), 1e-5)]
    assert told == [
        "learner.betas = [0.8, 0.95] (before: [0.9, 0.999])", "learner.eps = 1e-05 (before: 1e-08)",
        "learner.weight_decay = 0.3 (before: 0.0)",
    ]
    assert len(again.optimizer.state) == len(trainer.optimizer.state), "the moments go on"
    assert trainer.load_optimizer_state(written.optimizer_state()) == []


def test_each_part_and_file_of_a_checkpoint_is_progress(lab: Any, tmp_path: Path) -> None:
    trainer, told = lab.trainer("qwen3", double=False), []
    written = save(tmp_path, 1, trainer, on_progress=lambda: told.append(len(list(tmp_path.rglob("*")))))
    files = [path for path in written.path.rglob("*") if path.is_file()]
    assert len(told) >= 2 * len(files) and told == sorted(told)


def test_the_model_folder_holds_the_trained_weights_and_the_sources_other_files(lab: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    lab.model("qwen3").save_pretrained(str(source))
    (source / "tokenizer.json").write_text("{}")
    trainer = lab.trainer("qwen3", double=False)
    train(lab, trainer, 0)
    written = save(
        tmp_path / "checkpoints",
        1,
        trainer,
        source=source,
        extras=lambda path: (path / "trained.bin").write_bytes(b"abc"),
    )
    assert (written.model / "tokenizer.json").read_text() == "{}"
    assert (written.path / "trained.bin").read_bytes() == b"abc"
    stored = dict(load(written.model).named_parameters())
    assert all(torch.equal(value, stored[name]) for name, value in trainer.named_weights().items())
    assert "trained.bin" in json.loads((written.path / "files.json").read_text())


def test_the_newest_are_kept_and_nothing_else_is_touched(lab: Any, tmp_path: Path) -> None:
    trainer = lab.trainer("qwen3", double=False)
    (tmp_path / "notes").mkdir()
    for step in (1, 9, 10, 11):
        save(tmp_path, step, trainer, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_10", "global_step_11", "notes"]


@pytest.mark.parametrize("tear", ["cut", "flip", "lose", "unlist"])
def test_a_torn_checkpoint_is_passed_over_with_a_warning_and_stays(
    lab: Any, tmp_path: Path, tear: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = lab.trainer("qwen3", double=False)
    save(tmp_path, 1, trainer)
    torn = save(tmp_path, 2, trainer).path
    weights = torn / "model" / "model.safetensors"
    data = weights.read_bytes()
    {
        "cut": lambda: weights.write_bytes(data[:-1]),
        "flip": lambda: weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1])),
        "lose": lambda: (torn / "optimizer.pt").unlink(),
        "unlist": lambda: (torn / "files.json").write_text("{"),
    }[tear]()
    with caplog.at_level(logging.WARNING):
        newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.step == 1
    assert "global_step_2: torn checkpoint, passed over" in caplog.text
    assert torn.exists()


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "never") is None


def test_a_step_that_is_saved_again_replaces_the_torn_one(lab: Any, tmp_path: Path) -> None:
    trainer = lab.trainer("qwen3", double=False)
    (save(tmp_path, 3, trainer).path / "meta.json").unlink()
    save(tmp_path, 3, trainer)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_3"]


class Model:
    """Saves as transformers does."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "config.json").write_text("{}")
        save_file({"weight": torch.zeros(20000)}, f"{folder}/model.safetensors")


def dies_at(where: Any, name: str, at: int) -> None:
    """This process is killed where it calls that function for the `at`-th time."""
    good, calls = getattr(where, name), [0]

    def dying(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return good(*arguments, **more)

    setattr(where, name, dying)


def write(said: Any, root: Path) -> None:
    try:
        checkpoint.save(root, 2, model=Model(), optimizer_state={"a": torch.zeros(9000)}, meta={}, keep_last=1,
                        extras=lambda path: (path / "trained.bin").write_bytes(bytes(150000)))
    except DiskFull as error:
        said.send(str(error))


def write_and_die(said: Any, root: Path, what: str, at: int) -> None:
    dies_at(checkpoint.os, what, at)
    write(said, root)


def write_on_a_full_disk(said: Any, root: Path, limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    write(said, root)


def replace_and_die(said: Any, root: Path, call: str, at: int) -> None:
    dies_at({"rename": os, "rmtree": checkpoint.shutil, "sync": checkpoint}[call], call, at)
    with checkpoint.whole_directory(root / "global_step_7") as folder:
        (folder / "new").write_text("new")


def child(target: Callable[..., None], *arguments: Any) -> tuple[int, str]:
    """What a process that ran this ended with, and what it said."""
    here, there = forks.Pipe()
    process = forks.Process(target=target, args=(there, *arguments))
    process.start()
    there.close()
    process.join(120)
    assert process.exitcode is not None, "it has not ended"
    try:
        return process.exitcode, here.recv()
    except EOFError:
        return process.exitcode, ""


@pytest.mark.parametrize(
    ("what", "limit", "left"), [("fsync", 1, 1), ("fsync", 8, 1), ("rename", 1, 1), ("rename", 2, 2)]
)
def test_a_killed_writer_leaves_the_old_or_the_new_one_whole(
    lab: Any, tmp_path: Path, what: str, limit: int, left: int
) -> None:
    trainer = lab.trainer("qwen3", double=False)
    save(tmp_path, 1, trainer)
    assert child(write_and_die, tmp_path, what, limit) == (-signal.SIGKILL, "")
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.step == left
    save(tmp_path, 3, trainer, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_3"]


@pytest.mark.parametrize(("call", "at"), [("rename", 1), ("rename", 2), ("rmtree", 1), ("rmtree", 2), ("sync", 3)])
def test_a_directory_that_is_replaced_is_there_whole_whenever_its_writer_dies(
    tmp_path: Path, call: str, at: int
) -> None:
    root = tmp_path / "checkpoints"
    for name in ("old", "older"):
        (root / "global_step_7").mkdir(parents=True, exist_ok=True)
        (root / "global_step_7" / name).write_text(name)
    assert child(replace_and_die, root, call, at)[0] in (0, -signal.SIGKILL)
    checkpoint.finish_replacements(root)
    actual = sorted(path.name for path in (root / "global_step_7").iterdir())
    assert actual in (["old", "older"], ["new"]), actual
    checkpoint.remove_leftovers(root)
    assert [path.name for path in root.iterdir()] == ["global_step_7"]


@pytest.mark.parametrize("limit", [100, 30000, 60000, 100000])
def test_a_full_disk_leaves_the_one_before_and_says_what_to_do(lab: Any, tmp_path: Path, limit: int) -> None:
    save(tmp_path, 1, lab.trainer("qwen3", double=False))
    code, said = child(write_on_a_full_disk, tmp_path, limit)
    assert code == 0 and "free space on the file system" in said
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.step == 1


def test_no_space_at_the_sync_is_a_full_disk_too(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = lab.trainer("qwen3", double=False)
    save(tmp_path, 1, trainer)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(DiskFull, match="global_step_2: No space left on device"):
        save(tmp_path, 2, trainer)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
