"""Defaults of a topology with a process of the role tinker: a service has no prompts, groups or rewards.

Called with the tables of a topology file before they are read. Knows nothing of the rest of the service.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from busrl.topology.schema import Generation, Tinker

NO_PROMPTS = Path(__file__).with_name("no_prompts.jsonl")  # the one line that the keys of prompts ask for
SHORTEST = 1  # tokens of a prompt, in the sums of sizes alone


def complete(tables: dict[str, Any]) -> None:
    """Set the keys that are left out and mean nothing to a service, and those that follow from `tinker.context`."""
    processes = tables.get("process")
    if not isinstance(processes, list) or not all(isinstance(entry, dict) for entry in processes):
        return
    if not any(entry.get("role") == "tinker" for entry in processes):
        return
    service = tables.get("tinker", {})
    context = service.get("context", Tinker.context) if isinstance(service, dict) else Tinker.context
    generation = tables.get("generation", {})
    rows = generation.get("max_batch", Generation.max_batch) if isinstance(generation, dict) else Generation.max_batch
    if not isinstance(context, int) or not isinstance(rows, int):
        return  # the reader says so
    implied: dict[str, dict[str, Any]] = {
        "data": {"train": str(NO_PROMPTS)}, "groups": {"size": max(2, rows)},
        "weights": {"mode": "sync", "max_staleness": 0},
        "learner": {"lr": 1e-5, "trigger": {"n_min": 1}},
        "generation": {"max_prompt_tokens": SHORTEST, "max_new_tokens": context - SHORTEST},
        "agents": {"context": context, "transcript_bytes": 0, "episodes": rows},
    }
    for table, keys in implied.items():
        present = tables.setdefault(table, {})
        if isinstance(present, dict):
            tables[table] = {**keys, **present}
    processes.append({"role": "learner", "count": 0})  # the tuner is in its place
    for role in ("tuner", "rollout"):
        if not any(entry.get("role") == role for entry in processes):
            processes.append({"role": role})
