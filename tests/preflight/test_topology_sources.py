"""[[data.source]] in a topology: what is made of it, and what is refused before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.preflight.explain import report
from busrl.preflight.load import load
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
MODEL = '[model]\npath = "model"\n'


def sources(*tables: str) -> str:
    return MODEL + "".join(f"[[data.source]]\n{table}\n" for table in tables)


@pytest.fixture
def two(here: Path) -> Path:
    """`easy.jsonl` with 30 prompts and `hard.jsonl` with 10."""
    for name, count in (("easy", 30), ("hard", 10)):
        rows = [{"prompt": f"{name} {n}", "answer": str(n), "rate": n / 10} for n in range(count)]
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return here


def test_several_sources_become_one_file_with_a_share_of_the_draws_each(two: Path, loaded: Loaded) -> None:
    text = sources('path = "easy.jsonl"\nweight = 3', 'path = "hard.jsonl"\nwhere = "rate >= 0.5"\ntag = "h"')
    topology = loaded(base=text)
    rows = [(source.name, source.start, source.count, source.share) for source in topology.derived.sources]
    assert rows == [("easy", 0, 30, 750), ("h", 30, 5, 250)] and topology.derived.train_prompts == 35
    lines = Path(topology.data.train).read_text().splitlines()
    assert json.loads(lines[30]) == {"answer": "5", "prompt": "hard 5", "rate": 0.5, "tag": "h"}
    page = report(topology)
    assert "h: 25 % of the draws, 5 of 10 rows, 5 left out by where" in page
    assert Topology.from_json(topology.to_json()) == topology
    again = loaded(base=text)
    assert Path(again.data.train).name == Path(topology.data.train).name
    assert again.derived.sources_key == topology.derived.sources_key


def test_functions_are_relative_to_the_topology_and_run_in_another_process(two: Path, loaded: Loaded) -> None:
    (two / "mine.py").write_text(
        "import os\nPID = os.getpid()\n"
        "def rows():\n    print('hello')\n    for n in range(9):\n"
        "        yield {'prompt': f'{PID} {n}', 'answer': '1'}\n"
        "def odd(record):\n    return record['prompt'][-1] in '13579'\n"
    )
    topology = loaded(base=sources('function = "mine.py:rows"\nfilter = "mine.py:odd"'))
    (source,) = topology.derived.sources
    assert (source.name, source.count, source.text) == ("rows", 4, "4 of 9 rows, 5 left out by filter")


REFUSED = {
    'path = "none.jsonl"': 'data.source.0.path = .*none.jsonl": no such file or folder; give a path',
    'path = "easy.jsonl"\nfunction = "a.py:b"': "a source of format function has function, and this one has path and",
    "weight = 2": "a source of format jsonl has path, and this one has neither path, function nor tasks",
    "tasks = { countdown = 1 }": "data.source.0.size = 0: tasks are made: say how many; for example size = 10000",
    "tasks = { countdown = 1 }\nsize = 9\ntask_options.gcd = { max_value = 9 }":
        "data.source.0.task_options.*: 'gcd' is no task of this source; name it in data.source.0.tasks too",
    'path = "easy.jsonl"\nwhere = "__import__(\'os\')"': "is not understood: conditions are COLUMN",
    'path = "easy.jsonl"\nfilter = "odd"': "expected a function as package.module:name or file.py:name, got \"odd\"",
    'path = "easy.jsonl"\nfilter = "gone.py:odd"': "there is no file .*gone.py; a file is relative to the topology",
    'path = "easy.jsonl"\ntoo_long = "truncate_left"': "nothing is too long without max_prompt_tokens",
    'path = "easy.jsonl"\nwhere = "level > 1"': "easy.jsonl:1: no column 'level'; the columns are answer, prompt, rate",
    'path = "easy.jsonl"\nwhere = "rate > 9"': "none of its 30 rows is left: 30 by where",
    'path = "easy.jsonl"\nanswer_key = "right"': "no column 'right'; the columns are answer, prompt, rate",
    'path = "."\nsplit = "train"': "no Parquet file|.*of split 'train'|easy.jsonl:1",
    'path = "easy.jsonl"\nweigth = 2': r"unknown key in \[\[data.source\]\].*; did you mean weight\?",
}


@pytest.mark.parametrize("table", REFUSED)
def test_what_is_wrong_with_a_source_is_told_at_its_line(two: Path, refused: Refused, table: str) -> None:
    if table.startswith('path = "."'):
        for path in two.glob("*.jsonl"):
            path.rename(path.with_suffix(".txt"))
    problems = refused(base=sources(table))
    assert any(re.search(REFUSED[table], problem, re.DOTALL) for problem in problems), problems


def test_a_file_excludes_sources_and_a_tiny_share_is_refused(two: Path, refused: Refused) -> None:
    (problem,) = refused(base=sources('path = "easy.jsonl"') + '[data]\ntrain = "train.jsonl"\n')
    assert "prompts come from one file, or from sources; remove it" in problem
    (problem,) = refused(base=sources('path = "easy.jsonl"\nweight = 1e5', 'path = "hard.jsonl"'))
    assert "less than 1 in 1000: no prompt of it would be drawn" in problem
    (problem,) = refused(base=MODEL + '[data.source]\npath = "easy.jsonl"\n')
    assert "is an array of tables; write [[data.source]], twice bracketed" in problem


def test_a_function_that_hangs_is_named_with_the_row_before(
    two: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    from busrl.preflight import prompt_sources as making

    monkeypatch.setattr(making, "SILENT_S", 2.0)
    (two / "slow.py").write_text("import time\ndef odd(record):\n    time.sleep(60)\n")
    (problem,) = refused(base=sources('path = "easy.jsonl"\nfilter = "slow.py:odd"'))
    assert "no row for 2 s at easy: opening it: it hangs" in problem


def test_tools_and_arguments_of_the_template_are_plain_values(loaded: Loaded, refused: Refused) -> None:
    chat = '[data]\ntrain = "train.jsonl"\ntemplate_arguments = '
    (problem,) = refused(base=MODEL + chat + '{ enable_thinking = { a = 2020-01-01 } }\n')
    assert "expected a table of strings, finite numbers" in problem
    (problem,) = refused(base=MODEL + chat + "{ enable_thinking = false }\n")
    assert "a prompt as plain text has no template" in problem
    (problem,) = refused(base=MODEL + chat.replace("template_arguments", "chat_template_kwargs") + "{}\n")
    assert "data.template_arguments" in problem


def test_prompts_are_made_again_only_where_file_or_key_changed(two: Path) -> None:
    text = sources('path = "easy.jsonl"\ntag = "a"') + "[learner]\nlr = 1e-4\n"
    (two / "t.toml").write_text(text)
    first = load(two / "t.toml")
    run = two / "run"
    (run / "data").mkdir(parents=True)
    place = run / "data" / Path(first.data.train).name
    place.write_bytes(Path(first.data.train).read_bytes())
    (run / "topology.json").write_text(first.to_json())
    assert load(two / "t.toml", run_dir=run).data.train == str(place)
    damaged = place.read_bytes()
    place.write_bytes(damaged[:-9])
    assert load(two / "t.toml", run_dir=run).data.train != str(place), "a damaged file is made again"
    place.write_bytes(damaged)
    (two / "t.toml").write_text(text.replace('"a"', '"b"'))
    assert load(two / "t.toml", run_dir=run).data.train != str(place)


# -- prompts of validation -------------------------------------------------------------------------------------------

HELD = '[data]\ntrain = "train.jsonl"\n'


def test_validation_reads_what_training_can_and_keeps_jsonl_as_is(two: Path, loaded: Loaded) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    (two / "gsm").mkdir()
    for name, count in (("train", 9), ("test", 5)):
        rows = [{"question": f"{name} {n}?", "answer": n} for n in range(count)]
        pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), two / "gsm" / f"{name}-00000-of-00001.parquet")
    text = MODEL + HELD + (
        '[validation]\ndata = "hard.jsonl"\n'
        '[[validation.set]]\nname = "gsm"\ndata = "gsm"\nprompt_key = "question"\nsamples = "all"\n'
        '[[validation.set]]\nname = "easy"\ndata = "easy.jsonl"\nwhere = "rate < 0.3"\n'
    )
    topology = loaded(base=text)
    assert topology.validation.data == str(two / "hard.jsonl")
    gsm = topology.validation.set[0]
    rows = [json.loads(line) for line in Path(gsm.data).read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [f"test {n}?" for n in range(5)] and rows[0]["tag"] == "gsm"
    assert [(asked_set.lines, asked_set.prompts, Path(asked_set.data).suffix) for asked_set in topology.sets] == [
        (10, 512, ".jsonl"), (5, 5, ".jsonl"), (3, 512, ".jsonl")]
    page = report(topology)
    assert "gsm: 5 of 5 rows" in page and "easy: 3 of 30 rows, 27 left out by where" in page
    assert Topology.from_json(topology.to_json()) == topology


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ('data = "gone.parquet"', r"t.toml:\d+: validation.set.0.data = .*gone.parquet\": no such file or folder"),
        ("", "a source of format jsonl has data, and this one has neither data, function nor tasks"),
        ('data = "easy.jsonl"\nwhere = "rate >"', "is not understood: conditions are COLUMN"),
        ('data = "easy.jsonl"\nprompt_key = "text"', "easy.jsonl:1: no column 'text'; the columns are answer, prompt"),
        ('function = "rows.py:gone"', "no file .*rows.py"),
        ('tasks = { countdown = 1 }', "tasks are made: say how many"),
    ],
)
def test_what_is_wrong_with_a_set_is_told_once_at_its_line(
    two: Path, refused: Refused, keys: str, expected: str
) -> None:
    problems = refused(base=MODEL + HELD + f'[[validation.set]]\nname = "one"\n{keys}\n')
    assert re.search(expected, problems[0], re.DOTALL), problems
    assert len(problems) == 1, problems


def test_tasks_that_are_held_out_are_none_that_any_training_has(two: Path, loaded: Loaded) -> None:
    pytest.importorskip("reasoning_gym")
    tasks = 'tasks = { chain_sum = 1.0 }\nsize = 40\n'
    topologies = [loaded("", f"run.seed={seed}", base=sources(tasks) + "[validation]\n" + tasks) for seed in (0, 7)]
    train = [set(Path(topology.data.train).read_text().splitlines()) for topology in topologies]
    held = [Path(topology.validation.data).read_text().splitlines() for topology in topologies]
    assert len(held[0]) == 40 and held[0] == held[1], "runs that differ in run.seed are measured on the same prompts"
    assert train[0] != train[1] and not (train[0] | train[1]) & set(held[0])


def test_a_task_of_few_items_is_held_out_by_its_prompts_too(two: Path, loaded: Loaded) -> None:
    pytest.importorskip("reasoning_gym")
    tasks = (
        "tasks = { chain_sum = 1.0 }\nsize = 60\n"
        "task_options.chain_sum = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }\n"
    )
    topology = loaded(base=sources(tasks) + "[validation]\n" + tasks)
    paths = (topology.data.train, topology.validation.data)
    train, held = ({json.loads(line)["prompt"] for line in Path(path).read_text().splitlines()} for path in paths)
    assert held and not train & held
    assert "left out as prompts of training" in topology.derived.made[0].text
