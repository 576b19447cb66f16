# package: langchain-anthropic
# policy: <tool_call>\n{"name": "Found", "arguments": {"color": "red"}}\n</tool_call>
# policy: {"color": "red"}
# policy: plain
"""Structured output by a tool and by a schema, and a stream of text."""

import os
from typing import Literal

from langchain_anthropic import ChatAnthropic
from pydantic import BaseModel


class Found(BaseModel):
    """What was found."""

    color: Literal["red", "blue"]


model = ChatAnthropic(model=os.environ["OPENAI_MODEL"], max_tokens=500)
assert model.with_structured_output(Found).invoke("go") == Found(color="red")
found = model.with_structured_output(Found, method="json_schema").invoke("go")
assert found == Found(color="red"), found
assert "".join(chunk.text for chunk in model.stream("go")) == "plain"
