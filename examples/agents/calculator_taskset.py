"""The calculator of games.py for verifiers (its classes of version 1): a taskset with a tool server, and a harness of
several turns that calls its tool. Trained by calculator.toml; the tool is served over MCP, once for all episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import openai
import verifiers.v1 as vf
from games import shown
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

SHARED = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="of the episode")  # 20 to 50 ms of CPU time to make


class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """A tool that shows the result after both digits were typed."""

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """The last digit of the sum of two digits."""
        return f"|{shown(f'{a}{b}')}="


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: Any) -> float:
        return float(str(trace.branches[-1].messages[-1].content) == self.data.answer) if trace.branches else 0.0

    @vf.metric
    async def tool_results(self, trace: Any) -> float:
        return float(sum(message.role == "tool" for branch in trace.branches for message in branch.messages))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for a in range(10):
            for b in range(10):
                yield SumTask(SumData(name=f"{a}+{b}", prompt=f"{a}{b}=", answer=str((a + b) % 10)), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]


class CallsTools(vf.Harness[vf.HarnessConfig]):
    """A harness that calls the model with the tools of all servers, returns their results, and calls it once more."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    SUPPORTS_MCP = True

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        _, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        served = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        client = SHARED.with_options(base_url=endpoint, api_key=secret)
        async with AsyncExitStack() as stack:
            tools, places, servers = await connect_mcp(served, stack)
            for room in (2, 1):  # two digits to add, and one as the answer
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools, max_tokens=room)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                if not (calls := messages[-1].get("tool_calls")):
                    break
                for call in calls:
                    function = call["function"]
                    result = await call_mcp(servers, places, function["name"], json.loads(function["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["CallsTools", "SumTaskset"]

if __name__ == "__main__":  # how verifiers starts the tool server
    Calculator.run()
