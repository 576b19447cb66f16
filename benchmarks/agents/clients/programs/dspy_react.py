# package: dspy
# policy: {"next_thought": "add them", "next_tool_name": "add", "next_tool_args": {"a": 1, "b": 2}}
# policy: {"next_thought": "done", "next_tool_name": "finish", "next_tool_args": {}}
# policy: {"reasoning": "as added", "total": 3}
# policy: {"color": "red"}
"""ReAct and a signature with JSONAdapter."""

import os
from typing import Literal

import dspy


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = dspy.LM(f"openai/{os.environ['OPENAI_MODEL']}", cache=False, max_tokens=2000)
dspy.configure(lm=model, adapter=dspy.JSONAdapter())
assert dspy.ReAct("question -> total: int", tools=[add])(question="1 and 2").total == 3


class Find(dspy.Signature):
    """Find a color."""

    question: str = dspy.InputField()
    color: Literal["red", "blue"] = dspy.OutputField()


assert dspy.Predict(Find)(question="go").color == "red"
