"""Prompts become ids in one way: as the tokenizer adds to a text, or as its chat template writes a chat."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_folders import BOS, END_IDS, TEMPLATES, VOCABULARY
from requests_ import request, run
from transformers import AutoTokenizer

from busrl.data.chat import LightTokenizer, template_of
from busrl.data.library import KEPT_BYTES
from busrl.engines.tokens import tokens_of
from busrl.engines.torch.engine import TorchEngine
from busrl.errors import DataError, UserError
from busrl.states import Finish

Folder = Callable[..., Path]
BOS_ID = VOCABULARY[BOS]
USER = [{"role": "user", "content": " What is 1+1? "}]
CHATS: list[list[dict[str, Any]]] = [
    USER,
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "2*3"}],
    [{"role": "system", "content": "Be short."}, *USER],
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "<int>", "b": 'é"'}}}]


def chats_for(template: str) -> list[list[dict[str, Any]]]:
    return CHATS[:2] if template == "strict" else CHATS


def theirs(folder: Path, chat: list[dict[str, Any]], **more: Any) -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **more))


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_prompt_ids_match_the_chat_template_with_at_most_one_bos(chat_folder: Folder, template: str) -> None:
    folder = chat_folder(template)
    tokens, light = tokens_of(folder, chat=True), LightTokenizer.of(folder)
    assert light is not None
    for chat in chats_for(template):
        expected = theirs(folder, chat)
        assert tokens.encode(chat) == expected == light.ids(chat)
        assert light.counts([light.text(chat)] * 2, False) == [len(expected)] * 2
        assert expected.count(BOS_ID) == (template != "chatml")


def test_tools_are_named_as_the_template_writes_them(chat_folder: Folder) -> None:
    folder = chat_folder("chatml")
    expected = theirs(folder, USER, tools=TOOLS)
    light = LightTokenizer.of(folder, TOOLS)
    assert light is not None and len(expected) > len(theirs(folder, USER))
    assert tokens_of(folder, True, TOOLS).encode(USER) == expected == light.ids(USER)


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_a_text_gets_the_bos_that_the_tokenizer_adds(chat_folder: Folder, template: str) -> None:
    folder = chat_folder(template)
    light = LightTokenizer.of(folder)
    ids = tokens_of(folder, chat=False).encode("1+1")
    assert ids == [BOS_ID, *(VOCABULARY[c] for c in "1+1")] == AutoTokenizer.from_pretrained(folder).encode("1+1")
    assert light is not None and light.ids("1+1") == ids and light.counts(["1+1"], True) == [4]


def test_a_template_that_refuses_a_chat_says_why(chat_folder: Folder) -> None:
    light = LightTokenizer.of(chat_folder("strict"))
    assert light is not None
    with pytest.raises(DataError, match="System role not supported"):
        light.ids(CHATS[2])


def test_a_tokenizer_without_a_template_is_refused_before_any_prompt(chat_folder: Folder) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        tokens_of(chat_folder(""), chat=True)
    with pytest.raises(UserError, match="has no chat template"):
        TorchEngine.load(chat_folder(""), capacity=1, chat=True)
    assert tokens_of(chat_folder(""), chat=False).encode("a")


def test_a_template_is_found_in_each_of_its_places(chat_folder: Folder, tmp_path: Path) -> None:
    assert template_of(chat_folder("bos")) == TEMPLATES["bos"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert template_of(tmp_path) == "one"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert (template_of(tmp_path), template_of(tmp_path, tools=True)) == ("d", "t")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert (template_of(tmp_path), template_of(tmp_path, tools=True)) == ("file", "file")
    assert template_of(tmp_path / "nowhere") == ""


def test_engines_checks_and_agents_have_one_tokenizer(bpe_folder: Path) -> None:
    text = "what is 1234 + 5678 + 9012?"
    light, by_file = LightTokenizer.of(bpe_folder), LightTokenizer.of(bpe_folder, by_file=True)
    assert light is not None and light.as_engines and by_file is not None
    assert light.ids(text) == tokens_of(bpe_folder, chat=False).encode(text) != by_file.ids(text)
    assert light.decode(light.ids(text)) == text


ASKING = """
import sys
sys.path.remove('')
started = []
sys.addaudithook(lambda event, args: started.append(args[0]) if event == 'subprocess.Popen' else None)
from pathlib import Path
from busrl.data.chat import LightTokenizer
light = LightTokenizer.of(Path(sys.argv[1]))
assert light.as_engines
print(light.ids(sys.argv[2]), sorted({'torch', 'transformers'} & set(sys.modules)), len(started))
"""
TEXT = "what is 1234 + 5678 + 9012?"


def asked(folder: Path, cache: Path) -> str:
    """Ids of TEXT, heavy modules and started processes, of a process beside files of the user's that none imports."""
    (cwd := cache.parent / "user").mkdir(exist_ok=True)
    (cwd / "tokenize.py").write_text("raise SystemExit('not mine')")
    done = subprocess.run([sys.executable, "-c", ASKING, str(folder), TEXT], capture_output=True, text=True,
                          timeout=120, cwd=cwd, env={**os.environ, "XDG_CACHE_HOME": str(cache)})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_without_torch_asks_another_once_for_the_engines_tokenizer(bpe_folder: Path, tmp_path: Path) -> None:
    """Later processes read the kept answer. A changed file is asked about anew, and old answers make room."""
    shutil.copytree(bpe_folder, folder := tmp_path / "model")
    theirs = f"{tokens_of(bpe_folder, chat=False).encode(TEXT)} []"
    answers = [asked(folder, tmp_path / "cache") for _ in range(2)]
    (folder / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text() + " ")
    kept = tmp_path / "cache" / "busrl" / "tokenizers"
    with open(kept / "old.json", "wb") as file:
        file.truncate(KEPT_BYTES)
    os.utime(kept / "old.json", (1, 1))
    assert [*answers, asked(folder, tmp_path / "cache")] == [f"{theirs} 1", f"{theirs} 0", f"{theirs} 1"]
    assert len(list(kept.iterdir())) == 2 and not (kept / "old.json").exists()


def test_a_cache_that_cannot_be_made_changes_no_tokenizer(bpe_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert asked(bpe_folder, tmp_path / "cache") == f"{tokens_of(bpe_folder, chat=False).encode(TEXT)} [] 1"


def test_counting_tokens_of_chats_imports_neither_torch_nor_transformers(chat_folder: Folder) -> None:
    code = (
        "import sys; from pathlib import Path; from busrl.data.chat import LightTokenizer; "
        "light = LightTokenizer.of(Path(sys.argv[1])); assert light.ids([{'role': 'user', 'content': 'a'}]); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(chat_folder("bos"))], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_every_end_id_of_generation_config_ends_an_answer(chat_folder: Folder) -> None:
    engine = TorchEngine.load(chat_folder("chatml"), capacity=32, chat=True)
    prompt = engine.encode(USER)
    results = run(engine, [request(key, prompt, max_new_tokens=120) for key in range(96)])
    ended = [answer for answer in results.values() if answer.finish == Finish.EOS]
    assert {int(answer.token_ids[-1]) for answer in ended} == END_IDS, "by either of both"
    assert all(not END_IDS & set(answer.token_ids[:-1].tolist()) for answer in results.values())
    cut = [answer for answer in results.values() if answer not in ended]
    assert all(answer.finish == Finish.LENGTH and len(answer.token_ids) == 120 for answer in cut)
    texts = [engine.decode(answer.token_ids) for answer in ended]
    assert all(END_IDS.isdisjoint(engine.encode(text)) for text in texts), "no end in the text"
