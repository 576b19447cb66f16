"""The answers of the policy in the session of an agent, as a sample has them."""

from async_rl.core.frozen import Value


class AgentCall(Value):
    """One answer of the policy to an agent.

    end_tokens: the tokens of the response up to its end, counted from 1; 0 = it is not trained.
    num_tokens: written by the policy. role: as the agent named it. reward: of this answer alone, a
    part of the reward of the sample. number: among the answers of the session, counted from 1;
    of: how many it had; both are 0 in old stores. left_out: why it is not trained: requested, or
    unread by its client.
    """

    end_tokens: int
    num_tokens: int
    role: str = ""
    reward: float = 0.0
    number: int = 0
    of: int = 0
    left_out: str = ""
