# package: strands-agents
# policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
# policy: the sum is 3
"""An agent with a tool, over a stream."""

import os

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


arguments = {
    "base_url": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
}
model = OpenAIModel(client_args=arguments, model_id=os.environ["OPENAI_MODEL"])
assert "the sum is 3" in str(Agent(model=model, tools=[add])("go"))
