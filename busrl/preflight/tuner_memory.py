"""The need of a service that trains all weights: memory of its tuner and engines, and disk for states and snapshots.

From config.json alone, by the sum of `memory`. Talks to the machine's own figures. Knows nothing of a service's
processes but their devices.

- A state has weights and moments in float32; two are kept, and one more is there while it is written.
- A snapshot is the model in the engine's number type: the newest, and one that is being written.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from busrl.data import pretrained
from busrl.data.vocabulary import language_of
from busrl.errors import DiskFull, UserError
from busrl.preflight.memory import Work, learner_sum, memory_of
from busrl.states import TINY
from busrl.system import device
from busrl.topology.schema import Topology

STATE_BYTES = 12  # of a parameter in a state
STATES, SNAPSHOTS = 3, 2  # on the disk at the same time, at least
GIB = 1 << 30


def asked(t: Topology) -> bool:
    """True if a service of this topology trains all weights."""
    return t.tinker.weights == "full" and any(entry.role == "tinker" for entry in t.process)


def work_of(t: Topology) -> Work:
    """The most that the tuner does at a time."""
    kind = device.expected(t.device_of("tuner"))
    return Work(tokens=max(t.tinker.turn_tokens, t.tinker.context), dtype=t.model.dtype, kind=kind)


def of_tuner(t: Topology, work: Work) -> dict[str, int]:
    """Bytes by what they are for, with those of engines that share the memory; empty if config.json does not say."""
    folder = pretrained.model_at(t.model.path)
    config = pretrained.read_config(folder) if folder else {}
    text = language_of(config)
    widths = pretrained.size_in(text, "hidden_size", "n_embd", "d_model"), pretrained.size_in(text, *pretrained.LAYERS)
    if not all(widths):
        return {}
    parts = learner_sum(config, work, _parameters(t))
    if work.kind == "cpu":
        engines = sum(entry.count for entry in t.process if entry.role == "rollout" and entry.engine == "torch")
        parts |= {"weights of the engines": engines * _snapshot(t)}
    return {name: size for name, size in parts.items() if size}


def _parameters(t: Topology) -> int:
    return 0 if t.model.path.startswith(TINY) else pretrained.parameters(t.model.path)


def _snapshot(t: Topology) -> int:
    """Bytes of the model in the number type of engines."""
    return _parameters(t) * pretrained.BYTES_OF[t.model.dtype]


def on_disk(t: Topology) -> int:
    """The least bytes of the run directory's file system that states and snapshots take."""
    return STATES * STATE_BYTES * _parameters(t) + SNAPSHOTS * _snapshot(t)


def lines(t: Topology) -> list[str]:
    """Lines of `busrl check`."""
    work = work_of(t)
    parts, limit = of_tuner(t, work), memory_of(work.kind)
    if not parts:
        return ["tuner memory, all weights: unknown, config.json does not say how large the model is"]
    of = f" of {_gib(limit)}" if limit else f"; how much this machine's {work.kind} has is not known here"
    return [
        f"tuner memory, all weights ({work.kind}): {_gib(sum(parts.values()))}{of}, {work.tokens} tokens at a time",
        f"  {_each(parts, ', ')}",
        f"  each engine: one copy of the weights, {_gib(_snapshot(t))}, and its cache",
        f"  disk: {_gib(on_disk(t))} at least, for {STATES} states and {SNAPSHOTS} snapshots",
    ]


def require(t: Topology, run_dir: Path) -> None:
    """UserError if the memory cannot hold it, DiskFull if the file system of the run directory cannot."""
    work = work_of(t)
    parts, limit = of_tuner(t, work), memory_of(work.kind)
    needed = sum(parts.values())
    if limit and needed > limit:
        raise UserError(
            f"tinker.weights = \"full\" needs about {_gib(needed)} of memory, the {work.kind} of the tuner has "
            f"{_gib(limit)}: {_each(parts, ' + ')}; {_remedies(t, work)}")
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(place).free) < on_disk(t):
        raise DiskFull(f"{place} has {_gib(free)} free, and {STATES} states and {SNAPSHOTS} snapshots of all weights "
                       f"take {_gib(on_disk(t))}; free some, or choose another --run-dir")


def _remedies(t: Topology, work: Work) -> str:
    """Settings that lower the sum, with what each would leave."""
    few = max(t.tinker.context, 256)
    offered = {'model.dtype = "bfloat16"': replace(work, dtype="bfloat16")} if work.dtype == "float32" else {}
    if few < work.tokens:
        offered[f"tinker.turn_tokens = {few}"] = replace(work, tokens=few)
    texts = [f"{text} (then {_gib(sum(of_tuner(t, other).values()))})" for text, other in offered.items()]
    return "set " + ", or ".join([*texts, 'tinker.weights = "adapters"'])


def _each(parts: Mapping[str, int], between: str) -> str:
    return between.join(f"{name} {_gib(size)}" for name, size in parts.items())


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
