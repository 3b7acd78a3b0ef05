"""Decides whether a run carries routes, by model, engines and number type; and has the rules about keys of routes.

Looks at a topology and at the model's config.json. Knows nothing of slots, logs or how a model is replayed.

- `learner.routes = "auto"` never refuses for what it finds: it carries routes, or leaves them out and says why in one
  line of `busrl check`. "replay" refuses for the same reasons, but tries any family of models: the learner's start
  decides.
- All parts of a run look at `derived.routing` alone, which is made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from busrl.data.pretrained import model_at, read_config
from busrl.data.routing import Routing, routing_of
from busrl.data.vocabulary import language_of
from busrl.engines import vllm_versions
from busrl.preflight.findings import Check, Clash, Finding, clashes
from busrl.topology.kinds import ENGINES
from busrl.topology.schema import ATROPOS, Process, Topology
from busrl.topology.sizes import logs_routes, rollouts, route_bytes_of_step, segments_in

TRIED = ("deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
MOST_CHOSEN = 64  # experts of a token in a layer
OWN, REPLAY = 'routes = "own"', 'routes = "replay"'


def routing(t: Topology) -> tuple[Routing | None, str]:
    """The shape of the routes that the samples of a run carry, None for none; and a line that says so to people, empty
    for a model without experts."""
    shape = _shape(t)
    if shape is None:
        return None, ""
    experts = f"experts: {shape.top_k} of {shape.experts} in {len(shape.layers)} layers"
    if t.learner.routes == "own":
        return None, f"{experts}; the learner chooses its own"
    if t.learner.routes == "auto":
        if t.model.dtype == "float32":
            return None, f"{experts}; the learner chooses its own, which in float32 are the engine's"
        if (family := language_of(_config(t)).get("model_type")) not in TRIED:
            return None, f"{experts}; the learner chooses its own: models of type {family} were not tried ({REPLAY})"
        if any(map(_is_foreign, t.process)):
            return None, f"{experts}; the learner chooses its own: of programs of others nothing is known"
        if (objection := next(_objections(t, shape), None)) is not None:
            return None, f"{experts}; the learner chooses its own: {objection.rule}"
    of = "the answer" if t.learner.routes_of == "answer" else "prompt and answer"
    line = f"{experts}; those of {of} are the engine's, {shape.bytes_per_token} bytes for each token"
    with_them = replace(t, derived=replace(t.derived, routing=shape))
    if t.learner.log_routes == "auto" and t.learner.wal != "off" and not logs_routes(with_them):
        size = route_bytes_of_step(with_them) >> 20
        line += f"; of a step {size} MiB at most, which stay out of the write-ahead log (log_routes)"
    return shape, line


def _is_foreign(entry: Process) -> bool:
    """True for rollout processes that are programs of others, started here or from outside."""
    return entry.role == "rollout" and bool(entry.command or not entry.count)


def _shape(t: Topology) -> Routing | None:
    return routing_of(_config(t))


def _config(t: Topology) -> dict[str, Any]:
    folder = model_at(t.model.path)
    return read_config(folder) if folder is not None else {}


# -- what carries no routes -----


def _objections(t: Topology, shape: Routing) -> Iterator[Finding]:
    """The reasons why the samples of this run can have no routes of that shape."""
    if shape.top_k > MOST_CHOSEN:
        rule = f"a token has {shape.top_k} experts in a layer, and routes hold {MOST_CHOSEN}"
        yield Finding(("learner.routes", "model.path"), rule, OWN)
    if t.segments.on and t.segments.max_segments > (most := segments_in(routed=True)):
        rule = f"a slot with routes has room for {most} segments"
        yield Finding(("segments.max_segments", "learner.routes"), rule, f"lower it, or {OWN}")
    for at, entry in enumerate(t.process):
        if entry.role == ATROPOS:
            yield Finding(("learner.routes", f"process.{at}.role"), "episodes of atropos clients have no routes", OWN)
        if entry.role == "tinker":
            yield Finding(("learner.routes", f"process.{at}.role"), "clients of a service send no routes", OWN)
    for at, entry in rollouts(t):
        fault, argument = _fault_of_engine(t, entry)
        if fault:
            keys = ("vllm.extra", "learner.routes") if argument else ("learner.routes", f"process.{at}.engine")
            yield Finding(keys, fault, f"remove it, or {OWN}" if argument else OWN)


def _fault_of_engine(t: Topology, entry: Process) -> tuple[str, str]:
    """The reason why an engine gives no routes, and the argument of vLLM that it is for; "" where there is none."""
    kind = ENGINES.get(entry.engine)
    if kind is not None and not kind.routes:
        return f"{entry.engine} does not say which experts it chose", ""
    if entry.engine != "vllm":
        return "", ""
    device = entry.device or t.model.device
    caches = len(set(language_of(_config(t)).get("layer_types") or [""]))
    return vllm_versions.routes_fault(device, t.vllm.enforce_eager, dict(t.vllm.extra), entry.python, caches)


# -- rules -----

REPLAY_ONLY = "this run carries no routes"
TABLE = (
    Clash(("learner.routes_of", "learner.routes"),
          lambda t: t.learner.routes_of != "all" and t.derived.routing is None,
          f"{REPLAY_ONLY}; remove it", warning=True),
    Clash(("learner.log_routes", "learner.routes"),
          lambda t: t.learner.log_routes != "auto" and t.derived.routing is None,
          f"{REPLAY_ONLY}; remove it", warning=True),
    Clash(("learner.log_routes", "learner.wal"),
          lambda t: t.derived.routing is not None and t.learner.log_routes == "on" and t.learner.wal == "off",
          "there is no write-ahead log; remove it, or wal = \"sync\"", warning=True),
    Clash(("learner.routes_compare_every", "learner.routes"),
          lambda t: t.learner.routes_compare_every and t.derived.routing is None,
          f"{REPLAY_ONLY}; remove it", warning=True),
    Clash(("learner.routes_compare_every", "lora.dropout"),
          lambda t: t.learner.routes_compare_every and t.lora.dropout and t.lora.rank,
          "the forward that is compared has no dropout, so more than routes would differ; set one of them to 0",
          hidden=("lora.rank",)),
    Clash(("hosts.compress", "learner.routes"),
          lambda t: t.hosts.compress and (t.derived.routing is None or not t.host_names),
          "only routes that other hosts send are compressed, and there are none; remove it", warning=True),
    Clash(("learner.routes_of", "process"),
          lambda t: t.learner.routes_of != "all" and t.derived.routing is not None and t.has_callers,
          "the prompts of an episode's calls are answers of others, too; remove it"),
)


def _written(t: Topology) -> Iterator[Finding]:
    """Warn of programs of others, of which nothing is known."""
    foreign = [f"process.{at}.{'command' if entry.command else 'count'}" for at, entry in enumerate(t.process)
               if _is_foreign(entry)]
    if t.learner.routes == "replay" and foreign:
        rule = "a program has to write routes into its slots (docs/ring-tensors.md): a sample without routes is set " \
               "aside (fate M)"
        yield Finding(("learner.routes", *foreign[:1]), rule, f"let it write them, or {OWN}", warning=True)


def _refused(t: Topology) -> Iterator[Finding]:
    """Report what stands against routes that the file asks for."""
    if t.learner.routes != "replay":
        return
    shape = _shape(t)
    if shape is None:
        yield Finding(("learner.routes", "model.path"), "the model has no experts by its config.json", "remove it")
    else:
        yield from _objections(t, shape)


def _recomputed(t: Topology) -> Iterator[Finding]:
    """Warn of engines that compute again, with new weights, what running answers have read: as asked or as they choose.
    """
    asked, left = (t.generation.on_update == value for value in ("recompute", "auto"))
    choose = [f"process.{at}.engine" for at, entry in rollouts(t) if ENGINES[entry.engine].recomputes]
    if t.derived.routing is not None and (asked or (left and choose and t.weights.mode != "sync")):
        rule = "what a token read is computed again, over other experts than it was drawn by"
        yield Finding(("generation.on_update", "learner.routes", *choose[:1]), rule, 'on_update = "keep"', warning=True)


def _balanced(t: Topology) -> Iterator[Finding]:
    if t.learner.balance and (folder := model_at(t.model.path)) is not None and folder.is_dir() and _shape(t) is None:
        rule = "the model has no experts by its config.json"
        yield Finding(("learner.balance", "model.path"), rule, "remove it")


CHECKS: tuple[Check, ...] = (lambda t: clashes(t, TABLE), _refused, _written, _recomputed, _balanced)
