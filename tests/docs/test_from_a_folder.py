"""The page is followed to the letter by somebody with a model folder and the folder of a data set, and without code."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.paths import SHM, RunPaths
from busrl.system.files import read_map

PAGE = (Path(__file__).parents[2] / "docs" / "from-a-folder.md").read_text()
[TOPOLOGY] = re.findall(r"`my.toml`:\n```toml\n(.*?)```", PAGE, re.S)
[COMMANDS] = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
# Only what makes a run of a tiny model short; a model of random weights is always wrong, so all of its groups are flat.
SHORT = [
    "learner.trigger.n_min=2", "generation.max_new_tokens=8", "validation.samples=4", "limits.idle_groups=0",
    'reward.part=[{kind="numeric"}, {kind="regex", name="digits", pattern="[0-9]", weight=0.1}]',
]
LIMIT_S = 200.0


def test_the_page_keeps_its_promise_of_one_short_file() -> None:
    assert len(TOPOLOGY.splitlines()) == 25 and "one file of 25 lines" in PAGE and ".py" not in TOPOLOGY


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


def run(line: str, here: Path) -> str:
    words = shlex.split(line)
    assert words[0] == "busrl"
    more = [part for key in SHORT for part in ("--set", key)] if words[1] in ("check", "launch") else []
    command = [sys.executable, "-m", "busrl.cli", *words[1:], *more]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_file_of_the_page_is_one_that_check_passes(tmp_path: Path, chat_folder: Callable[..., Path]) -> None:
    page = run(COMMANDS.splitlines()[0], prepared(tmp_path, chat_folder))
    assert "gsm8k: 40 of 40 rows" in page and "gsm8k: 20 of 20 rows" in page
    assert re.search(r"reward part numeric of the right answer .*#### 0\": 1\n", page)


def prepared(here: Path, chat_folder: Callable[..., Path]) -> Path:
    folder = data_set(here / "gsm8k")
    text = TOPOLOGY.replace("/models/my-model", str(chat_folder("chatml"))).replace("/data/gsm8k", str(folder))
    (here / "my.toml").write_text(text.replace("max_steps = 200", "max_steps = 2"))
    return here


@pytest.mark.slow
def test_every_command_of_the_page_leads_to_a_model_that_loads(
    tmp_path: Path, chat_folder: Callable[..., Path]
) -> None:
    here = prepared(tmp_path, chat_folder)
    paths = RunPaths.of(here / "runs" / "my")
    try:
        told = {line: run(line, here) for line in COMMANDS.splitlines()}
    finally:
        (SHM / paths.ring_name).unlink(missing_ok=True)
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
    again = run(f"{COMMANDS.splitlines()[1]} --set run.max_steps=3", here)
    assert "continues after step 2 of 3" in again and "is not what it was" not in again
