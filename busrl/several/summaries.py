"""Views of the models of a run beside the lead: in `summary.json`, at the end of launch, by `busrl status`.

Reads the files of each model, and while it runs its ring. Says nothing of a run of one model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from busrl import capabilities
from busrl.errors import RingError
from busrl.paths import RunPaths
from busrl.ring import Ring
from busrl.states import HeaderWord
from busrl.status.reader import living
from busrl.status.runfiles import RunFiles, run_of_files
from busrl.status.words import reward_line
from busrl.system.files import as_map, read_map
from busrl.topology.schema import Topology

if TYPE_CHECKING:
    from busrl.several.audit import Audited


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


def overview(run_dir: str | os.PathLike[str]) -> Overview | None:
    """The view of the models in a run directory beside the lead; None if there are none."""
    folders = sorted(file.parent for file in RunPaths.of(run_dir).models.glob("*/run.json"))
    paths = [paths for paths in map(RunPaths.of, folders) if paths.run == RunPaths.of(run_dir).root]
    if not paths:
        return None
    data = {each.root.name: _now(each) for each in paths}
    return Overview("models", data, [*_shown(data)])


def _now(paths: RunPaths) -> dict[str, Any]:
    """A model's step, version and living processes."""
    topology = read_map(paths.topology)
    said = {"trained": not topology.get("frozen"), "max_steps": as_map(topology.get("run")).get("max_steps")}
    try:
        with closing(Ring.attach(paths.ring_name, read_only=True)) as ring:
            words = {"step": ring.header(HeaderWord.STEP), "version": ring.header(HeaderWord.VERSION)}
            own = [process.label for process in living(ring) if process.role in ("rollout", "learner")]
            return {**said, **words, "processes": sorted(own)}
    except RingError:
        run = run_of_files(RunFiles(paths))
        return {**said, "step": run.at_step, "version": run.version, "processes": []}


def _shown(data: dict[str, dict[str, Any]]) -> Iterator[str]:
    def told(said: dict[str, Any]) -> str:
        return f"step {said['step']}/{said['max_steps']}" if said["trained"] else "only serves"

    yield "  models    " + ", ".join(f"{tag} {told(said)}" for tag, said in data.items())
    for tag, said in data.items():
        if said["processes"]:
            yield f"    {tag}: {', '.join(said['processes'])}"
