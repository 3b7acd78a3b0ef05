"""How vLLM is started: what its engine is told, what its environment must say, and what this version of it can do.

Used by `vllm_core`. Imports vLLM inside functions only. Knows nothing of requests, weights or the bus.

- What a version can do is found by looking at it (`inspect.signature`, attributes), never concluded from its number.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from busrl.errors import UserError
from busrl.topology.vllm import CPU_BLOCK, installed, lora_rank, objection
from busrl.topology.weight_costs import adapter_slots
from busrl.topology.weight_rules import ADAPTERS

if TYPE_CHECKING:
    from busrl.topology import Topology

CPU_CACHE_MB = 16  # at least; a bare minimum of blocks
EXTENSION = "busrl.inference.vllm_worker.Extension"


@dataclass(frozen=True)
class Start:
    """Everything that one start of vLLM depends on, as plain data."""

    model: str
    dtype: str
    capacity: int
    max_length: int
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.85
    kv_cache_mb: int = 0  # 0 = by itself
    enforce_eager: str = "auto"
    block_size: int = 0
    seed: int = 0
    lora_rank: int = 0  # 0 = no adapters
    adapters: int = 0
    extension: str = EXTENSION
    extra: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, topology: Topology) -> Start:
        own, generation = topology.vllm, topology.generation
        longest = topology.max_prompt_tokens + generation.max_new_tokens
        # Any other transport brings the merged weights: a vLLM with places for adapters has wrapped their layers.
        rank = topology.lora.rank if topology.weights.transport in ADAPTERS else 0
        return cls(
            model=topology.model.path,
            dtype=topology.model.dtype,
            capacity=generation.max_batch,
            max_length=own.max_model_len or longest,
            tensor_parallel=own.tensor_parallel,
            gpu_memory_utilization=own.gpu_memory_utilization,
            kv_cache_mb=0 if isinstance(own.kv_cache_mb, str) else own.kv_cache_mb,
            enforce_eager=own.enforce_eager,
            block_size=own.block_size,
            seed=topology.run.seed,
            lora_rank=lora_rank(rank) if rank else 0,
            adapters=adapter_slots(topology) if rank else 0,
            extra=tuple(sorted(own.extra.items())),
        )


@dataclass(frozen=True)
class Abilities:
    """What the vLLM at hand has, found by probing."""

    version: str
    weight_version: bool  # it notes for every token which weights made it
    bare_pause: bool  # the engine's own pause, without the 20 ms that the front end adds
    shutdown_timeout: bool


def require() -> str:
    """The version of the installed vLLM; UserError if there is none or it is unknown."""
    package, version = installed()
    why, remedy = objection(package, version)
    if why:
        raise UserError(f'engine = "vllm": {why}; {remedy}')
    return version


def probe(engine: Any, version: str) -> Abilities:
    """Look at the engine itself. UserError names what it lacks that nothing can replace."""
    for name in ("generate", "abort", "collective_rpc", "pause_generation", "resume_generation", "reset_prefix_cache"):
        if not callable(getattr(engine, name, None)):
            raise UserError(f'engine = "vllm": vLLM {version} has no AsyncLLM.{name}; see docs/vllm.md')
    if "clear_cache" not in inspect.signature(engine.pause_generation).parameters:
        raise UserError(f'engine = "vllm": pause_generation of vLLM {version} has no clear_cache; see docs/vllm.md')
    core = engine.engine_core
    bare = getattr(core, "pause_scheduler_async", None)
    return Abilities(
        version=version,
        weight_version=callable(getattr(engine, "update_weight_version", None)),
        bare_pause=callable(bare) and {"mode", "clear_cache"} <= inspect.signature(bare).parameters.keys(),
        shutdown_timeout="timeout" in inspect.signature(engine.shutdown).parameters,
    )


def make(start: Start, stat_logger: Any = None) -> Any:
    """An AsyncLLM; to be called in the loop that will run it. UserError for arguments that this version refuses."""
    _environment(start)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    given = _arguments(start, _on_cpu())
    known = inspect.signature(AsyncEngineArgs).parameters
    if unknown := sorted(given.keys() - known.keys()):
        where = "vllm.extra" if unknown[0] in dict(start.extra) else 'engine = "vllm"'
        raise UserError(f"{where}: the engine of vLLM {require()} has no argument {unknown[0]!r}; see docs/vllm.md")
    loggers = [stat_logger] if stat_logger is not None else None
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**given), stat_loggers=loggers)


def _environment(start: Start) -> None:
    """Read by vLLM when it starts; what a user has set stays, but for what can not work."""
    fixed = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # this process has threads: a fork of it could hang
    usual = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    os.environ.update(fixed)
    for name, value in usual.items():
        os.environ.setdefault(name, value)
    if _on_cpu():
        # One process for engine and worker, whose threads are those of [[process]] threads and bound to no core.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if _eager(start, True):  # a few helpers of its sampler would still call a C++ compiler at the first token
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def _eager(start: Start, cpu: bool) -> bool:
    return start.enforce_eager == "on" or (start.enforce_eager == "auto" and cpu)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _arguments(start: Start, cpu: bool) -> dict[str, Any]:
    given: dict[str, Any] = {
        "model": start.model,
        "tokenizer": start.model,
        "dtype": start.dtype,
        "max_model_len": start.max_length,
        "max_num_seqs": start.capacity,
        "tensor_parallel_size": start.tensor_parallel,
        "enforce_eager": _eager(start, cpu),
        "seed": start.seed,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling is the caller's business, to the last setting
        "logprobs_mode": "processed_logprobs",  # of the distribution drawn from
        "enable_prefix_caching": True,
        "worker_extension_cls": start.extension,
        "disable_log_stats": True,
    }
    if not cpu:
        given["gpu_memory_utilization"] = start.gpu_memory_utilization
    if start.kv_cache_mb or cpu:
        given["kv_cache_memory_bytes"] = (start.kv_cache_mb or _cpu_cache_mb(start)) << 20
    if start.block_size or cpu:
        given["block_size"] = start.block_size or CPU_BLOCK  # whole blocks are cached, so the smallest caches most
    if start.lora_rank:
        given |= {"enable_lora": True, "max_lora_rank": start.lora_rank, "max_loras": start.adapters}
        given["max_cpu_loras"] = start.adapters
    return given | {name: _plain(text) for name, text in start.extra}


def _cpu_cache_mb(start: Start) -> int:
    """What `capacity` sequences of full length need; heads as wide as the kernels take them, float32 at most."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(start.model, local_files_only=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 4 if start.dtype == "float32" else 2
    positions = start.capacity * -(-start.max_length // CPU_BLOCK) * CPU_BLOCK
    needed: int = positions * config.num_hidden_layers * heads * max(head, 32) * 2 * size
    return max(CPU_CACHE_MB, -(-needed // (1 << 20)))


def _plain(text: str) -> Any:
    """The text of an extra argument as the value that it means."""
    import json

    try:
        return json.loads(text)
    except ValueError:
        return text
