"""Files of the ledger that somebody else damages: the run ends by name or mends them, and a later start finishes it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, running

from busrl.ledger.trained import TrainedSet, newest_checkpoint

pytestmark = pytest.mark.slow
END_S = 60.0  # to notice takes a second or two; to stop all processes in order takes the rest


def test_fates_cut_under_a_living_run_end_it_and_the_next_finishes(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=24)
    with running(run):
        run.until_step(13)  # past a checkpoint, with records after it
        os.truncate(run.paths.fates, 0)
        assert run.wait(END_S) == 1, run.tail()
        summary, before = run.summary(), run.step()
        assert summary["outcome"] == "failed" and 13 <= summary["steps"] < 24, summary
        assert re.search(r"fates\.bin was (made shorter|changed) by another program", summary["why"]), summary["why"]
        lost = {finding["kind"] for finding in summary["audit"]["findings"]}
        assert "logged_not_trained" in lost, summary["audit"]
        assert run.leftovers() == []
        run.start()
        code = run.wait()
    check_end(run, code)
    trained = [uid for line in read_standing(run) for uid, _, _ in line["samples"]]
    assert len(trained) == len(set(trained)) and run.step() == 24 > before


def read_standing(run: Run) -> list[dict]:
    """The lines of the train log that stand: of each step the last one."""
    lines = [json.loads(line) for line in run.paths.train_log.read_bytes().splitlines()]
    return list({line["step"]: line for line in lines}.values())


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def with_garbage(data: bytes) -> bytes:
    return data + bytes(range(200))


@pytest.mark.parametrize("damage", [cut, with_garbage, None])
def test_the_next_start_remakes_a_damaged_trained_set_from_the_train_log(
    damage: Callable[[bytes], bytes] | None, tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=16)
    with running(run):
        run.until_step(13)
        run.kill_launch()
        folder = newest_checkpoint(run.paths)
        assert folder is not None
        path, whole = folder / "trained.bin", (folder / "trained.bin").read_bytes()
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(whole))
        run.start()
        run.until("the start to mend it", lambda: "it was written again" in run.text())
        assert path.read_bytes() == whole
        code = run.wait()
    assert "resumed at step 1" in run.paths.log("learner").read_text()
    assert "torn checkpoint" not in run.paths.log("learner").read_text()
    check_end(run, code)


def test_a_trained_set_is_remade_from_an_earlier_checkpoint_and_the_log(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=30)
    with running(run):
        run.until_step(23)
        run.kill_launch()
        folder = newest_checkpoint(run.paths)
        assert folder is not None
        (folder / "trained.bin").write_bytes(b"BUSRLTRD")
        lines = run.paths.train_log.read_bytes().splitlines(keepends=True)
        run.paths.train_log.write_bytes(b"".join(lines[:13] + lines[14:]))  # a step after the checkpoint before
        run.start()
        code = run.wait()
    assert "from the checkpoint before and the log" in run.text(), run.tail()
    assert code == 1 and {error.kind for error in run.audit().errors} == {"train_log_disagrees"}, run.tail()
    assert len(TrainedSet.load(run.paths.checkpoints / "global_step_30" / "trained.bin")) == run.audit().counts.trained


def test_a_changed_byte_in_a_checkpoint_costs_nothing_and_is_reported(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=30)
    with running(run):
        run.until_step(23)
        run.kill_launch()
        weights = next((run.paths.checkpoints / "global_step_20" / "model").glob("*.safetensors"))
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
        run.start()
        code = run.wait()
    check_end(run, code)
    assert "global_step_20 is damaged" in run.text() and "global_step_20 is damaged" in run.paths.errors.read_text()
    assert "resumed at step 2" in run.paths.log("learner").read_text()
    assert (run.paths.checkpoints / "torn-global_step_20").is_dir()


def test_a_topology_vanishing_under_a_run_is_rewritten_and_the_summary_appears(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=16)
    with running(run):
        run.until_step(3)
        before = run.paths.topology.read_bytes()
        run.paths.topology.unlink()
        run.kill("rollout/0")
        run.until("a child to need it", lambda: run.paths.topology.is_file())
        assert run.paths.topology.read_bytes() == before
        run.until_step(14)
        run.paths.topology.write_text("{}")
        code = run.wait()
    check_end(run, code)
    assert run.text().count("topology.json was removed or changed by another program; it is written again") == 2


SMALL = [
    "process.rollout.count=1", "learner.trigger.n_min=4", "learner.checkpoint_every=5", "scheduler.policy=sjf",
    "generation.max_new_tokens=128", "mock.token_s=0.0002", "mock.per_sequence_s=0.00001", "log.samples=2",
]
DONE, GOAL = 11, 13
FOR_PEOPLE = re.compile(r"[a-z]+\.jsonl|supervisor.json|predictor.npz|topology.toml|pace/.*|logs/.*")
AT_ONCE = 3  # starts wait for each other's processes more than they compute


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x15]) + data[middle + 1 :] if data else b"\1"


def emptied(data: bytes) -> bytes:
    return b""


def replaced(data: bytes) -> bytes:
    return bytes(range(200)) + b"\n}{ no JSON"


DAMAGES = (cut, emptied, replaced, flipped)


def small(directory: Path, steps: int, *more: str) -> Run:
    return Run(directory, *SMALL, *more, config=ROOT / "configs" / "scripted.toml", steps=steps)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, quickstart: None) -> Path:
    """The directory of a run that was killed with all its processes after a step that is in no checkpoint."""
    run = small(tmp_path_factory.mktemp("killed") / "run", 1000)
    with running(run):
        run.until_step(DONE)
        run.kill_launch()
    return run.directory


def damages_of(directory: Path) -> list[tuple[str, list[str], Callable[[bytes], bytes]]]:
    """Each file in turn. Those for people at once: no start depends on them. Of a checkpoint, whose files are checked
    by their digests, each file with one damage."""
    names = [str(path.relative_to(directory)) for path in sorted(directory.rglob("*")) if path.is_file()]
    names = [name for name in names if not name.endswith(".lock")]
    people = [name for name in names if FOR_PEOPLE.fullmatch(name) and name != "train.jsonl"]
    cases = [("all files for people", people, damage) for damage in DAMAGES]
    for at, name in enumerate(name for name in names if name not in people):
        chosen = [DAMAGES[at % len(DAMAGES)]] if name.startswith("checkpoints/") else DAMAGES
        cases += [(name, [name], damage) for damage in chosen]
    return cases


def newest_log(directory: Path) -> str:
    """The steps in it are in no checkpoint, so damage to it can cost their training; damage at its end looks like that
    of a writer that was killed."""
    return f"wal/{max(path.name for path in (directory / 'wal').iterdir())}"


def check_told(run: Run, kinds: set[str]) -> None:
    """The goal was reached, the audit found these kinds of errors alone, and no sample is lost or doubled."""
    report = run.audit()
    assert {error.kind for error in report.errors} == kinds and report.counts.step == GOAL, run.tail()
    assert report.counts.lost == 0 and report.counts.trained_twice == 0 and run.leftovers() == [], report


def start_with(killed: Path, copy: Path, names: list[str], damage: Callable[[bytes], bytes]) -> str:
    """What went wrong with a start beside damaged files; "" if it reached the goal or refused with a way out."""
    shutil.copytree(killed, copy)
    for name in names:
        (copy / name).write_bytes(damage((copy / name).read_bytes()))
    run = small(copy, GOAL)
    with running(run):
        try:
            code, text = run.wait(), run.text()
            if code and "the audit found errors" not in text:
                [name] = names
                assert "Traceback" not in text and name in text.strip().splitlines()[-1], f"exit code {code}\n{text}"
                if "remove it" in text:
                    (copy / name).unlink()
                else:
                    assert "Restore it" in text, text
                    shutil.copy(killed / name, copy / name)
                run.start()
                code = run.wait()
            if names == [newest_log(killed)] and code == 1:
                check_told(run, {"trained_unlogged"})
            elif names == ["train.jsonl"] and code == 0:  # steps before the older checkpoint stand nowhere else
                check_told(run, set())
            else:
                check_end(run, code)
        except AssertionError as problem:
            return str(problem)
    return ""


def test_log_damage_ends_a_start_at_once_where_a_ring_remains(tmp_path: Path, quickstart: None) -> None:
    run = small(tmp_path / "run", 1000, "learner.checkpoint_every=1000")
    with running(run):
        run.until_step(6)
        run.kill_launch()
        assert run.paths.ring_file.exists()
        path = run.directory / newest_log(run.directory)
        path.write_bytes(flipped(path.read_bytes()))
        run.start()
        assert run.wait(END_S) == 1, run.tail()
        assert path.name in run.summary()["why"] and run.restarts("learner") == 0, run.tail()


@pytest.mark.timeout(1800)  # some fifty starts
def test_a_start_beside_any_damaged_file_continues_or_names_it_without_loss(killed: Path, tmp_path: Path) -> None:
    def tried(at: int, what: str, names: list[str], damage: Callable[[bytes], bytes]) -> str:
        problem = start_with(killed, tmp_path / str(at), names, damage)
        return problem and f"=== {what}, {damage.__name__}: {problem}"

    with ThreadPoolExecutor(AT_ONCE) as threads:
        jobs = [threads.submit(tried, at, *damage) for at, damage in enumerate(damages_of(killed))]
        problems = [problem for job in jobs if (problem := job.result())]
    assert not problems, "\n".join(problems)
