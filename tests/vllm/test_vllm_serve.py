"""Role serve over vLLM: OpenAI's client plays episodes, half of them by streams, while weights move, and one dies in
the middle of its calls.

What was trained is compared, turn by turn, with plain forward passes of the checkpoints whose weights drew it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from chat_run import make_all
from checks import check_end
from harness import Run, read_lines, running
from openai import OpenAI
from test_serve_in_a_run import post
from test_vllm_run import LIMIT_S, SETTINGS
from vllm_scene import EXACT, logprobs_of

from busrl.ledger.wal import SampleRecord
from busrl.ring import Ring
from busrl.states import State

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
TURNS, AT_ONCE = 4, 8
PATIENT = 2  # of those at once, who let a step pass between two turns
LONG = 8000  # ids of an answer that nobody waits for: far more than vLLM draws until it is given up
LEASE_S, PATIENCE_S = 4, 2.0
MUCH = 2000  # positions of vLLM's cache: more than the other rows ever have
ROWS = 3  # of vLLM, that such answers have at once
KEEP = '''
from pathlib import Path
import msgspec

def keep(samples, row):
    """All that a step trained; the log keeps no more of it than a restart needs."""
    Path(__file__).with_name(f"step-{row['step']}.samples").write_bytes(msgspec.msgpack.encode(list(samples)))
    return {}
'''
VANISHES = '''
import json, sys, threading
from openai import OpenAI

def ask(one):
    client = OpenAI(base_url=one["base_url"], api_key=one["api_key"], timeout=600, max_retries=0)
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Tell me all."}])

for one in json.loads(sys.argv[1]):
    threading.Thread(target=ask, args=(one,)).start()
'''


# -- the run -----


def endless(folder: Path) -> Path:
    """A tiny model with chat template whose answers end at their limit alone, and hang on all that they have read."""
    import torch
    from chat_folders import END_IDS, make
    from transformers import AutoModelForCausalLM

    make(folder, positions=LONG + 192)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6.0)
    for layer in model.model.layers:  # nothing but a token itself moves the first number of its state
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
    model.get_output_embeddings().weight[:, 0] = 4.0
    model.get_output_embeddings().weight[sorted(END_IDS), 0] = -4.0
    torch.nn.init.ones_(model.model.norm.weight)
    model.save_pretrained(folder)
    return folder


def served(tmp_path: Path, on_update: str, steps: int, *more: str) -> Run:
    """A run whose samples are claimed over HTTP, and which keeps the weights of every version."""
    config = make_all(tmp_path / "mine", endless(tmp_path / "model"))
    (tmp_path / "mine" / "kept.py").write_text(KEEP)
    text = config.read_text().replace('[reward]\nkind = "python"\nfunction = "judge.py:score"\n', "")
    text = text.replace('role = "reward"\n', 'role = "serve"\n')
    text = text.replace("max_new_tokens = 24", f"max_new_tokens = {LONG}")
    text = text.replace("lr = 1e-3\n", 'lr = 1e-3\nmetrics = ["kept.py:keep"]\n')
    config.write_text(f"{text}[agents]\ncontext = {LONG + 192}\nsampled = {LONG}\n")
    settings = [
        *(one for one in SETTINGS if not one.startswith("validation.")), "validation.samples=0",
        f"generation.on_update={on_update}", "generation.max_batch=8", "learner.trigger.n_min=4",
        "learner.checkpoint_every=1", "learner.keep_last=100",
        "weights.mode=fully-async", "weights.window=16",  # a slow conversation holds up no step
    ]
    return Run(tmp_path / "run", *settings, *more, config=config, steps=steps)


# -- those who play -----


def streamed(client: OpenAI, messages: list[Any]) -> dict[str, Any]:
    """A turn that came piece by piece; it may say nothing but has to end."""
    with client.chat.completions.create(model="policy", messages=messages, max_tokens=6, stream=True) as pieces:
        got = [piece.choices[0] for piece in pieces if piece.choices]
    assert [one.finish_reason for one in got if one.finish_reason] in (["stop"], ["length"]), got
    return {"role": "assistant", "content": "".join(one.delta.content or "" for one in got)}


def answered(client: OpenAI, messages: list[Any]) -> dict[str, Any]:
    found = client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
    return found.choices[0].message.model_dump(exclude_none=True)


def play(one: dict[str, Any], ask: Callable[..., dict[str, Any]], in_the_middle: Callable[[], None]) -> float:
    """A conversation of several turns; what it is worth hangs on what the model said."""
    messages: list[Any] = [{"role": "user", "content": "Tell me something new, and then something more."}]
    with OpenAI(base_url=one["base_url"], api_key=one["api_key"], timeout=120, max_retries=2) as client:
        for turn in range(TURNS):
            if turn == TURNS // 2:
                in_the_middle()
            said = ask(client, messages)
            messages += [said, {"role": "user", "content": f"Go on, {turn}."}]
    return float(sum(map(ord, said.get("content", ""))) % 7)


class Players:
    """Clients that claim, play and end episodes until the run is over, or `rest`. `problems`: of theirs before that."""

    def __init__(self, run: Run) -> None:
        told = run.told("serve-0")
        self.run, self.told = run, run.paths.root / "serve-0.json"
        self.episodes = told["base_url"].removesuffix("/v1") + "/busrl/v1/episodes"
        self.key = Path(told["key"]).read_text()
        self.rest, self.problems = threading.Event(), list[BaseException]()

    def claim(self, count: int, wait_s: float = 10.0) -> list[dict[str, Any]]:
        status, found = post(self.episodes, self.key, {"n": count, "wait_s": wait_s})
        assert status == 200, found
        return list(found)

    def work(self, patient: bool, ask: Callable[..., dict[str, Any]]) -> None:
        while self.told.exists() and not self.problems and not self.rest.is_set():
            try:
                for one in self.claim(1):
                    reward = play(one, ask, self.wait_for_a_step if patient else lambda: None)
                    status, said = post(f"{self.episodes}/{one['episode']}/end", one["api_key"], {"reward": reward})
                    assert (status, said["outcome"], said["turns"]) == (200, "committed", TURNS), said
            except Exception as problem:
                if self.told.exists():  # else the run is over, and what was under way with it
                    self.problems.append(problem)

    def wait_for_a_step(self) -> None:
        """So that the next turn finds new weights; not for long, for the run may be over its last."""
        step = self.run.step()
        with suppress(AssertionError):
            self.run.until("a step", lambda: self.run.step() > step or self.rest.is_set(), PATIENCE_S)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.rest.clear()
        asks = [(number < PATIENT, streamed if number % 2 else answered) for number in range(AT_ONCE)]
        threads = [threading.Thread(target=self.work, args=one) for one in asks]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.rest.set()
            for thread in threads:
                thread.join(120)
        assert not self.problems, self.problems


@contextmanager
def dying(claimed: list[dict[str, Any]]) -> Iterator[None]:
    """A program that makes a long call for each of these episodes, until SIGKILL."""
    client = subprocess.Popen([sys.executable, "-c", VANISHES, json.dumps(claimed)])
    try:
        yield
        assert client.poll() is None, f"it ended by itself: {client.returncode}"
    finally:
        client.kill()
        client.wait()


def long_calls(run: Run) -> list[int]:
    """Slots of the calls that ask for a long answer and are in vLLM."""
    ring = Ring.attach(run.paths.calls_name, read_only=True, calls=True)
    try:
        lines = ring.lines()
        return list(np.flatnonzero((lines["state"] == State.GENERATING) & (lines["max_new_tokens"] > LONG // 2)))
    finally:
        ring.close()


def engine(run: Run) -> dict[str, Any]:
    """What vLLM's engine has counted, a moment ago."""
    return dict(read_lines(run.directory / "pace" / "rollout-0.jsonl")[-1]["engine"])


# -- what was trained -----


class TurnRead(NamedTuple):
    """A trained turn: versions that drew it, those that drew the turns before, its worst log-probability."""

    versions: set[int]
    before: set[int]
    off_by: float


def trained(run: Run, folder: Path) -> list[TurnRead]:
    """Every turn that was trained, beside forward passes of the weights of its tokens' versions."""
    from transformers import AutoModelForCausalLM

    models: dict[int, Any] = {}

    def model(version: int) -> Any:
        if version not in models:
            path = run.paths.checkpoints / f"global_step_{version}" / "model" if version else folder
            models[version] = AutoModelForCausalLM.from_pretrained(path).eval()
        return models[version]

    decode = msgspec.msgpack.Decoder(list[SampleRecord]).decode
    files = sorted((run.config.parent).glob("step-*.samples"))
    assert len(files) == run.steps
    return [turn for file in files for sample in decode(file.read_bytes()) for turn in turns_of(sample, model)]


def turns_of(sample: SampleRecord, model: Callable[[int], Any]) -> Iterator[TurnRead]:
    import torch

    assert len(sample.seqs) == 1 and sample.temperature == 1.0, "a conversation is one sequence"
    ids = torch.from_numpy(sample.token_array().copy())[None].long()
    logprobs, versions = sample.logprob_array(), sample.version_array()
    expected = {int(one): logprobs_of(model(int(one)), ids, 1.0, 1.0) for one in set(versions.tolist())}
    at, before = 0, set[int]()
    for _, begin, end, _ in sample.turn_array().tolist():
        mine = slice(at, at + end - begin)
        drawn = versions[mine].tolist()
        gaps = [abs(expected[one][begin + i - 1] - logprobs[mine][i]) for i, one in enumerate(drawn)]
        yield TurnRead(set(drawn), set(before), float(max(gaps)))
        at, before = at + end - begin, before | set(drawn)


def check_exact(turns: list[TurnRead]) -> None:
    """What one version drew is what that version says, also where older weights drew the turns before."""
    whole = [turn for turn in turns if len(turn.versions) == 1]
    later = [turn for turn in whole if turn.before and max(turn.before) < min(turn.versions)]
    assert len({one for turn in turns for one in turn.versions}) >= 3 and len(later) >= 3, (len(turns), len(later))
    assert max(turn.off_by for turn in whole) < EXACT


def test_every_http_client_turn_trains_as_the_newest_weights_drew_it(tmp_path: Path) -> None:
    run = served(tmp_path, "recompute", 6)
    with running(run):
        players = Players(run)
        with players.at_work():
            check_end(run, run.wait(LIMIT_S))
    assert run.restarts("rollout/0") == 0, run.tail()
    turns = trained(run, tmp_path / "model")
    check_exact(turns)
    assert max(turn.off_by for turn in turns) < EXACT, "what running answers have read is computed again"
    for row in run.metrics():
        assert row["mismatch"] is None or row["mismatch"] < EXACT
        assert row["episodes"]["prefix_hit_share"] > 0.1, "no turn found what the one before it had computed"
        assert row["episodes"]["overridden"] == row["episodes"]["refused"] == 0


def test_a_client_dying_in_its_calls_frees_its_rows_in_vllm(tmp_path: Path) -> None:
    """The weights change beside its long answers: vLLM drops no cache then, and turns must not find what is old."""
    run = served(tmp_path, "keep", 6, f"limits.lease_s={LEASE_S}")
    with running(run):
        players, claimed = Players(run), list[dict[str, Any]]()
        while len(claimed) < ROWS:
            claimed += run.until("an episode is there", lambda: players.claim(1))
        with dying(claimed):
            run.until("its calls are in vLLM", lambda: len(long_calls(run)) == ROWS)
            with players.at_work():
                run.until("new weights beside them", lambda: players.problems or run.step() >= 3)
            run.until("its answers are long", lambda: engine(run)["cache_tokens"] > MUCH)
            assert len(long_calls(run)) == ROWS, "they ended too early to be given up"
        run.until("nobody works on its calls", lambda: not long_calls(run) and not engine(run)["active"])
        before = engine(run)["steps"]
        with players.at_work():
            now = run.until("vLLM works again", lambda: (now := engine(run))["steps"] > before and now)
            assert now["cache_tokens"] < MUCH, f"vLLM still holds what nobody waits for: {now}"
            check_end(run, run.wait(LIMIT_S))
    assert run.restarts("rollout/0") == run.restarts("serve/0") == 0, run.tail()
    assert "its client was silent" in run.paths.errors.read_text()
    check_exact(trained(run, tmp_path / "model"))
