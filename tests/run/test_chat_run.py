"""Whole runs whose prompts are chats: trained is what the model's own chat template writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_folders import END_IDS
from checks import check_end
from harness import Run, read_lines, running

from busrl.ledger.wal import Record, frames

Folder = Callable[..., Path]
SYSTEM = "Be short."
JUDGE = """
def score(record, completion, token_ids):
    return float(len(completion) % 7)
"""
TOPOLOGY = """
[run]
name = "chat"
[model]
path = "{model}"
[data]
train = "prompts.jsonl"
template = "chat"
system = "{system}"
[groups]
size = 4
[generation]
max_new_tokens = 24
[learner]
lr = 1e-3
[reward]
kind = "python"
function = "judge.py:score"
[[process]]
role = "rollout"
[[process]]
role = "reward"
[[process]]
role = "learner"
"""


def prompts() -> list[Any]:
    """Texts and conversations, as people mix them."""
    found: list[Any] = [f"What is {n}+{n}?" for n in range(12)]
    for n in range(12):
        turns = (("user", f"{n}?"), ("assistant", "yes"), ("user", "and then?"))
        found.append([{"role": role, "content": content} for role, content in turns])
    return found


def make_all(folder: Path, model: Path, system: str = SYSTEM) -> Path:
    """Prompts, judge and topology in one folder; the file has a byte order mark, Windows line ends, an empty line."""
    folder.mkdir()
    lines = "".join(json.dumps({"prompt": prompt, "answer": 1}) + "\r\n" for prompt in prompts())
    (folder / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n")
    (folder / "judge.py").write_text(JUDGE)
    (folder / "chat.toml").write_text(TOPOLOGY.format(model=model, system=system))
    return folder / "chat.toml"


def trained(run: Run) -> list[Any]:
    """The samples of the write-ahead log. A checkpoint cuts it, so it is read before the run writes its last one."""
    import msgspec

    decoder = msgspec.msgpack.Decoder(Record)
    payloads = (payload for path in sorted(run.paths.wal.glob("*.wal")) for payload, _ in frames(path.read_bytes()))
    return [sample for payload in payloads for sample in decoder.decode(payload).samples]


def expected_ids(model: Path, system: str = SYSTEM) -> set[tuple[int, ...]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    found = set()
    for prompt in prompts():
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chat = [{"role": "system", "content": system}, *chat] if system else chat
        found.add(tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)))
    return found


def check_samples(run: Run, model: Path, system: str = SYSTEM) -> None:
    """Prompts are those of the template; answers end by every end id of generation_config, and by nothing else."""
    samples = trained(run)
    assert len(samples) >= 4 * 8 * 4
    ids = {tuple(np.frombuffer(one.prompt_ids, np.int32).tolist()) for one in samples}
    assert ids <= expected_ids(model, system) and len(ids) >= 8
    ends = set()
    for one in samples:
        tokens = np.frombuffer(one.token_ids, np.int32).tolist()
        assert not END_IDS & set(tokens[:-1])
        assert (tokens[-1] in END_IDS) == (one.finish == 1) and (one.finish == 1 or len(tokens) == 24)
        ends |= {tokens[-1]} & END_IDS
    assert ends == END_IDS


@pytest.mark.parametrize("template", ["chatml", "bos"])
def test_a_run_of_chats_trains_on_the_ids_of_the_models_own_template(
    chat_folder: Folder, tmp_path: Path, template: str
) -> None:
    model = chat_folder(template)
    settings = ["learner.checkpoint_every=100", "log.samples=all"]
    run = Run(tmp_path / "run", *settings, config=make_all(tmp_path / "mine", model), steps=5)
    with running(run):
        check_end(run, run.wait())
    assert run.audit().counts.trained >= 5 * 8 * 4
    check_samples(run, model)
    rows = read_lines(run.paths.samples)
    assert len(rows) == run.audit().counts.trained and {row["step"] for row in rows} == set(range(1, 6))
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts = {tokenizer.decode(ids) for ids in expected_ids(model)}
    assert {row["prompt"] for row in rows} <= texts and rows[0]["record"] == {"answer": 1}
