"""What `busrl check` can tell about this machine and about files in depth: shared memory, cores, weights, tokens.

Reads file headers and asks the operating system; loads neither torch nor a model. Token counts need the `tokenizers`
package and are left out without it. Knows nothing of how a report looks.

Rules between the keys that say where models run: `model.device`, and `device` and `devices` of a process, and what
shares or sends weights between devices: `cuda_ipc`, and a broadcast by NCCL or HCCL.

Used by `resolve`. Pure: what the machine really has is seen when a process starts, by the other half of `busrl.device`,
of which only the table of kinds is used here.

Which cores of the machine the processes of a run may use: `cpus` of a [[process]] entry.

Used by the rules, by `busrl check` and by launch, which binds what it starts. Pure but for the cores that this machine
has, which the caller looks up.

- A process whose entry names cores runs on those. All others share the cores that no entry names, or all if none is
  left. Where no entry names any, nobody is bound.

What published versions cost: bytes of one, how many exist at most, and where they lie.

Reads the headers of the model's safetensors, so that `busrl check` knows before anything starts. Used by `check.py` and
by the weight plane, which keeps as many versions as are counted here. Knows nothing of how they are written.

- Sizes are 0 where the model folder does not tell them (weights that are no safetensors, a tiny model not yet made).

Which learning rates are usual, by the size of the model and what is trained of it: advice, and a warning by number.

Reads config.json and the headers of the weights; loads neither torch nor a model. The numbers are starting points from
published runs of policy gradients with AdamW (1e-6 for all weights of models of some billion parameters, ten times that
for a low-rank adapter), and busrl's own measurements for the quickstart. Knows nothing of schedules.

- Only a rate far above what is usual is warned of: FAR times the middle, for models that anybody would call one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.config import machinery
from busrl.config.rules import ADAPTERS, ENGINES, FOLDERS, Finding, rollouts
from busrl.config.schema import RESTARTS, TINY, Process, Topology
from busrl.device import BACKEND
from busrl.errors import DiskFull, UserError

if TYPE_CHECKING:
    from busrl.config.schema import Process, Topology



# -- What `busrl check` can tell about this machine and about files in depth: shared memory, cores, weights, tokens ---


SHM = "/dev/shm"
SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
BYTES_OF = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """What a model folder says about itself; `parameters` is 0 where the weights are no safetensors."""

    kind: str
    hidden: int
    layers: int
    vocabulary: int
    context: int
    parameters: int


def shm_free() -> int:
    """Free bytes of /dev/shm, 0 where there is none."""
    try:
        return shutil.disk_usage(SHM).free
    except OSError:
        return 0


def cores() -> frozenset[int]:
    """Cores that this process may use."""
    return frozenset(os.sched_getaffinity(0))


def model_facts(folder: Path, context: int) -> ModelFacts:
    """Read config.json and the headers of the weights."""
    config = read_config(folder)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    kinds = config.get("architectures") or [config.get("model_type", "unknown")]
    return ModelFacts(
        kind=str(kinds[0]),
        hidden=whole(text, "hidden_size", "n_embd", "d_model"),
        layers=whole(text, *LAYERS),
        vocabulary=whole(text, "vocab_size"),
        context=context,
        parameters=sum(elements(shape) for shape in tensor_shapes(folder).values()),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, empty where it can not be read."""
    return _read(folder / "config.json")


def read_list(path: Path) -> list[Any]:
    """A JSON list, empty where it can not be read."""
    found = _json(path)
    return found if isinstance(found, list) else []


def _read(path: Path) -> dict[str, Any]:
    found = _json(path)
    return found if isinstance(found, dict) else {}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a model: those that end a sequence, and those that mean text (no special ones)."""

    eos: int
    plain: tuple[int, ...]


def vocabulary(folder: Path) -> Vocabulary | None:
    """From config.json and generation_config.json; None where they do not say how many ids there are, and the end."""
    parts = _parts(folder)
    ends = [end for part in parts for end in _ids(part.get("eos_token_id"))]
    special = {i for part in parts for name in SPECIAL for i in _ids(part.get(name))}
    size = vocabulary_size(folder)
    plain = tuple(i for i in range(size) if i not in special)
    return Vocabulary(ends[0], plain) if ends and ends[0] < size and plain else None


def end_ids(folder: Path) -> frozenset[int]:
    """Every id that config.json or generation_config.json says ends a sequence."""
    return frozenset(end for part in _parts(folder) for end in _ids(part.get("eos_token_id")))


def vocabulary_size(folder: Path) -> int:
    """How many token ids the model has by its config.json; 0 if it does not say."""
    return next((part["vocab_size"] for part in _parts(folder) if isinstance(part.get("vocab_size"), int)), 0)


def _parts(folder: Path) -> list[dict[str, Any]]:
    """The places of a model folder that name token ids."""
    config = read_config(folder)
    nested = config.get("text_config")
    return [config, nested if isinstance(nested, dict) else {}, _read(folder / "generation_config.json")]


def _ids(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [i for i in found if isinstance(i, int) and i >= 0]


def whole(config: Any, *names: str) -> int:
    """The first of these keys that holds a whole number; 0 if none does."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the safetensors of a folder, by name; empty where there are none to be read."""
    return {name: shape for path in sorted(folder.glob("*.safetensors")) for name, shape in _shapes(path)}


def _shapes(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """The header of a safetensors file is a length of 8 bytes and a JSON map."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= 100 << 20 else {}
    except (OSError, ValueError, struct.error):
        return []
    entries = header.items() if isinstance(header, dict) else ()
    return [(name, tuple(entry["shape"])) for name, entry in entries if isinstance(entry, dict) and "shape" in entry]


def elements(shape: tuple[int, ...]) -> int:
    """How many numbers a tensor of that shape has."""
    total = 1
    for size in shape:
        total *= size
    return total


# -- Rules between the keys that say where models run: `model.device`, and `device` and `devices` of a process, ... ---


BETWEEN = {backend: kind for kind, backend in BACKEND.items() if kind != "cpu"}  # what a broadcast connects
WITH_MODEL = ("rollout", "learner")
DEVICES = re.compile(r"(\d+|(GPU|MIG)-[0-9a-f-]+)(,(\d+|(GPU|MIG)-[0-9a-f-]+))*")


def device_findings(t: Topology) -> Iterator[Finding]:
    """What contradicts itself, in the order of the processes."""
    for index, entry in enumerate(t.process):
        yield from _entry(t, index, entry)
    if t.weights.transport == "cuda_ipc":
        yield from _one_copy(t)
    if t.weights.backend in BETWEEN:
        yield from _between_devices(t, t.weights.backend)


def _between_devices(t: Topology, backend: str) -> Iterator[Finding]:
    """weights.backend = "nccl" or "hccl": a broadcast from the learner's device to each engine's."""
    key, other = "weights.backend", 'or backend = "gloo"'
    if t.weights.transport != "broadcast":
        rule = f"{t.weights.transport} forms no groups"
        yield Finding((key, "weights.transport"), rule, 'transport = "broadcast", or remove it', warning=True)
        return
    if t.weights.sparse.enabled:
        rule = "changes are found and packed in the host's memory"
        yield Finding((key, "weights.sparse.enabled"), rule, f"enabled = false, {other}")
    if t.weights.checksum:
        rule = "a digest is made in the host's memory, which takes longer than a phase may for a large model"
        yield Finding((key, "weights.checksum"), rule, f"checksum = false, {other}")
    for index, entry in rollouts(t):
        if entry.engine == "vllm":
            rule = "vLLM is given its weights through the host's memory"
            yield Finding((f"process.{index}.engine", key), rule, f'engine = "torch", {other}')
    yield from _a_device_each(t, backend, key, other)


def _a_device_each(t: Topology, backend: str, key: str, other: str) -> Iterator[Finding]:
    """Two ranks of such a group can not be on one device."""
    kind, shown = BETWEEN[backend], dict[str, str]()
    for process in (p for p in t.processes() if _takes_part(p.spec)):
        if (device := t.device_of(process.name)) != kind:
            rule = f"{backend} connects {kind} devices, and {process.name} works on {device}"
            yield Finding((key, "model.device"), rule, f'device = "{kind}", {other}', depends=("process",))
        first = process.devices.partition(",")[0]
        if first.startswith("MIG"):
            rule = f"{process.name} works on a part of a GPU, and {backend} refuses two parts of one"
            yield Finding((key,), rule, f"whole devices, {other}", depends=("process",))
        elif not first:
            rule = f"{process.name} sees all devices and would work on the first, as others do: each needs its own"
            yield Finding((key,), rule, f'devices = ["0"] in its entry, {other}', depends=("process",))
        elif first in shown:
            rule = f"{shown[first]} and {process.name} work on device {first}: each needs its own"
            yield Finding((key,), rule, f"other devices, {other}", depends=("process",))
        shown.setdefault(first, process.name)


def _takes_part(entry: Process) -> bool:
    """Whether processes of this entry are in the group of a broadcast."""
    return not entry.command and (entry.role == "learner" or (entry.role == "rollout" and entry.engine == "torch"))


def _entry(t: Topology, index: int, entry: Process) -> Iterator[Finding]:
    at = f"process.{index}"
    if entry.device and entry.role not in WITH_MODEL:
        rule = f"a {entry.role} of busrl's own runs no model"
        yield Finding((f"{at}.device", f"{at}.role"), rule, "remove device; devices may stay, for what it loads itself")
    elif entry.device and entry.role == "rollout" and entry.engine == "mock":
        rule = "a scripted engine runs no model"
        yield Finding((f"{at}.device", f"{at}.engine"), rule, "remove device")
    for item in entry.devices:
        if not DEVICES.fullmatch(item):
            rule = f"{item!r} is no list of devices: numbers, or UUIDs as nvidia-smi -L prints them, and commas"
            yield Finding((f"{at}.devices",), rule, 'for example devices = ["0", "1"], an item per process')
    if entry.devices and (entry.device or t.model.device) == "cpu" and entry.role in WITH_MODEL:
        named = f"{at}.device" if entry.device else "model.device"
        rule = "its model runs on the CPU, so nothing is shown or hidden"
        yield Finding((f"{at}.devices", named), rule, "remove devices, or choose another device", warning=True)
    if len(entry.devices) > max(1, entry.count):
        rule = f"{len(entry.devices)} items for {entry.count} processes: each process gets one of them"
        yield Finding((f"{at}.devices", f"{at}.count"), rule, 'one process that sees both is ["0,1"]', warning=True)


def _one_copy(t: Topology) -> Iterator[Finding]:
    """weights.transport = "cuda_ipc": the learner's parameters are the engine's tensors."""
    key, other = "weights.transport", 'or transport = "shm"'
    engines = [(i, entry) for i, entry in enumerate(t.process) if entry.role == "rollout"]
    started = sum(entry.count for _, entry in engines)
    if started != 1 or any(entry.command for _, entry in engines):
        rule = f"one engine on this host owns the weights that the learner trains, and {started} are started here"
        yield Finding((key,), rule, f"one rollout process of busrl's own, {other}", depends=("process",))
    yield from _one_copy_engine(t, key, other)
    here, there = t.device_of("learner"), t.device_of("rollout/0")
    if here != there:
        rule = f"one copy is on one device: the learner works on {here}, the engine on {there}"
        yield Finding((key, "model.device"), rule, f"give both the same device, {other}", depends=("process",))
    if here == "npu":
        rule = "memory of an NPU is not shared between processes here"
        yield Finding((key, "model.device"), rule, 'transport = "broadcast"')
    shown = {p.devices for p in t.processes() if p.role in WITH_MODEL}
    if len(shown) > 1:
        rule = f"engine and learner see other devices ({' and '.join(sorted(map(repr, shown)))})"
        yield Finding((key,), rule, f"the same devices in both entries, {other}", depends=("process",))
    yield from _one_copy_learner(t, key, other)


def _one_copy_engine(t: Topology, key: str, other: str) -> Iterator[Finding]:
    fit = ENGINES["cuda_ipc"]
    for index, entry in rollouts(t):
        at = f"process.{index}.engine"
        if entry.engine not in fit:
            rule = f"it has no tensors that a learner could train; those of {' and '.join(fit)} can be shared"
            yield Finding((at, key), rule, f"engine = one of {', '.join(fit)}, or another transport")
        elif entry.engine == "vllm" and t.vllm.tensor_parallel > 1:
            rule = "each device has a part of every tensor, and the learner trains whole ones"
            yield Finding((key, "vllm.tensor_parallel", at), rule, f"tensor_parallel = 1, {other}")


def _one_copy_learner(t: Topology, key: str, other: str) -> Iterator[Finding]:
    learner = t.learner
    if learner.publish_every > 1:
        rule = "the engine has the weights of every step at once: there are none that wait to be published"
        yield Finding((key, "learner.publish_every"), rule, f"publish_every = 1, {other}")
    if t.experiments.forced_age:
        rule = "the engine has the newest weights at once, and older ones are nowhere"
        yield Finding((key, "experiments.forced_age"), rule, f"forced_age = 0, {other}")
    if learner.updates_per_batch > 1:
        rule = "the engine would see the weights between two updates of one step"
        yield Finding((key, "learner.updates_per_batch"), rule, f"updates_per_batch = 1, {other}")
    if t.lora.on:
        rule = "an adapter is small: the base is the engine's alone, and there is nothing to share"
        yield Finding((key, "lora.rank"), rule, 'transport = "lora_hotswap", or rank = 0')
    if t.model.dtype != "float32":
        rule = f"the learner keeps float32 weights of its own and copies them into the engine's {t.model.dtype} ones"
        yield Finding((key, "model.dtype"), rule, "float32 for a single copy", warning=True)


# -- Which cores of the machine the processes of a run may use: `cpus` of a [[process]] entry -------------------------


LIST = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def parse_cores(text: str) -> frozenset[int]:
    """ "0-2,7" is {0, 1, 2, 7}; ValueError for anything else."""
    if not LIST.fullmatch(text):
        raise ValueError(f"{text!r} is no list of cores")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"{part!r} ends before it begins")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def core_findings(t: Topology) -> Iterator[Finding]:
    """Entries that can not be meant as they stand."""
    for index, entry in enumerate(t.process):
        if not entry.cpus:
            continue
        at = f"process.{index}"
        try:
            named = parse_cores(entry.cpus)
        except ValueError as problem:
            yield Finding((f"{at}.cpus",), str(problem), 'numbers and ranges with commas, for example "0-2,7"')
            continue
        if len(named) < entry.threads * max(1, entry.count):
            rule = f"{entry.count} x {entry.threads} threads share {len(named)} cores"
            yield Finding((f"{at}.cpus", f"{at}.threads"), rule, "more cores, or fewer threads", warning=True)


def cores_of(t: Topology, entry: Process, here: frozenset[int]) -> frozenset[int]:
    """The cores for processes of that entry, out of those that this machine gives us; empty: they are not bound."""
    if entry.cpus:
        return parse_cores(entry.cpus)
    return here - named if (named := _named_cores(t)) else named


def require_cores(t: Topology, here: frozenset[int]) -> None:
    """UserError if an entry names cores that are not there."""
    for index, entry in enumerate(t.process):
        if entry.cpus and (missing := sorted(parse_cores(entry.cpus) - here)):
            raise UserError(
                f'process.{index}.cpus = "{entry.cpus}": core {missing[0]} is not there, or not for this process, '
                f"which may use {sorted(here)}; name others, or remove cpus"
            )


def _named_cores(t: Topology) -> frozenset[int]:
    return frozenset().union(*(parse_cores(entry.cpus) for entry in t.process if entry.cpus))


# -- What published versions cost: bytes of one, how many exist at most, and where they lie ---------------------------


Shapes = Mapping[str, tuple[int, ...]]
ADAPTER_BYTES = 4  # an adapter is float32 whatever the model is
UNBOUNDED = 8  # versions of an adapter that vLLM may be asked for where nothing bounds their age
SMALL_FILES = 16 << 10  # configuration and stamp of an adapter
HEADS = ("lm_head", "embed_out", "output", "score")


@dataclass(frozen=True)
class Cost:
    """Folders of versions: bytes of one, how many the learner keeps, and how many there may be at the same time."""

    version: int
    kept: int
    most: int

    @property
    def total(self) -> int:
        return self.version * self.most


def kept_versions(t: Topology) -> int:
    """Versions that stay in the place of publication. An adapter may be asked for as long as a sample of it counts."""
    if t.weights.transport == "lora_hotswap" and t.weights.mode == "batch-async":
        return max(2, t.weights.max_staleness + 1)
    return 2  # the newest, and the one that an engine may be reading


def adapter_slots(t: Topology) -> int:
    """Adapters that one vLLM holds at a time: those that its running answers may be of, and the newest."""
    if t.weights.mode == "sync" or t.weights.transport in RESTARTS:
        return 2
    return (t.weights.max_staleness if t.weights.mode == "batch-async" else UNBOUNDED) + 2


def held_versions(t: Topology) -> int:
    """Versions that one engine holds on to: those that its running sequences may be of."""
    if t.weights.transport in ADAPTERS and machinery.vllm_entries(t):
        return adapter_slots(t)  # it reads an adapter from its folder as long as it has a place for it
    return 1 if t.weights.transport in RESTARTS else kept_versions(t)


def weight_cost(t: Topology, model: Path | None) -> Cost | None:
    """None for a transport that publishes no folders."""
    if t.weights.transport not in FOLDERS:
        return None
    shapes = tensor_shapes(model) if model is not None else {}
    if t.weights.transport in ADAPTERS:
        parts = adapted(shapes, t.lora.targets)
        size = sum(ADAPTER_BYTES * t.lora.rank * (rows + columns) for rows, columns in parts) if parts else 0
        size += SMALL_FILES if size else 0
    else:
        size = sum(elements(shape) for shape in shapes.values()) * BYTES_OF[t.model.dtype]
    kept, engines = kept_versions(t), sum(entry.count for _, entry in rollouts(t))
    return Cost(size, kept, kept + 1 + engines * held_versions(t))


def broadcast_copies(t: Topology) -> list[tuple[str, float]]:
    """Who holds how many times the size of all values in a broadcast: the learner the version that it sends and the
    one that comes next (and frames of changes), an engine the version that it has and the one that arrives."""
    sparse = t.weights.sparse.enabled
    found = [("learner, two blocks" + (" and frames of changes" if sparse else ""), 2.5 if sparse else 2.0)]
    if any(entry.engine != "vllm" for _, entry in rollouts(t)):
        found.append(("each engine, front and back", 2.0))
    if machinery.vllm_entries(t):
        found.append(("each worker of vLLM, front, back and staging", 3.0))
    return found


def adapted(shapes: Shapes, targets: tuple[str, ...]) -> list[tuple[int, int]]:
    """Shapes of the weights that get an adapter, as far as names and shapes tell."""
    found = []
    for name, shape in shapes.items():
        *_, layer, kind = ("", *name.split("."))
        if kind == "weight" and len(shape) == 2 and (layer in targets if targets else not _outer(layer)):
            found.append((shape[0], shape[1]))
    return found


def weight_layers(shapes: Shapes) -> set[str]:
    """Last names of the layers that may get an adapter, as far as names and shapes tell: matrices, no embeddings."""
    matrices = {name.split(".")[-2] for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")}
    return {name for name in matrices if name in HEADS or not _outer(name)}


def require_disk(t: Topology, model: Path | None, run_dir: Path) -> None:
    """DiskFull with the sum, if the versions that checkpoint_restart writes into the run directory do not fit."""
    found = weight_cost(t, model)
    if found is None or t.weights.transport in ADAPTERS:
        return
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if found.total > free:
        raise DiskFull(
            f"{place} has {free >> 20} MiB free, {t.weights.transport} needs {found.most} versions of "
            f"{found.version >> 20} MiB = {found.total >> 20} MiB there; free some, choose another --run-dir, or "
            'weights.transport = "shm"'
        )


def _outer(layer: str) -> bool:
    """Embeddings and output heads, which get no adapter unless they are named."""
    return layer in HEADS or "embed" in layer or layer in ("wte", "wpe")


# -- Which learning rates are usual, by the size of the model and what is trained of it: advice, and a warning ... ----


USUAL = ((1e6, 2e-4), (1e7, 5e-5), (1e8, 2e-5), (1e9, 3e-6), (1e10, 1e-6))  # fewer parameters than: middle, all weights
LARGEST = 5e-7
LORA = 10.0  # an adapter's middle is so many times that of all weights
FAR = 20.0
WARNED_FROM = 1e8  # parameters; smaller models are toys, whose owners know what they do
TINY_PARAMETERS = 100_000


def usual_rate(size: int, lora: bool) -> float:
    """A learning rate to begin with; a third of it and three times that are usual as well."""
    return next((rate for below, rate in USUAL if size < below), LARGEST) * (LORA if lora else 1)


def parameters(t: Topology) -> int:
    """How many the model has: from its weights, or else from the widths of config.json; 0 where neither says."""
    if t.model.path.startswith(TINY):
        return TINY_PARAMETERS
    folder = Path(t.model.path)
    counted = sum(elements(shape) for shape in tensor_shapes(folder).values())
    return max(counted, estimate(read_config(folder)))  # of a folder whose weights are elsewhere, or a part


def estimate(config: dict[str, Any]) -> int:
    """A decoder's parameters from its widths: embeddings, attention and a gated feed-forward of each layer."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    width, layers = whole(text, "hidden_size", "n_embd", "d_model"), whole(text, *LAYERS)
    inner = whole(text, "intermediate_size", "n_inner", "d_ff") or 4 * width
    heads, shared = whole(text, "num_attention_heads", "n_head"), whole(text, "num_key_value_heads")
    attention = 2 * width * width * (1 + (shared / heads if heads and shared else 1))
    feed = (3 if "intermediate_size" in text else 2) * width * inner
    embeddings = whole(text, "vocab_size") * width * (1 if config.get("tie_word_embeddings", True) else 2)
    return int(embeddings + layers * (attention + feed))


def rate_advice(t: Topology) -> str:
    """What to set learner.lr to, in words."""
    size, what = parameters(t), "a LoRA adapter of" if t.lora.on else "all weights of"
    if not size:
        return "usual are 1e-06 for all weights of a model of some billion parameters, 1e-05 for a LoRA adapter"
    middle = usual_rate(size, t.lora.on)
    return f"for {what} {shown_size(size)} parameters {middle:.0e} is usual, from a third of it to three times that"


def shown_size(size: int) -> str:
    """A count of parameters as people write it."""
    return f"{size / 1e9:.1f} B" if size >= 1e9 else f"{size / 1e6:.0f} M" if size >= 1e7 else f"{size / 1e6:.1f} M"


def rate_findings(t: Topology) -> Iterator[Finding]:
    """A learning rate that destroys a model of this size within a few steps."""
    lr, size = t.learner.lr, parameters(t)
    if lr is None or size < WARNED_FROM:
        return
    middle = usual_rate(size, t.lora.on)
    if lr > FAR * middle:
        what = "a LoRA adapter" if t.lora.on else "all weights"
        rule = f"{lr / middle:.0f} times what is usual for {what} of {shown_size(size)} parameters"
        remedy = f"{rate_advice(t)}; a policy that has collapsed does not come back"
        yield Finding(("learner.lr",), rule, remedy, warning=True, depends=("model.path", "lora.rank"))
