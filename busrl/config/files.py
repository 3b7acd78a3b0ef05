"""The files that a topology names: model folder, prompt files, reward function, keys of the bus, table of keywords.

Looks at them without torch: sizes, JSON, line by line. What needs a tokenizer or the reward function is in `trial`.
Findings come back as problems; nothing is changed.

- Every broken line of a prompt file or a table of keywords has its own file:line; a missing file is reported at the
  key that names it.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from busrl import keys
from busrl.config import engine_rules, machine, reader
from busrl.config.schema import FOREIGN_ROLES, TINY, Topology
from busrl.config.trial import UNKNOWN, Limit, Trial, limit_of, try_first, try_functions
from busrl.config.values import FUNCTION
from busrl.data import trace
from busrl.data.chat import template_of
from busrl.data.prompts import Scan, scan
from busrl.errors import BadKeys, DataError, Problem
from busrl.scheduling.lengths.rules import Fault, Keywords, check

# -- the table of keywords, `scheduler.keywords` -----


def read_keywords(path: str | Path) -> tuple[Keywords, list[Problem]]:
    """The table of a file without what is wrong in it, and all that is wrong. A problem without a place is the
    file's as a whole."""
    nothing = Keywords({}, {})
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        return nothing, [Problem("", "", f"cannot be read ({reason})", "give the path of a table of keywords (.toml)")]
    try:
        tables = reader.parse_toml(text)
    except ValueError as error:
        problem = reader.syntax_error(path, text, error)[1]
        return nothing, [replace(problem, remedy='lines are "word" = number, and every word stands once')]
    places = reader.positions(text)
    keywords, faults = check(tables)
    return keywords, [_placed(path, places, fault) for fault in faults]


def _placed(path: str | Path, places: dict[reader.KeyPath, int], fault: Fault) -> Problem:
    number = places.get(fault.path, places.get(fault.path[:1], 0))
    return Problem(f"{path}:{number}" if number else str(path), fault.value, fault.rule, fault.remedy)


# -- what the files hold -----


REWARD_KEYS = {"reward.function", "reward.kind"}
CHAT_KEYS = {"data.template", "model.path"}  # nothing is counted while one of these has a problem
TINY_LINE_BYTES = 512  # no line of a tiny task is longer; they are made on first use
DEFAULT_TOKEN_BYTES = 128  # longest text of one token, where the tokenizer cannot be read
TINY_TOKEN_BYTES = 16
TINY_LAYERS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]  # made or not


@dataclass(frozen=True)
class Looked:
    """What the files say: lines and longest line per prompt file, longest token, context length (0 = unknown), and
    the limit on prompts in tokens."""

    train_prompts: int = 0
    validation_prompts: int = 0
    task_bytes: int = TINY_LINE_BYTES
    token_bytes: int = DEFAULT_TOKEN_BYTES
    context: int = 0
    prompt_tokens: int = UNKNOWN  # generation.max_prompt_tokens, "auto" worked out
    prompt_text: str = ""  # how it was counted
    trial: Trial = field(default_factory=Trial)


@dataclass(frozen=True)
class KeyProblem:
    """A problem of the file that `key` names; `place` is empty if it is the key itself that is to blame."""

    key: str
    problem: Problem


def look(topology: Topology, skip: set[str]) -> tuple[Looked, list[KeyProblem]]:
    """Look at every file; keys in `skip` have a problem of their own already."""
    found: list[KeyProblem] = []
    counts: dict[str, tuple[int, int]] = {}
    scans: dict[str, Scan] = {}
    for key, path in (("data.train", topology.data.train), ("validation.data", topology.validation.data)):
        if path and key not in skip:
            counts[key] = prompts(topology, key, path, found, scans)
    if "data.train" in counts and "process" not in skip:
        traces(topology, found)
    if topology.data.template == "chat" and not skip & {"data.template", "model.path", "process"}:
        chat_template(topology, found)
    token_bytes, context = (DEFAULT_TOKEN_BYTES, 0) if "model.path" in skip else model(topology, found)
    asked = topology.reward.kind == "python" and FUNCTION.fullmatch(topology.reward.function)
    tried = reward(topology, found) if asked and not skip & REWARD_KEYS else Trial()
    if not skip & {"learner.loss", "learner.advantage", "learner.metrics", "process"}:
        for key, fault in try_functions(topology):
            remedy = "correct it: no step could be made with it (docs/extending.md)"
            found.append(KeyProblem(key, Problem("", "", f"cannot be used: {fault}", remedy)))
    if topology.bus.endpoint != "ipc" and not skip & {"bus.endpoint", "bus.keys"}:
        bus_keys(topology.bus.keys, found)
    if topology.openai.tools and topology.openai.endpoint == "chat" and "openai.tools" not in skip:
        tools(topology.openai.tools, found)
    if "process" not in skip:
        commands(topology, skip, found)
        vllm_here(topology, found)
    if topology.lora.on and not skip & {"lora.rank", "lora.targets", "model.path"}:
        lora(topology, found)
    if topology.scheduler.keywords and "scheduler.keywords" not in skip:
        problems = read_keywords(topology.scheduler.keywords)[1]
        found.extend(KeyProblem("scheduler.keywords", problem) for problem in problems)
    lines, longest = counts.get("data.train", (0, TINY_LINE_BYTES))
    validation_lines, validation_longest = counts.get("validation.data", (lines, longest))
    unsound = skip & {"data.template", "model.path", "generation.max_prompt_tokens", "generation.max_new_tokens"}
    countable = "data.train" in counts and not unsound and not {one.key for one in found} & CHAT_KEYS
    limit = limit_of(topology, scans, context) if countable else _limit_unseen(topology)
    found.extend(KeyProblem(key, problem) for key, problem in limit.problems)
    looked = Looked(
        lines, validation_lines, max(longest, validation_longest), token_bytes, context, limit.tokens, limit.text,
        tried,
    )
    return looked, found


def _limit_unseen(topology: Topology) -> Limit:
    given = topology.generation.max_prompt_tokens
    return Limit(given if isinstance(given, int) else UNKNOWN)


def lora(topology: Topology, found: list[KeyProblem]) -> None:
    """An adapter needs the package that trains it, and layers of the names that are asked for."""
    if importlib.util.find_spec("peft") is None:
        problem = Problem("", "", "LoRA needs the package peft", "pip install 'busrl[lora]'")
        found.append(KeyProblem("lora.rank", problem))
    if topology.model.path.startswith(TINY):
        known = TINY_LAYERS
    else:
        known = sorted(machine.weight_layers(machine.tensor_shapes(Path(topology.model.path))))
    for name in topology.lora.targets:
        if known and "." not in name and name not in known:
            rule = f"the model has no layer {name!r} that an adapter could be put on"
            found.append(KeyProblem("lora.targets", Problem("", "", rule, f"it has {', '.join(known)}")))


def tools(path: str, found: list[KeyProblem]) -> None:
    """What every chat request names: a JSON list of objects."""
    rule = ""
    try:
        listed = json.loads(Path(path).read_bytes())
        if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
            rule = "not a list of objects, each a tool as the chat endpoint takes it"
    except (OSError, ValueError) as problem:
        rule = f"cannot be read: {problem}"
    if rule:
        remedy = "give a JSON file with a list of tools, or remove it"
        found.append(KeyProblem("openai.tools", Problem("", "", rule, remedy)))


def bus_keys(setting: str, found: list[KeyProblem]) -> None:
    """TCP is opened with keys only: the broker's pair has to be there, and private."""
    try:
        keys.server_pair(keys.directory_of(setting))
    except BadKeys as error:
        rule, _, remedy = str(error).partition("; ")
        found.append(KeyProblem("bus.keys", Problem("", "", f"tcp needs keys: {rule}", remedy)))


def vllm_here(topology: Topology, found: list[KeyProblem]) -> None:
    """An engine that is vLLM needs one of the versions that busrl knows."""
    used = engine_rules.vllm_entries(topology)
    why, remedy = engine_rules.vllm_objection(*engine_rules.vllm_installed()) if used else ("", "")
    if why:
        found.append(KeyProblem(f"process.{used[0]}.engine", Problem("", "", why, remedy)))
    elif (entry := engine_rules.lacks_ascend(topology)) is not None:
        rule = f"vLLM works on an NPU with the package {engine_rules.ASCEND} alone, which this Python lacks"
        problem = Problem("", "", rule, "pip install 'busrl[ascend]': see docs/engines.md")
        found.append(KeyProblem(f"process.{entry}.engine", problem))


def tiny(key: str, path: str, found: list[KeyProblem]) -> int:
    """The prompts of a task that is made on first use: a run's sizes must not depend on whether it is the first one."""
    task = machine.task_of(path)
    if task is None:
        rule = f"expected a path, or one of {', '.join(machine.maker().RECIPES)}"
        found.append(KeyProblem(key, Problem("", "", rule, "these are the quickstart's own tasks")))
        return 0
    return task.train_prompts if key == "data.train" else task.validation_prompts


def prompts(
    topology: Topology, key: str, path: str, found: list[KeyProblem], scans: dict[str, Scan]
) -> tuple[int, int]:
    """Lines and bytes of the longest line of a prompt file; a scan without findings is added to `scans`."""
    if path.startswith(TINY):
        return tiny(key, path, found), TINY_LINE_BYTES
    compares = topology.reward.kind == "exact_match" and not topology.reward.function  # else the reward is to blame
    answer = answer_key(topology) if compares else ""
    try:
        result = scan(path, topology.data.prompt_key, answer)
    except DataError as error:
        rule, _, remedy = str(error).removeprefix(f"{path}: ").rpartition(": ")
        found.append(KeyProblem(key, Problem("", "", rule, remedy)))
        return 0, TINY_LINE_BYTES
    found.extend(KeyProblem(key, problem) for problem in result.problems)
    if not result.problems:
        scans[key] = result
    if result.more:
        rest = ", ".join(f"{number} x {rule}" for rule, number in result.more)
        text = f"and {sum(number for _, number in result.more)} more broken lines ({rest})"
        found.append(KeyProblem(key, Problem(path, "", text, "correct those above first")))
    if result.chats and topology.data.template == "none" and not topology.scripted:
        rule = f"{result.chats} of the {result.count} prompts of {path} are lists of messages"
        found.append(KeyProblem("data.template", Problem("", "", rule, 'set data.template = "chat"')))
    return result.count, result.longest_line


def chat_template(topology: Topology, found: list[KeyProblem]) -> None:
    """Chats need a template that writes them, of the tokenizer in the model folder."""
    path = topology.model.path
    uses_it = any(entry.role == "rollout" and entry.engine != "mock" for entry in topology.process)
    if not uses_it or (not path.startswith(TINY) and template_of(Path(path))):
        return
    rule = f"the tokenizer of {path} has no chat template"
    remedy = 'use a chat model, put a chat_template.jinja into its folder, or set template = "none"'
    found.append(KeyProblem("data.template", Problem("", "", rule, remedy)))


def traces(topology: Topology, found: list[KeyProblem]) -> None:
    """Scripted answers need their lengths, and prompts that arrive need their times."""
    path = topology.data.train
    if not (topology.scripted or topology.data.arrivals) or any(item.key == "data.train" for item in found):
        return
    if path.startswith(TINY):
        rule = "a trace is needed: lines with prompt, answer and lengths"
        remedy = "give a trace file; busrl.data.trace makes one"
        found.append(KeyProblem("data.train", Problem("", "", rule, remedy)))
        return
    try:
        tasks = trace.read(path, topology.data.prompt_key)
    except DataError as error:
        place, rule, remedy = _parted(str(error))
        why = 'engine = "mock"' if topology.scripted else "data.arrivals"
        found.append(KeyProblem("data.train", Problem(place, "", rule, f"{remedy} ({why} needs a trace)")))
        return
    if topology.data.arrivals:
        _arrivals(path, [task.arrival_s for task in tasks], found)


def _parted(text: str) -> tuple[str, str, str]:
    """Place, rule and remedy of a message `file:line: rule; remedy` (or `rule: remedy`)."""
    place, _, rest = text.partition(": ")
    rule, mark, remedy = rest.rpartition("; ")
    return (place, rule, remedy) if mark else (place, *rest.rpartition(": ")[::2])


def _arrivals(path: str, times: list[float | None], found: list[KeyProblem]) -> None:
    late = 0.0
    for number, time in enumerate(times, 1):
        if time is None or time < late:
            rule = "no arrival_s" if time is None else f"arrival_s = {time}, after {late} on the line before"
            problem = Problem(f"{path}:{number}", "", rule, "give every line one, ascending")
            found.append(KeyProblem("data.train", problem))
            return
        late = time


def commands(topology: Topology, skip: set[str], found: list[KeyProblem]) -> None:
    """Programs that are to be started instead of busrl's own: they have to be there."""
    for index, entry in enumerate(topology.process):
        key = f"process.{index}.command"
        mine = entry.command and entry.count and entry.role in FOREIGN_ROLES and key not in skip
        if mine and shutil.which(entry.command[0]) is None:
            rule = f"{entry.command[0]} is not an executable program"
            found.append(KeyProblem(key, Problem("", "", rule, "build or install it; {here} is this file's folder")))


def longest_line(path: str) -> tuple[int, int]:
    """Number, from 1, and bytes of the longest line of a file."""
    with open(path, "rb") as file:
        sizes = ((len(line.removesuffix(b"\n")), number) for number, line in enumerate(file, 1))
        size, number = max(sizes, default=(0, 0))
    return number, size


def answer_key(topology: Topology) -> str:
    """The key of the right answer that the reward uses."""
    return topology.reward.answer_key or topology.data.answer_key


def model(topology: Topology, found: list[KeyProblem]) -> tuple[int, int]:
    """Longest token in bytes and context length of a model folder."""
    path = topology.model.path
    if path.startswith(TINY):
        tiny("model.path", path, found)
        return TINY_TOKEN_BYTES, 0
    folder = Path(path)
    problem = _missing(folder)
    if problem:
        found.append(KeyProblem("model.path", problem))
        return DEFAULT_TOKEN_BYTES, 0
    config = machine.read_json(folder / "config.json")
    if not isinstance(config, dict):
        broken = Problem(str(folder / "config.json"), "", "not a JSON object", "copy it again")
        found.append(KeyProblem("model.path", broken))
        return DEFAULT_TOKEN_BYTES, 0
    if config.get("is_encoder_decoder"):
        rule = f"{config.get('model_type', 'it')} is an encoder-decoder model, and busrl trains decoder-only ones"
        found.append(KeyProblem("model.path", Problem("", "", rule, "give a causal language model")))
    if topology.scripted and machine.vocabulary(folder) is None:
        rule = "it does not say vocab_size and eos_token_id, so scripted answers can have no valid token ids"
        found.append(KeyProblem("model.path", Problem(str(folder / "config.json"), "", rule, "add them")))
    return token_bytes(folder), machine.context_of(config)


def model_folder(path: str) -> str:
    """The model folder that a path means: a checkpoint of a run (global_step_N) holds it as `model`."""
    inner = Path(path) / "model"
    is_checkpoint = (inner / "config.json").is_file() and not (Path(path) / "config.json").exists()
    return str(inner) if path and not path.startswith(TINY) and is_checkpoint else path


def _missing(folder: Path) -> Problem | None:
    if not folder.is_dir():
        remedy = "give a folder with config.json, a tokenizer and weights; a model of the hub is downloaded first"
        return Problem("", "", "no such folder", remedy)
    if not (folder / "config.json").is_file():
        return Problem("", "", "no config.json in this folder", "give a Hugging Face model folder")
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        return Problem("", "", "no weights (*.safetensors) in this folder", "the download may not have finished")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        return Problem("", "", "no tokenizer (tokenizer.json) in this folder", "save the tokenizer beside the model")
    return None


def token_bytes(folder: Path) -> int:
    """Bytes of the longest token of tokenizer.json (at least 4), a safe guess where it cannot be read."""
    data = machine.read_config(folder, "tokenizer.json")
    section = data.get("model")
    vocabulary = section.get("vocab") if isinstance(section, dict) else None
    if isinstance(vocabulary, list):  # unigram models: pairs of piece and score
        vocabulary = [item[0] for item in vocabulary if isinstance(item, list) and item]
    if not vocabulary or not isinstance(vocabulary, (dict, list)):
        return DEFAULT_TOKEN_BYTES
    extra = [str(item.get("content", "")) for item in data.get("added_tokens") or [] if isinstance(item, dict)]
    return max(4, max(len(str(token).encode()) for token in [*vocabulary, *extra]))


def reward(topology: Topology, found: list[KeyProblem]) -> Trial:
    """Load the reward and try it with the first record, where it can do no harm."""
    tried = try_first(topology)
    rule, remedy = "", "correct it: every sample of the run would be lost"
    if tried.not_loaded:
        named = f"reward.function = {topology.reward.function!r}: "
        rule = f"cannot be used: {tried.not_loaded.removeprefix(named)}"
        remedy = "a module has to be importable from the current directory, a file is relative to the topology"
    elif failed := tried.failed:
        rule = f"fails for {failed.what} to the first prompt: {failed.in_words()}"
    if rule:
        found.append(KeyProblem("reward.function", Problem("", "", rule, remedy)))
    return tried
