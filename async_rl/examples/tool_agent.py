"""An agent with a Python tool, written against the plain `openai` package.

The model writes a program. The tool runs it on one test, in the jail of a verifier; if it fails,
the model reads the outcome and writes another one. `rollout.fn` in conf/agent_code.yaml names it;
docs/agents.md explains it.
"""

import functools
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from async_rl.sessions.endpoint import Endpoint

_MAX_TOKENS = 64
"""A program needs at most 43 tokens; two answers and the outcome between them fit a sample."""


@functools.cache
def _http() -> DefaultAsyncHttpxClient:
    # Shared by all samples: another client would read the certificates again, 40 ms of a core.
    return DefaultAsyncHttpxClient()


async def solve(task: dict[str, Any], endpoint: Endpoint) -> None:
    """Solve one task. The verifiers score the last answer."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=_http())
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    answer = await client.chat.completions.create(
        model=endpoint.model,
        messages=messages,
        max_tokens=_MAX_TOKENS,
    )
    message = answer.choices[0].message
    # The first test calls with an empty list, which shows little.
    request = {"program": message.content, "tests": task["tests"][1:2]}
    results: Any = await client.post("/session/run", body=request, cast_to=object)
    if results[0]["verdict"] == "pass":
        return
    outcome = results[0]["message"].rpartition(" returned ")[2] or results[0]["verdict"]
    messages += [message, {"role": "user", "content": f"# {outcome}\n{task['prompt']}"}]
    await client.chat.completions.create(
        model=endpoint.model,
        messages=messages,
        max_tokens=_MAX_TOKENS,
    )
