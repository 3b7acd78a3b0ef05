"""Prompts in tokens: the limit that "auto" comes to, what a given one leaves out, and chats that cannot be written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_folders import make
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from busrl.data import library
from busrl.engines.tokens import tokens_of
from busrl.preflight import prompt_tokens as prompts_module
from busrl.preflight.explain import report
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
Folder = Callable[..., Path]
CHAT = "data.template=chat"


@pytest.fixture
def chats(here: Path, chat_folder: Folder) -> Callable[..., Path]:
    """`here` with a real chat model and the given prompts; returns the model's folder."""

    def put(prompts: list[Any], template: str = "chatml", name: str = "train.jsonl") -> Path:
        folder = chat_folder(template)
        if (here / "model").is_dir() and not (here / "model").is_symlink():
            (here / "model").rename(here / "old-model")
            (here / "model").symlink_to(folder)
        lines = "".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts)
        (here / name).write_text(lines)
        return folder

    return put


def tokens(folder: Path, prompt: Any, system: str = "") -> int:
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    chat = [{"role": "system", "content": system}, *chat] if system else chat
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def with_margin(longest: int) -> int:
    """An eighth more, and at least 8 tokens."""
    return longest + max(8, longest // 8)


def test_auto_is_the_longest_prompt_with_template_and_system_prompt(
    here: Path, chats: Callable[..., Path], loaded: Loaded
) -> None:
    folder = chats(["ab", "a" * 30, "abc"])
    plain = loaded()
    assert plain.max_prompt_tokens == with_margin(31)  # with the BOS that the tokenizer adds
    assert loaded("", CHAT).max_prompt_tokens == with_margin(tokens(folder, "a" * 30))
    with_system = loaded("", CHAT, "data.system=Be short.")
    assert with_system.max_prompt_tokens == with_margin(tokens(folder, "a" * 30, "Be short."))
    assert with_system.derived.slot_bytes > plain.derived.slot_bytes
    conversation = [{"role": "user", "content": "b" * 40}, {"role": "assistant", "content": "c"},
                    {"role": "user", "content": "d"}]
    chats(["a", conversation], name="val.jsonl")
    both = loaded("", CHAT, f"validation.data={here}/val.jsonl")
    assert both.max_prompt_tokens == with_margin(tokens(folder, conversation))
    text = report(both)
    assert f"generation.max_prompt_tokens = {both.max_prompt_tokens} (auto, some more than the longest has)" in text
    assert "train.jsonl:2; all counted, chat template included" in text and "val.jsonl:2; all counted" in text
    assert Topology.from_json(both.to_json()).max_prompt_tokens == both.max_prompt_tokens


def test_a_limit_below_one_in_a_hundred_is_refused_with_another(
    chats: Callable[..., Path], refused: Refused, loaded: Loaded
) -> None:
    folder = chats([*("a" * 20 for _ in range(196)), *("b" * 60 for _ in range(3)), "c" * 90])
    (problem,) = refused("[generation]\nmax_prompt_tokens = 50\n", CHAT)
    most, all_of_them = tokens(folder, "b" * 60), tokens(folder, "c" * 90)
    assert problem.startswith("t.toml:12: generation.max_prompt_tokens = 50: ")
    assert "4 of the 200 prompts of train.jsonl (2.0%) are longer than 50 tokens and would be set aside" in problem
    assert f"the longest has {all_of_them} (line 200; all counted, chat template included)" in problem
    assert f'"auto" or {all_of_them} fits all, {most} fits 99 %' in problem
    text = report(loaded(f"[generation]\nmax_prompt_tokens = {most}\n", CHAT))
    assert "1 of " in text and f"are longer than {most} and will be set aside" in text
    assert loaded("[generation]\nmax_prompt_tokens = 61\n").max_prompt_tokens == 61  # without the template 61 fits


def test_auto_leaves_the_answer_room_in_the_model(chats: Callable[..., Path], loaded: Loaded, refused: Refused) -> None:
    chats([*("a" * 20 for _ in range(199)), "b" * 500])
    topology = loaded("[generation]\nmax_new_tokens = 100\n")
    assert topology.max_prompt_tokens == 412  # of 512 positions
    assert "1 of " in report(topology) and "are longer than 412 and will be set aside" in report(topology)
    chats(["b" * 500 for _ in range(3)])
    (problem,) = refused("[generation]\nmax_new_tokens = 100\n")
    assert "3 of the 3 prompts" in problem and "longer than 412 tokens" in problem
    assert "lower generation.max_new_tokens" in problem and "fits all" not in problem, "auto is what it is already"


def test_a_large_file_is_counted_in_part_and_says_so(
    chats: Callable[..., Path], loaded: Loaded, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "ALL", 100)
    monkeypatch.setattr(prompts_module, "SOME", 40)
    chats([("a" * (20 if number % 10 else 45)) for number in range(1000)] + ["c" * 90])
    topology = loaded()
    assert topology.max_prompt_tokens == with_margin(91)
    assert "of 1,001 prompts, the longest by bytes and some spread evenly" in report(topology)
    (problem,) = refused("[generation]\nmax_prompt_tokens = 30\n")
    assert "about " in problem and "of the 1001 prompts" in problem
    share = float(problem.split("(")[1].split("%")[0])
    assert 2 <= share <= 25, "an estimate of a tenth"


def test_a_million_prompts_are_looked_at_within_a_bound(chats: Callable[..., Path], monkeypatch: Any) -> None:
    """The number of prompts that are encoded does not grow with the file."""
    from array import array

    from busrl.data.prompts import Scan

    sizes = array("q", [50 + (n * 7919) % 400 for n in range(1_000_000)])
    scan = Scan(Path("x"), len(sizes), max(sizes), 500, 0, (), 0, (), array("q", range(len(sizes))), sizes)
    begun = time.process_time()
    chosen, spread = prompts_module.lines_to_count(scan)
    assert time.process_time() - begun < 30
    assert len(chosen) == len(set(chosen)) <= 2 * prompts_module.SOME and chosen == sorted(chosen)
    assert sum(spread) == prompts_module.SOME
    longest = sorted(sizes, reverse=True)[: prompts_module.SOME]
    assert sorted((sizes[i] for i in chosen), reverse=True)[0] == longest[0]


def test_chat_without_a_template_is_refused_at_its_key(
    chats: Callable[..., Path], refused: Refused, loaded: Loaded
) -> None:
    chats(["a"], template="")
    (problem,) = refused("", CHAT)
    assert problem.startswith("--set data.template: ") and "has no chat template" in problem
    assert 'set template = "none"' in problem and loaded().max_prompt_tokens == with_margin(2)


def test_messages_ask_for_the_chat_template(chats: Callable[..., Path], refused: Refused, loaded: Loaded) -> None:
    messages = [{"role": "user", "content": "hi"}]
    folder = chats(["a", messages, messages])
    (problem,) = refused()
    assert "2 of the 3 prompts of" in problem and 'set data.template = "chat"' in problem
    assert loaded("", CHAT).max_prompt_tokens == with_margin(tokens(folder, messages))


def test_a_chat_that_the_template_refuses_is_named_with_its_line(chats: Callable[..., Path], refused: Refused) -> None:
    chats(["fine", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]], template="strict")
    (problem,) = refused("", CHAT)
    assert "train.jsonl:2: the chat template refuses the messages: Conversation roles must alternate" in problem


def test_a_system_prompt_without_a_chat_has_no_place(chats: Callable[..., Path], refused: Refused) -> None:
    chats(["a"])
    (problem,) = refused("", "data.system=Be short.")
    assert "a prompt as plain text has no place for a system message" in problem
    (problem,) = refused("", CHAT, "data.system=Be short.", "process.rollout.count=0")
    assert "rollouts from outside do not receive it" in problem


def test_without_a_readable_tokenizer_a_byte_counts_as_a_token(loaded: Loaded) -> None:
    topology = loaded()
    assert topology.max_prompt_tokens == len("39+39=") + 1
    assert "a byte counted as a token" in report(topology)


def test_the_limit_of_a_tiny_task_is_known_before_it_is_made(loaded: Loaded, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    topology = loaded("", "model.path=tiny:sort", "data.train=tiny:sort")
    assert 8 <= topology.max_prompt_tokens <= 16


def test_the_fixture_writes_what_transformers_reads(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "bos")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [4, 1]


LONG = "what is 1234 + 5678 + 9012?"


def test_check_counts_with_the_tokenizer_that_engines_have(
    here: Path, bpe_folder: Path, loaded: Loaded, refused: Refused
) -> None:
    """Its class splits numbers digit by digit, where the file keeps them whole."""
    (here / "model").rename(here / "old")
    (here / "model").symlink_to(bpe_folder)
    (here / "train.jsonl").write_text(json.dumps({"prompt": LONG, "answer": "1"}) + "\n")
    counted, by_file = len(tokens_of(bpe_folder, chat=False).encode(LONG)), by_file_alone(bpe_folder, LONG)
    assert counted > 1.5 * by_file
    topology = loaded("[generation]\nmax_new_tokens = 8\n")
    assert topology.max_prompt_tokens == with_margin(counted)
    assert f"the longest prompt has {counted} " in report(topology)
    (problem,) = refused(f"[generation]\nmax_prompt_tokens = {by_file}\n")
    assert f"are longer than {by_file} tokens and would be set aside; the longest has {counted} " in problem


def test_without_transformers_the_files_tokenizer_counts_and_check_says_so(
    here: Path, bpe_folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "model").rename(here / "old")
    (here / "model").symlink_to(bpe_folder)
    (here / "train.jsonl").write_text(json.dumps({"prompt": LONG, "answer": "1"}) + "\n")
    monkeypatch.setattr(library, "library_tokenizer", lambda folder: "")
    topology = loaded("[generation]\nmax_new_tokens = 8\n")
    assert topology.max_prompt_tokens == with_margin(by_file_alone(bpe_folder, LONG))
    text = "by tokenizer.json, for transformers cannot be asked here: an engine counts again when it starts"
    assert text in report(topology)


def by_file_alone(folder: Path, text: str) -> int:
    return len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def test_check_says_how_many_rows_of_the_model_have_no_token(here: Path, loaded: Loaded) -> None:
    assert "have no token" not in report(loaded())
    config = json.loads((here / "model" / "config.json").read_text())
    (here / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))
    assert "  7 rows of its vocabulary have no token: " in report(loaded())
