"""The agent of schema_learning.py: its answers are JSON with a field for the program.

Written against the plain `openai` package, as async_rl/examples/tool_agent.py, which it follows.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from async_rl.sessions.endpoint import Endpoint

SCHEMA = {
    "type": "object",
    "properties": {"program": {"type": "string"}},
    "required": ["program"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "solution", "schema": SCHEMA}}
_MAX_TOKENS = 72
"""The longest answers of the corpus have about 52; two and the outcome fit a sample."""


@functools.cache
def _http() -> DefaultAsyncHttpxClient:
    return DefaultAsyncHttpxClient()


async def schema(task: dict[str, Any], endpoint: Endpoint) -> float:
    """Solve one task with the schema in each request."""
    return await _solve(task, endpoint, {"response_format": FORM})


async def free(task: dict[str, Any], endpoint: Endpoint) -> float:
    """Solve one task without a schema."""
    return await _solve(task, endpoint, {})


async def _solve(task: dict[str, Any], endpoint: Endpoint, form: dict[str, Any]) -> float:
    """Return 1 if the last program passes all tests, else 0."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=_http())
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]

    async def write() -> str:
        answer = await client.chat.completions.create(
            model=endpoint.model, messages=messages, max_tokens=_MAX_TOKENS, **form
        )
        messages.append(answer.choices[0].message)
        return _program_of(answer.choices[0].message.content)

    async def run(program: str, tests: list[Any]) -> list[Any]:
        body = {"program": program, "tests": tests}
        results: Any = await client.post("/session/run", body=body, cast_to=object)
        return list(results)

    program = await write()
    # The first test calls with an empty list, which shows little.
    (result,) = await run(program, task["tests"][1:2])
    if result["verdict"] != "pass":
        outcome = result["message"].rpartition(" returned ")[2] or result["verdict"]
        messages.append({"role": "user", "content": f"# {outcome}\n{task['prompt']}"})
        program = await write()
    results = await run(program, task["tests"])
    return float(all(result["verdict"] == "pass" for result in results))


def _program_of(answer: str | None) -> str:
    """Return the program of an answer; an empty one, which fails, if it has no program."""
    try:
        found = json.loads(answer or "")
    except ValueError:
        return ""
    program = found.get("program") if isinstance(found, dict) else None
    return program if isinstance(program, str) else ""
