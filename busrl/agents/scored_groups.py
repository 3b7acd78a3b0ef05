"""The trainer's side of Atropos: the routes by which its environments post scored groups, and the rules for a group.

Talks to environments (aiohttp; atroposlib 0.4.0) and to a `Trainer`, which trains what they post. OpenAI's routes are
those of `busrl.agents.http`. Knows nothing of slots, rings or engines.

- A group is G token sequences with masks (-100, or the token where it is trained), log-probabilities and scores.
- 200: the group is kept. 422: the group breaks a rule, with the field and the rule. 503: there is no room. A client
  repeats a post after 5xx, three times, and never after 4xx.
- The address holds the run's key, since these clients send no headers of their own.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from busrl.agents import openai
from busrl.agents.episode import Episode, beside
from busrl.agents.http import ROOM_BYTES, STATUS, TOKEN_BYTES, EpisodeKeys, EpisodeServer, answer_of, same_key
from busrl.agents.renderer import Renderer
from busrl.agents.tree import Trajectory
from busrl.data.episodes import EpisodeLimits
from busrl.errors import CallRefused, CallUnanswered
from busrl.states import Finish

IGNORED = -100  # in a mask: the token is not trained
MOST_GROUPS, MOST_ENVIRONMENTS, LONGEST_NAME = 256, 1024, 200
LIST_BYTES = 64 << 20  # of a list of groups; more where a group alone may be larger
ZIPPED_BYTES = 1000  # longer answers are compressed for clients that accept that
NOT_TRAINED = ("advantages", "images", "overrides", "group_overrides")
TAUGHT = ("distill_token_ids", "distill_logprobs")
log = logging.getLogger("busrl")
Token = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class Group(msgspec.Struct):
    """`POST /scored_data`; a group with a field of NOT_TRAINED is refused, and so are those of TAUGHT without a teacher
    whose probabilities are posted."""

    tokens: list[list[Token]]
    masks: list[list[Token]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    env_id: int | None = None
    advantages: Any = None
    images: Any = None
    overrides: Any = None
    group_overrides: Any = None
    distill_token_ids: Any = None
    distill_logprobs: Any = None

    def digest(self) -> bytes:
        """16 bytes that are equal for copies of a group."""
        content: tuple[Any, ...] = (self.env_id, self.tokens, self.masks, self.scores, self.inference_logprobs)
        if _says(self.distill_token_ids):
            content += (self.distill_token_ids, self.distill_logprobs)
        return hashlib.blake2b(msgspec.json.encode(content), digest_size=16).digest()


Posted = tuple[bytes, Group, list[Trajectory]]  # a group with its digest and its members


class Environment(msgspec.Struct):
    """`POST /register-env`; the environment's shares of a batch are not used."""

    desired_name: str
    group_size: int
    connected: bool = True


class Named(msgspec.Struct):
    """`/status-env` and `/disconnect-env`."""

    env_id: int


class RunProgress(NamedTuple):
    """The progress of the run: its newest step, its last step, the groups that wait to be trained, the samples of a
    step, the policy version, and the step that made this version."""

    step: int
    steps: int
    waiting: int
    batch: int
    version: int
    version_step: int


class Trainer(Protocol):
    """Trains groups: `keep` takes one that the trainer does not have (False: no room). Lends calls that belong to no
    sample (`unclaimed`)."""

    async def keep(self, digest: bytes, members: list[Trajectory], scores: list[float], env: int | None) -> bool: ...
    def has(self, digest: bytes) -> bool: ...
    def state(self) -> RunProgress: ...
    def unclaimed(self) -> Episode: ...


# -- the rules for a group -----

Decode = Callable[[Sequence[int]], str]
# Of a sequence: its posted ids and log-probabilities of a teacher, the mask of its trained tokens, how many are kept of
# each, the size of the vocabulary. ValueError for what breaks a rule.
ReadTaught = Callable[[Any, Any, npt.NDArray[np.bool_], int, int], Any]


@dataclass(frozen=True)
class Rules:
    """`size`: the sequences of a group; `limits`: of each sequence; `ends`: ids that end a turn of the model;
    `taught`: reads what a teacher said of a sequence, `teacher_k` tokens of each; None where groups may not have it."""

    size: int
    vocabulary: int
    limits: EpisodeLimits
    ends: frozenset[int]
    taught: ReadTaught | None = None
    teacher_k: int = 0

    @property
    def numbers_per_token(self) -> int:
        """The numbers of a posted token, in relation to one without a teacher."""
        return 1 if self.taught is None else 1 + self.teacher_k

    def members(self, group: Group, decode: Decode, version: int, step: int) -> list[Trajectory]:
        """The sequences of a group as episodes, whose turns are the spans that their masks train; CallRefused names the
        field that is wrong, and the rule. The contract has no versions, so the tokens get the version of the run."""
        for name in NOT_TRAINED:
            if _says(getattr(group, name)):
                raise _refused(name, "cannot be used here: advantages come from the scores, tokens alone are read")
        if group.inference_logprobs is None:
            raise _refused("inference_logprobs", "is missing: the log-probability of each trained token is needed")
        for name in ("tokens", "masks", "scores", "inference_logprobs"):
            if (count := len(getattr(group, name))) != self.size:
                raise _refused(name, f"has {count} entries: must be the {self.size} of a group (groups.size)")
        parts = enumerate(zip(group.tokens, group.masks, group.inference_logprobs))
        members = [self._episode(*self._arrays(i, *part), decode, version, step) for i, part in parts]
        return [replace(member, taught=taught) for member, taught in zip(members, self._taught(group))]

    def _taught(self, group: Group) -> list[Any]:
        """Read what a teacher said of each sequence; None each where there is no teacher."""
        if self.taught is None:
            for name in TAUGHT:
                if _says(getattr(group, name)):
                    raise _refused(name, "cannot be used here: the run has no [[learner.teacher]] with posted = true")
            return [None] * self.size
        for name in TAUGHT:
            values = getattr(group, name)
            if not isinstance(values, list) or len(values) != self.size:
                rule = f"must have {self.size} entries, of the sequences of a group: its teacher is posted"
                raise _refused(name, rule)
        rows = []
        for i, (ids, logprobs) in enumerate(zip(group.distill_token_ids, group.distill_logprobs)):
            trained = np.array(group.masks[i], np.int32) != IGNORED
            try:
                rows.append(self.taught(ids, logprobs, trained, self.teacher_k, self.vocabulary))
            except ValueError as problem:
                raise _refused(f"distill_token_ids[{i}], distill_logprobs[{i}]", str(problem)) from None
        return rows

    def _arrays(self, i: int, tokens: list[int], masks: list[int], scores: list[float]) -> tuple[Any, Any, Any]:
        """The ids of sequence `i`, the spans [turn, 2] that are trained, and the log-probabilities of those."""
        at, limits = f"[{i}]", self.limits
        longest = min(limits.context, limits.tokens)
        if not 2 <= len(tokens) <= longest:
            raise _refused("tokens" + at, f"has {len(tokens)} tokens: must be 2 to {longest} (agents.context)")
        for name, values in (("masks", masks), ("inference_logprobs", scores)):
            if len(values) != len(tokens):
                raise _refused(name + at, f"has {len(values)} entries: must be as many as tokens, {len(tokens)}")
        ids, mask = np.array(tokens, np.int32), np.array(masks, np.int32)
        if (wrong := np.flatnonzero((ids < 0) | (ids >= self.vocabulary))).size:
            raise _refused(f"tokens{at}[{wrong[0]}]", f"is {tokens[wrong[0]]}: must be 0 to {self.vocabulary - 1}")
        trained = mask != IGNORED
        if (wrong := np.flatnonzero(trained & (mask != ids))).size:
            rule = f"is {masks[wrong[0]]}: must be {IGNORED}, or the token itself"
            raise _refused(f"masks{at}[{wrong[0]}]", rule)
        if trained[0] or not trained.any():
            raise _refused("masks" + at, "must train some token, and not the first, which nothing predicts")
        spans = np.flatnonzero(np.diff(trained, prepend=False, append=False)).reshape(-1, 2)
        if (count := int(trained.sum())) > limits.sampled or len(spans) > limits.turns:
            rule = f"at most {limits.sampled} (agents.sampled) in {limits.turns} turns (agents.max_turns)"
            raise _refused("masks" + at, f"trains {count} tokens in {len(spans)} turns: {rule}")
        with np.errstate(over="ignore"):
            logprobs = np.array(scores, np.float32)
        if (wrong := np.flatnonzero(trained & ~(np.isfinite(logprobs) & (logprobs <= 0)))).size:
            rule = f"is {scores[wrong[0]]}: must be a finite number at most 0, where the token is trained"
            raise _refused(f"inference_logprobs{at}[{wrong[0]}]", rule)
        return ids, spans, logprobs[trained]

    def _episode(self, ids: Any, spans: Any, logprobs: Any, decode: Decode, version: int, step: int) -> Trajectory:
        turns = np.zeros((len(spans), 8), np.int32)
        ended = [end < len(ids) or int(ids[end - 1]) in self.ends for _, end in spans]
        turns[:, 1:3], turns[:, 4], turns[:, 7] = spans, np.arange(len(spans)), 1
        turns[:, 3] = np.where(ended, Finish.EOS, Finish.LENGTH)
        text, versions = decode(ids[slice(*spans[-1])].tolist()), np.full(len(logprobs), version, np.uint32)
        return Trajectory(ids, np.array([len(ids)], np.int32), turns, logprobs, versions, None, text, step, 0)


def _says(value: Any) -> bool:
    """True if a field holds anything; empty maps in a list are nothing."""
    return any(map(_says, value)) if isinstance(value, list) else value is not None and value != {}


def _refused(field: str, rule: str) -> CallRefused:
    return CallRefused("invalid", f"{field} {rule}", field)


# -- the routes -----

Handler = Callable[[web.Request, bytes], Awaitable[Any]]


class CallerKeys(EpisodeKeys):
    """Accepts the run's key alone, in a header or in the address: each request with it is a new episode, which belongs
    to no sample."""

    def __init__(self, run_key: str, trainer: Trainer) -> None:
        super().__init__(run_key)
        self._address_key, self._trainer = run_key, trainer

    def episode_of(self, request: web.Request) -> tuple[Episode, str]:
        if not self.is_the_runs(request):
            raise CallRefused("invalid_api_key", "calls need the run's key: serve.key in its directory")
        episode = self._trainer.unclaimed()

        def unanswered(problem: CallUnanswered) -> None:
            raise web.HTTPServiceUnavailable(reason=str(problem).replace("\n", " "))

        episode.on_unanswered(unanswered)
        return episode, ""

    def is_known(self, request: web.Request) -> bool:
        return same_key(request.match_info.get("key", ""), self._address_key) or super().is_known(request)


class AtroposServer(EpisodeServer):
    """A listener with Atropos's contract below `url`, and OpenAI's routes for calls that belong to no sample. Use
    `async with`. `sampling`: the rule of agents.sampling for those calls."""

    def __init__(self, trainer: Trainer, rules: Rules, renderer: Renderer, sampling: str, host: str,
                 port: int, name: str, key: str, tell: Callable[[str], object] = log.warning) -> None:
        super().__init__(rules.limits.context, renderer, sampling, host, port, name, tell=tell,
                         keys=CallerKeys(key, trainer))
        tokens = min(rules.limits.context, rules.limits.tokens) * rules.size
        group = ROOM_BYTES + TOKEN_BYTES * tokens * rules.numbers_per_token
        self._posts = {"scored_data": group, "scored_data_list": max(group, min(LIST_BYTES, MOST_GROUPS * group))}
        self._trainer, self._rules, self._renderer, self._name, self._key = trainer, rules, renderer, name, key
        self._environments: list[Environment] = []
        self._latest: Group | None = None

    @property
    def url(self) -> str:
        """The address for an environment's `rollout_server_url`."""
        return f"{self.base_url.removesuffix('/v1')}/{self._key}"

    def routes(self) -> list[web.RouteDef]:
        gets = dict.fromkeys(("", "status", "info", "wandb_info", "latest_example"), self._about)
        gets["status-env"] = self._status_of
        posts = {"register": self._register, "register-env": self._register_environment,
                 "disconnect-env": self._disconnect, "scored_data": self._post, "scored_data_list": self._post}
        return [*super().routes(),
                *(web.get(f"/{{key}}/{path}", self._answering(handler)) for path, handler in gets.items()),
                *(web.post(f"/{{key}}/{path}", self._answering(handler)) for path, handler in posts.items())]

    def _answering(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler of aiohttp that answers with JSON of what `handler` returns, or 422 for what it refuses."""
        async def tell(request: web.Request) -> web.StreamResponse:
            if not same_key(request.match_info["key"], self._key):
                raise CallRefused("invalid_api_key", "the address must hold the run's key: atropos.json has it")
            try:
                most = self._posts.get(request.path.rpartition("/")[2], 0)
                response = answer_of(await handler(request, await self.bodies.whole(request, most)))
            except web.RequestPayloadError:
                response = answer_of({"detail": "the body is not what its Content-Encoding says", "field": ""}, 422)
                response.force_close()  # the rest of the body would be read as the next request
            except CallRefused as refused:
                if refused.code in STATUS:
                    raise
                status = 503 if refused.code == "no_room" else 422
                response = answer_of({"detail": str(refused), "field": refused.param}, status)
            if isinstance(response.body, bytes) and len(response.body) >= ZIPPED_BYTES:
                response.enable_compression()
            return response

        return tell

    async def _post(self, request: web.Request, body: bytes) -> dict[str, Any]:
        several = request.path.endswith("_list")
        count, posted = await beside(len(body), self._members, body, several, *self._trainer.state()[-2:])
        await self._keep(posted)
        return {"status": "received", **({"groups_processed": count} if several else {})}

    def _members(self, body: bytes, several: bool, version: int, step: int) -> tuple[int, list[Posted]]:
        """The number of groups in a body, and those of them that are new."""
        groups: list[Group] = openai.read(body, list[Group]) if several else [openai.read(body, Group)]
        if len(groups) > MOST_GROUPS:
            raise _refused("the body", f"has {len(groups)} groups: at most {MOST_GROUPS}")
        new = {digest: group for group in groups if not self._trainer.has(digest := group.digest())}
        decode = self._renderer.decode
        return len(groups), [(digest, group, self._rules.members(group, decode, version, step))
                             for digest, group in new.items()]

    async def _keep(self, posted: list[Posted]) -> None:
        """Keep wellformed groups, in order, as far as there is room. If the client posts the list again, groups that
        were kept are not kept twice."""
        for digest, group, members in posted:
            if not await self._trainer.keep(digest, members, group.scores, group.env_id):
                raise CallRefused("no_room", "no room for a group now: post it again")
            self._latest = group

    async def _about(self, request: web.Request, body: bytes) -> Any:
        state = self._trainer.state()
        answers: dict[str, Any] = {
            "status": {"current_step": state.step, "queue_size": state.waiting},
            "info": {"batch_size": state.batch, "max_token_len": self._rules.limits.context},
            "wandb_info": {"group": self._name, "project": "busrl"},
            "latest_example": self._latest or dict.fromkeys(Group.__struct_fields__[:4], ()),
        }
        return answers.get(request.path.rpartition("/")[2], {"message": "busrl, as AtroposLib API"})

    async def _status_of(self, request: web.Request, body: bytes) -> dict[str, Any]:
        """Answer a GET with a body. Any `env_id` will do: it may have been registered with an earlier process."""
        openai.read(body, Named)
        state, connected = self._trainer.state(), sum(environment.connected for environment in self._environments)
        return {"current_step": state.step, "queue_size": state.waiting, "self_queue_size": state.waiting,
                "unallocated_fraction": 1.0, "env_weight": 1.0 / max(1, connected),
                "max_group_size": self._rules.size}

    async def _register(self, request: web.Request, body: bytes) -> dict[str, Any]:
        """Answer another trainer with a number, which nothing uses: this run is the trainer."""
        return {"uuid": uuid.uuid4().int}

    async def _register_environment(self, request: web.Request, body: bytes) -> dict[str, Any]:
        environment, state = openai.read(body, Environment), self._trainer.state()
        if environment.group_size != self._rules.size:  # the client shows the status, and registers again
            rule = f"but this run trains groups of {self._rules.size} (groups.size): make them equal"
            return {"status": f"group_size = {environment.group_size}, {rule}"}
        if len(environment.desired_name) > LONGEST_NAME or len(self._environments) >= MOST_ENVIRONMENTS:
            raise _refused("desired_name", f"at most {LONGEST_NAME} characters, and {MOST_ENVIRONMENTS} environments")
        count = sum(other.desired_name == environment.desired_name for other in self._environments)
        self._environments.append(environment)
        return {"status": "success", "env_id": len(self._environments) - 1, "checkpoint_dir": "",
                "wandb_name": f"{environment.desired_name}_{count}", "starting_step": state.step,
                "checkpoint_interval": -1, "num_steps": state.steps}

    async def _disconnect(self, request: web.Request, body: bytes) -> dict[str, Any]:
        number = openai.read(body, Named).env_id
        if not 0 <= number < len(self._environments):
            return {"status": "failure", "error": f"env_id = {number}: no such environment"}
        self._environments[number].connected = False
        return {"status": "success"}
