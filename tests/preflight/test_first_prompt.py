"""Before a start the first prompt is written, and the reward is tried with an empty answer and the right one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.preflight.explain import report
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
PYTHON = '[reward]\nfunction = "judge.py:score"\ntimeout_s = 2\n'
HEAD = "def score(record, completion, token_ids):\n"


@pytest.fixture
def judged(here: Path, loaded: Loaded) -> Callable[..., str]:
    """The page of a topology whose reward has this body."""

    def run(body: str, extra: str = "", *overrides: str) -> str:
        (here / "judge.py").write_text(HEAD + body)
        return report(loaded(PYTHON + extra, *overrides))

    return run


def test_the_page_shows_what_two_answers_are_worth(judged: Callable[..., str], here: Path) -> None:
    text = judged("    return 0.25 if completion == record['answer'] else 0\n")
    assert f"first prompt ({here}/train.jsonl:1)" in text and 'as the model reads it: "0+0="' in text
    assert "reward of an empty answer: 0\n" in text and 'reward of the right answer "0": 0.25\n' in text
    assert "both are worth the same" not in text


def test_an_answer_that_is_a_number_is_tried_as_its_text(judged: Callable[..., str], here: Path) -> None:
    (here / "train.jsonl").write_text('{"prompt": "2+2=", "answer": 4}\n')
    assert 'reward of the right answer "4": 1' in judged("    return completion == str(record['answer'])\n")


def test_the_page_names_what_prompts_were_made_of_and_no_temporary_file(loaded: Loaded, here: Path) -> None:
    (here / "held.jsonl").write_text((here / "train.jsonl").read_text())
    held = '[[validation.set]]\nname = "held"\ndata = "held.jsonl"\nsize = 30\n'
    text = report(loaded(held))
    assert "validation held: held.jsonl (converted), 30 prompts; 512 answers, 17 or 18 to each" in text
    assert "busrl-data" not in text and "512 asked" not in text


def test_the_first_prompt_of_converted_sources_is_that_of_their_names(loaded: Loaded, here: Path) -> None:
    source = '[[data.source]]\npath = "train.jsonl"\nsize = 30\n'
    text = report(loaded(source, base='[model]\npath = "model"\n'))
    assert "first prompt (train.jsonl (converted):1)" in text and "busrl-data" not in text


@pytest.mark.parametrize(("wrote", "warned"), [("", 0), ("[generation]\nmax_batch = 700\n", 1)])
def test_nobody_is_warned_of_a_default_that_nobody_set(loaded: Loaded, wrote: str, warned: int) -> None:
    topology = loaded(wrote, "groups.size=2", "learner.trigger.n_min=4")
    assert topology.ring.slots != "auto" or topology.derived.slots < 128
    assert sum("generation.max_batch" in text for text in topology.derived.warnings) == warned


def test_equal_rewards_are_pointed_at(judged: Callable[..., str]) -> None:
    assert "both are worth the same" in judged("    return 0\n")


def test_exact_match_is_tried_too(loaded: Loaded) -> None:
    text = report(loaded())
    assert "reward of an empty answer: 0\n" in text and 'reward of the right answer "0": 1\n' in text


def test_a_reward_that_always_raises_is_refused_with_its_exception(
    refused: Refused, here: Path
) -> None:
    (here / "judge.py").write_text(HEAD + "    return record['anser'] == completion\n")
    (problem,) = refused(PYTHON)
    assert problem.startswith("t.toml:12: reward.function = ")
    assert "fails for an empty answer to the first prompt: KeyError: 'anser'" in problem and "judge.py:2" in problem


def test_one_that_raises_on_an_empty_answer_alone_is_told_and_accepted(judged: Callable[..., str]) -> None:
    text = judged("    return float(completion)\n")
    assert "reward of an empty answer: ValueError: could not convert string to float: ''" in text
    assert 'reward of the right answer "0": 0\n' in text


def test_an_empty_text_alone_refuses_no_start_without_right_answers(
    judged: Callable[..., str], here: Path
) -> None:
    (here / "train.jsonl").write_text('{"prompt": "name a number"}\n')
    text = judged("    return 0.5 * (completion.split()[-1] != '')\n")
    assert "reward of an empty answer: IndexError: list index out of range" in text
    assert 'reward of a made-up answer "42": 0.5' in text and "both are worth the same" not in text


@pytest.mark.parametrize(("body", "expected"), [
    ("    return None\n", "the reward is None: must be a number"),
    ("    import os\n    print('no licence')\n    os._exit(3)\n", "the process died: exit code 3, no licence"),
    ("    import os, time\n    os.closerange(0, 30)\n    time.sleep(600)\n", "the process died: its output is closed"),
])
def test_what_is_no_number_or_ends_its_process_is_refused(
    refused: Refused, here: Path, body: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busrl.preflight.trial.END_S", 2.0)
    (here / "judge.py").write_text(HEAD + body)
    (problem,) = refused(PYTHON)
    assert expected in problem


def test_a_hanging_reward_is_refused_by_deadline_and_leaves_no_process(refused: Refused, here: Path) -> None:
    (here / "judge.py").write_text(
        "import os, subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"  # before its time counts
        f"open({str(here / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n{HEAD}    time.sleep(600)\n"
    )
    (problem,) = refused(PYTHON)
    assert "fails for an empty answer to the first prompt: no result after 2 s (reward.timeout_s)" in problem
    until = time.monotonic() + 20
    while any(_lives(pid) for pid in (here / "pids").read_text().split()):
        assert time.monotonic() < until, "what the reward had started lives on"
        time.sleep(0.01)


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_is_tried_in_the_environment_of_its_process(judged: Callable[..., str]) -> None:
    body = "    import os\n    return float(os.environ['WORTH'])\n"
    assert "reward of an empty answer: 0.5" in judged(body, "", "process.reward.env.WORTH=\"0.5\"")


def test_a_judge_that_joins_from_outside_is_not_tried(judged: Callable[..., str]) -> None:
    assert "reward of" not in judged("    raise SystemExit('must not be called')\n", "", "process.reward.count=0")


def test_a_chat_is_shown_as_its_template_writes_it(judged: Callable[..., str], here: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (here / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    word_level = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": word_level}
    (here / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = judged("    return 1\n", "", "data.template=chat")
    assert 'as the model reads it: "<user>0+0=<assistant>"' in text


def test_what_a_person_decides_stands_before_the_sums(loaded: Loaded) -> None:
    topology = loaded("", "learner.lr=2e-4")
    short, long = report(topology, verbose=False), report(topology)
    words = [line.partition(" ")[0] for line in short.partition("\n\n")[0].splitlines()]
    assert words[-4:] == ["run", "learning", "epochs", "tokens"]
    assert "epochs 160: 6400 groups of 40 prompts" in short and "tokens per step 16384 at most" in short
    assert "groups and slots" not in short and "--verbose" in short and "groups and slots" in long


def test_a_bound_on_age_warns_in_a_synchronous_run(loaded: Loaded) -> None:
    (warning,) = loaded('[weights]\nmode = "sync"\nmax_staleness = 3\n').derived.warnings
    assert "weights.max_staleness = 3" in warning and "nothing in it is stale" in warning
    assert not loaded('[weights]\nmode = "sync"\n').derived.warnings


def test_a_device_that_this_machine_lacks_is_warned_of(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrl.system.device._driver", lambda kind: False)
    assert 'model.device = "cuda": this machine has no cuda device' in report(loaded("", "model.device=cuda"))
    monkeypatch.setattr("busrl.system.device._driver", lambda kind: kind == "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "this machine has no" not in report(loaded("", "model.device=cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "this machine has no cuda device" in report(loaded("", "model.device=cuda"))


@pytest.mark.parametrize(("kinds", "bf16", "dtype"), [
    (("cuda",), True, "bfloat16"), (("cuda",), False, "float32"), ((), True, "float32"), (("npu",), False, "bfloat16"),
])
def test_the_number_type_follows_the_device(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], bf16: bool, dtype: str
) -> None:
    monkeypatch.setattr("busrl.system.device._driver", lambda kind: kind in kinds)
    monkeypatch.setattr("busrl.system.device.has_bfloat16", lambda kind: kind == "npu" or (kind == "cuda" and bf16))
    assert loaded().model.dtype == dtype
    assert loaded("", "process.rollout.device=cpu").model.dtype == "float32"
    assert loaded("", "model.dtype=bfloat16").model.dtype == "bfloat16"
