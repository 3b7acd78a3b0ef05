"""What each value of `weights.transport` needs and forbids.

One small function per subject, each yielding findings as those of `rules.py` do; a new transport adds its lines to the
tables and its own function to CHECKS. Pure: looks at a topology's settings only. What a version costs in bytes is in
`weight_costs.py`, the table for readers in docs/weights.md.

- A combination that can not work is refused here, before anything starts; a transport may rely on it.
"""

from __future__ import annotations

from collections.abc import Iterator

from busrl.topology.rules import Check, Finding
from busrl.topology.schema import RESTARTS, Process, Topology, Weights

ADAPTERS = ("lora_hotswap", "lora_restart")  # transports of which a version is an adapter
FOLDERS = (*ADAPTERS, "checkpoint_restart")  # ... or is any folder of files
ONE_HOST = ("shm", "broadcast", "cuda_ipc", *FOLDERS)  # those that reach the learner's host alone: so far all
SPARSE = ("shm", "broadcast")  # transports of values, which can send the changed ones alone, and a digest with them
ONE_COPY = "cuda_ipc"  # the learner's weights are the engine's own tensors
# The engines that a transport can give weights to. One that is not busrl's own (openai) has rules of its own.
ENGINES: dict[str, tuple[str, ...]] = {
    "shm": ("torch", "vllm", "mock"),
    "broadcast": ("torch", "vllm"),
    "cuda_ipc": ("torch", "vllm"),
    "lora_hotswap": ("torch", "vllm"),
    "lora_restart": ("torch", "vllm"),
    "checkpoint_restart": ("torch", "vllm"),
}
OURS = ("torch", "vllm", "mock")


def findings(topology: Topology) -> list[Finding]:
    """All findings, in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(topology)]


def rollouts(t: Topology) -> Iterator[tuple[int, Process]]:
    """The entries of rollout processes that run an engine of busrl's, with their positions."""
    return ((i, entry) for i, entry in enumerate(t.process) if entry.role == "rollout" and not entry.command)


def _engines(t: Topology) -> Iterator[Finding]:
    """A transport that an engine has no way to take weights from."""
    fit = ENGINES.get(t.weights.transport, OURS)
    for index, entry in rollouts(t):
        if entry.engine in OURS and entry.engine not in (*fit, "mock"):  # of scripted engines rules.py tells
            keys = (f"process.{index}.engine", "weights.transport")
            others = [name for name, engines in ENGINES.items() if entry.engine in engines]
            yield Finding(keys, f"gives weights to {' and '.join(fit)} only", f"transport = one of {', '.join(others)}")


def _adapters(t: Topology) -> Iterator[Finding]:
    """A transport of adapters needs one to be trained."""
    if t.weights.transport in ADAPTERS and not t.lora.on:
        rule = "a version of it is a LoRA adapter, and none is trained"
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
            rule = f"{name!r} is no last name of a layer: every layer whose name ends with it gets an adapter"
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


CHECKS: tuple[Check, ...] = (_engines, _adapters, _lora, _restarts, _ignored, _hosts)
