"""The value head of PPO: a line over the model's last hidden states, with an optimiser of its own.

Made and driven by the trainer. Talks to files of a checkpoint; knows nothing of advantages, losses or samples. It is no
part of the model: it is in no published weights and in no exported folder.

- Weight and bias begin at 0 and are float32 (float64 with a float64 model): every value of a new head is 0.
- What the value loss does to the model itself is scaled by `coef`; the head gets its gradient whole.
- Over ranks each has all of it: its gradient is their sum, so all make the same update.
- Its gradient is divided and clipped as that of the model is, by itself: neither changes the other's norm.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from busrl.algorithms.gae import ValueSettings
from busrl.errors import ModelNotLoaded, UserError

FOLDER = "value"  # of a checkpoint
LINE_FILE, STATE_FILE = "value_head.safetensors", "optimizer.pt"


class ValueHead:
    """V = h w + b."""

    def __init__(self, width: int, settings: ValueSettings, dtype: torch.dtype, device: torch.device) -> None:
        self.settings = settings
        self.line = nn.Linear(width, 1, device=device, dtype=dtype)
        nn.init.zeros_(self.line.weight)
        nn.init.zeros_(self.line.bias)
        self.parameters = list(self.line.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, weight_decay=0.0)

    @classmethod
    def of(cls, model: Any, settings: ValueSettings, dtype: torch.dtype, device: torch.device) -> ValueHead:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelNotLoaded(
                f"{type(model).__name__}: its last hidden states cannot be reached, so it can have no value head; set "
                'learner.advantage to another than "gae"'
            )
        return cls(head.in_features, settings, dtype, device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """The value of each row, [n, width] -> [n]."""
        constant = hidden.detach()
        passes = torch.is_grad_enabled() and self.settings.coef
        scaled = constant.lerp(hidden, self.settings.coef) if passes else constant
        values: Tensor = self.line(scaled.to(self.line.weight.dtype))
        return values[:, 0]

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def divide(self, divisor: float) -> float:
        """Divides the accumulated gradient, and returns its norm."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        return float(torch.stack([p.grad.norm() for p in self.parameters if p.grad is not None] or [torch.zeros(())])
                     .double().norm())

    def step(self, lr: float, norm: float, limit: float) -> None:
        """An update at `rate` times the model's learning rate, of a gradient of that norm clipped to the limit."""
        for parameter in self.parameters:
            if norm > limit and parameter.grad is not None:
                parameter.grad.mul_(limit / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr * self.settings.rate
        self.optimizer.step()

    # -- files --------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write the head and the state of its optimiser, as two files of a new folder."""
        from safetensors.torch import save

        folder.mkdir()
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.line.state_dict().items()}
        (folder / LINE_FILE).write_bytes(save(tensors, {"format": "pt"}))
        buffer = io.BytesIO()
        torch.save(self.optimizer.state_dict(), buffer)
        (folder / STATE_FILE).write_bytes(buffer.getbuffer())

    def load(self, folder: Path, optimizer: bool = True) -> None:
        """Continue from a folder of `write`, or with its head alone; UserError if it is of another model."""
        from safetensors.torch import load_file

        file = folder / LINE_FILE
        saved, present = load_file(file), self.line.state_dict()
        for name, tensor in present.items():
            if name not in saved or saved[name].shape != tensor.shape:
                shape = tuple(saved[name].shape) if name in saved else None
                raise UserError(f"{file}: its {name} is {shape}, the model needs {tuple(tensor.shape)}: it is the "
                                "value head of another model")
        self.line.load_state_dict(saved)
        if optimizer:
            state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
            self.optimizer.load_state_dict(state)
        self.clear()
