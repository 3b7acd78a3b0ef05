"""A start where something lies already: the same run or not, what differs, and whether anything is left to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from busrl.errors import DiskFull, RunFinished, UserError
from busrl.launcher.identity import Start, compare, digests
from busrl.launcher.rundir import open_run
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.system.files import LineFile
from busrl.topology import Topology

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


class Place:
    """Prompts, a reward file, and a run directory that a start may have been in."""

    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, RunPaths.of(root / "run")
        self.paths.root.mkdir()
        self.prompts("train.jsonl", "1+1=")
        self.prompts("held-out.jsonl", "2+2=")
        (root / "judge.py").write_text("def score(record, completion, token_ids): return 1.0\n")

    def prompts(self, name: str, prompt: str) -> None:
        (self.root / name).write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")

    def topology(self, *settings: str) -> Topology:
        common = [f"data.train={self.root}/train.jsonl", f"validation.data={self.root}/held-out.jsonl"]
        common += ["reward.kind=python", f"reward.function={self.root}/judge.py:score", "run.max_steps=60"]
        return load(QUICKSTART, [*common, *settings])

    def start(self, *settings: str, resume: bool = True) -> Start:
        """What a start does with the files before anything runs."""
        topology, before = self.topology(*settings), {}
        if self.paths.topology.exists():
            before = json.loads(self.paths.topology.read_text())
        start = compare(self.paths, topology, before, resume)
        self.paths.topology.write_text(topology.to_json())
        self.paths.run_json.write_text("{}")
        start.record(self.paths)
        return start

    def stepped(self, steps: int) -> None:
        rows = [{"step": step, "reward": step / 100} for step in range(1, steps + 1)]
        self.paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_changes_since_the_last_start_are_reported_by_key_and_kept(place: Place) -> None:
    assert place.start().notes == []
    place.stepped(30)
    start = place.start("learner.lr=0.5", "limits.progress_s=99", "process.rollout.threads=2")
    notes = "\n".join(start.notes)
    assert "changed since the last start:" in notes and "learner.lr 0.0" in notes and "→ 0.5" in notes
    assert "limits.progress_s" in notes and ".threads 1 → 2" in notes
    assert "continues after step 30 of 60, reward 0.010 → 0.255" in notes
    rows = [json.loads(line) for line in place.paths.starts.read_text().splitlines()]
    assert rows[0]["changes"] == {} and rows[1]["changes"]["learner.lr"]["now"] == 0.5 and rows[1]["step"] == 30
    assert not any("changed" in note for note in place.start("learner.lr=0.5", "limits.progress_s=99",
                                                             "process.rollout.threads=2").notes)


def test_a_change_is_kept_before_the_topology_that_has_it_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that is killed in between leaves no topology of which nobody knows since when it holds."""
    place.start()
    place.paths.run_json.unlink()
    monkeypatch.setattr("busrl.launcher.rundir.write_files", lambda *_: pytest.fail("killed here"))
    with pytest.raises(pytest.fail.Exception):
        open_run(place.paths.root, place.topology("weights.max_staleness=1"))
    assert json.loads(place.paths.topology.read_text())["weights"]["max_staleness"] == 2
    last = json.loads(place.paths.starts.read_text().splitlines()[-1])
    assert last["changes"]["weights.max_staleness"] == {"was": 2, "now": 1}


def test_a_start_that_changes_something_is_refused_where_that_cannot_be_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.start()
    monkeypatch.setattr("busrl.launcher.identity.LineFile.append", _full)
    place.start()  # nothing changed: a line less
    with pytest.raises(DiskFull, match="starts"):
        place.start("learner.lr=0.5")


def _full(file: LineFile, line: bytes) -> None:
    raise DiskFull(f"{file.path}: no room")


def test_an_edited_prompt_file_is_refused_at_start_and_a_moved_accepted(place: Place) -> None:
    place.start()
    (place.root / "train.jsonl").rename(place.root / "moved.jsonl")
    assert any("moved.jsonl" in note for note in place.start(f"data.train={place.root}/moved.jsonl").notes)
    place.prompts("moved.jsonl", "1+2=")
    with pytest.raises(UserError, match=r"moved.jsonl: its content is not what it was.*back.*learner\.start_from"):
        place.start(f"data.train={place.root}/moved.jsonl")
    place.prompts("other.jsonl", "1+2=")
    with pytest.raises(UserError, match=r"holds a run with data\.train"):
        place.start(f"data.train={place.root}/other.jsonl")


def test_edited_validation_prompts_and_an_edited_reward_are_said(place: Place) -> None:
    place.start()
    place.prompts("held-out.jsonl", "3+3=")
    (place.root / "judge.py").write_text("def score(record, completion, token_ids): return 2.0\n")
    notes = "\n".join(place.start().notes)
    assert "held-out.jsonl is not what it was: validation" in notes and "judge.py is not what it was: rewards" in notes
    assert place.start().notes == []


def test_an_edited_loss_metric_and_optimiser_are_said_too(place: Place) -> None:
    (place.root / "own.py").write_text("def loss(inputs, settings): return inputs.trainer_logprobs\n")
    (place.root / "counts.py").write_text("def metric(samples, row): return {}\n")
    (place.root / "steps.py").write_text("from torch.optim import SGD as Steps\n")
    settings = (f"learner.loss={place.root}/own.py:loss", f'learner.metrics=["{place.root}/counts.py:metric"]',
             f"learner.optimizer={place.root}/steps.py:Steps")
    place.start(*settings)
    for name in ("own.py", "counts.py", "steps.py"):
        (place.root / name).write_text("# another one\n" + (place.root / name).read_text())
    notes = "\n".join(place.start(*settings).notes)
    assert "own.py is not what it was: losses" in notes and "counts.py is not what it was: metrics" in notes
    assert "steps.py is not what it was: updates" in notes


def test_another_reward_model_in_the_same_folder_is_reported(place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["TestForSequenceClassification"]}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(3 << 20))
    part = f'reward.part=[{{kind="model", path="{folder}"}}]'
    settings = ("reward.kind=exact_match", "reward.function=", "reward.extract=", part)
    place.start(*settings)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights)
    assert place.start(*settings).notes == []
    (folder / "model.safetensors").write_bytes(weights[:-1] + b"1")
    changed = f"{folder} is not what it was: rewards from here on are those of the new model"
    assert changed in place.start(*settings).notes


def test_another_model_in_the_run_folder_is_refused_with_both_sizes(place: Place, tmp_path: Path) -> None:
    def model(folder: Path, width: int) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {"hidden_size": width, "num_hidden_layers": 2, "vocab_size": 93}
        (folder / "config.json").write_text(json.dumps({"architectures": ["TestLM"], **sizes}))
        (folder / "tokenizer.json").write_text('{"model": {}}')
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        return folder

    settings = (f"model.path={model(tmp_path / 'model', 32)}",)
    place.start(*settings)
    place.stepped(2)
    model(place.paths.checkpoints / "global_step_2" / "model", 32)
    place.start(*settings)
    model(tmp_path / "model", 64)
    pattern = "has 2 layers, 64 channels, 93 token ids, and the checkpoints in .* are of 2 layers, 32 channels"
    with pytest.raises(UserError, match=pattern):
        place.start(*settings)


def test_files_that_are_no_longer_named_were_not_edited(place: Place) -> None:
    place.start()
    start = place.start("validation.data=", "validation.every=0", "reward.kind=exact_match", "reward.function=")
    assert "reward.kind" in start.notes[0]
    assert not any("is not what it was" in note for note in start.notes)


def test_an_unreadable_prompt_file_stays_known_at_the_next_start(place: Place) -> None:
    place.start()
    topology = place.topology()
    Start().record(place.paths)
    place.prompts("train.jsonl", "5+5=")
    with pytest.raises(UserError, match="its content is not what it was"):
        compare(place.paths, topology, json.loads(place.paths.topology.read_text()), True)


def test_a_run_directory_of_before_there_were_digests_goes_on(place: Place) -> None:
    place.start()
    place.paths.starts.unlink()
    place.prompts("train.jsonl", "1+2=")
    assert place.start().notes == []


@pytest.mark.parametrize("key", ["run.seed=7", "groups.size=3", "data.shuffle=false", 'model.seats=["only"]'])
def test_a_key_that_says_what_a_sample_is_can_not_change(place: Place, key: str) -> None:
    place.start()
    with pytest.raises(UserError, match="it cannot change: choose another run directory"):
        place.start(key)


def test_a_goal_behind_the_progress_is_refused_and_a_reached_one_reported(place: Place) -> None:
    place.start()
    place.stepped(60)
    assert any("continues after step 60 of 60" in note for note in place.start().notes), "its end may be missing"
    place.paths.summary.write_text(json.dumps({"outcome": "finished"}))
    with pytest.raises(RunFinished, match=r"60 of 60 steps are done; to go on set run\.max_steps above 60") as finished:
        place.start()
    assert finished.value.exit_code == 0
    with pytest.raises(UserError, match=r"run\.max_steps = 40: the run in .* has done 60 steps; to go on") as refused:
        place.start("run.max_steps=40")
    assert refused.value.exit_code == 2
    assert place.start("run.max_steps=61").step == 60


def test_a_finished_start_says_nothing_of_the_killed_one_after_it(place: Place) -> None:
    place.start()
    place.stepped(60)
    place.paths.summary.write_text(json.dumps({"outcome": "finished", "ended": 5.0}))
    place.paths.run_json.write_text(json.dumps({"started": 9.0}))
    assert any("continues after step 60 of 60" in note for note in place.start().notes)


def test_a_run_that_is_not_to_be_resumed_is_refused(place: Place) -> None:
    assert place.start(resume=False).notes == []
    with pytest.raises(UserError, match="holds a run already"):
        place.start(resume=False)


@pytest.mark.parametrize("name", ["metrics.jsonl", "fates.bin", "checkpoints/global_step_7/x"])
def test_a_directory_with_half_a_run_is_refused(place: Place, name: str) -> None:
    (place.paths.root / name).parent.mkdir(parents=True, exist_ok=True)
    (place.paths.root / name).write_text("x")
    with pytest.raises(UserError, match=rf"it holds {name.split('/')[0]}, but neither topology.json nor run.json"):
        place.start()


def test_other_files_in_a_new_run_directory_are_named_and_left_alone(place: Place) -> None:
    for name in ("my.toml", "notes.txt", "run.lock", ".hidden", *(f"{n}.bin" for n in range(9))):
        (place.paths.root / name).touch()
    for name in ("logs", "checkpoints"):
        (place.paths.root / name).mkdir()
    (note,) = place.start().notes
    assert "0.bin, 1.bin, 2.bin, 3.bin, 4.bin and 6 more" in note and "left alone" in note
    assert place.start().notes == []


def test_a_digest_is_of_what_can_be_read(place: Place) -> None:
    by_key: dict[str, Any] = digests(place.topology())
    assert set(by_key) == {"data.train", "validation.data", "reward.function"} and len(set(by_key.values())) == 3
    topology = place.topology("validation.data=")
    (place.root / "judge.py").unlink()
    assert set(digests(topology)) == {"data.train"}
