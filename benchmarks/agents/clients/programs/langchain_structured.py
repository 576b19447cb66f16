# package: langchain-openai
# policy: {"color": "red", "count": 2}
# policy: <tool_call>\n{"name": "Found", "arguments": {"color": "red", "count": 2}}\n</tool_call>
# policy: {"color": "red", "count": 2}
"""Structured output by each of its three methods."""

import os
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Found(BaseModel):
    """What was found."""

    color: Literal["red", "blue"]
    count: int


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"])
for method in ("json_schema", "function_calling", "json_mode"):
    found = model.with_structured_output(Found, method=method).invoke("find JSON")
    assert found == Found(color="red", count=2), (method, found)
