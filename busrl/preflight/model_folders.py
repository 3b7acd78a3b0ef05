"""The model folders that a topology names, and what a run needs of them: tokenizer, layers, a checkpoint to start from.

Reads JSON files and the headers of weights, without torch. Findings go to a `Report`; changes nothing.

- A folder is refused here, before a process loads it: weights that were cut, another model's tokens, an unknown kind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from busrl.algorithms import trained_parameters
from busrl.data import pretrained
from busrl.data.chat import template_of
from busrl.errors import Problem
from busrl.preflight import unfit_models
from busrl.preflight.findings import Report
from busrl.states import TINY
from busrl.system.device import expected
from busrl.topology.kinds import SCRIPTED
from busrl.topology.schema import Topology

TINY_TOKEN_BYTES = 16
TINY_LAYERS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]  # made or not


def task_of(report: Report, key: str, path: str) -> Any:
    """The recipe of a quickstart task that is made on first use; None, with a finding at `key`, if there is none."""
    tasks = pretrained.maker().RECIPES
    if path not in tasks:
        report.add(key, f"expected a path, or one of {', '.join(tasks)}", "these are the quickstart's own tasks")
    return tasks.get(path)


def model_folder(path: str) -> str:
    """The model folder that a path means: a checkpoint of a run (global_step_N) holds it as `model`."""
    inner = Path(path) / "model"
    is_checkpoint = (inner / "config.json").is_file() and not (Path(path) / "config.json").exists()
    return str(inner) if path and not path.startswith(TINY) and is_checkpoint else path


class ModelFolders:
    """The model folders of one topology; each method looks at one of its keys."""

    def __init__(self, topology: Topology, report: Report) -> None:
        self._t, self._report = topology, report
        self._path = topology.model.path
        self._is_task = topology.model.path.startswith(TINY)

    # -- the model that is trained -----

    def model(self) -> tuple[int, int]:
        """Check model.path; bytes of the longest token, and the tokens that the model takes (0 = unknown)."""
        if self._is_task:
            task_of(self._report, "model.path", self._path)
            return TINY_TOKEN_BYTES, 0
        folder = Path(self._path)
        if missing := self._missing(folder):
            self._report.add("model.path", *missing)
            return pretrained.DEFAULT_TOKEN_BYTES, 0
        config, place = pretrained.read_json(folder / "config.json"), str(folder / "config.json")
        if not isinstance(config, dict):
            self._report.add_problem("model.path", Problem(place, "", "not a JSON object", "copy it again"))
            return pretrained.DEFAULT_TOKEN_BYTES, 0
        if config.get("is_encoder_decoder"):
            rule = f"{config.get('model_type', 'it')} is an encoder-decoder model, and busrl trains decoder-only ones"
            self._report.add("model.path", rule, "give a causal language model")
        elif fault := unfit_models.kind_fault(folder):
            self._report.add_problem("model.path", Problem(place, "", *fault))
        else:
            self._files(folder, place)
        return pretrained.token_bytes(folder), pretrained.context_of(config)

    def _files(self, folder: Path, config: str) -> None:
        """Check the weights and the tokenizer of a decoder."""
        self._weights("model.path", folder)
        if fault := unfit_models.token_fault(folder):
            remedy = "save the tokenizer of this model there; with a new tokenizer resize the model's embeddings first"
            self._report.add("model.path", fault, remedy)
        if self._t.scripted and pretrained.vocabulary(folder) is None:
            rule = "it does not say vocab_size and eos_token_id, so scripted answers can have no valid token ids"
            self._report.add_problem("model.path", Problem(config, "", rule, "add them"))

    def _missing(self, folder: Path) -> tuple[str, str] | None:
        missing = _missing(folder)
        return (missing[0], pretrained.of_hub(self._t.source, str(folder)) or missing[1]) if missing else None

    def _weights(self, key: str, folder: Path) -> None:
        """Refuse weights that were cut, or that are another model's, before a process loads them."""
        if fault := unfit_models.weight_fault(folder):
            self._report.add_problem(key, Problem(fault[0], "", *fault[1:]))

    def chat_template(self) -> None:
        """Require a chat template of the tokenizer in the model folder, where an engine writes chats by it."""
        uses_it = any(entry.role == "rollout" and entry.engine != SCRIPTED for entry in self._t.process)
        if uses_it and (self._is_task or not template_of(Path(self._path))):
            remedy = 'use a chat model, put a chat_template.jinja into its folder, or set template = "none"'
            self._report.add("data.template", f"the tokenizer of {self._path} has no chat template", remedy)

    # -- models beside it -----

    def reference(self) -> None:
        remedy = "give an earlier version of the model, or none"
        self._same_tokens("model.reference", self._t.model.reference, remedy, padded=False)

    def teacher(self, key: str, path: str) -> None:
        remedy = "give a model of the same family, whose tokenizer is the same"
        self._same_tokens(key, path, remedy, padded=True)

    def _same_tokens(self, key: str, path: str, remedy: str, padded: bool) -> None:
        """Require the tokens of model.path of a model that gives probabilities. `padded`: its table of tokens may be
        longer or shorter by rows that no token has."""
        folder, model = Path(path), pretrained.model_at(self._path)
        if missing := self._missing(folder):
            self._report.add(key, *missing)
            return
        if fault := unfit_models.kind_fault(folder):
            self._report.add_problem(key, Problem(str(folder / "config.json"), "", *fault))
            return
        self._weights(key, folder)
        if model is None:
            return
        difference = unfit_models.other_tokens(model, folder)
        if difference:
            self._report.add(key, f"{difference}: they are not the same tokens", remedy)
            return
        rows, rows_of_model = (pretrained.model_facts(place).vocabulary for place in (folder, model))
        alike = padded and difference is not None
        if rows and rows_of_model and rows != rows_of_model and not alike:
            rule = f"its vocabulary has {rows} tokens, that of model.path {rows_of_model}"
            self._report.add(key, f"{rule}: they are not the same tokens", remedy)

    def start(self) -> None:
        """Require that the checkpoint to begin with is complete, and of this model, adapter and optimiser."""
        folder, key = Path(self._t.learner.start_from), "learner.start_from"
        meta, listed = (pretrained.read_config(folder, name) for name in ("meta.json", "files.json"))
        if not meta or not listed:
            rule = "no meta.json and files.json of a checkpoint in this folder"
            self._report.add(key, rule, "give the folder global_step_N in checkpoints/ of a run")
        elif fault := _damage(folder, listed):
            self._report.add(key, fault, "name another checkpoint")
        elif fault := self._other_model(folder):
            remedy = "set model.path to the model that it was trained from, or name another checkpoint"
            self._report.add(key, fault, remedy)
        else:
            self._same_training(meta)

    def _other_model(self, checkpoint: Path) -> str:
        """The first fact in which the checkpoint's model differs from model.path; empty where none does."""
        if self._is_task:
            return ""
        in_checkpoint, model = (pretrained.model_facts(path) for path in (checkpoint / "model", Path(self._path)))
        for what in ("kind", "layers", "hidden", "vocabulary"):
            there, here = getattr(in_checkpoint, what), getattr(model, what)
            if there != here:
                return f"it is of another model: {what} {there} there, {here} in model.path"
        return ""

    def _same_training(self, meta: dict[str, Any]) -> None:
        key, learner = "learner.start_from", self._t.learner
        if (rank := (meta.get("lora") or {}).get("rank", 0)) != self._t.lora.rank:
            rule = f"it was trained with lora.rank = {rank}, this run has {self._t.lora.rank}"
            remedy = "set it to that, or begin with the merged weights: model.path = what is exported"
            self._report.add(key, rule, remedy)
        optimizer = meta.get("optimizer", learner.optimizer)
        if learner.start_optimizer and optimizer != learner.optimizer:
            rule = f"it was trained with learner.optimizer = {optimizer!r}, this run has {learner.optimizer!r}"
            self._report.add(key, rule, f"start_optimizer = false, or optimizer = {optimizer!r}")

    # -- layers -----

    def adapter(self) -> None:
        """Require peft, and linear layers of these names."""
        if importlib.util.find_spec("peft") is None:
            self._report.add("lora.rank", "LoRA needs the package peft", "pip install 'busrl[lora]'")
        layers = TINY_LAYERS
        if not self._is_task:
            layers = sorted(pretrained.weight_layers(pretrained.tensor_shapes(Path(self._path))))
            if (kind := pretrained.read_config(Path(self._path)).get("model_type")) in pretrained.CONVOLVED:
                rule = f"a model of model_type {kind!r} has no linear layer that an adapter could be put on"
                self._report.add("lora.rank", rule, "train all weights: lora.rank = 0")
                return
        for name in self._t.lora.targets:
            if layers and "." not in name and name not in layers:
                rule = f"the model has no layer {name!r} that an adapter could be put on"
                self._report.add("lora.targets", rule, f"it has {', '.join(layers)}")
        self._adapted_layers()

    def _adapted_layers(self) -> None:
        """Require the layers of lora.layers, and experts for lora.experts."""
        names, count = pretrained.trainable(self._path)
        with contextlib.suppress(ValueError):  # a rule of its own names it
            if 0 < count <= trained_parameters.highest(self._t.lora.layers):
                rule = f"{self._t.lora.layers!r} goes beyond the model, which has the layers 0 to {count - 1}"
                self._report.add("lora.layers", rule, f'for example "{count // 2}-{count - 1}"')
        if self._t.lora.experts and names and not any(".experts." in name for name in names):
            self._report.add("lora.experts", "the model has no experts", "experts = false")

    def trained_layers(self) -> None:
        names, count = pretrained.trainable(self._path)
        has_head = pretrained.has_own_head(self._path)
        try:
            items = trained_parameters.parsed(self._t.learner.train_layers)
        except ValueError:  # a rule of its own names it
            return
        for item in items:
            if 0 < count <= item.last:
                rule = f"{item.text!r} goes beyond the model, which has the layers 0 to {count - 1}"
                self._report.add("learner.train_layers", rule, f'for example "{count // 2}-{count - 1}"')
            elif not any(map(item.takes, names)) and item.takes("lm_head.weight") and not has_head:
                rule = f"{item.text!r} is no parameter of its own: the head is the embedding (tie_word_embeddings)"
                self._report.add("learner.train_layers", rule, "name embed_tokens, which trains both")
            elif names and not any(map(item.takes, names)):
                parts = sorted({name.split(".")[-2] for name in names if "." in name})
                rule = f"no parameter of the model has {item.text!r} in its name"
                self._report.add("learner.train_layers", rule, f"its parts are {', '.join(parts)}")

    def layers_in_place(self) -> None:
        """Require the layers where most models have them: ranks and the compiler work layer by layer."""
        keys = [f"process.{at}.ranks" for at, entry in enumerate(self._t.process) if entry.ranks > 1]
        keys += ["learner.memory.compile"] if self._t.learner.memory.compile else []
        names = [] if not keys or self._is_task else list(pretrained.tensor_shapes(Path(self._path)))
        if any(map(pretrained.NUMBERED.search, names)) and not any(map(pretrained.LAYERED.match, names)):
            for key in keys:
                rule = "the layers of this model are not where those of most are (base_model.layers)"
                self._report.add(key, rule, "compile = false" if key.endswith("compile") else "train it with ranks = 1")

    def compiler(self) -> None:
        """Require what torch.compile starts: for a CPU it writes C++, for a GPU Triton, whose kernels a C compiler
        starts."""
        on_cpu = expected(self._t.device_of("learner")) == "cpu"
        program = os.environ.get("CXX", "g++") if on_cpu else os.environ.get("CC", "gcc")
        include = sysconfig.get_path("include")
        for lacks, rule, remedy in (
            (shutil.which(program) is None, f"{program}, which compiles the layers, is not on the PATH",
             f"install {program}"),
            (not (Path(include) / "Python.h").is_file(), f"{include} has no Python.h", "install Python's headers"),
            (not on_cpu and importlib.util.find_spec("triton") is None, "Triton is not there", "pip install triton"),
        ):
            if lacks:
                self._report.add("learner.memory.compile", rule, f"{remedy}, or compile = false")


def _missing(folder: Path) -> tuple[str, str] | None:
    if not folder.is_dir():
        remedy = "give a folder with config.json, a tokenizer and weights; a model of the hub is downloaded first"
        return "no such folder", remedy
    if not (folder / "config.json").is_file():
        return unfit_models.without_config(folder)
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        if (folder.parent / "shards").is_dir():
            remedy = "set learner.start_from to the checkpoint, or model.path to what `busrl export` makes of it"
            return "a checkpoint that has its weights in shards", remedy
        return unfit_models.without_weights(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        return "no tokenizer (tokenizer.json) in this folder", "save the tokenizer beside the model"
    return None


def _damage(checkpoint: Path, listed: dict[str, Any]) -> str:
    """The first listed file that has not the bytes that were written; empty if all have."""
    for name, (size, _) in listed.items():
        path = checkpoint / name
        if not path.is_file():
            return f"the checkpoint is damaged: {name} is missing, {size} were written"
        if (there := path.stat().st_size) != size:
            return f"the checkpoint is damaged: {name} has {there} bytes, {size} were written"
    return ""
