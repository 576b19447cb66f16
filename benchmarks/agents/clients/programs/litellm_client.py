# package: litellm
# policy: {"color": "red"}
# policy: <tool_call>\n{"name": "json_tool_call", "arguments": {"color": "red"}}\n</tool_call>
# policy: red
# policy: red
"""A type as response_format over both APIs, a stream, and a response."""

import os
from typing import Literal

import litellm
from pydantic import BaseModel


class Found(BaseModel):
    """What was found."""

    color: Literal["red", "blue"]


messages = [{"role": "user", "content": "go"}]
name = os.environ["OPENAI_MODEL"]
for model in (f"openai/{name}", f"anthropic/{name}"):
    reply = litellm.completion(model=model, messages=messages, response_format=Found)
    assert Found.model_validate_json(reply.choices[0].message.content).color == "red", reply
stream = litellm.completion(model=f"openai/{name}", messages=messages, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "red"
reply = litellm.responses(model=f"openai/{name}", input="go")
assert reply.output[0].content[0].text == "red", reply
