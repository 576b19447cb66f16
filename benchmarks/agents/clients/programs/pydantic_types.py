# package: pydantic-ai-slim
# policy: <tool_call>\n{"name": "final_result", "arguments": {"color": "red"}}\n</tool_call>
# policy: {"color": "red"}
# policy: {"color": "red"}
# policy: <tool_call>\n{"name": "final_result", "arguments": {"color": "red"}}\n</tool_call>
# policy: <tool_call>\n{"name": "final_result", "arguments": {"color": "red"}}\n</tool_call>
"""Types of output by a tool, by a schema and by a prompt; over each of three APIs."""

import asyncio
import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


class Found(BaseModel):
    """What was found."""

    color: Literal["red", "blue"]


async def main() -> None:
    name = os.environ["OPENAI_MODEL"]
    chat = OpenAIChatModel(name)
    tried = [
        (chat, Found),
        (chat, NativeOutput(Found)),
        (chat, PromptedOutput(Found)),
        (OpenAIResponsesModel(name), Found),
        (AnthropicModel(name), Found),
    ]
    for model, kind in tried:
        result = await Agent(model, output_type=kind).run("go")
        assert result.output == Found(color="red"), (model, kind, result)


asyncio.run(main())
