"""Which settings an engine can not work with; those of weight transports are in `weight_rules.py`.

Pure: looks at a topology's settings only. What an engine can do is told in docs/engines.md.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator

from busrl.topology.rules import Check, Finding
from busrl.topology.schema import RESTARTS, Openai, Process, Topology
from busrl.topology.weight_rules import FOLDERS, rollouts


def findings(topology: Topology) -> list[Finding]:
    """All findings, in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(topology)]


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
    yield from _weights(t, at, [entry for _, entry in found])
    yield from _chat(t, at)
    if t.generation.on_update == "keep":
        rule = "an answer that an update cuts goes on from its tokens, so its keys are always computed again"
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
        rule = "is no address of an endpoint" if url else "an endpoint is asked, and none is named"
        yield Finding(("openai.base_url", at), rule, "for example http://127.0.0.1:8000/v1")


def _weights(t: Topology, at: str, entries: list[Process]) -> Iterator[Finding]:
    """Weights that are trained have to reach the server, or the run has to be one that can do without."""
    if t.openai.update == "none":
        if t.weights.mode != "fully-async":
            rule = "the server keeps its first weights, so every sample is older than this mode allows"
            remedy = 'update = "vllm" or "sglang", or mode = "fully-async"'
            yield Finding(("openai.update", "weights.mode", at), rule, remedy)
        else:
            rule = "the server keeps its first weights: what is trained is ever further from what generates"
            yield Finding(("openai.update", at), rule, 'update = "vllm" or "sglang"', warning=True)
        return
    if t.weights.transport not in FOLDERS:
        rule = "a server in another process is told of a folder, and this transport writes none"
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
        rule = "the server makes a user turn of the prompt, and what is trained would be without it"
        yield Finding(("openai.endpoint", "data.template", at), rule, 'template = "chat"')


def _system(t: Topology) -> Iterator[Finding]:
    if t.data.system and t.data.template != "chat":
        rule = "a text has no place for a system prompt"
        yield Finding(("data.system", "data.template"), rule, 'template = "chat", or write it into the prompts')
    if t.data.system and any(e.role == "rollout" and (e.count == 0 or e.command) for e in t.process):
        rule = "rollouts from outside are not told of it, and their prompts would be without it"
        yield Finding(("data.system", "process"), rule, "write the prompts as messages, the system message first")


CHECKS: tuple[Check, ...] = (_openai, _system)
