"""The sentence of a run that stands still."""

from __future__ import annotations

import pytest
from members import member

from async_rl.protocol.membership import Member
from async_rl.supervision.liveness import sentence

WAITS = member("learner-0", waits_for="a batch", since_s=40.0, version=7)
TRAINS = member("learner-0", state="training", since_s=40.0, version=7)
SERVES = member("verifier-0", state="serving", since_s=40.0)
HELD = member("generator-0", state="blocked", waits_for="admission: it is behind", since_s=40.0)
FAILS = member("generator-0", {"failures/scoring": 44.0, "failures/timeout": 2.0}, since_s=100.0)


@pytest.mark.parametrize(
    ("members", "unheard_s", "expected"),
    [
        (
            [
                member("generator-0", state="ended", since_s=70.0),
                member("buffer", waits_for="groups: 3 of 16 are ready", since_s=40.0),
                WAITS,
                SERVES,
            ],
            {},
            "no generator serves; learner-0 waits for a batch (1 min 0 s); buffer waits for groups:"
            " 3 of 16 are ready (1 min 0 s); generator-0: ended (30 s)",
        ),
        (
            [TRAINS, member("generator-0", since_s=95.0), SERVES],
            {},
            "learner-0: training (1 min 0 s)",
        ),
        # What a silent process said last is outdated.
        (
            [TRAINS, HELD, SERVES],
            {"learner-0": 8.0},
            "learner-0 has sent no heartbeat for 8 s; generator-0 is held back by admission: it is"
            " behind (1 min 0 s)",
        ),
        # Judging since more than half of the stall.
        (
            [WAITS, member("generator-0", since_s=95.0), member("verifier-0", since_s=52.0)],
            {},
            "learner-0 waits for a batch (1 min 0 s); verifier-0: working (48 s)",
        ),
        (
            [FAILS, SERVES, WAITS],
            {},
            "46 failed, 44 of them: scoring; learner-0 waits for a batch (1 min 0 s)",
        ),
    ],
)
def test_the_sentence_follows_the_chain_from_the_learner_to_the_cause(
    members: list[Member], unheard_s: dict[str, float], expected: str
) -> None:
    told = sentence(members, stalled_s=61, now_s=100, unheard_s=unheard_s)
    assert told == f"no learner step after version 7 for 1 min 1 s: {expected}"
