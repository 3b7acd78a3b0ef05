"""The state of a run on a terminal, drawn with `rich`: the screen of `busrl monitor`, and the picture below the lines
of `busrl launch`.

Draws a `RunState`; reads keys without Enter, and restores the terminal at the end. Knows nothing of where the state
comes from.

- Every picture fits the terminal, however long the names and however many the rows.
"""

from __future__ import annotations

import os
import select
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final, TextIO

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from busrl.observe.monitor import phrases
from busrl.observe.monitor.sources import NICE, RENDER_S, RENDER_SHARE, WAKE_S, Watcher, catch_up, give_way
from busrl.paths import RunPaths
from busrl.status import words
from busrl.status.state import ProcessRow, RunState
from busrl.status.words import chart, printable, safe, short

# -- keys --------------------------------------------------------------------------------------------------------------

@contextmanager
def keys_of(stream: TextIO) -> Iterator[Callable[[float], str]]:
    """Make a function that waits for a key, at most so many seconds, and returns the keys that were hit."""
    fd = stream.fileno()

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([fd], [], [], timeout_s)
        got = os.read(fd, 64) if ready else b""
        return got.decode(errors="replace") if got or not ready else "q"  # the terminal is gone

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


# -- drawing -----------------------------------------------------------------------------------------------------------

WIDE: Final = 110
STATE_STYLE: Final = {
    "queued": "bright_black", "generating": "cyan", "generated": "blue", "rewarding": "magenta",
    "rewarded": "bright_green", "training": "yellow", "reserved": "white", "dropped": "red", "free": "grey30",
}
RUN_STYLE: Final = {
    "running": "green", "finishing": "green", "stopping": "yellow", "left": "yellow", "damaged": "red",
    "ended": "cyan",
}
SEVERITY_STYLE: Final = {"warning": "yellow", "error": "red", "critical": "bold red"}
LABELS: Final = "grey58"
LEFT: Final = ("process", "doing", "busy", "message")  # columns whose cells begin at the left
GAP: Final = "  "


def gauge(share: float, width: int) -> tuple[str, str]:
    """The filled and the empty part of a bar of `width` characters."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "━" * full, "─" * (width - full)


def portions(counts: Sequence[int], width: int) -> list[int]:
    """Divide `width` cells among the counts: in proportion, and at least one for a count that is not 0."""
    total = sum(counts)
    if total <= 0 or width <= 0:
        return [0] * len(counts)
    cells = [max(1, round(count * width / total)) if count else 0 for count in counts]
    while sum(cells) != width:
        over = sum(cells) > width
        at = max(range(len(cells)), key=lambda i: (cells[i], counts[i]))
        if over and cells[at] <= 1:  # more counts than cells: the last ones get none
            at = max(i for i, cell in enumerate(cells) if cell)
        cells[at] += -1 if over else 1
    return cells


def sizes(height: int, processes: int, errors: int, facts: int) -> tuple[int, int, int, int]:
    """Rows for charts, processes, facts and errors: three fewer in all than the terminal has.

    Facts come first, then a line per process; charts and errors share what is left.
    """
    room = max(0, height - 3)  # two lines of head, one of foot
    facts = min(facts, room)
    room -= facts
    table = min(processes + 3, max(0, room - 5))
    room -= table
    listed = min(max(1, errors), max(1, room // 3), room)
    return room - listed, table, facts, listed


def view(
    run: RunState, now: float, wall: float, width: int, height: int, errors_only: bool = False, several: bool = False
) -> Layout:
    """The whole screen; with `errors_only` its middle is the list of errors. `several`: there are other models."""
    rows, facts = run.rows(now), _facts(run, now, width)
    charts, processes, lines, errors = sizes(height, len(rows), run.errors.count, len(facts))
    screen = Layout()
    parts = [Layout(_head(run, now, wall, width), size=2)]
    if errors_only:
        parts.append(Layout(_errors(run, wall, max(1, height - 3))))
    else:
        if charts:
            parts.append(Layout(_charts(run, width, charts) if charts >= 3 else Text(), size=charts))
        if processes:
            parts.append(Layout(_middle(run, rows, width, processes), size=processes))
        parts.append(Layout(Group(*facts), size=lines))
        parts.append(Layout(_errors(run, wall, errors), size=errors))
    screen.split_column(*parts, Layout(_foot(run, now, errors_only, several), size=1))
    return screen


def below(run: RunState, rows: list[ProcessRow], now: float, wall: float, width: int, height: int) -> Group:
    """Draw a run in at most `height` lines, for redrawing below the lines of a log."""
    bar, legend = _slots(run, width - 13)
    course = run.steps.course(lambda step: step.reward)
    recent = run.steps.recent(lambda step: step.reward)
    waits = f"waiting for the first step{f' ({safe(run.waiting, 60)})' if run.waiting else ''}"
    curve = Text(chart(course, 24, 1)[0].rstrip(), "cyan") if course else Text(waits, LABELS)
    if course and recent is not None:
        curve.append(f" {course[0] if run.first_reward is None else run.first_reward:.3f} → {recent:.3f}", "bold")
    of_steps = [
        _labelled("reward", curve),
        _labelled("policy", Text(words.policy(run) or "no step yet")),
        _labelled("speed", Text(words.speed(run.speed(now)))),
        _labelled("slots", bar),
        _labelled("", legend),
    ]
    lines: list[RenderableType] = [_head(run, now, wall, width), *(of_steps if run.facts.learns else []), *_parts(run)]
    room = height - len(lines) - 2  # the head has two lines, the table of processes one
    return Group(*lines, _processes(rows, room)) if room > 0 else Group(*lines[: max(0, height - 1)])


def launch_picture(run: RunState, rows: list[ProcessRow], now: float, width: int, height: int) -> str:
    """`below` as text for the terminal of `busrl launch`; one column and one row of it stay free."""
    console = Console(width=max(1, width - 1), height=height, force_terminal=True, legacy_windows=False)
    with console.capture() as captured:
        console.print(below(run, rows, now, time.time(), console.width, height - 1))
    return captured.get()


def _head(run: RunState, now: float, wall: float, width: int) -> RenderableType:
    style = RUN_STYLE.get(run.state, "cyan")
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(" busrl ", "bold black on cyan")
    title.append(f" {phrases.headline(run, wall)}", f"bold {style}")
    if run.ended and run.ring is None and not run.damage:
        title.append(f" · {safe(run.ended)}", style)
    text = f" {words.progress(run, now)} "
    goal = run.facts.max_steps
    full, empty = gauge(run.at_step / goal if goal else 0.0, max(4, width - len(text) - 1))
    return Group(title, Text.assemble(" ", (full, "green"), (empty, "grey30"), (text, "bold"), no_wrap=True))


def _foot(run: RunState, now: float, errors_only: bool, several: bool) -> RenderableType:
    keys = [(" q", "bold"), (" quit  ", LABELS), ("e", "bold"), (" back  " if errors_only else " errors  ", LABELS)]
    keys += [("m", "bold"), (" next model  ", LABELS)] if several else []
    return Text.assemble(*keys, (words.speed(run.speed(now)), LABELS), no_wrap=True)


def _charts(run: RunState, width: int, height: int) -> RenderableType:
    steps = run.steps
    wanted = [
        ("reward", steps.course(lambda step: step.reward), "green", ".3f"),
        ("length", steps.course(lambda step: step.length), "cyan", ".1f"),
        ("age of samples", steps.course(lambda step: step.age_mean), "magenta", ".2f"),
    ][: 3 if width >= WIDE else 2]
    table = Layout()
    table.split_row(*(Layout(_chart(*column, width // len(wanted), height)) for column in wanted))
    return table


def _chart(name: str, course: list[float], style: str, form: str, width: int, height: int) -> Panel:
    frame: dict[str, Any] = {"title_align": "left", "border_style": "grey37", "box": box.ROUNDED}
    if not course:
        return Panel(Text("no step yet", LABELS), title=name, **frame)
    recent = course[-10:]
    ends = f"{course[0]:{form}} → {sum(recent) / len(recent):{form}}"
    span = f"{min(course):{form}} to {max(course):{form}} in {len(course)} steps"
    curve = Text("\n".join(chart(course, max(1, width - 4), max(1, height - 2))), style, no_wrap=True)
    title = Text.assemble((name, "bold"), "  ", (ends, style))
    return Panel(curve, title=title, subtitle=Text(span, LABELS), subtitle_align="right", **frame)


def _middle(run: RunState, rows: list[ProcessRow], width: int, height: int) -> RenderableType:
    table = Panel(_processes(rows, height - 3), border_style="grey37", box=box.ROUNDED)
    if width < WIDE:
        return table
    both = Layout()
    both.split_row(Layout(table, ratio=5), Layout(_messages(run, height - 3), ratio=2))
    return both


def _table(names: Sequence[str], widest: str) -> Table:
    """Make a table. Two blanks between columns stand in the cells (`_add`): rich draws padding as a second cell, which
    takes twice the time."""
    table = Table(box=None, expand=True, padding=0, header_style=LABELS)
    for at, name in enumerate(names):
        justify: JustifyMethod = "left" if name in LEFT else "right"
        table.add_column(
            GAP * bool(at) + name, justify=justify, no_wrap=True, ratio=1 if name == widest else None
        )
    return table


def _add(table: Table, first: Text, *others: Text) -> None:
    for cell in others:
        cell.pad_left(len(GAP))
    table.add_row(first, *others)


def _processes(rows: list[ProcessRow], room: int) -> Table:
    """The table of processes, at most `room` lines without its head."""
    table = _table(("process", "pid", "doing", "busy", "progress", "version", "samples"), "doing")
    hidden = len(rows) - room
    for row in rows[: room if hidden <= 0 else max(0, room - 1)]:
        _add(table, *_cells(row))
    if hidden > 0:
        table.add_row(Text(f"{hidden + 1} more", LABELS))
    return table


def _cells(row: ProcessRow) -> tuple[Text, ...]:
    style = {"dead": "red", "gone": LABELS, "ready": "green", "on the bus": "cyan"}.get(row.state, "yellow")
    doing, late = words.doing(row), "bold red" if row.late else ""
    full, empty = gauge(row.busy or 0.0, 6)
    busy = Text.assemble((full, "green"), (empty, "grey30"), f" {row.busy:4.0%}") if row.busy is not None else Text("-")
    behind = (f" -{row.behind}" if row.behind else "", "yellow")
    return (
        Text.assemble(safe(row.name, 20), (f" ↻{row.restarts}" if row.restarts else "", "yellow")),
        Text(str(row.pid or ""), LABELS),
        Text("LATE: " + doing if row.late else doing, late or (LABELS if doing == "idle" else style)),
        busy,
        Text(words.age(row.progress_age_s), late),
        Text.assemble(str(row.version or ""), behind),
        Text(short(row.samples) if row.samples else ""),
    )


def _messages(run: RunState, room: int) -> Panel:
    table = _table(("message", "per s", "all"), "message")
    flows = sorted(run.traffic.by_name.items(), key=lambda item: -item[1].count)
    for name, flow in flows[: max(0, room)]:
        _add(table, Text(name.lower()), Text(f"{flow.rate.per_s():.1f}"), Text(short(flow.count), LABELS))
    return Panel(table, border_style="grey37", box=box.ROUNDED)


def _facts(run: RunState, now: float, width: int) -> list[Text]:
    bar, legend = _slots(run, width - 13)
    bad = run.traffic.missed or run.traffic.lag_s > 1.0
    return [
        *([_labelled("slots", bar), _labelled("", legend)] if run.facts.learns else []),
        *_parts(run),
        *(
            _labelled(name if not at else "", Text(part))
            for name, phrase in words.labelled(run, now).items()
            for at, part in enumerate(_in_two(phrase, width - 13) if name == "waits" else [phrase])
        ),
        *(_labelled("host", Text(line)) for line in words.hosts(run)),
        _labelled("bus", Text(phrases.bus(run, now), "yellow" if bad else "")),
    ]


def _parts(run: RunState) -> list[Text]:
    return [Text(printable(line[1:]), no_wrap=True, overflow="ellipsis") for line in phrases.of_parts(run)]


def _in_two(phrase: str, width: int) -> list[str]:
    """A phrase in two lines if one is too short; the second line has its end, which says most."""
    first = phrase[: phrase.rfind(" ", 0, width + 1)] if len(phrase) > width else phrase
    return [first, phrase[max(len(first), len(phrase) - width) :].strip()] if len(phrase) > len(first) else [phrase]


def _labelled(label: str, content: Text) -> Text:
    return Text.assemble((f" {label:<10}", LABELS), content, no_wrap=True, overflow="ellipsis")


def _slots(run: RunState, width: int) -> tuple[Text, Text]:
    states = words.occupancy(run)
    bar, legend = Text(), Text()
    for (name, count), cells in zip(states, portions([count for _, count in states], width)):
        bar.append("█" * cells, STATE_STYLE[name])
        legend.append("■ ", STATE_STYLE[name])
        legend.append(f"{name} {count:,}  ")
    if states:
        return bar, legend
    if run.damage:  # over both lines, as it holds a path and the remedy
        why = safe(run.damage)
        return Text(why[:width], "red"), Text(why[width:], "red")
    return Text("no ring", LABELS), legend


def _errors(run: RunState, wall: float, height: int) -> RenderableType:
    if not run.errors.count:
        return Text(" no errors", LABELS)
    count = Text(f" {run.errors.count} errors  ", "bold yellow")
    lines = [
        Text.assemble(
            count if at == 0 else " " * len(count),
            (phrases.error_line(error, wall), SEVERITY_STYLE.get(error.severity, "")),
            no_wrap=True, overflow="ellipsis",
        )
        for at, error in enumerate(run.errors.newest(height))
    ]
    return Group(*lines)


# -- the loops of `busrl monitor` --------------------------------------------------------------------------------------

LINE_S: Final = 5.0


def as_text(watcher: Watcher) -> str:
    return "\n".join(phrases.lines(watcher.run, time.monotonic(), time.time()))


def run_plain(watcher: Watcher, out: TextIO) -> None:
    """Print a line every few seconds until the run or the replay has ended."""
    watcher.refresh(time.monotonic(), force=True)
    print(as_text(watcher), file=out, flush=True)
    give_way(NICE)
    due = time.monotonic() + LINE_S
    while not watcher.run.replay_over and watcher.run.state != "ended":
        time.sleep(WAKE_S)  # not woken by messages: there may be many
        catch_up(watcher)
        if time.monotonic() >= due:
            due = time.monotonic() + LINE_S
            print(words.line(watcher.run, time.monotonic()), file=out, flush=True)
    print(as_text(watcher), file=out, flush=True)


class Turning:
    """The watcher of the model that is shown: `first` at the beginning, one of its own for each other."""

    def __init__(self, first: Watcher, models: Sequence[RunPaths]) -> None:
        self.now, self._first, self._models, self._at = first, first, models, 0
        first.refresh(time.monotonic(), force=True)

    @property
    def several(self) -> bool:
        return len(self._models) > 1

    def turn(self) -> None:
        """Show the next model of the run."""
        self._at = (self._at + 1) % max(1, len(self._models))
        self.close()
        self.now = Watcher(self._models[self._at]) if self._at else self._first
        self.now.refresh(time.monotonic(), force=True)

    def close(self) -> None:
        if self.now is not self._first:
            self.now.close()


def run_live(watcher: Watcher, stdin: TextIO, models: Sequence[RunPaths] = ()) -> None:
    """Draw until `q`; `models`: the directories of the models of a run, that of the watcher first."""
    turning = Turning(watcher, models)
    with closing(turning), keys_of(stdin) as pressed:
        _draw(turning, pressed)


def _draw(turning: Turning, pressed: Callable[[float], str]) -> None:
    console, errors_only, gave_way, due, shown = Console(force_terminal=True), False, False, 0.0, (0, 0)
    with console.screen():
        while True:
            catch_up(turning.now)
            now, size = time.monotonic(), (console.size.width, console.size.height)
            if now >= due or size != shown:
                begun, shown = time.process_time(), size
                more = (*size, errors_only, turning.several)
                console.update_screen(view(turning.now.run, now, time.time(), *more))
                due = now + max(RENDER_S, (time.process_time() - begun) / RENDER_SHARE)
                if not gave_way:
                    give_way(NICE)
                    gave_way = True
            for key in pressed(WAKE_S):
                if key in "qQ":
                    return
                if key in "eE":
                    errors_only, due = not errors_only, 0.0
                if key in "mM" and turning.several:
                    turning.turn()
                    due = 0.0
