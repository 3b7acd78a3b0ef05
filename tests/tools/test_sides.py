"""Sides of a comparison: a session of its own each, CPU seconds of all its processes, and no other way to start one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common import sides

ROOT = Path(__file__).resolve().parents[2]
FILES = {str(path.relative_to(ROOT)): path for path in (ROOT / "benchmarks").rglob("*.py")}

# -- no other way ------------------------------------------------------------------------------------------------------

STARTERS = {
    "subprocess": {"Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"},
    "os": {"fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "popen", "spawnv", "spawnve", "spawnl", "execv"},
    "pty": {"fork", "spawn"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "multiprocessing": {"Process", "Pool", "get_context"},
}
PARTNER = "the other end of one side, in that side's session"
ELSEWHERE = {
    "benchmarks/common/sides.py": "the one starter",
    "benchmarks/experiments/capacity.py": "neighbours that share the session of what they disturb",
    "benchmarks/torture.py": "hosts of one run, in network namespaces; nothing is compared",
    "benchmarks/agents_wait.py": PARTNER,
    "benchmarks/bus/raw.py": PARTNER,
    "benchmarks/bus/typed.py": PARTNER,
    "benchmarks/calls.py": PARTNER,
    "benchmarks/ring/rivals/measure.py": PARTNER,
    "benchmarks/looks.py": PARTNER,
    "benchmarks/serve.py": PARTNER,
}


def starts(source: str) -> Iterator[str]:
    """Names by which a program could start a process."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module, name = ast.unparse(node.func.value), node.func.attr
            if name in STARTERS.get(module, ()):
                yield f"{module}.{name}"
        elif isinstance(node, ast.ImportFrom) and node.module in STARTERS:
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name in STARTERS[node.module])


def test_no_benchmark_starts_a_rival_in_another_way() -> None:
    found = {name for name, path in FILES.items() if list(starts(path.read_text()))}
    assert found == set(ELSEWHERE)


def test_a_start_in_another_way_is_seen() -> None:
    assert list(starts("import subprocess\nsubprocess.run(['trl'])\n")) == ["subprocess.run"]
    assert list(starts("from subprocess import Popen\nPopen(['trl'])\n")) == ["subprocess.Popen"]
    assert not list(starts("import subprocess\nchild: subprocess.Popen[bytes]\nsubprocess.DEVNULL\n"))


FOREIGN = ("rivals/trl_grpo", "rivals/trl_step", "rivals/plain", "rivals/work", "trainers", "common/judge",
           "common/report", "common/sides", "__init__", "ring/rivals/measure")


@pytest.mark.parametrize("name", FOREIGN)
def test_what_runs_in_a_rivals_environment_needs_nothing_of_busrl(name: str) -> None:
    body = ast.parse(FILES[f"benchmarks/{name}.py"].read_text()).body
    named = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module or "" for node in body if isinstance(node, ast.ImportFrom)]
    assert not [module for module in named if module.partition(".")[0] == "busrl"]
    ours = {module for module in named if module.startswith("benchmarks.") and not module.endswith("common")}
    assert {module.removeprefix("benchmarks.").replace(".", "/") for module in ours} <= set(FOREIGN)


# -- sessions and CPU seconds ------------------------------------------------------------------------------------------

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def python(source: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", source, *arguments]


def test_each_side_has_a_session_of_its_own() -> None:
    ended = [sides.ran(python("import os; print(os.getsid(0) == os.getpid())"), timeout_s=60) for _ in range(2)]
    assert [one.output.strip() for one in ended] == ["True", "True"]
    child = sides.started(python("import sys; sys.stdin.read()"), stdin=subprocess.PIPE)
    try:
        assert os.getsid(child.pid) == child.pid != os.getsid(0)
    finally:
        child.communicate(timeout=60)


def test_cpu_seconds_hold_those_of_grandchildren_that_ended() -> None:
    grandchild = f"import subprocess, sys\nsubprocess.run([sys.executable, '-I', '-S', '-c', {BURN!r}], check=True)\n"
    ended = sides.ran(python(grandchild), timeout_s=60, check=True)
    assert ended.cpu_seconds >= 0.29 and ended.seconds > 0


def test_a_tree_counts_the_living_the_ended_and_orphans() -> None:
    orphan = f"{BURN}print(1, flush=True)\nimport sys, os\nos.read(0, 1)\n"
    source = f"""if True:
        import os, subprocess, sys
        def child(source, **how): return subprocess.Popen([sys.executable, '-I', '-S', '-c', source], **how)
        child({BURN!r}).wait()
        middle = {f'''import subprocess, sys, os
subprocess.Popen([sys.executable, "-I", "-S", "-c", {orphan!r}])
os.read(0, 1)
'''!r}
        child(middle).wait()
        print(2, flush=True)
        os.read(0, 1)
    """
    child = sides.started(python(source), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin is not None and child.stdout is not None
    try:
        tree = sides.CpuOfTree(child.pid)
        assert child.stdout.readline() == b"1\n"  # the orphan-to-be has used its share, and has a parent yet
        assert tree.now() >= 0.58
        assert len(tree.members()) == 3
        child.stdin.write(b"xx")  # one of orphan and middle ends for each byte; then all three by the end of the file
        child.stdin.close()
        wait_for_end(child)
        assert tree.now() >= 0.58
    finally:
        sides.end_session(child)


def wait_for_end(child: subprocess.Popen[bytes]) -> None:
    """Wait until it is a zombie: it has ended, and its figures are still there."""
    end = time.monotonic() + 60
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "the side did not end within 60 s"
        os.sched_yield()


def test_a_side_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    source = f"""if True:
        import os, pathlib, subprocess, sys
        child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import signal; signal.pause()'],
                                 start_new_session=True)
        pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))
        child.wait()
    """
    with pytest.raises(subprocess.TimeoutExpired):
        sides.ran(python(source), timeout_s=3)
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end, "the grandchild lives on"
        os.sched_yield()
