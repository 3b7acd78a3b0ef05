"""How a server gets new weights: an adapter under a new name, or a model folder to load again.

Used by the served engine. Talks HTTP through the client. Knows nothing of requests: the engine has stopped its own
before it calls.

- A server whose load failed stays paused: it never serves half of a version, and the next try loads all of it.
- Each load has its own name: a server that keys its prefix cache by the name cannot serve stale keys. The name holds
  the run's id, so that two runs with one server do not take each other's.
- If the server knows the name already (its answer to the first try was lost, or a process before this one loaded it)
  that adapter is dropped, and the version gets another name: what is loaded there may be older files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from busrl.engines.openai.client import Client
from busrl.errors import BugError, BusrlError, PeerLost, UserError
from busrl.weights.base import NOTHING, TensorReceiver

if TYPE_CHECKING:
    import torch

ADAPTER_PREFIX = "busrl-"  # of the names of adapters
CLOSE_S = 3.0
KNOWN = re.compile(r"already (been loaded|loaded|exists)")


class FixedReceiver(TensorReceiver):
    """A receiver of weights that never come: the endpoint keeps those that it was started with, version 0."""

    def newest(self) -> tuple[int, int]:
        return NOTHING

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        return NOTHING

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        raise BugError('an endpoint with openai.update = "none" has no new weights')

    def close(self) -> None:
        """Nothing was opened."""


class ServerWeights:
    """`kind` is the server's: "vllm" or "sglang"."""

    def __init__(self, client: Client, kind: str, base_model: str) -> None:
        self._client, self._kind, self._base = client, kind, base_model
        self._root = client.url.removesuffix("/v1")
        self._prefix = f"{ADAPTER_PREFIX}v"
        self._adapter = ""
        self._deadline = math.inf

    def name_for(self, folders: str) -> None:
        """Adapters are named for the run whose versions lie there, on this host."""
        run = hashlib.blake2b(f"{socket.gethostname()} {folders}".encode(), digest_size=6).hexdigest()
        self._prefix = f"{ADAPTER_PREFIX}{run}-v"

    def load(self, version: int, path: Path, adapter: bool, deadline: float = math.inf) -> None:
        """Make the server serve `version` from `path`; requests name the right model afterwards. PeerTimeout after
        `patience_s` of one call, or at the deadline of the monotonic clock."""
        self._deadline = deadline
        try:
            if adapter:
                self._load_adapter(version, path)
            else:
                self._load_folder(version, path)
        except UserError as problem:
            remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            hint = f"; {remedy}" if self._kind == "vllm" and ": 404" in str(problem) else ""
            raise UserError(f"new weights, version {version}: {problem}{hint}") from problem

    def _load_adapter(self, version: int, path: Path) -> None:
        name, old = f"{self._prefix}{version}", self._adapter
        try:
            self._name_adapter(version, path, name)
        except UserError as problem:
            if not KNOWN.search(str(problem)):
                raise
            fresh = f"{name}.{secrets.token_hex(3)}"
            self._name_adapter(version, path, fresh)
            self._drop_adapter(name)
        if old not in ("", name):
            self._drop_adapter(old)

    def _name_adapter(self, version: int, path: Path, name: str) -> None:
        """Load it under that name, which requests have from now on."""
        body = {"lora_name": name, "lora_path": str(path)}
        self._post(f"{self._routes}/load_lora_adapter", body, f"loading adapter version {version}")
        self._adapter = self._client.model = name

    def _drop_adapter(self, name: str, once: bool = False) -> None:
        with contextlib.suppress(BusrlError):  # it is only in the way; the server may have dropped it by itself
            self._post(f"{self._routes}/unload_lora_adapter", {"lora_name": name}, f"unloading adapter {name}", once)

    def close(self) -> None:
        """The server is not ours: nothing of the run stays in it, if it drops the adapter within `CLOSE_S`."""
        if self._adapter:
            self._deadline = time.monotonic() + CLOSE_S
            self._drop_adapter(self._adapter, once=True)
            self._adapter, self._client.model = "", self._base

    @property
    def _routes(self) -> str:
        return "/v1" if self._kind == "vllm" else ""

    def _load_folder(self, version: int, path: Path) -> None:
        phase = f"loading version {version}"
        if self._kind == "vllm":
            self._post("/pause?mode=keep", None, f"{phase}: pause")
            work = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            self._post("/collective_rpc", work, phase)
            self._post("/reset_prefix_cache?reset_running_requests=true", None, f"{phase}: prefix cache")
            self._post("/resume", None, f"{phase}: resume")
        else:
            self._post("/pause_generation", {}, f"{phase}: pause")
            self._check_success(self._post("/update_weights_from_disk", {"model_path": str(path)}, phase), phase)
            self._post("/flush_cache", None, f"{phase}: prefix cache")
            self._post("/continue_generation", {}, f"{phase}: resume")
        self._client.model = self._base

    def _check_success(self, reply: str, phase: str) -> None:
        """SGLang reports a failure in a 200."""
        with contextlib.suppress(ValueError):
            found = json.loads(reply)
            if isinstance(found, dict) and found.get("success") is False:
                raise PeerLost(f"{self._root} ({phase}): {found.get('message', reply)}")

    def _post(self, path: str, body: Mapping[str, object] | None, phase: str, once: bool = False) -> str:
        return self._client.send("POST", self._root + path, body, phase, self._deadline, once)
