# package: openai-agents
# policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
# policy: {"total": 3}
# policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
# policy: {"total": 3}
"""An agent with a tool and a type of output, over responses and over chat completions."""

import asyncio
import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Total(BaseModel):
    """The sum."""

    total: int


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    set_tracing_disabled(True)
    name = os.environ["OPENAI_MODEL"]
    for model in (name, OpenAIChatCompletionsModel(name, AsyncOpenAI())):
        agent = Agent(name="a", model=model, tools=[add], output_type=Total)
        result = await Runner.run(agent, "1 and 2")
        assert result.final_output == Total(total=3), result


asyncio.run(main())
