"""The pool answers every item once, whatever the user's function does to its process. Real children throughout."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from busrl.errors import RewardNotLoaded
from busrl.rewards.base import Item, Outcome, Setup
from busrl.rewards.pool import JudgeProcess, RewardPool
from busrl.topology.rewards import PYTHON, REWARD_KINDS

JUDGE = """
import os, signal, sys, time
def judge(record, completion, token_ids):
    print("noise on stdout", completion)
    os.write(1, b"noise on descriptor 1")
    word, _, rest = completion.partition(" ")
    if word == "raise": raise ValueError("no such luck")
    if word == "exit": sys.exit(1)
    if word == "read": return len(sys.stdin.read())
    if word == "nan": return float("nan")
    if word == "sleep": time.sleep(float(rest))
    if word == "touch": open(rest, "w").close()
    if word == "die": os._exit(7)
    if word == "segv": os.kill(os.getpid(), signal.SIGSEGV)
    if word == "hang":
        while True: time.sleep(60)
    if word == "once" and not os.path.exists(rest):
        open(rest, "w").close()
        os._exit(1)
    if word == "orphan":
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(rest + ".new", "w") as file: file.write(str(child.pid))
        os.rename(rest + ".new", rest)
        while True: time.sleep(60)
    if word == "half": raise ValueError("\\ud800")
    if word == "halfpart": return {"\\ud800": 1.0}
    if word == "fork": os.fork()
    if word == "write":
        for number in range(3, 12):
            try: os.write(number, b'{"key": 99}\\n' if rest else b"garbage\\n")
            except OSError: pass
    if word == "eat": return len(bytearray(1 << 31))
    if word == "print": print("x" * (64 << 20))
    if word == "last": return float(open("/proc/self/oom_score_adj").read())
    return {"n": len(token_ids), "extra": record.get("extra", 0)}
"""


@dataclass
class Settings:
    kind: str = "python"
    function: str = "judge.py:judge"
    extract: str = ""
    answer_key: str = "answer"
    timeout_s: float = 60.0
    workers: int = 1
    part: tuple = ()
    memory_mb: int = 0


MakePool = Callable[..., RewardPool]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakePool]:
    (tmp_path / "judge.py").write_text(JUDGE)
    pools = []

    def build(**settings: object) -> RewardPool:
        pools.append(RewardPool(Settings(**settings), base_dir=tmp_path))  # type: ignore[arg-type]
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def item(key: int, completion: str = "", line: bytes = b"{}", tokens: int = 3) -> Item:
    return Item(key, line, completion, list(range(tokens)))


def judge_all(pool: RewardPool, items: list[Item]) -> dict[int, Outcome]:
    """All outcomes by key; the test's own watchdog ends a pool that never answers."""
    pool.submit(items)
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(items):
        for outcome in pool.poll(10.0):
            assert outcome.key not in outcomes
            outcomes[outcome.key] = outcome
    assert len(pool) == 0 and pool.poll(10.0) == []
    return outcomes


@pytest.mark.parametrize("workers", [1, 3])
def test_every_item_comes_back_once_with_its_value(make: MakePool, workers: int) -> None:
    pool = make(workers=workers)
    items = [item(key, line=b'{"extra": 0.5}', tokens=key % 40) for key in range(2000)]
    outcomes = judge_all(pool, items)
    assert all(outcomes[k].value == k % 40 + 0.5 and outcomes[k].error == "" for k in range(2000))
    assert outcomes[9].parts == {"n": 9.0, "extra": 0.5}
    assert (pool.counts[""], len(pool), pool.restarts) == (2000, 0, 0)


def test_large_items_pass_through_pipes_that_are_full_on_both_sides(make: MakePool) -> None:
    outcomes = judge_all(make(), [item(key, "x" * 100_000, tokens=5000) for key in range(60)])
    assert [outcomes[k].value for k in range(60)] == [5000.0] * 60


@pytest.mark.parametrize("word", ["raise", "exit"])
def test_a_function_that_raises_costs_only_its_own_sample(make: MakePool, word: str) -> None:
    pool = make()
    outcomes = judge_all(pool, [item(k, word if k == 3 else "") for k in range(8)])
    assert [k for k in outcomes if outcomes[k].error] == [3]
    first_line, _, rest = outcomes[3].text.partition("\n")
    assert outcomes[3].error == "raised" and "judge.py" in first_line, "the exception stands first"
    assert "Traceback" not in first_line and "Traceback" in rest

    assert pool.restarts == 0


def test_half_a_character_of_an_error_is_sent_by_its_number(make: MakePool) -> None:
    pool = make()
    outcomes = judge_all(pool, [item(0, "half"), item(1, "halfpart"), item(2)])
    assert outcomes[0].error == "raised" and r"ValueError: \ud800" in outcomes[0].text and outcomes[1].value == 1.0
    assert outcomes[2].error == "" and pool.restarts == 0


def test_a_function_that_forks_is_answered_once(make: MakePool) -> None:
    pool = make()
    outcomes = judge_all(pool, [item(k, "fork") for k in range(20)])
    assert [outcomes[k].value for k in range(20)] == [3.0] * 20 and pool.restarts == 0


@pytest.mark.parametrize("what", ["write", "write forged"])
def test_user_code_that_writes_into_the_pipe_costs_its_own_sample(make: MakePool, what: str) -> None:
    outcomes = judge_all(make(), [item(k, what if k == 3 else "") for k in range(6)])
    assert [k for k in outcomes if outcomes[k].error] == [3]
    assert "died on this sample twice (it " in outcomes[3].text


def test_memory_is_bounded_where_asked_for_and_ends_here_first(make: MakePool) -> None:
    outcomes = judge_all(make(memory_mb=1024), [item(0), item(1, "eat"), item(2, "last")])
    assert outcomes[1].error == "raised" and outcomes[1].text.startswith("MemoryError")
    assert not outcomes[0].error and outcomes[2].value == 1000, "the kernel ends it before the learner"


def test_of_what_a_call_prints_the_beginning_is_kept(make: MakePool, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = judge_all(make(), [item(0, "print"), item(1, "spoken")])
    printed = capfd.readouterr().err
    assert not outcomes[0].error and (1 << 20) <= len(printed) < (1 << 20) + 1000
    assert "the rest of what this call prints is dropped" in printed and "noise on stdout spoken" in printed


def test_results_without_numbers_and_lines_without_json_are_malformed(make: MakePool) -> None:
    outcomes = judge_all(make(), [item(0, "nan"), item(1, line=b"{broken"), item(2)])
    assert [outcomes[k].error for k in range(3)] == ["malformed", "malformed", ""]
    assert "must be finite" in outcomes[0].text


def test_user_code_has_an_empty_stdin_and_may_print(make: MakePool) -> None:
    assert judge_all(make(), [item(0, "read")])[0].value == 0.0


@pytest.mark.parametrize("word", ["die", "segv"])
def test_a_sample_that_kills_two_processes_is_raised_and_others_are_judged(make: MakePool, word: str) -> None:
    pool = make()
    outcomes = judge_all(pool, [item(k, word if k in (0, 5) else "") for k in range(10)])
    assert sorted(k for k in outcomes if outcomes[k].error) == [0, 5]
    assert outcomes[5].error == "raised" and "twice" in outcomes[5].text
    assert pool.restarts == 4


def test_a_sample_beside_a_death_is_judged_again(make: MakePool, tmp_path: Path) -> None:
    pool = make()
    outcomes = judge_all(pool, [item(0), item(1, f"once {tmp_path}/flag"), item(2)])
    assert [outcomes[k].error for k in range(3)] == [""] * 3
    assert pool.restarts == 1


def test_a_sample_over_its_deadline_is_hung_and_the_others_are_judged(make: MakePool) -> None:
    pool = make(timeout_s=1.5, workers=2)
    outcomes = judge_all(pool, [item(k, "hang" if k in (0, 30) else "") for k in range(40)])
    assert sorted(k for k in outcomes if outcomes[k].error) == [0, 30]
    assert all(outcomes[k].error == "hung" and "1.5 s" in outcomes[k].text for k in (0, 30))


def test_a_killed_child_is_replaced_and_nothing_is_lost(make: MakePool) -> None:
    pool = make()
    assert pool.wait_ready(60)
    for round_number in range(3):
        os.kill(pool.processes[0].pid, signal.SIGKILL)
        outcomes = judge_all(pool, [item(k) for k in range(round_number, round_number + 50)])
        assert all(outcome.error == "" for outcome in outcomes.values())


def test_a_pools_descriptor_becomes_readable_and_lasts_over_restarts(make: MakePool) -> None:
    pool = make()
    fd = pool.fileno()
    judge_all(pool, [item(0, "die")])
    pool.submit([item(1)])
    outcomes: list[Outcome] = []
    while not outcomes:
        assert select.select([fd], [], [], 60)[0]
        outcomes = pool.poll(0)
    assert outcomes[0].key == 1 and pool.fileno() == fd


def test_a_function_that_cannot_be_imported_ends_the_pool_with_the_cause(make: MakePool, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import busrl_s_no_such_module\n")
    pool = make(function="bad.py:f")
    with pytest.raises(RewardNotLoaded, match=r"ModuleNotFoundError.*bad\.py:1"):
        pool.wait_ready(60)


def test_a_module_that_crashes_on_import_ends_the_pool_soon(make: MakePool, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\nos._exit(9)\n")
    pool = make(function="bad.py:f")
    with pytest.raises(RewardNotLoaded, match="exit status 9"):
        pool.wait_ready(60)


LaneAt = Callable[[float], JudgeProcess]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[LaneAt]:
    """A process with a clock of the test's own, and a ready child."""
    (tmp_path / "judge.py").write_text(JUDGE)
    poller = select.epoll()
    processes = []

    def build(now: float) -> JudgeProcess:
        maker = REWARD_KINDS[PYTHON].maker
        setup = Setup(PYTHON, "judge.py:judge", "", "", str(tmp_path), timeout_s=5.0, maker=maker)
        processes.append(JudgeProcess(setup, poller, 120.0, now))
        while not processes[-1].serving:
            assert poller.poll(60)
            assert processes[-1].collect(now, 0.0) == []
        return processes[-1]

    yield build
    for built in processes:
        built.close()
    poller.close()


def test_only_time_with_the_item_and_under_our_eyes_counts_against_it(process: LaneAt) -> None:
    judged = process(0.0)
    judged.submit([Item(1, b"{}", "hang", [])], now=1000.0)  # long idle before
    assert judged.collect(1001.0, at_most_s=60.0) == []
    assert judged.collect(2000.0, at_most_s=1.0) == []  # we were stopped for long: one second counts
    assert judged.remaining_s() == 3.0
    assert [(a.key, a.error) for a in judged.collect(2003.0, at_most_s=60.0)] == [(1, "hung")]


def test_a_child_that_somebody_stopped_is_told_as_stopped(process: LaneAt) -> None:
    judged = process(0.0)
    os.kill(judged.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, judged.pid, os.WSTOPPED | os.WNOWAIT)
    judged.submit([Item(1, b"{}", "", [])], now=0.0)
    (outcome,) = judged.collect(6.0, at_most_s=60.0)
    assert outcome.error == "hung" and "its process was stopped (SIGSTOP" in outcome.text


def test_killing_a_hung_child_takes_what_the_user_code_started(process: LaneAt, tmp_path: Path) -> None:
    hung, path = process(0.0), tmp_path / "grandchild"
    hung.submit([Item(1, b"{}", f"orphan {path}", [])], now=0.0)
    waited_for(path)
    assert [a.error for a in hung.collect(5.0, at_most_s=60.0)] == ["hung"]
    assert gone(int(path.read_text()))


def waited_for(path: Path) -> None:
    """A file that user code makes."""
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"waited 60 s for {path.name}"
        time.sleep(0.01)


def gone(pid: int, timeout_ms: int = 30_000) -> bool:
    """Whether a process that is not our child has ended, or does within the timeout."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(timeout_ms))
    finally:
        os.close(fd)


OWNER = """
import sys
import time
sys.path.insert(0, {root!r})
from types import SimpleNamespace
from busrl.rewards.base import Item
from busrl.rewards.pool import RewardPool
fields = dict(kind="python", function="judge.py:judge", extract="", answer_key="", timeout_s=600, workers=1, part=())
fields["memory_mb"] = 0
s = SimpleNamespace(**fields)
pool = RewardPool(s, base_dir={base!r})
pool.wait_ready(60)
pool.submit([Item(0, b"{{}}", "hang", [])])
print(pool.processes[0].pid, flush=True)
pool.poll(600)
"""


def test_a_hanging_child_dies_with_its_parent(make: MakePool, tmp_path: Path) -> None:
    script = OWNER.format(root=str(Path(__file__).resolve().parents[2]), base=str(tmp_path))
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    owner.kill()
    owner.wait(60)
    owner.stdout.close()
    assert gone(child)


def test_a_child_s_time_in_the_function_is_counted(make: MakePool) -> None:
    pool = make()
    judge_all(pool, [item(k) for k in range(8)])
    before, begun = pool.busy_s, time.monotonic()
    judge_all(pool, [item(9, "sleep 0.3")])
    assert 0.3 <= pool.busy_s - before <= time.monotonic() - begun + 1e-6


def test_unread_answers_and_an_idle_child_take_no_time(
    process: LaneAt, tmp_path: Path
) -> None:
    judged, count = process(0.0), 10
    for seq in range(1, count + 1):
        judged.submit([Item(seq, b"{}", f"touch {tmp_path / str(seq)}", [])], now=float(seq))
    waited_for(tmp_path / str(count))  # so all answers but that one are there, unread
    answers, until = judged.collect(1000.0, at_most_s=60.0), time.monotonic() + 60
    while len(answers) < count:
        assert time.monotonic() < until, f"{len(answers)} of {count} answers came"
        answers += judged.collect(1000.0, at_most_s=60.0)
    busy = sum(answer.seconds for answer in answers)
    assert busy > 0 and judged.busy_s == pytest.approx(busy)
    assert judged.collect(5000.0, at_most_s=60.0) == [] and judged.busy_s == pytest.approx(busy)
