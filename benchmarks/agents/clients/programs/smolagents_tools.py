# package: smolagents
# policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
# policy: <tool_call>\n{"name": "final_answer", "arguments": {"answer": "3"}}\n</tool_call>
# policy: Thought: I add.\n<code>\nfinal_answer(1 + 2)\n</code>
"""An agent that calls tools and one that writes code."""

import os

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


model = OpenAIServerModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
assert str(ToolCallingAgent(tools=[add], model=model).run("1 and 2")) == "3"
assert CodeAgent(tools=[], model=model).run("1 and 2") == 3
