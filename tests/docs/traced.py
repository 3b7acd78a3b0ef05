"""Traces which functions of busrl call which in all processes of a run, from outside: busrl knows nothing of it.

A `sitecustomize` in a folder on PYTHONPATH sets a profile function in every Python process of the run, which writes
each new pair of caller and callee into a file of its own. `files_passed` walks these pairs from the doors of a way.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "busrl"
SITE = '''
import os, sys, threading

OUT, ROOT = os.environ.get("WAYS_OUT", ""), os.environ.get("WAYS_ROOT", "")
if OUT:
    def begin():
        global known, file
        known = set()
        file = os.open(os.path.join(OUT, f"{os.getpid()}.trace"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    begin()
    os.register_at_fork(after_in_child=begin)  # what a process does that a template forked is its own

    def profile(frame, event, argument):
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        pair = (caller.f_code if caller else None, frame.f_code)
        if pair not in known:
            known.add(pair)
            ends = [f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}" if code else "" for code in pair]
            os.write(file, ("\\t".join(ends) + "\\n").encode())

    threading.setprofile(profile)
    sys.setprofile(profile)
'''
Calls = Mapping[str, set[str]]


def tracing(folder: Path) -> dict[str, str]:
    """Environment variables of a run whose processes write their calls into files of the folder."""
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    return {"WAYS_OUT": str(folder), "WAYS_ROOT": f"{ROOT}/", "PYTHONPATH": str(folder / "site")}


@cache
def functions_of(file: Path) -> dict[tuple[int, str], str]:
    """The qualified name of each function of a file, by its first line (of its decorators) and its name."""
    names: dict[tuple[int, str], str] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{prefix}{child.name}."
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                if not isinstance(child, ast.ClassDef):
                    names[first, child.name] = inner[:-1]
            walk(child, inner)

    walk(ast.parse(file.read_text()), "")
    return names


def named(end: str) -> str:
    """`roles/actor.py:Actor.main` of what the trace says; `file:<lambda>` and the like for code without a name."""
    if not end:
        return ""
    file, line, name = end.rsplit(":", 2)
    known = functions_of(Path(file)).get((int(line), name), f"<{line}:{name}>")
    return f"{Path(file).relative_to(ROOT)}:{known}"


def processes(folder: Path) -> Iterator[Calls]:
    for path in sorted(folder.glob("*.trace")):
        calls: dict[str, set[str]] = defaultdict(set)
        for line in path.read_text().splitlines():
            caller, callee = line.split("\t")
            calls[named(caller)].add(named(callee))
        yield calls


def reached(calls: Calls, doors: Sequence[str], sides: Sequence[str]) -> set[str]:
    """All functions that the doors call, directly or through others, without what only side ways call."""
    seen: set[str] = set()
    left = [door for door in doors if any(door in callees for callees in calls.values())]
    while left:
        function = left.pop()
        if function not in seen:
            seen.add(function)
            left += [name for name in calls.get(function, ()) if not is_aside(name, sides)]
    return seen


def is_aside(function: str, sides: Sequence[str]) -> bool:
    """A side is a folder ("system/"), a file, or a function ("file.py:Class.method"); so is what an import runs."""
    return function.endswith("<module>>") or any(
        function == side or (side.endswith(("/", ".py")) and function.startswith(side)) for side in sides
    )


def files_passed(folder: Path, doors: Sequence[str], sides: Sequence[str], least: int) -> dict[str, list[str]]:
    """The files of which at least `least` named functions are reached, in any process, with these."""
    functions = set().union(*(reached(calls, doors, sides) for calls in processes(folder)))
    missing = [door for door in doors if door not in functions]
    assert not missing, f"no process of the run came to {missing}"
    by_file: dict[str, list[str]] = defaultdict(list)
    for function in sorted(functions):
        file, _, name = function.partition(":")
        if "<" not in name:
            by_file[file].append(name)
    return {file: names for file, names in by_file.items() if len(names) >= least}
