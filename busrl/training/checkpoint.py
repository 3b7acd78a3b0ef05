"""Checkpoints: `checkpoints/global_step_<n>/` with the model as a Hugging Face folder and the optimiser in a file, or
both in shards; random state and meta; and directories that appear whole or not at all.

Written and read by the learner, and by transports that publish folders. Talks to the file system and to the model's own
save function; knows nothing of the log: the learner adds its files (the trained set) through `extras`.

- A checkpoint is complete or absent; `files.json` lists every file with size and CRC-32. One that does not match is
  torn: it is skipped with a warning and never removed, and an older one is used.
- A checkpoint in shards (`shards/`, docs/results.md) is written while training goes on, and appears with its commit;
  its `model/` has everything but the weights. Every reader of checkpoints reads both kinds.
- The newest `keep_last` whole ones are kept; older ones go only after the new one is on disk.
- Nothing in it is a pickle that could run code: tensors are read with `weights_only=True`.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from busrl.errors import DiskFull
from busrl.ledger.trained import checkpoints_of, step_of
from busrl.paths import CHECKPOINT
from busrl.system import device
from busrl.system.files import FULL, REPLACED, fault_in, finish_replacements, listing, sync
from busrl.training.shard_files import FOLDER, REST, Shards, wait

# -- directories that appear whole or not at all ----------------------------------

TEMPORARY = ".tmp-"


@contextlib.contextmanager
def whole_directory(final: Path, on_progress: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A temporary directory to fill; it becomes `final`, in place of one that is there, when the block ends well.

    A writer that dies on the way leaves a temporary directory, which the next writer removes, never half of a real one.
    A directory that is replaced has a name meanwhile from which `finish_replacements` restores it. One writer per
    parent at a time: the caller holds the lock. `on_progress` is called after each file that was synced.
    """
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    temporary = parent / f"{TEMPORARY}{final.name}"
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary, on_progress)
        if os.path.lexists(final):
            os.rename(final, parent / f"{REPLACED}{final.name}")
        os.rename(temporary, final)
        sync(parent)
        finish_replacements(parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in FULL:
            raise DiskFull(
                f"{final}: {error.strerror} while it was written; nothing of it is left and older ones are untouched; "
                f"free space on the file system of {parent}"
            ) from error
        raise


def remove_leftovers(parent: Path) -> None:
    finish_replacements(parent)
    for path in parent.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def sync_tree(root: Path, on_progress: Callable[[], None] = lambda: None) -> None:
    """Sync every file below, then every directory, so that no name is on disk before its file."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync(Path(folder) / name)
            on_progress()
        sync(Path(folder))


# -- checkpoints ------------------------------------------------------------------

log = logging.getLogger(__name__)

WEIGHT_PREFIX = "weights."  # begins the names of a model's tensors in shards
META, OPTIMIZER, RANDOM, FILES, MODEL = "meta.json", "optimizer.pt", "random.json", "files.json", "model"
OS_ERROR = re.compile(r"os error (\d+)")
NOT_COPIED = (".safetensors", ".bin", ".pt", ".index.json")  # weights: the trained ones replace them


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    meta: dict[str, Any]

    @property
    def model(self) -> Path:
        """The Hugging Face folder of the weights, to be given to `model.load`."""
        return self.path / MODEL

    @property
    def sharded(self) -> bool:
        """True if weights and optimiser are in shards, and `model` has no weights."""
        return is_sharded(self.path)

    def optimizer_state(self) -> dict[str, Any]:
        """For `Trainer.load_optimizer_state`."""
        state: dict[str, Any] = torch.load(self.path / OPTIMIZER, map_location="cpu", weights_only=True)
        return state

    def restore_random(self, where: torch.device | None = None) -> None:
        """Restore the state of torch's generator, and of the device `where` if the checkpoint has one of its kind."""
        saved = json.loads((self.path / RANDOM).read_text())
        torch.set_rng_state(_tensor(saved["torch"]))
        if where is not None and where.type in saved:
            device.restore_random(where, _tensor(saved[where.type]))


def is_sharded(checkpoint: Path) -> bool:
    return (checkpoint / FOLDER).is_dir()


def save(
    root: Path, step: int, *, model: Any, optimizer_state: Mapping[str, Any], meta: Mapping[str, Any],
    weights: Mapping[str, Any] | None = None, source: Path | None = None,
    extras: Callable[[Path], None] = lambda directory: None, keep_last: int = 2,
    on_progress: Callable[[], None] = lambda: None, where: torch.device | None = None,
) -> Checkpoint:
    """Writes checkpoint `step` under `root` and removes old ones; DiskFull leaves what was there before as it was.

    `weights`: the weights where they are not the model's own. `source`: the folder the model came from, whose tokenizer
    goes along. `extras(directory)` writes the caller's own files. `where`: the device that trains.
    """
    final = root / f"{CHECKPOINT}{step}"
    with whole_directory(final, on_progress) as directory:
        export(model, directory / MODEL, source, weights)
        on_progress()
        buffer = io.BytesIO()
        torch.save(dict(optimizer_state), buffer)
        on_progress()
        (directory / OPTIMIZER).write_bytes(buffer.getbuffer())
        on_progress()
        _describe(directory, step, meta, where)
        extras(directory)
        (directory / FILES).write_text(json.dumps(_listing(directory, on_progress), indent=1))
    _thin_out(root, keep_last)
    return Checkpoint(final, step, {**meta, "step": step})


def _describe(directory: Path, step: int, meta: Mapping[str, Any], where: torch.device | None) -> None:
    (directory / RANDOM).write_text(json.dumps(_random(where)))
    (directory / META).write_text(json.dumps({**meta, "step": step}, indent=1))


def _thin_out(root: Path, keep_last: int) -> None:
    for old in checkpoints_of(root)[keep_last:]:
        aside = root / f"{TEMPORARY}old-{old.name}"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(old, aside)  # so that no half of it is ever seen under its name
        if aside.is_symlink():
            aside.unlink(missing_ok=True)
        else:
            shutil.rmtree(aside, ignore_errors=True)


class Pending:
    """A checkpoint in shards that is being written: `commit` makes it one, `leave` gives it up. Small files are written
    at once. The arguments are those of `save`."""

    def __init__(
        self, root: Path, step: int, *, trainer: Any, meta: Mapping[str, Any], source: Path | None,
        extras: Callable[[Path], None], keep_last: int, on_progress: Callable[[], None], where: torch.device | None,
    ) -> None:
        self.step, self._meta, self._final = step, dict(meta), root / f"{CHECKPOINT}{step}"
        self._keep_last, self._on_progress = keep_last, on_progress
        with contextlib.ExitStack() as stack:
            self.directory = stack.enter_context(whole_directory(self._final, on_progress))
            _write_shell(trainer.model, self.directory / MODEL, source)
            _describe(self.directory, step, meta, where)
            extras(self.directory)
            self.saving = trainer.save(self.directory)
            self._stack = stack.pop_all()

    def ready(self) -> bool:
        """True if `commit` would not wait."""
        ended: bool = self.saving.ready()
        return ended

    def commit(self, limit_s: float = 600.0) -> Checkpoint:
        """Wait for all shards, let the checkpoint appear, and remove old ones. DiskFull or WriteFailed: nothing is left
        of it. RankLost if a shard takes longer than the limit."""
        with self._stack:
            try:
                wait(self.saving, limit_s, self._on_progress)
                shards = self.saving.entries()
            except BaseException:
                self.saving.leave()
                raise
            rest = _listing(self.directory, self._on_progress, shards)
            (self.directory / FILES).write_text(json.dumps({**rest, **shards}, indent=1))
        _thin_out(self._final.parent, self._keep_last)
        return Checkpoint(self._final, self.step, {**self._meta, "step": self.step})

    def leave(self) -> None:
        """Give the checkpoint up: nothing of it is left."""
        with contextlib.suppress(_GivenUp), self._stack:
            self.saving.leave()
            raise _GivenUp


class _GivenUp(Exception):
    pass


def _write_shell(model: Any, folder: Path, source: Path | None) -> None:
    """A Hugging Face folder without its weights."""
    model.config.save_pretrained(str(folder))
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.save_pretrained(str(folder))
    _copy_rest(source, folder)


def _copy_rest(source: Path | None, folder: Path) -> None:
    """Copy the files of a model besides its weights: the tokenizer, templates."""
    for path in source.iterdir() if source is not None else ():
        if path.is_file() and not path.name.endswith(NOT_COPIED) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _random(where: torch.device | None) -> dict[str, str]:
    """The generators' states by name: "torch" for the CPU's, and the kind of an accelerator."""
    of_device = None if where is None else device.random_state(where)
    states = {"torch": torch.get_rng_state()} | ({} if where is None or of_device is None else {where.type: of_device})
    return {name: base64.b64encode(state.cpu().numpy().tobytes()).decode() for name, state in states.items()}


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def export(
    model: Any, folder: Path, source: Path | None, weights: Mapping[str, Any] | None = None, buffered: bool = True
) -> None:
    """Write a Hugging Face folder of the model, or of its architecture with these weights; with its tokenizer.
    `buffered`: the buffers of this model belong to the weights."""
    try:
        more, types = dict[str, Any](), set[str]()
        if weights is not None:
            weights = dict(weights)  # a mapping may compute each at its access
            more = {"state_dict": {**(buffers(model) if buffered else {}), **weights}}
            floats = (tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
            types = {str(dtype).removeprefix("torch.") for dtype in floats}
        model.save_pretrained(str(folder), **more)
        if len(types) == 1:  # the config has the type of the trained model; the weights may have fewer bits
            _write_type(folder / "config.json", *types)
    except Exception as error:
        # A library writes the weights: its errors are no OSError, but quote the number of one.
        number = OS_ERROR.search(str(error))
        if number is None or isinstance(error, OSError):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    _copy_rest(source, folder)


def export_checkpoint(checkpoint: Path, folder: Path, dtype: str = "") -> None:
    """Write the model of a checkpoint into a folder, as a Hugging Face folder. `dtype`: torch's name of the type of the
    weights; empty: the type in which the run published them."""
    (_put_together if is_sharded(checkpoint) else _copied)(checkpoint, folder, dtype)


def _copied(checkpoint: Path, folder: Path, dtype: str) -> None:
    """Copy the files of the model's folder, one at a time."""
    for path in sorted(path for path in (checkpoint / MODEL).iterdir() if path.is_file()):
        if path.suffix == ".safetensors" and dtype:
            _cast(path, folder / path.name, getattr(torch, dtype))
        else:
            shutil.copyfile(path, folder / path.name)
    if dtype:
        _write_type(folder / "config.json", dtype)


def _put_together(checkpoint: Path, folder: Path, dtype: str) -> None:
    """Export the weights of all shards, with all of them in memory in their number type."""
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # it has no type hints
    meta = json.loads((checkpoint / META).read_text())
    wanted, shards = getattr(torch, dtype or meta.get("dtype", "float32")), Shards(checkpoint)
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(str(checkpoint / MODEL), local_files_only=True)
        model = auto.from_config(config, dtype=wanted)
    weights = {}
    for name in shards.names(WEIGHT_PREFIX):
        tensor = shards.whole(f"{WEIGHT_PREFIX}{name}")
        weights[name] = tensor.to(wanted) if tensor.is_floating_point() else tensor
    export(model, folder, checkpoint / MODEL, weights, buffered=False)


def _cast(source: Path, target: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file, save

    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in load_file(source).items()
    }
    target.write_bytes(save(tensors, {"format": "pt"}))  # its own file writer hides the error of a full disk


def _write_type(config: Path, name: str) -> None:
    described = json.loads(config.read_text())
    for key in {"dtype", "torch_dtype"} & described.keys():
        described[key] = name
    config.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def buffers(model: Any) -> dict[str, Any]:
    """Buffers of a model that belong to its state."""
    state = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in state}


def _listing(
    directory: Path, on_progress: Callable[[], None], described: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, list[int]]:
    """Sizes and CRC-32 of all files but those that are described already."""
    listed: dict[str, list[int]] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and path.name != FILES):
        if str(path.relative_to(directory)) not in described:
            listed.update(listing(directory, [path]))
        on_progress()
    return listed


def latest(root: Path, torn: dict[Path, str] | None = None) -> Checkpoint | None:
    """The newest whole checkpoint, or None. A torn one is passed over, with a warning; `torn` gets it and its fault."""
    for path in checkpoints_of(root):
        fault = fault_of(path)
        if fault is None:
            return Checkpoint(path, step_of(path), json.loads((path / META).read_text()))
        log.warning("%s: torn checkpoint, passed over: %s", path, fault)
        if torn is not None:
            torn[path] = fault
    return None


def fault_of(path: Path, inside: str = "") -> str | None:
    """Describe what is wrong with the checkpoint at `path`; None if it is sound. `inside`: a folder of it, whose files
    alone are read."""
    try:
        every: dict[str, list[int]] = json.loads((path / FILES).read_text())
        listed = {name: described for name, described in every.items() if name.startswith(inside)}
        if inside and not listed:
            return f"{FILES} lists nothing of {inside}"
        if (fault := fault_in(path, listed)) is not None:
            return fault
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{FILES} cannot be read: {error}"
    if inside:
        return None
    needed = (META, RANDOM, f"{FOLDER}/{REST}" if is_sharded(path) else OPTIMIZER)
    return next((f"{name} is not listed" for name in needed if name not in listed), None)
