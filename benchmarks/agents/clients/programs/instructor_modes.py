# package: instructor
# policy: <tool_call>\n{"name": "Found", "arguments": {"color": "red"}}\n</tool_call>
# policy: {"color": "red"}
# policy: {"color": "red"}
"""Structured output by its modes."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Found(BaseModel):
    """What was found."""

    color: Literal["red", "blue"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(), mode=mode)
    found = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"],
        messages=[{"role": "user", "content": "go"}],
        response_model=Found,
    )
    assert found.color == "red", mode
