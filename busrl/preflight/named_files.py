"""Files that a topology names here: model folder, prompt files, reward function, keys, programs and packages.

Looks at files without torch: sizes, JSON, line by line. What needs a tokenizer or the reward function is in `trial`.
Findings come back as problems; nothing is changed.

- Every broken line of a prompt file or a table of keywords has its own file:line; a missing file is reported at the
  key that names it.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from busrl import capabilities, keys
from busrl.algorithms import selection
from busrl.data import pretrained, trace
from busrl.data.chat import template_of
from busrl.data.prompts import Scan, scan
from busrl.data.sources import BESIDE, PARQUET
from busrl.engines import supported
from busrl.errors import BadKeys, DataError, Problem
from busrl.preflight import engine_rules
from busrl.preflight.findings import Finding
from busrl.preflight.prompt_tokens import UNKNOWN, Limit, limit_of
from busrl.preflight.trial import TRIED, Trial, try_first, try_functions, try_imports, try_parts
from busrl.states import FOREIGN_ROLES, TINY
from busrl.system.device import expected
from busrl.system.imports import is_installed
from busrl.topology import reader
from busrl.topology.declare import FUNCTION
from busrl.topology.plugins import SCRIPTED
from busrl.topology.schema import ATROPOS, EXTRACTING, SERVE, SINKS, Topology
from busrl.topology.sizes import vllm_entries

# -- what the files hold -----

TINY_LINE_BYTES = 512  # no line of a tiny task is longer; they are made on first use
TINY_TOKEN_BYTES = 16
TINY_LAYERS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]  # made or not


@dataclass(frozen=True)
class FileFacts:
    """Facts from the files that a topology names."""

    train_prompts: int
    validation_prompts: int
    set_prompts: tuple[int, ...]  # of each [[validation.set]]
    task_bytes: int  # of the longest line
    token_bytes: int  # of the longest token
    context: int  # 0 = unknown
    prompt_tokens: int  # generation.max_prompt_tokens, "auto" worked out
    prompt_text: str  # how it was counted
    trial: Trial


def inspect(topology: Topology, skip: set[str]) -> tuple[FileFacts, list[Finding]]:
    """Read every file that is named; keys in `skip` have a problem of their own already."""
    inspection = _Inspection(topology, skip)
    return inspection.facts(), inspection.found


class _Inspection:
    """Looks at the files of one topology; `found` grows."""

    def __init__(self, topology: Topology, skip: set[str]) -> None:
        self.t, self.skip = topology, skip
        self.found: list[Finding] = []
        self.scans: dict[str, Scan] = {}  # of the prompt files without a problem

    def facts(self) -> FileFacts:
        t = self.t
        lines, longest = self._prompts("data.train", t.data.train) or (0, TINY_LINE_BYTES)
        validation = self._prompts("validation.data", t.validation.data) or (lines, longest)
        sets = [self._set(index) for index in range(len(t.validation.set))]
        if self._sound("data.train", "process") and t.data.train:
            self._trace()
        token_bytes, context = self._model() if self._sound("model.path") else (pretrained.DEFAULT_TOKEN_BYTES, 0)
        if any(one.keys == ("model.path",) for one in self.found):
            self.skip = self.skip | {"model.path"}  # what follows from it is not told beside it
        if t.data.template == "chat" and self._sound("data.template", "model.path", "process"):
            self._chat_template()
        tried = self._reward()
        self._functions()
        self._bus_keys()
        self._tools()
        self._programs()
        if t.model.reference and self._sound("model.reference"):
            remedy = "give an earlier version of the model, or none"
            self._same_tokens("model.reference", t.model.reference, remedy, padded=False)
        if t.model.teacher and self._sound("model.teacher"):
            remedy = "give a model of the same family, whose tokenizer is the same"
            self._same_tokens("model.teacher", t.model.teacher, remedy, padded=True)
        if t.learner.start_from and self._sound("learner.start_from", "model.path", "lora.rank"):
            self._start()
        if t.lora.on and self._sound("lora.rank", "lora.targets", "model.path"):
            self._lora()
        if t.learner.train_layers and self._sound("learner.train_layers", "model.path"):
            self._trained_layers()
        if self._sound("process", "learner.memory.compile", "model.path"):
            self._layers_in_place()
        if t.learner.memory.compile and self._sound("learner.memory.compile", "model.device", "process"):
            self._compiler()
        if t.scheduler.keywords and self._sound("scheduler.keywords"):
            for problems_of in capabilities.plugs("keyword_problems"):
                for problem in problems_of(t.scheduler.keywords):
                    self._add_problem("scheduler.keywords", problem)
        limit = self._limit(context)
        return FileFacts(
            lines, validation[0], tuple(count for count, _ in sets),
            max(longest, validation[1], *(size for _, size in sets)), token_bytes, context, limit.tokens, limit.text,
            tried,
        )

    def _sound(self, *keys: str) -> bool:
        return self.skip.isdisjoint(keys)

    def _add(self, key: str, rule: str, remedy: str) -> None:
        self.found.append(Finding((key,), rule, remedy))

    def _add_problem(self, key: str, problem: Problem) -> None:
        """Report a problem in the file that `key` names."""
        self.found.append(Finding((key,), problem.rule, problem.remedy, value=problem.value, place=problem.place))

    # -- prompts -----

    def _prompts(self, key: str, path: str) -> tuple[int, int] | None:
        """Lines and bytes of the longest line of a prompt file; None where none is named."""
        if not path or not self._sound(key):
            return None
        if path.startswith(TINY):
            return self._tiny(key, path), TINY_LINE_BYTES
        if path.endswith(PARQUET) or Path(path).is_dir():
            what = "a folder" if Path(path).is_dir() else "a Parquet file"
            remedy = f"write [[data.source]] with path = {reader.show(path)} in the place of train"
            self._add(key, f"{what} is no file of lines", remedy)
            return 0, TINY_LINE_BYTES
        try:
            result = scan(path, self.t.data.prompt_key, answer_key(self.t) if compares(self.t) else "")
        except DataError as error:
            rule, _, remedy = str(error).removeprefix(f"{path}: ").rpartition(": ")
            self._add(key, rule, pretrained.of_hub(self.t.source, path, pretrained.DATA_SET) or remedy)
            return 0, TINY_LINE_BYTES
        if result.absent:
            self.found += _absent(result, key)
            return 0, TINY_LINE_BYTES
        for problem in result.problems:
            self._add_problem(key, problem)
        if not result.problems:
            self.scans[key] = result
        if result.more:
            rest = ", ".join(f"{number} x {rule}" for rule, number in result.more)
            text = f"and {sum(number for _, number in result.more)} more broken lines ({rest})"
            self._add_problem(key, Problem(path, "", text, "correct those above first"))
        if result.chats and self.t.data.template == "none" and not self.t.scripted:
            rule = f"{result.chats} of the {result.count} prompts of {path} are lists of messages"
            self._add("data.template", rule, 'set data.template = "chat"')
        return result.count, result.longest_line

    def _set(self, index: int) -> tuple[int, int]:
        """Read the prompts of a set; what has a problem counts as a short file."""
        found = None
        if self._sound("validation.set"):
            found = self._prompts(f"validation.set.{index}.data", self.t.validation.set[index].data)
        return found or (0, TINY_LINE_BYTES)

    def _tiny(self, key: str, path: str) -> int:
        """Prompts of a task that is made on first use: a run's sizes must not depend on whether it is the first one."""
        tasks = pretrained.maker().RECIPES
        if path not in tasks:
            self._add(key, f"expected a path, or one of {', '.join(tasks)}", "these are the quickstart's own tasks")
            return 0
        return int(tasks[path].train_prompts if key == "data.train" else tasks[path].validation_prompts)

    def _trace(self) -> None:
        """Scripted answers need their lengths, and prompts that arrive need their times."""
        path = self.t.data.train
        if not (self.t.scripted or self.t.data.arrivals) or any(one.keys == ("data.train",) for one in self.found):
            return
        if path.startswith(TINY):
            rule = "a trace is needed: lines with prompt, answer and lengths"
            self._add("data.train", rule, "give a trace file; busrl.data.trace makes one")
            return
        try:
            times = [task.arrival_s for task in trace.read(path, self.t.data.prompt_key)]
        except DataError as error:  # "file:line: rule; remedy", or "rule: remedy" after the place
            place, _, rest = str(error).partition(": ")
            rule, _, remedy = rest.rpartition("; " if "; " in rest else ": ")
            why = 'engine = "mock"' if self.t.scripted else "data.arrivals"
            self._add_problem("data.train", Problem(place, "", rule, f"{remedy} ({why} needs a trace)"))
            return
        late = 0.0
        for number, time in enumerate(times if self.t.data.arrivals else [], 1):
            if time is None or time < late:
                rule = "no arrival_s" if time is None else f"arrival_s = {time}, after {late} on the line before"
                self._add_problem("data.train", Problem(f"{path}:{number}", "", rule, "give every line one, ascending"))
                return
            late = time

    def _chat_template(self) -> None:
        """Chats need a template that writes them, of the tokenizer in the model folder."""
        path = self.t.model.path
        uses_it = any(entry.role == "rollout" and entry.engine != SCRIPTED for entry in self.t.process)
        if uses_it and (path.startswith(TINY) or not template_of(Path(path))):
            remedy = 'use a chat model, put a chat_template.jinja into its folder, or set template = "none"'
            self._add("data.template", f"the tokenizer of {path} has no chat template", remedy)

    def _limit(self, context: int) -> Limit:
        keys = ("data.train", "data.template", "model.path")
        sound = self._sound(*keys, "generation.max_prompt_tokens", "generation.max_new_tokens")
        if sound and self.t.data.train and not any(one.keys[0] in keys[1:] for one in self.found):
            limit = limit_of(self.t, self.scans, context)
            self.found += limit.findings
            return limit
        given = self.t.generation.max_prompt_tokens
        return Limit(given if isinstance(given, int) else UNKNOWN)

    # -- the model -----

    def _model(self) -> tuple[int, int]:
        path = self.t.model.path
        if path.startswith(TINY):
            self._tiny("model.path", path)
            return TINY_TOKEN_BYTES, 0
        folder = Path(path)
        if missing := self._missing(folder):
            self._add("model.path", *missing)
            return pretrained.DEFAULT_TOKEN_BYTES, 0
        config, place = pretrained.read_json(folder / "config.json"), str(folder / "config.json")
        if not isinstance(config, dict):
            self._add_problem("model.path", Problem(place, "", "not a JSON object", "copy it again"))
            return pretrained.DEFAULT_TOKEN_BYTES, 0
        if config.get("is_encoder_decoder"):
            rule = f"{config.get('model_type', 'it')} is an encoder-decoder model, and busrl trains decoder-only ones"
            self._add("model.path", rule, "give a causal language model")
            return pretrained.token_bytes(folder), pretrained.context_of(config)
        if wrong := pretrained.kind_fault(folder):
            self._add_problem("model.path", Problem(place, "", *wrong))
            return pretrained.token_bytes(folder), pretrained.context_of(config)
        self._whole("model.path", folder)
        if fault := pretrained.token_fault(folder):
            remedy = "save the tokenizer of this model there; with a new tokenizer resize the model's embeddings first"
            self._add("model.path", fault, remedy)
        if self.t.scripted and pretrained.vocabulary(folder) is None:
            rule = "it does not say vocab_size and eos_token_id, so scripted answers can have no valid token ids"
            self._add_problem("model.path", Problem(place, "", rule, "add them"))
        return pretrained.token_bytes(folder), pretrained.context_of(config)

    def _missing(self, folder: Path) -> tuple[str, str] | None:
        found = _missing(folder)
        return (found[0], pretrained.of_hub(self.t.source, str(folder)) or found[1]) if found else None

    def _whole(self, key: str, folder: Path) -> None:
        """Weights that were cut, or that are another model's, are refused before anybody loads them."""
        if fault := pretrained.weight_fault(folder):
            self._add_problem(key, Problem(fault[0], "", *fault[1:]))

    def _same_tokens(self, key: str, path: str, remedy: str, padded: bool) -> None:
        """Another model that gives probabilities must do so of the same tokens. `padded`: its table of tokens may be
        longer or shorter by rows that no token has."""
        folder, own = Path(path), pretrained.model_at(self.t.model.path)
        if missing := self._missing(folder):
            self._add(key, *missing)
            return
        if wrong := pretrained.kind_fault(folder):
            self._add_problem(key, Problem(str(folder / "config.json"), "", *wrong))
            return
        self._whole(key, folder)
        if own is not None and (difference := pretrained.other_tokens(own, folder)):
            self._add(key, f"{difference}: they are not the same tokens", remedy)
        elif own is not None:
            sizes = [pretrained.model_facts(one).vocabulary for one in (folder, own)]
            alike = padded and difference is not None
            if all(sizes) and sizes[0] != sizes[1] and not alike:
                rule = f"its vocabulary has {sizes[0]} tokens, that of model.path {sizes[1]}"
                self._add(key, f"{rule}: they are not the same tokens", remedy)

    def _start(self) -> None:
        """The checkpoint that the run begins with must be whole, and of this model, adapter and optimiser."""
        folder, t = Path(self.t.learner.start_from), self.t
        key, other = "learner.start_from", "name another checkpoint"
        meta, listed = (pretrained.read_config(folder, name) for name in ("meta.json", "files.json"))
        if not meta or not listed:
            rule = "no meta.json and files.json of a checkpoint in this folder"
            self._add(key, rule, "give the folder global_step_N in checkpoints/ of a run")
            return
        for name, (size, _) in listed.items():
            path = folder / name
            if (there := path.stat().st_size if path.is_file() else None) != size:
                had = "is missing" if there is None else f"has {there} bytes"
                self._add(key, f"the checkpoint is damaged: {name} {had}, {size} were written", other)
                return
        own = None if t.model.path.startswith(TINY) else Path(t.model.path)
        facts = [pretrained.model_facts(one) for one in (folder / "model", own)]
        for what in ("kind", "layers", "hidden", "vocabulary"):
            there, here = (getattr(one, what) for one in facts)
            if there != here and own is not None:
                rule = f"it is of another model: {what} {there} there, {here} in model.path"
                self._add(key, rule, f"set model.path to the model that it was trained from, or {other}")
                return
        if (before := (meta.get("lora") or {}).get("rank", 0)) != t.lora.rank:
            rule = f"it was trained with lora.rank = {before}, this run has {t.lora.rank}"
            self._add(key, rule, "set it to that, or begin with the merged weights: model.path = what is exported")
        if t.learner.start_optimizer and (before := meta.get("optimizer", t.learner.optimizer)) != t.learner.optimizer:
            rule = f"it was trained with learner.optimizer = {before!r}, this run has {t.learner.optimizer!r}"
            self._add(key, rule, f"start_optimizer = false, or optimizer = {before!r}")

    def _lora(self) -> None:
        if importlib.util.find_spec("peft") is None:
            self._add("lora.rank", "LoRA needs the package peft", "pip install 'busrl[lora]'")
        path, known = self.t.model.path, TINY_LAYERS
        if not path.startswith(TINY):
            known = sorted(pretrained.weight_layers(pretrained.tensor_shapes(Path(path))))
            if (kind := pretrained.read_config(Path(path)).get("model_type")) in pretrained.CONVOLVED:
                rule = f"a model of model_type {kind!r} has no linear layer that an adapter could be put on"
                self._add("lora.rank", rule, "train all weights: lora.rank = 0")
                return
        for name in self.t.lora.targets:
            if known and "." not in name and name not in known:
                rule = f"the model has no layer {name!r} that an adapter could be put on"
                self._add("lora.targets", rule, f"it has {', '.join(known)}")

    def _trained_layers(self) -> None:
        names, count = pretrained.trainable(self.t.model.path)
        own_head = pretrained.has_own_head(self.t.model.path)
        try:
            items = selection.parsed(self.t.learner.train_layers)
        except ValueError:  # a rule of its own names it
            return
        for item in items:
            if 0 < count <= item.last:
                rule = f"{item.text!r} goes beyond the model, which has the layers 0 to {count - 1}"
                self._add("learner.train_layers", rule, f'for example "{count // 2}-{count - 1}"')
            elif not any(map(item.takes, names)) and item.takes("lm_head.weight") and not own_head:
                rule = f"{item.text!r} is no parameter of its own: the head is the embedding (tie_word_embeddings)"
                self._add("learner.train_layers", rule, "name embed_tokens, which trains both")
            elif names and not any(map(item.takes, names)):
                known = sorted({name.split(".")[-2] for name in names if "." in name})
                rule = f"no parameter of the model has {item.text!r} in its name"
                self._add("learner.train_layers", rule, f"its parts are {', '.join(known)}")

    def _layers_in_place(self) -> None:
        """Ranks and the compiler work layer by layer, and look for the layers where most models have them."""
        asked = [f"process.{at}.ranks" for at, one in enumerate(self.t.process) if one.ranks > 1]
        asked += ["learner.memory.compile"] if self.t.learner.memory.compile else []
        path = self.t.model.path
        names = [] if not asked or path.startswith(TINY) else list(pretrained.tensor_shapes(Path(path)))
        if any(map(pretrained.NUMBERED.search, names)) and not any(map(pretrained.LAYERED.match, names)):
            for key in asked:
                rule = "the layers of this model are not where those of most are (base_model.layers)"
                self._add(key, rule, "compile = false" if key.endswith("compile") else "train it with ranks = 1")

    def _compiler(self) -> None:
        """torch.compile writes C++ for a CPU, and Triton for a GPU, which needs a C compiler to start its kernels."""
        on_cpu = expected(self.t.device_of("learner")) == "cpu"
        own = os.environ.get("CXX", "g++") if on_cpu else os.environ.get("CC", "gcc")
        include = sysconfig.get_path("include")
        for wrong, rule, remedy in (
            (shutil.which(own) is None, f"{own}, which compiles the layers, is not on the PATH", f"install {own}"),
            (not (Path(include) / "Python.h").is_file(), f"{include} has no Python.h", "install Python's headers"),
            (not on_cpu and importlib.util.find_spec("triton") is None, "Triton is not there", "pip install triton"),
        ):
            if wrong:
                self._add("learner.memory.compile", rule, f"{remedy}, or compile = false")

    # -- code of the user, programs and keys -----

    def _reward(self) -> Trial:
        own = self.t.reward
        named = [part.function for part in own.part if part.kind == "python"] or [own.function] * (own.kind == "python")
        foreign = named or any(part.kind in TRIED for part in own.part)
        wrong = any(key.startswith("reward.part") for key in self.skip)
        if not foreign or not all(map(FUNCTION.fullmatch, named)):
            return Trial()
        if wrong or not self._sound("reward.function", "reward.kind"):
            return Trial()
        trial = try_first(self.t, TRIED)
        for one in trial.judged:
            if one.not_loaded:
                why, _, remedy = (one.not_loaded.partition("': ")[2] or one.not_loaded).partition("; ")
                usual = BESIDE if one.key.endswith("function") else "see docs/rewards.md#code"
                self._add(one.key, f"cannot be used: {why}", remedy or usual)
            elif failed := one.failed:
                rule = f"fails for {failed.what} to the first prompt: {failed.in_words()}"
                self._add(one.key, rule, "correct it: every sample of the run would be lost")
        return trial

    def _functions(self) -> None:
        if self.t.learner.optimizer == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
            self._add("learner.optimizer", "8-bit states need the package bitsandbytes", "pip install 'busrl[adam8]'")
        if self._sound("process"):
            for key, fault in try_parts(self.t):
                remedy = BESIDE if key.endswith("function") else "see Environments in docs/agents.md"
                self._add(key, f"cannot be used: {fault}", remedy)
        if self._sound("sinks.to", "agents.tools", "process"):
            for key, fault in try_imports(self.t):
                self._add(key, f"cannot be used: {fault}", BESIDE)
        keys = ("loss", "advantage", "metrics", "optimizer", "options", "betas", "eps", "weight_decay")
        # Without torch there is no learner, which is the finding then.
        if self._sound(*(f"learner.{key}" for key in keys), "process") and is_installed("torch"):
            for key, fault in try_functions(self.t):
                remedy = "correct it: no step could be made with it (docs/extending.md)"
                self._add(key, f"cannot be used: {fault}", remedy)

    def _bus_keys(self) -> None:
        """TCP is opened with keys only: the broker's pair has to be there, and private."""
        if self.t.bus.endpoint != "ipc" and self._sound("bus.endpoint", "bus.keys"):
            try:
                keys.server_pair(keys.directory_of(self.t.bus.keys))
            except BadKeys as error:
                rule, _, remedy = str(error).partition("; ")
                self._add("bus.keys", f"tcp needs keys: {rule}", remedy)

    def _tools(self) -> None:
        path, rule = self.t.openai.tools, ""
        if not path or self.t.openai.endpoint != "chat" or not self._sound("openai.tools"):
            return
        try:
            listed = json.loads(Path(path).read_bytes())
            if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
                rule = "not a list of objects, each a tool as the chat endpoint takes it"
        except (OSError, ValueError) as problem:
            rule = f"cannot be read: {problem}"
        if rule:
            self._add("openai.tools", rule, "give a JSON file with a list of tools, or remove it")

    def _programs(self) -> None:
        if self._sound("hosts.start") and self.t.hosts.start and shutil.which(self.t.hosts.start[0]) is None:
            self._add("hosts.start", f"{self.t.hosts.start[0]} is not an executable program", "install it")
        for sink in self.t.sinks.to if self._sound("sinks.to") else ():
            if sink in SINKS and importlib.util.find_spec(SINKS[sink]) is None:
                self._add("sinks.to", f"{sink} needs the package {SINKS[sink]}", f"pip install {SINKS[sink]}")
        if not self._sound("process"):
            return
        for index, entry in enumerate(self.t.process):
            key = f"process.{index}.command"
            mine = entry.command and entry.count and entry.role in FOREIGN_ROLES and self._sound(key)
            if mine and shutil.which(entry.command[0]) is None:
                rule = f"{entry.command[0]} is not an executable program"
                self._add(key, rule, "build or install it; {here} is this file's folder")
            if entry.program and entry.count and shutil.which(entry.program[0]) is None:
                rule = f"{entry.program[0]} is not an executable program"
                self._add(f"process.{index}.program", rule, "install it; {here} is this file's folder")
            if (entry.program or entry.role in (SERVE, ATROPOS)) and importlib.util.find_spec("aiohttp") is None:
                rule = "episodes over HTTP need the package aiohttp"
                self._add(f"process.{index}.role", rule, "pip install 'busrl[agents]'")
        used = [index for index in vllm_entries(self.t) if not self.t.process[index].python]
        why, remedy = supported.vllm_objection(*supported.vllm_installed()) if used else ("", "")
        if why:
            self._add(f"process.{used[0]}.engine", why, remedy)
        elif (at := engine_rules.lacks_ascend(self.t)) is not None:
            rule = f"vLLM works on an NPU with the package {supported.ASCEND} alone, which this Python lacks"
            self._add(f"process.{at}.engine", rule, "pip install 'busrl[ascend]': see docs/engines.md")


def _absent(result: Scan, key: str) -> Iterator[Finding]:
    """A key that no line of a file has, once, with those that are there."""
    for named, absent in result.absent.items():
        remedy = f"set it to one of them, or correct {result.path}"
        if near := difflib.get_close_matches(absent, result.keys, n=1):
            remedy = f"did you mean {reader.show(near[0])}?"
        there = ", ".join(result.keys) or "none"
        rule = f"the key {absent!r} is missing in all {result.count} lines of {result.path}; they have {there}"
        yield Finding((f"data.{named}", key), rule, remedy, value=f"data.{named} = {reader.show(absent)}")


def answer_key(topology: Topology) -> str:
    return topology.reward.answer_key or topology.data.answer_key


def compares(topology: Topology) -> bool:
    """Tell whether every line needs a right answer; a reward that is foreign code is to blame itself."""
    own, named = topology.reward, answer_key(topology)
    if not own.part:
        return own.kind == "exact_match" and not own.function
    return any(part.kind in EXTRACTING and part.answer_key == named for part in own.part)


def longest_line(path: str) -> tuple[int, int]:
    """Number, from 1, and bytes of the longest line of a file."""
    with open(path, "rb") as file:
        sizes = ((len(line.removesuffix(b"\n")), number) for number, line in enumerate(file, 1))
        size, number = max(sizes, default=(0, 0))
    return number, size


def model_folder(path: str) -> str:
    """The model folder that a path means: a checkpoint of a run (global_step_N) holds it as `model`."""
    inner = Path(path) / "model"
    is_checkpoint = (inner / "config.json").is_file() and not (Path(path) / "config.json").exists()
    return str(inner) if path and not path.startswith(TINY) and is_checkpoint else path


def _missing(folder: Path) -> tuple[str, str] | None:
    if not folder.is_dir():
        remedy = "give a folder with config.json, a tokenizer and weights; a model of the hub is downloaded first"
        return "no such folder", remedy
    if not (folder / "config.json").is_file():
        return pretrained.without_config(folder)
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        if (folder.parent / "shards").is_dir():
            remedy = "set learner.start_from to the checkpoint, or model.path to what `busrl export` makes of it"
            return "a checkpoint that has its weights in shards", remedy
        return pretrained.without_weights(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        return "no tokenizer (tokenizer.json) in this folder", "save the tokenizer beside the model"
    return None
