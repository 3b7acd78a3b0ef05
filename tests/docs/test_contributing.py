"""The page for contributors is true: its first change works as written, its tree and its commands are those of the
repository, and the index of the documentation has every page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
TREE = PAGE.partition("## The tree")[2].partition("## Tests")[0]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, flags=re.S)
INDEX = (ROOT / "docs" / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()


def block(start: str) -> str:
    """The one block of the page that begins so."""
    [text] = [text for _, text in BLOCKS if text.startswith(start)]
    return text


def insert(path: Path, after: str, text: str) -> None:
    """Put a text behind another that stands there once."""
    before, place, rest = path.read_text().rpartition(after)
    assert place, f"{path} has no {after!r}"
    path.write_text(before + after + text + rest)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the first change touches."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("busrl", "configs", "docs", "tools", "tests/algorithms", "tests/docs", "csrc/include"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored, symlinks=True)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True,
                          timeout=150)


@pytest.mark.long
def test_the_first_change_works_as_the_page_says(tree: Path) -> None:
    (tree / "tests" / "algorithms" / "test_median.py").write_text(block('"""The median'))
    assert run(tree, "-m", "pytest", "-q", "tests/algorithms/test_median.py").returncode == 1
    advantages = tree / "busrl" / "algorithms" / "advantages.py"
    alone = "    return torch.tensor(list(rewards), dtype=torch.float64)\n"
    insert(advantages, alone, "\n\n" + block("def median"))
    insert(advantages, '    "gae": reward_alone, "ema": reward_alone,\n', block('    "median": median'))
    catalog = tree / "busrl" / "algorithms" / "catalog.py"
    insert(catalog, '"reward": SAMPLE, GAE: TOKEN, EMA: EARLIER,\n', block('    "median": GROUP'))
    algorithms = tree / "docs" / "algorithms.md"
    row = next(line + "\n" for line in algorithms.read_text().splitlines() if line.startswith("| `mean_normalised`"))
    insert(algorithms, row, block("| `median`"))
    assert run(tree, "-m", "tools.reference.topology_page", "configs").returncode == 0
    assert '"median"' in (tree / "configs" / "reference.toml").read_text()
    chosen = "algorithms or default_on or every_loss or every_key_on"
    done = run(tree, "-m", "pytest", "-q", "tests/algorithms", "tests/docs/test_pages.py", "-k", chosen)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_tree_of_the_page_is_the_tree() -> None:
    packages = {path.parent.name for path in (ROOT / "busrl").glob("*/__init__.py")}
    table = "\n".join(line.split("|")[1] for line in TREE.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z]+)/`", table)) == packages
    top = set(re.findall(r"^([a-z]+)/ ", TREE, flags=re.M))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert top == {line.partition("/")[0] for line in tracked.splitlines() if "/" in line and line[0] != "."}


def test_the_commands_of_the_page_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", PAGE, flags=re.M)) <= targets


def test_hooks_use_programs_of_the_environment_alone() -> None:
    entries = re.findall(r"^ +entry: (\S+)", HOOKS, flags=re.M)
    assert entries == [".venv/bin/ruff", ".venv/bin/mypy", ".venv/bin/clang-format"]
    assert HOOKS.count("language: system") == len(entries) and "repo: local" in HOOKS and HOOKS.count("repo:") == 1
    [files] = re.findall(r"^ +files: (\S+)", HOOKS, flags=re.M)
    patterns = re.search(r"git ls-files (.*?) \|", MAKEFILE)
    assert patterns is not None
    command = ["git", "ls-files", *(pattern.strip("'") for pattern in patterns[1].split())]
    formatted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in tracked if re.search(files, name)] == sorted(formatted)


def test_the_index_has_every_page_with_a_line() -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    lines = [line for line in INDEX.splitlines() if line.startswith("| [")]
    listed = [Path(re.findall(r"\]\(([^)]+)\)", line)[0]) for line in lines]
    assert len(set(listed)) == len(listed)
    wanted = {page for page in pages if page.parts[0] != "reports" and page != Path("README.md")}
    assert set(listed) - {Path("../CONTRIBUTING.md")} == wanted
    assert all(line.rstrip(" |").endswith("?") for line in lines), "a line is the question that the page answers"
