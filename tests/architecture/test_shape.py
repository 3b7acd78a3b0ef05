"""The shape of the code: modules and functions that can be read, no circles inside a package, classes of one concern,
docstrings that begin with a verb or a noun, objects that their constructors make whole.

`STILL_...` are what is over the bar; each only shrinks, and a failure prints what it counts.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator

from syntax import MODULES, ROOT, classes, docstrings, imports, lines_of, name_of, parsed, part_of

MOST_LINES, MOST_OF_FUNCTION, MOST_METHODS = 800, 60, 25

# -- modules and functions ---------------------------------------------------------------------------------------------

SMALL = 120
# A module of less than SMALL lines whose only user lies in the same package -> why it is a module of its own.
REASONS: dict[str, str] = {
    "busrl.algorithms.distill": "formulas on a teacher's tokens: a documented module, for losses of the user's too",
    "busrl.topology.foreign_names": "names that other trainers give to keys: a table, apart from how a file is read",
    "busrl.several.draws": "what a scheduler opens next, as functions of numbers that are tested without a ring",
    "busrl.several.rules": "what several models cannot be, apart from how they are read, as with the core's rules",
    "busrl.teachers.of_groups": "the side of posted groups that needs torch: the role that writes them has none",
    "busrl.preflight.colocation": "what processes on one device need together: sums that are tested without one",
    "busrl.service.tenants": "adapters, one of the two kinds of models that a tuner may have, beside `whole`",
    "busrl.preflight.tuner_memory": "the sums of another process than the learner, whose they would be taken for",
    "busrl.engines.vllm.routes": "joins routes to answers, apart from how vLLM is driven, and tested without it",
    "busrl.rewards.model": "the one file of rewards that imports torch, in a child that has a model",
}


def test_a_module_can_be_read_in_one_sitting() -> None:
    assert not {module: lines_of(path) for module, path in MODULES.items() if lines_of(path) > MOST_LINES}


def test_functions_are_short() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    sizes = {
        f"{module}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module, path in MODULES.items() for node in ast.walk(parsed(path)) if isinstance(node, functions)
    }
    assert not {name: lines for name, lines in sizes.items() if lines > MOST_OF_FUNCTION}


def test_a_small_module_with_one_user_in_its_package_has_a_reason() -> None:
    users: dict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        for use in imports(path):
            users[use.name].add(module)
    small = set()
    for module, path in MODULES.items():
        package = module.rpartition(".")[0]
        elsewhere = users[module] - {module}
        inside = {user for user in elsewhere if user == package or user.rpartition(".")[0] == package}
        if not path.name.startswith("__") and lines_of(path) < SMALL and len(elsewhere) == len(inside) == 1:
            small.add(module)
    assert small <= set(REASONS), f"these have one user: {sorted(small - set(REASONS))}"


def members_used(package: str) -> dict[str, set[str]]:
    """Every module or package in a package, and the others of it that it imports when it runs."""
    within = f"{package}."
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        member = module.removeprefix(within).split(".")[0]
        if module.startswith(within) and not member.startswith("__"):
            used = {use.name for use in imports(path) if use.name.startswith(within) and not use.typing}
            arrows[member] |= {name.removeprefix(within).split(".")[0] for name in used} - {member}
    return {member: used & set(arrows) for member, used in arrows.items()}


def test_modules_of_a_package_do_not_import_each_other_in_a_circle() -> None:
    for path in ROOT.rglob("__init__.py"):
        if path.parent == ROOT:
            continue  # test_import_arrows has those
        arrows = members_used(name_of(path))
        while arrows:
            free = [member for member, used in arrows.items() if not used & set(arrows)]
            assert free, f"these of {name_of(path)} import each other: {sorted(arrows)}"
            arrows = {member: used for member, used in arrows.items() if member not in free}


# -- classes -----------------------------------------------------------------------------------------------------------

# Classes of more methods: at most two in the end, each with its reason in its docstring.
STILL_LARGE: dict[str, int] = {}


def test_a_class_has_one_concern() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    counts = (
        (module, node.name, sum(isinstance(child, functions) for child in node.body)) for module, node in classes()
    )
    beyond = [(module, name, count) for module, name, count in counts if count > STILL_LARGE.get(name, MOST_METHODS)]
    assert not beyond, f"more than {MOST_METHODS} methods: {beyond}"


# -- docstrings --------------------------------------------------------------------------------------------------------

HEADLESS = {
    "As", "How", "It", "Its", "Of", "One", "That", "These", "Those", "What", "When", "Where", "Whether", "Which", "Who",
    "Whose", "Why",
}


def headless(text: str) -> bool:
    first = text.split(maxsplit=2)
    return bool(first) and (first[0].strip(",.:;") in HEADLESS or first[:2] == ["The", "same"])


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    headless_ones = [
        (module, docstring.lineno, " ".join(docstring.value.split()[:4]))
        for module, path in MODULES.items() for docstring in docstrings(parsed(path)) if headless(docstring.value)
    ]
    counts = Counter(part_of(module) for module, _, _ in headless_ones)
    shown = [f"{module}:{line} {words}" for module, line, words in headless_ones]
    assert not headless_ones, "\n".join([str(counts), *shown])


# -- objects are whole -------------------------------------------------------------------------------------------------

# Attributes that objects of other libraries take: of torch, transformers, the standard library and vLLM.
THEIRS = {
    "RequestHandlerClass", "__init__", "_bookkeeping_sync", "_devices", "_find_and_load", "_model_forward",
    "_sample", "_supports_onednn", "_value_", "bgmv_expand", "bgmv_shrink", "build_async_httpx", "busrl_forward",
    "check_cpu_sgl_kernel", "compute_logits", "decoder", "generation_config", "generators", "grad",
    "inference_mode", "inheritable", "num_embeddings", "num_hidden_layers", "out_features", "pad_token_id",
    "padding_idx", "pre_tokenizer", "register_parameter", "remove_request", "returncode", "shutdown_request", "stdin",
    "target_modules", "verify_request", "writeable",
}
STILL_SET_FROM_OUTSIDE = 6  # assignments to an attribute of an object's part: `self.part.name = ...`


def assigned(tree: ast.AST) -> Iterator[ast.expr]:
    """Targets of all assignments, those in tuples one by one."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [*node.targets]
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        while targets:
            target = targets.pop()
            targets = [*targets, *target.elts] if isinstance(target, ast.Tuple | ast.List) else targets
            yield target


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_attribute_is_first_set_from_outside() -> None:
    declared = {
        target.id if isinstance(target, ast.Name) else target.attr
        for _, node in classes() for target in assigned(node)
        if isinstance(target, ast.Name) or (isinstance(target, ast.Attribute) and is_self(target.value))
    }
    assignments = [
        f"{module}:{target.lineno} {ast.unparse(target)}"
        for module, path in MODULES.items() for target in assigned(parsed(path))
        if isinstance(target, ast.Attribute) and not is_self(target.value) and target.attr not in declared | THEIRS
    ]
    assert not assignments, "\n".join(assignments)


def test_parts_are_given_what_they_need_by_their_constructors() -> None:
    assignments = [
        (module, target.lineno, ast.unparse(target))
        for module, path in MODULES.items() for target in assigned(parsed(path))
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute) and target.attr not in THEIRS
    ]
    shown = [f"{module}:{line} {target} = " for module, line, target in assignments]
    counts = f"{len(assignments)} > {STILL_SET_FROM_OUTSIDE}"
    assert len(assignments) <= STILL_SET_FROM_OUTSIDE, "\n".join([counts, *shown])
