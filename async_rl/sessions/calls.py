"""The values of a session: its calls of the policy with their answers, its rewards, and its use."""

import contextlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from async_rl.core.calls import EVERYTHING, NO_ALTERNATIVES, Alternatives, Support
from async_rl.core.frozen import Value, frozen
from async_rl.core.types import IntArray
from async_rl.protocol.generator import Completion
from async_rl.sessions.endpoint import MODEL
from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.tools import calls_of

Run = Callable[[bytes], Awaitable[tuple[Any, bool]]]
"""Runs the program of a request in the jail; returns what JSON can express, and whether the program
failed to run. Raises Refused.
"""
Write = Callable[[str, IntArray, int, Support, Alternatives], Awaitable[Completion]]
"""(id of the call, tokens so far, most new tokens, their support, the log-probs that the agent
reads) -> the policy's continuation.
"""
_ROLE = re.compile(r"[\w.-]{0,64}")
_NAME = re.compile(rf"{MODEL}(?:/({_ROLE.pattern}))?(:untrained)?")
_ROLE_HEADER = "x-async-rl-role"
_TRAIN_HEADER = "x-async-rl-train"
# Each piece of an answer is searched for the start of each stop text.
_MOST_STOP_CHARS = 4096
# Each becomes an object of the JSON text of the answer: 0.1 s in which no other call goes on.
_MOST_SCORES = 1 << 16


class Caller(Value):
    """Whom the policy answers. role: of an agent that has several. is_trained: whether the answer
    is trained.
    """

    role: str = ""
    is_trained: bool = True


POLICY = Caller()


def caller_of(model: str, headers: Mapping[str, str]) -> Caller:
    """Return whom a request is for: by the name of its model, or by its headers, which prevail.
    Raises Refused.
    """
    named = _NAME.fullmatch(model)
    if named is None:
        raise Refused(
            f"the model {model!r} is not served here; request {MODEL!r} (the variable OPENAI_MODEL"
            f" of an agent has the name), {MODEL}/ROLE or {MODEL}:untrained",
            status=404,
            code="model_not_found",
            param="model",
        )
    role = headers.get(_ROLE_HEADER, named[1] or "")
    is_trained = headers.get(_TRAIN_HEADER, "false" if named[2] else "true")
    if not _ROLE.fullmatch(role) or is_trained not in ("true", "false"):
        raise Refused(
            f"{_ROLE_HEADER} is {role!r} and {_TRAIN_HEADER} is {is_trained!r}; a role has at most"
            " 64 letters, digits and signs of -._, and the second is true or false"
        )
    return Caller(role=role, is_trained=is_trained == "true")


@frozen
class Context:
    """The input of a call.

    parent: the turn that it continues, None at a new start; token_ids: all tokens before the
    answer, int32 [M].
    """

    parent: int | None
    token_ids: IntArray


@frozen
class Call:
    """A request for one answer.

    history: the digest of the messages. max_tokens: None = as many as fit. stops: texts before
    which the answer stops. stop_ids: tokens with which it stops. start: the text of the answer that
    the context has already. prefill: the part of it that the request has, and the answer does not
    repeat. prompt: the text before the answer, if the call has no messages. tools: tools that the
    answer may call. support: min_tokens, logit_bias and grammar of the tokens that follow `start`;
    the run decides top_k and top_p. alternatives: log-probs that the agent reads. caller: whom it
    answers.
    """

    context: Context
    history: bytes = b""
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    start: str = ""
    prefill: str = ""
    prompt: str = ""
    tools: Sequence[Any] = ()
    support: Support = EVERYTHING
    alternatives: Alternatives = NO_ALTERNATIVES
    caller: Caller = POLICY

    def __post_init__(self) -> None:
        num_scores = len(self.context.token_ids) * (1 + (self.alternatives.num_prompt_top or 0))
        if self.alternatives.num_prompt_top is not None and num_scores > _MOST_SCORES:
            raise Refused(
                f"prompt_logprobs would have {num_scores} values, and the most is {_MOST_SCORES};"
                " request fewer alternatives, or leave it out",
                param="prompt_logprobs",
            )
        if sum(map(len, self.stops)) > _MOST_STOP_CHARS:
            raise Refused(
                f"the stop texts have more than {_MOST_STOP_CHARS} characters together; send less"
            )


class Noted(Value):
    """A request that has changed a session. key: what it has in common with the same request that
    is sent again. name: the id of its answer. caller: whom it answers.
    """

    path: str
    body: bytes = b""
    key: bytes = b""
    name: str = ""
    caller: Caller = POLICY


Part = tuple[str, Any]
"""A kind, and a part of an answer of this kind: the text of `thinking` and `text`, or a `call`."""


@frozen
class Answer:
    """An answer to the agent. is_cut: by a limit. message: with the text that the request began,
    without the stop text.
    """

    call: Call
    number: int
    message: Json
    written: Completion
    is_cut: bool = False

    @property
    def why(self) -> str:
        """The reason of its end: stop, length or tool_calls."""
        if "tool_calls" in self.message:
            return "tool_calls"
        return "length" if self.is_cut else "stop"

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens before the answer."""
        return len(self.call.context.token_ids)

    @property
    def calls(self) -> Sequence[Any]:
        """The tool calls of the answer."""
        return calls_of(self.message)

    @property
    def thinking(self) -> str:
        """The thinking before the text."""
        return str(self.message.get("reasoning_content", ""))

    @property
    def content(self) -> str | None:
        """The text without tool calls; None if the answer only calls tools."""
        text = str(self.message["content"]).removeprefix(self.call.prefill)
        return text if text or not self.calls else None

    @property
    def parts(self) -> list[Part]:
        """The thinking, the text and the calls."""
        parts: list[Part] = [("thinking", self.thinking)] if self.thinking else []
        if self.content is not None:
            parts.append(("text", self.content))
        return [*parts, *(("call", call) for call in self.calls)]


@frozen
class Reward:
    """The parts of a reward: of the sample, of the answers with these numbers, or of a role."""

    parts: Mapping[str, float]
    numbers: Sequence[int] = ()
    role: str | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether it is of the sample."""
        return self.role is None and not self.numbers


class _Credit(msgspec.Struct, forbid_unknown_fields=True):
    """A reward of one answer or of one role. call: the id of the answer; choice: of several."""

    reward: Any
    call: str | None = None
    choice: int = 0
    role: str | None = None


def parts_of(value: Any) -> dict[str, float]:
    """Return the parts of a reward: a finite number, or a dict of them. Raises Refused."""
    parts = value if isinstance(value, dict) else {"reward": value}
    try:
        parts = msgspec.convert(parts, dict[str, float | bool])
    except msgspec.ValidationError:
        parts = {}
    if not parts or not all(map(math.isfinite, parts.values())):
        raise Refused(
            f"the reward {value} is neither a finite number nor a dict of finite numbers; give one,"
            " or nothing if the verifiers score the last answer"
        )
    return parts


def reward_of(value: Any, names: Mapping[str, Sequence[int]]) -> Reward:
    """Return a posted reward. names: the numbers of the answers by their ids. Raises Refused."""
    try:
        credit = msgspec.convert(value, _Credit)
    except msgspec.ValidationError:
        return Reward(parts=parts_of(value))
    parts = parts_of(credit.reward)
    if credit.call is None:
        return Reward(parts=parts, role=credit.role)
    numbers = names.get(credit.call, ())
    if not 0 <= credit.choice < len(numbers):
        raise Refused(
            f"choice {credit.choice} of {credit.call!r} is not an answer of this session; send the"
            " id of an answer as `call`",
            status=404,
        )
    return Reward(parts=parts, numbers=[numbers[credit.choice]])


@dataclass(slots=True, kw_only=True)
class Usage:
    """What one session has done so far. environment: the name under which it is counted.

    num_tokens: written by the policy. num_open: calls in progress. open_s: for how long the session
    was open, once it is closed; calling_s: the part of it with a call open. clock: monotonic
    seconds.
    """

    environment: str = "agent"
    clock: Callable[[], float] = time.monotonic
    num_turns: int = 0
    num_tokens: int = 0
    num_tool_runs: int = 0
    num_tool_errors: int = 0
    num_open: int = 0
    open_s: float = 0.0
    calling_s: float = 0.0
    _called_s: float = 0.0

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Count the time with at least one open call as the engine's."""
        if not self.num_open:
            self._called_s = self.clock()
        # Calls that overlap count once.
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.calling_s += self.clock() - self._called_s
