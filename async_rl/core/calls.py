"""Calls of the policy: the tokens that an answer may draw, and the values that a sample keeps."""

import json
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from async_rl.core.frozen import Value

MOST_KEPT = 1024
"""The largest top_k of training samples."""
MOST_TOP = 20
"""The most alternatives of a token, as in the API of OpenAI."""


class Support(Value):
    """What an answer may draw from: the whole vocabulary by default.

    top_k, top_p: the likeliest tokens, after the temperature (0 and 1 = all); min_tokens: no end
    token before so many; logit_bias: added to the logits before the temperature, by token; grammar:
    of the whole answer, a JSON schema, a structural tag of xgrammar, EBNF (with ::=), or else a
    regular expression; empty = none.
    """

    top_k: Annotated[int, Meta(ge=0)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    # -100 and 100 as in the API of OpenAI: beyond, float32 loses the logits themselves.
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = msgspec.field(
        default_factory=dict
    )
    grammar: str = ""

    @property
    def grammar_kind(self) -> Literal["json", "structural_tag", "grammar", "regex"]:
        """The kind of the grammar, by its name in vLLM. Raises ValueError for text that starts like
        JSON and is not.
        """
        if self.grammar.lstrip().startswith("{"):
            is_tag = json.loads(self.grammar).get("type") == "structural_tag"
            return "structural_tag" if is_tag else "json"
        return "grammar" if "::=" in self.grammar else "regex"

    @property
    def is_truncated(self) -> bool:
        """Return whether probabilities decide, which the learner cannot compute again exactly."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def is_recorded(self) -> bool:
        """Return whether an engine records what top_k and top_p leave, at most 4 KB per token."""
        return 0 < self.top_k <= MOST_KEPT


EVERYTHING = Support()


class Alternatives(Value):
    """The log-probs that a caller reads next to those of the drawn tokens.

    num_top: the likeliest tokens at each position of the answer, from the distribution that was
    drawn from. num_prompt_top: the same for the tokens before the answer, at temperature 1, next to
    each of these tokens; None = they have no log-probs.
    """

    num_top: Annotated[int, Meta(ge=0, le=MOST_TOP)] = 0
    num_prompt_top: Annotated[int, Meta(ge=0, le=MOST_TOP)] | None = None


NO_ALTERNATIVES = Alternatives()


class Span(Value):
    """Tokens that one request drew from a support.

    start, end: their positions; stop_ids: its end tokens; kept: the tokens that its top_k and top_p
    left at each position (batching/support.py), empty if they left all.
    """

    start: int
    end: int
    support: Support
    stop_ids: tuple[int, ...]
    kept: bytes = b""


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
