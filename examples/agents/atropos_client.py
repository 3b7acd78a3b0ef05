"""The work of an environment of Atropos in plain Python: draws a group of answers from the model, scores and posts it.

    python examples/agents/atropos_client.py RUN_DIR [--at-once 4]

For `configs/atropos.toml`. An environment of atroposlib needs nothing of this: its rollout_server_url is the `url` in
RUN_DIR/atropos.json. The client ends with the run: then that file is gone, or no process answers.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

GROUP = 8
START_S, SILENT_S = 120.0, 60.0
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the run is behind no proxy


def post(url: str, body: dict[str, Any], key: str = "") -> Any:
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Content-Encoding": "gzip"}
    request = urllib.request.Request(url, gzip.compress(json.dumps(body).encode()), head)
    with DIRECTLY.open(request, timeout=300) as answer:
        return json.load(answer)


def group(base_url: str, key: str) -> dict[str, Any]:
    """Draw eight answers to one question: digits that the model has to sort."""
    digits = "".join(random.choices("0123456789", k=random.randint(2, 5)))
    samples: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
    request = {"prompt": f"{digits}=", "n": GROUP, "logprobs": 1, "return_token_ids": True}
    answer = post(f"{base_url}/completions", request, key)
    prompt = answer["prompt_token_ids"]
    for choice in answer["choices"]:
        ids = choice["token_ids"]
        samples["tokens"].append(prompt + ids)
        samples["masks"].append([-100] * len(prompt) + ids)
        samples["inference_logprobs"].append([1.0] * len(prompt) + choice["logprobs"]["token_logprobs"])
        samples["scores"].append(float(choice["text"].rpartition("|")[2] == "".join(sorted(digits))))
    return samples


def work(about_file: Path) -> None:
    """Post one group after another until the run is over. `about_file` has the address, which changes when the process
    died and was started again."""
    answered, waiting = time.monotonic(), None
    while about_file.exists() and time.monotonic() < answered + SILENT_S:
        try:
            about = json.loads(about_file.read_text())
            waiting = waiting or group(about["base_url"], Path(about["key"]).read_text())
            post(f"{about['url']}/scored_data", waiting)
            answered, waiting = time.monotonic(), None
        except urllib.error.HTTPError as problem:
            print(problem.code, problem.read().decode(), file=sys.stderr)
            waiting = waiting if problem.code >= 500 else None  # below 500 it would be refused again
        except (OSError, http.client.HTTPException):
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args()
    about_file, until = options.run_dir / "atropos.json", time.monotonic() + START_S
    while not about_file.exists():
        if time.monotonic() > until:
            sys.exit(f"{about_file} is not there after {START_S:g} s: does the run have a process of the role atropos?")
        time.sleep(0.1)
    threads = [threading.Thread(target=work, args=(about_file,)) for _ in range(options.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
