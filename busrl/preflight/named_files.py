"""The files, programs and packages that a topology names on this machine: what is missing, and facts for the sizes.

`inspect` reads prompt files (`prompt_files`), model folders (`model_folders`), the user's code (`trial`), and looks for
programs, packages and keys itself. Nothing is loaded here with torch, and nothing is changed.

- A key that has a problem already is left out, with whatever follows from it.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from busrl import capabilities, curve
from busrl.capabilities import FOREIGN_ROLES
from busrl.data import pretrained
from busrl.data.sources import BESIDE
from busrl.engines import vllm_versions
from busrl.errors import BadKeys
from busrl.preflight import engine_rules
from busrl.preflight.findings import Finding, Report
from busrl.preflight.model_folders import ModelFolders
from busrl.preflight.prompt_files import Lines, PromptFiles
from busrl.preflight.trial import Judged, Trial, try_first, try_functions, try_imports, try_parts
from busrl.system.imports import is_installed, remedy_for
from busrl.topology.declare import FUNCTION
from busrl.topology.rewards import PYTHON, REWARD_KINDS
from busrl.topology.schema import ATROPOS, SERVE, SINKS, Topology
from busrl.topology.sizes import vllm_entries

# -- what the files hold -----


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


def inspect(t: Topology, left_out: set[str]) -> tuple[FileFacts, list[Finding]]:
    """Read every file that is named; keys in `left_out` have a problem of their own already."""
    report = Report(left_out)
    prompts, models = PromptFiles(t, report), ModelFolders(t, report)
    train = prompts.lines("data.train", t.data.train) or Lines()
    validation = prompts.lines("validation.data", t.validation.data) or train
    sets = [prompts.lines_of_set(index) for index in range(len(t.validation.set))]
    if report.sound("data.train", "process") and t.data.train:
        prompts.check_trace()
    token_bytes, context = models.model() if report.sound("model.path") else (pretrained.DEFAULT_TOKEN_BYTES, 0)
    if report.blames("model.path"):
        report.leave_out("model.path")
    if t.data.template == "chat" and report.sound("data.template", "model.path", "process"):
        models.chat_template()
    trial = _try_reward(t, report)
    _try_code(t, report)
    _look_for_programs(t, report)
    _look_at_models(t, report, models)
    _look_at_keywords(t, report)
    limit = prompts.limit(context)
    return FileFacts(
        train.count, validation.count, tuple(lines.count for lines in sets),
        max(lines.longest for lines in (train, validation, *sets)), token_bytes, context, limit.tokens, limit.text,
        trial,
    ), report.findings


def _look_at_models(t: Topology, report: Report, models: ModelFolders) -> None:
    """Check the other models, and the layers that the learner changes; each where its keys are sound."""
    if t.model.reference and report.sound("model.reference"):
        models.reference()
    if t.model.teacher and report.sound("model.teacher"):
        models.teacher("model.teacher", t.model.teacher)
    for number, row in enumerate(t.learner.teacher):
        if row.path and report.sound(key := f"learner.teacher.{number}.path"):
            models.teacher(key, row.path)
    if t.learner.start_from and report.sound("learner.start_from", "model.path", "lora.rank"):
        models.start()
    if t.lora.on and report.sound("lora.rank", "lora.targets", "lora.layers", "lora.experts", "model.path"):
        models.adapter()
    if t.learner.train_layers and report.sound("learner.train_layers", "model.path"):
        models.trained_layers()
    if report.sound("process", "learner.memory.compile", "model.path"):
        models.layers_in_place()
    if t.learner.memory.compile and report.sound("learner.memory.compile", "model.device", "process"):
        models.compiler()


def _look_at_keywords(t: Topology, report: Report) -> None:
    if t.scheduler.keywords and report.sound("scheduler.keywords"):
        for problems_of in capabilities.plugs("keyword_problems"):
            for problem in problems_of(t.scheduler.keywords):
                report.add_problem("scheduler.keywords", problem)


# -- the user's code -----


def _try_reward(t: Topology, report: Report) -> Trial:
    """Try a reward that is foreign code on the first prompt; report one that cannot be loaded, or that always fails."""
    reward = t.reward
    functions = [part.function for part in reward.part if part.kind == PYTHON]
    functions = functions or [reward.function] * (reward.kind == PYTHON)
    tried = [name for name, kind in REWARD_KINDS.items() if kind.is_tried]
    is_foreign = functions or any(part.kind in tried for part in reward.part)
    if not is_foreign or not all(map(FUNCTION.fullmatch, functions)):
        return Trial()
    if not report.sound("reward.function", "reward.kind") or not report.sound_below("reward.part"):
        return Trial()
    trial = try_first(t, tried)
    for result in trial.judged:
        _report_reward(report, result)
    return trial


def _report_reward(report: Report, result: Judged) -> None:
    if result.not_loaded:
        why, _, remedy = (result.not_loaded.partition("': ")[2] or result.not_loaded).partition("; ")
        usual = BESIDE if result.key.endswith("function") else "see docs/rewards.md#code"
        report.add(result.key, f"cannot be used: {why}", remedy or usual)
    elif failed := result.failed:
        rule = f"fails for {failed.what} to the first prompt: {failed.in_words()}"
        report.add(result.key, rule, "correct it: every sample of the run would be lost")


def _try_code(t: Topology, report: Report) -> None:
    """Try what else the user wrote: what optional parts play, sinks and parsers, and functions of the learner."""
    if t.learner.optimizer == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
        report.add("learner.optimizer", "8-bit states need the package bitsandbytes", "pip install 'busrl[adam8]'")
    if report.sound("process"):
        for key, fault in try_parts(t):
            remedy = BESIDE if key.endswith("function") else "see docs/environments.md"
            report.add(key, f"cannot be used: {fault}", remedy)
    if report.sound("sinks.to", "agents.tools", "process"):
        for key, fault in try_imports(t):
            report.add(key, f"cannot be used: {fault}", BESIDE)
    names = ("loss", "advantage", "metrics", "optimizer", "options", "betas", "eps", "weight_decay")
    # Without torch there is no learner, which is the finding then.
    if report.sound(*(f"learner.{name}" for name in names), "process") and is_installed("torch"):
        for key, fault in try_functions(t):
            remedy = "correct it: no step could be made with it (docs/extend-functions.md)"
            report.add(key, f"cannot be used: {fault}", remedy)


# -- keys, programs and packages -----


def _look_for_programs(t: Topology, report: Report) -> None:
    _look_for_keys(t, report)
    _look_at_tools(t, report)
    if report.sound("hosts.start") and t.hosts.start and shutil.which(t.hosts.start[0]) is None:
        report.add("hosts.start", f"{t.hosts.start[0]} is not an executable program", "install it")
    for sink in t.sinks.to if report.sound("sinks.to") else ():
        if sink in SINKS and importlib.util.find_spec(SINKS[sink]) is None:
            remedy = remedy_for(SINKS[sink]) or f"pip install {SINKS[sink]}"
            report.add("sinks.to", f"{sink} needs the package {SINKS[sink]}", remedy)
    if report.sound("process"):
        _look_for_commands(t, report)
        _look_for_vllm(t, report)


def _look_for_keys(t: Topology, report: Report) -> None:
    """Require the broker's pair of keys, and that it is private, where the bus is open over TCP."""
    if t.bus.endpoint != "ipc" and report.sound("bus.endpoint", "bus.keys"):
        try:
            curve.server_pair(curve.directory_of(t.bus.keys))
        except BadKeys as error:
            rule, _, remedy = str(error).partition("; ")
            report.add("bus.keys", f"tcp needs keys: {rule}", remedy)


def _look_at_tools(t: Topology, report: Report) -> None:
    path, rule = t.openai.tools, ""
    if not path or t.openai.endpoint != "chat" or not report.sound("openai.tools"):
        return
    try:
        listed = json.loads(Path(path).read_bytes())
        if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
            rule = "not a list of objects, each a tool as the chat endpoint takes it"
    except (OSError, ValueError) as problem:
        rule = f"cannot be read: {problem}"
    if rule:
        report.add("openai.tools", rule, "give a JSON file with a list of tools, or remove it")


def _look_for_commands(t: Topology, report: Report) -> None:
    """Look for the programs that entries of [[process]] start, and for what episodes over HTTP need."""
    for index, entry in enumerate(t.process):
        key = f"process.{index}.command"
        is_started = entry.command and entry.count and entry.role in FOREIGN_ROLES and report.sound(key)
        if is_started and shutil.which(entry.command[0]) is None:
            rule = f"{entry.command[0]} is not an executable program"
            report.add(key, rule, "build or install it; {here} is this file's folder")
        if entry.program and entry.count and shutil.which(entry.program[0]) is None:
            rule = f"{entry.program[0]} is not an executable program"
            report.add(f"process.{index}.program", rule, "install it; {here} is this file's folder")
        if (entry.program or entry.role in (SERVE, ATROPOS)) and importlib.util.find_spec("aiohttp") is None:
            rule = "episodes over HTTP need the package aiohttp"
            report.add(f"process.{index}.role", rule, "pip install 'busrl[agents]'")


def _look_for_vllm(t: Topology, report: Report) -> None:
    """Look at the version of vLLM, and for its plugin on an NPU; an entry with a Python of its own is not looked at."""
    used = [index for index in vllm_entries(t) if not t.process[index].python]
    why, remedy = vllm_versions.vllm_objection(*vllm_versions.vllm_installed()) if used else ("", "")
    if why:
        report.add(f"process.{used[0]}.engine", why, remedy)
    elif (at := engine_rules.lacks_ascend(t)) is not None:
        rule = f"vLLM works on an NPU with the package {vllm_versions.ASCEND} alone, which this Python lacks"
        report.add(f"process.{at}.engine", rule, "pip install 'busrl[ascend]': see docs/vllm.md")
