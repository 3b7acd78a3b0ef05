"""The maker: a real Hugging Face folder and JSONL files; a short recipe by default, the real one as a slow test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from busrl.errors import MachineError
from busrl.quickstart import cache, maker, task
from busrl.quickstart.task import RECIPES, Recipe

ROOT = Path(cache.__file__).parents[2]
SHORT = replace(
    Recipe(), name="tiny:short", train_prompts=64, validation_prompts=16, check_samples=16, check_every=1, batch=8,
    skill=0.0, mask_check_every=1, pass_low=0.0, pass_high=1.0,
)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cache.Paths:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(RECIPES, SHORT.name, SHORT)
    return maker.make(SHORT.name)


def test_the_made_folder_is_an_ordinary_hugging_face_model_with_data(paths: cache.Paths) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(paths.model)
    tokenizer = AutoTokenizer.from_pretrained(paths.model)
    assert model.config.model_type == "qwen3" and {p.dtype for p in model.parameters()} == {torch.float32}
    assert (paths.model / "model.safetensors").is_file()
    assert GenerationConfig.from_pretrained(paths.model).eos_token_id == tokenizer.eos_token_id
    text = "..|0123<eos>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len("..|0123") + 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_data_files_hold_prompts_with_their_answers(paths: cache.Paths) -> None:
    for path, count in ((paths.train, 64), (paths.validation, 16)):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(records) == count
        for record in records:
            assert re.fullmatch(r"[0-9]{3,10}=", record["prompt"])
            assert record["answer"] == task.answer_of(record["prompt"])


def test_a_warm_up_missing_its_mark_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(RECIPES, SHORT.name, replace(SHORT, skill=0.9, skill_steps_max=1))
    with pytest.raises(MachineError, match=r"skill is 0\.\d+ after 1 steps, and must be at least 0\.9"):
        maker.make(SHORT.name)
    assert cache.paths(SHORT.name) is None


@pytest.mark.long
def test_a_terminated_maker_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "busrl.quickstart"]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert "making tiny:sort" in child.stderr.readline()  # the warm-up is under way
    child.send_signal(signal.SIGTERM)
    printed = child.communicate(timeout=60)[1]
    assert child.returncode == 130 and "nothing is left" in printed
    assert [entry.name for entry in (tmp_path / "busrl").iterdir()] == [f"{Recipe().folder}.lock"]


def test_ensure_makes_what_is_missing_once_and_tells_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MachineError, match=r"status 1 and said nothing.*try again.*quickstart --name tiny:sort"):
        cache.ensure("tiny:sort")
    cache.make_once(Recipe(), lambda folder: (folder / "made.json").write_text("{}") and None)
    assert cache.ensure("tiny:sort") == cache.paths("tiny:sort")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_recipe_gives_pass_rates_from_a_quarter_to_two_fifths(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "busrl.quickstart"], env=environment, check=True, timeout=600)
    facts = json.loads((tmp_path / "busrl" / Recipe().folder / "made.json").read_text())
    assert 0.25 <= facts["pass_rate"] <= 0.4
    assert abs(facts["sampled_pass_rate"] - facts["pass_rate"]) <= 0.1, "what is computed is what is sampled"
    low, _, high = facts["length_p5_p50_p95"]
    assert high >= 3 * low


@pytest.mark.parametrize("shape", [(64, 64), (192, 64), (64, 192), (3, 32, 64)])
def test_the_update_of_a_matrix_has_singular_values_mostly_near_one(shape: tuple[int, ...]) -> None:
    import torch

    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(maker.orthogonal(drawn))
    assert values.shape == torch.linalg.svdvals(drawn).shape
    assert values.max() < 1.3 and values.flatten().quantile(0.05) > 0.5
