"""Several models that learn in one run: a solver and its judge, and both players of a game, with what must not learn.

    python -m benchmarks several [--parts NAME ...] [--seeds 0 1 2] [--made FOLDER] [--json FILE]

Runs the topologies of examples/several at each seed, and scores the checkpoints afterwards, exactly: over all sums, or
over all courses of the game, by the probabilities of the model, with nothing sampled. `judge`: solver and judge are
both trained. `frozen`: the same with a judge that is not. `game`: self-play, where the first player can always win;
scored against itself, and on either side against the model that it began with. `shared`: the same with one reward for
both players, `circles`: without the entropy bonus. Seconds are of the whole run, from its start to its end; CPU seconds
of all its processes. Each run has to end within five minutes (`--limit-s`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.common import report, runs, sides

EXAMPLES = ROOT / "examples" / "several"
LIMIT_S, MAKING_S, LOOK_S = 300.0, 900.0, 1.0
CURVE = 10  # a checkpoint is scored every so many steps
DIGITS, STONES = "0123456789", 7
RIGHT, WRONG = "|", "."  # what the judge says
Figures = dict[str, Any]
Chances = Callable[[str], dict[str, float]]  # of each next token, by what a model reads


@dataclass(frozen=True)
class Part:
    """A topology of the examples with texts replaced, the models that are scored, and how; `ends`: its exit code."""

    file: str
    replaced: tuple[tuple[str, str], ...]
    scored: dict[str, str]  # tag -> the folder in made/ that it begins with
    bars: dict[str, tuple[float, float]]  # figure -> at most at the start, at least at the end
    ends: int = 0


TRAINED = '[model.learner]               # overrides for this model alone\nlr = 5e-4\n'
PARTS = {
    "judge": Part("solver_judge.toml", (), {"": "solver", "judge": "judge"},
                  {"solver": (0.3, 0.8), "judge": (0.6, 0.9)}),
    "frozen": Part("solver_judge.toml", ((TRAINED, "trained = false\n"),), {"": "solver"}, {"solver": (0.3, 0.8)}),
    "game": Part("take_game.toml", (), {"": "player"}, {"first": (0.6, 0.9), "first_against_start": (0.6, 0.9)}),
    "circles": Part("take_game.toml", (("entropy_coef = 0.1", "entropy_coef = 0.0"),), {"": "player"}, {}),
    "shared": Part("take_game.toml", (("take_game.py:game", "take_game.py:together"),), {}, {}, ends=1),
}


# -- scores, exact --------


def chances_of(folder: Path, texts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Chance of each next token after each text, by the model of that folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rows = [tokenizer(text)["input_ids"] for text in texts]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
    words = tokenizer.convert_ids_to_tokens(list(range(logits.shape[-1])))
    return {text: dict(zip(words, row)) for text, row in zip(texts, torch.softmax(logits.double(), -1).tolist())}


def sums() -> dict[str, str]:
    """Every task of the sums, with its answer."""
    return {f"{a}{b}=": str((a + b) % 10) for a in range(10) for b in range(10)}


def score_solver(folder: Path) -> Figures:
    """The chance of a right answer, over all sums."""
    chances = chances_of(folder, [*sums()])
    return {"solver": statistics.fmean(chances[task][answer] for task, answer in sums().items())}


def score_judge(folder: Path) -> Figures:
    """The chance of a right verdict, over right and wrong answers in equal shares."""
    chances = chances_of(folder, [f"{task}{said}=" for task in sums() for said in DIGITS])
    right = [chances[f"{task}{answer}="][RIGHT] for task, answer in sums().items()]
    wrong = [chances[f"{task}{said}="][WRONG] for task, answer in sums().items() for said in DIGITS if said != answer]
    return {"judge": (statistics.fmean(right) + statistics.fmean(wrong)) / 2}


def positions(text: str = f"{STONES}=", left: int = STONES) -> dict[str, int]:
    """Every text that a player can read, with the stones that are left."""
    found = {text: left}
    for move in (1, 2):
        if move < left:
            found |= positions(f"{text}{move}{left - move}=", left - move)
    return found


def wins(mover: Chances, other: Chances, text: str = f"{STONES}=", left: int = STONES) -> float:
    """The chance that who is to move wins. A move that is none loses."""
    chances, won = mover(text), 0.0
    for move in range(1, min(2, left) + 1):
        rest = left - move
        won += chances[str(move)] * (1 - wins(other, mover, f"{text}{move}{rest}=", rest) if rest else 1.0)
    return won


def score_player(folder: Path, start: Path) -> Figures:
    """The chance of the first player against itself, and of either against the model that it began with."""
    now, then = (chances_of(model, [*positions()]).__getitem__ for model in (folder, start))
    return {"first": wins(now, now), "first_against_start": wins(now, then),
            "second_against_start": 1 - wins(then, now)}


def score(made: Path, name: str, folder: Path) -> Figures:
    figures = {"solver": score_solver, "judge": score_judge}.get(name, lambda it: score_player(it, made / name))(folder)
    return {figure: round(value, 4) for figure, value in figures.items()}


# -- runs ------------


def made_in(folder: Path) -> Path:
    """The folder with the models of the examples, which are made if they are not there."""
    if not (folder / "stones.jsonl").exists():
        print(f"making the models in {folder}", file=sys.stderr)
        sides.ran([sys.executable, str(EXAMPLES / "make_several.py"), str(folder)], check=True, timeout_s=MAKING_S)
    return folder


def topology_of(part: Part, folder: Path, made: Path) -> Path:
    """A copy of the part's example in that folder, with its texts replaced."""
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("made", "runs", "__pycache__"))
    (folder / "made").symlink_to(made.resolve())
    text = (folder / part.file).read_text()
    for before, after in part.replaced:
        if before not in text:
            raise SystemExit(f"{part.file} has no {before!r} any more: correct PARTS")
        text = text.replace(before, after)
    (folder / part.file).write_text(text)
    return folder / part.file


def ended(run: runs.BenchRun, limit_s: float) -> tuple[int, float, float]:
    """Wait until the run ends: its exit code, seconds and CPU seconds. One that takes longer is an error."""
    begun, used, tree = time.monotonic(), 0.0, sides.CpuOfTree(run.child.pid)
    while True:
        try:
            code = run.child.wait(LOOK_S)
            return code, time.monotonic() - begun, used
        except subprocess.TimeoutExpired:
            used = tree.now()
        if time.monotonic() > begun + limit_s:
            raise RuntimeError(f"the run has not ended after {limit_s:g} s: {run.tail()}")


def scores_of(run: runs.BenchRun, part: Part, made: Path) -> Iterable[tuple[str, int, Figures]]:
    """Scores of every kept checkpoint: figures by the folder's name and step; step 0 is what the model began with."""
    for tag, name in part.scored.items():
        paths = run.paths.of_tag(tag) if tag else run.paths
        yield name, 0, score(made, name, made / name)
        steps = sorted(int(folder.name.rpartition("_")[2]) for folder in paths.checkpoints.glob("global_step_*"))
        for step in steps:
            yield name, step, score(made, name, paths.checkpoints / f"global_step_{step}" / "model")


def measure(part: Part, seed: int, made: Path, settings: Sequence[str], limit_s: float) -> Figures:
    """Run the part once at that seed, and score its checkpoints."""
    with tempfile.TemporaryDirectory(prefix="busrl-bench-") as name:
        config = topology_of(part, Path(name) / "several", made)
        keep = [f"run.seed={seed}", f"learner.checkpoint_every={CURVE}", "learner.keep_last=1000", *settings]
        with runs.run(*keep, config=config) as run:
            code, seconds, cpu = ended(run, limit_s)
            if code != part.ends:
                raise RuntimeError(f"exit code {code}, not {part.ends}: {run.tail()}")
            summary = run.summary()
            curves: dict[str, dict[str, Figures]] = {}
            for model, step, figures in scores_of(run, part, made):
                curves.setdefault(model, {})[str(step)] = figures
            groups = groups_of(run.paths.groups)
    first = {figure: value for curve in curves.values() for figure, value in curve["0"].items()}
    last = {figure: value for curve in curves.values() for figure, value in [*curve.values()][-1].items()}
    met = all(first[figure] <= low and last[figure] >= high for figure, (low, high) in part.bars.items())
    return {
        "seed": seed, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1),
        "steps": {tag: told.get("steps") for tag, told in summary.get("models", {"": summary}).items()},
        "groups": groups, "first": first, "last": last, "met": met, "curves": curves,
    }


def groups_of(file: Path) -> dict[str, int]:
    """Count the groups that ended, and the flat ones among them, in a lead's groups.jsonl."""
    fates = [fate for line in file.read_text().splitlines() for fate in json.loads(line)["fates"]]
    return {"ended": len(fates), "flat": fates.count("f")}


def shown(name: str, figures: Figures) -> str:
    scores = ", ".join(f"{figure} {value:.2f} -> {figures['last'][figure]:.2f}"
                       for figure, value in figures["first"].items())
    groups = figures["groups"]
    return (f"{name} seed {figures['seed']}: {scores or 'nothing scored'}; {groups['flat']} of {groups['ended']} "
            f"groups flat, {figures['seconds']:.0f} s, CPU {figures['cpu_seconds']:.0f} s, "
            f"bars {'met' if figures['met'] else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--made", type=Path, default=EXAMPLES / "made", help="where the models are, or are to be made")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the topology")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="a run that takes longer is an error")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    path = options.json or RESULTS / f"several_{os.cpu_count()}cores_{time.strftime('%Y-%m-%d')}.json"
    made = made_in(options.made)
    result: Figures = {"machine": report.machine(), "commit": report.commit(ROOT), "limit_s": options.limit_s}
    if path.exists():  # parts and seeds may be measured one by one
        result = {**json.loads(path.read_text()), **result}
    for name in options.parts:
        part = PARTS[name]
        rows = {row["seed"]: row for row in result.get(name, {}).get("runs", [])}
        for seed in options.seeds:
            load = round(os.getloadavg()[0], 2)
            figures = measure(part, seed, made, options.set, options.limit_s)
            print(shown(name, figures), flush=True)
            rows[seed] = {**figures, "load_before": load, "date": time.strftime("%F %R")}
            result[name] = {"bars": part.bars, "runs": [rows[at] for at in sorted(rows)]}
            path.write_text(json.dumps(result, indent=1) + "\n")
