"""A topology with scripted engines: what is refused, and what `busrl check` says about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.data import trace
from busrl.data.trace import TracedPrompt
from busrl.preflight.explain import report
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
BASE = """\
[model]
path = "model"
[data]
train = "trace.jsonl"
[[process]]
role = "rollout"
engine = "mock"
[[process]]
role = "learner"
[[process]]
role = "reward"
"""


@pytest.fixture
def scripted(here: Path) -> Path:
    """The folder, with a trace, and a model that says which ids it has."""
    write_trace(here, [TracedPrompt(f"{n}+{n}=", (n + 1, 80), arrival_s=float(n)) for n in range(40)])
    config = json.loads((here / "model" / "config.json").read_text())
    (here / "model" / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    return here


def write_trace(here: Path, tasks: list[TracedPrompt]) -> None:
    trace.write(here / "trace.jsonl", tasks)


def test_a_trace_is_accepted_with_a_warning_and_its_lengths_are_shown(scripted: Path, loaded: Loaded) -> None:
    topology = loaded("[generation]\nmax_new_tokens = 64\n", base=BASE)
    assert topology.scripted
    text = report(topology)
    assert "nothing is learnt" in text
    assert "longest 80 tokens; 40 of 80 are cut by generation.max_new_tokens = 64" in text
    assert "rollout/0    mock" in text


def test_ordinary_prompts_are_no_trace(scripted: Path, refused: Refused) -> None:
    (problem,) = refused(base=BASE.replace("trace.jsonl", "train.jsonl"))
    assert "train.jsonl:1" in problem and "lengths = None" in problem and "must be a list of numbers" in problem
    assert problem.endswith('correct the line (engine = "mock" needs a trace)')


@pytest.mark.parametrize("lengths", ["[3, -1]", "[0]", "[]", '["a"]', "[1.5]"])
def test_a_bad_length_names_its_line(lengths: str, scripted: Path, refused: Refused) -> None:
    with open(scripted / "trace.jsonl", "a") as file:
        file.write(f'{{"prompt": "x", "answer": "", "lengths": {lengths}}}\n')
    (problem,) = refused(base=BASE)
    assert "trace.jsonl:41: lengths" in problem and "correct the line" in problem


def test_a_tiny_task_is_no_trace(scripted: Path, refused: Refused) -> None:
    (problem,) = refused(base=BASE.replace("trace.jsonl", "tiny:sort"))
    assert "a trace is needed" in problem


def test_a_model_that_does_not_name_its_ids_is_refused(scripted: Path, refused: Refused) -> None:
    (scripted / "model" / "config.json").write_text(json.dumps({"vocab_size": 3}))
    (problem,) = refused(base=BASE)
    assert "config.json" in problem and "eos_token_id" in problem


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ('[weights]\ntransport = "broadcast"\n', "this transport gives weights to torch and vllm only"),
        ('[reward]\nextract = "=(.*)"\n', "remove extract"),
        ('[[process]]\nrole = "validator"\n', "nothing to validate"),
    ],
)
def test_what_a_scripted_engine_can_not_do_is_refused(
    extra: str, part: str, scripted: Path, refused: Refused
) -> None:
    assert any(part in line for line in refused(extra, base=BASE))


def test_an_open_stream_needs_times_in_order_and_no_shuffling(scripted: Path, loaded: Loaded, refused: Refused) -> None:
    stream = BASE.replace('train = "trace.jsonl"', 'train = "trace.jsonl"\narrivals = true\nshuffle = false')
    assert loaded(base=stream).data.arrivals
    assert any("shuffle = false" in line for line in refused(base=stream.replace("shuffle = false", "")))
    write_trace(scripted, [TracedPrompt("a", (3,), arrival_s=2.0), TracedPrompt("b", (3,), arrival_s=1.0)])
    (problem,) = refused(base=stream)
    assert "trace.jsonl:2" in problem and "ascending" in problem
    write_trace(scripted, [TracedPrompt("a", (3,))])
    (problem,) = refused(base=stream)
    assert "no arrival_s" in problem
