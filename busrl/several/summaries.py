"""The ends of the models of a run: in `summary.json`, and in the last lines of launch.

Reads the files of each model. Says nothing of a run of one model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl import capabilities
from busrl.paths import RunPaths
from busrl.status.runfiles import RunFiles, run_of_files
from busrl.status.words import reward_line
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
