"""[openai] and the keys of engines: what cannot work is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.errors import TopologyError
from busrl.preflight.explain import report
from busrl.preflight.load import load
from busrl.topology import Topology

QUICK = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]

URL = 'base_url = "http://127.0.0.1:8000/v1"\n'
ENGINE = ("process.rollout.engine=openai",)
FREE = '[weights]\nmode = "fully-async"\n'

REFUSED = [
    ("[openai]\n" + FREE, "the engine needs an endpoint, and none is named; for example http://127.0.0.1:8000/v1"),
    ('[openai]\nbase_url = "127.0.0.1:8000"\n' + FREE, "is not the address of an endpoint"),
    ('[openai]\nbase_url = "http://host:port/v1"\n' + FREE, "is not the address of an endpoint"),
    ("[openai]\n" + URL, "the server keeps its first weights, too old here"),
    (f'[openai]\n{URL}update = "vllm"\n', "the server loads versions from a folder"),
    (f'[openai]\n{URL}endpoint = "chat"\n{FREE}', "training would see it without that"),
    (f'[openai]\n{URL}endpoint = "chat"\n{FREE}[data]\ntemplate = "chat"\n[segments]\nlength = 20\n',
     "by chat an answer cannot continue from token ids"),
    (f'[openai]\n{URL}tools = "tools.json"\n{FREE}', "tools belong to the chat endpoint"),
    (f'[openai]\n{URL}{FREE}[generation]\non_update = "keep"\n', "keys are computed again"),
    (f'[openai]\n{URL}update = "ollama"\n{FREE}', 'expected one of "none", "vllm", "sglang"'),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_an_endpoint_that_cannot_work_is_refused_with_rule_and_remedy(
    refused: Refused, text: str, message: str
) -> None:
    overrides = list(ENGINE)
    if '[data]\ntemplate = "chat"\n' in text:
        text = text.replace('[data]\ntemplate = "chat"\n', "")
        overrides.append("data.template=chat")
    problems = refused(text, *overrides)
    assert any(message in line for line in problems), problems


@pytest.mark.parametrize("transport", ["checkpoint_restart", "lora_restart"])
def test_by_chat_a_restart_lets_answers_end_or_is_refused(
    here: Path, refused: Refused, loaded: Loaded, transport: str
) -> None:
    (here / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    text = f'[openai]\n{URL}endpoint = "chat"\nupdate = "vllm"\n[weights]\ntransport = "{transport}"\n'
    problems = refused(text, *ENGINE, "data.template=chat")
    assert any("by chat running answers would be lost at an update" in line for line in problems), problems
    if transport == "checkpoint_restart":
        loaded(text + 'on_restart = "finish"\n', *ENGINE, "data.template=chat")


def test_one_process_gives_a_server_its_weights(refused: Refused) -> None:
    text = f'[openai]\n{URL}update = "vllm"\n[weights]\ntransport = "checkpoint_restart"\n'
    problems = refused(text, *ENGINE, "process.rollout.count=2")
    assert any("two processes would load weights into one server" in line for line in problems), problems


def test_an_endpoint_that_needs_setting_up_is_loaded_with_a_warning(loaded: Loaded) -> None:
    text = f'[openai]\n{URL}update = "vllm"\n[weights]\ntransport = "checkpoint_restart"\n'
    topology = loaded(text + "[generation]\ntemperature = 0.7\n", *ENGINE)
    assert any("processed_logprobs" in line for line in topology.derived.warnings)
    assert Topology.from_json(topology.to_json()) == topology
    fixed = loaded(f"[openai]\n{URL}{FREE}", *ENGINE)
    assert any("samples get ever older" in line for line in fixed.derived.warnings)
    unused = loaded(f"[openai]\n{URL}")
    assert any('no [[process]] has engine = "openai"' in line for line in unused.derived.warnings)


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "cannot be read: [Errno 2]"), ("{", "cannot be read: Expecting"), ('{"a": 1}', "not a list of objects")],
)
def test_the_file_of_tools_is_looked_at(here: Path, refused: Refused, text: str | None, why: str) -> None:
    if text is not None:
        (here / "tools.json").write_text(text)
    chat = f'[openai]\n{URL}endpoint = "chat"\ntools = "tools.json"\n{FREE}'
    problems = refused(chat, *ENGINE, "data.template=chat")
    assert any("openai.tools" in line and why in line for line in problems), problems


def test_a_key_that_is_not_in_this_environment_is_a_warning(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = loaded(f'[openai]\n{URL}api_key_env = "SOME_KEY"\n{FREE}', *ENGINE)
    monkeypatch.delenv("SOME_KEY", raising=False)
    assert "openai.api_key_env: $SOME_KEY is not set in this environment" in report(topology)
    monkeypatch.setenv("SOME_KEY", "secret")
    assert "SOME_KEY" not in report(topology)


def test_layers_of_a_tiny_model_are_known_before_it_is_made() -> None:
    with pytest.raises(TopologyError, match=r"no layer 'nope' that an adapter could be put on; it has down_"):
        load(QUICK, ["lora.rank=8", 'lora.targets=["nope"]'])
    load(QUICK, ["lora.rank=8", 'lora.targets=["q_proj", "up_proj"]'])
