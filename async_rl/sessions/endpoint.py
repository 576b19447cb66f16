"""The endpoint of a session as an agent's function receives it."""

from __future__ import annotations

from async_rl.core.frozen import frozen

MODEL = "policy"
"""The name under which every endpoint serves the model that is trained."""


@frozen
class Endpoint:
    """The second argument of an agent's function: how it reaches the policy.

    base_url, api_key and model are the arguments of `openai.OpenAI` and of its calls; session_url
    takes rewards (docs/agents.md).
    """

    base_url: str
    api_key: str
    model: str
    session_url: str

    @classmethod
    def of(cls, url: str, token: str) -> Endpoint:
        """Return the endpoint of a session at the address of a gateway."""
        session_url = f"{url}/v1/session"
        return cls(base_url=f"{url}/v1", api_key=token, model=MODEL, session_url=session_url)
