"""`busrl init NAME --model DIR`: a folder with prompts, a reward and a topology, ready for `busrl check` and `launch`.

Talks to the converter of sources (`busrl.data.convert`), in a process of its own, and to the loader, which tries what
was written. Knows nothing of runs.

- Nothing that is there is overwritten; what could not be made leaves no half of a folder's files behind.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from busrl.config import load
from busrl.config.pretrained import context_of, model_facts, read_config
from busrl.config.rates import usual_rate
from busrl.data.chat import template_of
from busrl.data.convert import Event, Job, Source
from busrl.data.sources import format_of
from busrl.errors import UserError

TIMEOUT_S = 900.0
MADE, HELD_OUT = 4_000, 200  # prompts
ASK = "Think step by step, and end with the answer as a number."
COLUMNS = ("question", "prompt", "problem")  # of a file with --data, the first that it has
REWARD = '''\
"""1 where the last number of an answer is the right one, which is the last number of the record's answer."""

import re

NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\\.[0-9]+)?")


def last_number(text):
    found = NUMBER.findall(str(text))
    return float(found[-1].replace(",", "")) if found else None


def score(record, completion, token_ids):
    given = last_number(completion)
    return {"right": float(given is not None and given == last_number(record["answer"]))}
'''
TOPOLOGY = """\
# busrl check {name}.toml, then busrl launch {name}.toml --run-dir runs/{name}
[run]
name = "{name}"
max_steps = 200
[model]
path = {model}
[data]
train = "train.jsonl"
template = "{template}"
[groups]
size = 8                # answers to each prompt, compared with each other
[generation]
max_new_tokens = {tokens}
[learner]
lr = {lr:.0e}
checkpoint_every = 20
[learner.trigger]
n_min = 32              # prompts per optimiser step
[reward]
function = "reward.py:score"
[validation]
data = "held-out.jsonl"
every = 20
samples = {samples}
"""


def init(options: argparse.Namespace) -> int:
    """Write the folder; UserError where something is missing or in the way."""
    folder = Path(options.out or options.name)
    names = ("train.jsonl", "held-out.jsonl", "reward.py", f"{options.name}.toml")
    if there := [name for name in names if (folder / name).exists()]:
        raise UserError(f"{folder} holds {', '.join(there)} already: nothing is overwritten; give another --out")
    model = options.model.expanduser().absolute()
    if not (model / "config.json").is_file():
        raise UserError(f"--model {options.model}: no model folder (config.json); nothing is downloaded")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lines = _lines(options.data, folder / "all.jsonl")
        step = max(10, len(lines) // HELD_OUT)
        held_out = lines[::step][:HELD_OUT]
        train = [line for at, line in enumerate(lines) if at % step or at // step >= HELD_OUT]
        for name, text in zip(names, ("".join(train), "".join(held_out), REWARD, _topology(options, len(held_out)))):
            (folder / name).write_text(text, encoding="utf-8")
        load(folder / names[-1])
    except BaseException:
        for name in (*names, "all.jsonl"):
            (folder / name).unlink(missing_ok=True)
        raise
    (folder / "all.jsonl").unlink()
    print(f"{folder}: {len(train)} prompts, {len(held_out)} held out, {', '.join(names[2:])}")
    made = folder / names[-1]
    print(f"next: busrl check {made}, then busrl launch {made} --run-dir runs/{options.name}")
    return 0


def _topology(options: argparse.Namespace, samples: int) -> str:
    model = options.model.expanduser().absolute()
    facts, context = model_facts(model), context_of(read_config(model))
    return TOPOLOGY.format(
        name=options.name, model=msgspec.json.encode(str(model)).decode(), samples=samples,
        template="chat" if template_of(model) else "none", lr=usual_rate(facts.parameters or 10**9, False),
        tokens=min(512, context // 2) if context else 512,
    )


def _lines(data: Path | None, out: Path) -> list[str]:
    """The lines of prompts: of the user's file, or questions that reasoning-gym makes up."""
    problems: list[str] = []
    for source in _sources(data):
        job = Job(
            sources=[source], out=str(out), seed=0, model="", prompt_key="prompt", answer_key="answer", answers=True,
            template="none", system="", tools_key="", template_arguments={},
        )
        event = _converted(job)
        if not event.problems:
            return out.read_text(encoding="utf-8").splitlines(keepends=True)
        problems = problems or [f"{place}: {rule}; {remedy}" for _, place, _, rule, remedy in event.problems[:1]]
    remedy = "" if data else ", or give a file of questions and answers with --data"
    raise UserError(f"{problems[0]}{remedy}")


def _sources(data: Path | None) -> Iterator[Source]:
    """What is tried, in this order."""
    for column in COLUMNS if data else ("prompt",):
        path = str(data.expanduser().absolute()) if data else ""
        yield Source(
            name=path or "gsm_symbolic", path=path, split="train", function="", prompt_key=column,
            format=format_of(path) if data else "reasoning_gym", tasks={} if data else {"gsm_symbolic": 1.0},
            task_options={}, size=0 if data else MADE, prompt_text=f"{{{column}}}\n{ASK}", answer_key="answer",
            tag="gsm8k", where="", filter="", dedupe=True, min_prompt_tokens=0, max_prompt_tokens=0, too_long="drop",
        )


def _converted(job: Job) -> Event:
    command = [sys.executable, "-m", "busrl.data.convert"]
    try:
        done = subprocess.run(command, input=msgspec.json.encode(job) + b"\n", capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        text = f"making the prompts took longer than {TIMEOUT_S:g} s; give a smaller file with --data"
        raise UserError(text) from None
    last = done.stdout.splitlines()[-1:]
    event = msgspec.json.decode(last[0], type=Event) if last and not done.returncode else Event()
    if not (event.made or event.problems):
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"making the prompts failed: {''.join(said)}; see whether {' '.join(command)} starts")
    return event
