"""The JSON bodies of a service's routes, as structs, and the error that says what is wrong with a body.

Read by the door. Knows the fields of the interface and their limits, nothing of HTTP, of tensors or of what exists.

- Fields that the interface does not name are ignored, and not logged; what it names and is not served here is refused,
  with a remedy.
- A `BadBody` of a training request has its model and number if those can be read: a status in place of a future would
  leave a gap that its client waits behind for ever.
- `BODIES` has a struct for each route with a body of JSON; `read_body` is the one way in. Behind the log it is
  `read_logged`: all fields are written there, so a body may be longer than the one that came.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

IDENTIFIER = re.compile(r"[A-Za-z0-9._:-]{1,300}")
NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,128}")
SAVED = re.compile(
    r"tinker://([A-Za-z0-9._:-]{1,300})/(weights|sampler_weights|external_weights)/((?!\.+$)[A-Za-z0-9._-]{1,128})")
LAST_NUMBER: Final = 2**31 - 1
MOST_NESTED = 1 << 16  # objects and lists of a body: each becomes one here, however few bytes it has
JSON_BYTES, METADATA_BYTES, SHOWN_BYTES = 8 << 20, 16 << 10, 1 << 20  # the last: a larger body's value is not shown
MOST_SAMPLES, MOST_STOPS, MOST_TOP, MOST_RETRIEVED = 128, 64, 128, 1 << 16

Id = Annotated[str, Meta(min_length=1, max_length=300, pattern=r"^[A-Za-z0-9._:-]*\Z")]
Label = Annotated[str, Meta(max_length=300)]
Path = Annotated[str, Meta(max_length=600)]
Place = Annotated[int, Meta(ge=0, le=LAST_NUMBER)]  # number of a model or sampler in its session
Number = Annotated[int, Meta(ge=1, le=LAST_NUMBER)]  # of a request of a model
SampleNumber = Annotated[int, Meta(ge=0, lt=2 * 10**18)]  # a clone's begin at a multiple of 10^9, up to 10^9 times it
Token = Annotated[int, Meta(ge=0, le=LAST_NUMBER)]
Top = Annotated[int, Meta(ge=0, le=MOST_TOP)]
Ttl = Annotated[int, Meta(ge=1, le=10 * 366 * 86_400)]  # seconds
Metadata = dict[str, Any] | None


class BadBody(Exception):
    """A body that is no request: the field, the rule that it breaks, the remedy.

    `request`: model and number of the training request that it is, if they could be read.
    """

    status: ClassVar[int] = 400

    def __init__(self, field: str, rule: str, remedy: str, request: tuple[str, int] | None = None) -> None:
        self.field, self.rule, self.remedy, self.request = field, rule, remedy, request
        super().__init__(field, rule, remedy)

    def __str__(self) -> str:
        return f"{self.field or 'the body'}: {self.rule}; {self.remedy}"

    def within(self, place: str) -> BadBody:
        """The fault as one of a field of `place`."""
        return type(self)(f"{place}.{self.field}" if self.field else place, self.rule, self.remedy, self.request)


class TooLarge(BadBody):
    """A body above the bound on its size."""

    status: ClassVar[int] = 413


class Fields(msgspec.Struct, frozen=True):
    """Base of all bodies and their parts."""

    def check(self) -> None:
        """BadBody for what the types of the fields do not say."""


# -- sessions -----


class ClientConfig(Fields, frozen=True):
    sdk_version: Label = ""


class CreateSession(Fields, frozen=True):
    tags: list[Label] | None = None
    user_metadata: Metadata = None
    sdk_version: Label = ""
    project_id: Label | None = None
    display_name: Label | None = None

    def check(self) -> None:
        _bounded("user_metadata", self.user_metadata)
        _bounded("tags", self.tags)


class SessionHeartbeat(Fields, frozen=True):
    session_id: Id


class Reason(Fields, frozen=True):
    type: Annotated[str, Meta(pattern=r"^(success|errored|interrupted)\Z")] = "success"


class FinishSession(Fields, frozen=True):
    reason: Reason = Reason()
    detail: str | None = None


# -- models -----


class LoraConfig(Fields, frozen=True):
    rank: Annotated[int, Meta(ge=1, le=LAST_NUMBER)]
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def check(self) -> None:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise BadBody("lora_config", "it trains no part", "set train_attn, train_mlp or train_unembed")


class OptimizerConfig(Fields, frozen=True):
    type: Label = "adamw"

    def check(self) -> None:
        if self.type != "adamw":
            raise BadBody("optimizer_config.type", f"{self.type!r} is not served", "use adamw")


class CreateModel(Fields, frozen=True):
    session_id: Id
    model_seq_id: Place
    base_model: Path
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata = None

    def check(self) -> None:
        if self.lora_config is not None:
            self.lora_config.check()
        if self.optimizer_config is not None:
            self.optimizer_config.check()
        _bounded("user_metadata", self.user_metadata)


class GetInfo(Fields, frozen=True):
    model_id: Id


class AdamParams(Fields, frozen=True):
    learning_rate: Annotated[float, Meta(ge=0)] = 1e-4
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(gt=0)] = 1e-12
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Meta(ge=0)] = 0.0  # 0: none


class OptimStep(Fields, frozen=True):
    model_id: Id
    seq_id: Number
    adam_params: AdamParams | None = None

    def check(self) -> None:
        if self.adam_params is None:
            raise BadBody("adam_params", "missing: models of this service are trained by adamw", "send AdamParams")


class SaveWeights(Fields, frozen=True):
    model_id: Id
    seq_id: Number
    path: Path
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata = None

    def check(self) -> None:
        _check_name(self.path)
        _bounded("user_metadata", self.user_metadata)


class SaveWeightsForSampler(Fields, frozen=True):
    model_id: Id
    seq_id: Number
    path: Path | None = None
    sampling_session_seq_id: Place | None = None
    kind: Annotated[str, Meta(pattern=r"^(snapshot|inflight)\Z")] = "snapshot"
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata = None

    def check(self) -> None:
        if self.path is not None:
            _check_name(self.path)
        elif self.sampling_session_seq_id is None:
            raise BadBody("path", "neither path nor sampling_session_seq_id", "give one of them")
        _bounded("user_metadata", self.user_metadata)


class SaveWeightsExternal(Fields, frozen=True):
    model_id: Id
    seq_id: Number
    path: Path
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=10)] | None = None

    def check(self) -> None:
        _check_name(self.path)


class LoadWeights(Fields, frozen=True):
    """Loads into the model `model_id`, or makes the model `model_seq_id` of a session, of which it is number 0."""

    path: Path
    optimizer: bool
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Place | None = None
    base_model: Path | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata = None

    def check(self) -> None:
        into = self.model_id is not None and self.seq_id is not None
        makes = self.session_id is not None and self.model_seq_id is not None
        if into == makes:
            raise BadBody("model_id", "neither or both of model_id with seq_id, and session_id with model_seq_id",
                          "give one pair")
        if not SAVED.fullmatch(self.path):
            raise BadBody("path", f"{self.path[:100]!r} is no path of this service", "send tinker://MODEL/weights/NAME")
        if self.optimizer_config is not None:
            self.optimizer_config.check()


class WeightsInfo(Fields, frozen=True):
    tinker_path: Path


class SetTtl(Fields, frozen=True):
    ttl_seconds: Ttl | None = None  # from now on; None: for ever


# -- samplers -----


class CreateSamplingSession(Fields, frozen=True):
    session_id: Id
    sampling_session_seq_id: Place
    base_model: Path | None = None
    model_path: Path | None = None

    def check(self) -> None:
        if not self.model_path and not self.base_model:
            raise BadBody("model_path", "neither model_path nor base_model", "give one of them")


class JoinSamplingSession(Fields, frozen=True):
    sampling_session_id: Id


class Chunk(Fields, frozen=True):
    """A piece of a prompt. `type`: of the kinds that clients know, encoded_text alone is served."""

    tokens: list[Token] = []
    type: Label = "encoded_text"


class Prompt(Fields, frozen=True):
    chunks: list[Chunk]

    def check(self) -> None:
        if any(chunk.type != "encoded_text" for chunk in self.chunks):
            raise BadBody("prompt", "images and audio are not served here", "send encoded_text")

    def ids(self, vocabulary: int, context: int) -> npt.NDArray[np.int32]:
        """The tokens, int32 (n,). BadBody: none, too many for an answer to have room, or outside of the vocabulary."""
        ids = np.array([token for chunk in self.chunks for token in chunk.tokens], np.int32)
        if not 0 < ids.size < context:
            raise BadBody("prompt", f"{ids.size} tokens; 1 to {context - 1} are allowed (tinker.context)",
                          "send a shorter prompt")
        if ids.max() >= vocabulary:
            raise BadBody("prompt", f"token {ids.max()}; the model has 0 to {vocabulary - 1}", "use its tokenizer")
        return ids


class SamplingParams(Fields, frozen=True):
    """`max_tokens`: None: to the end of the context. `top_k`: -1: all. `stop`: None: the model's own ends; []: none."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, lt=1e6)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=LAST_NUMBER)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    stop: str | list[str | int] | None = None

    def check(self) -> None:
        if self.top_k == 0:
            raise BadBody("sampling_params.top_k", "0 draws nothing", "send -1 for all tokens, or 1 or more")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS:
            raise BadBody("sampling_params.stop", f"{len(stops)} stops; {MOST_STOPS} at most", "send fewer")
        for stop in stops:
            if stop == "" or (isinstance(stop, int) and not 0 <= stop <= LAST_NUMBER):
                raise BadBody("sampling_params.stop", f"{stop!r} stops nothing", "send ids, or texts with letters")


class TargetTokens(Fields, frozen=True):
    """Ids whose log-probabilities are asked for, (len(prompt) - 1, k), row by row; -1 asks for nothing. Of compressed
    rows `data` has the cells that are listed, and the others ask for nothing."""

    data: list[Annotated[int, Meta(ge=-1, le=LAST_NUMBER)]]
    shape: Annotated[list[Place], Meta(min_length=2, max_length=2)]
    dtype: Label = "int64"
    sparse_crow_indices: list[Place] | None = None
    sparse_col_indices: list[Place] | None = None

    def check(self) -> None:
        if (self.sparse_crow_indices is None) != (self.sparse_col_indices is None):
            raise BadBody("target_prompt_logprobs", "one of sparse_crow_indices and sparse_col_indices is missing",
                          "send both, or a dense tensor")
        cells = len(self.data) if self.is_sparse else math.prod(self.shape)
        if cells != len(self.data) or not 1 <= self.shape[1] <= MOST_TOP:
            raise BadBody("target_prompt_logprobs.shape", f"{self.shape} for {len(self.data)} ids",
                          f"send the tensor's own, 1 to {MOST_TOP} wide")
        if self.is_sparse:
            self._check_rows(*self.compressed())

    def _check_rows(self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> None:
        if rows.size != self.shape[0] + 1 or rows[0] != 0 or rows[-1] != columns.size or (np.diff(rows) < 0).any():
            raise BadBody("target_prompt_logprobs.sparse_crow_indices", f"{rows.size} offsets do not rise from 0 to "
                          f"the {columns.size} columns in {self.shape[0]} steps", "send compressed rows (CSR)")
        if columns.size != len(self.data):
            raise BadBody("target_prompt_logprobs.data", f"{len(self.data)} ids for {columns.size} columns",
                          "send one for each")
        cells = np.repeat(np.arange(self.shape[0]), np.diff(rows)) * self.shape[1] + columns
        if columns.max(initial=0) >= self.shape[1] or np.unique(cells).size != cells.size:
            raise BadBody("target_prompt_logprobs.sparse_col_indices", "a column is outside of the shape, or a cell is "
                          "listed twice", "send each cell once")

    @property
    def is_sparse(self) -> bool:
        return self.sparse_crow_indices is not None

    def compressed(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Offsets of the rows and columns of the cells, of a sparse tensor."""
        return np.array(self.sparse_crow_indices, np.int64), np.array(self.sparse_col_indices, np.int64)

    def ids(self) -> npt.NDArray[np.int32]:
        """The ids, int32 of the shape."""
        if not self.is_sparse:
            return np.array(self.data, np.int32).reshape(self.shape)
        rows, columns = self.compressed()
        ids = np.full(self.shape, -1, np.int32)
        ids[np.repeat(np.arange(self.shape[0]), np.diff(rows)), columns] = self.data
        return ids

    def require(self, places: int, vocabulary: int) -> None:
        """BadBody: not so many rows, or an id outside of the vocabulary."""
        if self.shape[0] != places:
            raise BadBody("target_prompt_logprobs.shape", f"{self.shape[0]} rows", f"send {places}, one less than ids")
        if max(self.data, default=-1) >= vocabulary:
            raise BadBody("target_prompt_logprobs", f"token {max(self.data)}; the model has 0 to {vocabulary - 1}",
                          "use its tokenizer")


class Sample(Fields, frozen=True):
    sampling_session_id: Id
    seq_id: SampleNumber
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    num_samples: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Top | None = None
    topk_sample_logprobs: Top | None = None
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None
    target_prompt_logprobs: TargetTokens | None = None
    prompt_alt_tokens_k: int | None = None
    record_stability_info: bool | None = None

    def check(self) -> None:
        self.prompt.check()
        self.sampling_params.check()
        if self.target_prompt_logprobs is not None:
            self.target_prompt_logprobs.check()
        if self.prompt_alt_tokens_k:
            raise BadBody("prompt_alt_tokens_k", "not served here", "sample tokens of the prompt's prefixes")
        if self.record_stability_info:
            raise BadBody("record_stability_info", "not served here", "use loss_fn=importance_sampling")
        if self.prompt_logprobs_last_n is not None and not (self.prompt_logprobs or self.topk_prompt_logprobs):
            raise BadBody("prompt_logprobs_last_n", "it is of prompt_logprobs, which are not asked for",
                          "set prompt_logprobs")


# -- futures -----


class RetrieveFuture(Fields, frozen=True):
    request_id: Id
    allow_metadata_only: bool = False


class Target(Fields, frozen=True):
    sampling_session_id: Id
    cloned_sampler_id: Annotated[int, Meta(ge=0, le=10**9)] | None = None


class RetrieveFutures(Fields, frozen=True):
    target: Target
    prev_cursor: Annotated[int, Meta(ge=0, lt=2**53)] | None = None
    timeout: Annotated[float, Meta(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Id], Meta(max_length=MOST_RETRIEVED)] | None = None


class CancelFuture(Fields, frozen=True):
    request_id: Id


BODIES: Final[dict[str, type[Fields]]] = {
    "client/config": ClientConfig, "client/dynamic_config": ClientConfig, "create_session": CreateSession,
    "session_heartbeat": SessionHeartbeat, "sessions/S/finish": FinishSession, "create_model": CreateModel,
    "get_info": GetInfo, "optim_step": OptimStep, "save_weights": SaveWeights,
    "save_weights_for_sampler": SaveWeightsForSampler, "save_weights_external": SaveWeightsExternal,
    "load_weights": LoadWeights, "weights_info": WeightsInfo, "training_runs/M/checkpoints/C/ttl": SetTtl,
    "create_sampling_session": CreateSamplingSession, "join_sampling_session": JoinSamplingSession, "asample": Sample,
    "retrieve_future": RetrieveFuture, "retrieve_futures": RetrieveFutures, "cancel_future": CancelFuture,
}
# Numbered requests of a model.
IN_LINE: Final = (OptimStep, SaveWeights, SaveWeightsForSampler, SaveWeightsExternal, LoadWeights)

Kind = TypeVar("Kind", bound=Fields)
_PLACE = re.compile(r" - at `([^`]*)`$")
_STEP = re.compile(r"\.([A-Za-z_0-9]+)|\[(\d+)\]")


class _Numbers(msgspec.Struct):
    """Model and number of a request, whatever else it has."""

    model_id: str
    seq_id: int


def read_body(kind: type[Kind], body: bytes) -> Kind:
    """A body as a struct of that kind, checked; an empty body is an empty object. BadBody: it is none."""
    if len(body) > JSON_BYTES:
        raise TooLarge("", f"{len(body)} bytes of JSON; {JSON_BYTES} at most", "send less")
    if (nested := body.count(b"{") + body.count(b"[")) > MOST_NESTED:
        raise TooLarge("", f"{nested} objects and lists; {MOST_NESTED} at most", "send fewer")
    try:
        body.decode()  # the next line looks into no text of a field that the interface does not name
        read = msgspec.json.decode(body or b"{}", type=kind)
        read.check()
    except msgspec.ValidationError as problem:
        raise _refused(str(problem), body, _numbered(kind, body)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as problem:
        raise BadBody("", f"no JSON: {problem}", "send a JSON object") from None
    except BadBody as problem:
        problem.request = _numbered(kind, body)
        raise
    return read


def as_logged(body: Fields) -> bytes:
    """The body with the fields that the interface names alone: whatever else a client sent, nobody reads again."""
    return msgspec.json.encode(body)


def read_logged(kind: type[Kind], body: bytes) -> Kind:
    """A body that was checked before it was logged."""
    return msgspec.json.decode(body or b"{}", type=kind)


def _numbered(kind: type[Fields], body: bytes) -> tuple[str, int] | None:
    """Model and number of a training request whose other fields are wrong."""
    try:
        found = msgspec.json.decode(body, type=_Numbers) if kind in IN_LINE else None
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    if found is None or not IDENTIFIER.fullmatch(found.model_id) or not 1 <= found.seq_id <= LAST_NUMBER:
        return None
    return found.model_id, found.seq_id


def _refused(text: str, body: bytes, request: tuple[str, int] | None) -> BadBody:
    """Tell what msgspec finds wrong with a body, with the field and its value."""
    place = _PLACE.search(text)
    field = place[1].removeprefix("$").removeprefix(".") if place else ""
    rule = text[: place.start()] if place else text
    value = _value(body, place[1]) if place and len(body) <= SHOWN_BYTES else ""
    return BadBody(field, value + rule, "see docs/service-wire.md", request)


def _value(body: bytes, place: str) -> str:
    """Show the beginning of a value in a body; nothing of one that has others in it, or cannot be found."""
    try:
        value = msgspec.json.decode(body)
        for step in _steps(place):
            value = value[step]
    except (msgspec.DecodeError, RecursionError, ValueError, LookupError, TypeError):
        return ""
    return "" if isinstance(value, dict | list) else f"{value!r:.100}: "


def _steps(place: str) -> Iterator[str | int]:
    for name, index in _STEP.findall(place):
        yield name or int(index)


def _check_name(path: str) -> None:
    if not NAME.fullmatch(path):
        raise BadBody("path", f"{path[:100]!r} is no name", "send 1 to 128 of A-Z, a-z, 0-9, '.', '_', '-'")


def _bounded(field: str, value: object) -> None:
    if value and len(msgspec.json.encode(value)) > METADATA_BYTES:
        raise BadBody(field, f"above {METADATA_BYTES >> 10} KiB", "send less")
