"""Settings of a trainer: numbers by the names of the topology's [learner] and [learner.memory] keys.

Read by the trainer, its parts and the ranks of a learner. Knows the topology's tables, where the defaults stand, and
the model's folder, which says which rows of the logits stand for a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from busrl.algorithms import catalog
from busrl.algorithms.catalog import LossSettings
from busrl.algorithms.gae import ValueSettings
from busrl.data.vocabulary import ALL_ROWS, TokenRows, token_rows
from busrl.topology.learner import Learner, Memory, Routing

OF_OTHER_TABLES = ("compute_dtype", "ratio_one", "value", "base_dir", "token_rows", "routing")  # computed by `of`


@dataclass(frozen=True)
class TrainerSettings(LossSettings):
    """The learning rate is not among them: it comes with each step."""

    loss: str = Learner.loss
    optimizer: str = Learner.optimizer
    train_layers: str = Learner.train_layers  # all but these are frozen; empty: none is
    options: Mapping[str, Any] = field(default_factory=dict)  # of Adafactor or an optimiser of the user's
    betas: tuple[float, float] = Learner.betas
    eps: float = Learner.eps
    weight_decay: float = Learner.weight_decay
    max_grad_norm: float = Learner.max_grad_norm
    micro_batch_tokens: int = Learner.micro_batch_tokens
    newest_ratio: str = Learner.newest_ratio  # "one": tokens drawn by the very weights that are trained have ratio 1
    kl_in: str = Learner.kl_in
    ratio_one: bool = False  # segments.loss = "pois"
    unit: str = Learner.unit  # a sample for losses of whole samples: an episode, or each of its turns
    compute_dtype: str = "float32"  # "bfloat16": of forward and backward; trained tensors stay float32
    activation_checkpointing: str = Memory.activation_checkpointing
    head_rows: int = Memory.head_rows
    head_dtype: str = Memory.head_dtype
    attention: str = Memory.attention
    compile: bool = Memory.compile
    balance: float = Learner.balance  # weight of the loss that spreads tokens over experts
    routes_compare_every: int = Learner.routes_compare_every  # micro-batches, of which one is computed twice
    routing: Routing | None = None  # where samples have routes
    value: ValueSettings | None = None  # with a value head
    base_dir: str = field(default=".", repr=False)  # of the topology, for code of the user's
    token_rows: TokenRows = ALL_ROWS  # rows of the model's logits that stand for a token

    @classmethod
    def of(cls, topology: Any) -> TrainerSettings:
        """From a topology's [learner], [learner.memory], model.dtype and segments.loss."""
        learner, memory = topology.learner, vars(topology.learner.memory)
        names = {setting.name for setting in fields(cls)} - {*OF_OTHER_TABLES} - memory.keys()
        value = learner.value
        return cls(
            compute_dtype=topology.model.dtype, ratio_one=topology.segments.loss == "pois",
            value=ValueSettings(value.coef, value.clip, value.rate) if learner.advantage == catalog.GAE else None,
            base_dir=topology.base_dir, token_rows=token_rows(Path(topology.model.path)),
            routing=topology.derived.routing,
            **memory, **{name: getattr(learner, name) for name in names},
        )

    @property
    def few_bits(self) -> torch.dtype | None:
        """The type that forward and backward compute with and weights are published in; None: that of training."""
        return None if self.compute_dtype == "float32" else getattr(torch, self.compute_dtype)
