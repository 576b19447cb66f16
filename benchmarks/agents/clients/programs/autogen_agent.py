# package: autogen-ext
# policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
# policy: the sum is 3
# policy: {"color": "red"}
"""An agent with a tool, and a type of output."""

import asyncio
import os
from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel


class Found(BaseModel):
    """What was found."""

    color: Literal["red", "blue"]


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    info = ModelInfo(
        vision=False,
        function_calling=True,
        json_output=True,
        structured_output=True,
        family="unknown",
    )
    model = OpenAIChatCompletionClient(
        model=os.environ["OPENAI_MODEL"],
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        model_info=info,
    )
    agent = AssistantAgent("a", model, tools=[add], reflect_on_tool_use=True)
    assert (await agent.run(task="1 and 2")).messages[-1].content == "the sum is 3"
    typed = AssistantAgent("b", model, output_content_type=Found)
    assert (await typed.run(task="go")).messages[-1].content == Found(color="red")


asyncio.run(main())
