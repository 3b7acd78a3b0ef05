"""Rules about the models of a run together.

Looks at the whole topology, when that of each model has been checked by itself: `seat_rules` has the rules about the
seats of one. Knows nothing of files but config.json of a model that follows another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from busrl.data import pretrained
from busrl.preflight.findings import Finding
from busrl.preflight.memory import Widths
from busrl.several import seat_rules
from busrl.several.seat_rules import MOST_SEATS
from busrl.topology.kinds import FIFO
from busrl.topology.reader import show
from busrl.topology.rewards import RETURNED
from busrl.topology.schema import AGENT, ATROPOS, SERVE, Tag, Topology
from busrl.topology.sizes import count

Clash = Callable[[str, str, str], Finding]  # of a key, with the rule and the remedy
MOST_TAGS = 8
TAKES, RESTARTS = "torch", "vllm"  # engines of followers: one takes a checkpoint between two steps, one starts again
ENGINE_OF_SEVERAL = "vllm"  # that has the adapters of several models beside each other
HOTSWAP = "lora_hotswap"  # the transport with which versions of one model do not stop the engine for the others
PLAYERS = f'[[process]] role = "{AGENT}" or "{SERVE}"'


def findings_of_run(t: Topology) -> Iterator[Finding]:
    """Rules about the models of a run together; `t` is the whole topology."""
    seats = [seat for row in t.models for seat in row.seats]
    if twice := next((seat for seat in seats if seats.count(seat) > 1), ""):
        yield _of_models(t, f"the seat {twice!r} is named twice, and a seat is of one model", "name each once")
    if len(seats) > MOST_SEATS:
        yield _of_models(t, f"{len(seats)} seats", f"at most {MOST_SEATS} play one episode")
    trained = sum(len(row.seats) for row in t.models if row.trained)
    if len(seats) > 1:
        yield from _together(t, trained)
    yield from _processes(t)
    yield from _rounds(t)
    for row in t.models:
        if row.follow.model:
            yield from findings_of_follower(t, row)


def _of_models(t: Topology, rule: str, remedy: str, warning: bool = False) -> Finding:
    return Finding(("model",), rule, remedy, warning, value=f"[[model]] {', '.join(t.tags)}")


def _clash(t: Topology) -> Clash:
    who = ", ".join(seat for row in t.models for seat in row.seats) or ", ".join(t.seats)

    def clash(other: str, rule: str, remedy: str) -> Finding:
        return Finding((other, "model"), rule, remedy, value=f"seats {who}")

    return clash


def _together(t: Topology, trained: int) -> Iterator[Finding]:
    """Rules about an episode of several seats, so many of them trained."""
    clash = _clash(t)
    roles = {entry.role for entry in t.process}
    if not roles & {AGENT, SERVE}:
        yield clash("process", "several seats play in episodes, and no process plays one", f"add a {PLAYERS}")
    if ATROPOS in roles:
        yield clash("process", "environments of Atropos post answers of one seat", f"{PLAYERS} instead")
    if any(t.of(tag).scripted for tag in t.tags):
        yield clash("mock", "scripted engines play one seat", 'engine = "torch" or "vllm"')
    if t.host_names:
        yield clash("hosts", "several seats play on one host", "remove hosts from each [[process]]")
    if trained > 1:
        yield from _trained_together(t, clash)


def _trained_together(t: Topology, clash: Clash) -> Iterator[Finding]:
    if t.reward.kind != RETURNED:
        yield clash("reward.kind", "the rewards of several trained seats come from the episode", 'kind = "agent"')
    if t.data.skip.on:
        yield clash("data.skip", "a prompt that is left out has one pass rate", "remove [data.skip]")
    if t.scheduler.policy != FIFO:
        yield clash("scheduler.policy", "an order by length is that of one model", 'policy = "fifo"')


def _processes(t: Topology) -> Iterator[Finding]:
    for row in t.models:
        projected = t.of(row.tag)
        entries = [entry for entry in projected.process if entry.role == "rollout"]
        if not any(entry.count or entry.model for entry in entries) and row.own:
            rule = f"no process serves {row.tag}: workers from outside join the lead alone"
            yield Finding(("process",), rule, f'a [[process]] role = "rollout", model = "{row.tag}" with count >= 1',
                          value=f'model = "{row.tag}"')
        if row.own and projected.ranks > 1:
            rule = f"only the learner of the lead, {t.tag}, has several ranks"
            yield Finding(("process",), rule, "ranks = 1", value=f'model = "{row.tag}", ranks = {projected.ranks}')


def _rounds(t: Topology) -> Iterator[Finding]:
    """Warn of rounds of different sizes."""
    rounds = {tag: t.of(tag).learner.trigger.n_min for tag in t.trained_tags if t.of(tag).weights.mode == "sync"}
    least = min(rounds.values(), default=1)
    if any(size % least for size in rounds.values()):
        sizes = ", ".join(f"{tag} {size}" for tag, size in rounds.items())
        yield _of_models(t, f"rounds are uneven: {sizes} groups", "make one a multiple of the other", warning=True)


# -- older selves -----


def findings_of_follower(t: Topology, row: Tag) -> Iterator[Finding]:
    """The rules about a tag that follows another; `t` is the topology of the run."""
    own, led, follow = t.of(row.tag), t.of(row.follow.model), row.follow
    others = sorted({entry.engine for entry in own.process if entry.role == "rollout"} - {TAKES, RESTARTS})
    if others:
        yield _of_follower(row, f"an engine of {others[0]} takes no checkpoints of another tag", f'engine = "{TAKES}"')
    if led.lora.on and any(entry.engine == RESTARTS for entry in own.process if entry.role == "rollout"):
        rule = f"checkpoints of {led.tag} are adapters, and vLLM starts again with whole models here"
        yield _of_follower(row, rule, f'engine = "{TAKES}", or no LoRA for {led.tag}')
    if _widths(own) != _widths(led):
        rule = f"the model at {own.model.path} has another shape than {led.tag}'s at {led.model.path}"
        yield _of_follower(row, rule, "leave its path out: it begins with the followed one's")
    pause = led.learner.checkpoint_every
    if led.learner.batch_varies:
        rule = f"checkpoints of {led.tag} come by groups, so their steps are no multiples of {follow.every}"
        yield _of_follower(row, rule, "learner.trigger.t_max_s = inf and learner.controller.mode other than act")
    elif not pause or follow.every % pause:
        when = f"come every {pause} steps" if pause else "come at the end alone"
        rule = f"checkpoints of {led.tag} {when}, and it plays those of a multiple of {follow.every}"
        yield _of_follower(row, rule, f"learner.checkpoint_every = {follow.every}, or a divisor of it")
    elif (kept := follow.every // pause * (follow.back + count(own, "rollout"))) > led.learner.keep_last:
        oldest = f"the last process of {row.tag} plays one that is up to {kept} back"
        rule = f"{led.tag} keeps {led.learner.keep_last} checkpoints, and {oldest}"
        yield _of_follower(row, rule, f"learner.keep_last = {kept} or more for {led.tag}, or fewer processes")


def _of_follower(row: Tag, rule: str, remedy: str) -> Finding:
    shown = f'{row.tag}: follow = {{ model = "{row.follow.model}", every = {row.follow.every} }}'
    return Finding(("model",), rule, remedy, value=shown)


def _widths(t: Topology) -> Widths | None:
    folder = pretrained.model_at(t.model.path)
    return Widths.of(pretrained.read_config(folder)) if folder else None


def _models(t: Topology) -> Iterator[Finding]:
    """The rules once more where a run is changed; when a file is read they come after those of each tag."""
    return findings_of_run(t) if t.models else iter(())


CHECKS = (*seat_rules.CHECKS, _models)


# -- one process for several models -----


class Shared(NamedTuple):
    """A process of several models: its place among the entries of the file, and that entry."""

    at: int
    entry: Mapping[str, Any]

    @property
    def role(self) -> str:
        return str(self.entry["role"])

    @property
    def tags(self) -> Sequence[str]:
        tags: Sequence[str] = self.entry["model"]
        return tags

    def finding(self, rule: str, remedy: str) -> Finding:
        key = f"process.{self.at}.model"
        return Finding((key,), rule, remedy, value=f"{key} = {show(list(self.tags))}")


DEVICE = "model.device"  # of a process that names none
# Keys, or tables, that all models of one process have alike, and why.
BASE = {"model.path": "there is one base, on which all adapters are", "model.dtype": "there is one base, in one type",
        DEVICE: "one process computes on one device"}
ALIKE = {
    "rollout": {**BASE, "generation.max_batch": "the rows of one engine are for all of its models",
                "vllm": "one engine has one [vllm]"},
    "learner": {**BASE, "learner.memory.attention": "there is one base, and one way to compute attention",
                "learner.memory.compile": "there is one base, and its passes are compiled or not"},
}


def findings_of_shared(t: Topology, shared: Iterable[Shared]) -> Iterator[Finding]:
    """The rules about processes of several models. For an engine a model that only serves, and follows none, is the
    base itself."""
    for process in shared:
        yield from _knows_one_model(process)
        yield from _differences(t, process)
        for tag in process.tags:
            yield from _unfit(t.of(tag), process)


def _knows_one_model(process: Shared) -> Iterator[Finding]:
    """Report a process that knows nothing of several models: one from outside, or another program."""
    if process.entry.get("count") == 0:
        rule = f"no process {'serves' if process.role == 'rollout' else 'trains'} {' and '.join(process.tags)}"
        yield process.finding(f"{rule}: count = 0", "a count of 1 or more: workers from outside have one model")
    if process.entry.get("command"):
        yield process.finding("a program of another kind has one model", "remove command, or an entry for each tag")


def _differences(t: Topology, process: Shared) -> Iterator[Finding]:
    """Report what all models of a process should have alike."""
    first, *others = process.tags
    for name, why in ALIKE[process.role].items():
        if name == DEVICE and process.entry.get("device"):
            continue
        value = _value(t.of(first), name)
        other = next((tag for tag in others if _value(t.of(tag), name) != value), "")
        if other:
            differ = f": {first} has {show(value)}, {other} {show(_value(t.of(other), name))}" if "." in name else ""
            yield process.finding(f"{why}{differ}", f"the same {name} for all, or an entry for each tag")


def _value(t: Topology, name: str) -> Any:
    return reduce(getattr, name.split("."), t)


def _unfit(own: Topology, process: Shared) -> Iterator[Finding]:
    """Report a model that cannot share a process."""
    apart = "or an entry of its own for it"
    if own.follows:
        rule = f"{own.tag} answers with checkpoints of another model"
        yield process.finding(rule, f'write an entry with model = "{own.tag}"')
    elif not own.frozen and own.lora.rank == 0:
        rule = f"all weights of {own.tag} are trained, and there is one base"
        yield process.finding(rule, f"lora.rank above 0 for it, {apart}")
    elif process.role == "rollout" and not own.frozen and own.weights.transport != HOTSWAP:
        rule = f'versions of {own.tag} come by transport = "{own.weights.transport}", not as adapters'
        yield process.finding(rule, f'transport = "{HOTSWAP}" for it, {apart}')
    elif process.role == "learner" and own.ranks > 1:
        yield process.finding(f"a learner of several models has one rank, and ranks = {own.ranks}", "ranks = 1")
    elif process.role == "learner" and own.lora.dropout:
        rule = f"after a death would draw other chances of dropout for {own.tag}: the models draw in turns"
        yield process.finding(f"a learner of several models {rule}", f"lora.dropout = 0 for it, {apart}")
