# package: llama-index-llms-openai-like
# policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
# policy: 3
# policy: <tool_call>\n{"name": "Found", "arguments": {"color": "red"}}\n</tool_call>
"""An agent with a tool, and structured output."""

import asyncio
import os
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Found(BaseModel):
    """What was found."""

    color: Literal["red", "blue"]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = OpenAILike(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
)


async def main() -> None:
    agent = FunctionAgent(tools=[add], llm=model)
    assert str(await agent.run(user_msg="1 and 2")) == "3"


asyncio.run(main())
assert model.structured_predict(Found, PromptTemplate("go")) == Found(color="red")
