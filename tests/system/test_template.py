"""A template process: its children are their owner's, and whatever happens to it is the owner's loss of time alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from busrl.system.template import Template, TemplateGone, TemplateRefused

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COMMAND = [sys.executable, "-m", "busrl.system.template"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "OPENBLAS_NUM_THREADS": "1"}
LIMIT_S = 60.0


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def template(log: int) -> Iterator[Template]:
    template = Template(COMMAND, ENVIRONMENT, log)
    yield template
    template.close()


def forked(
    template: Template, log: int, function: str, *arguments: Any, environment: dict[str, str] = ENVIRONMENT,
    descriptors: tuple[int, ...] = (), cores: tuple[int, ...] = (), limit_s: float = LIMIT_S,
) -> int:
    return template.fork(f"template_children:{function}", arguments, environment, (log, *descriptors), cores, limit_s)


def exit_code(pid: int) -> int:
    descriptor = os.pidfd_open(pid)
    try:
        assert select.select([descriptor], [], [], LIMIT_S)[0], f"pid {pid} did not end within {LIMIT_S:g} s"
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def until_answered(template: Template) -> None:
    select.select([template], [], [], LIMIT_S)
    assert template.answered()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def until_gone(*pids: int) -> None:
    end = time.monotonic() + LIMIT_S
    while not all(map(is_gone, pids)):
        assert time.monotonic() < end, f"still there: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.01)


def test_a_child_ends_with_its_code_for_its_owner(template: Template, log: int) -> None:
    assert exit_code(forked(template, log, "returns", 7)) == 7
    assert exit_code(forked(template, log, "returns", 0)) == 0
    assert exit_code(forked(template, log, "raises")) == 1
    assert exit_code(forked(template, log, "kills_itself")) == -signal.SIGKILL


def test_a_child_ends_in_order_and_takes_nothing_apart(template: Template, log: int, tmp_path: Path) -> None:
    assert exit_code(forked(template, log, "leaves_things_undone", str(tmp_path))) == 3
    assert {name: (tmp_path / name).read_text() for name in ("thread", "handler", "file")} == {
        "thread": "done", "handler": "done", "file": "done",
    }
    assert (tmp_path / "log").read_text() == "said last\n"


def test_a_child_has_what_its_request_says(template: Template, log: int, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    read, write = os.pipe()
    pid = forked(
        template, log, "describes_itself", "a", 3, descriptors=(write,), cores=(core,),
        environment={**ENVIRONMENT, "MINE": "1"},
    )
    os.close(write)
    assert exit_code(pid) == 0
    with os.fdopen(read) as answer:
        assert answer.read() == f"a 3 MINE=1 parent={os.getpid()} session={pid} cores={{{core}}}"
    assert "said by the child" in (tmp_path / "log").read_text()


def test_children_draw_other_random_numbers(template: Template, log: int) -> None:
    template.call("template_children:imports_numpy")
    until_answered(template)
    read, write = os.pipe()
    for _ in range(2):
        assert exit_code(forked(template, log, "draws", descriptors=(write,))) == 0
    os.close(write)
    with os.fdopen(read) as answer:
        drawn = answer.read().split()
    assert len(set(drawn)) == 4


def test_the_death_of_a_template_ends_no_child(template: Template, log: int) -> None:
    pid = forked(template, log, "sleeps")
    # Requests are served in turn: after another one the first child was let go.
    assert exit_code(forked(template, log, "returns", 0)) == 0
    os.kill(template.pid, signal.SIGKILL)
    with pytest.raises(TemplateRefused, match=r"has ended|takes no request"):
        forked(template, log, "returns", 0)
    assert template.ended() and not is_gone(pid)
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == -signal.SIGTERM


def test_a_stopped_template_is_killed_after_its_time(template: Template, log: int) -> None:
    assert exit_code(forked(template, log, "returns", 0)) == 0
    os.kill(template.pid, signal.SIGSTOP)
    with pytest.raises(TemplateGone, match=rf"pid {template.pid}\) did not answer within 0.2 s"):
        forked(template, log, "returns", 0, limit_s=0.2)
    assert template.ended()


def test_an_import_that_fails_is_named_and_children_go_on(template: Template, log: int) -> None:
    template.call("template_children:imports_nothing_there")
    with pytest.raises(TemplateRefused, match="No module named 'no_such_module'"):
        until_answered(template)
    assert exit_code(forked(template, log, "returns", 0)) == 0


def test_a_template_with_threads_does_not_fork(template: Template, log: int) -> None:
    template.call("template_children:starts_a_thread")
    until_answered(template)
    with pytest.raises(TemplateRefused, match="has started threads: there are 2"):
        forked(template, log, "returns", 0)


def test_a_fork_that_the_kernel_refuses_is_named(template: Template, log: int) -> None:
    template.call("template_children:forbids_processes")
    until_answered(template)
    with pytest.raises(TemplateRefused, match=r"could not fork|Resource temporarily unavailable|BlockingIOError"):
        forked(template, log, "returns", 0)


def test_all_die_with_the_owner() -> None:
    owner = subprocess.Popen(
        [sys.executable, str(HERE / "template_children.py")], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = list(map(int, owner.stdout.readline().split()))
    assert len(pids) == 2 and not any(map(is_gone, pids))
    owner.kill()
    owner.wait()
    until_gone(*pids)
    owner.stdout.close()


def test_the_orphans_of_children_are_not_their_owners(template: Template, log: int) -> None:
    read, write = os.pipe()
    pid = forked(template, log, "leaves_an_orphan", descriptors=(write,))
    os.close(write)
    assert exit_code(pid) == 0
    with os.fdopen(read) as answer:
        orphan = int(answer.read())
    assert int(Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1]) != os.getpid()
    os.kill(orphan, signal.SIGKILL)


def test_a_child_has_the_threads_of_its_request(template: Template, log: int) -> None:
    template.call("template_children:imports_numpy_and_torch")
    until_answered(template)
    for count in (1, 2):
        read, write = os.pipe()
        environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(count)}
        pid = forked(template, log, "counts_threads", environment=environment, descriptors=(write,))
        os.close(write)
        assert exit_code(pid) == 0
        with os.fdopen(read) as answer:
            assert answer.read() == f"torch {count} numpy {count}"


def test_a_template_that_answers_unasked_has_ended(template: Template, log: int) -> None:
    template.call("template_children:answers_unasked")
    until_answered(template)
    select.select([template], [], [], LIMIT_S)
    assert template.ended()


def test_a_driver_that_an_import_started_is_seen(template: Template, log: int) -> None:
    template.call("template_children:starts_a_driver")
    until_answered(template)
    with pytest.raises(TemplateRefused, match="has started the driver of cuda, which no fork survives"):
        forked(template, log, "returns", 0)
