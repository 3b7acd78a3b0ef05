"""The task for verifiers (its classes of version 1): a taskset with a reward, and a harness that asks once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf
from sorting import reward

TASKS = 1000
SHARED = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="of the episode")  # 20 to 50 ms of CPU time to make


class SortData(vf.TaskData):
    row: str = ""


class SortTask(vf.Task[SortData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: Any) -> float:
        return reward(self.data.row, str(trace.branches[-1].messages[-1].content)) if trace.branches else 0.0


class SortTaskset(vf.Taskset[SortTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SortTask]:
        chance = random.Random(0)
        for number in range(TASKS):
            row = "".join(chance.choice("0123456789") for _ in range(chance.randint(3, 10))) + "="
            yield SortTask(SortData(name=f"sort{number}", prompt=row, row=row), self.config.task)


class AskOnce(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        _, prompt = self.resolve_prompt(data)
        client = SHARED.with_options(base_url=endpoint, api_key=secret)
        await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": prompt}])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AskOnce", "SortTaskset"]
