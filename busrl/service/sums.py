"""Losses that a client asks for by name, as sums over the positions of its data: what each reads, and its formula.

Read by what checks a request before it is logged and by the models that are trained (`tenants`). Uses methods of the
tensors that it is given and imports no torch. Knows nothing of models, adapters or requests.

- Nothing is divided: a client that wants a mean divides its weights or advantages. (`gspo` takes the mean that is its
  ratio; no other loss has one.)
- An input that a loss does not read is refused: its name may be mistyped, and the loss would train without it.
- A key of the configuration whose default is not known in public must be given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from busrl.errors import UserError
from busrl.service.columns import TOKENS, Columns

if TYPE_CHECKING:
    from torch import Tensor

TARGETS, LOGPROBS, ADVANTAGES, RATIO_MASK = "target_tokens", "logprobs", "advantages", "sequence_ratio_mask"
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
WEIGHTS: Final = ("weights", "mask")  # two names of one factor per position
LOW, HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
Config = Mapping[str, float | str]


class UserFault(UserError):
    """A request that cannot be done as asked; the client reads the text as it is."""


class Datum(Protocol):
    """A sequence of a request: int32 tokens [n], and by name arrays whose first dimension is n."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def inputs(self) -> Mapping[str, NDArray[Any]]: ...


# -- formulas -----


@dataclass(frozen=True)
class Terms:
    """Terms of a loss, [positions] or [positions, targets of each] in float32. `rows`: the datum of each position."""

    logprobs: Tensor  # of the targets, with gradient
    inputs: Mapping[str, Tensor]
    settings: Mapping[str, float]
    rows: Tensor

    @property
    def advantages(self) -> Tensor:
        return self.inputs[ADVANTAGES]

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.inputs[LOGPROBS]

    def clipped(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(self.settings[LOW], self.settings[HIGH])

    def weighted(self, losses: Tensor) -> Tensor:
        for name in WEIGHTS:
            if name in self.inputs:
                return losses * self.inputs[name]
        return losses


def cross_entropy(terms: Terms) -> Tensor:
    return -terms.logprobs


def importance_sampling(terms: Terms) -> Tensor:
    return -terms.log_ratio.exp() * terms.advantages


def ppo(terms: Terms) -> Tensor:
    return _lower(terms, terms.log_ratio.exp())


def cispo(terms: Terms) -> Tensor:
    return -terms.clipped(terms.log_ratio.exp()).detach() * terms.advantages * terms.logprobs


def dro(terms: Terms) -> Tensor:
    return -(terms.logprobs * terms.advantages - terms.settings[BETA] / 2 * terms.log_ratio.square())


def gspo(terms: Terms) -> Tensor:
    """ppo whose ratio is that of the whole sequence, with the gradient of each position."""
    current, mask = terms.logprobs.detach(), terms.inputs[RATIO_MASK]
    count = int(terms.rows[-1]) + 1
    sums, positions = (
        mask.new_zeros(count).index_add_(0, terms.rows, part)
        for part in ((current - terms.inputs[LOGPROBS]) * mask, mask)
    )
    mean = sums / positions.clamp(min=1.0)  # a datum without a position in the mask has ratio 1
    return _lower(terms, (mean[terms.rows] + terms.logprobs - current).exp())


def _lower(terms: Terms, ratio: Tensor) -> Tensor:
    return -(ratio * terms.advantages).minimum(terms.clipped(ratio) * terms.advantages)


RATIO: Final = frozenset({LOGPROBS, ADVANTAGES})


@dataclass(frozen=True)
class Loss:
    """A loss: its formula before weights, what it needs beside the targets, and the keys of its configuration with
    their defaults; None: to be given. `single`: it takes one target per position. `at_padding`: it is not 0 where all
    inputs are, as they are where a sparse tensor lists nothing."""

    formula: Callable[[Terms], Tensor]
    needs: frozenset[str] = RATIO
    defaults: Mapping[str, float | None] = field(default_factory=dict)
    single: bool = False
    at_padding: bool = False

    @property
    def reads(self) -> frozenset[str]:
        return self.needs | {TARGETS, *WEIGHTS}


CLIP: Final[Mapping[str, float | None]] = {LOW: 0.8, HIGH: 1.2}
LOSSES: Final = {
    "cross_entropy": Loss(cross_entropy, frozenset()),
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo, defaults=CLIP),
    "cispo": Loss(cispo, defaults=CLIP),
    "dro": Loss(dro, defaults={BETA: None}, at_padding=True),
    "gspo": Loss(gspo, RATIO | {RATIO_MASK}, {LOW: None, HIGH: None}, single=True),
}


def losses_of(name: str, config: Config, logprobs: Tensor, inputs: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """The loss of each target, in the shape of `logprobs`, of a request that passed `check`; its sum is the loss."""
    settings = {key: float(value) for key, value in {**LOSSES[name].defaults, **config}.items() if value is not None}
    terms = Terms(logprobs, inputs, settings, rows)
    return terms.weighted(LOSSES[name].formula(terms))


# -- what is refused -----


def check(data: Sequence[Datum], loss_fn: str, config: Config, context: int, vocabulary: int) -> None:
    """UserFault that names the first fault of a request; `context`: the most tokens of a datum."""
    if loss_fn not in LOSSES:
        raise UserFault(f"loss {loss_fn!r} is not served; there are {', '.join(LOSSES)}")
    loss = LOSSES[loss_fn]
    _check_config(loss_fn, loss, config)
    if not data:
        raise UserFault("the request has no data; send at least one datum")
    if isinstance(data, Columns) and _all_sound(loss_fn, loss, data, context, vocabulary):
        return
    for number, datum in enumerate(data):
        if text := _fault(loss_fn, loss, datum, context, vocabulary):
            raise UserFault(f"datum {number}: {text}")


def _check_config(name: str, loss: Loss, config: Config) -> None:
    known = ", ".join(loss.defaults) or "none"
    for key, value in config.items():
        if key not in loss.defaults:
            raise UserFault(f"loss_fn_config of {name}: {key!r} is not read; its keys: {known}")
        if isinstance(value, str) or not math.isfinite(value):
            raise UserFault(f"loss_fn_config of {name}: {key} = {value!r}; give a finite number")
    if missing := [key for key, default in loss.defaults.items() if default is None and key not in config]:
        raise UserFault(f"loss_fn_config of {name}: give {', '.join(missing)}; there is no default for it in public")


def _all_sound(name: str, loss: Loss, data: Columns, context: int, vocabulary: int) -> bool:
    """Tell whether `_fault` finds nothing in any of the data: the values of all are looked at together, since a look
    costs more than the numbers of one datum do."""
    if _misnamed(name, loss, {*data.names} - {TOKENS}) or not 0 < data.lengths.min() <= data.lengths.max() <= context:
        return False
    for key in data.names:
        values = data.values(key)
        is_ids = key in (TOKENS, TARGETS)
        if not (values.dtype.kind == "i" and _known(values, vocabulary) if is_ids else np.isfinite(values).all()):
            return False
    return True


def _fault(name: str, loss: Loss, datum: Datum, context: int, vocabulary: int) -> str:
    """Describe what is wrong with a datum; "" for a sound one."""
    there, count = datum.inputs.keys(), len(datum.tokens)
    if text := _misnamed(name, loss, there):
        return text
    if not 0 < count <= context:
        return f"{count} tokens; a datum has 1 to {context}"
    shape = datum.inputs[TARGETS].shape
    if len(shape) not in (1, 2) or not all(shape) or (loss.single and len(shape) > 1):
        taken = f"[{count}]" if loss.single else f"[{count}] or [{count}, k]"
        return f"{TARGETS} has shape {list(shape)}; {name} takes {taken}"
    if len(shape) > 1 and loss.at_padding and not there & set(WEIGHTS):
        return (f"{TARGETS} has shape {list(shape)}, and {name} is not 0 at a cell without a target; give weights or "
                "mask of that shape, 0 at such cells")
    if shape[0] != count:
        return f"{TARGETS} has {shape[0]} positions, the input {count}; each token has one target"
    return _wrong_values(datum, shape, vocabulary)


def _misnamed(name: str, loss: Loss, there: Set[str]) -> str:
    """Describe what is wrong with the names of a datum's inputs; "" if nothing is."""
    if missing := (loss.needs | {TARGETS}) - there:
        return f"{name} needs {', '.join(sorted(missing))} in loss_fn_inputs"
    if name == "cross_entropy" and not there & set(WEIGHTS):
        return "cross_entropy needs weights in loss_fn_inputs, 1 for each position that is trained"
    if unknown := there - loss.reads:
        return f"{name} does not read {', '.join(sorted(unknown))}; it reads {', '.join(sorted(loss.reads))}"
    if there >= set(WEIGHTS):
        return "weights and mask are two names of one factor; give one of them"
    return ""


def _wrong_values(datum: Datum, shape: tuple[int, ...], vocabulary: int) -> str:
    for place, ids in (("the input", datum.tokens), (TARGETS, datum.inputs[TARGETS])):
        if ids.dtype.kind not in "iu":
            return f"{place} is {ids.dtype}; token ids are integers"
        if not _known(ids, vocabulary):
            low, high = int(ids.min()), int(ids.max())
            return f"token {low if low < 0 else high} in {place}; the model knows 0 to {vocabulary - 1}"
    for key, values in datum.inputs.items():
        if values.shape != shape:
            return f"{key} has shape {list(values.shape)}, {TARGETS} {list(shape)}; they must be the same"
        if key != TARGETS and not np.isfinite(values).all():
            return f"{key} has a number that is not finite"
    return ""


def _known(ids: NDArray[Any], vocabulary: int) -> bool:
    return bool(ids.view(UNSIGNED[ids.dtype.itemsize]).max() < vocabulary)  # a negative one is a large one there
