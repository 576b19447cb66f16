# package: langchain
# policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
# policy: <tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 6}}\n</tool_call>
# policy: the sum is 3
"""An agent with a tool, once called and then twice in one answer."""

import os

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), tools=[add])
messages = agent.invoke({"messages": [{"role": "user", "content": "go"}]})["messages"]
assert [m.content for m in messages if m.type == "tool"] == ["3", "7", "11"], messages
assert messages[-1].content == "the sum is 3"
