"""One real run that is served from outside, in JavaScript and in bare Python, while strangers break every rule.

The run is shared: it is started once, and each test looks at one side of it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from checks import check_end
from harness import Run, read_lines, running
from outside import EXAMPLES, finished, node, words_of, workers

from busrl.status.view import status

pytestmark = pytest.mark.long

ANSWER_S = 20.0
EMPTY = {"dtype": "int32", "shape": [3], "data": b"\0" * 12}


class Stranger:
    """Any program that has a ZeroMQ and a msgpack library."""

    def __init__(self, run_dir: Path, name: str) -> None:
        info = json.loads((run_dir / "run.json").read_text())
        self.name, self.life, self.context = name, time.time_ns() // 1_000_000, zmq.Context()
        self.pub, self.sub = self.context.socket(zmq.PUB), self.context.socket(zmq.SUB)
        for kind in ("GATEWAY_WELCOME", "GATEWAY_TASKS", "GATEWAY_ANSWER"):
            self.sub.setsockopt(zmq.SUBSCRIBE, f"{kind}/{name}/".encode())
        self.pub.connect(info["frontend"])
        self.sub.connect(info["backend"])

    def say(self, kind: str, raw: bytes | None = None, **fields: Any) -> None:
        envelope = {"type": kind, "v": 1, "sender": self.name, "life": self.life, "req": 1}
        self.pub.send_multipart([f"{kind}/".encode(), msgpack.packb({**envelope, **fields}) if raw is None else raw])

    def ask(self, wanted: str, kind: str, **fields: Any) -> dict[str, Any]:
        """Say it again and again, as one must, until an answer has this code (or is of this type)."""
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            self.say(kind, **fields)
            while self.sub.poll(100):
                message = msgpack.unpackb(self.sub.recv_multipart()[1])
                if wanted in (message.get("code"), message["type"]):
                    return message
        raise AssertionError(f"no answer {wanted} to {kind} {fields}")

    def claim(self) -> str:
        """The name of one task."""
        while True:
            answer = self.ask("GATEWAY_TASKS", "REMOTE_CLAIM", capacity=1, holding=[])
            if answer["tasks"]:
                return str(answer["tasks"][0]["task"])

    def close(self) -> None:
        self.context.destroy(linger=0)


def misbehave(liar: Stranger, thief: Stranger) -> None:
    """Every kind of bad input; after each there must have been its answer."""
    malformed = liar.ask("malformed", "REMOTE_CLAIM", capacity="many")
    assert "capacity" in malformed["text"] and "liar" in malformed["text"] and malformed["about"] == "REMOTE_CLAIM"
    assert "protocol 2" in liar.ask("version", "REMOTE_JOIN", role="rollout", v=2, from_tomorrow={"x": 1})["text"]
    assert liar.ask("oversize", "REMOTE_FAIL", task="1.1.1", text="x" * (2 << 20))["about"] == "REMOTE_FAIL"
    assert liar.ask("unknown", "REMOTE_CLAIM", capacity=1)["code"] == "unknown"
    assert liar.ask("refused", "REMOTE_JOIN", role="learner")["code"] == "refused"
    for kind, raw in (("REMOTE_CLAIM", b"\xc1garbage"), ("REMOTE_JOIN", b"\x91" * 100_000), ("REMOTE_LEAVE", b"")):
        liar.say(kind, raw)
    liar.ask("GATEWAY_WELCOME", "REMOTE_JOIN", role="rollout")
    thief.ask("GATEWAY_WELCOME", "REMOTE_JOIN", role="rollout")
    task = liar.claim()
    answer = {
        "tokens": EMPTY, "versions": {**EMPTY, "dtype": "uint32"}, "logprobs": {**EMPTY, "dtype": "float32"},
        "prompt_ids": EMPTY, "text": "",
    }
    lie = liar.ask("refused", "REMOTE_GENERATED", task=task, **{**answer, "tokens": {**EMPTY, "shape": [1 << 40]}})
    assert re.match(r"liar: tokens says shape \[1099511627776\] of int32, and has 12 bytes", lie["text"])
    ids = {**EMPTY, "data": b"\xff\xff\xff\x7f" * 3}
    assert "an id is 0 to" in liar.ask("refused", "REMOTE_GENERATED", task=task, **{**answer, "tokens": ids})["text"]
    assert "is held by liar" in thief.ask("not_yours", "REMOTE_GENERATED", task=task, **answer)["text"]
    assert liar.ask("refused", "REMOTE_REWARDED", task=task, reward=1.0)["code"] == "refused"
    for stranger in (liar, thief):
        stranger.ask("done", "REMOTE_LEAVE")


@dataclass
class Served:
    """What was seen of the run."""

    run: Run
    misbehaved: BaseException | None = None
    shown: str = ""
    code: int = -1
    words: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def commands(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """The workers; without npm the bare Python one alone."""
    found = {"py": [sys.executable, str(EXAMPLES / "python-actor" / "actor.py")]}
    try:
        javascript = request.getfixturevalue("javascript")
    except pytest.skip.Exception:
        return found
    return {**found, "js-judge": node(javascript, "reward"), "js-gen": node(javascript, "rollout")}


@pytest.fixture(scope="module")
def served(
    quickstart: None, tmp_path_factory: pytest.TempPathFactory, commands: dict[str, list[str]]
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served") / "run"
    made = Served(Run(folder, "process.reward.count=0", "generation.max_batch=16", "limits.lease_s=5", steps=8))
    with running(made.run) as run:
        run.until("there was a broker", lambda: run.pid("bus"))
        liar, thief = (Stranger(run.directory, name) for name in ("liar", "thief"))
        try:
            misbehave(liar, thief)
        except AssertionError as problem:
            made.misbehaved = problem
        with workers(*([*command, str(folder), name] for name, command in commands.items())) as started:
            run.until_step(3)
            made.shown = status(folder)
            made.code = run.wait()
            made.words = {name: words_of(child) for name, child in zip(commands, started)}
        liar.close()
        thief.close()
        yield made


def test_every_bad_message_gets_a_typed_answer_that_names_the_culprit(served: Served) -> None:
    if served.misbehaved is not None:
        raise served.misbehaved
    told = [line["text"] for line in read_lines(served.run.paths.errors) if line["where"] == "gateway"]
    assert any(text.startswith("liar: ") for text in told) and any(text.startswith("thief: ") for text in told)


def test_what_was_refused_is_counted_by_name_in_status(served: Served) -> None:
    shown = served.shown
    assert re.search(r"gateway refused liar: \d+ malformed, \d+ version, \d+ oversize, \d+ refused; the latest", shown)
    assert re.search(r"gateway refused thief: \d+ not yours; the latest not_yours: task \S+ is held by liar", shown)
    assert "gateway refused (unnamed): 3 malformed" in shown


def test_the_run_goes_on_to_its_end_with_a_clean_audit(served: Served) -> None:
    check_end(served.run, served.code)
    assert served.run.restarts("keeper") == 0


def test_workers_from_outside_are_in_the_process_table_and_do_the_work(
    served: Served, commands: dict[str, list[str]]
) -> None:
    done = {name: finished(text) for name, text in served.words.items()}
    for name in commands:
        assert re.search(rf"^ +{name} +elsewhere +remote, holds \d+", served.shown, re.MULTILINE), served.shown
        assert done[name] > 0, f"{name} did nothing"
    assert done["py"] + done.get("js-judge", 0) >= 8 * 8 * 4, done


def test_the_examples_in_javascript_were_part_of_it(served: Served, javascript: Path) -> None:
    """Skipped, with its reason, where npm can not install packages."""
    assert {"js-judge", "js-gen"} <= served.words.keys()
