"""The page is followed to the letter by somebody with a model folder and the folder of a data set, and without code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_blocks import Reader, files_of, page, to_type

from busrl.paths import RunPaths
from busrl.system.files import read_map

NAME = "from-a-folder.md"
TOPOLOGY = files_of(NAME)["my.toml"]
# Only what makes a run of a tiny model short; a model of random weights is always wrong, so all of its groups are flat.
SHORT = [
    "learner.trigger.n_min=2", "generation.max_new_tokens=8", "validation.samples=4", "limits.idle_groups=0",
    'reward.part=[{kind="numeric"}, {kind="regex", name="digits", pattern="[0-9]", weight=0.1}]',
]


def test_the_page_keeps_its_promise_of_one_short_file() -> None:
    assert len(TOPOLOGY.splitlines()) == 25 and "one file of 25 lines" in page(NAME) and ".py" not in TOPOLOGY


def data_set(folder: Path) -> Path:
    """As GSM8K's folder is downloaded: Parquet files of two splits."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    (folder / "main").mkdir(parents=True)
    for split, begin, end in (("train", 0, 40), ("test", 40, 60)):
        rows = [{"question": f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(begin, end)]
        path = folder / "main" / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), path)
    return folder


@pytest.fixture
def reader(tmp_path: Path, chat_folder: Callable[..., Path]) -> Iterator[Reader]:
    other_names = {
        "/models/my-model": str(chat_folder("chatml")), "/data/gsm8k": str(data_set(tmp_path / "gsm8k")),
        "max_steps = 200": "max_steps = 2",
    }
    someone = Reader(tmp_path, other_names, SHORT)
    someone.write(files_of(NAME))
    yield someone
    someone.leave()


def test_the_file_of_the_page_is_one_that_check_passes(reader: Reader) -> None:
    told = reader.run("busrl check my.toml")
    assert "gsm8k: 40 of 40 rows" in told and "gsm8k: 20 of 20 rows" in told
    assert re.search(r"reward part numeric of the right answer .*#### 0\": 1\n", told)


@pytest.mark.slow
def test_every_command_of_the_page_leads_to_a_model_that_loads(reader: Reader) -> None:
    told = {command: reader.run(command) for _, commands in to_type(NAME) for command in commands}
    here, paths = reader.folder, RunPaths.of(reader.folder / "runs" / "my")
    assert read_map(paths.summary)["steps"] == 2 and not read_map(paths.summary)["audit"]["findings"]
    rounds = [json.loads(line) for line in paths.validation.read_text().splitlines()]
    assert [row["round"] for row in rounds] == [0, 2] and all(row["samples"] == 4 for row in rounds)
    assert set(rounds[0]["by"]) == {"gsm8k"} and set(rounds[0]["val/parts"]) == {"numeric", "digits"}
    assert len(list((paths.root / "data").iterdir())) == 2, "the lines of training and those of validation"
    assert sum("mean reward" in text for text in told.values()) == 2
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(here / "my-trained-model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(here / "my-trained-model")
    assert model.config.vocab_size >= len(tokenizer)
    again = reader.run("busrl launch my.toml --run-dir runs/my --set run.max_steps=3")
    assert "continues after step 2 of 3" in again and "is not what it was" not in again
