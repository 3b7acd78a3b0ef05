"""A client of `configs/serve.toml` in plain Python: claims episodes, calls the model for each, posts its reward.

    python examples/agents/http_client.py RUN_DIR [--at-once 16] [--server 0]

Any language that speaks HTTP can do this. It ends with the run: then serve-0.json is gone, or no server answers. At the
end it prints the number of its episodes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SECOND_TRY = 0.5  # the reward of an answer that is right the second time
START_S, SILENT_S = 120.0, 60.0
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the run is behind no proxy


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with DIRECTLY.open(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=300) as answer:
        return json.load(answer)


def play(episode: dict[str, Any]) -> float:
    """Two calls at most, as in two_tries.py."""
    task = episode["task"]
    for worth in (1.0, SECOND_TRY):
        answer = post(f"{episode['base_url']}/completions", episode["api_key"], {"prompt": task["prompt"]})
        if answer["choices"][0]["text"].rpartition("|")[2] == task["answer"]:
            return worth
    return 0.0


def work(about_file: Path, ended: list[float]) -> None:
    """Claim, play and end one episode after another until the run is over. `about_file` has the server's address, which
    changes when the server died and was started again."""
    answered = time.monotonic()
    while about_file.exists() and time.monotonic() < answered + SILENT_S:
        try:
            about = json.loads(about_file.read_text())
            server, key = about["base_url"].removesuffix("/v1"), Path(about["key"]).read_text()
            for episode in post(f"{server}/busrl/v1/episodes", key, {"n": 1, "wait_s": 10}):
                reward = play(episode)
                post(f"{server}/busrl/v1/episodes/{episode['episode']}/end", episode["api_key"], {"reward": reward})
                ended.append(reward)
            answered = time.monotonic()
        except urllib.error.HTTPError as problem:
            print(problem.code, problem.read().decode(), file=sys.stderr)  # another client may have this episode now
        except (OSError, http.client.HTTPException):
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--server", type=int, default=0)
    options = parser.parse_args()
    about_file, until = options.run_dir / f"serve-{options.server}.json", time.monotonic() + START_S
    while not about_file.exists():
        if time.monotonic() > until:
            question = 'does the run have a [[process]] with role = "serve"?'
            sys.exit(f"{about_file} is not there after {START_S:g} s: {question}")
        time.sleep(0.1)
    ended: list[float] = []
    threads = [threading.Thread(target=work, args=(about_file, ended)) for _ in range(options.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(ended)} episodes ended")


if __name__ == "__main__":
    main()
