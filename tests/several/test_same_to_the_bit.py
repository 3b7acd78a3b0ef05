"""What may change nothing, to the bit of every record: a judge whose verdicts count for nothing, and one seat in
`[[model]]` instead of a plain `[model]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import ROOT, Run, running

from busrl.ledger.wal import Wal
from busrl.quickstart.cache import ensure

EPISODE = '''
async def episode(task, llm):
    """The judge, where there is one, reads the answer, and nobody listens."""
    answer = await llm.complete(task["prompt"])
    if "judge" in llm.seats:
        await llm["judge"].complete([*answer.ids, 3], max_tokens=4)
    return float(sum(answer.ids) % 3)
'''
REST = '''
[run]
seed = 3
[data]
train = "{train}"
[groups]
size = 8
[generation]
max_new_tokens = 24
[learner]
lr = 1e-3
deterministic = true
[weights]
mode = "sync"
max_staleness = 0
[agents]
episodes = 32
context = 64
[[process]]
role = "agent"
function = "{function}"
[[process]]
role = "rollout"
command = {command}
env = {{ PYTHONPATH = "{root}" }}
'''
PLAIN = '[model]\npath = "{path}"\n'
TAGGED = '[[model]]\ntag = "solver"\npath = "{path}"\n'
JUDGE = '[[model]]\ntag = "judge"\npath = "{path}"\ntrained = false\n'
SETTINGS = ("learner.trigger.n_min=4", "learner.checkpoint_every=0", "generation.max_batch=1")


def ended(folder: Path, models: str) -> Run:
    """A run to its end whose engine works on one row, so that no sum depends on who decodes beside whom."""
    folder.mkdir()
    (folder / "episode.py").write_text(EPISODE)
    files = ensure("tiny:sort")
    program = str(ROOT / "tests" / "run" / "one_stream_rollout.py")
    rest = REST.format(train=files.train, function=f"{folder}/episode.py:episode", root=ROOT,
                       command=json.dumps([sys.executable, program]))
    (folder / "run.toml").write_text(models.format(path=files.model) + rest)
    run = Run(folder / "run", *SETTINGS, config=folder / "run.toml", steps=4)
    run.settings = [setting for setting in run.settings if not setting.startswith("validation")]
    with running(run):
        assert run.wait() == 0, run.tail()
    return run


def records(run: Run) -> list[bytes]:
    return [msgspec.msgpack.encode(record) for record in Wal(run.paths.wal).records()]


def names(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [sorted(row) for row in rows]


def files(run: Run) -> set[str]:
    """Names in the run directory, but that of what a loaded machine warns of."""
    return {path.name for path in run.directory.iterdir()} - {run.paths.errors.name}


@pytest.mark.long
def test_an_idle_judge_and_a_tag_change_no_bit_of_a_record(tmp_path: Path) -> None:
    plain, tagged = ended(tmp_path / "plain", PLAIN), ended(tmp_path / "tagged", TAGGED)
    judged = ended(tmp_path / "judged", TAGGED + JUDGE)
    alone = records(plain)
    assert len(alone) == 4 and len({row["loss"] for row in plain.metrics()}) > 1, "something was trained"
    assert records(tagged) == alone, "one seat in [[model]] is a plain [model]"
    assert names(tagged.metrics()) == names(plain.metrics())
    assert files(tagged) == files(plain)
    assert records(judged) == alone, "a judge that counts for nothing"
    for name in ("loss", "grad_norm", "reward", "entropy"):
        assert len({tuple(row[name] for row in run.metrics()) for run in (plain, tagged, judged)}) == 1, name
    told = judged.summary()["models"]["judge"]
    assert not told["trained"]
