"""What an answer may draw from: the support that a call asks for, or that of the run."""

from __future__ import annotations

import asyncio

from sessions_support import answered, open_session

from async_rl.core.support import Support
from async_rl.sessions.calls import Call
from async_rl.sessions.session import PIECE_TOKENS, Session

LONG = "a b c " * 30


def supports(session: Session, policy: object, **call: object) -> list[Support]:
    context = session.record.match_ids(session.record.context(None, [1, 2]).token_ids)
    call.setdefault("support", session.supported())
    asyncio.run(answered(session, Call(context=context, **call)))  # type: ignore[arg-type]
    return policy.supports  # type: ignore[attr-defined,no-any-return]


def test_a_call_without_a_support_has_that_of_the_run() -> None:
    session, policy = open_session(texts=["a"])
    session.support = Support(top_k=5, min_tokens=1)
    assert supports(session, policy) == [Support(top_k=5, min_tokens=1)]


def test_the_run_decides_top_k_and_top_p_of_a_call_with_a_support() -> None:
    session, policy = open_session(texts=["a"])
    session.support = Support(top_k=5, top_p=0.9, min_tokens=7)
    asked = session.supported(grammar="x", logit_bias={3: 1.0}, min_tokens=9)
    assert supports(session, policy, support=asked) == [
        Support(top_k=5, top_p=0.9, grammar="x", logit_bias={3: 1.0}, min_tokens=9)
    ]


def test_a_length_counts_over_the_pieces_of_an_answer() -> None:
    session, policy = open_session(texts=[LONG])
    session.support = Support(min_tokens=PIECE_TOKENS + 3)
    found = [support.min_tokens for support in supports(session, policy, stops=("never",))]
    assert found[:3] == [PIECE_TOKENS + 3, 3, 0]


def test_an_answer_with_a_grammar_is_one_request() -> None:
    session, policy = open_session(texts=[LONG])
    asked = Support(grammar="x")
    assert supports(session, policy, stops=("never",), support=asked) == [asked]
