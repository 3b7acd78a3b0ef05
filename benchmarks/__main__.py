"""Start one program of this folder by its name: `python -m benchmarks NAME [options]`; without a name, lists them.

A line of the list is the first sentence of the program's docstring, read without importing it: a program may need
libraries that are not here. Knows nothing of what a program measures.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import sys
from pathlib import Path

from benchmarks import ROOT

HERE = ROOT / "benchmarks"


def programs() -> dict[str, Path]:
    """Name -> file of every program, sorted."""
    files = [path for folder in (HERE, HERE / "experiments") for path in folder.glob("[a-z]*.py")]
    by_name = {path.stem.replace("_", "-"): path for path in files}
    return dict(sorted({**by_name, **{path.parent.name: path for path in HERE.glob("*/run.py")}}.items()))


def summary(path: Path) -> str:
    """The first sentence of a program's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def listing() -> str:
    lines = ["usage: python -m benchmarks NAME [options]      (NAME --help tells the options)", ""]
    for title, experiment in (("benchmarks", False), ("experiments (docs/experiments)", True)):
        chosen = {name: path for name, path in programs().items() if (path.parent.name == "experiments") is experiment}
        lines += [f"{title}:", *(f"  {name:20} {summary(path)}" for name, path in chosen.items()), ""]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(listing(), end="")
        return 0
    files, name = programs(), argv[0]
    if name not in files:
        near = difflib.get_close_matches(name, files, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"no benchmark is named {name!r}{hint} `python -m benchmarks` lists them", file=sys.stderr)
        return 2
    sys.argv = [f"python -m benchmarks {name}", *argv[1:]]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # of children
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a child would compile what it imports
    module = importlib.import_module(".".join(files[name].relative_to(ROOT).with_suffix("").parts))
    return module.main() or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
