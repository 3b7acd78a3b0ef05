"""Views of the models of a run beside the lead: in `summary.json`, at the end of launch, by `busrl status`, the monitor
and the picture of launch.

Reads the files of each model, and while it runs its ring, whose processes say there what they wait for. Maps no fates,
as launch looks here too. Says nothing of a run of one model.

- A model's files are read on from where the last look ended: a monitor looks each second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from busrl import capabilities
from busrl.capabilities import MODEL_ROLES
from busrl.errors import NoSuchRun, RingError
from busrl.paths import RunPaths
from busrl.ring import Process, Ring
from busrl.states import HeaderWord
from busrl.status.reader import living
from busrl.status.runfiles import RunFiles, run_of_files
from busrl.status.state import RunState
from busrl.status.waits import WAITS
from busrl.status.words import age, joined, reward_line
from busrl.system.files import as_map, read_map
from busrl.topology.schema import Topology

if TYPE_CHECKING:
    from busrl.several.audit import Audited

MOST_READ = 32  # models of which the place in their files is kept


def summary(root: Path, topology: Topology) -> tuple[dict[str, Any], list[str]]:
    """The end of each model, by its tag, and what their audits found wrong; nothing of a run of one model."""
    if not topology.models:
        return {}, []
    paths, audited = RunPaths.of(root), _audited(root)
    models = {tag: _of_one(topology.of(tag), topology.paths_of(tag, paths)) for tag in topology.tags}
    for tag, told in (audited.models if audited else {}).items():
        models[tag]["audit"] = told
    return {"models": models, "unpaired": audited.unpaired if audited else {}}, audited.errors if audited else []


def _audited(root: Path) -> Audited | None:
    """The audit of the models; None where that part of busrl is not there."""
    if not capabilities.plugs("run_audit"):
        return None
    from busrl.several.audit import audit  # only here: another part, which may be missing

    return audit(root)


def _of_one(own: Topology, paths: RunPaths) -> dict[str, Any]:
    said: dict[str, Any] = {"trained": not own.frozen, "seats": list(own.seats)}
    if own.frozen:
        return said
    run = run_of_files(RunFiles(paths))
    return {
        **said, "steps": run.at_step, "max_steps": own.run.max_steps, "version": run.version,
        "reward": {"first": run.first_reward, "last_10_steps": run.steps.recent(lambda step: step.reward)},
    }


def lines(summed: dict[str, Any]) -> list[str]:
    """A line for each model beside the first that is trained, which the other lines are about."""
    trained = [(tag, said) for tag, said in summed.get("models", {}).items() if said["trained"]]
    texts = []
    for tag, said in trained[1:]:
        reward = reward_line(said["reward"])
        texts.append(f"  {tag}: step {said['steps']}/{said['max_steps']}" + (f" \u00b7 {reward}" if reward else ""))
    return texts


# -- while it runs -----


class Overview(NamedTuple):
    """The models beside the lead as people see them. `data`: for JSON; `lines`: the sum of all first."""

    name: str
    data: dict[str, Any]
    lines: list[str]


class FilesOfModel:
    """The files of a model, read on with each look, and its state by these alone."""

    kept: ClassVar[dict[Path, FilesOfModel]] = {}  # of this process, the newest `MOST_READ`

    def __init__(self, paths: RunPaths, uuid: Any) -> None:
        self._files, self._uuid = RunFiles(paths), uuid
        self.run = RunState(facts=self._files.facts())

    @classmethod
    def state(cls, paths: RunPaths) -> RunState:
        """The state of a model as of now. NoSuchRun if it has no run.json."""
        one, uuid = cls.kept.get(paths.root), read_map(paths.run_json).get("uuid")
        if one is None or one._uuid != uuid:
            one = cls.kept[paths.root] = cls(paths, uuid)
        while len(cls.kept) > MOST_READ:
            del cls.kept[next(iter(cls.kept))]
        one._files.fold_into(one.run)
        return one.run


def overview(run_dir: str | os.PathLike[str]) -> Overview | None:
    """The view of the models in a run directory beside the lead; None if there are none."""
    data = {paths.root.name: _now(paths) for paths in _beside(RunPaths.of(run_dir))}
    return Overview("models", data, [*_shown(data)]) if data else None


def models_now(run_dir: Path, beside: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """All models of a run as they are shown, by their tags, the lead first; {} of a run of one model. `beside`: those
    beside the lead, where an overview has just looked at them."""
    run = RunPaths.of(run_dir)
    beside = beside or {paths.root.name: _now(paths) for paths in _beside(run)}
    return {str(read_map(run.topology).get("tag") or "lead"): _now(run), **beside} if beside else {}


def _beside(run: RunPaths) -> list[RunPaths]:
    """The directories of the models beside the lead, by tag."""
    folders = sorted(file.parent for file in run.models.glob("*/run.json"))
    return [paths for paths in map(RunPaths.of, folders) if paths.run == run.root]


def _now(paths: RunPaths) -> dict[str, Any]:
    """A model's step, version, rewards and living processes, and what its learner waits for."""
    topology = read_map(paths.topology)
    trained = not topology.get("frozen")
    said: dict[str, Any] = {"trained": trained, "max_steps": as_map(topology.get("run")).get("max_steps")}
    try:
        run = FilesOfModel.state(paths)
    except NoSuchRun:  # it is removed just now
        run = RunState()
    said |= {"step": run.at_step, "version": run.version}
    if trained:
        recent = run.steps.recent(lambda step: step.reward)
        said |= {"reward": {"first": run.first_reward, "last_10_steps": recent}, "waits": None}
    try:
        with closing(Ring.attach(paths.ring_name, read_only=True)) as ring:
            own = [process for process in living(ring) if process.role in MODEL_ROLES]
            waits = {"waits": next(filter(None, map(_wait, own)), None)} if trained else {}
            words = {"step": ring.header(HeaderWord.STEP), "version": ring.header(HeaderWord.VERSION)}
    except RingError:
        return {**said, "processes": []}
    return {**said, **words, **waits, "processes": sorted(process.label for process in own)}


def _wait(process: Process) -> dict[str, Any] | None:
    """The thing that a learner says that it waits for, and for how long; None while it works."""
    match = WAITS.fullmatch(process.activity) if process.role == "learner" else None
    since_s = max(0, time.monotonic_ns() - process.activity_ns) / 1e9
    return {"for": match[1], "since_s": round(since_s, 1)} if match else None


def _shown(data: dict[str, dict[str, Any]]) -> Iterator[str]:
    def told(said: dict[str, Any]) -> str:
        return f"step {said['step']}/{said['max_steps']}" if said["trained"] else "only serves"

    yield "  models    " + ", ".join(f"{tag} {told(said)}" for tag, said in data.items())
    for tag, said in data.items():
        waits = said.get("waits")
        more = joined(
            f"version {said['version']}" if said["version"] else "",
            reward_line(said["reward"]) if said["trained"] else "",
            f"waits for {waits['for']}, {age(waits['since_s'])}" if waits else "",
            ", ".join(said["processes"]),
        )
        if more:
            yield f"    {tag}: {more}"
