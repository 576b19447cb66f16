# package: inspect-ai
# policy: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>
# policy: 3
"""A task with a tool over the provider `openai-api`, and its probe of the model."""

import os
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


@tool
def add() -> Tool:
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    return execute


model = get_model(f"openai/{os.environ['OPENAI_MODEL']}")
task = Task(
    dataset=[Sample(input="1 and 2", target="3")],
    solver=[use_tools(add()), generate()],
    scorer=match(),
)
with tempfile.TemporaryDirectory() as logs:
    (log,) = eval(task, model=model, log_dir=logs, display="none")
assert log.status == "success", log.error
assert log.results.scores[0].metrics["accuracy"].value == 1, log
sys.exit(0)
