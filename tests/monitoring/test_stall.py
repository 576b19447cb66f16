"""The sentence of a run that stands still."""

from __future__ import annotations

from typing import Any

import msgspec

from async_rl.monitoring.stall import sentence
from async_rl.protocol.membership import Member


def member(
    name: str, *, state: str = "busy", waits_for: str = "", since_s: float = 40.0, **more: Any
) -> Member:
    role: Any = name.split("-")[0]
    facts = {"pid": 1, "version": -1} | more
    return Member(
        name=name,
        role=role,
        address="",
        state=state,
        waits_for=waits_for,
        since_s=since_s,
        counters={},
        **facts,
    )


def test_the_sentence_follows_the_chain_from_the_learner_to_who_is_missing() -> None:
    members = [
        member("generator-0", state="ended", since_s=70.0),
        member("buffer", state="waiting", waits_for="groups: 3 of 16 groups are ready for step 8"),
        member("learner-0", state="waiting", waits_for="a batch", version=7),
        member("verifier-0", state="serving"),
    ]
    assert (
        sentence(members, stalled_s=61, now_s=100, unheard_s={})
        == "no learner step after version 7 for 1 min 1 s: no generator serves; learner-0 waits for"
        " a batch (1 min 0 s); buffer waits for groups: 3 of 16 groups are ready for step 8 (1"
        " min 0 s); generator-0: ended (30 s)"
    )


def test_a_learner_that_works_for_ever_is_named_too() -> None:
    members = [
        member("learner-0", state="training", version=3),
        member("generator-0", since_s=95),
        member("verifier-0", state="serving"),
    ]
    told = sentence(members, stalled_s=90, now_s=100, unheard_s={})
    assert told == "no learner step after version 3 for 1 min 30 s: learner-0: training (1 min 0 s)"


def test_who_is_silent_is_told_first_and_not_what_it_last_said() -> None:
    members = [
        member("learner-0", state="training", version=3),
        member("generator-0", state="blocked", waits_for="admission: the learner is behind"),
        member("verifier-0", state="serving"),
    ]
    assert (
        sentence(members, stalled_s=9, now_s=50, unheard_s={"learner-0": 8.0})
        == "no learner step after version 3 for 9 s: learner-0 has sent no heartbeat for 8 s; "
        "generator-0 is held back by admission: the learner is behind (10 s)"
    )


def test_a_verifier_that_judges_the_same_all_the_time_is_named() -> None:
    members = [
        member("learner-0", state="waiting", waits_for="a batch", version=3),
        member("generator-0", state="waiting", waits_for="verdicts: http://x takes no request now"),
        member("verifier-0", state="judging", since_s=52),
    ]
    assert sentence(members, stalled_s=50, now_s=100, unheard_s={}).endswith(
        "generator-0 waits for verdicts: http://x takes no request now (1 min 0 s); verifier-0:"
        " judging (48 s)"
    )


def test_the_sentence_names_the_commonest_failure_before_the_waits() -> None:
    failing = msgspec.structs.replace(
        member("generator-0", state="generating", since_s=100.0),
        counters={"failures/scoring": 44.0, "failures/timeout": 2.0, "tokens_generated": 9.0},
    )
    members = [failing, member("verifier-0"), member("learner-0", waits_for="a batch", version=7)]
    assert (
        sentence(members, stalled_s=61, now_s=100, unheard_s={})
        == "no learner step after version 7 for 1 min 1 s: 46 failed, 44 of them: scoring;"
        " learner-0 waits for a batch (1 min 0 s); verifier-0: busy (1 min 0 s)"
    )
