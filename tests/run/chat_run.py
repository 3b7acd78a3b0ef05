"""A run whose prompts are chats and texts, and what its write-ahead log has to hold: shared by tests of all engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from chat_folders import END_IDS
from harness import Run

from busrl.ledger.wal import Record, frames

SYSTEM = "Be short."
JUDGE = """
import random


def score(record, completion, token_ids):
    return random.random()  # some engines say the same to every member of a group, and a flat group trains nothing
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
    prompts: list[Any] = [f"What is {n}+{n}?" for n in range(12)]
    for n in range(12):
        turns = (("user", f"{n}?"), ("assistant", "yes"), ("user", "and then?"))
        prompts.append([{"role": role, "content": content} for role, content in turns])
    return prompts


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
    pairs = set()
    for prompt in prompts():
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chat = [{"role": "system", "content": system}, *chat] if system else chat
        pairs.add(tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)))
    return pairs


def check_samples(run: Run, model: Path, system: str = SYSTEM) -> None:
    """Prompts are those of the template; answers end by every end id of generation_config, and by nothing else."""
    samples = trained(run)
    assert len(samples) >= 4 * 8 * 4
    ids = {tuple(np.frombuffer(sample.prompt_ids, np.int32).tolist()) for sample in samples}
    assert ids <= expected_ids(model, system) and len(ids) >= 8
    ends = set()
    for sample in samples:
        tokens = np.frombuffer(sample.token_ids, np.int32).tolist()
        assert not END_IDS & set(tokens[:-1])
        assert (tokens[-1] in END_IDS) == (sample.finish == 1) and (sample.finish == 1 or len(tokens) == 24)
        ends |= {tokens[-1]} & END_IDS
    assert ends == END_IDS
