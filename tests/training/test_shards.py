"""Checkpoints in shards: what is written while tensors change, read by others than wrote it, and what a kill leaves."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from busrl.engines.torch.lora import WeightLoader
from busrl.errors import DiskFull, FileCorrupt, UserError, WriteFailed
from busrl.several.followed import FollowedCheckpoints
from busrl.system.files import listing
from busrl.training import checkpoint, shard_files
from busrl.training.model import load
from busrl.training.settings import TrainerSettings
from busrl.training.shard_files import Part, Shards, Writing
from busrl.training.trainer import Trainer


def begin(root: Path, step: int, trainer: Any, **extra: Any) -> checkpoint.Pending:
    values: dict[str, Any] = {"meta": {}, "source": None, "extras": lambda folder: None, "keep_last": 2,
                              "on_progress": lambda: None, "where": None, **extra}
    return checkpoint.Pending(root, step, trainer=trainer, **values)


def train(lab: Any, trainer: Any, seed: int) -> Any:
    samples = lab.samples(seed=seed)
    trainer.accumulate(samples, lab.advantages(len(samples), seed))
    return trainer.step(1e-2)


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_shard_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1 << 22,), float(i)) for i in range(6)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    writing = Writing(tmp_path / "shards" / "rank-0.safetensors",
                      [Part(name, tensor, (0,) * tensor.ndim, tuple(tensor.shape))
                       for name, tensor in tensors.items()], 1)
    writing.stage()
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    writing.stage()
    size, crc = writing.entry()
    actual = load_file(writing.path)
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)
    assert 0 < writing.copied <= writing.bytes == 6 << 24, "at most once more than the state"
    assert listing(tmp_path, [writing.path]) == {"shards/rank-0.safetensors": [size, crc]}


def test_what_is_on_disk_already_is_not_copied(tmp_path: Path) -> None:
    writing = Writing(tmp_path / "a" / "rank-0.safetensors", [Part("t", torch.ones(8, 2), (0, 0), (8, 2))], 1)
    writing.entry()
    writing.stage()
    assert writing.copied == 0 and writing.ended


GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 3))  # ranks along rows, and along columns


@settings(max_examples=25)
@given(st.integers(0, 13), st.integers(1, 5), GRIDS, GRIDS)
def test_any_number_of_ranks_reads_what_any_number_wrote(
    rows: int, width: int, wrote: tuple[int, int], reads: tuple[int, int]
) -> None:
    """However either cuts it."""
    whole, number = torch.arange(rows * width, dtype=torch.bfloat16).view(rows, width), torch.tensor(7.0)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(math.prod(wrote)):
            parts = [Part("w", piece, first, (rows, width)) for first, piece in cut(whole, wrote, rank)]
            parts += [Part("n", number, (), ())] if rank == 0 else []
            Writing(Path(folder) / shard_files.file_of(rank), parts, math.prod(wrote)).entry()
        (Path(folder) / shard_files.FOLDER / shard_files.REST).write_text("{}")
        shards = Shards(Path(folder))
        assert torch.equal(shards.whole("n"), number)
        for rank in range(math.prod(reads)) if rows else ():
            for first, piece in cut(whole, reads, rank):
                place = tuple(slice(at, at + size) for at, size in zip(first, piece.shape, strict=True))
                assert torch.equal(shards.part("w", place), piece)


def cut(tensor: torch.Tensor, grid: tuple[int, int], rank: int) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """As FSDP2 cuts rows, and a tensor axis columns: where the part of this rank begins, and it; none of no values."""
    sizes = [-(-size // ranks) for size, ranks in zip(tensor.shape, grid, strict=True)]
    row, column = (at * size for at, size in zip(divmod(rank, grid[1]), sizes, strict=True))
    piece = tensor[row: row + sizes[0], column: column + sizes[1]]
    return [((row, column), piece)] if piece.numel() else []


def test_a_disk_without_space_is_named_with_the_bytes_that_were_needed(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "rank-0.safetensors").symlink_to("/dev/full")
    writing = Writing(tmp_path / shard_files.file_of(0), [Part("t", torch.ones(64), (0,), (64,))], 1)
    with pytest.raises(DiskFull, match="no space for 256 bytes"):
        writing.entry()


def test_the_file_of_a_rank_that_is_missing_is_told(tmp_path: Path) -> None:
    Writing(tmp_path / shard_files.file_of(0), [Part("t", torch.ones(4), (0,), (8,))], 2).entry()
    with pytest.raises(FileCorrupt, match=r"files of 1 ranks, written by \[2\]"):
        Shards(tmp_path)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_one_that_a_follower_takes_is_put_together(lab: Any, tmp_path: Path) -> None:
    trainer = Trainer(load(lab.folder("qwen3")), TrainerSettings(micro_batch_tokens=60))
    train(lab, trainer, 0)
    begin(tmp_path / "checkpoints", 5, trainer, source=lab.folder("qwen3")).commit()
    follow: Any = SimpleNamespace(model="main", every=5, back=0)
    receiver = FollowedCheckpoints(tmp_path / "checkpoints", tmp_path / "room", "rollout/0", follow)
    version, step, folder = receiver.take()
    assert (version, step) == (5, 5)
    WeightLoader(other := load(lab.folder("qwen3"))).restart(folder)
    for name, value in other.named_parameters():
        assert torch.equal(value, trainer.trained_tensors()[name]), name


@pytest.mark.parametrize(
    "settings", [{}, {"compute_dtype": "bfloat16"}, {"optimizer": "adafactor"}, {"optimizer": "adamw8bit"}])
def test_training_goes_on_beside_and_from_it_bit_for_bit(
    lab: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    if settings.get("optimizer") == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    known = TrainerSettings(max_grad_norm=1e9, micro_batch_tokens=60, **settings)
    trainer = Trainer(load(lab.folder("qwen3")), known)
    train(lab, trainer, 0)
    pending = begin(tmp_path, 1, trainer)
    assert checkpoint.latest(tmp_path) is None, "there is none before the commit"
    train(lab, trainer, 1)
    written = pending.commit()
    assert checkpoint.latest(tmp_path) == written and written.sharded
    again = Trainer(load(lab.folder("qwen3")), known)
    assert again.restore(written) == []
    train(lab, again, 1)
    for name, value in trainer.trained_tensors().items():
        assert torch.equal(value, again.trained_tensors()[name]), name


def test_an_update_first_copies_what_is_not_on_disk_yet(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def opened(*how: Any, **more: Any) -> Any:
        go.wait(60)
        return open(*how, **more)

    monkeypatch.setattr(shard_files, "open", opened, raising=False)
    trainer = lab.trainer("qwen3", double=False)
    train(lab, trainer, 0)
    before = {name: tensor.detach().clone() for name, tensor in trainer.state.kept_tensors().items()}
    pending = begin(tmp_path, 1, trainer)
    assert trainer.state.saving.copied == 0, "nothing is copied before"
    train(lab, trainer, 1)
    assert trainer.state.saving.copied == trainer.state.saving.bytes and not pending.ready()
    go.set()
    written = Shards(pending.commit().path)
    assert all(torch.equal(written.whole(f"weights.{name}"), tensor) for name, tensor in before.items())


def test_one_that_was_given_up_leaves_nothing(lab: Any, tmp_path: Path) -> None:
    trainer = lab.trainer("qwen3", double=False)
    begin(tmp_path, 1, trainer).leave()
    assert list(tmp_path.iterdir()) == []
    begin(tmp_path, 2, trainer).commit()
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_2"]


def test_a_shard_that_cannot_be_written_leaves_the_checkpoint_before(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = lab.trainer("qwen3", double=False)
    begin(tmp_path, 1, trainer).commit()
    broken = RuntimeError("a broken device")
    monkeypatch.setattr(shard_files.Writing, "_write", lambda *_: (_ for _ in ()).throw(broken))
    with pytest.raises(WriteFailed, match="a broken device"):
        begin(tmp_path, 2, trainer).commit()
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.step == 1 and [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


def test_a_checkpoint_of_another_model_is_refused_with_both_shapes(lab: Any, tmp_path: Path) -> None:
    written = begin(tmp_path, 1, lab.trainer("llama", double=False)).commit()
    with pytest.raises(UserError, match=r"another model: lm_head.weight has the shape \[23, 32\] there and none in"):
        lab.trainer("qwen3", double=False).restore(written)


def test_a_checkpoint_of_another_optimiser_is_refused_with_both_names(lab: Any, tmp_path: Path) -> None:
    trainer = lab.trainer("qwen3", double=False, optimizer="adafactor")
    written = begin(tmp_path, 1, trainer).commit()
    other = lab.trainer("qwen3", double=False)
    with pytest.raises(UserError, match="'adafactor', the topology says 'adamw'"):
        other.restore(written)
    assert other.restore(written, optimizer=False) == [], "its weights alone are of the same model"


@pytest.mark.parametrize("name", ["shards/rank-0.safetensors", "shards/optimizer.json"])
def test_a_cut_or_changed_one_is_torn_and_passed_over(
    lab: Any, tmp_path: Path, name: str
) -> None:
    trainer = lab.trainer("qwen3", double=False)
    for step in (1, 2):
        begin(tmp_path, step, trainer).commit()
    path, torn = tmp_path / "global_step_2" / name, dict[Path, str]()
    path.write_bytes(path.read_bytes()[:-1])
    newest = checkpoint.latest(tmp_path, torn)
    assert newest is not None and newest.step == 1 and name in next(iter(torn.values()))


# -- kills -------------------------------------------------------------------------------------------------------------

WRITERS = """
    import os, sys, torch
    from pathlib import Path
    from busrl.training import checkpoint
    from busrl.training.model import load
    from busrl.training.settings import TrainerSettings
    from busrl.training.trainer import Trainer

    def write(trainer):
        step = 0
        while True:
            step += 1
            with torch.no_grad():
                for tensor in trainer.state.kept_tensors().values():
                    tensor.fill_(float(step))
            pending = checkpoint.Pending(
                Path(sys.argv[2]), step, trainer=trainer, meta={}, source=None, extras=lambda folder: None, keep_last=2,
                on_progress=lambda: None, where=None)
            trainer.state.saving.stage()
            pending.commit()
            print(step, flush=True)

    torch.set_num_threads(1)  # a fork has the threads of none
    trainer = Trainer(load(sys.argv[1]), TrainerSettings())
    for _ in sys.stdin:
        if not (child := os.fork()):
            try:
                write(trainer)
            finally:
                os._exit(1)
        print(f"pid {child}", flush=True)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def killed_while_writing(lab: Any, root: Path, moments: int) -> None:
    """One process loads the libraries; each writer that is killed is a fork of it."""
    chance = random.Random(moments)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITERS), str(lab.folder("qwen3")), str(root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as writers:
        assert writers.stdin is not None and writers.stdout is not None
        for number in range(moments):
            print("write", file=writers.stdin)
            pid, steps = 0, list[int]()
            while len(steps) < 2 or not pid:
                words = writers.stdout.readline().split()
                assert words and words[0] != "ended", "the writer failed by itself"
                if words[0] == "pid":
                    pid = int(words[1])
                else:
                    steps.append(int(words[0]))
            time.sleep(chance.uniform(0, 0.05))  # the moment; it writes on meanwhile
            os.kill(pid, signal.SIGKILL)
            while (words := writers.stdout.readline().split())[0] != "ended":
                steps.append(int(words[0]))
            assert words == ["ended", str(-signal.SIGKILL)]
            newest = checkpoint.latest(root)
            assert newest is not None and newest.step >= steps[-1], f"kill {number}: {newest}, reported {steps[-1]}"
            shards = Shards(newest.path)
            values = (shards.whole(name) for name in shards.shapes if name.startswith("weights."))
            assert all(bool((value == newest.step).all()) for value in values)
            for path in root.glob("global_step_*"):
                checkpoint.shutil.rmtree(path)
        writers.kill()


@pytest.mark.long
def test_killed_while_it_is_written_the_newest_whole_one_loads(lab: Any, tmp_path: Path) -> None:
    killed_while_writing(lab, tmp_path, 1)


@pytest.mark.slow
def test_killed_at_twenty_moments_the_newest_whole_one_loads(lab: Any, tmp_path: Path) -> None:
    killed_while_writing(lab, tmp_path, 20)


def test_the_state_names_its_optimiser_without_torch(lab: Any, tmp_path: Path) -> None:
    written = begin(tmp_path, 1, lab.trainer("qwen3", double=False)).commit()
    rest = json.loads((written.path / "shards" / "optimizer.json").read_text())
    assert rest["optimizer"] == "adamw" and set(rest) == {"state", "param_groups", "optimizer", "train_layers"}


@pytest.mark.parametrize("state, said", [
    ({1: 2.0}, "has the key 1: a file of tensors has strings as keys alone"),
    ({"at": torch.zeros(2, dtype=torch.complex64)}, "is a tensor of torch.complex64, which no file"),
    ({"at": object()}, "is a object, which"),
])
def test_a_state_that_no_file_can_hold_is_refused_by_place(state: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        shard_files.flattened({"state": {"layer.weight": state}}, "optimizer")
