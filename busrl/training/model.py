"""Loading a causal language model from a Hugging Face folder, ready to be trained.

Used by the learner, the engines' makers and the tests. Talks to the file system only: nothing is ever downloaded.

- Parameters are float32 whatever the folder holds: gradients and optimiser add small numbers to large ones.
- How attention is computed is the model's own choice: sdpa where it can, eager where that would be wrong (softcaps,
  sinks). Both are causal without a mask, so rows padded at the right are right.
- Dropout is off: a ratio between two forwards of the same weights has to be 1.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from busrl.errors import ModelNotLoaded

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def load(path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Any:
    """The model of that folder in evaluation mode, on the device (the CPU), or ModelNotLoaded with the path and the
    remedy."""
    folder = Path(path)
    _look_at(folder)
    from transformers import AutoModelForCausalLM  # only here: the import takes seconds
    from transformers.utils import logging as transformers_logging

    quiet: Any = transformers_logging  # it has no type hints
    quiet.disable_progress_bar()  # who trains is a process with a log, not a terminal
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True)  # fmt: skip
    except Exception as error:  # whatever type it has: a library of readers, each with its own
        raise ModelNotLoaded(
            f"{folder}: transformers can not load it as a causal language model: {error}; check that config.json "
            "names a causal architecture that this version of transformers knows and that the weights belong to it"
        ) from error
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelNotLoaded(f"{folder}: an encoder-decoder model; busrl trains decoder-only models")
    model.train(False)
    return model if device is None else model.to(device)


def _look_at(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelNotLoaded(f"{folder}: no such folder; set model.path to a folder with config.json and *.safetensors")
    if not (folder / "config.json").is_file():
        raise ModelNotLoaded(f"{folder}: no config.json in it; set model.path to a Hugging Face model folder")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise ModelNotLoaded(f"{folder}: no weights (*.safetensors) in it; copy them there, nothing is downloaded")


def vocabulary(model: Any) -> int:
    """How many token ids the model knows."""
    return int(model.get_input_embeddings().num_embeddings)


def takes_logits_to_keep(model: Any) -> bool:
    """True if the model can be asked for the logits of some positions only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def named_weights(model: Any) -> dict[str, Tensor]:
    """The parameters by name, each once (tied weights have one name); views, not copies."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copied_weights(model: Any) -> dict[str, Tensor]:
    """The same as copies on the host, each in memory of its own: for a model whose parameters are views of others."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in named_weights(model).items()}
