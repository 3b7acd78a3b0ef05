"""An environment of atroposlib (0.4.0): the digits of `atropos_client.py`, by the classes of the library, and by the
Python of `make atropos-env`:

    .venv/atropos/bin/python examples/agents/atropos_environment.py RUN_DIR TOKENIZER [--groups FILE]

For `configs/atropos.toml`, with the tokenizer of its model; FILE gets the groups that are posted. What ties it to the
run is `rollout_server_url`, `base_url` with the key, and group_size = groups.size. It ends when the run has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import tenacity
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class Sort(BaseEnv):
    name = "sort"

    async def setup(self) -> None:
        pass

    async def get_next_item(self) -> str:
        return "".join(random.choices("0123456789", k=random.randint(2, 5)))

    async def collect_trajectories(self, item: str) -> tuple[Any, list[str]]:
        samples: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.completion(prompt=f"{item}=", n=self.config.group_size)
            for choice, node in zip(answer.choices, managed.get_state()["nodes"]):
                samples["tokens"].append(node.tokens)
                samples["masks"].append(node.masked_tokens)
                samples["inference_logprobs"].append(node.logprobs)
                samples["scores"].append(float(choice.text.rpartition("|")[2] == "".join(sorted(item))))
        return samples, []  # one whose scores are all the same is not posted: the library's default

    async def evaluate(self, *args: Any, **options: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("tokenizer")
    parser.add_argument("--groups")
    options = parser.parse_args()
    about = json.loads((options.run_dir / "atropos.json").read_text())
    config = BaseEnvConfig(
        group_size=8, rollout_server_url=about["url"], tokenizer_name=options.tokenizer, total_steps=-1,
        steps_per_eval=0, wandb_name="sort", use_wandb=False, data_path_to_save_groups=options.groups)
    model = APIServerConfig(server_type="vllm", model_name="policy", tokenizer_name=options.tokenizer,
                            base_url=about["base_url"], api_key=Path(about["key"]).read_text())
    try:
        asyncio.run(Sort(config, [model]).env_manager())
    except tenacity.RetryError:
        sys.exit("the run answers no more")


if __name__ == "__main__":
    main()
