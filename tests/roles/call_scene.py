"""A run directory with a ring of model calls, real bus, keeper and rollout processes, and a caller in the test."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from busrl.bus import Endpoint
from busrl.launcher.rundir import open_run, remove_runtime_dir, unlink_segments
from busrl.preflight.load import load
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.quickstart.cache import ensure
from busrl.ring import Ring, State
from busrl.ring.calls import AsyncCaller, CallAnswer, Caller, ModelCall, PendingCall
from busrl.states import HeaderWord
from busrl.topology.sizes import call_ring
from busrl.weights.base import Sender
from busrl.weights.factory import TransportSettings, make_sender

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
TOKENS = 300  # of an answer: enough for a process to be killed in the middle of one


def call(number: int = 0, **more) -> ModelCall:
    """A prompt of its own for each number, whose answer never ends by itself for long."""
    ids = np.array([1 + (number * 7 + k) % 10 for k in range(8)], np.int32)
    usual = {"max_new_tokens": TOKENS, "uid": 100 + number, "stream": (1 << 63) + number, "temperature": 5.0}
    return ModelCall(ids, **{**usual, **more})


def endless_model(folder: Path) -> Path:
    """The tiny model without an end token: its answers are as long as they may be."""
    shutil.copytree(ensure("tiny:sort").model, folder)
    for name, changes in (
        ("config.json", {"eos_token_id": None, "max_position_embeddings": 1024}),
        ("generation_config.json", {"eos_token_id": None}),
        ("tokenizer_config.json", {"eos_token": None, "model_max_length": 1024}),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


class Scene:
    """Everything that lives outside the test, and a caller of its own (`caller`, registered as agent/0)."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="busrl.test."))
        self.model = endless_model(self.folder / "model")
        base = load(ROOT / "configs" / "quickstart.toml", [
            f"model.path={self.model}", f"data.train={ensure('tiny:sort').train}", "validation.data=",
            "generation.max_batch=4", f"generation.max_new_tokens={TOKENS}", "generation.prefix_keep_s=60",
        ])
        slots, slot_bytes = call_ring(base)
        derived = dataclasses.replace(base.derived, call_slots=slots, call_slot_bytes=slot_bytes)
        self.run = open_run(self.folder / "run", dataclasses.replace(base, derived=derived))
        self.paths, self.topology = self.run.paths, self.run.topology
        assert self.run.calls is not None
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("bus", "keeper", "rollout/0"):
            self.start(name)
        self.ring = self.attach("agent/0")
        self.bus = Endpoint("agent-0", self.paths.frontend, self.paths.backend,
                            subscribe=[topic(m.CallTokens, "agent-0")])
        self.bus.ready(PATIENCE_S)
        self.caller = Caller(self.ring, self.bus.send)

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "busrl.roles", str(self.paths.root), name]
        with open(self.paths.log(name), "ab") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            self.children[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=env)

    def attach(self, label: str) -> Ring:
        ring = Ring.attach(self.paths.calls_name, calls=True)
        ring.register("agent", label)
        return ring

    def kill(self, name: str) -> None:
        self.children[name].send_signal(signal.SIGKILL)
        self.children[name].wait()

    def until(self, what: str, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"waited {PATIENCE_S:.0f} s for {what}; {self.logs()}"
            time.sleep(0.002)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in self.paths.logs.glob("*.log"))

    def states(self) -> dict[str, int]:
        return {name: n for name, n in self.ring.stats().occupancy.items() if n}

    def all_free(self) -> bool:
        return self.states() == {"FREE": self.ring.n_slots}

    def state_of(self, slot: int) -> int:
        return int(self.ring.line(slot)["word"]) >> 58

    def is_generating(self, slot: int) -> bool:
        return self.state_of(slot) == State.GENERATING

    def answers(self, *calls: ModelCall) -> list[list[int]]:
        """The ids of each answer, in the order of the calls."""
        return [answer.ids.tolist() for answer in self.results(*[self.caller.put(call) for call in calls])]

    def results(self, *put: PendingCall) -> list[CallAnswer]:
        """The answers to calls under way, once all of them are there."""
        self.ended(*put)
        return [call.result() for call in put]

    def ended(self, *put: PendingCall) -> None:
        """Wait until all of these calls are done with, in whatever way."""
        end = time.monotonic() + PATIENCE_S
        while not all(call.done for call in put):
            assert time.monotonic() < end, f"{[self.caller.whose(call) for call in put if not call.done]} {self.logs()}"
            self.caller.wait(0.1)

    def emptied(self) -> None:
        """Wait until all slots are FREE."""
        self.until("all slots to be free", lambda: (self.caller.poll(), self.all_free())[1])

    def publish(self, version: int, scale: float) -> None:
        """The model's weights, those of the head scaled, as a learner would publish them."""
        model, sender = self.learner
        with torch.no_grad():
            sender.publish(version, version, {name: weights * scale for name, weights in model.named_parameters()})
        self.run.ring.set_header(HeaderWord.VERSION_STEP, version)
        self.run.ring.set_header(HeaderWord.VERSION, version)

    @functools.cached_property
    def learner(self) -> tuple[Any, Sender]:
        """The model, and what its weights are published with."""
        model: Any = AutoModelForCausalLM.from_pretrained(str(self.model), local_files_only=True).float()
        return model, make_sender(TransportSettings.of(self.topology, self.paths))

    def async_caller(self) -> AsyncCaller:
        return AsyncCaller(self.ring, self.bus.send)

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
            child.wait()
        self.bus.close()
        self.ring.close()
        self.run.release()
        unlink_segments(self.paths.ring_name)
        remove_runtime_dir(self.paths)
        shutil.rmtree(self.folder)
