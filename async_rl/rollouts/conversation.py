"""One sample in several turns: text of the policy and text that it reads in between, as one row of
tokens.

takes: calls of the function that rollout.fn names
waits for: the engine and the verifier
returns: the tokens, with log-probs and versions where the policy wrote them

Invariants
- Token ids in, token ids out: text of the policy is never tokenized again.
- Tokens that the policy only reads have no loss, log-prob 0 and NO_VERSION.
- A sample has at most data.max_response_tokens tokens and rollout.max_turns turns.

Users' functions see the class Conversation only.
"""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from async_rl.config.plugins import load_rollout
from async_rl.config.run import RunConfig
from async_rl.core.calls import AgentCall
from async_rl.core.errors import AsyncRLError
from async_rl.core.frozen import frozen
from async_rl.core.types import (
    Branch,
    CodeProblem,
    CodeTest,
    IntArray,
    Prompt,
    Sampling,
    Score,
    Ticket,
)
from async_rl.protocol.generator import Completion, joined, only_read
from async_rl.rewards.scoring import VerifierClient
from async_rl.rewards.verifier.protocol import TestResult

Write = Callable[[str, IntArray, Sampling], Awaitable[Completion]]
"""(id of the request, token ids so far, sampling) -> the policy's continuation."""


class RolloutEnded(AsyncRLError):
    """No further turn fits, so the sample stops here, truncated. Functions do not catch this."""


@frozen
class Written:
    """A sample without its score. tokens: all after the prompt.

    answer: the text to score. transcript: all text after the prompt. branches: of the prompt and
    `tokens` together. score: the one that an environment gave. calls: as in Trajectory; without a
    score their rewards are added to that of the verifiers.
    """

    tokens: Completion
    answer: str
    transcript: str
    branches: tuple[Branch, ...] = ()
    score: Score | None = None
    calls: tuple[AgentCall, ...] = ()


class Conversation:
    """The interface of a rollout function.

    prompt: the prompt of the sample. row: the row of the data file. tests: its hidden tests.
    name: the first part of the ids of its requests.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        name: str,
        max_turns: int,
        write: Write,
        tokenizer: Any,
        client: VerifierClient,
    ) -> None:
        self.prompt = prompt
        self.row: dict[str, Any] = msgspec.json.decode(prompt.problem.row or "{}")
        self.tests: Sequence[CodeTest] = prompt.problem.tests
        self.num_turns = 0
        self._sampling = sampling
        self._name = name
        self._max_turns = max_turns
        self._write = write
        self._tokenizer = tokenizer
        self._client = client
        self._parts: list[Completion] = []
        self._num_parts = 0
        """Parts up to the last turn: text after it has no effect on any trained token."""
        self._num_tokens = 0
        self._is_truncated = False

    async def write(self, *, max_tokens: int | None = None) -> str:
        """Let the policy continue; return its text without special tokens.

        max_tokens: limit of this turn; None = the rest of data.max_response_tokens. Raises
        RolloutEnded when no turn or token is left.
        """
        room = self._sampling.max_new_tokens - self._num_tokens
        if room < 1 or self.num_turns >= self._max_turns:
            self._is_truncated = True
            raise RolloutEnded(
                f"the sample has {self._num_tokens} tokens in {self.num_turns} turns; its limits"
                f" are {self._sampling.max_new_tokens} tokens (data.max_response_tokens) and"
                f" {self._max_turns} turns (rollout.max_turns)"
            )
        # A turn may request fewer tokens than the remaining room, never more.
        limit = room if max_tokens is None else min(room, max_tokens)
        sampling = replace(self._sampling, max_new_tokens=limit)
        # All tokens each time: of earlier turns an engine keeps only the prefix cache.
        before = np.concatenate([self.prompt.token_ids, *(part.token_ids for part in self._parts)])
        done = await self._write(f"{self._name}.{self.num_turns}", before, sampling)
        self._append(done)
        self._num_parts = len(self._parts)
        self.num_turns += 1
        # A turn that only reached its own limit does not truncate the sample.
        self._is_truncated = done.is_truncated and len(done.token_ids) >= room
        return self._decode(done.token_ids)

    def tell(self, text: str) -> None:
        """Add text that the policy reads and is not trained on.

        Raises RolloutEnded when it does not fit.
        """
        # No special tokens: a start-of-text token in the middle would be out of distribution.
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        # Not only if it is larger: the policy needs room for at least one token.
        if self._num_tokens + len(ids) >= self._sampling.max_new_tokens:
            self._is_truncated = True
            raise RolloutEnded(
                f"{len(ids)} more tokens do not fit into the response of"
                f" {self._sampling.max_new_tokens} (data.max_response_tokens)"
            )
        self._append(only_read(np.array(ids, np.int32)))

    async def test(
        self, program: str, tests: Sequence[CodeTest], setup: str = ""
    ) -> list[TestResult]:
        """Run the program in a verifier's sandbox; return a result per test, with its message.

        Raises InfrastructureError.
        """
        problem = CodeProblem(tests=list(tests), setup=setup)
        return await self._client.verify(problem, program, stops=False)

    def result(self, answer: str | None) -> Written:
        """Return the sample up to the last token of the policy.

        answer: the text to score; None = the last turn. Raises RolloutEnded for another value, and
        when the policy wrote nothing.
        """
        if not self._num_parts:
            raise RolloutEnded(
                "rollout.fn returned before the policy wrote anything; call write() at least once"
            )
        if not isinstance(answer, str | None):
            raise RolloutEnded(
                f"rollout.fn returned {answer!r:.200}; return a text to score, or None for the last"
                " turn"
            )
        parts = self._parts[: self._num_parts]
        tokens = replace(joined(parts), is_truncated=self._is_truncated)
        if answer is None:
            answer = self._decode(parts[-1].token_ids)
        return Written(tokens=tokens, answer=answer, transcript=self._decode(tokens.token_ids))

    def _append(self, part: Completion) -> None:
        self._parts.append(part)
        self._num_tokens += len(part.token_ids)

    def _decode(self, ids: IntArray) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))


SampleMaker = Callable[[Ticket, int, Sampling, Write, VerifierClient], Awaitable[Written]]
"""Makes sample `index` of a ticket in several turns: with a user's function, or with an agent
(agents.py). The last argument runs programs for it.
"""


def open_conversations(config: RunConfig, tokenizer: Any) -> SampleMaker | None:
    """Return the maker of samples that rollout.fn names; None if it names no function. Raises
    ConfigError.
    """
    lead = load_rollout(config.rollout)
    if lead is None:
        return None

    async def sample(
        ticket: Ticket, index: int, sampling: Sampling, write: Write, verifier: VerifierClient
    ) -> Written:
        talk = Conversation(
            ticket.prompt,
            sampling,
            name=f"{ticket.group_id}.{ticket.attempt}.{index}",
            max_turns=config.rollout.max_turns,
            write=write,
            tokenizer=tokenizer,
            client=verifier,
        )
        answer = None
        # The function returns, or no further turn fits.
        with contextlib.suppress(RolloutEnded):
            answer = await lead(talk)
        return talk.result(answer)

    return sample
