"""One sample in several turns: what the policy writes, what it is told in between, and how both
become one row of tokens.

takes: the calls of the function that rollout.fn names; waits for: the engine, the verifier; gives:
the tokens, each with its log-prob and version where the policy wrote it Invariants: token ids in,
token ids out: what the policy wrote is never tokenized again; tokens that it was told carry no
loss, log-prob 0 and NO_VERSION; never more than data.max_response_tokens tokens and
rollout.max_turns turns. Made by rollout.py, one for each sample; functions of users see this class
only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from async_rl.core.errors import AsyncRLError
from async_rl.core.types import (
    NO_VERSION,
    BoolArray,
    CodeTest,
    FloatArray,
    IntArray,
    Prompt,
    Sampling,
)
from async_rl.generation.engine import Completion
from async_rl.rewards.verifier.client import VerifierClient
from async_rl.rewards.verifier.protocol import TestResult

Write = Callable[[Sequence[int], int, Sampling], Awaitable[Completion]]
"""(token ids so far, number of the turn, sampling) -> what the policy goes on with."""


class RolloutEnded(AsyncRLError):
    """There is no room for another turn: the sample ends here, cut off. Functions let it pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A sample without its score: arrays over the tokens after the prompt, as in Trajectory.
    answer: the text that is judged.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    is_written: BoolArray
    is_truncated: bool
    answer: str
    transcript: str


class Conversation:
    """What a rollout function works with. prompt: what was asked; row: the data file's row; tests:
    its hidden side.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        max_turns: int,
        write: Write,
        tokenizer: Any,
        client: VerifierClient,
    ) -> None:
        self.prompt = prompt
        self.row: dict[str, Any] = msgspec.json.decode(prompt.problem.row or "{}")
        self.tests: Sequence[CodeTest] = prompt.problem.tests
        self._sampling, self._max_turns = sampling, max_turns
        self._ask, self._tokenizer, self._client = write, tokenizer, client
        self._parts: list[Completion | list[int]] = []
        self._num_turns = self._num_tokens = 0
        self._is_cut = False

    @property
    def num_turns(self) -> int:
        """Turns written so far."""
        return self._num_turns

    async def write(self, *, max_tokens: int | None = None) -> str:
        """The policy goes on from everything so far; what it wrote, without special tokens. Raises
        RolloutEnded where nothing fits.

        max_tokens: of this turn; None = what is left of data.max_response_tokens.
        """
        room = self._sampling.max_new_tokens - self._num_tokens
        if room < 1 or self._num_turns >= self._max_turns:
            self._is_cut = True
            raise RolloutEnded(
                f"{self._num_tokens} tokens in {self._num_turns} turns are all that a sample may"
                " have"
            )
        sampling = msgspec.structs.replace(
            self._sampling, max_new_tokens=room if max_tokens is None else min(room, max_tokens)
        )
        done = await self._ask(self._all_ids(), self._num_turns, sampling)
        self._parts.append(done)
        self._num_turns += 1
        self._num_tokens += len(done.token_ids)
        self._is_cut = done.is_truncated and len(done.token_ids) >= room
        return self._decode(done.token_ids.tolist())

    def tell(self, text: str) -> None:
        """Adds text that the policy reads and is not trained on. Raises RolloutEnded where it does
        not fit.
        """
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._num_tokens + len(ids) >= self._sampling.max_new_tokens:
            self._is_cut = True
            raise RolloutEnded(
                f"{len(ids)} tokens more leave no room in {self._sampling.max_new_tokens}"
                " (data.max_response_tokens)"
            )
        self._parts.append(ids)
        self._num_tokens += len(ids)

    async def test(
        self, program: str, tests: Sequence[CodeTest], setup: str = ""
    ) -> list[TestResult]:
        """Runs the program in the sandbox of a verifier; what each test found, with its message.
        Raises InfrastructureError.
        """
        return await self._client.test(program, tests, setup)

    def _all_ids(self) -> list[int]:
        return [*self.prompt.token_ids.tolist(), *(i for part in self._parts for i in _ids(part))]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def result(self, answer: str | None) -> Written:
        """The sample up to the last token that the policy wrote. answer: what is judged; None = the
        last turn. Raises RolloutEnded.
        """
        while self._parts and not isinstance(self._parts[-1], Completion):
            self._parts.pop()
        if not self._parts:
            raise RolloutEnded(
                "rollout.fn returned before the policy wrote anything; call write() at least once"
            )
        written = [isinstance(part, Completion) for part in self._parts]
        token_ids = [i for part in self._parts for i in _ids(part)]
        told = [np.zeros(len(_ids(part)), np.float32) for part in self._parts]
        return Written(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.concatenate(
                [
                    p.logprobs if isinstance(p, Completion) else t
                    for p, t in zip(self._parts, told, strict=True)
                ]
            ),
            versions=np.concatenate(
                [
                    (
                        p.versions
                        if isinstance(p, Completion)
                        else np.full(len(p), NO_VERSION, np.int32)
                    )
                    for p in self._parts
                ]
            ),
            is_written=np.repeat(written, [len(_ids(part)) for part in self._parts]),
            is_truncated=self._is_cut,
            answer=self._decode(_ids(self._parts[-1])) if answer is None else answer,
            transcript=self._decode(token_ids),
        )


def _ids(part: Completion | list[int]) -> list[int]:
    return part.token_ids.tolist() if isinstance(part, Completion) else part


def one_answer(done: Completion, text: str) -> Written:
    """A sample of one turn."""
    return Written(
        token_ids=done.token_ids,
        logprobs=done.logprobs,
        versions=done.versions,
        is_written=np.ones(len(done.token_ids), np.bool_),
        is_truncated=done.is_truncated,
        answer=text,
        transcript=text,
    )
