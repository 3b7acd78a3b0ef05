"""The learner's need of its device's memory, from config.json alone: no weights are read, no torch is loaded.

Knows the widths of decoders with gated feed-forward layers, of which every model family here is made.

- What stays (weights, gradient, optimiser) is whole from the second micro-batch of a step on. What a backward adds is
  the largest of its moments: the head's, that of the last layer, and that of the embedding.
- With several ranks the sum is that of one of them; on a CPU all of them share one memory.
- The factors are those of busrl's own forward (docs/memory.md says how far they are from measured peaks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from busrl.algorithms import catalog, trained_parameters
from busrl.data import pretrained
from busrl.data.vocabulary import language_of
from busrl.errors import UserError
from busrl.states import TINY
from busrl.system import device
from busrl.topology.schema import Topology

FLOAT = 4
STATES = {"adamw": 8.0, "adamw8bit": 2.04, "adafactor": 0.0}  # bytes per trained parameter; one of the user's: AdamW's
TEMPORARY = {"adafactor": 3}  # tensors as large as the largest parameter, while an optimiser updates
LIBRARIES = {"cpu": 350 << 20}  # resident bytes of Python, torch and transformers; of a driver's context elsewhere
CONTEXT = 512 << 20
LOGITS = {"cpu": 1 << 26}  # bytes of one buffer of logits, and of one on an accelerator
LOGITS_ELSEWHERE = 1 << 28
COPY = "copy for learner.parity"
ROWS = 3  # hidden states of all tokens that exist beside those that are kept
FEWER = 1024  # tokens, of a micro-batch that is small
BUFFERS = 3  # of logits, in backward
AHEAD = 2  # layers whose weights are gathered at the same time


@dataclass(frozen=True)
class Work:
    """The settings that the sum depends on."""

    tokens: int  # of the largest micro-batch
    dtype: str = "float32"
    checkpointing: bool = False
    lora_rank: int = 0
    lora_layers: str = ""
    lora_experts: bool = False
    targets: tuple[str, ...] = ()
    head_rows: int = 0
    kind: str = "cpu"
    optimizer: str = "adamw"
    train_layers: str = ""
    ranks: int = 1
    reshard: bool = True
    reference: bool = False  # a second model beside the one that is trained
    head_float32: bool = False
    replicate: int = 1
    tensor: int = 1
    expert: int = 1
    offload: bool = False

    @property
    def fsdp(self) -> int:
        return self.ranks // (self.replicate * self.tensor)

    @property
    def width(self) -> int:
        """Bytes of a number in forward and backward."""
        return 2 if self.dtype == "bfloat16" else FLOAT


@dataclass(frozen=True)
class Widths:
    """The shape of a decoder, by its config.json; 0 where that does not say."""

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
    experts: int = 0  # of these, in the experts of all layers
    of_experts: int = 0  # inputs and outputs of a layer's experts, of gate and up together and of down, added up

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int = 0) -> Widths:
        """`parameters`: how many there are, if that is known better than from the widths."""
        text = language_of(config)
        hidden = pretrained.size_in(text, "hidden_size", "n_embd", "d_model")
        heads = pretrained.size_in(text, "num_attention_heads", "n_head") or 1
        size = pretrained.size_in(text, "head_dim") or hidden // heads
        keys = (pretrained.size_in(text, "num_key_value_heads") or heads) * size
        experts, kind = pretrained.size_in(text, "num_experts_per_tok"), str(text.get("model_type", ""))
        inner = experts * pretrained.size_in(text, "moe_intermediate_size", "intermediate_size")
        dealt = pretrained.size_in(text, "num_experts", "num_local_experts", "n_routed_experts")
        of_one = pretrained.size_in(text, "moe_intermediate_size", "intermediate_size")
        ends = dealt * (2 * hidden + 3 * of_one)
        dealt *= 3 * hidden * of_one
        return cls(
            hidden, inner or pretrained.size_in(text, "intermediate_size", "n_inner", "d_ff") or 4 * hidden,
            pretrained.size_in(text, *pretrained.LAYERS), heads * size, keys, pretrained.size_in(text, "vocab_size"),
            bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))),
            kind.startswith(("qwen3", "gemma3")), 2 if kind.startswith(("gemma2", "gemma3")) else 1,
            parameters or pretrained.estimate(dict(config)), dealt * pretrained.size_in(text, *pretrained.LAYERS),
            ends,
        )

    @property
    def table(self) -> int:
        """Entries of the embedding, and of the head where that is another."""
        return self.words * self.hidden

    @property
    def in_layer(self) -> int:
        """Parameters of one layer."""
        return max(0, self.parameters - self.table * (1 if self.tied else 2)) // max(1, self.layers)

    def part(self, work: Work) -> float:
        """A rank's share of the parameters: tables are cut over fsdp alone, layers over tensor too."""
        tables = self.table * (1 if self.tied else 2)
        dealt = work.fsdp * work.tensor if work.expert > 1 else work.fsdp
        others = max(0, self.parameters - tables - self.experts)
        on_rank = tables / work.fsdp + self.experts / dealt + others / (work.fsdp * work.tensor)
        return min(1.0, on_rank / max(1, tables + self.experts + others))

    def gathered(self, work: Work) -> int:
        """Parameters of one layer on one rank, while it computes."""
        experts = self.experts // max(1, self.layers)
        return max(0, self.in_layer - experts) // work.tensor + experts // work.expert

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
        inner = 4 * self.inner // (1 if self.experts else work.tensor)
        return work.width * (norms * self.norms + (inside + attention) // work.tensor + inner)


@dataclass(frozen=True)
class Trained:
    """Trained parts: parameters, layers that the backward goes through, and whether the tables are among them."""

    parameters: int
    layers: int
    tables: bool

    @classmethod
    def of(cls, widths: Widths, work: Work) -> Trained:
        if work.lora_rank:
            adapted = trained_parameters.layers(work.lora_layers, widths.layers) or range(widths.layers)
            size = widths.adapted(work.targets) + (widths.of_experts if work.lora_experts else 0)
            return cls(len(adapted) * work.lora_rank * size, widths.layers - min(adapted, default=0), False)
        chosen = trained_parameters.layers(work.train_layers, widths.layers)
        if not chosen:  # all, or by names, of which the widths say nothing
            return cls(widths.parameters, widths.layers, True)
        return cls(len(chosen) * widths.in_layer, widths.layers - min(chosen), False)


def learner_sum(config: Mapping[str, Any], work: Work, parameters: int = 0) -> dict[str, int]:
    """Bytes by what they are for, on one device, at the largest peak of a step."""
    widths = Widths.of(config, parameters)
    trained = Trained.of(widths, work)
    states = STATES.get(work.optimizer, STATES["adamw"])
    part = widths.part(work)
    lasting = {
        **_weights(widths, trained, work),
        "gradient": int(FLOAT * trained.parameters * part),
        f"optimiser ({work.optimizer})": int(states * trained.parameters * part),
        "reference model": int(widths.parameters * work.width * part) if work.reference else 0,
        "libraries": LIBRARIES.get(work.kind, CONTEXT),
    }
    if work.offload and work.kind != "cpu":
        lasting |= dict.fromkeys(_on_host(lasting), 0)
    moment = max(_moments(widths, trained, work), key=lambda parts: sum(parts.values()))
    step = sum(lasting.values()) - lasting["weights"] - lasting["libraries"] + sum(moment.values())
    return {**lasting, **moment, "self-test at the start, beyond a step": max(0, _self_test(widths, work) - step)}


def _on_host(parts: Mapping[str, int]) -> list[str]:
    """Names of what learner.parallel.offload moves to the host's memory."""
    moved = ("weights", "gradient", "reference model")
    return [name for name in parts if name in moved or name.startswith("optimiser")]


def _weights(widths: Widths, trained: Trained, work: Work) -> dict[str, int]:
    if work.ranks == 1:
        frozen = 0 if trained.parameters == widths.parameters and not work.lora_rank else widths.parameters
        changing = trained.parameters
        if frozen and not work.lora_rank:  # the trained ones are among the others
            frozen -= changing
        masters = changing * FLOAT if work.width < FLOAT else 0
        return {"weights": (frozen + changing) * work.width + masters}
    tables = widths.table * (1 if widths.tied else 2)
    together = AHEAD if work.reshard else widths.layers
    base = widths.parameters * work.width + trained.parameters * FLOAT if work.lora_rank else widths.parameters * FLOAT
    return {
        "weights": int(base * widths.part(work)),
        "weights that are gathered": work.width * (tables + together * widths.gathered(work)),
    }


def _moments(widths: Widths, trained: Trained, work: Work) -> list[dict[str, int]]:
    """Bytes that each moment of a step adds to what stays."""
    layer, again = work.tokens * widths.layer(work), ""
    inputs = work.tokens * widths.hidden * work.width
    kept, last = layer * trained.layers, 0
    if work.checkpointing:
        kept, last, again = inputs * trained.layers, layer, ", layers again"
    kept_name = "kept for backward" + again
    table, float_table = (widths.table * size if trained.tables else 0 for size in (work.width, FLOAT))
    logits, other = _logits(widths, work), float_table + (table if work.width < FLOAT else 0)
    waits = table if widths.tied else 0  # for the gradient of the embedding, which is the same parameter's
    copied = widths.table * (FLOAT if work.head_float32 and work.width < FLOAT else 0)
    reduced = (work.width + FLOAT) * AHEAD * widths.in_layer if work.ranks > 1 else 0
    of_tables = FLOAT * widths.table if work.ranks > 1 and trained.tables else 0
    largest = max(widths.table if trained.tables else 0, widths.hidden * widths.inner)
    return [
        {kept_name: kept + ROWS * inputs, "logits": logits, "gradient of the head": max(other, float_table + copied)},
        {kept_name: kept + last + ROWS * inputs, "gradient of the head": waits, "gradients of two layers": reduced},
        {"gradients of head and embedding": waits + table + of_tables, "hidden states": ROWS * inputs},
        {"copies in the update": FLOAT * TEMPORARY.get(work.optimizer, 0) * largest},
    ]


def _self_test(widths: Widths, work: Work) -> int:
    """A base in few bits has float32 copies of first layer, embedding and head, for the self-test alone."""
    if not work.lora_rank or work.width == FLOAT:
        return 0
    return FLOAT * (widths.table * (1 if widths.tied else 2) + widths.in_layer)


def _logits(widths: Widths, work: Work) -> int:
    buffer = LOGITS.get(work.kind, LOGITS_ELSEWHERE)
    row = FLOAT * max(widths.words, 1)
    rows = work.head_rows or max(1, buffer // row)
    return BUFFERS * row * min(rows, work.tokens)


# -- of a topology, on this machine -----


def work_of(t: Topology) -> Work:
    """The most that the learner of a topology does at a time."""
    kind, learner, memory = device.expected(t.device_of("learner")), t.learner, t.learner.memory
    step = t.derived.limits.n_hi * t.groups.size * t.longest
    again = device.computes_again(memory.activation_checkpointing, kind, lambda: pretrained.parameters(t.model.path))
    return Work(
        tokens=min(max(learner.micro_batch_tokens, t.longest), step), dtype=t.model.dtype, checkpointing=again,
        lora_rank=t.lora.rank, lora_layers=t.lora.layers, lora_experts=t.lora.experts, targets=t.lora.targets,
        head_rows=memory.head_rows, kind=kind,
        optimizer=learner.optimizer, train_layers=learner.train_layers, ranks=t.ranks, reshard=learner.parallel.reshard,
        replicate=learner.parallel.replicate, tensor=learner.parallel.tensor, expert=learner.parallel.expert,
        offload=t.ranks > 1 and learner.parallel.offload == "all",
        reference=learner.kl != "none" and not (t.lora.on and not t.model.reference),
        head_float32=memory.head_dtype == "float32",
    )


def of_topology(t: Topology) -> dict[str, int]:
    """The sum of `learner_sum`, with what is published where that lies in the same memory, of all ranks that share it;
    empty if config.json does not say how large the model is, or nothing is trained here."""
    return _of(t, work_of(t)) if _known(t) else {}


def together(topologies: Sequence[Topology]) -> int:
    """Bytes of one learner for the adapters of all of these on one base: base and libraries are there once."""
    total = 0
    for at, t in enumerate(topologies):
        parts = of_topology(t)
        known = 0 if t.model.path.startswith(TINY) else pretrained.parameters(t.model.path)
        base = Widths.of(_config(t), known).parameters * work_of(t).width if parts else 0
        total += sum(parts.values()) - (base + parts["libraries"] if at and parts else 0)
    return total


def _known(t: Topology) -> bool:
    config = _config(t)
    text = language_of(config)
    processes = any(process.role == "learner" and not process.spec.command for process in t.processes())
    learns = processes or any(entry.role == "learner" and entry.model for entry in t.process)  # in another's process
    widths = pretrained.size_in(text, "hidden_size", "n_embd", "d_model"), pretrained.size_in(text, *pretrained.LAYERS)
    return learns and all(widths)


def _config(t: Topology) -> dict[str, Any]:
    folder = pretrained.model_at(t.model.path)
    return pretrained.read_config(folder) if folder else {}


def _of(t: Topology, work: Work) -> dict[str, int]:
    parameters = 0 if t.model.path.startswith(TINY) else pretrained.parameters(t.model.path)
    parts, size = learner_sum(_config(t), work, parameters), Widths.of(_config(t), parameters).parameters
    if work.kind == "cpu":
        parts = {name: value * _at_home(t, work) for name, value in parts.items()}
        parts["published"], parts[COPY] = _published(t, size), _copy(t, work, size)
    parts["teacher model"] = _teacher(t, work.kind)
    return {name: value for name, value in parts.items() if value}


def _at_home(t: Topology, work: Work) -> int:
    """Ranks that share the memory of one host."""
    return max(1, work.ranks // (1 + len(t.rank_hosts)))


def _published(t: Topology, parameters: int) -> int:
    """Bytes of host memory with the versions that are published."""
    return int(t.weights.copies * parameters * pretrained.BYTES_OF[t.model.dtype])


def _copy(t: Topology, work: Work, parameters: int) -> int:
    """Bytes of host memory with the weights of the version before; of an adapter too little to count."""
    copies = t.learner.parity.copy and t.learner.parity.every > 0 and t.ranks == 1 and not t.lora.on
    return parameters * work.width if copies else 0


def of_host(t: Topology) -> dict[str, int]:
    """Bytes that a learner elsewhere needs of the host's memory: the model while it is read, or later what it
    publishes."""
    if not _known(t) or work_of(t).kind == "cpu":
        return {}
    parameters, work = pretrained.parameters(t.model.path), work_of(t)
    published = _published(t, parameters)
    if work.offload:
        alike = learner_sum(_config(t), replace(work, offload=False), parameters)
        offloaded = _at_home(t, work) * sum(alike[name] for name in _on_host(alike))
        parts = {"parts of the model, gradients and optimiser of its ranks": offloaded, "published": published}
    else:
        each = pretrained.BYTES_OF[t.model.dtype] if t.lora.on else FLOAT
        read = parameters * each if t.ranks == 1 else 0  # ranks read the rows of their shards
        once = {"published": published} if published > read else {"the model while it is read": read}
        parts = {**once, COPY: _copy(t, work, parameters)}
    return {name: size for name, size in parts.items() if size}


def _teacher(t: Topology, kind: str) -> int:
    """Bytes of its weights; ranks of a host share its memory."""
    if not catalog.taught(t.learner):
        return 0
    folders = [path for path in (t.model.teacher, *(row.path for row in t.learner.teacher)) if path]
    count = sum(map(pretrained.parameters, dict.fromkeys(folders)))
    return count * pretrained.BYTES_OF[t.model.dtype] // (1 if kind == "cpu" else t.ranks)


def memory_of(kind: str) -> int:
    """Bytes of memory that a device of that kind has on this machine; 0 if that is not known."""
    return host_memory() if kind == "cpu" else device.memory(kind)


def host_memory(root: Path = Path("/")) -> int:
    """The memory of the machine, or less if this control group may have less; 0 if neither says."""
    limits = []
    try:
        [line] = [row for row in (root / "proc/meminfo").read_text().splitlines() if row.startswith("MemTotal:")]
        limits.append(int(line.split()[1]) << 10)
        limits.append(int((root / "sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        pass  # a limit of "max" is none
    return min(limits, default=0)


def lines(t: Topology) -> list[str]:
    parts = of_topology(t)
    if not parts:
        return ["learner memory: unknown, config.json does not say how large the model is"]
    work = work_of(t)
    limit = memory_of(work.kind)
    of = f" of {gib(limit)}" if limit else f"; how much this machine's {work.kind} has is not known here"
    several = f", {_at_home(t, work)} ranks together" if work.kind == "cpu" else ", each rank"
    ranks, size, host = several if work.ranks > 1 else "", gib(sum(parts.values())), of_host(t)
    return [
        f"learner memory ({work.kind}{ranks}): {size}{of}, micro-batches of {work.tokens} tokens",
        f"  {_each(parts, ', ')}", *([f"  and of the host's memory: {_each(host, ', ')}"] if host else []),
    ]


def of_ranks(t: Topology) -> str:
    """Memory that another host's ranks need, as text; empty if it is unknown."""
    size = sum(value for name, value in of_topology(t).items() if name != "published")
    kind = work_of(t).kind
    return f"{gib(size)} ({kind}{'' if kind == 'cpu' else ', each'})" if size else ""


def require(t: Topology) -> None:
    work, parts, host = work_of(t), of_topology(t), of_host(t)
    limit, needed = memory_of(work.kind), sum(parts.values())
    if limit and needed > limit:
        raise UserError(
            f"the learner needs about {gib(needed)} of memory, its {work.kind} has {gib(limit)}: "
            f"{_each(parts, ' + ')}; {_remedies(t, work, limit)}"
        )
    if host and 0 < host_memory() < sum(host.values()):
        fewer = 'model.dtype = "bfloat16", or ' if work.width == FLOAT else ""
        raise UserError(
            f"the learner needs about {_each(host, ' + ')} of the host's memory, which has {gib(host_memory())}; set "
            f'{fewer}lora.rank = 32 with weights.transport = "lora_hotswap"'
        )


def _each(parts: Mapping[str, int], between: str) -> str:
    return between.join(f"{name} {gib(size)}" for name, size in parts.items())


def _lower(t: Topology, work: Work) -> dict[str, Work]:
    """Settings that may lower the sum, in the order in which they cost least."""
    few = max(t.longest, min(FEWER, work.tokens))
    settings = {
        'learner.memory.activation_checkpointing = "full"': replace(work, checkpointing=True),
        f"learner.micro_batch_tokens = {few}": replace(work, tokens=few),
    }
    if work.width == FLOAT:
        settings['model.dtype = "bfloat16"'] = replace(work, dtype="bfloat16")
    if work.optimizer == "adamw" and not work.lora_rank:
        settings['learner.optimizer = "adamw8bit"'] = replace(work, optimizer="adamw8bit")
    if not work.train_layers and not work.lora_rank:
        layers = Widths.of(_config(t)).layers
        upper = f"{layers * 3 // 4}-{layers - 1}"
        settings[f'learner.train_layers = "{upper}"'] = replace(work, train_layers=upper)
    if work.kind != "cpu":
        settings[f"ranks = {2 * work.ranks} in the learner's [[process]]"] = replace(work, ranks=2 * work.ranks)
    if work.kind != "cpu" and work.ranks > 1 and not work.offload:
        settings['learner.parallel.offload = "all"'] = replace(work, offload=True)
    if not work.lora_rank:
        settings["lora.rank = 32"] = replace(work, lora_rank=32, train_layers="", optimizer="adamw")
    return settings


def _remedies(t: Topology, work: Work, limit: int) -> str:
    """The settings that lower the sum, with what each alone would leave."""
    now, offered = sum(_of(t, work).values()), _lower(t, work)
    left = {text: sum(_of(t, other).values()) for text, other in offered.items()}
    lower = {text: size for text, size in left.items() if size < 0.99 * now}
    if not lower:
        return "set a smaller generation.max_new_tokens, or choose a smaller model.path"
    choices = ", or ".join(f"{text} (then {gib(size)})" for text, size in lower.items())
    enough = any(size <= limit for size in lower.values())
    return f"set {choices}" + ("" if enough else "; none of them is enough alone")


def gib(size: int) -> str:
    """Bytes as text."""
    return f"{size / (1 << 30):.2f} GiB"
