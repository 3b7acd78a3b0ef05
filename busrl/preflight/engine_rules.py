"""Rules about what generates, and how it gets weights: transports, adapters, endpoints, vLLM, devices of a broadcast.

A new transport adds a function to CHECKS, or rows to the tables. Reads the metadata of installed packages and never
imports vLLM, which takes seconds. docs/weights.md and docs/vllm.md have the tables for readers.

- A combination that cannot work is refused here, before anything starts; a transport or an engine may rely on it.
- `engines.vllm_versions` has the versions of vLLM that busrl was tried with; others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from busrl.algorithms import trained_parameters
from busrl.engines import vllm_versions
from busrl.engines.vllm_versions import ASCEND, CPU_BLOCK, LORA_RANKS, version_of
from busrl.preflight.findings import Check, Clash, EntryClash, Finding, clashes, entry_clashes, is_url, unlike
from busrl.system.device import BACKEND
from busrl.topology import schema
from busrl.topology.kinds import ADAPTERS, FOLDERS, ONE_COPY, RESTARTS, TRANSPORTS
from busrl.topology.schema import Process, Topology
from busrl.topology.sizes import rollouts, vllm_entries

# -- weight transports -----

SPARSE = tuple(name for name, kind in TRANSPORTS.items() if kind.changes)
OURS = tuple(dict.fromkeys(engine for kind in TRANSPORTS.values() for engine in kind.engines))


def _read_with_lora(name: str) -> Clash:
    return Clash((f"lora.{name}", "lora.rank"), lambda t: getattr(t.lora, name) and t.lora.rank == 0,
                 "LoRA is off: all weights are trained; set lora.rank, or remove it", warning=True)


def _read_if_sparse(key: str, changed: Callable[[Topology], bool]) -> Clash:
    return Clash((key, "weights.sparse.enabled"), lambda t: changed(t) and not t.weights.sparse.enabled,
                 "sparse updates are off; enabled = true, or remove it", warning=True)


def _read_if_restarted(key: str, changed: Callable[[Topology], bool], remedy: str) -> Clash:
    return Clash((key, "weights.transport"), lambda t: changed(t) and t.weights.transport not in RESTARTS,
                 lambda t: f"{t.weights.transport} restarts no engine; {remedy}", warning=True)


def _never_with_one_copy(key: str, changed: Callable[[Topology], object], text: str) -> Clash:
    return Clash(("weights.transport", key), lambda t: t.weights.transport == ONE_COPY and changed(t), text)


def _read_by_chats(name: str, lacks: str, otherwise: str = "remove it") -> Clash:
    return Clash((f"data.{name}", "data.template"), lambda t: getattr(t.data, name) and t.data.template != "chat",
                 f'a prompt as plain text has no {lacks}; template = "chat", or {otherwise}')


TABLE = (
    # -- adapters
    Clash(("weights.transport", "lora.rank"), lambda t: t.weights.transport in ADAPTERS and t.lora.rank == 0,
          'its versions are LoRA adapters, and none is trained; set lora.rank, for example 8, or transport = "shm"'),
    *(_read_with_lora(name) for name in ("alpha", "targets", "dropout", "layers", "experts")),
    Clash(("lora.experts", "lora.dropout"), lambda t: t.lora.experts and t.lora.dropout and t.lora.rank,
          "an adapter of experts has no dropout; set dropout = 0, or experts = false"),
    Clash(("lora.experts", "process"), lambda t: t.lora.experts and t.lora.rank and t.ranks > 1,
          "several ranks cannot adapt experts, which they have in parts; ranks = 1, or experts = false"),
    Clash(("learner.train_layers", "lora.rank"), lambda t: t.learner.train_layers and t.lora.rank,
          "an adapter is all that is trained: the base is frozen; lora.targets says where it is, or lora.rank = 0"),
    Clash(("lora.dropout",), lambda t: t.lora.dropout and t.lora.rank,
          "two forwards differ, so even the ratio of a fresh sample is not 1; 0 for policy gradients",
          hidden=("lora.rank",), warning=True),
    Clash(("lora.dropout", "learner.deterministic"),
          lambda t: t.lora.dropout and t.learner.deterministic and t.lora.rank,
          "dropout differs in a step that is trained again after a crash; dropout = 0, or deterministic = false",
          hidden=("lora.rank",)),
    Clash(("lora.dropout", "learner.parallel.tensor"),
          lambda t: t.lora.dropout and t.learner.parallel.tensor > 1 and t.lora.rank and t.ranks > 1,
          "ranks that compute a layer together would each drop other values; set one of them to its default",
          hidden=("lora.rank",)),
    # -- keys that a transport does not read: what they promise does not happen
    _read_if_restarted("weights.restart_every", lambda t: t.weights.restart_every != 1, "use learner.publish_every"),
    _read_if_restarted("weights.on_restart", lambda t: t.weights.on_restart != "continue", "remove it"),
    Clash(("weights.sparse.enabled", "weights.transport"),
          lambda t: t.weights.sparse.enabled and t.weights.transport not in SPARSE,
          lambda t: (
              f"{t.weights.transport} cannot send changed values alone; remove it, or "
              f"transport = one of {', '.join(SPARSE)}"
          ), warning=True),
    *(_read_if_sparse(key, changed) for key, changed in unlike("weights.sparse", schema.Sparse)),
    Clash(("weights.checksum", "weights.transport"), lambda t: t.weights.checksum and t.weights.transport in FOLDERS,
          lambda t: f"{t.weights.transport} always checks the CRC-32 of each file; remove it", warning=True),
    Clash(("weights.checksum", "weights.transport"), lambda t: t.weights.checksum and t.weights.transport == ONE_COPY,
          lambda t: f"{t.weights.transport} sends nothing: there are no bytes to check; remove it", warning=True),
    Clash(("weights.bucket_mb", "weights.transport"),
          lambda t: t.weights.bucket_mb != 16 and t.weights.transport != "broadcast",
          lambda t: f'{t.weights.transport} sends nothing in pieces; transport = "broadcast", or remove it',
          warning=True),
    # -- the learner's parameters are the engine's tensors
    _never_with_one_copy(
        "learner.publish_every", lambda t: t.learner.publish_every > 1,
        'the engine has the weights of every step at once; publish_every = 1, or transport = "shm"',
    ),
    _never_with_one_copy(
        "experiments.forced_age", lambda t: t.experiments.forced_age,
        'the engine has the newest weights at once, and no older ones; forced_age = 0, or transport = "shm"',
    ),
    _never_with_one_copy(
        "learner.updates_per_batch", lambda t: t.learner.updates_per_batch > 1,
        'the engine would see weights between two updates of a step; updates_per_batch = 1, or transport = "shm"',
    ),
    _never_with_one_copy(
        "lora.rank", lambda t: t.lora.rank,
        'with an adapter there is nothing to share; transport = "lora_hotswap", or rank = 0',
    ),
    # -- a broadcast from the learner's device to each engine's
    Clash(("weights.backend", "weights.transport"),
          lambda t: t.weights.backend != "gloo" and t.weights.transport != "broadcast",
          lambda t: f'{t.weights.transport} forms no groups; transport = "broadcast", or remove it', warning=True),
    Clash(("weights.backend", "weights.sparse.enabled"),
          lambda t: t.weights.backend != "gloo" and t.weights.sparse.enabled and t.weights.transport == "broadcast",
          "changes are found and packed in the host's memory; enabled = false, or backend = \"gloo\"",
          hidden=("weights.transport",)),
    Clash(("weights.backend", "weights.checksum"),
          lambda t: t.weights.backend != "gloo" and t.weights.checksum and t.weights.transport == "broadcast",
          'a digest is made by the host, too slowly for a large model; checksum = false, or backend = "gloo"',
          hidden=("weights.transport",)),
    # -- prompts and endpoints
    _read_by_chats("system", "place for a system message", "write it into the prompts"),
    _read_by_chats("template_arguments", "template"),
    _read_by_chats("tools_key", "place for tools"),
)
NO_EXPERTS = EntryClash(
    ("lora.experts", "weights.transport", ".engine"),
    lambda t, _: t.lora.experts and t.lora.rank and t.weights.transport in ADAPTERS,
    'it takes no adapter of experts; a transport that sends merged weights, as "shm", or experts = false',
)
OPENAI = (  # where an engine is an endpoint
    NO_EXPERTS,
    EntryClash(
        ("openai.update", "weights.mode", ".engine"),
        lambda t, _: t.openai.update == "none" and t.weights.mode != "fully-async",
        'the server keeps its first weights, too old here; update = "vllm" or "sglang", or mode = "fully-async"',
    ),
    EntryClash(("openai.update", ".engine"), lambda t, _: t.openai.update == "none" and t.weights.mode == "fully-async",
               'the server keeps its first weights, so samples get ever older; update = "vllm" or "sglang"',
               hidden=("weights.mode",), warning=True),
    EntryClash(("weights.transport", "openai.update", ".engine"),
               lambda t, _: t.weights.transport not in FOLDERS and t.openai.update != "none",
               f"the server loads versions from a folder; transport = one of {', '.join(FOLDERS)}"),
    EntryClash(("openai.tools", "openai.endpoint"), lambda t, _: t.openai.tools and t.openai.endpoint != "chat",
               'tools belong to the chat endpoint; endpoint = "chat", or remove it'),
    EntryClash(("openai.endpoint", "segments.length", ".engine"),
               lambda t, _: t.openai.endpoint == "chat" and t.segments.length != 0,
               'by chat an answer cannot continue from token ids; endpoint = "completions", or length = 0'),
    EntryClash(("weights.on_restart", "openai.endpoint", "weights.transport", ".engine"),
               lambda t, _: (
                   t.weights.on_restart != "finish" and t.openai.endpoint == "chat" and t.weights.transport in RESTARTS
                   and t.openai.update != "none"
               ),
               'by chat running answers would be lost at an update; on_restart = "finish", or endpoint = "completions"',
               hidden=("openai.update",)),
    EntryClash(
        ("openai.endpoint", "data.template", ".engine"),
        lambda t, _: t.openai.endpoint == "chat" and t.data.template != "chat",
        'the server wraps the prompt into a user turn, and training would see it without that; template = "chat"',
    ),
    EntryClash(("generation.on_update", ".engine"), lambda t, _: t.generation.on_update == "keep",
               'an answer that is cut continues from its tokens: keys are computed again; "recompute", or "auto"'),
    EntryClash(("generation.temperature", ".engine"), lambda t, _: t.generation.temperature != 1,
               "it must return log-probabilities after temperature; vLLM: --logprobs-mode processed_logprobs",
               warning=True),
)
VLLM = (  # where an engine is vLLM
    EntryClash(("vllm.max_model_len", ".engine"),
               lambda t, _: t.vllm.max_model_len < t.longest and t.vllm.max_model_len,
               lambda t, _: f"prompt and completion have {t.longest} tokens; set it to {t.longest} or more, or 0",
               hidden=("vllm.max_model_len",)),
    EntryClash(
        ("vllm.start_s", "limits.ready_s"),
        lambda t, _: t.vllm.start_s > t.limits.ready_s,
        lambda t, _: (
            f"a process not ready after limits.ready_s is killed; set limits.ready_s to {t.vllm.start_s:g} or more"
        ),
    ),
    NO_EXPERTS,
    EntryClash(("lora.rank", "weights.transport", ".engine"),
               lambda t, _: t.lora.rank > LORA_RANKS[-1] and t.weights.transport in ADAPTERS,
               'vLLM takes no adapter of a rank above 512; set lora.rank to 512 or less, or transport = "shm"'),
    EntryClash(
        ("vllm.rpc_s", "weights.timeout_s"),
        lambda t, _: t.vllm.rpc_s <= t.weights.timeout_s and t.weights.transport == ONE_COPY,
        lambda t, _: (
            f"a change of weights, one call, may take weights.timeout_s; set vllm.rpc_s above {t.weights.timeout_s:g}"
        ),
        hidden=("weights.transport",),
    ),
    EntryClash((".engine", "learner.deterministic"), lambda t, _: t.learner.deterministic,
               'sums of vLLM depend on its batches, so runs differ; engine = "torch"', warning=True),
)


# -- adapters, transports and endpoints -----


def _engines(t: Topology) -> Iterator[Finding]:
    """Refuse a transport that an engine cannot take weights from."""
    fit = TRANSPORTS[t.weights.transport].engines if t.weights.transport in TRANSPORTS else OURS
    for index, entry in rollouts(t):
        if entry.engine in OURS and entry.engine not in fit:
            others = [name for name, kind in TRANSPORTS.items() if entry.engine in kind.engines]
            rule = f"this transport gives weights to {' and '.join(fit)} only"
            keys = (f"process.{index}.engine", "weights.transport")
            yield Finding(keys, rule, f"transport = one of {', '.join(others)}")


def _lora(t: Topology) -> Iterator[Finding]:
    targets = t.lora.targets if t.lora.on else ()
    if len(set(targets)) < len(targets):
        yield Finding(("lora.targets",), "a layer is named twice", "name each once")
    for name in targets:
        if not name or "." in name:
            rule = f"{name!r} is not the last name of a layer: every layer whose name ends with it gets an adapter"
            yield Finding(("lora.targets",), rule, 'for example ["q_proj", "v_proj"]')
    try:
        if named := [item.text for item in trained_parameters.parsed(t.lora.layers) if item.first < 0]:
            yield Finding(("lora.layers",), f"{named[0]!r} is no number of a layer", "lora.targets has names")
    except ValueError as wrong:
        yield Finding(("lora.layers",), str(wrong), 'for example "20-31", or "" for all')


def _outside(t: Topology) -> Iterator[Finding]:
    if not any(entry.role == "rollout" and (entry.count == 0 or entry.command) for entry in t.process):
        return
    if t.bus.endpoint != "ipc":
        rule = "it reaches engines on the learner's host only: one that joins from another host gets no new weights"
        remedy = "let only engines with weights of their own join, or start rollouts on this host"
        yield Finding(("weights.transport", "bus.endpoint"), rule, remedy, warning=True, depends=("process",))
    for name in ("system", "tools_key", "template_arguments"):
        if getattr(t.data, name):
            rule = "rollouts from outside do not receive it, so their prompts would lack it"
            remedy = "write the prompts as messages, the system message first" if name == "system" else "remove it"
            yield Finding((f"data.{name}", "process"), rule, remedy)


def _openai(t: Topology) -> Iterator[Finding]:
    entries = [(i, entry) for i, entry in rollouts(t) if entry.engine == "openai"]
    if not entries:
        if t.openai != schema.Openai():
            rule, remedy = 'no [[process]] has engine = "openai"', "remove [openai], or set the engine"
            yield Finding(("openai.base_url", "process"), rule, remedy, warning=True, value="[openai]")
        return
    at = f"process.{entries[0][0]}"
    if not is_url(url := t.openai.base_url):
        rule = "is not the address of an endpoint" if url else "the engine needs an endpoint, and none is named"
        yield Finding(("openai.base_url", f"{at}.engine"), rule, "for example http://127.0.0.1:8000/v1")
    yield from entry_clashes(t, OPENAI, entries[0][0])
    if t.openai.update != "none" and sum(entry.count for _, entry in entries) > 1:
        rule = "two processes would load weights into one server, each without the other's knowledge"
        remedy = "count = 1, with a larger generation.max_batch"
        yield Finding(("openai.update", f"{at}.engine"), rule, remedy, depends=("process",))


# -- vLLM -----

COLDEST, HOTTEST = 0.01, 2.0  # vLLM raises a smaller temperature to the first, silently, and refuses a larger one

# Arguments of vLLM's engine that busrl sets, and the key that stands for each; without one nothing else would be right.
VLLM_OURS = {
    "model": "model.path", "tokenizer": "model.path", "dtype": "model.dtype", "max_model_len": "vllm.max_model_len",
    "max_num_seqs": "generation.max_batch", "tensor_parallel_size": "vllm.tensor_parallel",
    "enforce_eager": "vllm.enforce_eager", "seed": "run.seed", "skip_tokenizer_init": "", "generation_config": "",
    "logprobs_mode": "", "enable_prefix_caching": "", "worker_extension_cls": "", "disable_log_stats": "",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization", "kv_cache_memory_bytes": "vllm.kv_cache_mb",
    "block_size": "vllm.block_size", "enable_lora": "weights.transport", "max_lora_rank": "lora.rank",
    "max_loras": "weights.max_staleness", "max_cpu_loras": "weights.max_staleness",
    vllm_versions.NATIVE_ROUTES: "learner.routes",
}


def lacks_ascend(t: Topology) -> int | None:
    """The entry whose vLLM is to work on an NPU, if this Python lacks the plugin for that."""
    on_npu = [i for i in vllm_entries(t) if (t.process[i].device or t.model.device) == "npu"]
    return on_npu[0] if on_npu and not version_of(ASCEND) else None


def _vllm(t: Topology) -> Iterator[Finding]:
    entries = vllm_entries(t)
    if not entries:
        changed = (name for name, value in vars(t.vllm).items() if value != getattr(schema.Vllm(), name))
        if keys := tuple(f"vllm.{name}" for name in changed):
            rule, remedy = 'no [[process]] has engine = "vllm"', "remove [vllm], or set the engine"
            yield Finding(keys, rule, remedy, warning=True, depends=("process",))
        return
    at = f"process.{entries[0]}.engine"
    sets = {f"validation.set.{index}": named_set for index, named_set in enumerate(t.validation.set)}
    measured = {"validation": t.validation} if t.validation.data or sets else {}
    tables: dict[str, Any] = {"generation": t.generation, **measured, **sets}
    for name, table in tables.items():
        value = table.temperature if table.temperature != "auto" else 1.0
        if 0 < value < COLDEST:
            rule = f"vLLM takes a temperature below {COLDEST} as {COLDEST}: its answers would not be what was asked for"
            yield Finding((f"{name}.temperature", at), rule, f"set it to {COLDEST} or more")
        if value > HOTTEST:
            rule = f"vLLM refuses a temperature above {HOTTEST:g}"
            yield Finding((f"{name}.temperature", at), rule, f"set it to {HOTTEST:g} or less")
    yield from entry_clashes(t, VLLM, entries[0])
    for name in sorted(VLLM_OURS.keys() & t.vllm.extra.keys()):
        remedy = f"set {VLLM_OURS[name]}" if VLLM_OURS[name] else "remove it"
        yield Finding(("vllm.extra", at), f"{name} is set by busrl, which relies on it", remedy)
    for index in entries:
        yield from _vllm_sizes(t, index, t.process[index])


def _vllm_sizes(t: Topology, index: int, entry: Process) -> Iterator[Finding]:
    vllm, at = t.vllm, f"process.{index}"
    device = entry.device or t.model.device
    cpu = device == "cpu" if entry.python else vllm_versions.on_cpu(device)
    few = [item for item in entry.devices if item.count(",") + 1 < vllm.tensor_parallel and not cpu]
    if few:
        there = few[0].count(",") + 1
        rule = f"an engine spreads its model over {vllm.tensor_parallel} devices, and {few[0]!r} names {there}"
        remedy = f"items of {vllm.tensor_parallel} devices each, or tensor_parallel = {there}"
        yield Finding(("vllm.tensor_parallel", f"{at}.devices"), rule, remedy)
    if cpu and vllm.block_size % CPU_BLOCK:
        rule = f"vLLM's kernels for CPUs take multiples of {CPU_BLOCK} positions"
        yield Finding(("vllm.block_size", f"{at}.engine"), rule, f"set it to 0, or a multiple of {CPU_BLOCK}")


# -- transports between devices -----

WITH_MODEL = ("rollout", "learner")
BETWEEN = {backend: kind for kind, backend in BACKEND.items() if kind != "cpu"}  # what a broadcast connects


def _between_devices(t: Topology) -> Iterator[Finding]:
    """A broadcast by nccl or hccl is from the learner's device to each engine's, and no two ranks share one."""
    key, other, shown = "weights.backend", 'or backend = "gloo"', dict[str, str]()
    backend = t.weights.backend
    if backend not in BETWEEN or t.weights.transport != "broadcast":
        return
    for index in vllm_entries(t):
        rule = "vLLM is given its weights through the host's memory"
        yield Finding((f"process.{index}.engine", key), rule, f'engine = "torch", {other}')
    joining = [process for process in t.processes() if schema.has_model(process.spec)]
    for process in joining:
        if (process.spec.role, process.spec.engine) == ("rollout", "vllm"):
            continue
        if (device := t.device_of(process.name)) != BETWEEN[backend]:
            rule = f"{backend} connects {BETWEEN[backend]} devices, and {process.name} works on {device}"
            remedy = f'device = "{BETWEEN[backend]}", {other}'
            yield Finding((key, "model.device"), rule, remedy, depends=("process",))
        first, remedy = process.devices.partition(",")[0], ""
        if first.startswith("MIG"):
            rule = f"{process.name} works on a part of a GPU, and {backend} refuses two parts of one"
            remedy = f"whole devices, {other}"
        elif not first:
            rule = f"{process.name} sees all devices and would work on the first, as others do: each needs its own"
            remedy = f'devices = ["0"] in its entry, {other}'
        elif first in shown:
            rule = f"{shown[first]} and {process.name} work on device {first}: each needs its own"
            remedy = f"other devices, {other}"
        if remedy:
            yield Finding((key,), rule, remedy, depends=("process",))
        shown.setdefault(first, process.name)


def _one_copy(t: Topology) -> Iterator[Finding]:
    """Require one engine on this host that owns the tensors that the learner trains, on the same device."""
    if t.weights.transport != ONE_COPY:
        return
    key, other, fit = "weights.transport", 'or transport = "shm"', TRANSPORTS[ONE_COPY].engines
    engines = [entry for entry in t.process if entry.role == "rollout"]
    started = sum(entry.count for entry in engines)
    if started != 1 or any(entry.command for entry in engines):
        rule = f"one engine on this host owns the weights that the learner trains, and {started} are started here"
        yield Finding((key,), rule, f"one rollout process of busrl's own, {other}", depends=("process",))
    for index, entry in rollouts(t):
        at = f"process.{index}.engine"
        if entry.engine not in fit:
            rule = f"it has no tensors that a learner could train; those of {' and '.join(fit)} can be shared"
            yield Finding((at, key), rule, f"engine = one of {', '.join(fit)}, or another transport")
        elif entry.engine == "vllm" and t.vllm.tensor_parallel > 1:
            rule = "each device has a part of every tensor, and the learner trains whole ones"
            yield Finding((key, "vllm.tensor_parallel", at), rule, f"tensor_parallel = 1, {other}")
    yield from _one_device(t, key, other)


def _one_device(t: Topology, key: str, other: str) -> Iterator[Finding]:
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


CHECKS: tuple[Check, ...] = (
    lambda t: clashes(t, TABLE), _engines, _lora, _outside, _openai, _vllm, _between_devices, _one_copy,
)
