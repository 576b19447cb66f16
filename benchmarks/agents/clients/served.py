"""The endpoint of a gateway with a policy that writes what a program expects.

Everything but the policy is that of a run: sessions, record, grammars, server. An answer comes
after `ENGINE_S`, so that calls of several threads are open at the same time. An answer with a
grammar is checked by xgrammar, which would make an engine write it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import xgrammar

from async_rl.batching.support import compile_grammar
from async_rl.core.calls import Support
from async_rl.core.types import IntArray
from async_rl.protocol.generator import Completion
from async_rl.sessions.chat import Chat
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.record import Record
from async_rl.sessions.server import build_app
from async_rl.sessions.session import Session
from async_rl.wire.http import listen, serving, url_of
from benchmarks.embedded.vocabulary import build_tokenizer

ENGINE_S = 0.3
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Written:
    """Writes the texts in the order of the calls, and from the first again after the last.

    num_calls: the answers. problems: texts that the grammar of their call excludes.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.tokenizer: Any = build_tokenizer(["a b c"], 1 << 20)
        self.tokenizer.chat_template = _TEMPLATE
        self._texts = [text.replace("\\n", "\n") for text in texts]
        self.num_calls = 0
        self._left: dict[str, list[int]] = {}
        self.problems: list[str] = []

    async def __call__(
        self, name: str, before: IntArray, limit: int, support: Support, shown: Any
    ) -> Completion:
        """Continue an answer."""
        call, _, piece = name.partition(".")
        if piece == "0":
            text = self._texts[self.num_calls % len(self._texts)]
            self.num_calls += 1
            await asyncio.sleep(ENGINE_S)
            self._check(self._rest(text, before), support)
            ids = self.tokenizer(self._rest(text, before), add_special_tokens=False)["input_ids"]
            self._left[call] = [*ids, self.tokenizer.eos_token_id]
        left = self._left[call]
        ids, self._left[call] = left[:limit], left[limit:]
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=np.zeros(len(ids), np.int32),
            is_truncated=bool(self._left[call]),
        )

    def _rest(self, text: str, before: IntArray) -> str:
        """The part of the text that the context, which may start it, does not have."""
        shown = self.tokenizer.decode(before.tolist()).rpartition("assistant\n")[2]
        return text.removeprefix(shown) if shown else text

    def _check(self, text: str, support: Support) -> None:
        if not support.grammar:
            return
        compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(["</s>"], stop_token_ids=[0]))
        matcher = xgrammar.GrammarMatcher(compile_grammar(support, compiler))
        if not (matcher.accept_string(text) and matcher.accept_token(0)):
            self.problems.append(f"the grammar {support.grammar} excludes {text!r}")


@contextlib.asynccontextmanager
async def served(texts: Sequence[str]) -> AsyncIterator[tuple[str, Session, Written]]:
    """Serve a session during the block: the address, the session, the policy."""
    policy = Written(texts)

    async def run(body: bytes) -> tuple[Any, bool]:
        return [], False

    session = Session(
        token="sk-agent",
        session_key="session-owner",
        record=Record(np.array([1], np.int32)),
        chat=Chat(policy.tokenizer),
        write=policy,
        limit=1 << 20,
        max_turns=100,
        run=run,
    )
    sessions = Sessions()
    with listen("127.0.0.1", 0) as listener, sessions.open(session):
        async with serving(build_app(sessions), listener):
            yield url_of(listener), session, policy
