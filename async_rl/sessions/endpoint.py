"""The endpoint of a session as an agent's function receives it."""

from __future__ import annotations

from typing import Any

from async_rl.core.frozen import Value

MODEL = "policy"
"""The name under which every endpoint serves the model that is trained. With `/ROLE` it is a role
of the agent, with `:untrained` the answer is not trained.
"""


class Endpoint(Value):
    """The second argument of an agent's function: how it reaches the policy.

    base_url, api_key and model are the arguments of `openai.OpenAI` and of its calls,
    anthropic_base_url of `anthropic.Anthropic`. session_url takes rewards, with session_key
    (docs/agents.md): who has it decides what is trained, so a process in which the policy acts
    must not have it.
    """

    base_url: str
    anthropic_base_url: str
    api_key: str
    model: str
    session_url: str
    session_key: str

    @classmethod
    def of(cls, url: str, api_key: str, session_key: str) -> Endpoint:
        """Return the endpoint of a session at the address of a gateway."""
        return cls(
            base_url=f"{url}/v1",
            anthropic_base_url=url,
            api_key=api_key,
            model=MODEL,
            session_url=f"{url}/v1/session",
            session_key=session_key,
        )


def for_agent(task: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a task that the policy may see: a row has the answer in most data sets."""
    return {name: task[name] for name in task if name not in ("row", "tests")}
