"""A run, or several side by side, as one HTML page that needs nothing else: drawings are SVG, there is no script.

Pure: takes `RunRecord`s, returns a page. Opens no file; a record has the faults of its own files.

- Every text from files is escaped: a model, a reward or another program may have written anything.
- A value that is not known is left out of a drawing, and is a dash in a table. Faults of files stand on top.
- A line of many steps has means of neighbours, at most `MOST_POINTS` of them.
"""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from busrl.ledger.controls import Controls
from busrl.observe.report.files import Floats, RunRecord, column_of
from busrl.observe.report.timeline import overlap, slices_of
from busrl.observe.report.waste import SHARES, Waste, waste_of
from busrl.pages import opened
from busrl.status.runfiles import number, whole_number
from busrl.status.state import RECENT
from busrl.status.view import problems
from busrl.status.words import duration, judged, printable, safe, short
from busrl.system.files import as_map

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 190, 44, 8, 8, 22
MOST_POINTS, COLOURS, MOST_PROBLEMS, CELL = 240, 6, 12, 240
PROMPT, ANSWER = 600, 1600  # characters of a sample
NOT_COMPARED = ("derived", "source", "overrides")
# Title, meaning, and the series: a label and a column of metrics.jsonl. Several runs are compared by the first series.
CHARTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Reward", "mean of a step", (("all that ended", "reward"), ("trained", "reward_trained"))),
    ("Length of answers", "tokens", (
        ("all that ended", "length_ended"), ("trained", "length_mean"), ("trained, 95 %", "length_p95"),
    )),
    ("Entropy", "nats per token", (("entropy", "entropy"),)),
    ("Effective sample size", "1: every token is on-policy", (("ess", "ess"),)),
    ("Age", "steps between the weights that draw and that train", (("mean", "age_mean"), ("oldest", "age_max"))),
    ("Not to learn from", "shares: flat groups, cut answers, tokens in no loss", (
        ("flat", "flat_share"), ("cut", "cut_share"), ("untrained", "never_trained"),
    )),
    ("Time of a step", "seconds", (("in all", "seconds"), ("waiting", "wait"), ("forward, backward", "passes"))),
    ("Publishing weights", "milliseconds of the learner", (("publish", "publish_ms"),)),
    ("Gradient norm", "before clipping", (("norm", "grad_norm"),)),
)
STYLE = """
:root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--fg:#1b1e23;--dim:#5f6670;--line:#dfe1e4;--grid:#ebecee;
--bad:#b3261e;--c0:#1f66b0;--c1:#c45a11;--c2:#2b7f55;--c3:#8148b5;--c4:#b02a63;--c5:#6b7280}
@media(prefers-color-scheme:dark){:root{--bg:#14161a;--card:#1c1f25;--fg:#e6e8eb;--dim:#9aa2ad;--line:#31363e;--grid:#282c33;
--bad:#ff8a80;--c0:#6cb0f5;--c1:#f2a65a;--c2:#6fcf97;--c3:#c39bec;--c4:#f48fb1;--c5:#a3abb6}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:20px 16px 48px}h1{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:32px 0 10px}h3{font-size:15px;margin:18px 0 0}.card h3{margin:0}
p{margin:4px 0}.dim{color:var(--dim);font-size:13px}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:14px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;min-width:0}
svg{display:block;width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:var(--dim)}
svg .g{stroke:var(--grid)}svg .l{fill:none;stroke:var(--c);stroke-width:1.6;stroke-linejoin:round}svg .d{fill:var(--c)}
.keys{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;margin:4px 0}.keys i,.bar i{background:var(--c)}
.keys i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}.keys b{font-weight:600}
.wide{overflow-x:auto;margin:10px 0;background:var(--card);border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px}th,td{text-align:left;padding:6px 12px;vertical-align:top}
tr+tr>*{border-top:1px solid var(--grid)}thead th{color:var(--dim);font-weight:500}tbody th{font-weight:500}
td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td.w{min-width:180px;overflow-wrap:anywhere}
.bar{display:flex;height:16px;border-radius:4px;overflow:hidden;background:var(--grid);margin:6px 0}
.bar i{height:100%}.bad{border-left:4px solid var(--bad)}code,pre{font:13px ui-monospace,monospace}
pre{overflow-x:auto;margin:0;padding:12px}
@media(max-width:600px){th,td{padding:5px 7px}table{font-size:13px}td.w{min-width:110px}}
details{margin-top:12px}summary{cursor:pointer}ul{margin:4px 0;padding-left:20px}
"""


# -- pieces -----

def text_of(value: Any) -> str:
    return html.escape(safe(str(value), CELL))


def num(value: float | None, unit: str = "") -> str:
    """A number for people, or a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    shown = short(value) if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown}{unit}"


def share(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.1%}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kinds: str = "") -> str:
    """Cells are HTML already. `kinds`: a letter per column, n for numbers and w for long text."""
    tops = "".join(f'<th class="{kinds[n : n + 1]}">{title}</th>' for n, title in enumerate(head))
    top = f"<thead><tr>{tops}</tr></thead>" if any(head) else ""
    body = "".join(
        f"<tr><th>{row[0]}</th>"
        + "".join(f'<td class="{kinds[n : n + 1]}">{cell}</td>' for n, cell in enumerate(row[1:], 1)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>' if body else ""


@dataclass(frozen=True)
class Line:
    """A series of a drawing; with `dots` each point is drawn too."""

    label: str
    x: Floats
    y: Floats
    dots: bool = False


def ticks(low: float, high: float) -> list[float]:
    """Round numbers in the range, at most six."""
    raw = (high - low) / 5
    if not raw > 0 or not math.isfinite(raw):
        return [low]
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if size * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(line: Line) -> Line:
    """The line with at most `MOST_POINTS` points, each the mean of as many neighbours; only finite values count."""
    finite = np.isfinite(line.x) & np.isfinite(line.y)
    x, y = (_means(values[finite]) for values in (line.x, line.y))
    return Line(line.label, x, y, line.dots)


def _means(values: Floats) -> Floats:
    return np.array([part.mean() for part in np.array_split(values, MOST_POINTS) if len(part)], np.float64)


def chart(title: str, note: str, lines: Sequence[Line], across: str = "step") -> str:
    """A card with a drawing; "" if no line has a point."""
    lines = [thinned(line) for line in lines]
    if not any(len(line.x) for line in lines):
        return ""
    x0, x1, y0, y1 = _range(lines)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    def at_x(x: Any) -> Any:
        return LEFT + (x - x0) / (x1 - x0) * (right - LEFT)
    def at_y(y: Any) -> Any:
        return bottom - (y - y0) / (y1 - y0) * (bottom - TOP)
    parts = []
    for y in ticks(y0, y1):
        parts.append(f'<path class="g" d="M{LEFT} {at_y(y):.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at_y(y) + 4:.1f}" text-anchor="end">{num(y) if y else 0}</text>')
    for x in ticks(x0, x1):
        anchor = "end" if at_x(x) > right - 16 else "middle"
        parts.append(f'<text x="{at_x(x):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{num(x) if x else 0}</text>')
    parts += [_curve(line, n, at_x(line.x), at_y(line.y)) for n, line in enumerate(lines) if len(line.x)]
    keys = "".join(
        f'<span style="--c:var(--c{n % COLOURS})"><i></i>{text_of(line.label)} <b>{num(float(line.y[-1]))}</b></span>'
        for n, line in enumerate(lines) if len(line.x)
    )
    return (
        f'<section class="card"><h3>{title}</h3><p class="dim">{note}, by {across}</p><div class="keys">{keys}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg></section>'
    )


def _range(lines: Sequence[Line]) -> tuple[float, float, float, float]:
    """The range of a drawing: that of all points, and from 0 on if that is at most twice their spread away."""
    xs, ys = (np.concatenate(values) for values in ([line.x for line in lines], [line.y for line in lines]))
    x0, x1, y0, y1 = float(xs.min()), float(xs.max()), float(ys.min()), float(ys.max())
    y0 = 0.0 if 0 <= y0 <= 2 * (y1 - y0) else y0
    room = (y1 - y0) * 0.05 or max(abs(y1) * 0.1, 1e-3)
    return x0, x1 if x1 > x0 else x0 + 1, y0 - (room if y0 else 0.0), y1 + room


def _curve(line: Line, colour: int, x: Floats, y: Floats) -> str:
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))
    points = zip(x, y, strict=True) if line.dots or len(x) == 1 else ()
    dots = "".join(f'<circle class="d" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in points)
    return f'<g style="--c:var(--c{colour % COLOURS})"><path class="l" d="M{path}"/>{dots}</g>'


def bar(parts: Iterable[tuple[int, float, str]]) -> str:
    """A bar of shares, each a colour, a number and a text."""
    return '<div class="bar">' + "".join(
        f'<i style="--c:var(--c{colour % COLOURS});width:{100 * value:.2f}%" title="{text_of(what)}: {value:.1%}"></i>'
        for colour, value, what in parts
    ) + "</div>"


# -- a run -----

class Run:
    """A run of the page: its record, and what is computed from it."""

    def __init__(self, record: RunRecord, label: str) -> None:
        self.record, self.label = record, label
        self.steps, self.waste = record.column("step"), waste_of(record)
        self.overlap = overlap(slices_of(record))
        self.problems, self.rounds = problems(record.paths.errors), record.validation()

    def line(self, column: str, label: str) -> Line:
        return Line(label, self.steps, self.column(column))

    def column(self, name: str) -> Floats:
        if name == "wait":
            waits = (as_map(row.get("wait_s")).values() for row in self.record.steps)
            return np.array([sum(number(wait) or 0.0 for wait in of_step) for of_step in waits], np.float64)
        if name == "passes":
            return self.record.column("forward_s") + self.record.column("backward_s")
        if name == "publish_ms":
            return 1000 * self.record.column("publish_s")
        return self.record.column(name)

    def minutes(self) -> Floats:
        """Minutes of training up to each step, over all starts."""
        return np.asarray(np.nancumsum(self.record.column("seconds")) / 60)

    def validation(self) -> Iterator[Line]:
        rounds = self.rounds.rounds()
        for name in dict.fromkeys(entry.set for entry in rounds):
            x, y = np.array([(entry.round, entry.mean) for entry in rounds if entry.set == name], np.float64).T
            yield Line(name, x, y, True)

    def busy(self) -> dict[str, float]:
        """Busy shares by process: of the summary, else of the learner and the rollouts by their own files."""
        accounts = as_map(self.record.summary.get("processes"))
        shares = {name: number(as_map(account).get("busy_share")) for name, account in accounts.items()}
        if by_summary := {name: value for name, value in shares.items() if value is not None}:
            return by_summary
        seconds, waits = float(np.nansum(self.record.column("seconds"))), float(np.nansum(self.column("wait")))
        by_files = {"learner": max(0.0, 1 - waits / seconds)} if seconds else {}
        for name, rows in self.record.pace.items():
            wall, idle = (sum(number(row.get(key)) or 0.0 for row in rows) for key in ("wall_s", "idle_s"))
            by_files |= {name: 1 - idle / wall} if wall else {}
        return by_files

    def updates(self) -> dict[str, float]:
        """Mean seconds in which each rollout process takes new weights."""
        sums = {
            name: tuple(sum(number(row.get(key)) or 0.0 for row in rows) for key in ("weights_s", "updates"))
            for name, rows in self.record.pace.items()
        }
        return {name: seconds / count for name, (seconds, count) in sums.items() if count}

    def parts(self) -> list[Line]:
        """The mean of each part of the reward, by step."""
        rows = [as_map(row.get("reward_parts")) for row in self.record.steps]
        names = dict.fromkeys(name for row in rows for name in row)
        return [Line(name, self.steps, column_of(rows, name)) for name in [*names][:COLOURS]]

    def in_flight(self) -> str:
        """The settings that were changed while the run ran and that are in force, as a text."""
        controls = Controls()
        for line in self.record.requests:
            controls.add(line)
        return ", ".join(f"{key} = {line.new}" for key, line in controls.settings.items())

    def versions(self) -> str:
        start: dict[str, Any] = next(reversed(self.record.starts), {})
        by_name = {"busrl": start.get("busrl"), **as_map(start.get("versions"))}
        return ", ".join(f"{name} {version}" for name, version in by_name.items() if version)

    def settings(self) -> dict[str, str]:
        settings = _flat(self.record.topology)
        return {key: value for key, value in settings if key.partition(".")[0] not in NOT_COMPARED}


def _flat(tree: Any, at: str = "") -> Iterator[tuple[str, str]]:
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if not inside:
        yield at, str(tree)
    for key, branch in inside:
        yield from _flat(branch, f"{at}.{key}" if at else str(key))


def _ends(values: Floats) -> str:
    """The first value and the mean of the newest ten, as `busrl status` and the summary have them."""
    finite = values[np.isfinite(values)]
    return f"{finite[0]:.3f} → {finite[-RECENT:].mean():.3f}" if len(finite) else "–"


def _median(values: Floats, unit: str = "") -> str:
    finite = values[np.isfinite(values)]
    return num(float(np.median(finite)), unit) if len(finite) else "–"


# Of each run, in the order of the table.
FACTS: dict[str, Callable[[Run], str]] = {
    "state": lambda run: text_of(", ".join(filter(None, (run.record.state, str(run.record.summary.get("why") or ""))))),
    "steps": lambda run: f"{whole_number(run.steps[-1]) if len(run.steps) else 0}",
    "training time": lambda run: duration(60 * float(run.minutes()[-1])) if len(run.steps) else "–",
    "reward": lambda run: _ends(run.column("reward")),
    "validation": lambda run: text_of(judged(run.rounds)).removeprefix("validation ") or "–",
    "seconds per step": lambda run: _median(run.column("seconds")),
    "tokens drawn": lambda run: num(run.waste.sampled),
    "of them trained": lambda run: f"{share(run.waste.share)} (validation apart)",
    "decoding during training": lambda run: share(run.overlap),
    "lowest ess": lambda run: num(run.waste.ess.get("lowest")),
    "publishing weights": lambda run: _median(run.column("publish_ms"), " ms"),
    "taking them": lambda run: ", ".join(
        f"{text_of(name)} {num(1000 * seconds)} ms" for name, seconds in [*run.updates().items()][:4]
    ) or "–",
    "starts": lambda run: f"{len(run.record.starts)}",
    "changed in flight": lambda run: text_of(run.in_flight()) or "–",
    "warnings and errors": lambda run: f"{sum(problem['count'] for problem in run.problems)}",
    "versions": lambda run: text_of(run.versions()) or "–",
    "folder": lambda run: text_of(run.record.paths.root),
}


# Of runs that made no step of their own.
OF_ALL = ("state", "starts", "changed in flight", "warnings and errors", "versions", "folder")


# -- the page -----

def page(records: Sequence[RunRecord]) -> str:
    runs = [Run(record, label) for record, label in zip(records, _labels(records), strict=True)]
    title = text_of(" · ".join(run.label for run in runs))
    parts = [
        f"<h1>{title}</h1><p class=dim>made {time.strftime('%Y-%m-%d %H:%M:%S %Z')} of the files of "
        f"{'the run' if len(runs) == 1 else f'{len(runs)} runs'}; what each number is: {opened('docs/metrics.md')}</p>",
        *_faults(runs), *_section("At a glance", [_facts(runs)]), *_section("Course", [_charts(runs)]),
        *_chapters(runs), *_section("Samples", map(_samples, runs)),
        *_section("What became of the tokens", map(_waste, runs)),
        *_section("Processes", [_busy(runs), *map(_deaths, runs)]),
        *_section("Warnings and errors", map(_problems, runs)),
        *_section("Settings", [_differences(runs), *map(_changes, runs), *map(_requests, runs), *map(_topology, runs)]),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _labels(records: Sequence[RunRecord]) -> list[str]:
    """Names of the runs; those of their folders if two runs have the same name."""
    names = [record.name for record in records]
    return names if len(set(names)) == len(names) else [record.paths.root.name for record in records]


def _section(title: str, parts: Iterable[str]) -> Iterator[str]:
    if body := "".join(parts):
        yield f"<h2>{title}</h2>{body}"


def _of(run: Run) -> str:
    return f"<h3>{text_of(run.label)}</h3>"


def _faults(runs: Sequence[Run]) -> Iterator[str]:
    faults = [(run, fault) for run in runs for fault in dict.fromkeys(run.record.faults)]
    if faults:
        rows = "".join(f"<li>{text_of(run.label)}: {text_of(fault)}</li>" for run, fault in faults)
        yield f'<div class="card bad"><b>What could not be read</b><ul>{rows}</ul><p>All else stands below.</p></div>'


def _facts(runs: Sequence[Run]) -> str:
    names = [*FACTS] if any(run.record.has_steps for run in runs) else OF_ALL
    rows = [[name, *(FACTS[name](run) for run in runs)] for name in names]
    return table(["", *(text_of(run.label) for run in runs)] if len(runs) > 1 else [""], rows, "-" + "w" * len(runs))


def _chapters(runs: Sequence[Run]) -> Iterator[str]:
    """Sections of optional parts of busrl, about each run."""
    parts = [(run, part) for run in runs for part in run.record.chapters]
    for title in dict.fromkeys(part.title for _, part in parts):
        yield from _section(title, (_chapter(run, part) for run, part in parts if part.title == title))


def _chapter(run: Run, part: Any) -> str:
    cards = "".join(
        chart(text_of(card.title), text_of(card.note), [
            Line(name, np.array(x, np.float64), np.array(y, np.float64)) for name, (x, y) in card.lines.items()
        ], text_of(card.across)) for card in part.drawings)
    facts = table([""], ([text_of(name), text_of(value)] for name, value in part.facts.items()), "-w")
    tables = (
        table([*map(text_of, of.head)], ([*map(text_of, row)] for row in of.rows), of.kinds) for of in part.tables)
    return _of(run) + facts + (f'<div class="cards">{cards}</div>' if cards else "") + "".join(tables)


def _charts(runs: Sequence[Run]) -> str:
    alone = len(runs) == 1
    rounds = [
        Line(" ".join(filter(None, ("" if alone else run.label, line.label))) or "mean", line.x, line.y, True)
        for run in runs for line in run.validation()
    ]
    clock = [Line("all that ended" if alone else run.label, run.minutes(), run.column("reward")) for run in runs]
    cards = [chart("Validation", "mean reward", rounds), chart("Reward over time", "mean of a step", clock, "minutes")]
    for title, note, series in CHARTS:
        shown = series if alone else series[:1]
        lines = [run.line(column, label if alone else run.label) for run in runs for label, column in shown]
        cards.append(chart(title, note if alone or len(series) == 1 else f"{series[0][0]}; {note}", lines))
    cards += [chart("Parts of the reward", "mean of all that ended", runs[0].parts())] if alone else []
    cards[:3] = [cards[2], cards[0], cards[1]]
    body = "".join(cards)
    return f'<div class="cards">{body}</div>' if body else ""


def _samples(run: Run) -> str:
    """A few samples as they were written, with their rewards."""
    rows = [
        [text_of(f"{title}, step {row.get('step')}"), num(number(row.get("reward"))), _parts_of(row),
         _shortened(_text(row, "prompt", "record"), PROMPT),
         _shortened(_text(row, "completion", "turns", "messages"), ANSWER)]
        for title, samples in run.record.samples.items() for row in samples
    ]
    return (_of(run) + table(["", "reward", "its parts", "prompt", "answer"], rows, "-nwww")) if rows else ""


def _text(row: dict[str, Any], *names: str) -> str:
    """The first of these fields that the row has, as text."""
    value = next((row[name] for name in names if name in row), "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _shortened(text: str, most: int) -> str:
    """The lines of a text, without its middle if it is long: an answer's end says most."""
    cut = text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"
    return "<br>".join(html.escape(printable(line)) for line in cut.splitlines())


def _parts_of(row: dict[str, Any]) -> str:
    parts = [(name, number(value)) for name, value in as_map(row.get("reward_parts")).items()]
    return "<br>".join(f"{text_of(name)} {num(value)}" for name, value in parts)


def _waste(run: Run) -> str:
    waste = run.waste
    total = waste.total
    if not total:
        return ""
    shares = [(part.tokens or 0) / total for part in waste.parts]
    dot = '<span class="keys"><span style="--c:var(--c{})"><i></i>{}</span></span>'
    rows = [
        [dot.format(n % COLOURS, text_of(part.what)), share(shares[n]), num(part.tokens), num(part.samples)]
        for n, part in enumerate(waste.parts)
    ]
    rows += [[f"among the last: {text_of(part.what)}", "", "", num(part.samples)] for part in waste.counted]
    notes = "".join(f'<p class="dim">{text_of(note)}</p>' for note in waste.notes)
    return (
        _of(run) + bar((n, shares[n], part.what) for n, part in enumerate(waste.parts)) + notes
        + table(["", "share", "tokens", "samples"], rows, "-nnn") + _bias(waste)
    )


def _bias(waste: Waste) -> str:
    names = [f"p{n}" for n in SHARES]
    lengths = [
        [name, num(kind.samples), num(kind.mean), *(num(kind.quantiles.get(key)) for key in names)]
        for name, kind in waste.lengths.items() if kind.samples
    ]
    quarters = [
        [f"{quarter.shortest:.0f} to {quarter.longest:.0f} tokens", share(quarter.trained), share(quarter.flat),
         share(quarter.lost), num(quarter.age)]
        for quarter in waste.quarters
    ]
    return (
        table(["lengths of answers", "samples", "mean", *names], lengths, "-nnnnnn")
        + table(["groups by mean length", "trained", "flat", "lost otherwise", "age"], quarters, "-nnnn")
    )


def _busy(runs: Sequence[Run]) -> str:
    rows = [
        [text_of(name if len(runs) == 1 else f"{run.label}: {name}"), bar([(0, min(1.0, max(0.0, busy)), "busy")]),
         share(busy)]
        for run in runs for name, busy in run.busy().items()
    ]
    return table(["", "busy", ""], rows, "-wn")


def _deaths(run: Run) -> str:
    children = as_map(run.record.supervisor.get("processes"))
    rows = [
        [text_of(name), num(number(as_map(child).get("restarts"))), text_of(as_map(child).get("latest") or "–")]
        for name, child in children.items() if as_map(child).get("restarts")
    ]
    return (_of(run) + table(["started again", "times", "latest death"], rows, "-nw")) if rows else ""


def _problems(run: Run) -> str:
    rows = [
        [text_of(problem["severity"]), text_of(problem["process"]), str(problem["count"]), text_of(problem["text"])]
        for problem in run.problems[:MOST_PROBLEMS]
    ]
    more = len(run.problems) - MOST_PROBLEMS
    rest = f'<p class="dim">and {more} older kinds: errors.jsonl</p>' if more > 0 else ""
    return (_of(run) + table(["", "process", "times", "newest text"], rows, "--nw") + rest) if rows else ""


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    settings = [run.settings() for run in runs]
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    differing = [key for key in keys if len({of_run.get(key) for of_run in settings}) > 1]
    rows = [[text_of(key), *(text_of(of_run.get(key, "–")) for of_run in settings)] for key in differing]
    differences = table(["differences", *(text_of(run.label) for run in runs)], rows, "-" + "w" * len(runs))
    return differences or "<p>The topologies of these runs do not differ.</p>"


def _changes(run: Run) -> str:
    changes = (
        (start, key, as_map(change)) for start in run.record.starts
        for key, change in as_map(start.get("changes")).items()
    )
    rows = [
        [f"step {text_of(start.get('step'))}", text_of(key), text_of(change.get("was")), text_of(change.get("now"))]
        for start, key, change in changes
    ]
    return _of(run) + table(["started again at", "key", "was", "now"], rows, "-www") if rows else ""


def _requests(run: Run) -> str:
    rows = [
        [f"step {line.step}", *map(text_of, (line.verb, line.key, line.old, line.new, line.who)),
         text_of(line.text if line.ok else f"refused: {line.text}")]
        for line in run.record.requests
    ]
    head = ["asked while it ran, at", "what", "key", "was", "now", "by", "answer"]
    return _of(run) + table(head, rows, "-wwwwww") if rows else ""


def _topology(run: Run) -> str:
    body = html.escape("\n".join(printable(f"{key} = {value[:CELL]}") for key, value in run.settings().items()))
    title = f"All settings of {text_of(run.label)}"
    return f'<details><summary>{title}</summary><div class="wide"><pre>{body}</pre></div></details>' if body else ""
