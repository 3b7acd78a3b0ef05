"""The tables of a topology that say what is trained, on what, and how: frozen dataclasses, attributes are keys.

Declarations alone; `schema.py` puts them together. Knows nothing of files, processes or rules between keys.

A topology as frozen dataclasses: its tables (`experiment.py`, `machinery.py`) together, and what follows from them.

Made by `load` (from TOML, checked) or by `Topology.from_json` (from the run directory, already checked). Every role
reads its settings from here. Knows nothing of files, rules between keys, torch or NumPy.

- Frozen: what `launch` checked is what every process sees.
- `Derived` holds everything computed from more than one key, so that no two processes can compute it differently.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from busrl.config.machinery import (
    REQUIRED,
    SPAWNED_ROLES,
    Bus,
    BusFault,
    ControllerRules,
    CrashFault,
    Experiments,
    Faults,
    Limits,
    Log,
    Mock,
    Openai,
    Process,
    Ring,
    Scheduler,
    Simulate,
    Vllm,
    key,
)

# -- The tables of a topology that say what is trained, on what, and how: frozen dataclasses, attributes are keys -----


TABLE_TENSORS, TENSORS_OF_SLOT, TENSORS_OF_SEGMENT = 48, 4, 3  # task, prompt_ids, reward_parts, text; the arrays
MOST_SEGMENTS = (TABLE_TENSORS - TENSORS_OF_SLOT) // TENSORS_OF_SEGMENT  # what the table of a slot has room for


@dataclass(frozen=True)
class Run:
    """[run]: the experiment as a whole."""

    name: str = key("run", "name of the run, also the start of its directory's name")
    seed: int = key(0, "seed of the data order, of sampling and of the training", low=0, high=2**31 - 1)
    max_steps: int = key(200, "the run ends after this many optimiser steps", low=1)
    max_groups: int = key(0, "or after this many trained groups, whichever comes first; 0 = no such limit", low=0)


@dataclass(frozen=True)
class Model:
    """[model]: what is trained."""

    path: str = key(REQUIRED, "a Hugging Face model folder, or the quickstart's own model tiny:sort", path=True)
    dtype: str = key("auto", "number type of the weights; auto = bfloat16 on an accelerator, float32 on a CPU",
                     choices=("auto", "float32", "bfloat16"))
    device: str = key("auto", "where the model runs: a kind of device, or the best there is; see docs/gpu.md",
                      choices=("auto", "cpu", "cuda", "npu"))


@dataclass(frozen=True)
class Lora:
    """[lora]: train a low-rank adapter of the model instead of all of its weights; needs the extra busrl[lora]."""

    rank: int = key(0, "rank of the adapter; 0 = off, all weights are trained", low=0, high=4096)
    alpha: int = key(0, "what the adapter adds is scaled by alpha / rank; 0 = 2 x rank", low=0, high=1 << 20)
    targets: tuple[str, ...] = key((), "last names of the linear layers that get one, for example q_proj; empty = all "
                                       "but the output head")
    dropout: float = key(0.0, "share of a layer's inputs that its adapter does not see while training",
                         low=0, high=1, open_high=True)

    @property
    def on(self) -> bool:
        """Whether an adapter is trained."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """What the product of the adapter's two matrices is multiplied by."""
        return (self.alpha or 2 * self.rank) / max(1, self.rank)


@dataclass(frozen=True)
class Data:
    """[data]: prompts, one JSON object per line."""

    train: str = key(REQUIRED, "JSONL file of training prompts, or tiny:sort", path=True)
    prompt_key: str = key("prompt", "the key of a line that holds the prompt")
    answer_key: str = key("answer", "the key of a line that holds the right answer")
    shuffle: bool = key(True, "draw the lines of each epoch in an order given by run.seed")
    arrivals: bool = key(False, "an open stream: a prompt is there arrival_s seconds (of its line) after the start")
    template: str = key("none", "the prompt as it stands, or by the model's chat template: as a user turn, or as the "
                        "messages that it is a list of", choices=("none", "chat"))
    system: str = key("", "template = chat: the system message of every prompt that has none of its own")


@dataclass(frozen=True)
class Groups:
    """[groups]: samples per prompt."""

    size: int = key(8, "samples per prompt, G; their rewards are compared with each other", low=2, high=1024)


@dataclass(frozen=True)
class Generation:
    """[generation]: sampling of training trajectories."""

    max_new_tokens: int = key(64, "a completion is cut after this many tokens", low=1, high=1 << 20)
    temperature: float = key(1.0, "sampling temperature of training tasks", low=0, open_low=True, high=10)
    top_p: float = key(1.0, "nucleus sampling; training needs 1.0", low=0, open_low=True, high=1)
    max_batch: int = key(128, "sequences that one rollout process generates at the same time", low=1, high=65536)
    max_prompt_tokens: int | str = key("auto", "a longer prompt is set aside (fate l); auto = the longest of the data",
                                       words=("auto",), low=1, high=1 << 20)
    prefill_tokens: int = key(2048, "torch engine: prompt tokens that are computed between two decoding steps, at most",
                              low=1, high=1 << 20)
    on_update: str = key("auto", "keys and values of running sequences after new weights: kept, or computed again; "
                         "auto = the engine's own choice", choices=("auto", "keep", "recompute"))


@dataclass(frozen=True)
class Segments:
    """[segments]: long training answers in pieces, each generated and committed by itself."""

    length: int | str = key(0, "tokens of one segment; 0 = answers are made in one go, auto = from the lengths seen",
                            words=("auto",), low=0, high=1 << 20)
    max_segments: int = key(8, "an answer has at most so many segments", low=1, high=MOST_SEGMENTS)
    global_max_length: int = key(0, "tokens of an answer over all of its segments, the place of "
                                    "generation.max_new_tokens; 0 = that", low=0, high=1 << 20)
    loss: str = key("behaviour", "trained: all tokens with their own ratios, all with ratio 1, or the last segment",
                    choices=("behaviour", "pois", "last_segment"))
    rounds: str = key("answers", "weights.mode = sync: a round ends with its answers, or with a segment of each",
                      choices=("answers", "segments"))

    @property
    def on(self) -> bool:
        """Whether training answers are made in segments."""
        return self.length != 0

    @property
    def waves(self) -> int:
        """Waves that an answer may take, where rounds are made of segments; else 0."""
        return self.max_segments if self.on and self.rounds == "segments" else 0


@dataclass(frozen=True)
class Trigger:
    """[learner.trigger]: when an optimiser step fires; counts are in groups."""

    n_min: int = key(32, "fire when this many groups are ready", low=1, high=65536)
    t_max_s: float = key(math.inf, "fire after this many seconds if n_floor groups are ready; inf = never",
                         words=("inf",), low=0, open_low=True, finite=False)
    count: str = key("usable", "what counts against n_min: groups to train on, or every ended group (flat ones too)",
                     choices=("usable", "ended"))
    n_floor: int = key(0, "fewest groups that t_max_s may fire with; 0 = max(4, n_min / 4)", low=0, high=65536)


@dataclass(frozen=True)
class Controller:
    """[learner.controller]: whether n_min and t_max_s follow the entropy of the policy; see docs/control.md."""

    mode: str = key("off", "no controller, log what it would do, or do it", choices=("off", "advise", "act"))
    n_lo: int = key(0, "smallest n_min that it may choose (high entropy); 0 = n_min / 2", low=0, high=65536)
    n_hi: int = key(0, "largest n_min that it may choose (low entropy); 0 = 2 x n_min", low=0, high=65536)
    every: int = key(5, "a decision every so many steps", low=1, high=10000)
    cooldown: int = key(10, "after a move nothing moves for so many steps", low=0, high=10000)


@dataclass(frozen=True)
class Learner:
    """[learner]: loss, optimiser, log and checkpoints."""

    lr: float = key(REQUIRED, "learning rate for steps of n_min groups; scaled by sqrt(groups / n_min)",
                    low=0, open_low=True, high=10)
    loss: str = key("ppo_clip", "objective per token", choices=("ppo_clip", "decoupled"), function=True)
    advantage: str = key("group_std", "(R - mean) / std of the group, or R - mean", choices=("group_std", "group_mean"),
                         function=True)
    metrics: tuple[str, ...] = key((), "functions that add numbers of your own to each line of metrics.jsonl, as "
                                   "package.module:name or file.py:name (docs/extending.md)")
    betas: tuple[float, float] = key((0.9, 0.999), "AdamW betas", low=0, high=1, open_high=True)
    weight_decay: float = key(0.0, "AdamW weight decay", low=0, high=10)
    eps: float = key(1e-8, "AdamW epsilon", low=0, open_low=True, high=1)
    clip_low: float = key(0.2, "the ratio is clipped below at 1 - clip_low", low=0, high=1)
    clip_high: float = key(0.28, "the ratio is clipped above at 1 + clip_high", low=0, high=100)
    dual_clip: float = key(3.0, "bound on the loss of tokens with negative advantage", low=1, open_low=True, high=1000)
    tis_cap: float = key(2.0, "cap of the importance weight (loss = decoupled)", low=0, open_low=True, high=1000)
    max_grad_norm: float = key(1.0, "the gradient is clipped to this norm", low=0, open_low=True, high=1e6)
    warmup_groups: int = key(0, "groups over which lr rises from 0", low=0)
    decay: str = key("none", "shape of the fall of lr after the warm-up", choices=("none", "linear", "cosine"))
    decay_groups: int = key(0, "groups over which it falls; 0 = to the end of the run", low=0)
    decay_to: float = key(0.0, "share of lr that is left at the end of the fall", low=0, high=1)
    micro_batch_tokens: int = key(4096, "padded tokens per forward and backward", low=1, high=1 << 26)
    micro_batch_min_samples: int = key(16, "start a micro-batch when this many samples are ready", low=1, high=65536)
    updates_per_batch: int = key(1, "optimiser updates per step, each on a mini-batch of whole groups", low=1, high=64)
    publish_every: int = key(1, "publish the weights every so many steps", low=1, high=1024)
    checkpoint_every: int = key(50, "write a checkpoint every so many steps (of n_min groups each where the batch can "
                                    "vary); 0 = only at the end", low=0)
    keep_last: int = key(2, "checkpoints kept", low=1, high=10000)
    wal: str = key("sync", "write-ahead log: fsync before training, without fsync, or none",
                   choices=("sync", "async", "off"))
    deterministic: bool = key(False, "claim at firing and train in (group, member) order")
    mismatch_limit: float = key(1.0, "the run ends if, before its first step, the engines' log-probabilities are this "
                                     "far (nats, mean) from the learner's; 0 = never", low=0)
    length_alarm: float = key(0.9, "warn if trained answers are shorter than this share of all that ended; 0 = never",
                              low=0, high=1)
    length_alarm_steps: int = key(20, "steps over which lengths are compared", low=1, high=10000)
    trigger: Trigger = field(default_factory=Trigger)
    controller: Controller = field(default_factory=Controller)


@dataclass(frozen=True)
class Sparse:
    """[weights.sparse]: only the values that changed, instead of all of them (docs/sparse.md)."""

    enabled: bool = key(False, "send changed values only where that is less; costs one more copy in the learner")
    threshold: float = key(0.1, "send all values when the changed ones would be more than this share of the bytes",
                           low=0, open_low=True, high=1)
    key_every: int = key(32, "send all values every so many versions all the same", low=1, high=65536)


@dataclass(frozen=True)
class Weights:
    """[weights]: from the learner to the engines."""

    transport: str = key("shm", "how weights travel; see docs/weights.md", choices=(
                         "shm", "broadcast", "cuda_ipc", "lora_hotswap", "lora_restart",
                         "checkpoint_restart"))
    restart_every: int = key(1, "lora_restart, checkpoint_restart: of the publications that learner.publish_every "
                                "gives, every so many", low=1, high=1024)
    on_restart: str = key("continue", "answers that run while an engine restarts: cut and continued after it, or ended "
                          "before it", choices=("continue", "finish"))
    mode: str = key("batch-async", "how far generation may run ahead of training",
                    choices=("sync", "batch-async", "fully-async"))
    max_staleness: int = key(2, "batch-async: steps that a trained sample may be old, S", low=0, high=1024)
    over_age: str = key("wait", "a group above max_staleness: hold admission until it is trained, or drop it",
                        choices=("wait", "drop"))
    window: int = key(0, "W: groups past the oldest that may be trained before it; 0 = 0.3 of the buffer B",
                      low=0, high=65536)
    timeout_s: float = key(10.0, "a transfer that takes longer names the member that is late", low=0, open_low=True)
    checksum: bool = key(False, "engines check the bytes of each version against a digest (one more pass over them)")
    bucket_mb: int = key(16, "broadcast: MiB that are sent at once and have a deadline of their own", low=1, high=4096)
    backend: str = key("gloo", "broadcast: what carries it; gloo through the host's memory, nccl (CUDA) and hccl (NPU) "
                       "from device to device", choices=("gloo", "nccl", "hccl"))
    sparse: Sparse = field(default_factory=Sparse)


@dataclass(frozen=True)
class Reward:
    """[reward]: what an answer is worth."""

    kind: str = key("exact_match", "compare with the answer, or call a Python function (so where one is given)",
                    choices=("exact_match", "python"))
    function: str = key("", "kind = python: package.module:function or file.py:function")
    extract: str = key("", "exact_match: regular expression; its last match (group 1, or what follows) is the answer")
    answer_key: str = key("", "key of the right answer; empty = data.answer_key")
    timeout_s: float = key(10.0, "a single call that takes longer is killed, the sample ends as H",
                           low=0, open_low=True)
    workers: int = key(1, "child processes that call the function, per reward process", low=1, high=256)
    truncated: float | str = key("reward", "what a training answer is worth that the limit cut: its reward, or this",
                                 words=("reward",))
    truncated_penalty: float = key(0.0, "subtracted from the reward of a training answer that the limit cut", low=0)


@dataclass(frozen=True)
class Validation:
    """[validation]: measuring without training; on when `data` names prompts, and the validator is started then."""

    data: str = key("", "JSONL file of validation prompts, or tiny:sort; empty = no validation", path=True)
    every: int = key(0, "a round every so many steps (of n_min groups each where the batch can vary); 0 = never "
                        "during the run", low=0)
    samples: int = key(512, "samples a round, spread over a longer file; each prompt of a shorter one counts the same",
                       low=1, high=1 << 24)
    temperature: float = key(1.0, "0 = greedy", low=0, high=10)
    at_start: bool = key(True, "one round before the first step")
    at_end: bool = key(True, "one round after the last step")
    mode: str = key("hold", "pin the version during a round, or let it move and label the metric mixed",
                    choices=("hold", "free"))


# -- A topology as frozen dataclasses: its tables (`experiment.py`, `machinery.py`) together, and what follows ... ----


__all__ = [
    "FOREIGN_ROLES",
    "IMPLIED_ROLES",
    "MESSAGE_FIELD_BYTES",
    "RESTARTS",
    "SINGLE_ROLES",
    "SPAWNED_ROLES",
    "TINY",
    "Bus",
    "BusFault",
    "Controller",
    "ControllerRules",
    "CrashFault",
    "Data",
    "Derived",
    "Experiments",
    "Faults",
    "Generation",
    "Groups",
    "Learner",
    "Limits",
    "Log",
    "Lora",
    "Mock",
    "Model",
    "Openai",
    "Process",
    "ProcessName",
    "Reward",
    "Ring",
    "Run",
    "Scheduler",
    "Segments",
    "Simulate",
    "Sparse",
    "Topology",
    "Trigger",
    "Validation",
    "Vllm",
    "Weights",
]

RESTARTS = ("lora_restart", "checkpoint_restart")  # transports that end the engine and start it again
TINY = "tiny:"  # model.path and data.* may name one of the quickstart's own tasks instead of a file
IMPLIED_ROLES = ("bus", "keeper", "scheduler")  # one each, always
SINGLE_ROLES = ("learner", "validator")
FOREIGN_ROLES = ("rollout", "reward")  # what another program may be, named by `command`
MESSAGE_FIELD_BYTES = 4096  # of a message that carries a sample, besides the bytes of its slot


@dataclass(frozen=True)
class Derived:
    """What follows from several keys together; `explain` holds the sums as text. Counts B and W are in groups."""

    B: int  # admitted groups that may be unfinished
    W: int  # admission indices that the learner looks at
    n_lo: int  # smallest count threshold
    n_hi: int  # largest count threshold
    n_floor: int  # fewest groups that a step by time may have
    g_min: int  # survivors that a group needs to be trained
    horizon: int  # drawn groups among which the policy may reorder
    slots: int  # slots of the ring: train_slots + val_reserve
    train_slots: int
    val_reserve: int  # slots that only validation may take
    slot_bytes: int  # payload bytes per slot
    task_bytes: int  # longest JSONL line
    train_prompts: int  # lines of data.train
    validation_prompts: int  # lines of the file that validation uses, 0 if there is no validation
    ring_bytes: int  # size of the shared-memory file
    val_samples: int  # samples of one validation round, 0 = validation is off
    prompt_tokens: int = 0  # the limit on prompts, "auto" worked out; 0 in run directories of before
    prompt_text: str = ""  # how the tokens of the prompts were counted
    trial: tuple[str, ...] = ()  # the first prompt, and what the reward said of two answers to it
    explain: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessName:
    """One process to start: its name ("rollout/0", "learner"), role, index, and the entry it comes from."""

    name: str
    role: str
    index: int
    spec: Process
    place: int = 0  # which of the processes of its entry it is

    @property
    def devices(self) -> str:
        """The devices that it sees; empty = all."""
        return self.spec.devices[self.place % len(self.spec.devices)] if self.spec.devices else ""


def has_model(entry: Process) -> bool:
    """Whether processes of this entry load the model: the learner, and rollouts with an engine that has one here."""
    engines = entry.role == "rollout" and entry.engine in ("torch", "vllm")
    return not entry.command and (entry.role == "learner" or engines)


@dataclass(frozen=True)
class Topology:
    """A checked topology. `source` is the file it was read from, `overrides` the --set arguments."""

    run: Run
    model: Model
    data: Data
    groups: Groups
    generation: Generation
    bus: Bus
    ring: Ring
    scheduler: Scheduler
    learner: Learner
    weights: Weights
    reward: Reward
    validation: Validation
    limits: Limits
    process: tuple[Process, ...]
    derived: Derived
    faults: Faults = field(default_factory=Faults)
    mock: Mock = field(default_factory=Mock)
    openai: Openai = field(default_factory=Openai)
    vllm: Vllm = field(default_factory=Vllm)
    segments: Segments = field(default_factory=Segments)
    lora: Lora = field(default_factory=Lora)
    log: Log = field(default_factory=Log)
    simulate: Simulate = field(default_factory=Simulate)
    experiments: Experiments = field(default_factory=Experiments)
    source: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt with more tokens is set aside: the key, or what "auto" came to."""
        given = self.generation.max_prompt_tokens
        return given if isinstance(given, int) else self.derived.prompt_tokens

    @property
    def task_message_bytes(self) -> int:
        """Most bytes of a message that carries one sample: what its slot holds, and the fields."""
        return self.derived.slot_bytes + MESSAGE_FIELD_BYTES

    @property
    def scripted(self) -> bool:
        """Whether any engine is scripted: then data.train is a trace, and nothing is learnt from its answers."""
        return any(entry.role == "rollout" and entry.engine == "mock" and not entry.command for entry in self.process)

    @property
    def publish_every(self) -> int:
        """Steps between two publications, as long as groups do not wait for one."""
        restarts = self.weights.transport in RESTARTS
        return self.learner.publish_every * (self.weights.restart_every if restarts else 1)

    @property
    def validates(self) -> bool:
        """Whether any validation round takes place."""
        return self.derived.val_samples > 0

    def processes(self) -> list[ProcessName]:
        """Every process of the run in starting order; several entries of one role are numbered through."""
        names = [ProcessName(role, role, 0, Process(role)) for role in IMPLIED_ROLES]
        for role in ("learner", "reward", "rollout", "validator"):
            specs = [(spec, place) for spec in self.process if spec.role == role for place in range(spec.count)]
            for index, (spec, place) in enumerate(specs):
                name = role if role in SINGLE_ROLES else f"{role}/{index}"
                names.append(ProcessName(name, role, index, spec, place))
        return names

    def device_of(self, name: str) -> str:
        """The device key of a process; one that joins from outside is as the first of its role."""
        role = name.partition("/")[0]
        named = (process.spec.device for process in self.processes() if process.name == name)
        entries = (entry.device for entry in self.process if entry.role == role)
        return next(named, next(entries, "")) or self.model.device

    def to_dict(self) -> dict[str, Any]:
        """Plain data, infinity as the word "inf"."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    def to_json(self) -> str:
        """The text of topology.json; `from_json` gives an equal object back."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Topology:
        """Read a topology.json. It was checked when it was written: only its shape is looked at here."""
        from busrl.config.machinery import build
        from busrl.config.names import modern

        return build(Topology, modern(json.loads(text)), "topology.json")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value
