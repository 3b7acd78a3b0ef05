"""A whole service as those see it who run it: the table of kills on its page, a pause, and what status tells."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness import ROOT, Run
from test_a_service import PROMPT, Client, service, shown, supervised

from busrl.cli.command import main
from busrl.ledger.controls import read_lines
from busrl.service.audit import audit
from busrl.system.files import json_lines

HEAD = "| process | does | when it is killed, a client sees |\n|---|---|---|\n"
DATUM = supervised([5, 6, 7, 8, 9])
NUMBERS = itertools.count()
Kill = Callable[[Run, "Watching", str], None]


def rows() -> list[tuple[str, str]]:
    """The table of kills on the page: a process, and what a client sees."""
    page = (ROOT / "docs" / "service-inside.md").read_text()
    table = re.match(r"(\|.*\|\n)+", page.partition(HEAD)[2])
    assert table is not None
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table[0].splitlines()]
    return [(name.strip("`"), seen) for name, _, seen in cells]


class Watching(Client):
    """A client that notes connections that failed, and statuses that are neither an answer nor a wait."""

    def __init__(self, run: Run) -> None:
        self.failed, self.refused = list[str](), list[tuple[int, bytes]]()
        super().__init__(run)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        with suppress(urllib.error.HTTPError):
            try:
                with urllib.request.urlopen(f"{self._run.told('tinker')['base_url']}/api/v1/healthz", timeout=60):
                    pass
            except (OSError, http.client.HTTPException) as problem:
                self.failed.append(str(problem))
        status, answer = super().post(path, body)
        if status not in (200, 408):
            self.refused.append((status, answer))
        return status, answer


@contextmanager
def held(run: Run, name: str) -> Iterator[None]:
    """A process that stands still, so that what it is asked for stays open."""
    pid = run.until(f"{name} was there", lambda: run.pid(name))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def killed_at_a_step(name: str) -> Kill:
    """Kill a process while a step is open: it is made, and asked for again it has the name that it had."""

    def kill(run: Run, client: Watching, model: str) -> None:
        with held(run, "tuner"):
            client.forward_backward(model, DATUM)
            step = client.step(model)
            run.kill(name)
        assert json.loads(client.result(step))["metrics"]
        number = int(step["request_id"].rpartition(":")[2])
        adam = {"learning_rate": 0.01}
        assert client.ask("optim_step", model_id=model, seq_id=number, adam_params=adam) == step

    return kill


def killed_at_a_sample(run: Run, client: Watching, model: str) -> None:
    sampler = client.sampler(model, next(NUMBERS))
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": PROMPT}]},
             "sampling_params": {"max_tokens": 4}, "num_samples": 1}
    with held(run, "rollout/0"):
        future = client.ask("asample", **asked)
        run.kill("rollout/0")
    assert not client.result(future).startswith(b"{")


def launch_killed(run: Run, client: Watching, model: str) -> None:
    client.forward_backward(model, DATUM)
    step = client.step(model)
    run.kill_launch(60.0)
    with pytest.raises(urllib.error.URLError, match="refused"):
        client.ask_get("healthz")
    run.start()
    assert json.loads(client.result(step))["metrics"]


AGAIN = (
    "refused connections until `busrl launch` is called again in the same directory and the door is there, before any "
    "library of models"
)
# What is done to each process of the page's table, and whether connections may fail meanwhile.
KILLS: dict[tuple[str, str], tuple[Kill, bool]] = {
    ("tinker", "waiting connections, then the same futures"): (killed_at_a_step("tinker"), False),
    ("tuner", "futures that take longer"): (killed_at_a_step("tuner"), False),
    ("rollout/N", "nothing: the call waits for the next engine"): (killed_at_a_sample, False),
    ("bus", "nothing"): (killed_at_a_step("bus"), False),
    ("launch", AGAIN): (launch_killed, True),
}


def test_every_kill_on_the_page_is_tried() -> None:
    assert rows() == list(KILLS)


@pytest.mark.long
def test_a_client_sees_of_each_kill_what_the_page_says(tmp_path: Path, quickstart: None) -> None:
    with service(tmp_path / "run", "limits.crash_attempts=100", "limits.restart_attempts=100") as (run, _):
        client = Watching(run)
        model = client.model()
        for row in rows():
            kill, may_fail = KILLS[row]
            client.failed.clear()
            kill(run, client, model)
            assert may_fail or not client.failed, f"{row}: {client.failed}"
            assert not client.refused, f"{row}: {client.refused}"
    found = audit(run.directory)
    assert found is not None and not found.errors


@pytest.mark.long
def test_a_pause_holds_execution_while_requests_are_taken(
    tmp_path: Path, quickstart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with service(tmp_path / "run") as (run, client):
        model, served = client.model(), client.ask_get("get_server_capabilities")["supported_models"][0]
        sampler = client.ask("create_sampling_session", session_id=client.session, sampling_session_seq_id=7,
                             base_model=served["model_name"])["sampling_session_id"]
        assert main(["pause", str(run.directory)]) == 0
        part, step = client.forward_backward(model, DATUM), client.step(model)
        status, told = client.post("retrieve_future", json.dumps({"request_id": step["request_id"]}).encode())
        assert status == 408 and json.loads(told)["queue_state"] == "paused_capacity", told
        status, _ = client.post("asample", json.dumps({
            "sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 2}}).encode())
        assert status == 200
        assert shown(run)["models"][model]["answered"] == 0
        assert main(["resume", str(run.directory)]) == 0
        client.result(part), client.result(step)
        (resumed,) = (line for line in read_lines(run.paths) if line.verb == "resume")
        (line,) = json_lines(run.paths.metrics)
        assert line["time"] >= resumed.time
    capsys.readouterr()


@pytest.mark.long
def test_status_and_monitor_tell_of_a_service(
    tmp_path: Path, quickstart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with service(tmp_path / "run") as (run, client):
        model = client.model()
        client.forward_backward(model, DATUM, DATUM)
        client.result(client.step(model))
        sampler = client.sampler(model, 0)
        client.sample(sampler, 0)
        run.until("door and tuner have shown their figures", lambda: shown(run)["models"][model].get("answered") == 3
                  and shown(run)["models"][model].get("applied") == 3
                  and shown(run)["samplers"].get(sampler, {}).get("answered") == 1)
        capsys.readouterr()
        assert main(["status", str(run.directory), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["service"]
        figures = {key: told["models"][model][key] for key in ("logged", "applied", "answered", "steps", "tokens")}
        assert figures == {"logged": 3, "applied": 3, "answered": 3, "steps": 1, "tokens": 8}
        assert told["samplers"][sampler]["weights"] == 1 and told["counts"]["sessions"] == 1
        for command in (["status"], ["monitor", "--once", "--plain"]):
            assert main([*command, str(run.directory)]) == 0
            text = capsys.readouterr().out
            assert "1 session · 1 model · 1 sampler" in text and f"{model[:8]}:train:0 · step 1 · 8 tokens" in text
            assert "groups ready" not in text, "a service has no groups"
    assert main(["audit", str(run.directory), "--waste"]) == 0
    assert "never came back in a forward_backward" in capsys.readouterr().out
