"""What a topology with agents is, and what is refused in one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.cli import main
from busrl.errors import TopologyError
from busrl.preflight.explain import report
from busrl.preflight.load import load
from busrl.topology import Topology

Refused = Callable[[str], list[str]]
ROOT = Path(__file__).resolve().parents[2]
AGENT = '[[process]]\nrole = "agent"\nfunction = "play.py:episode"\n'


def agents(*settings: str) -> Topology:
    return load(ROOT / "configs" / "agents.toml", [*settings, "model.path=tiny:sort"])


def test_episodes_judge_themselves_where_nothing_else_is_said(tmp_path: Path) -> None:
    topology = agents()
    assert topology.reward.kind == "agent" and topology.has_callers and topology.derived.call_slots > 0
    names = [process.name for process in topology.processes()]
    assert "agent/0" in names and not any(name.startswith("reward") for name in names)
    (tmp_path / "judge.py").write_text("def score(record, completion, token_ids):\n    return 0.0\n")
    judged = agents(f"reward.function={tmp_path}/judge.py:score")
    assert judged.reward.kind == "python" and any(process.role == "reward" for process in judged.processes())


def test_a_slot_has_room_for_the_largest_episode() -> None:
    small, other = agents(), agents("agents.max_turns=1000", "agents.transcript_bytes=1048576")
    assert other.derived.slot_bytes - small.derived.slot_bytes >= 36 * 900 + (1 << 20) - (1 << 16)


def test_only_too_few_episodes_for_the_rows_are_warned_of() -> None:
    few, many = agents("agents.episodes=100"), agents("agents.episodes=128")
    (warning,) = [text for text in few.derived.warnings if "rows" in text]
    assert "agents.episodes = 100" in warning and "256 rows" in warning and "raise agents.episodes" in warning
    assert not any("rows" in text for text in many.derived.warnings)


def test_a_reward_part_of_episodes_needs_somebody_who_plays_them() -> None:
    part = 'reward.part=[{kind="agent"}]'
    topology = agents(part)
    assert topology.reward.kind == "exact_match" and any(process.role == "reward" for process in topology.processes())
    with pytest.raises(TopologyError, match=r'reward.part.0.kind = "agent".*no episode returns a reward'):
        load(ROOT / "configs" / "quickstart.toml", [part])


@pytest.mark.parametrize("settings", [[], ["--set", 'reward.part=[{kind="agent"}]']])
def test_a_model_is_not_measured_by_episodes_rewards(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(ROOT / "configs" / "agents.toml"), *settings]) == 2
    assert "`busrl evaluate` draws single answers" in capsys.readouterr().err


def test_engines_have_room_for_the_longest_call() -> None:
    topology = agents("agents.context=1000")
    assert topology.longest == 1000 and topology.episode_limits == (1000, 256, 2000)
    assert topology.derived.call_slot_bytes >= 4 * 1000


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_like_it\n", r"process.3.function = .*cannot be used: importing it raised ModuleNotFoundError"),
        ("class episode:\n    pass\n", r"the class has no method episode\(task, llm\)"),
        ("import os\nos._exit(7)\n", r"its process died: exit code 7"),
        ("play = 1\n", r"has no 'episode'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_told_before_the_start(
    refused: Refused, here: Path, code: str, message: str
) -> None:
    (here / "play.py").write_text(code)
    (problem,) = refused(AGENT)
    assert re.search(message, problem), problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[process]]\nrole = "agent"\n', r"process.3.function = \"\".*plays episodes with a function"),
        ('[[process]]\nrole = "reward"\nfunction = "a.py:f"\n', r"only an agent plays episodes; remove it"),
        (AGENT + 'environment = "gymnasium:Sort-v0"\n', r"an environment or a program; remove all but one"),
        ('[[process]]\nrole = "agent"\nenvironment = "gym:Sort"\n', r"its library, a colon and its name; gymnasium:ID"),
        ('[[process]]\nrole = "reward"\nenvironment = "gymnasium:A"\n', r"only an agent plays episodes; remove it"),
        (AGENT + "options = { chat = false }\n", r"options are those of an environment; remove it"),
        (AGENT + 'python = "nowhere/python"\n', r"nowhere/python.*no program that can be started"),
        ('[reward]\nkind = "agent"\n', r"reward.kind = \"agent\".*no episode returns a reward; add"),
        (AGENT + "[segments]\nlength = 8\n", r"an episode is made whole; remove"),
        (AGENT + "[agents]\ncontext = 512\ntokens = 100\n", r"agents.tokens = 100.*set it to 512 or more"),
        (AGENT + '[[process]]\nrole = "rollout"\nengine = "openai"\n', r"which this engine does not take"),
    ],
)
def test_what_does_not_go_with_agents_is_refused_with_a_remedy(
    refused: Refused, here: Path, text: str, message: str
) -> None:
    (here / "play.py").write_text("async def episode(task, llm):\n    return 0.0\n")
    problems = refused(text)
    assert any(re.search(message, problem) for problem in problems), problems


def test_an_environment_that_cannot_be_had_is_told_before_the_start(refused: Refused) -> None:
    pytest.importorskip("gymnasium")
    (problem,) = refused('[[process]]\nrole = "agent"\nenvironment = "gymnasium:NothingLikeIt-v0"\n')
    assert re.search(r"process.3.environment = .*cannot be used: NameNotFound.*docs/environments.md", problem), problem


def test_the_seeds_of_an_environment_are_its_data_and_validation_has_others() -> None:
    pytest.importorskip("gymnasium")
    cart = "gymnasium:CartPole-v1"
    topology = agents(f"data.train={cart}", f"validation.data={cart}", "process.agent.function=",
                      f"process.agent.environment={cart}", "run.seed=7")
    lines = [[json.loads(line) for line in Path(path).read_text().splitlines()]
             for path in (topology.data.train, topology.validation.data)]
    assert [line["index"] for line in lines[0]] == list(range(7, 7 + 1024))
    assert lines[1][0] == {"index": 1 << 30, "prompt": str(1 << 30), "tag": cart}
    assert topology.derived.train_prompts == topology.derived.validation_prompts == 1024


def test_check_says_how_turns_continue_and_tries_no_episode_reward(
    chat_folder: Callable[..., Path], here: Path
) -> None:
    (here / "play.py").write_text("async def episode(task, llm):\n    return 0.0\n")
    (here / "chat.toml").write_text((ROOT / "configs" / "agents.toml").read_text())
    settings = [f"model.path={chat_folder('chatml')}", "process.agent.function=play.py:episode"]
    page = report(load(here / "chat.toml", settings))
    assert "turns of an episode, as the chat template lets" in page and re.search(r"two tool calls +extend", page)
    assert "cannot be used" not in page and "turns of an episode" not in report(agents())
