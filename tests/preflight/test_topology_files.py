"""The files that a topology names, looked at before anything starts."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.data.pretrained import model_facts, read_config
from busrl.errors import TopologyError, UserError
from busrl.preflight.explain import report
from busrl.preflight.load import load_for_simulation
from busrl.topology import Topology
from busrl.topology.recorded import recorded

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]


def test_broken_prompt_lines_are_named_one_by_one(here: Path, refused: Refused) -> None:
    good = '{"prompt": "a", "answer": "b"}'
    lines = [good, '{"prompt": ', "[1]", good, '{"answer": "b"}', '{"prompt": "x", "answer": {}}']
    (here / "train.jsonl").write_text("\n".join(lines) + "\n")
    problems = refused()
    assert [message.split(": ")[0] for message in problems] == [f"train.jsonl:{n}" for n in (2, 3, 5, 6)]
    assert "not JSON" in problems[0] and "must be a JSON object" in problems[1]
    assert "the key 'prompt' is missing (data.prompt_key)" in problems[2]


def test_many_broken_lines_are_counted_after_the_first_few(here: Path, refused: Refused) -> None:
    (here / "train.jsonl").write_text("nonsense\n" * 50)
    problems = refused()
    assert len(problems) == 6
    assert "train.jsonl: and 45 more broken lines" in problems[0]


def test_a_prompt_file_that_is_not_there_is_reported_at_its_key(refused: Refused) -> None:
    (problem,) = refused('[run]\nname = "x"\n', "validation.data=nowhere.jsonl", "process.validator.count=1")
    assert problem.startswith("--set validation.data: validation.data = ") and "No such file" in problem


def test_an_empty_prompt_file_is_refused(here: Path, refused: Refused) -> None:
    (here / "train.jsonl").write_text("")
    (problem,) = refused()
    assert "the file is empty" in problem


def test_an_answer_is_only_needed_by_exact_match(here: Path, loaded: Loaded, refused: Refused) -> None:
    (here / "train.jsonl").write_text('{"prompt": "a"}\n')
    (problem,) = refused()
    assert "the key 'answer'" in problem
    (here / "score.py").write_text("def score(record, completion, token_ids):\n    return 1.0\n")
    topology = loaded('[reward]\nkind = "python"\nfunction = "score.py:score"\n')
    assert topology.reward.function == f"{here}/score.py:score"


@pytest.mark.parametrize(
    ("code", "function", "cause"),
    [
        ("def score(r, c, t): return 1.0", "score.py:scores", "has no 'scores'"),
        ("import nothing_of_that_name", "score.py:score", "No module named 'nothing_of_that_name'"),
        ("", "nowhere.py:score", "there is no file"),
        ("", "no_such_package.module:score", "No module named 'no_such_package'"),
        ("import os; os._exit(3)", "score.py:score", "exit code 3"),
        ("score = 3", "score.py:score", "not a function"),
    ],
)
def test_a_reward_that_can_not_be_imported_says_why(
    here: Path, refused: Refused, code: str, function: str, cause: str
) -> None:
    (here / "score.py").write_text(code)
    (problem,) = refused(f'[reward]\nkind = "python"\nfunction = "{function}"\n')
    assert problem.startswith("t.toml:13: reward.function = ") and cause in problem


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("config.json", "no config.json in this folder"),
        ("tokenizer.json", "no tokenizer (tokenizer.json) in this folder"),
        ("model.safetensors", "no weights (*.safetensors) in this folder"),
    ],
)
def test_a_model_folder_that_is_not_whole_is_refused(here: Path, refused: Refused, gone: str, message: str) -> None:
    (here / "model" / gone).unlink()
    (problem,) = refused()
    assert problem.startswith('t.toml:2: model.path = "') and message in problem


def test_a_model_that_is_not_there_is_refused_with_its_line(refused: Refused) -> None:
    (problem,) = refused("", "model.path=Qwen/Qwen3-0.6B")
    assert problem.startswith("--set model.path") and "no such folder" in problem and "downloaded first" in problem


def test_an_unknown_tiny_task_lists_the_known_ones(refused: Refused) -> None:
    (problem,) = refused("", "model.path=tiny:adder")
    assert "tiny:sort" in problem


def test_samples_longer_than_the_model_takes_are_refused(refused: Refused) -> None:
    (problem,) = refused("[generation]\nmax_new_tokens = 500\nmax_prompt_tokens = 64\n")
    assert problem.startswith("t.toml:12: ") and "prompt and completion have 564 tokens, the model takes 512" in problem


def test_a_slot_too_small_names_its_sum_and_the_prompt(here: Path, refused: Refused) -> None:
    with open(here / "train.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "x" * 3000, "answer": "y"}) + "\n")
    problems = refused("[ring]\nslot_bytes = 1024\n")
    size = len(json.dumps({"prompt": "x" * 3000, "answer": "y"}))
    assert any(m == f"train.jsonl:41: {size} bytes: longer than its slot: ring.slot_bytes = 1024; "
               "shorten it or enlarge the slot" for m in problems)
    assert any(m.startswith("t.toml:12: ring.slot_bytes = 1024: smaller than the longest sample: ") for m in problems)
    assert len(problems) == 2


def test_the_refused_size_names_one_that_is_accepted(loaded: Loaded, refused: Refused) -> None:
    (problem,) = refused("[ring]\nslot_bytes = 300\n")
    size = problem.split("set it to ")[1].split(" ")[0]
    assert loaded(f"[ring]\nslot_bytes = {size}\n").derived.slot_bytes == loaded().derived.slot_bytes == int(size)


@settings(max_examples=25)
@given(prompt=st.integers(1, 5000), tokens=st.integers(1, 448), text=st.integers(1, 7))
def test_an_automatic_slot_holds_the_longest_sample(
    here: Path, loaded: Loaded, prompt: int, tokens: int, text: int
) -> None:
    line = json.dumps({"prompt": "x" * prompt, "answer": "y"})
    (here / "train.jsonl").write_text(line + "\n")
    derived = loaded(f"[generation]\nmax_new_tokens = {tokens}\n").derived
    sizes = [len(line), 4 * 64, 4 * tokens, 4 * tokens, 4 * tokens, text * tokens, 4]
    assert derived.slot_bytes >= sum((size + 63) // 64 * 64 for size in sizes)


def test_the_model_is_described_without_loading_it(here: Path, loaded: Loaded) -> None:
    folder = here / "model"
    facts = model_facts(folder)
    assert (facts.kind, facts.layers, facts.hidden, facts.vocabulary, facts.parameters) == ("TestLM", 2, 8, 3, 6)
    assert read_config(here) == {}
    text = report(loaded())
    assert "TestLM: 2 layers, width 8, vocabulary 3" in text and "40 prompts" in text


def test_a_topology_for_simulation_needs_no_file_and_knows_written_keys(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(
        '[model]\npath = "nowhere"\n[data]\ntrain = "none.jsonl"\n[reward]\nkind = "python"\nfunction = "no.py:f"\n'
        '[learner]\nlr = 1e-4\n[[process]]\nrole = "rollout"\nengine = "vllm"\ncount = 100\n'
    )
    topology, written = load_for_simulation(path, ["simulate.row_s=0.1"])
    assert topology.process[0].count == 100
    assert {"model.path", "simulate.row_s"} <= written and "simulate.step_s" not in written
    with pytest.raises(TopologyError) as refused:
        load_for_simulation(path, ["segments.rounds=segments", "learner.trigger.n_min=none"])
    assert len(refused.value.problems) == 3  # length is off and the mode is not sync; and what is no number


@pytest.mark.parametrize("text", ["{", "[]", "7", "[" * 100_000])
def test_a_damaged_topology_of_a_run_is_an_error_that_names_it(tmp_path, text):
    path = tmp_path / "topology.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"topology\.json: not what busrl wrote .* Restore it"):
        recorded(path)


@pytest.mark.parametrize(("name", "what"), [("model", "a folder"), ("rows.parquet", "a Parquet file")])
def test_a_data_set_as_train_leads_to_a_source(
    here: Path, refused: Refused, name: str, what: str
) -> None:
    (here / "rows.parquet").write_bytes(b"PAR1")
    (problem,) = refused("", f"data.train={here}/{name}")
    assert f"{what} is no file of lines; write [[data.source]] with path" in problem


# -- weights and tokenizers that do not fit ---------------------------------------------------------------------------


def weights(path: Path, tensors: dict[str, tuple[int, ...]]) -> bytes:
    """A safetensors file of zeros."""
    at, header = 0, {}
    for name, shape in tensors.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return path.read_bytes()


@pytest.mark.parametrize("left", [-1, 60, 5, 0])
def test_weights_that_were_cut_are_refused_with_both_sizes(here: Path, refused: Refused, left: int) -> None:
    path = here / "model" / "model.safetensors"
    data = weights(path, {"model.embed_tokens.weight": (3, 8)})
    path.write_bytes(data[:left])
    (problem,) = refused()
    assert problem.startswith("model/model.safetensors: ") and "copy the file again" in problem
    message = f"it has {len(data) - 1} bytes, and its header says {len(data)}" if left == -1 else "not a whole"
    assert message in problem


def test_a_part_that_was_not_copied_is_named(here: Path, refused: Refused) -> None:
    names = {"a": "model.safetensors", "b": "model-00002-of-00003.safetensors", "c": "model-00003-of-00003.safetensors"}
    (here / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (problem,) = refused()
    assert "index.json: it names model-00002-of-00003.safetensors and 1 more, which is not there" in problem


@pytest.mark.parametrize("shape", [(5, 8), (3, 16)])
def test_the_weights_of_another_model_are_refused_with_both_shapes(
    here: Path, refused: Refused, shape: tuple[int, int]
) -> None:
    weights(here / "model" / "model.safetensors", {"model.embed_tokens.weight": shape})
    (problem,) = refused()
    there = f"(model.embed_tokens.weight) {shape[0]} x {shape[1]}"
    assert f"vocabulary and width are 3 x 8, and those of the weights {there}" in problem


def test_only_a_tokenizer_with_more_ids_than_the_model_is_refused(
    here: Path, loaded: Loaded, refused: Refused
) -> None:
    place = here / "model" / "tokenizer.json"
    place.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 9, "content": "<p>"}]}))
    loaded()
    place.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 7}}}))
    (problem,) = refused()
    assert "tokenizer.json has ids up to 7, and by config.json the model has 3 (vocab_size)" in problem
    assert "save the tokenizer of this model there" in problem


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"vocab": {"a": 0'])
def test_a_tokenizer_that_was_cut_is_refused(here: Path, refused: Refused, text: str) -> None:
    (here / "model" / "tokenizer.json").write_text(text)
    (problem,) = refused()
    assert "tokenizer.json is no JSON object with a model: it was cut, or is another file" in problem


def test_an_added_token_that_prompts_hold_needs_a_row_in_the_model(
    here: Path, loaded: Loaded, refused: Refused, chat_folder: Callable[..., Path]
) -> None:
    folder = here / "chat"
    shutil.copytree(chat_folder("chatml"), folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"].append({**data["added_tokens"][-1], "id": 5000, "content": "<tool>"})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    base = '[model]\npath = "chat"\n[data]\ntrain = "train.jsonl"\n'
    loaded(base=base)
    (here / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "<tool>1", "answer": "2"}\n')
    (problem,) = refused(base=base)
    assert re.search(r"train.jsonl have token ids up to \d+, and the model has \d+ \(vocab_size\)", problem), problem
