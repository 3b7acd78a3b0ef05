"""vLLM as the engine of a service: each request names its weights, or asks for the scores of its prompt.

Driven by the rollout role like every engine, and made of `busrl.engines.vllm`. Knows nothing of models that are
trained, of clients or logs; imports vLLM inside functions only.

- A folder is read before the first request that names it begins: one that cannot be used refuses its requests, and
  nothing else. vLLM loads it when it draws with it: a load between two steps would move adapters from their places.
- A request whose adapter finds no place waits in vLLM's queue.
- vLLM gives log-probabilities of chosen ids for the next token alone: those of a prompt's targets are asked for place
  by place, with the prompt in its cache of prefixes.
- vLLM does not know which adapter of the head belongs to the places of a prompt: from the first such adapter on no
  prompt is scored.
- Log-probabilities are of the full softmax at temperature 1; the version of a token is the number of its folder.
- Where all weights are trained, a request names the folder of a whole model: it waits until those that draw with
  another have ended, and the workers read the folder into the live model.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.engines.base import Finished, Request
from busrl.engines.torch import lora
from busrl.engines.vllm.engine import Running, VllmEngine
from busrl.engines.vllm.process import Start
from busrl.engines.vllm.weights import LoadedAdapter
from busrl.engines.vllm_versions import lora_rank
from busrl.errors import BusrlError, WeightsRefused
from busrl.service.beside import BASE, Beside, weights_of, whole_turn
from busrl.service.bodies import MOST_TOP
from busrl.service.model_folders import tensors_in
from busrl.service.registry import FULL
from busrl.service.sampling import PLACES, SCORES, Places, has_a_stop
from busrl.states import Finish

if TYPE_CHECKING:
    from busrl.topology import Topology
    from busrl.topology.schema import Vllm
    from busrl.weights.base import Receiver
    from busrl.weights.factory import TransportSettings

EXTENSION = "busrl.service.vllm_worker.FolderExtension"
NO_SCORES = ("prompts are not scored by vLLM beside adapters of the head, and there was one; create models with "
             "train_unembed=False, or use engine = \"torch\"")
NO_TARGETS = ("target_prompt_logprobs are not given by this version of vLLM; take 0.32 or later, ask for "
              "topk_prompt_logprobs, or use engine = \"torch\"")
AT_ONCE = 8  # places of a prompt whose targets are asked for: others' rows are drawn beside them
NO_TOKENS = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint32)


@dataclass
class ServedRequest(Running):
    """A request of a service inside vLLM. `asked`: what it wants to know of its prompt."""

    asked: Places | None = None
    refused: str = ""
    scores: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, adapter: LoadedAdapter | None) -> ServedRequest:
        asked = msgspec.convert(request.extra["score"], Places) if "score" in request.extra else None
        if asked is not None:  # what lies behind the last place is not needed
            request = replace(request, prompt_ids=request.prompt_ids[: asked.end])
        return cls(request, adapter=cls.loaded(weights_of(request)), asked=asked)

    @staticmethod
    def loaded(folder: str) -> LoadedAdapter:
        """The adapter in a folder; the base without one."""
        if not folder:
            return LoadedAdapter(0, None)
        from vllm.lora.request import LoRARequest

        number = number_of(folder)
        return LoadedAdapter(number, LoRARequest(f"s{number}", number, folder))

    def refuse(self, why: str) -> None:
        self.refused, self.finish = why, Finish.ABORTED

    def take(self, output: Any, version: int) -> None:
        super().take(output, version)
        if self.asked is not None and output.prompt_logprobs:
            self.scores |= scores_of(output.prompt_logprobs[self.asked.first :], self.known_ids[self.asked.first :],
                                     self.asked.top)

    def sampling(self, stops: list[int], seeded: bool, **more: Any) -> Any:
        extra = self.request.extra
        more |= {"top_k": extra["top_k"]} if "top_k" in extra else {}
        more |= {"prompt_logprobs": self.asked.top} if self.asked is not None else {}
        return super().sampling(stops if extra.get("ends", True) else [], seeded, **more)

    async def drawn_by(self, engine: VllmEngine) -> None:
        if self.asked is not None and self.asked.targets:
            self.scores[SCORES[3]] = await self._target_scores(engine, self.asked)
        await super().drawn_by(engine)

    async def _target_scores(self, engine: VllmEngine, asked: Places) -> npt.NDArray[np.float32]:
        """Log-probabilities of the targets, 0 where nothing is asked for. The last place comes first, and leaves the
        prompt in the cache for the others."""
        targets = asked.target_ids()
        scores = np.zeros(targets.shape, np.float32)
        wanted = np.flatnonzero((targets >= 0).any(1))[::-1]
        for rows in (wanted[:1], *np.split(wanted[1:], range(AT_ONCE, len(wanted) - 1, AT_ONCE))):
            found = await asyncio.gather(*(self._next_scores(engine, asked.first + row, targets[row]) for row in rows))
            for row, by_id in zip(rows, found):
                scores[row] = [by_id.get(target, 0.0) for target in targets[row].tolist()]
        return scores

    async def _next_scores(
        self, engine: VllmEngine, place: int, targets: npt.NDArray[np.int32]
    ) -> dict[int, float]:
        """Log-probabilities of these ids at a place of the prompt."""
        from vllm import SamplingParams

        wanted = sorted({target for target in targets.tolist() if target >= 0})
        settings = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=wanted, ignore_eos=True,
                                  detokenize=False)
        found: dict[int, float] = {}
        async with self.outputs(engine, self.known_ids[:place], settings, f"{self.id}.{place}") as outputs:
            async for output in outputs:
                if output.outputs[0].logprobs:
                    found = {id: entry.logprob for id, entry in output.outputs[0].logprobs[0].items()}
                engine.moved_at = time.monotonic()
        return {id: found[id] for id in wanted}

    def finished(self, finish: int, text: str | None = None, refused: str = "") -> Finished:
        """Answer; a greedy one too has the log-probabilities of the full softmax."""
        if self.refused:
            return Finished(self.request.key, *NO_TOKENS, Finish.ABORTED, refused=self.refused)
        plain = super().finished(finish, text, refused)
        logprobs = np.minimum(np.array(self.logprobs, np.float32), np.float32(0.0))
        return replace(plain, logprobs=logprobs, extra=self.scores)


def scores_of(places: list[Any], ids: list[int], top: int) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a prompt's places, from what vLLM says of each: log-probabilities and ranks by id."""
    scores = {SCORES[0]: np.array([place[token].logprob for place, token in zip(places, ids)], np.float32)}
    if top:
        likeliest = [sorted(place.items(), key=lambda entry: entry[1].rank)[:top] for place in places]
        scores[SCORES[1]] = np.array([[token for token, _ in best] for best in likeliest], np.int32)
        scores[SCORES[2]] = np.array([[entry.logprob for _, entry in best] for best in likeliest], np.float32)
    return scores


class WholeRequest(ServedRequest):
    """A request that draws with a whole model, which vLLM has when it begins."""

    @staticmethod
    def loaded(folder: str) -> LoadedAdapter:
        return LoadedAdapter(number_of(folder), None)


class ServingVllm(VllmEngine):
    """vLLM with what requests of a service ask for beside their weights."""

    def receiver(self, settings: TransportSettings, name: str) -> Receiver | None:
        """No weights are published in a service: the ordinary receiver has nothing to give."""
        return None

    async def _follow(self, running: Running) -> None:
        assert isinstance(running, ServedRequest)
        why = await self._objection(running)
        if not why:
            await super()._follow(running)
            return
        with self._lock:
            running.refuse(why)
            self._ended.append(running)
        self._wake.set()

    async def _objection(self, running: ServedRequest) -> str:
        """The reason why vLLM cannot answer a request; "" if it can."""
        unseen = running.asked is not None and running.asked.targets and not gives_targets()
        return NO_TARGETS if unseen else ""

    def take(self, running: Running, output: Any) -> None:
        super().take(running, output)
        texts = running.request.extra.get("stop_texts")
        if texts and running.finish is None and self._has(running, texts):
            with self._lock:
                running.finish = Finish.EOS
                self._ended.append(running)
            self._wake.set()
            task = asyncio.ensure_future(self.core.engine.abort(running.id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _has(self, running: Running, texts: list[str]) -> bool:
        ids = np.array(running.token_ids, np.int32)
        return has_a_stop(texts, len(ids), lambda begin: ids[begin:], self.decode)


def gives_targets() -> bool:
    from vllm import SamplingParams

    return hasattr(SamplingParams, "logprob_token_ids")


class AdaptersInVllm(ServingVllm):
    """vLLM with adapters, several at once."""

    kind = ServedRequest

    def __init__(self, start: Start, **settings: Any) -> None:
        super().__init__(start, **settings)
        self._read: set[str] = set()  # folders that can be used
        self._has_heads = False  # one of them adapts the head

    async def _objection(self, running: ServedRequest) -> str:
        assert running.adapter is not None
        if running.adapter.request is not None:
            try:
                await self._look(running, running.adapter.request.lora_path)
            except WeightsRefused as problem:
                return str(problem)
        return NO_SCORES if running.asked is not None and self._has_heads else await super()._objection(running)

    async def _look(self, running: ServedRequest, folder: str) -> None:
        """Read a folder that was not read before. The first adapter of the head waits for prompts that are scored."""
        if folder in self._read:
            return
        adapter = await asyncio.to_thread(lora.read, Path(folder))
        if any(name.rpartition(".")[0].endswith("lm_head") for name in adapter):
            self._has_heads = True
            scoring = [other.task for other in self.running if isinstance(other, ServedRequest) and other.asked]
            if others := [task for task in scoring if task is not None and task is not running.task]:
                await asyncio.wait(others, timeout=self.settings.rpc_s)
        self._read.add(folder)


class WholeInVllm(Beside, ServingVllm):
    """vLLM with the weights of one folder at a time."""

    kind = WholeRequest

    def __init__(self, start: Start, **settings: Any) -> None:
        super().__init__(start, **settings)
        self._loaded: str | None = BASE  # None while another folder is read

    def _begin(self, requests: list[Request]) -> None:
        self._beside |= {request.key: request for request in requests}
        self._advance()

    def _advance(self) -> None:
        """Let the requests begin whose weights vLLM has, or may read now."""
        folder = whole_turn(map(weights_of, self._beside.values()), self._loaded, len(self._running))
        keys = [key for key, request in self._beside.items() if weights_of(request) == folder]
        try:
            if folder is not None and folder != self._loaded:
                self._read(folder)
        except WeightsRefused as problem:
            self._done += [self._given_up(key, refused=str(problem)) for key in keys]
            return
        super()._begin([self._beside.pop(key) for key in keys])

    def _read(self, folder: str) -> None:
        """Load a folder into the live model. WeightsRefused if it cannot be read; EngineLost if it is no such model."""
        path = folder if folder != BASE else self.start.model
        tensors_in(Path(path))
        self._loaded = None
        try:
            self.core.rpc("busrl_read_folder", path, timeout_s=self.settings.start_s)
        except BusrlError:
            raise
        except Exception as problem:  # vLLM's own types: the model may hold a mixture
            raise self.core.lose(f"vLLM could not load {path}: {problem}") from problem
        self.use_version(number_of(folder))
        self._loaded = folder


def number_of(folder: str) -> int:
    """The number of a folder of weights, which is its name; 0 for the base."""
    return int(Path(folder).name) if folder else 0


def settings_of(settings: Vllm, places: int = PLACES) -> Vllm:
    """The settings of an engine of a service; what a topology says itself in `vllm.extra` stays."""
    implied = {"logprobs_mode": "raw_logprobs", "max_logprobs": str(MOST_TOP)}
    if places:
        implied["max_cpu_loras"] = str(2 * places)
    return replace(settings, extra=implied | settings.extra)


def make(topology: Topology, process: str) -> ServingVllm:
    temperature = topology.generation.temperature
    if topology.tinker.weights == FULL:
        start = replace(Start.of(topology), settings=settings_of(topology.vllm, 0), extension=EXTENSION)
        return WholeInVllm(start, temperature=temperature)
    start = replace(Start.of(topology), settings=settings_of(topology.vllm),
                    lora_rank=lora_rank(topology.tinker.max_rank), adapters=PLACES)
    return AdaptersInVllm(start, temperature=temperature)
