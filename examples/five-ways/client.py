"""Way 4: a program with OpenAI's client that gets the run's directory: python client.py RUN_DIR [--at-once 64].

It claims episodes, calls the model for each, and posts the reward. It ends with the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import openai
from sorting import reward

START_S = 120.0


async def play(shared: openai.AsyncOpenAI, episode: dict[str, Any]) -> float:
    """Play one episode: any code that uses OpenAI's client. A new client for each would cost more than the call."""
    prompt = episode["task"]["prompt"]
    client = shared.with_options(base_url=episode["base_url"], api_key=episode["api_key"])
    messages: Any = [{"role": "user", "content": prompt}]
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return reward(prompt, answer.choices[0].message.content or "")


async def work(shared: openai.AsyncOpenAI, server: str, head: dict[str, str]) -> None:
    """Claim, play and end one episode after another until the server does not answer any more."""
    async with aiohttp.ClientSession(server, headers=head) as run:
        try:
            while True:
                async with run.post("/busrl/v1/episodes", json={"n": 1, "wait_s": 10}) as answer:
                    claimed = await answer.json()
                for episode in claimed if answer.ok else []:
                    worth = await play(shared, episode)
                    await run.post(f"/busrl/v1/episodes/{episode['episode']}/end", json={"reward": worth})
        except (aiohttp.ClientError, openai.APIError, ConnectionError):
            return


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--at-once", type=int, default=64)
    options = parser.parse_args()
    about_file, until = options.run_dir / "serve-0.json", time.monotonic() + START_S
    while not about_file.exists() and time.monotonic() < until:
        await asyncio.sleep(0.1)
    about = json.loads(about_file.read_text())
    head = {"Authorization": f"Bearer {Path(about['key']).read_text()}"}
    server = about["base_url"].removesuffix("/v1")
    os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy"), "127.0.0.1"]))
    async with openai.AsyncOpenAI(base_url=about["base_url"], api_key="of the episode") as shared:
        await asyncio.gather(*(work(shared, server, head) for _ in range(options.at_once)))


if __name__ == "__main__":
    asyncio.run(main())
