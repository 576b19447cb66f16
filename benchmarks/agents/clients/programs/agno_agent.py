# package: agno
# policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
# policy: the sum is 3
# policy: {"color": "red"}
"""An agent with a tool, and a type of output."""

import os
from typing import Literal

from agno.agent import Agent
from agno.models.openai import OpenAIChat
from pydantic import BaseModel


class Found(BaseModel):
    """What was found."""

    color: Literal["red", "blue"]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = OpenAIChat(
    id=os.environ["OPENAI_MODEL"],
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
assert Agent(model=model, tools=[add], telemetry=False).run("go").content == "the sum is 3"
found = Agent(model=model, output_schema=Found, telemetry=False).run("go").content
assert found == Found(color="red"), found
