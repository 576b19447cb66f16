"""Tokenizers and a policy for sessions: every word is a token, and the policy writes what it is
told.
"""

import contextlib
import functools
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import jinja2
import numpy as np

from async_rl.core.calls import Alternatives, Support
from async_rl.core.types import (
    CodeProblem,
    Group,
    IntArray,
    Prompt,
    Purpose,
    Score,
    Trajectory,
)
from async_rl.protocol.generator import Completion
from async_rl.rollouts.conversation import Written
from async_rl.rollouts.rollout import trajectory
from async_rl.sessions.calls import Answer, Call
from async_rl.sessions.chat import Chat, Reader
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.record import Record, Turn
from async_rl.sessions.server import build_app
from async_rl.sessions.session import Session
from async_rl.wire.addresses import LOOPBACK
from async_rl.wire.http import listen, serving, url_of

END = "<|im_end|>"
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The text of an answer is not repeated as it was written: a template of this kind drops the
# reasoning of earlier answers and the space around them.
TRIMS = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}"
    "{{ m.content.split('so')[-1] | trim }}{{ eos }}{% else %}{{ m.content | trim }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}policy: "
TEMPLATES = (CHATML, TRIMS, ENDLESS, "")


compiled = functools.cache(jinja2.Environment().from_string)


class Words:
    """A word, a space or a sign is a token; ids are given in the order of first use."""

    def __init__(self, template: str) -> None:
        self.chat_template = template
        self.eos_token = END
        self.ids: dict[str, int] = {END: 0}
        self.num_texts = 0

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        self.num_texts += 1
        words = re.findall(r"<\|\w+\|>|\w+|\s|[^\w\s]", text)
        return {"input_ids": [self.ids.setdefault(word, len(self.ids)) for word in words]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        words = list(self.ids)
        return "".join(words[i] for i in ids if i or not skip_special_tokens)

    def apply_chat_template(self, messages: list[Any], *, tokenize: bool, **shown: Any) -> str:
        return compiled(self.chat_template).render(messages=messages, eos=END, **shown)


class Row:
    """The row of a session, as its record returns it."""

    def __init__(self, session: Session) -> None:
        self.prompt = session.record.prompt
        self.tokens, self.branches, self.ends = session.record.row()

    @property
    def num_segments(self) -> int:
        is_continued = [start for start, _ in self.branches[:1]] != [len(self.prompt)]
        return len(self.branches) + is_continued

    def paths(self) -> list[list[int]]:
        """The positions in prompt and row of each token and of the tokens that it follows."""
        parents = dict(self.branches)
        paths: list[list[int]] = []
        for at in range(len(self.prompt) + len(self.tokens.token_ids)):
            before = parents.get(at, at - 1)
            paths.append([*(paths[before] if before >= 0 else ()), at])
        return paths


def read_by(turn: Turn) -> IntArray:
    """The tokens before an answer."""
    return turn.path[: turn.run.begin]


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def changed(thread: list[Any], kind: str, pick: int) -> list[Any]:
    """The history that an agent sends."""
    if kind == "compact" and len(thread) > 2:
        thread = [thread[0], said("more"), *thread[-1:]]
    if kind == "edit" and len(thread) > 2:
        thread[1] = {"role": "assistant", "content": "other"}
    if kind == "branch" and len(thread) > 2:
        thread = thread[: -2 if thread[-1]["role"] == "user" else -1]
    if thread[-1]["role"] != "user":
        thread.append(said(f"more {pick}"))
    return thread


def sample_of(prompt_ids: IntArray, done: Written, reward: float) -> Trajectory:
    """The row that the learner reads of a finished session."""
    problem = CodeProblem(tests=[], row="{}")
    prompt = Prompt(prompt_id="p", text="", token_ids=prompt_ids, data_source="", problem=problem)
    return trajectory(prompt, done, Score(reward=reward, parts={}, verdicts=(), latency_s=0.0))


def group_with(samples: list[Trajectory]) -> Group:
    how: Any = {"purpose": Purpose.TRAIN, "data_source": "", "generator": "g", "generation_s": 0.0}
    ids: Any = {"group_id": 1, "attempt": 1, "prompt_id": "p", "admitted_version": 0}
    return Group(**ids, **how, trajectories=samples)


async def answered(session: Session, call: Call) -> Answer:
    """The one answer to a request."""
    (number,) = session.begin([call])
    return await session.answer(call, number)


class Policy:
    """Writes the next of `texts`, each followed by the end token, and notes what it was shown."""

    def __init__(self, words: Any, texts: Iterable[str]) -> None:
        self._words = words
        self._texts = iter(texts)
        self._left: list[int] = []
        self.version = 0
        self.served: list[tuple[tuple[int, ...], Completion]] = []
        self.supports: list[Support] = []
        self.shown: list[Alternatives] = []

    def say(self, text: str) -> None:
        """Write this next."""
        self._texts = iter([text])

    async def __call__(
        self, name: str, before: IntArray, limit: int, support: Support, shown: Alternatives
    ) -> Completion:
        self.supports.append(support)
        self.shown.append(shown)
        if name.endswith(".0"):
            text = next(self._texts)
            self._left = [*self._words(text, add_special_tokens=False)["input_ids"], 0]
        ids, self._left = self._left[:limit], self._left[limit:]
        done = Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) - len(self.served),
            versions=np.full(len(ids), self.version, np.int32),
            is_truncated=bool(self._left),
        )
        self.served.append((tuple(before.tolist()), done))
        return done


def open_session(
    template: str = CHATML,
    texts: Iterable[str] = (),
    *,
    limit: int = 10_000,
    prompt: str = "add",
    tokenizer: Any = None,
    read: Reader | None = None,
) -> tuple[Session, Policy]:
    """A session of a prompt, and its policy. tokenizer: instead of words; read: as in Chat."""
    words = tokenizer or Words(template)
    policy = Policy(words, texts)
    ids = np.array(words(prompt + "\n", add_special_tokens=True)["input_ids"], np.int32)

    async def run(body: bytes) -> tuple[Any, bool]:
        return [{"verdict": "pass", "message": body.decode()}], b"raise" in body

    session = Session(
        token=f"sk-{secrets.token_hex()}",
        session_key=f"session-{secrets.token_hex()}",
        record=Record(ids),
        chat=Chat(words, read=read),
        write=policy,
        limit=limit,
        max_turns=100,
        run=run,
    )
    return session, policy


@contextlib.asynccontextmanager
async def endpoint(session: Session) -> AsyncIterator[str]:
    sessions = Sessions()
    with listen(LOOPBACK, 0) as listener, sessions.open(session):
        url = url_of(listener)
        async with serving(build_app(sessions), listener):
            yield url
