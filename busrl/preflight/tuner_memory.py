"""The need of a service: memory of its tuner and engines, and where all weights are trained disk for what is kept.

From config.json alone, by the sum of `memory`. Talks to the machine's own figures. Knows nothing of a service's
processes but their devices.

- A state has weights and moments in float32; two are kept, and one more is there while it is written.
- A snapshot is the model in the engine's number type: the newest, and one that is being written.
- Adapters are counted as if all were of the highest rank and of all parts; `tinker.resident_mb` bounds them together.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from busrl.data import pretrained
from busrl.data.vocabulary import language_of
from busrl.errors import DiskFull, UserError
from busrl.preflight.memory import Widths, Work, learner_sum, memory_of
from busrl.system import device
from busrl.topology.schema import Topology

STATE_BYTES = 12  # of a parameter in a state
STATES, SNAPSHOTS = 3, 2  # on the disk at the same time, at least
GIB = 1 << 30
ADAPTER_BYTES = 16  # of a number of an adapter: it, its gradient and two moments
OTHERS = "other adapters at most (tinker.resident_mb)"  # any number of them may wait on the disk
LOWER = "a lower tinker.max_rank"


def work_of(t: Topology) -> Work:
    """The most that the tuner does at a time, with an adapter of the highest rank where it trains adapters."""
    kind, rank = device.expected(t.device_of("tuner")), 0 if is_full(t) else t.tinker.max_rank
    tokens = max(t.tinker.turn_tokens, t.tinker.context)
    return Work(tokens=tokens, dtype=t.model.dtype, kind=kind, lora_rank=rank)


def is_full(t: Topology) -> bool:
    """True if all weights are trained, of one model at a time."""
    return t.tinker.weights == "full"


def of_tuner(t: Topology, work: Work) -> dict[str, int]:
    """Bytes by what they are for, with those of engines that share the memory; empty if config.json does not say."""
    folder = pretrained.model_at(t.model.path)
    config = pretrained.read_config(folder) if folder else {}
    text = language_of(config)
    sizes = pretrained.size_in(text, "hidden_size", "n_embd", "d_model"), pretrained.size_in(text, *pretrained.LAYERS)
    if not all(sizes):
        return {}
    widths = Widths.of(config, _parameters(t))
    parts = learner_sum(config, work, widths.parameters)
    if not is_full(t):
        parts = _with_adapters(parts, t, widths, work)
    if work.kind == "cpu":
        engines = sum(entry.count for entry in t.process if entry.role == "rollout" and entry.engine == "torch")
        parts |= {"weights of the engines": engines * _snapshot(t)}
    return {name: size for name, size in parts.items() if size}


def _with_adapters(parts: dict[str, int], t: Topology, widths: Widths, work: Work) -> dict[str, int]:
    """The sum with one adapter in training, with the base beside as many adapters as may be in memory."""
    of_one = ("gradient", f"optimiser ({work.optimizer})")
    others = {name: size for name, size in parts.items() if name not in of_one}
    one, settings = _adapter(widths, work), t.tinker
    most = one * (settings.models + sum(key.models for key in settings.key))
    further = max(0, min(settings.resident_mb << 20, most) - one)
    return {**others, "weights": widths.parameters * work.width, "an adapter": one, OTHERS: further}


def _adapter(widths: Widths, work: Work) -> int:
    """Bytes of an adapter of all parts of the model: numbers, gradients and moments."""
    head = 0 if widths.tied else widths.hidden + widths.words
    return ADAPTER_BYTES * work.lora_rank * (widths.layers * widths.adapted(()) + head)


def _parameters(t: Topology) -> int:
    folder = pretrained.model_at(t.model.path)
    return pretrained.parameters(str(folder)) if folder else 0


def _snapshot(t: Topology) -> int:
    """Bytes of the model in the number type of engines."""
    return _parameters(t) * pretrained.BYTES_OF[t.model.dtype]


def on_disk(t: Topology) -> int:
    """The least bytes of the run directory's file system that states and snapshots take."""
    return STATES * STATE_BYTES * _parameters(t) + SNAPSHOTS * _snapshot(t)


def lines(t: Topology) -> list[str]:
    """Lines of `busrl check`."""
    work, what = work_of(t), "all weights" if is_full(t) else f"adapters of rank {t.tinker.max_rank}"
    parts, limit = of_tuner(t, work), memory_of(work.kind)
    if not parts:
        return [f"tuner memory, {what}: unknown, config.json does not say how large the model is"]
    of = f" of {_gib(limit)}" if limit else f"; how much this machine's {work.kind} has is not known here"
    needed = sum(parts.values())
    told = [
        f"tuner memory, {what} ({work.kind}): {_gib(needed)}{of}, {work.tokens} tokens at a time",
        f"  {_each(parts, ', ')}",
        f"  each engine: one copy of the weights, {_gib(_snapshot(t))}, and its cache",
    ]
    if 0 < limit < needed and (room := limit - needed + parts.get(OTHERS, 0)) > 0:
        told.append(f"  more than there is where so many are in use: set tinker.resident_mb = {room >> 20} or less")
    if is_full(t):
        told.append(f"  disk: {_gib(on_disk(t))} at least, for {STATES} states and {SNAPSHOTS} snapshots")
    return told


def require(t: Topology, run_dir: Path) -> None:
    """UserError if the memory cannot hold it, DiskFull if the file system of the run directory cannot."""
    work = work_of(t)
    parts, limit = of_tuner(t, work), memory_of(work.kind)
    if limit and (needed := _least(t, work)) > limit:
        parts.pop(OTHERS, None)
        raise UserError(
            f'tinker.weights = "{t.tinker.weights}" needs about {_gib(needed)} of memory, the {work.kind} of the tuner '
            f"has {_gib(limit)}: {_each(parts, ' + ')}; {_remedies(t, work)}")
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if is_full(t) and (free := shutil.disk_usage(place).free) < on_disk(t):
        raise DiskFull(f"{place} has {_gib(free)} free, and {STATES} states and {SNAPSHOTS} snapshots of all weights "
                       f"take {_gib(on_disk(t))}; free some, or choose another --run-dir")


def _remedies(t: Topology, work: Work) -> str:
    """Settings that lower the sum, with what each would leave."""
    few = max(t.tinker.context, 256)
    offered = {'model.dtype = "bfloat16"': replace(work, dtype="bfloat16")} if work.dtype == "float32" else {}
    if few < work.tokens:
        offered[f"tinker.turn_tokens = {few}"] = replace(work, tokens=few)
    texts = [f"{text} (then {_gib(_least(t, other))})" for text, other in offered.items()]
    return "set " + ", or ".join([*texts, 'tinker.weights = "adapters"' if is_full(t) else LOWER])


def _least(t: Topology, work: Work) -> int:
    """Bytes without the adapters that may wait on the disk."""
    return sum(size for name, size in of_tuner(t, work).items() if name != OTHERS)


def _each(parts: Mapping[str, int], between: str) -> str:
    return between.join(f"{name} {_gib(size)}" for name, size in parts.items())


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
