"""`busrl check` and `busrl launch --dry-run`: a topology explained on one page, before anything is started.

Prints the processes, the derived sums with their formulas, sizes against what /dev/shm has, the prompt files, the model
folder, and what deserves a warning. Uses `load` for everything that can be wrong. Starts and changes nothing.

- What is printed is what `launch` would use: the same Topology, the same derived values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from busrl import capabilities, curve
from busrl.algorithms import catalog
from busrl.capabilities import CALLER_ROLES, RANK
from busrl.data import pretrained, trace
from busrl.data.pretrained import model_at
from busrl.data.vocabulary import token_rows
from busrl.errors import SharedMemoryFull, UserError
from busrl.preflight import colocation, learning_rates, machine, memory, prompt_sources, trial, tuner_memory
from busrl.states import TINY
from busrl.system import device
from busrl.topology.kinds import ADAPTERS, SCRIPTED, SERVED, TOGETHER
from busrl.topology.prompts import AskedSet
from busrl.topology.reader import show
from busrl.topology.rewards import REWARD_KINDS
from busrl.topology.schema import Faults, ProcessName, Topology, has_model
from busrl.topology.sizes import MOST_SAMPLES, count

FOR_PEOPLE = ("explain", "algorithm", "trial", "warnings")  # of the derived values, those that no process reads
MORE = "how slots, memory and limits follow from this: --verbose"
NOT_PRINTED = ("simulate", "process", "source", "overrides", "here")  # no process reads them, or they stand elsewhere


def report(topology: Topology, verbose: bool = True) -> str:
    """The page: what a person decides, and with `verbose` the sums that follow."""
    more = (_bus, _sums, _sizes) if verbose else ()
    own = (_memory, *capabilities.plugs("explained"), colocation.lines)
    parts = (_head, _warnings, _first, _data, _model, *own, _processes, *more)
    sections = ["\n".join(lines) for part in parts if (lines := list(part(topology)))]
    return prompt_sources.named("\n\n".join([*sections, *([] if verbose else [MORE])])) + "\n"


def _memory(topology: Topology) -> list[str]:
    return tuner_memory.lines(topology) if topology.is_service else memory.lines(topology)


def require_memory(topology: Topology) -> None:
    """Raise SharedMemoryFull, with the sum, if /dev/shm cannot hold this run."""
    parts, free = shared_memory(topology), machine.shm_free()
    if (needed := sum(size for _, size in parts)) > free:
        text = " + ".join(f"{name} {_mib(size)}" for name, size in parts)
        raise SharedMemoryFull(
            f"{machine.SHM} has {_mib(free)} free, the run needs {text} = {_mib(needed)}: enlarge it (mount -o remount,"
            f"size=... {machine.SHM}; docker run --shm-size), `busrl ring clean` old runs, or lower ring.slots"
            f"{' or ring.expected_tokens' if topology.derived.ring_held < topology.derived.ring_bytes else ''}"
        )


def require_cores_and_disk(topology: Topology, run_dir: Path) -> None:
    """Raise UserError for missing cores or memory, DiskFull if run_dir cannot hold the published versions."""
    machine.require_cores(topology, machine.cores())
    machine.require_axes(topology)
    for tag in topology.tags:
        memory.require(topology.of(tag))
        machine.require_disk(topology.of(tag), model_at(topology.of(tag).model.path), run_dir)
    colocation.require(topology)
    if topology.is_service:
        tuner_memory.require(topology, run_dir)


def shared_memory(topology: Topology) -> list[tuple[str, int]]:
    """Files of the run in /dev/shm and what they take, of all its models; the weights are left out while unknown. The
    ring is counted with usual answers: the memory of long ones goes back when they are trained."""
    sizes = [(f"{name} of {tag}", size) for tag in topology.tags if (beside := topology.of(tag)).beside
             for name, size in _shared_of_one(beside)] if topology.models else []
    return [*_shared_of_one(topology), *sizes]


def _shared_of_one(topology: Topology) -> list[tuple[str, int]]:
    sizes = [("ring", topology.derived.ring_held)]
    if topology.frozen:
        return sizes
    parameters = pretrained.model_facts(model_at(topology.model.path)).parameters
    if _in_shared_memory(topology) and parameters:
        size = parameters * pretrained.BYTES_OF[topology.model.dtype]
        sizes.append(("weights", int(topology.weights.copies * size)))
    cost = machine.weight_cost(topology, model_at(topology.model.path))
    if topology.weights.transport in ADAPTERS and cost is not None and cost.version:
        sizes.append(("adapters", cost.total))
    return sizes


def _in_shared_memory(topology: Topology) -> bool:
    """Tell whether whole versions of the weights lie in /dev/shm."""
    return topology.weights.copies > 0 and topology.weights.transport not in TOGETHER


def process_configs(topology: Topology) -> list[dict[str, Any]]:
    """Write a resolved configuration per process: what it is started as, and the settings of the run."""
    settings = {name: value for name, value in topology.to_dict().items() if name not in NOT_PRINTED}
    settings["derived"] = {name: value for name, value in settings["derived"].items() if name not in FOR_PEOPLE}
    if topology.faults == Faults():
        del settings["faults"]
    return [
        {
            "process": process.name,
            "command": command(process),
            "env": {"OMP_NUM_THREADS": str(process.spec.threads), **process.spec.env},
            "settings": settings,
        }
        for process in topology.processes()
    ]


def dry_run(topology: Topology) -> str:
    lines = [json.dumps(config, ensure_ascii=False) for config in process_configs(topology)]
    return report(topology) + "\nresolved, one line per process\n" + "\n".join(lines) + "\n"


def command(process: ProcessName) -> list[str]:
    """The command that starts a process, RUN_DIR standing for the run directory."""
    return list(process.spec.command) or ["python", "-m", "busrl.roles", "RUN_DIR", process.name]


def recipes(names: Sequence[str] = ()) -> str:
    """List the keys that each of these recipes sets, itself or through its loss; all recipes without `names`."""
    if unknown := [name for name in names if name not in catalog.RECIPES]:
        raise UserError(f"there is no recipe {', '.join(unknown)}; there are {', '.join(catalog.RECIPES)}")
    lines = ["learner.recipe = NAME sets these keys where the file leaves them out; formulas: docs/algorithms.md"]
    for name in names or catalog.RECIPES:
        recipe = catalog.RECIPES[name]
        facts = catalog.LOSS_FACTS[recipe["learner.loss"]]
        lines += ["", f"{name}  (its loss: {facts.source})"]
        lines += [f"  {key} = {_of_recipe(value)}" for key, value in {**facts.settings, **recipe}.items()]
    return "\n".join(lines)


def _of_recipe(value: object) -> str:
    if isinstance(value, catalog.OfLimit):
        return "generation.max_new_tokens" + (f" / {value.parts}" if value.parts > 1 else "")
    return show(value) + (" (as good as none)" if value == catalog.NO_DUAL else "")


# -- the parts of the page -----


def _head(t: Topology) -> Iterator[str]:
    fits = sum(size for _, size in shared_memory(t)) <= machine.shm_free()
    yield f"{t.source}: {'ok' if fits else f'right, but it does not fit into {machine.SHM}'}"
    for override in t.overrides:
        yield f"  --set {override}"
    bound = f" (age at most {t.weights.max_staleness} steps)" if t.weights.mode == "batch-async" else ""
    yield (
        f"run {t.run.name}: {t.run.max_steps} steps of {t.learner.trigger.n_min} groups x {t.groups.size} samples, "
        f"{t.weights.mode}{bound}, loss {t.learner.loss}, seed {t.run.seed}"
    )
    yield f"learning rate {t.learner.lr:g}: {learning_rates.rate_advice(t)}"
    yield from learning_rates.other_rate_advice(t)
    yield from learning_rates.stale_rate_advice(t)
    yield from (f"  {text}" for text in t.derived.algorithm)
    if (why := t.learner.held_back) and t.learner.updates_per_batch == 1:
        yield f"a step is computed at once, when it fires: {why}"
    drawn, prompts, seats = t.run.max_steps * t.learner.trigger.n_min, t.derived.train_prompts, len(t.seats)
    if prompts:
        each = f", {seats} for each draw" if seats > 1 else ""
        text = f"{drawn} groups of {prompts} prompts{each}, more where groups are set aside"
        yield f"epochs {drawn / seats / prompts:.3g}: {text}"
    samples = t.learner.trigger.n_min * t.groups.size
    most = samples * t.generation.max_new_tokens
    yield f"tokens per step {most} at most: {samples} answers of up to {t.generation.max_new_tokens} tokens"


def _first(t: Topology) -> Iterator[str]:
    """The first prompt, and what two answers to it are worth; the loader has tried a reward that is foreign code."""
    reward = t.reward
    if reward.part:
        yield "reward: " + " + ".join(f"{part.weight:g} x {part.name} ({part.kind})" for part in reward.part)
    yield from trial.facts_of_parts(t)
    tried = all(REWARD_KINDS[part.kind].is_tried for part in reward.part)
    yield from (t.derived.trial if tried else ()) or trial.try_first(t).lines
    yield from trial.notes_of_parts(t)


def _processes(t: Topology) -> Iterator[str]:
    yield f"{'process':<12} {'engine':<8} {'device':<8} {'threads':>7}  command"
    for process in t.processes():
        engine = process.spec.engine if process.role == "rollout" else "-"
        alone = "  (validation only)" if process.spec.serves == "validation" else ""
        where = f"{_device(t, process):<8} {process.spec.threads:>7}"
        bound = f" on core {process.spec.cpus}" if process.spec.cpus else ""
        yield f"{process.name:<12} {engine:<8} {where}{bound}  {' '.join(command(process))}{alone}"
    yield from _hosts(t)
    outside = [entry.role for entry in t.process if entry.count == 0]
    if outside:
        yield f"expected to join from outside, or not at all: {', '.join(outside)}"
        yield f"  (through the keeper's gateway, or by mapping the ring; a task's lease is {t.limits.lease_s:g} s)"


def _hosts(t: Topology) -> Iterator[str]:
    """List what runs on each other host, and the shared memory that it needs there."""
    for host in t.host_names:
        there = [entry for entry in t.process if host in entry.hosts]
        runs = [f"{entry.count} x rollout ({entry.engine})" for entry in there if entry.role == "rollout"]
        if rewards := sum(entry.count for entry in there if entry.role == "reward"):
            runs.append(f"{rewards} x reward, which judge what is generated there")
        runs += [f"{entry.count} x {entry.role}" for entry in there if entry.role in CALLER_ROLES]
        of_host = capabilities.plug("hosts", "host_topology")(t, host)
        ranks = [process.name for process in of_host.processes() if process.role == RANK]
        if ranks:
            runs.append(f"{ranks[0]}{f' to {ranks[-1]}' if len(ranks) > 1 else ''} of the learner")
        generates = capabilities.plug("hosts", "host_rows")(t, host)
        needs = sum(size for name, size in shared_memory(of_host) if name != "weights" or generates)
        start = " ".join(t.hosts.start).replace("{host}", host) or "`busrl host` there"
        yield f"on {host}, by {start}: {', '.join(runs)}"
        most = needs + of_host.derived.ring_bytes - of_host.derived.ring_held
        more = f", at most {_mib(most)}" if most > needs else ""
        yield f"  {of_host.derived.slots} slots, {_mib(needs)} of shared memory{more}"
        if ranks and (rank_memory := memory.of_ranks(t)):
            yield f"  memory of its ranks: {rank_memory}"


def _device(t: Topology, process: ProcessName) -> str:
    """The device of a process's model, and the devices that it sees; "-" for one without a model."""
    models = process.role in ("learner", RANK) or (process.role == "rollout" and process.spec.engine != SCRIPTED)
    if not models or process.spec.command:
        return "-"
    return t.device_of(process.name) + (f":{process.devices}" if process.devices else "")


def _bus(t: Topology) -> Iterator[str]:
    yield "bus"
    yield "  ipc, in a directory that only this user can enter"
    if t.bus.endpoint != "ipc":
        directory = curve.directory_of(t.bus.keys)
        names = curve.allowed(directory)
        more = "two ports" if t.host_names else "port"
        yield f"  {t.bus.endpoint} and the next {more}, encrypted (CURVE) with the keys in {directory}"
        yield f"  {len(names)} clients may connect there" + (f": {', '.join(names)}" if names else "")
        for problem in curve.broken(directory):
            yield f"  accepts no client: {problem}"


def _sums(t: Topology) -> Iterator[str]:
    yield "groups and slots"
    for line in t.derived.explain:
        yield f"  {line}"
    rounds = t.derived.val_samples
    yield f"  validation: {rounds} answers a round, {t.derived.val_reserve} slots" if rounds else "  validation: none"


def _sizes(t: Topology) -> Iterator[str]:
    yield f"shared memory ({machine.SHM} has {_mib(machine.shm_free())} free)"
    for name, size in shared_memory(t):
        yield f"  {name}: {_mib(size)}"
    if t.derived.ring_held < t.derived.ring_bytes:
        usual = f"{t.derived.slots} answers of {t.derived.usual_tokens} tokens (ring.expected_tokens)"
        yield f"    that is with {usual}; at most {_mib(t.derived.ring_bytes)}, if all are as long as they may be"
    if len(_shared_of_one(t)) == 1 and _in_shared_memory(t):
        yield "  weights: twice the size of the model, known when it is loaded"
    yield from _blocks(t)
    yield from _versions(t)


def _blocks(t: Topology) -> Iterator[str]:
    if t.weights.transport != "broadcast":
        return
    yield f"broadcast (memory of the {'host' if t.weights.backend == 'gloo' else 'devices'}, besides the models)"
    size = pretrained.model_facts(model_at(t.model.path)).parameters * pretrained.BYTES_OF[t.model.dtype]
    if not size:
        yield "  size unknown until the model is there"
        return
    for who, copies in machine.broadcast_copies(t):
        yield f"  {who}: {copies:g} x {_mib(size)} = {_mib(int(copies * size))}"


def _versions(t: Topology) -> Iterator[str]:
    cost = machine.weight_cost(t, model_at(t.model.path))
    if cost is None:
        return
    where = f"in {machine.SHM}" if t.weights.transport in ADAPTERS else "in the run directory"
    yield f"published versions ({where})"
    if not cost.version:
        yield "  size unknown until the model is there"
        return
    yield f"  {_mib(cost.version)} each, {cost.kept} are kept"
    yield f"  with the one being written and those that engines hold at most {cost.most}: {_mib(cost.total)}"


def _data(t: Topology) -> Iterator[str]:
    yield "prompts"
    yield f"  train: {t.data.train}, {t.derived.train_prompts} prompts"
    for source in t.derived.sources:
        size = f"{source.share / 10:g} % of the draws, " if len(t.derived.sources) > 1 else ""
        yield f"    {source.name}: {size}{source.text}"
    yield from _skipped(t)
    for asked_set in t.sets:
        name = f" {asked_set.name}" if asked_set.name else ""
        yield f"  validation{name}: {asked_set.data}, {asked_set.lines} prompts; {_asked(t, asked_set)}"
        yield from (f"    {made_set.text}" for made_set in t.derived.made if made_set.name == asked_set.name)
    yield f"  longest line: {t.derived.task_bytes} bytes" + (" (bound)" if t.data.train.startswith(TINY) else "")
    if t.derived.prompt_text:
        yield f"  {t.derived.prompt_text}"
    if t.scripted:
        yield f"  {_answers(t)}"


def _skipped(t: Topology) -> Iterator[str]:
    skip = t.data.skip
    if not skip.on:
        return
    high = f"{skip.max_pass_rate:g} or more" if skip.max_pass_rate else ""
    low = f"less than {skip.min_pass_rate:g}" if skip.min_pass_rate else ""
    judged = f"{skip.after} answers of its newest groups" if skip.after else "its newest group"
    rest = f"rests for {skip.rest} passes over them and is tried again" if skip.rest else "is never tried again"
    yield (
        f"    a prompt is left out whose pass rate over {judged} is {' or '.join(filter(None, (high, low)))} (right: a "
        f"reward of {t.validation.solved:g} or more, validation.solved): it {rest}"
    )


def _asked(t: Topology, asked_set: AskedSet) -> str:
    """Describe what a round asks of a set, and which figures it gives."""
    text = "all asked" if asked_set.prompts == asked_set.lines else f"{asked_set.prompts} asked"
    if asked_set.prompts > asked_set.lines > 0:
        fewest, more = divmod(asked_set.prompts, asked_set.lines)
        text = f"{asked_set.prompts} answers, {fewest}{f' or {fewest + 1}' if more else ''} to each"
    if asked_set.k > 1:
        extracts = t.reward.finder is not None
        vote = f"maj@{asked_set.k}" if extracts else f"no maj@{asked_set.k}: the reward extracts no answer"
        text += f" {asked_set.k} times: pass@1 to pass@{asked_set.k}, {vote}"
    return f"{text}; every {asked_set.every} steps" if asked_set.every else text


def _answers(t: Topology) -> str:
    lengths = sorted(length for task in trace.read(t.data.train, t.data.prompt_key) for length in task.lengths)
    limit = t.generation.max_new_tokens
    cut = sum(length > limit for length in lengths)
    shown = f"mean {sum(lengths) / len(lengths):.0f}, median {lengths[len(lengths) // 2]}, longest {lengths[-1]} tokens"
    return f"scripted answers: {shown}; {cut} of {len(lengths)} are cut by generation.max_new_tokens = {limit}"


def _model(t: Topology) -> Iterator[str]:
    yield "model"
    if t.model.path.startswith(TINY):
        folder = model_at(t.model.path)
        yield f"  {t.model.path}: " + (f"made, {folder}" if folder else "made on first use")
    else:
        yield f"  {t.model.path}"
    facts = pretrained.model_facts(model_at(t.model.path))
    if facts.kind:
        size = f"{facts.parameters / 1e6:.2f} M parameters" if facts.parameters else "size unknown"
        yield f"  {facts.kind}: {facts.layers} layers, width {facts.hidden}, vocabulary {facts.vocabulary}, {size}"
        yield from _rows_without(t)
        yield f"  {t.model.dtype}, takes {facts.context or 'an unknown number of'} tokens"


def _rows_without(t: Topology) -> Iterator[str]:
    folder = model_at(t.model.path)
    if folder is not None and (count := token_rows(folder).without):
        yield f"  {count} rows of its vocabulary have no token: engines draw none of them, the learner leaves them out"


def warnings(t: Topology) -> list[str]:
    """List warnings before a start: the findings of the loader, and what this machine lacks."""
    return [prompt_sources.named(text) for text in (*t.derived.warnings, *_lacking(t), *_doubts(t))]


def _lacking(t: Topology) -> Iterator[str]:
    computing = (entry for entry in t.every_entry if entry.role in ("rollout", "learner") and entry.engine != SCRIPTED)
    threads = sum(entry.threads * entry.count for entry in computing)
    if threads > (there := len(machine.cores())):
        yield f"[[process]]: rollouts and learner have {threads} threads for {there} cores; lower threads or count"
    name = t.openai.api_key_env
    asking = [entry for entry in t.process if entry.role == "rollout" and entry.engine in SERVED]
    if name and not all(entry.env.get(name) or os.environ.get(name) for entry in asking):
        yield f"openai.api_key_env: ${name} is not set in this environment; the run ends at once where it is not set"
    for kind in sorted({t.device_of(process.name) for process in t.processes() if has_model(process.spec)} - {"auto"}):
        if not device.likely(kind):
            text = f"this machine has no {kind} device, or its torch was not built for one: a start here would end"
            yield f'model.device = "{kind}": {text}; "auto" takes what there is'


def _doubts(t: Topology) -> Iterator[str]:
    """List what may end a run, or keep it from beginning."""
    free, needs = machine.shm_free(), sum(size for _, size in shared_memory(t))
    if needs <= free < (most := needs + t.derived.ring_bytes - t.derived.ring_held):
        text = f"{machine.SHM} has {_mib(free)} free: enough for usual answers ({_mib(needs)}), not for {_mib(most)}"
        yield f"{text}, if all are as long as they may be; the run would pause then, and lose nothing"
    if t.data.train not in ("", t.validation.data) and t.derived.train_prompts * len(t.seats) < t.learner.trigger.n_min:
        yield f"data.train: {t.derived.train_prompts} prompts for steps of {t.learner.trigger.n_min} groups"
    if (groups := t.run.max_steps * t.derived.limits.n_hi) > (most := MOST_SAMPLES // (2 * t.groups.size)):
        text = f"at least {groups} groups; a run directory has room for {most} prompts of groups.size = {t.groups.size}"
        yield f"run.max_steps: {text}, and the run ends by name there"
    clients = curve.allowed(curve.directory_of(t.bus.keys)) if t.bus.endpoint != "ipc" else {}
    for host in () if t.hosts.start else t.host_names:
        if host not in clients:
            yield f"process.hosts: {host} has no key yet, and is turned away; see `busrl keys add {host}`"
    if t.bus.endpoint != "ipc" and not clients and not t.host_names:
        yield f"bus.endpoint: no client may connect to {t.bus.endpoint} yet; see `busrl keys add NAME`"
    if count(t, "rollout") == 0:
        yield "[[process]]: no rollout is started here; the run waits until one joins"
    outside = any(entry.count == 0 or entry.command for entry in t.process)
    if outside and t.task_message_bytes > t.bus.max_message_bytes:
        text = f"workers without a mapping cannot join: a message with a sample may have {t.task_message_bytes} bytes"
        yield f"bus.max_message_bytes = {t.bus.max_message_bytes}: {text}"
    if text := trial.ends(t):
        yield text


def _warnings(t: Topology) -> Iterator[str]:
    if texts := warnings(t):
        yield from ("warnings", *(f"  {text}" for text in texts))


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
