"""The programs of docs/write-an-actor.md, as they stand: the worker is run against a real broker, the C one compiled.

The keeper is played here from the protocol alone, loses the first copy of everything, and says what a keeper may say.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from busrl.bus import Endpoint
from busrl.bus.broker import run_broker
from busrl.data import JsonlStream
from busrl.data.pretrained import Vocabulary
from busrl.engines.scripted import Script
from busrl.hosts import messages as g
from busrl.hosts.messages import REMOTE
from busrl.protocol import messages as m
from busrl.protocol.codec import BY_NAME, topic
from busrl.protocol.messages import Message
from busrl.ring import OfdLock

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "write-an-actor.md").read_text()
PATIENCE_S = 30.0
TASKS = {f"{slot}.7.{slot}": json.dumps({"prompt": "21=", "answer": "12"}) for slot in (1, 2, 3)}
COMPLETIONS = {"1.7.1": "12", "2.7.2": "21", "3.7.3": "12"}


def program() -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))


class Keeper:
    """Answers requests as protocol.md says. The first copy of every request is lost, and so is the first answer."""

    def __init__(self, bus: Endpoint) -> None:
        self.bus = bus
        self.copies: Counter[str] = Counter()
        self.rewards: dict[str, float] = {}
        self.open = dict(TASKS)
        self.forgot = False
        self.left = ""

    def hear(self, message: Message) -> None:
        kind = type(message).__name__ + getattr(message, "task", "")
        self.copies[kind] += 1
        if self.copies[kind] < 2:
            return
        if isinstance(message, g.RemoteJoin):
            self.say(g.GatewayWelcome(life=message.life, req=message.req, index=3, lease_s=20.0), message)
        elif isinstance(message, g.RemoteClaim) and not self.forgot:
            self.forgot = True  # a keeper that was started again and has struck the worker off
            self.answer(message, "unknown")
        elif isinstance(message, g.RemoteClaim):
            tasks = [self.task(name) for name in self.open if name not in message.holding]
            self.say(g.GatewayTasks(life=message.life, req=message.req, tasks=tasks[: message.capacity]), message)
        elif isinstance(message, g.RemoteRewarded):
            self.rewards[message.task] = message.reward
            known = self.open.pop(message.task, None)
            if self.copies[kind] > 2:
                self.answer(message, "done" if known else "already", message.task)
        elif isinstance(message, g.RemoteLeave):
            self.left = message.reason

    def task(self, name: str) -> g.Task:
        slot = int(name.partition(".")[0])
        return g.Task(task=name, slot_id=slot, seq=7, uid=slot, record=TASKS[name], completion=COMPLETIONS[name])

    def answer(self, message: g.Remote, code: str, task: str = "") -> None:
        about = type(message).__struct_config__.tag
        self.say(g.GatewayAnswer(code=code, life=message.life, req=message.req, about=str(about), task=task), message)

    def say(self, message: Message, to: Message) -> None:
        self.bus.send(message, to.sender)


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="busrl-actor-"))
    stop, ready = threading.Event(), threading.Event()
    addresses = f"ipc://{place}/pub.sock", f"ipc://{place}/sub.sock"
    lock = OfdLock(str(place / "bus.lock"))
    broker = threading.Thread(target=run_broker, args=(*addresses, lock, stop), kwargs={"on_ready": ready.set})
    broker.start()
    assert ready.wait(PATIENCE_S)
    (place / "run.json").write_text(json.dumps({"frontend": addresses[0], "backend": addresses[1]}))
    (place / "my_reward.py").write_text(program())
    yield place
    stop.set()
    broker.join(PATIENCE_S)
    shutil.rmtree(place)


@pytest.mark.parametrize("how", ["STOP", "SIGTERM"])
def test_the_page_worker_judges_every_task_although_every_first_copy_is_lost(folder, how):
    kinds = [topic(kind) for kind in (*REMOTE, m.Goodbye)]
    with Endpoint("keeper", f"ipc://{folder}/pub.sock", f"ipc://{folder}/sub.sock", subscribe=kinds) as bus:
        bus.ready(PATIENCE_S)
        keeper = Keeper(bus)
        worker = subprocess.Popen(
            [sys.executable, str(folder / "my_reward.py"), str(folder)],
            env={**os.environ, "BUSRL_NAME": "my/reward"},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            settled = dict.fromkeys(TASKS, 3)
            while any(keeper.copies[f"RemoteRewarded{task}"] < most for task, most in settled.items()):
                message = bus.recv(PATIENCE_S)
                assert message is not None, f"the worker is silent: {keeper.copies}"
                assert message.sender == "my-reward"
                keeper.hear(message)
            ask_to_stop(how, bus, worker)
            while not isinstance(message, m.Goodbye):
                message = bus.recv(PATIENCE_S)
                assert message is not None, f"no GOODBYE: {keeper.copies}"
                keeper.hear(message)
            assert worker.wait(PATIENCE_S) == 0
        finally:
            worker.kill()
            errors = worker.communicate()[1]
    assert keeper.rewards == {"1.7.1": 1.0, "2.7.2": 0.0, "3.7.3": 1.0}
    assert keeper.forgot and message.reason == ("enough" if how == "STOP" else "SIGTERM") and errors == ""


def ask_to_stop(how: str, bus: Endpoint, worker: subprocess.Popen[str]) -> None:
    if how == "STOP":
        bus.send(m.Stop(reason="enough"))
    else:
        worker.send_signal(signal.SIGTERM)


def judge() -> Callable[[dict[str, Any], str], float]:
    """The reward of step 5 alone."""
    names: dict[str, Any] = {"re": re}
    exec(re.findall(r"(def judge.*?\n)\n", program(), re.DOTALL)[0], names)
    judge: Callable[[dict[str, Any], str], float] = names["judge"]
    return judge


@pytest.mark.parametrize(("answer", "completion", "worth"), [
    ("12", "....|12", 1.0), ("12", "It is 12.", 1.0), (12, "12", 1.0), ("2", "12", 0.0), ("2", "-2", 0.0),
    ("2", "0.2", 0.0), ("2", "", 0.0), ("2", "1 2 3", 0.0), ("a b", "c a b", 1.0), ("a b", "b", 0.0),
])
def test_the_reward_of_the_page_is_not_won_by_accident(answer: object, completion: str, worth: float) -> None:
    assert judge()({"answer": answer}, completion) == worth


def test_the_reward_of_the_page_refuses_an_empty_answer() -> None:
    with pytest.raises(ValueError, match="no answer to compare with"):
        judge()({"answer": ""}, "")


def test_scripted_answers_differ_in_what_the_page_says_they_are_worth() -> None:
    with JsonlStream(ROOT / "configs" / "scripted.jsonl", 0, False) as stream:
        script = Script(stream, Vocabulary(1, (3, 4, 5, 6)), 4)
        records = [stream.record(stream.item(draw)) for draw in range(64)]
        groups = [{judge()(record, script.text(8 * draw + member, True)) for member in range(4)}
                  for draw, record in enumerate(records)]
    assert sum(len(worths) > 1 for worths in groups) > 32  # the others are flat by chance


def test_the_worker_of_the_page_imports_nothing_of_busrl():
    assert "import busrl" not in program() and "from busrl" not in program()


def test_the_c_program_of_the_page_compiles_without_a_warning(tmp_path):
    (source,) = re.findall(r"```c\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "reward.c").write_text(source)
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{ROOT / 'csrc' / 'include'}"]
    subprocess.run([*command, str(tmp_path / "reward.c")], check=True, timeout=60)


def test_every_message_and_page_that_the_page_names_exists():
    named = set(re.findall(r"\b(?:REMOTE|GATEWAY)_[A-Z]+\b", PAGE))
    assert named and named <= set(BY_NAME)
    for page in set(re.findall(r"`([a-z-]+\.md)`", PAGE)) - {"c-abi.md"}:
        assert (ROOT / "docs" / page).exists(), page
