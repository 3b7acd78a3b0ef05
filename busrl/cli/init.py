"""`busrl init CASE --model DIR`: a folder with prompts, a reward and a topology, ready for `busrl check` and `launch`.

Talks to the converter of sources (`busrl.data.sources`), in a process of its own, and to the loader, which checks the
topology that was written. Knows nothing of runs.

- No file is overwritten. If one of the files cannot be made, none stays.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from busrl.data.chat import template_of
from busrl.data.pretrained import context_of, model_facts, read_config
from busrl.data.sources import Event, Job, Source, format_of
from busrl.errors import UserError
from busrl.pages import opened
from busrl.preflight import learning_rates
from busrl.preflight.load import load
from busrl.rewards.kinds import NUMBER
from busrl.system.imports import interpreter

TIMEOUT_S = 900.0
GENERATED, HELD_OUT = 4_000, 200  # prompts
ASK = "Think step by step, and end with the answer as a number."
COLUMNS = ("question", "prompt", "problem")  # of a file with --data, the first that it has
# The code below becomes the user's, so it stands alone. It compares whole numbers or words at the end: neither "12" for
# 2 nor a list of all numbers wins. A record without a right answer is an error, so that nothing is right by accident.
NUMBERS = f'''
import re

NUMBER = re.compile(
    r"{NUMBER.pattern}"
)


def last_number(text):
    found = NUMBER.findall(str(text))
    return float(found[-1].replace(",", "").replace("\\u2212", "-")) if found else None


def right_answer(record):
    number = last_number(record["answer"])
    if number is None:
        raise ValueError(f"answer = {{record['answer']!r}} holds no number to compare with")
    return number
'''
NUMBER_REWARD = f'''\
"""1 where the last number of an answer is the right one, which is the last number of the record's answer."""
{NUMBERS}

def score(record, completion, token_ids):
    return {{"right": float(last_number(completion) == right_answer(record))}}
'''
TEXT_REWARD = '''\
"""What an answer is worth: change it to what you want. Here 1 where it ends with the record's answer, in any case."""


def words(text):
    return [word.lstrip('"([*').rstrip('.,;:!?")]*') or word for word in str(text).lower().split()]


def right_answer(record):
    right = words(record["answer"])
    if not right:
        raise ValueError(f"answer = {record['answer']!r} holds no word to compare with")
    return right


def score(record, completion, token_ids):
    right = right_answer(record)
    return {"right": float(words(completion)[-len(right) :] == right)}
'''
AGENT = f'''\
"""An episode: as many calls of the model as it takes. What it returns is the reward; docs/agents.md tells of tools."""
{NUMBERS}

async def episode(task, llm):
    """`task`: the line of the data. A reply ends with its answer; a second try is worth half as much."""
    right = right_answer(task)
    messages = [{{"role": "user", "content": task["prompt"]}}]
    for worth in (1.0, 0.5):
        reply = await llm.chat(messages)
        if last_number(reply["content"] or "") == right:
            return worth
        messages += [reply, {{"role": "user", "content": "That is not right. Try once more."}}]
    return 0.0
'''
TOPOLOGY = """\
# busrl check {name}.toml, then busrl launch {name}.toml --run-dir runs/{name}
[run]
name = "{name}"
max_steps = 200
[model]
path = {model}{size}
[data]
train = "train.jsonl"
template = "{template}"{system}
[groups]
size = 8                # answers to each prompt, compared with each other
[generation]
max_new_tokens = {tokens}
[learner]
lr = {lr:.0e}
checkpoint_every = 20
[learner.trigger]
n_min = 32              # prompts per optimiser step
{case}[validation]
data = "held-out.jsonl"
every = 20
samples = {samples}
"""
REWARD = """\
[reward]
function = "reward.py:score"
"""
EPISODES = """\
[[process]]
role = "agent"          # plays each sample with a function of yours, which also says what it is worth
function = "agent.py:episode"
[agents]
episodes = 64           # that are played at the same time
context = {context}          # tokens that one call may read and draw
"""
DEVICES = """\
[[process]]
role = "rollout"
engine = "{engine}"         # "vllm" where it is installed: faster
count = {rollouts}
devices = [{generate}]
[[process]]
role = "learner"
ranks = {ranks}               # that share one model; more of them where it does not fit
devices = [{train}]
"""
ELSEWHERE = """\
[bus]
endpoint = "{endpoint}"  # of this host, as the others see it; three ports from there
# `busrl keys init` once, `busrl keys add HOST` for each; there: busrl host {endpoint} --keys FILE
[[process]]
role = "rollout"        # generates there; model, reward and busrl have to be there under the same paths
count = 1               # on each of them; with devices = ["0", ...] an engine per GPU
hosts = [{hosts}]
[[process]]
role = "rollout"        # and here
"""


MOST_GPUS = 64


def init(options: argparse.Namespace) -> int:
    folder = Path(options.out or options.name)
    code = ("agent.py", opened(AGENT)) if options.name == "agents" else ("reward.py", NUMBER_REWARD)
    if options.name in ("own", "chat"):
        code = "reward.py", TEXT_REWARD
    names = ("train.jsonl", "held-out.jsonl", code[0], f"{options.name}.toml")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: it is there, and no folder; give another --out")
    if there := [name for name in names if (folder / name).exists()]:
        raise UserError(f"{folder} holds {', '.join(there)} already: nothing is overwritten; give another --out")
    model = options.model.expanduser().absolute()
    if not (model / "config.json").is_file():
        raise UserError(f"--model {options.model}: no model folder (config.json); nothing is downloaded")
    _require_case(options, model)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lines = _lines(options.data, folder / "all.jsonl", "" if code[1] is TEXT_REWARD else f"\n{ASK}")
        _require_comparable(lines, code[1], options.data)
        step = max(10, len(lines) // HELD_OUT)
        held_out = lines[::step][:HELD_OUT]
        train = [line for at, line in enumerate(lines) if at % step or at // step >= HELD_OUT]
        for name, text in zip(names, ("".join(train), "".join(held_out), code[1], _topology(options, len(held_out)))):
            (folder / name).write_text(text, encoding="utf-8")
        load(folder / names[-1])
    except BaseException:
        for name in (*names, "all.jsonl"):
            (folder / name).unlink(missing_ok=True)
        raise
    (folder / "all.jsonl").unlink()
    print(f"{folder}: {len(train)} prompts, {len(held_out)} held out, {', '.join(names[2:])}")
    topology = folder / names[-1]
    print(f"next: busrl check {topology}, then busrl launch {topology} --run-dir runs/{options.name}")
    return 0


def _require_case(options: argparse.Namespace, model: Path) -> None:
    """UserError if the options or the model lack what the case needs."""
    if options.name in ("own", "chat") and options.data is None:
        columns = "question (or prompt, problem) and answer"
        raise UserError(f"init {options.name} needs --data FILE: JSONL or Parquet with {columns}")
    if options.name in ("chat", "agents") and not template_of(model):
        remedy = "it has none; take the chat version, or `busrl init own`"
        raise UserError(f"--model {options.model}: init {options.name} needs a chat template, and {remedy}")
    if options.name == "hosts" and not options.host:
        raise UserError("init hosts needs --host NAME for each host that is to generate, as `busrl keys add` names it")
    if options.name == "gpus" and options.gpus < 2:
        raise UserError(f"--gpus {options.gpus}: init gpus shares 2 or more; for one, or none, take another case")
    if options.name == "gpus" and options.gpus > MOST_GPUS:
        raise UserError(f"--gpus {options.gpus}: init gpus shares those of one machine, {MOST_GPUS} at most; for those "
                        "of other hosts there is `busrl init hosts`")


def _topology(options: argparse.Namespace, samples: int) -> str:
    model = options.model.expanduser().absolute()
    facts, context = model_facts(model), context_of(read_config(model))
    count, tokens = facts.parameters, min(512, context // 2) if context else 512
    return TOPOLOGY.format(
        name=options.name, model=msgspec.json.encode(str(model)).decode(), samples=samples,
        size=f"  # {count / 1e9:.2g} billion parameters" if count else "",
        template="chat" if template_of(model) else "none", lr=learning_rates.usual_rate(count or 10**9, False),
        tokens=tokens,
        system='\nsystem = "You are a helpful assistant."  # "" for none' if options.name == "chat" else "",
        case=_case(options, min(4096, context) if context else 4096),
    )


def _case(options: argparse.Namespace, context: int) -> str:
    """The tables of a case: its reward, and its processes besides those of every run."""
    if options.name == "agents":
        return EPISODES.format(context=context)
    if options.name == "gpus":
        train = max(1, options.gpus // 4)
        numbers = [f'"{n}"' for n in range(options.gpus)]
        return REWARD + DEVICES.format(
            engine="vllm" if find_spec("vllm") else "torch", rollouts=options.gpus - train, ranks=train,
            generate=", ".join(numbers[:-train]), train=", ".join(numbers[-train:]),
        )
    if options.name == "hosts":
        names = ", ".join(msgspec.json.encode(host).decode() for host in options.host)
        return REWARD + ELSEWHERE.format(
            endpoint=options.endpoint or f"tcp://{own_address()}:5600", hosts=names
        )
    return REWARD


def own_address() -> str:
    """The number by which others reach this host: that of the way out of its network; localhost's where there is none.
    Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out, suppress(OSError):
        way_out.connect(("192.0.2.1", 9))  # an address that nobody has (RFC 5737)
        return str(way_out.getsockname()[0])
    return "127.0.0.1"


def _lines(data: Path | None, out: Path, ask: str) -> list[str]:
    """Make the lines of prompts, from the user's file or from questions that reasoning-gym generates. Of several
    sources the first that has no problems is taken."""
    problems: list[str] = []
    for source in _sources(data, ask):
        job = Job(
            sources=[source], out=str(out), seed=0, model="", prompt_key="prompt", answer_key="answer", answers=True,
            template="none", system="", tools_key="", template_arguments={}, base_dir=".",
        )
        event = _converted(job)
        if not event.problems:
            for line in _left_out(event):
                print(line)
            return out.read_text(encoding="utf-8").splitlines(keepends=True)
        problems = problems or [f"{place}: {rule}; {remedy}" for _, place, _, rule, remedy in event.problems[:1]]
    remedy = "" if data else ", or give a file of questions and answers with --data"
    raise UserError(f"{problems[0]}{remedy}")


def _left_out(event: Event) -> Iterator[str]:
    """A line for each source of which rows were left out, with the reasons."""
    for source in event.made:
        if source.left_out:
            reasons = ", ".join(f"{count} {reason}" for reason, count in source.left_out.items())
            yield f"{source.name}: {source.count} of {source.read} rows are prompts; left out: {reasons}"


def _require_comparable(lines: list[str], code: str, data: Path | None) -> None:
    """UserError if the reward cannot compare with one of the answers: each of its samples would be lost."""
    module: dict[str, Any] = {}
    exec(code, module)
    faults = []
    for line in lines:
        try:
            module["right_answer"](json.loads(line))
        except ValueError as fault:
            faults.append(str(fault))
    if faults:
        remedy = "correct or remove them" + ("" if code is TEXT_REWARD else ", or take `busrl init own`")
        raise UserError(f"{data}: {len(faults)} of {len(lines)} rows cannot be judged: {faults[0]}; {remedy}")


def _sources(data: Path | None, ask: str) -> Iterator[Source]:
    for column in COLUMNS if data else ("prompt",):
        path = str(data.expanduser().absolute()) if data else ""
        yield Source(
            name=path or "gsm_symbolic", path=path, split="train", function="", prompt_key=column,
            format=format_of(path) if data else "reasoning_gym", tasks={} if data else {"gsm_symbolic": 1.0},
            task_options={}, size=0 if data else GENERATED, prompt_text=f"{{{column}}}{ask}", answer_key="answer",
            tag="gsm8k", where="", filter="", dedupe=True, min_prompt_tokens=0, max_prompt_tokens=0, too_long="drop",
        )


def _converted(job: Job) -> Event:
    """Run the converter of sources; its last event."""
    command = [*interpreter(), "busrl.data.sources"]
    try:
        done = subprocess.run(command, input=msgspec.json.encode(job) + b"\n", capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        text = f"making the prompts took longer than {TIMEOUT_S:g} s; give a smaller file with --data"
        raise UserError(text) from None
    last = done.stdout.splitlines()[-1:]
    event = msgspec.json.decode(last[0], type=Event) if last and not done.returncode else Event()
    if not (event.made or event.problems):
        last_error = "".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
        raise UserError(f"making the prompts failed: {last_error}; see whether python -m busrl.data.sources starts")
    return event
