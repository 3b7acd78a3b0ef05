"""What the learner will need of its device's memory, from config.json alone: no weights are read, no torch is loaded.

`busrl check` prints the sum of `of_topology`, and a start is refused that the device cannot hold. Knows the widths
of decoders with gated feed-forward layers, of which every model family here is made; nothing of engines.

- Sums are of what exists at the same time, when a backward has just begun on the largest micro-batch of the second step
  or later: weights, gradient and optimiser are whole, and so is what the forward has kept.
- The factors are those of busrl's own forward (docs/your-run.md says how far they are from measured peaks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busrl import device
from busrl.config import machine
from busrl.config.schema import TINY, Topology
from busrl.errors import UserError

FLOAT = 4
ADAMW = 8  # two float32 moments per trained parameter
LARGE = 10**9  # parameters from which on "auto" computes layers again on an accelerator
LIBRARIES = 350 << 20  # resident bytes of Python, torch and transformers on a CPU
LOGITS = {"cpu": 1 << 26}  # bytes of one buffer of logits, and of one on an accelerator
LOGITS_ELSEWHERE = 1 << 28
BUFFERS = 3  # of logits, in backward


@dataclass(frozen=True)
class Work:
    """The settings that the sum depends on."""

    tokens: int  # of the largest micro-batch
    dtype: str = "float32"
    checkpointing: bool = False
    lora_rank: int = 0
    targets: tuple[str, ...] = ()
    head_rows: int = 0
    kind: str = "cpu"

    @property
    def width(self) -> int:
        """Bytes of a number in forward and backward."""
        return 2 if self.dtype == "bfloat16" else FLOAT


@dataclass(frozen=True)
class Widths:
    """Of a decoder, by its config.json; 0 where that does not say."""

    hidden: int
    inner: int  # of a token's feed-forward: those of its experts together
    layers: int
    queries: int
    keys: int
    words: int
    tied: bool
    normed: bool  # queries and keys have a norm of their own
    norms: int  # pairs of norms around attention and feed-forward
    parameters: int

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int = 0) -> Widths:
        """`parameters`: how many there are, if that is known better than from the widths."""
        text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        hidden, heads = machine.whole(text, "hidden_size", "n_embd", "d_model"), _heads(text)
        size = machine.whole(text, "head_dim") or hidden // heads
        keys = (machine.whole(text, "num_key_value_heads") or heads) * size
        experts, kind = machine.whole(text, "num_experts_per_tok"), str(text.get("model_type", ""))
        inner = experts * machine.whole(text, "moe_intermediate_size", "intermediate_size")
        return cls(
            hidden, inner or machine.whole(text, "intermediate_size", "n_inner", "d_ff") or 4 * hidden,
            machine.whole(text, *machine.LAYERS), heads * size, keys, machine.whole(text, "vocab_size"),
            bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))),
            kind.startswith(("qwen3", "gemma3")), 2 if kind.startswith(("gemma2", "gemma3")) else 1,
            parameters or machine.estimate(dict(config)),
        )

    def adapted(self, targets: tuple[str, ...]) -> int:
        """Inputs and outputs of the adapted matrices of a layer, added up."""
        pairs = {
            "q_proj": self.hidden + self.queries, "k_proj": self.hidden + self.keys, "v_proj": self.hidden + self.keys,
            "o_proj": self.queries + self.hidden, "gate_proj": self.hidden + self.inner,
            "up_proj": self.hidden + self.inner, "down_proj": self.inner + self.hidden,
        }
        return sum(size for name, size in pairs.items() if not targets or name in targets)

    def layer(self, work: Work) -> int:
        """Bytes that one layer keeps of one token for its backward."""
        norms = (6 if work.width == FLOAT else 8) * self.hidden  # computed in float32 either way
        inside = 3 * (self.queries + self.keys) // 2 if self.normed else 0
        attention = 5 * self.queries + 2 * self.keys
        return work.width * (norms * self.norms + inside + attention + 4 * self.inner)


def _heads(text: Mapping[str, Any]) -> int:
    return machine.whole(text, "num_attention_heads", "n_head") or 1


def learner_sum(config: Mapping[str, Any], work: Work, parameters: int = 0) -> dict[str, int]:
    """Bytes by what they are for, the largest peak of a step."""
    widths = Widths.of(config, parameters)
    trained = widths.layers * work.lora_rank * widths.adapted(work.targets) if work.lora_rank else widths.parameters
    frozen = widths.parameters if work.lora_rank else 0
    masters = trained * FLOAT if work.width < FLOAT else 0
    kept = work.tokens * widths.layer(work)
    inputs = work.tokens * widths.hidden * work.width
    again = inputs * widths.layers + kept
    found = {
        "weights": (frozen + trained) * work.width + masters,
        "gradient": trained * FLOAT,
        "optimiser (AdamW)": trained * ADAMW,
        "kept for backward" + (", layers again" if work.checkpointing else ""):
            (again if work.checkpointing else kept * widths.layers) + 3 * inputs,
        "head and embedding in backward": _head(widths, work),
        "logits": _logits(widths, work),
        "libraries": LIBRARIES if work.kind == "cpu" else 0,
    }
    step = sum(size for name, size in found.items() if name not in ("weights", "libraries"))
    return {**found, "probe at the start, beyond a step": max(0, _probe(widths, work) - step)}


def _probe(widths: Widths, work: Work) -> int:
    """A base in few bits has float32 copies of its first layer, embedding and head for the probe, and given up then."""
    if not work.lora_rank or work.width == FLOAT:
        return 0
    tables = widths.words * widths.hidden * (1 if widths.tied else 2)
    return FLOAT * (tables + (widths.parameters - tables) // max(1, widths.layers))


def _head(widths: Widths, work: Work) -> int:
    """The gradient of the head's matrix, which is made beside the one that it is added to."""
    if work.lora_rank:
        return 0
    table = widths.words * widths.hidden
    return table * (FLOAT if work.width == FLOAT else FLOAT + work.width)


def _logits(widths: Widths, work: Work) -> int:
    buffer = LOGITS.get(work.kind, LOGITS_ELSEWHERE)
    row = FLOAT * max(widths.words, 1)
    rows = work.head_rows or max(1, buffer // row)
    return BUFFERS * row * min(rows, work.tokens)


# -- of a topology, on this machine -----

LOWER = (  # what lowers the sum, and whether it is free to be set
    ('learner.memory.activation_checkpointing = "full"', lambda t, work: not work.checkpointing),
    ("a smaller learner.micro_batch_tokens", lambda t, work: work.tokens > t.longest),
    ('model.dtype = "bfloat16" with lora.rank', lambda t, work: work.lora_rank and work.width == FLOAT),
    ("lora.rank, for example 32", lambda t, work: not work.lora_rank),
    ("a smaller generation.max_new_tokens", lambda t, work: work.tokens <= t.longest),
)


def work_of(t: Topology) -> Work:
    """What the learner of a topology does at a time, at most."""
    kind, memory = device.expected(t.device_of("learner")), t.learner.memory
    step = t.derived.limits.n_hi * t.groups.size * t.longest
    large = kind != "cpu" and machine.parameters(t) >= LARGE
    again = memory.activation_checkpointing == "full" or (memory.activation_checkpointing == "auto" and large)
    return Work(
        tokens=min(max(t.learner.micro_batch_tokens, t.longest), step), dtype=t.model.dtype, checkpointing=again,
        lora_rank=t.lora.rank, targets=t.lora.targets, head_rows=memory.head_rows, kind=kind,
    )


def of_topology(t: Topology) -> dict[str, int]:
    """The sum of `learner_sum`, with what is published where that lies in the same memory; empty if config.json does
    not say how large the model is, or nothing is trained here."""
    folder = machine.model_at(t.model.path)
    config = machine.read_config(folder) if folder else {}
    learns = any(process.role == "learner" and not process.spec.command for process in t.processes())
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    widths = machine.whole(text, "hidden_size", "n_embd", "d_model"), machine.whole(text, *machine.LAYERS)
    if not learns or not all(widths):
        return {}
    work = work_of(t)
    known = 0 if t.model.path.startswith(TINY) else machine.parameters(t)
    found = learner_sum(config, work, known)
    copies = {"shm": 3.0 if t.weights.sparse.enabled else 2.0, "broadcast": 2.5 if t.weights.sparse.enabled else 2.0}
    size = Widths.of(config, known).parameters * machine.BYTES_OF[t.model.dtype]
    if work.kind == "cpu" and (times := copies.get(t.weights.transport, 0.0)):
        found["published"] = int(times * size)
    return {name: value for name, value in found.items() if value}


def there(kind: str) -> int:
    """Bytes of memory that a device of that kind has on this machine; 0 if that is not known."""
    return host_memory() if kind == "cpu" else device.memory(kind)


def host_memory(root: Path = Path("/")) -> int:
    """What the machine has, or less if this control group may have less; 0 if neither says."""
    found = []
    try:
        [line] = [one for one in (root / "proc/meminfo").read_text().splitlines() if one.startswith("MemTotal:")]
        found.append(int(line.split()[1]) << 10)
        found.append(int((root / "sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        pass  # a limit of "max" is none
    return min(found, default=0)


def lines(t: Topology) -> list[str]:
    """The sum for `busrl check`."""
    parts = of_topology(t)
    if not parts:
        return ["learner memory: unknown, config.json does not say how large the model is"]
    work = work_of(t)
    limit = there(work.kind)
    of = f" of {_gib(limit)}" if limit else f"; how much this machine's {work.kind} has is not known here"
    each = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    return [
        f"learner memory ({work.kind}): {_gib(sum(parts.values()))}{of}, micro-batches of {work.tokens} tokens",
        f"  {each}",
    ]


def require(t: Topology) -> None:
    """UserError with the sum and the keys that lower it, if the learner's device cannot hold it."""
    work, parts = work_of(t), of_topology(t)
    limit, needed = there(work.kind), sum(parts.values())
    if limit and needed > limit:
        each = " + ".join(f"{name} {_gib(size)}" for name, size in parts.items())
        remedies = ", or ".join(text for text, free in LOWER if free(t, work))
        raise UserError(
            f"the learner needs about {_gib(needed)} of memory, its {work.kind} has {_gib(limit)}: {each}; "
            f"set {remedies}"
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
