"""Holds the tests to what makes them last: names that are one short sentence, and little knowledge of insides.

The ceilings are what is still over the bar; each only shrinks, and a failure prints what it counts.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

from busrl.system.files import user_folder

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
MOST_WORDS = 12
STILL_PRIVATE = 15  # bar: 60


@cache
def parsed() -> dict[str, ast.Module]:
    return {str(path.relative_to(TESTS)): ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}


def by_folder(entries: list[str], most: int) -> str:
    folders = Counter(entry.split("/")[0] for entry in entries)
    return "\n".join([f"{len(entries)} > {most}: {dict(folders)}", *entries])


def test_a_name_is_a_sentence_of_at_most_12_words() -> None:
    names = [
        f"{path}:{node.lineno} {node.name}" for path, tree in parsed().items() for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        and node.name.count("_") > MOST_WORDS
    ]
    assert not names, by_folder(names, 0)


def is_private_of_another(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


def test_tests_use_few_private_attributes() -> None:
    uses = [
        f"{path}:{node.lineno} {ast.unparse(node)}" for path, tree in parsed().items() for node in ast.walk(tree)
        if is_private_of_another(node) and isinstance(node, ast.Attribute)
        and ast.unparse(node) != "os._exit"  # which its documentation names for a child after a fork
    ]
    assert len(uses) <= STILL_PRIVATE, by_folder(uses, STILL_PRIVATE)


def test_objects_are_made_by_their_constructors() -> None:
    uses = [
        f"{path}:{node.lineno}" for path, tree in parsed().items() for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "__new__"
    ]
    assert not uses, by_folder(uses, 0)


def test_helpers_of_several_folders_have_names_of_their_own() -> None:
    """Those folders stand on one path: of two modules of a name, tests would get that which was put there last."""
    stems = [path.stem for path in TESTS.glob("*/*.py")]
    names = [stem for stem in stems if not stem.startswith(("test_", "conftest", "__init__"))]
    programs = {path.stem for path in (TESTS.parent / "tools").rglob("*.py")}
    assert not {name for name in names if names.count(name) > 1 or name in programs}


def test_no_helper_is_imported_from_a_conftest() -> None:
    """There are many files of that name: which of them it is depends on the folders that are tested together."""
    uses = [f"{path}:{node.lineno}" for path, tree in parsed().items() for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "conftest"]
    assert not uses, by_folder(uses, 0)


def test_tests_use_a_cache_of_their_own() -> None:
    """Files in the user's own cache, damaged or old, decide no test."""
    own = user_folder("XDG_CACHE_HOME", ".cache")
    assert own.name == "busrl-tests" and not (own / "busrl").is_symlink()
    assert not (own / "busrl" / "tokenizers").is_symlink()
