"""Engines of a busrl run as the rollout server of TRL's asynchronous trainer: the routes of vLLM that TRL calls.

    python examples/trl/bridge.py RUN_DIR [--port 8000]

RUN_DIR is a run of `configs/tinker.toml`, whose engines draw with many LoRA adapters at once. TRL writes each new
policy as an adapter in a folder and names it in its requests; each becomes a model call with that folder.

- An engine that dies costs time alone: its calls wait for the next one, and TRL sees nothing.
- New weights pause nobody: a request draws with the adapter that it names, to its end.
- What the engines do not know (top_k, min_p, penalties) is refused with 400: TRL's probabilities would be wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from busrl.errors import CallUnanswered
from busrl.paths import ADAPTER_CONFIG, RunPaths
from busrl.ring import Ring
from busrl.ring.calls import AsyncCaller, ModelCall
from busrl.states import Finish
from busrl.topology import Topology

PATIENCE_S = 3600.0  # a request may wait for an engine for so long
MOST_ADAPTERS = 16  # that an engine holds at once
NEUTRAL = {"top_k": (-1, 0, None), "min_p": (0, 0.0, None), "repetition_penalty": (1, 1.0, None)}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusal(Exception):
    """A request that cannot be served, in words."""


class Bridge:
    def __init__(self, run_dir: Path) -> None:
        self._paths = RunPaths.of(run_dir)
        self._topology = Topology.from_json(self._paths.topology.read_text())
        self._adapters: dict[str, str] = {}  # folders by the names that TRL gave them
        self._asked = self._loaded = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[in_words])
        app.cleanup_ctx.append(self._attached)
        app.add_routes([
            web.get("/health", self._nothing), web.post("/pause", self._nothing), web.post("/resume", self._nothing),
            web.get("/v1/models", self._models), web.get("/server_info", self._server_info),
            web.post("/v1/load_lora_adapter", self._load), web.post("/v1/unload_lora_adapter", self._unload),
            web.post("/v1/completions", self._complete),
        ])
        return app

    async def _attached(self, app: web.Application) -> AsyncIterator[None]:
        """Take part in the run's ring of calls, as long as the application lives."""
        ring = Ring.attach(self._paths.calls_name, calls=True)
        ring.register("trl", "trl/0")
        # Messages of a caller only spare engines useless tokens; without a bus they go nowhere.
        async with AsyncCaller(ring, lambda message, address: None) as self._caller:
            yield
        ring.close()

    # -- what TRL asks of a server -----

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self._topology.model.path, "max_model_len": self._context}]})

    @property
    def _context(self) -> int:
        return self._topology.tinker.context

    async def _server_info(self, request: web.Request) -> web.Response:
        lora = {"max_lora_rank": self._topology.tinker.max_rank, "max_loras": MOST_ADAPTERS}
        config = {"model_config": {"dtype": f"torch.{self._topology.model.dtype}"}, "lora_config": lora,
                  "parallel_config": {"data_parallel_size": 1}}
        return web.json_response({"vllm_config": config})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        source = Path(body["lora_path"])
        if not (source / ADAPTER_CONFIG).is_file():
            raise Refusal(f"{source}: no adapter there; TRL and busrl must see the same folders")
        self._loaded += 1
        folder = self._paths.root / "trl" / str(self._loaded)  # to an engine the name is the version of the weights
        shutil.copytree(source, folder, dirs_exist_ok=True)
        self._adapters[body["lora_name"]] = str(folder)
        return web.Response()

    async def _unload(self, request: web.Request) -> web.Response:
        folder = self._adapters.pop((await request.json())["lora_name"], None)
        if folder is not None:
            shutil.rmtree(folder)
        return web.Response()

    # -- samples -----

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        for name, values in NEUTRAL.items():
            if body.get(name) not in values:
                raise Refusal(f"{name} = {body[name]} is not served; leave it out of AsyncGRPOConfig")
        answer = await self._caller.ask(self._call(body), PATIENCE_S)
        choice = {"index": 0, "text": "", "token_ids": answer.ids.tolist(),
                  "logprobs": {"token_logprobs": answer.logprobs.tolist()},
                  "finish_reason": "stop" if answer.finish == Finish.EOS else "length"}
        return web.json_response({"choices": [choice]})

    def _call(self, body: dict[str, Any]) -> ModelCall:
        ids = np.array(body["prompt"], np.int32)
        longest = min(body["max_tokens"], self._context - len(ids), self._topology.generation.max_new_tokens)
        if longest < 1:
            raise Refusal(f"the prompt has {len(ids)} tokens of {self._context} (tinker.context)")
        self._asked += 1
        return ModelCall(
            ids, longest, stream=body["seed"], temperature=body["temperature"], top_p=body["top_p"],
            admission=self._asked, extra={"weights": self._folder(body["model"])},
        )

    def _folder(self, model: str) -> str:
        """The folder of an adapter; empty for the model itself."""
        if model in self._adapters:
            return self._adapters[model]
        if Path(model).name != Path(self._topology.model.path).name:
            raise Refusal(f"{model} is neither an adapter that was loaded nor {self._topology.model.path}")
        return ""


@web.middleware
async def in_words(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (Refusal, KeyError, json.JSONDecodeError) as problem:
        return web.json_response({"error": f"{type(problem).__name__}: {problem}"}, status=400)
    except CallUnanswered as problem:  # TRL asks again
        return web.json_response({"error": str(problem)}, status=503)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    web.run_app(Bridge(options.run_dir).app(), host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
