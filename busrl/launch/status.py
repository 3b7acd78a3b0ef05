"""`busrl status`: what a run is doing now, or how it ended, in some lines. Attaches to nothing itself.

Puts the data of `state` into words. Every line is made safe to print, whoever wrote what stands in it. A ring that can
not be used is a state to show, with its remedy.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

from busrl.launch.printable import printable
from busrl.launch.problems import lines as problem_lines
from busrl.launch.progress import duration, short
from busrl.launch.state import LIVING, as_map, state_of
from busrl.launch.story import number, sample_line
from busrl.paths import RunPaths


def status(run_dir: str | os.PathLike[str] | None = None, *, as_json: bool = False) -> str:
    """The state of a run in some lines, or as one JSON object; without a directory that of the newest under `runs/`."""
    found = state_of(run_dir)
    if as_json:
        return json.dumps(_plain(found), ensure_ascii=False, allow_nan=False, default=str)
    return "\n".join(map(printable, _lines(found)))


def _plain(value: Any) -> Any:
    """The same with null for what is no number: files of a run may hold anything, and NaN is not JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield from _state(found)
    if found["state"] in LIVING:
        yield _progress(found)
    yield from _learning(found)
    if "slots" in found:
        yield "  slots    " + " · ".join(f"{name} {count}" for name, count in found["slots"].items())
    if found["samples"]:
        told = " · ".join(f"{short(count)} {name}" for name, count in found["samples"].items())
        yield f"  samples  {told}"
    if found.get("reaps"):
        yield f"  {short(found['reaps'])} slots taken back from dead processes"
    processes = found.get("processes", [])
    yield from map(_process, processes)
    yield from _restarts(found, {one["name"] for one in processes})
    yield from problem_lines(found["problems"], RunPaths.of(found["run_dir"]).errors)
    yield from (f"  {line}" for line in found["errors_from_outside"] + found["refusals"])
    yield f"  {found['run_dir']}"


def _state(found: dict[str, Any]) -> Iterator[str]:
    """The first lines: who runs, or how it ended, and what to do about it."""
    name, state, root = found["run_id"], found["state"], found["run_dir"]
    if state == "left":
        yield f"{name}: nobody runs; the next `busrl launch` in this directory adopts its ring"
    elif state in LIVING:
        since = duration(max(0.0, time.time() - (number(found["started"]) or time.time())))
        yield f"{name}: {state}, {since} since launch (pid {found['launch_pid']})"
    elif state == "damaged":
        yield from _damaged(found)
    elif state == "starting":
        yield (
            f"{name}: launch (pid {found['holder']}) is there, but no ring: it is starting or ending, or "
            f"{RunPaths.of(root).ring_file} was removed; if this stays so, `busrl stop {root}` and start it again"
        )
    elif state == "unfinished":
        yield f"{name}: no ring and no summary; it was never finished. Start it again to go on"
    else:
        yield f"{name}: {state}, {found['why']}"
        took = duration(number(found["seconds"]) or 0.0)
        yield f"  step {found['step']}/{found['max_steps']} in {took} · version {found['version']}"
        if found["open_samples"]:
            yield f"  {found['open_samples']} samples are open: the next start generates them again"


def _damaged(found: dict[str, Any]) -> Iterator[str]:
    """The ring is there and can not be used; the files still tell how far the run is."""
    yield f"{found['run_id']}: damaged, its ring can not be used: {found['problem']}"
    root = found["run_dir"]
    if found["holder"] is None:
        yield (
            f"  nobody runs, and the next start refuses: `busrl ring clean {root} --force`, then start it again "
            "(what was in its slots is generated again)"
        )
    else:
        yield (
            f"  launch (pid {found['holder']}) goes on with what its processes have mapped; none can be started again: "
            f"`busrl stop {root}` ends it in order, and a start continues from checkpoint and log"
        )
    goal = found["max_steps"] if found["max_steps"] is not None else "?"
    yield f"  step {found['step']}/{goal} · version {found['version']} (from metrics.jsonl)"


def _progress(found: dict[str, Any]) -> str:
    goal = found["max_steps"] if found["max_steps"] is not None else "?"
    parts = [f"step {found['step']}/{goal}", f"version {found['version']}"]
    if found["state"] != "left" and found["steps_per_min"]:
        parts.append(f"{found['steps_per_min']:.3g} steps/min · {short(found['tokens_per_s'])} tokens/s trained")
    if found.get("left_s"):
        parts.append(f"about {duration(found['left_s'])} left")
    return "  " + " · ".join(parts)


def _learning(found: dict[str, Any]) -> Iterator[str]:
    """Reward, validation, what was thrown away, and one sample."""
    reward, means = found["reward"], [one["mean"] for one in found["validation"]]
    parts = [f"{reward['first']:.3f} → {reward['last_10_steps']:.3f}"] if _both(reward) else []
    parts += [f"validation {' → '.join(f'{mean:.3f}' for mean in means[:1] + means[1:][-1:])}"] if means else []
    parts += [f"entropy {found['entropy']:.2f}"] if found["entropy"] is not None else []
    if parts:
        yield f"  reward   {' · '.join(parts)}"
    if idle := found["idle"]:
        causes = ", ".join(f"{count} {name}" for name, count in as_map(idle["causes"]).items())
        end = f", the run ends after {idle['limit']}" if idle["limit"] else ""
        yield f"  idle     {idle['groups']} groups in a row ended with nothing to train ({causes}){end}"
    waste = waste_line(found["flat_share"], found["cut_share"])
    if waste:
        yield f"  waste    {waste}"
    if found["sample"] and (line := sample_line(found["sample"])):
        yield f"  sample   {line}"


def _both(reward: dict[str, Any]) -> bool:
    return reward["first"] is not None and reward["last_10_steps"] is not None


def waste_line(flat: float | None, cut: float | None) -> str:
    """What was generated for nothing lately, in words; "" while nothing is known."""
    parts = []
    if flat is not None:
        parts.append(f"{flat:.0%} of the groups flat (all rewards equal: thrown away)")
    if cut is not None:
        parts.append(f"{cut:.0%} of the trained answers cut at the length limit")
    return " · ".join(parts)


def _process(one: dict[str, Any]) -> str:
    doing = one["activity"] or one["state"]
    tokens = f" · {short(one['tokens'])} tokens" if one["tokens"] else ""
    samples = f" · {short(one['samples'])} samples" if one["samples"] else ""
    where = "elsewhere   " if one["remote"] else f"pid {one['pid']:<8}"
    return (
        f"  {one['name']:<14} {where} {doing:<22} last progress {one['progress_age_s']:.1f} s ago{tokens}{samples}"
        f"{_again(one['restarts'])}"
    )


def _restarts(found: dict[str, Any], shown: set[str]) -> Iterator[str]:
    missing = {name: count for name, count in found["restarts"].items() if count and name not in shown}
    if found["state"] in LIVING:
        yield from (f"  {name:<14} not in the ring now{_again(count)}" for name, count in missing.items())
    elif missing and found["state"] != "damaged":
        yield f"  restarted: {', '.join(f'{name} {count}×' for name, count in missing.items())}"


def _again(count: int) -> str:
    return f" · restarted {count}×" if count else ""
