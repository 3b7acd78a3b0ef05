"""Ranking quality and cost of the length predictors on long-tailed traces, phase by phase.

    python -m benchmarks predictors [--traces default drift ...] [--seeds 0 1 2] [--rivals] [--out benchmarks/results]

A trace is streamed to a predictor group by group. At each phase (0, 100, 500, 2000, 5000 finished prompts) copies of it
are asked about prompts that come later, as they stand and while their groups finish one member after another:

  text      no answer of the prompt has finished; tau per member, averaged over the members
  siblings  before each of members 1 to 7 of a group of 8 finishes, 1 to 7 siblings have; all those pairs pooled
  k=1, k=7  the same with exactly one, and with seven finished siblings
  shortest  members of a group finish in the order of their lengths, as when all of them start together

50 groups are in flight in each copy, so it also learns from 50 prompts meanwhile. `--rivals` adds online linear models
of scikit-learn and LightGBM on the same features, where they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from busrl.data import trace as tracemaker
from busrl.data.trace import Shape, Spread, TracedPrompt, make_trace
from busrl.predict.lengths import kendall_tau, make_predictor
from busrl.scheduling.predictor import Candidate, Predictor

PHASES = (0, 100, 500, 2000, 5000)
TESTED, IN_FLIGHT, GROUP = 600, 50, 8
LIMIT = 8192
NAMES = ("rules", "learned", "history", "blend")
EPOCH = 1500  # prompts of the trace whose prompts come again
DRIFT = 1.5  # natural log that lengths grow by over the whole trace


def tasks_of(trace: str, seed: int) -> list[TracedPrompt]:
    """The prompts of a trace, those to be tested last."""
    count = PHASES[-1] + TESTED
    if trace == "default":
        return make_trace(count, seed=seed)
    if trace == "untagged":
        return [replace(task, tag="") for task in make_trace(count, seed=seed)]
    if trace == "noisy":  # the text says little, answers to a prompt agree less, the tail is heavier
        spread = Spread(text=0.35, prompt=0.55, member=0.6, tail_share=0.08, tail_factor=12.0)
        return make_trace(count, Shape(spread=spread), seed)
    if trace == "drift":  # the policy's answers grow while it is trained
        tasks = make_trace(count, seed=seed)
        return [replace(task, lengths=_grown(task.lengths, DRIFT * i / count)) for i, task in enumerate(tasks)]
    if trace == "epochs":  # the same prompts again and again, with new answers that grow
        return _epochs(count, seed)
    raise ValueError(f"trace {trace!r}: there are {', '.join(TRACES)}")


TRACES = ("default", "noisy", "drift", "untagged", "epochs")


def _grown(lengths: Sequence[int], log: float) -> tuple[int, ...]:
    return tuple(min(LIMIT, max(1, round(n * float(np.exp(log))))) for n in lengths)


def _epochs(count: int, seed: int) -> list[TracedPrompt]:
    """Prompts of which each epoch draws other answers: a trace with as many answers per prompt as all epochs need."""
    epochs = -(-count // EPOCH)
    base = make_trace(EPOCH, Shape(group_size=GROUP * epochs), seed)
    order = np.random.default_rng(seed)
    prompts = []
    for epoch in range(epochs):
        for i in order.permutation(EPOCH).tolist():
            lengths = base[i].lengths[GROUP * epoch : GROUP * (epoch + 1)]
            prompts.append(replace(base[i], lengths=_grown(lengths, DRIFT * epoch / epochs)))
    return prompts[:count]


def candidate(draw: int, task: TracedPrompt) -> Candidate:
    return Candidate(draw, task.prompt, LIMIT, task.tag)


Pairs = list[tuple[float, int]]


def tau(pairs: Pairs) -> float:
    return kendall_tau(*zip(*pairs))


class Clocked:
    """CPU seconds that a predictor took to learn, per answer."""

    def __init__(self, predictor: Predictor) -> None:
        self.inner = predictor
        self.learn = 0.0
        self.answers = 0

    def observe(self, finished: Sequence[tuple[Candidate, int]]) -> None:
        begun = time.process_time()
        self.inner.observe(finished)
        self.learn += time.process_time() - begun
        self.answers += len(finished)

    @property
    def us_per_answer(self) -> float:
        return 1e6 * self.learn / max(1, self.answers)


def stream(predictor: Clocked, tasks: Sequence[TracedPrompt], begin: int, end: int) -> None:
    """Groups finish, IN_FLIGHT of them at a time, one member after another."""
    for first in range(begin, end, IN_FLIGHT):
        part = range(first, min(end, first + IN_FLIGHT))
        for member in range(GROUP):
            predictor.observe([(candidate(draw, tasks[draw]), tasks[draw].length(member)) for draw in part])


def looks(make: Callable[[], Predictor], tasks: Sequence[TracedPrompt], order: str) -> dict[int, Pairs]:
    """Predictions and lengths of the tested groups, by the number of siblings that had finished."""
    pairs: dict[int, Pairs] = {k: [] for k in range(GROUP)}
    for first in range(PHASES[-1], PHASES[-1] + TESTED, IN_FLIGHT):
        predictor = make()
        part = [candidate(draw, tasks[draw]) for draw in range(first, first + IN_FLIGHT)]
        lengths = [sorted(tasks[c.draw].lengths) if order == "shortest" else tasks[c.draw].lengths for c in part]
        for member in range(GROUP):
            predicted = predictor.predict(part).tolist()
            for prediction, all_of in zip(predicted, lengths):
                asked = all_of if member == 0 else all_of[member : member + 1]
                pairs[member] += [(prediction, n) for n in asked]
            predictor.observe([(c, all_of[member]) for c, all_of in zip(part, lengths)])
    return pairs


def scores(make: Callable[[], Predictor], tasks: Sequence[TracedPrompt]) -> dict[str, float]:
    """The figures of one phase."""
    drawn, short = looks(make, tasks, "as drawn"), looks(make, tasks, "shortest")
    per_member = [tau(drawn[0][member::GROUP]) for member in range(GROUP)]
    pooled = [pair for k in range(1, GROUP) for pair in drawn[k]]
    pooled_short = [pair for k in range(1, GROUP) for pair in short[k]]
    return {
        "text": statistics.mean(per_member), "siblings": tau(pooled), "k=1": tau(drawn[1]), "k=7": tau(drawn[7]),
        "shortest": tau(pooled_short),
    }


def copies(predictor: Predictor, name: str) -> Callable[[], Predictor]:
    """Makes copies of what a predictor is now."""
    state = predictor.state()

    def make() -> Predictor:
        copy = make_predictor(name)
        copy.load(state)
        return copy

    return make


def follow(name: str, tasks: Sequence[TracedPrompt]) -> Iterator[tuple[int, dict[str, float]]]:
    """Phase by phase."""
    predictor, done = Clocked(make_predictor(name)), 0
    for phase in PHASES:
        stream(predictor, tasks, done, phase)
        done = phase
        figures = scores(copies(predictor.inner, name), tasks)
        if phase == PHASES[-1]:
            figures |= {"us_answer": predictor.us_per_answer, **costs(predictor.inner, name, tasks)}
        yield phase, figures


def costs(predictor: Predictor, name: str, tasks: Sequence[TracedPrompt]) -> dict[str, float]:
    """Microseconds per prompt (batches of 256) and per answer that is learned one at a time, medians."""
    make, times = copies(predictor, name), []
    copy = make()
    for turn in range(20):
        part = [candidate(10**6 + i, tasks[(turn * 256 + i) % len(tasks)]) for i in range(256)]
        begun = time.process_time()
        copy.predict(part)
        times.append((time.process_time() - begun) / 256)
    single = Clocked(make())
    for draw in range(PHASES[-1], PHASES[-1] + 400):
        for member in range(GROUP):
            single.observe([(candidate(draw, tasks[draw]), tasks[draw].length(member))])
    return {"us_prompt": 1e6 * statistics.median(times), "us_answer_alone": single.us_per_answer}


# -- rivals on the same features ------------------------------------------------------------------------------------


def rivals(tasks: Sequence[TracedPrompt]) -> dict[str, dict[str, float]]:
    """Kendall's tau without siblings after 100, 500 and 2000 prompts, and microseconds per answer."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.linear_model import SGDClassifier, SGDRegressor

    from busrl.predict.lengths.learned import BITS, features

    f = features([candidate(i, task) for i, task in enumerate(tasks)], BITS)
    x = hstack([csr_matrix((f.value, (f.row, f.column)), shape=(f.rows, 1 << BITS)), csr_matrix(f.counts)]).tocsr()
    y = np.log([task.lengths for task in tasks])
    tested = slice(PHASES[-1], PHASES[-1] + TESTED)

    def judged(predicted: Any) -> float:
        return statistics.mean(kendall_tau(predicted, y[tested, member]) for member in range(GROUP))

    def online(make: Callable[[], Any], count: int) -> tuple[float, float]:
        model, begun = make(), time.process_time()
        for first in range(0, count, 32):
            rows = slice(first, min(count, first + 32))
            for member in range(GROUP):
                model.partial_fit(x[rows], y[rows, member] - 6)
        return judged(model.predict(x[tested])), 1e6 * (time.process_time() - begun) / count / GROUP

    def classes(count: int) -> tuple[float, float]:
        cuts, model, begun = np.quantile(y[: min(count, 100)], (1 / 3, 2 / 3)), SGDClassifier(loss="log_loss"), 0.0
        begun = time.process_time()
        for first in range(0, count, 32):
            rows = slice(first, min(count, first + 32))
            for member in range(GROUP):
                model.partial_fit(x[rows], np.digitize(y[rows, member], cuts), classes=[0, 1, 2])
        seconds = time.process_time() - begun
        return judged(model.predict_proba(x[tested]) @ [0, 1, 2]), 1e6 * seconds / count / GROUP

    def boosted(count: int) -> tuple[float, float]:
        import lightgbm

        settings = {"objective": "l2", "verbosity": -1, "num_threads": 1, "num_leaves": 15, "learning_rate": 0.1}
        begun = time.process_time()
        model = lightgbm.train(settings, lightgbm.Dataset(x[:count], y[:count].mean(1)), 60)
        return judged(model.predict(x[tested])), 1e6 * (time.process_time() - begun)

    huber = {"loss": "huber", "epsilon": 1.0, "alpha": 1e-4, "eta0": 0.02}
    passive = {"loss": "epsilon_insensitive", "penalty": None, "learning_rate": "pa1", "eta0": 0.01, "epsilon": 0.1}
    kinds: dict[str, Callable[[int], tuple[float, float]]] = {
        "SGDRegressor (huber)": lambda n: online(lambda: SGDRegressor(**huber), n),
        "SGDRegressor (pa1)": lambda n: online(lambda: SGDRegressor(**passive), n),
        "SGDClassifier (short, medium, long)": classes,
        "LightGBM (trained anew, us per training)": boosted,
    }
    figures: dict[str, dict[str, float]] = {}
    for name, kind in kinds.items():
        try:
            by_count = {count: kind(count) for count in (100, 500, 2000)}
        except ImportError as problem:
            print(f"{name}: {problem}", file=sys.stderr)
            continue
        figures[name] = {**{f"tau@{n}": by_count[n][0] for n in by_count}, "us": by_count[2000][1]}
    return figures


# -- what nobody can beat -------------------------------------------------------------------------------------------


def ceilings(seed: int, prompts: int = 4000) -> dict[str, float]:
    """Kendall's tau on the default trace of one who knows all that the text says, and the spreads."""
    random, shape, (mean, deviation) = np.random.default_rng(seed), Shape(), tracemaker._effects()
    text = np.array([(tracemaker._prompt(random)[2] - mean) / deviation for _ in range(prompts)])
    logs = np.log([tracemaker._lengths(random, shape, effect) for effect in text])
    known = np.log(shape.median) + shape.spread.text * text
    noise = shape.spread.member**2 / shape.spread.prompt**2
    expected: dict[int, Any] = {}
    for k in range(1, GROUP):  # the surprise of k siblings, an outlier counted as 1.2, and shrunk
        surprise = np.clip(logs[:, :k] - known[:, None], -1.2, 1.2).sum(1)
        expected[k] = (known + surprise / (k + noise), logs[:, k])
    pooled = kendall_tau(*(np.concatenate([expected[k][side] for k in expected])[::4] for side in (0, 1)))
    return {"text": kendall_tau(known, logs[:, 0]), "siblings": pooled, "k=1": kendall_tau(*expected[1]),
            "k=7": kendall_tau(*expected[7])}


# -- telling --------------------------------------------------------------------------------------------------------

COLUMNS = ("text", "siblings", "k=1", "k=7", "shortest")


def table(trace: str, figures: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """Means over the seeds; of blend also the mean difference to the best of the others, seed by seed."""
    lines = [f"### {trace}", "", "| finished | predictor | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * 5]
    for phase in map(str, PHASES):
        for name in NAMES:
            cells = [f"{statistics.mean(figures[name][phase][c]):.3f}" for c in COLUMNS]
            lines.append(f"| {phase} | {name} | " + " | ".join(cells) + " |")
        cells = [_margin({name: figures[name][phase][column] for name in NAMES}) for column in COLUMNS]
        lines.append(f"| {phase} | blend - best part | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| | us per prompt (256) | us per answer (50 at a time) | us per answer (one at a time) |",
        "|---|---|---|---|",
    ]
    for name in NAMES:
        last = figures[name][str(PHASES[-1])]
        cells = [f"{statistics.median(last[c]):.1f}" for c in ("us_prompt", "us_answer", "us_answer_alone")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _margin(of: dict[str, list[float]]) -> str:
    """Blend minus the part that is best on average, paired by seed: mean and standard error."""
    best = max(NAMES[:-1], key=lambda name: statistics.mean(of[name]))
    gaps = [a - b for a, b in zip(of["blend"], of[best])]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    return f"{statistics.mean(gaps):+.3f} ± {error:.3f}"


def measure(trace: str, seeds: Sequence[int], names: Sequence[str] = NAMES) -> dict[str, Any]:
    by_name: dict[str, dict[str, dict[str, list[float]]]] = {n: {str(p): {} for p in PHASES} for n in names}
    for seed in seeds:
        tasks = tasks_of(trace, seed)
        for name in names:
            for phase, figures in follow(name, tasks):
                for column, value in figures.items():
                    by_name[name][str(phase)].setdefault(column, []).append(round(value, 4))
    return by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="*", default=list(TRACES), choices=TRACES)
    parser.add_argument("--predictors", nargs="+", default=list(NAMES), choices=NAMES, help="the others: as saved")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        print("set OPENBLAS_NUM_THREADS=1, as busrl does for its processes: more take longer", file=sys.stderr)
    path = options.out / "predictors.json"
    saved: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"traces": {}}
    saved["machine"] = {"python": platform.python_version(), "numpy": np.__version__, "cores": os.cpu_count()}
    for trace in options.traces:
        kept = saved["traces"].get(trace, {})
        if kept.get("seeds") != options.seeds:
            kept = {"seeds": options.seeds, "told": {}}
        saved["traces"][trace] = kept
        kept["told"] |= measure(trace, options.seeds, options.predictors)
        print(table(trace, saved["traces"][trace]["told"]) + "\n", flush=True)
        path.write_text(json.dumps(saved, indent=1))
    known = [ceilings(seed) for seed in options.seeds]
    saved["ceilings"] = {name: round(statistics.mean(of_seed[name] for of_seed in known), 4) for name in known[0]}
    print("ceilings of the default trace:", saved["ceilings"])
    path.write_text(json.dumps(saved, indent=1))
    if options.rivals:
        by_seed = [rivals(tasks_of("default", seed)) for seed in options.seeds]
        saved["rivals"] = {
            name: {k: [round(of_seed[name][k], 4) for of_seed in by_seed] for k in by_seed[0][name]}
            for name in by_seed[0]
        }
        for name, row in saved["rivals"].items():
            print(name, {k: round(statistics.mean(v), 3) for k, v in row.items()})
        path.write_text(json.dumps(saved, indent=1))
