"""`busrl quickstart`: the run of configs/quickstart.toml from the package, in any directory; or a copy to begin from.

Talks to `launch`, to which it is a topology like any other. Knows nothing of how the tiny model is made, which
happens on first use.

- A copy overwrites no file.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from busrl.cli import run
from busrl.errors import UserError
from busrl.pages import CONFIGS, opened

TOPOLOGY = "quickstart.toml"
HEAD = """\
# Learn to sort digits, on two CPU cores, in about a minute: `busrl launch quickstart.toml`. Change it to what you want:
# `busrl check quickstart.toml` says what follows from it. Every other key has its default: see configs/reference.toml.

"""
REWARD_TABLE = re.compile(r"^\[reward\]\n.*?\n(?=\n\[)", re.MULTILINE | re.DOTALL)
FUNCTION = '[reward]\nfunction = "reward.py:score"   # beside this file\n'
REWARD = '''\
"""Reward of an answer: change it to what you want."""

import re


def score(record, completion, token_ids):
    """1 where the digits between the bar and the end are the record's answer. `record`: the line of the data."""
    answer = re.search(r"\\|([0-9]+)$", completion)
    return float(answer is not None and answer[1] == record["answer"])
'''
README = """\
# A run to begin from

    busrl check quickstart.toml                        # tries the first prompt and the reward, or names every mistake
    busrl launch quickstart.toml --run-dir runs/first  # the same command again goes on with what is there
    busrl monitor runs/first                           # in another terminal
    busrl export runs/first --out my-model             # the trained model as a Hugging Face folder

Then change, one after the other:

- `model.path`: the folder of a Hugging Face model, and with it `learner.lr` (`busrl check` names the usual one) and
  `model.device`;
- `data.train` and `validation.data`: a JSONL file each, one `{"prompt": "...", "answer": "..."}` per line;
- `reward.py`: what an answer is worth;
- `generation.max_new_tokens` and `generation.max_prompt_tokens`.

From a model folder and a data set of your own, `busrl init own --model DIR --data FILE` writes such a folder too.
Every step is explained in docs/your-run.md, every key in configs/reference.toml.
"""


def quickstart(options: argparse.Namespace) -> int:
    """Start the run, or write the copy; the exit code."""
    if options.copy is not None:
        return _copy(options.copy)
    options.topology = CONFIGS / TOPOLOGY
    code = run.launch(options)
    if not (code or options.dry_run):
        print("next: busrl quickstart --copy my-run writes topology, reward and README of a run of your own")
    return code


def _copy(folder: Path) -> int:
    files = {TOPOLOGY: _topology(), "reward.py": REWARD, "README.md": README}
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: it is there, and no folder; give another one")
    if there := [name for name in files if (folder / name).exists()]:
        raise UserError(f"{folder} holds {', '.join(there)} already: nothing is overwritten; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(opened(text), encoding="utf-8")
    print(f"{folder}: {', '.join(files)}\nnext: busrl launch {folder / TOPOLOGY}")
    return 0


def _topology() -> str:
    """The topology of the package, its reward a function beside it."""
    text = (CONFIGS / TOPOLOGY).read_text(encoding="utf-8")
    return HEAD + REWARD_TABLE.sub(lambda _: FUNCTION, text[text.index("[run]") :])
