"""`--model TAG` of the verbs: the directory of one of several models of a run in the place of the run's own, or a
request to the run that is about this model.

Reads topology.json for the tags. Knows nothing of what a verb does with the directory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from busrl.errors import UserError
from busrl.paths import RunPaths
from busrl.status.reader import newest_run
from busrl.system.files import as_map, read_map

REQUESTS = ("set", "scale", "checkpoint", "validate")  # to the run, about one of its models
DIRECTORIES = ("run_dir", "run_dirs", "target", "ring")  # options that may name one, or several


def at_model(options: argparse.Namespace) -> None:
    """Let the options mean the model that `--model` names."""
    tag = options.tag
    if options.control in REQUESTS:
        _rows(RunPaths.of(options.run_dir), tag)
        if options.control != "validate":
            options.key = tag if options.control == "checkpoint" else f"model.{tag}.{options.key}"
        return
    for name in DIRECTORIES:
        if hasattr(options, name):
            given = getattr(options, name)
            folders = [_folder(each, tag) for each in given] if isinstance(given, list) else _folder(given, tag)
            setattr(options, name, folders)


def _folder(run_dir: Any, tag: str) -> Path:
    paths = RunPaths.of(run_dir or newest_run(Path("runs")))
    rows = _rows(paths, tag)
    lead = next(row["tag"] for row in rows if row.get("trained"))
    return paths.root if tag == lead else paths.of_tag(tag).root


def _rows(paths: RunPaths, tag: str) -> list[dict[str, Any]]:
    """The models of a run by its topology.json; UserError if it has none of this tag."""
    rows = [as_map(row) for row in read_map(paths.topology).get("models") or []]
    tags = [row.get("tag") for row in rows]
    if tag not in tags:
        has = f"its models are {', '.join(map(str, tags))}" if tags else "it has one model, without a tag"
        raise UserError(f"--model {tag}: {paths.root} has no model of that tag; {has}")
    return rows
