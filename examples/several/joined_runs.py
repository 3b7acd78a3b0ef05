"""Two runs joined by a client: a solver and a judge of its answers, each trained by a run of its own (`joined.toml`).

    python make_several.py
    busrl launch joined.toml --run-dir runs/solver
    busrl launch joined.toml --run-dir runs/judge --set model.path=made/judge
    python joined_runs.py runs/solver runs/judge

The client claims an episode of each run, plays both as one, and ends both. The runs have the same tasks and the same
seed, so episodes of the same number have the same task and belong together: members of one group of the judge judge
answers to one task. An episode waits for its partner so long as `--patience-s` says, and is then played alone, the
judge's with an answer that the client draws. Where the partner has ended before, it does not wait: so a run that fell
behind catches up. Each run knows only its own episodes, so neither cares when the other, or the client, dies.
In one run, several models are simpler (docs/several-models.md).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RIGHT, WRONG = "|", "."  # what the judge says
START_S, SILENT_S, PATIENCE_S = 120.0, 60.0, 10.0
GONE = (OSError, http.client.HTTPException)  # a server that died, or was not there; errors of HTTP are OSErrors too
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the runs are behind no proxy
Episode = dict[str, Any]


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with DIRECTLY.open(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=300) as answer:
        return json.load(answer)


class Claims:
    """Episodes of one run that have been claimed and not been played yet, by their number."""

    def __init__(self, run_dir: Path) -> None:
        self._about = run_dir / "serve-0.json"
        self._answered = time.monotonic()
        self.waiting: dict[int, tuple[float, Episode]] = {}
        self.ended: set[int] = set()  # the numbers of those that have ended

    @property
    def over(self) -> bool:
        return not self._about.exists() or time.monotonic() > self._answered + SILENT_S

    def until_served(self) -> None:
        until = time.monotonic() + START_S
        while not self._about.exists():
            if time.monotonic() > until:
                sys.exit(f"{self._about} is not there after {START_S:g} s: was `busrl launch joined.toml` started?")
            time.sleep(0.1)

    def fetch(self, most: int) -> None:
        """Claim up to so many. The address is read each time: a server that was started again has another."""
        try:
            about = json.loads(self._about.read_text())
            server, key = about["base_url"].removesuffix("/v1"), Path(about["key"]).read_text()
            for episode in post(f"{server}/busrl/v1/episodes", key, {"n": most, "wait_s": 0.2}):
                self.waiting[episode["uid"]] = (time.monotonic(), {**episode, "server": server, "run": self})
            self._answered = time.monotonic()
        except GONE:
            time.sleep(0.2)

    def forget(self, gone: dict[str, float]) -> None:
        """Drop what servers that died had given: nobody can end it, and its partner would be given back in vain."""
        self.waiting = {uid: (since, one) for uid, (since, one) in self.waiting.items()
                        if since > gone.get(one["server"], 0.0)}

    def take(self, uid: int) -> Episode:
        return self.waiting.pop(uid)[1]

    def left_alone(self, partners: Claims, patience_s: float) -> int | None:
        """The lowest number that has waited long enough, or whose partner has ended or comes no more."""
        late = time.monotonic() - (0.0 if partners.over else patience_s)
        found = (uid for uid, (since, _) in self.waiting.items() if since <= late or uid in partners.ended)
        return min(found, default=None)


def next_pair(solver: Claims, judge: Claims, patience_s: float) -> tuple[Episode | None, Episode | None]:
    """Two of one number; or one that waits for its partner no longer."""
    if both := solver.waiting.keys() & judge.waiting.keys():
        uid = min(both)
        return solver.take(uid), judge.take(uid)
    if (uid := solver.left_alone(judge, patience_s)) is not None:
        return solver.take(uid), None
    if (uid := judge.left_alone(solver, patience_s)) is not None:
        return None, judge.take(uid)
    return None, None


def said(episode: Episode, prompt: str) -> str:
    answer = post(f"{episode['base_url']}/completions", episode["api_key"], {"prompt": prompt, "max_tokens": 1})
    text: str = answer["choices"][0]["text"]
    return text


def end(episode: Episode, body: dict[str, Any]) -> None:
    post(f"{episode['server']}/busrl/v1/episodes/{episode['episode']}/end", episode["api_key"], body)
    if not body.get("again"):
        episode["run"].ended.add(episode["uid"])


def play(solver: Episode | None, judge: Episode | None) -> str:
    """Play one episode of each run as one, where either may be missing; returns a line about it."""
    task = (solver or judge or {})["task"]
    answer = said(solver, task["prompt"]) if solver else random.choice([task["answer"], random.choice("0123456789")])
    right = answer == task["answer"]
    if judge:
        verdict = said(judge, f"{task['prompt']}{answer}=")
        end(judge, {"reward": float(verdict == (RIGHT if right else WRONG))})
    if solver:
        end(solver, {"reward": float(right)})
    if solver and judge:
        return "of both"
    return "of the solver alone" if solver else "of the judge alone"


def played(solver: Episode | None, judge: Episode | None, gone: dict[str, float]) -> str:
    """Play; if a server dies meanwhile its episode is claimed again, and so is the other, which is given back. The
    servers that could not even be told so are noted in `gone`, with the time."""
    try:
        return play(solver, judge)
    except GONE as problem:
        why = problem.read().decode() if isinstance(problem, urllib.error.HTTPError) else str(problem)
        print(f"episode given back: {why}", file=sys.stderr)
        for episode in filter(None, (judge, solver)):
            try:
                end(episode, {"again": True, "why": "the other run's server went away"})
            except urllib.error.HTTPError:
                continue  # it has ended
            except GONE:
                gone[episode["server"]] = time.monotonic()  # it has died; its episodes come again
        return "given back"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solver", type=Path, help="the run directory of the solver")
    parser.add_argument("judge", type=Path, help="the run directory of the judge")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, help="so long an episode waits for its partner")
    options = parser.parse_args()
    runs = solver, judge = Claims(options.solver), Claims(options.judge)
    for claims in runs:
        claims.until_served()
    at_work, counts, gone = set(), Counter[str](), dict[str, float]()
    with ThreadPoolExecutor(options.at_once) as pool:
        while at_work or not all(claims.over for claims in runs):
            for claims in runs:
                claims.forget(gone)
                if not claims.over and (room := options.at_once - len(at_work) - len(claims.waiting)) > 0:
                    claims.fetch(room)
            while len(at_work) < options.at_once and any(pair := next_pair(solver, judge, options.patience_s)):
                at_work.add(pool.submit(played, *pair, gone))
            for done in [one for one in at_work if one.done()]:
                at_work.remove(done)
                counts[done.result()] += 1
            time.sleep(0.01)
    print(f"{sum(counts.values())} episodes: " + ", ".join(f"{count} {what}" for what, count in counts.most_common()))


if __name__ == "__main__":
    main()
