"""The calculator of examples/agents for verifiers without a tool server: what it shows is a turn of the user.

Each turn is two characters, for verifiers' training client does not pass on the length that a program asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf
from calculator_taskset import SumTask, SumTaskset
from games import shown


class TypedTask(SumTask):
    @vf.reward(weight=1.0)
    async def right(self, trace: Any) -> float:
        return float(str(trace.branches[-1].messages[-1].content)[:1] == self.data.answer) if trace.branches else 0.0


class TypedTaskset(SumTaskset):
    def load(self) -> Iterator[SumTask]:
        return (TypedTask(one.data, self.config.task) for one in super().load())

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return []


class Types(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        _, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                made = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = made.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": said})
                if not said.isdigit():
                    break
                messages.append({"role": "user", "content": f"|{shown(said)}="})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["TypedTaskset", "Types"]
