"""The sentence of a run that stands still."""

from __future__ import annotations

from typing import Any

import pytest
from members import member
from tables import table

from async_rl.supervision.liveness import sentence


@pytest.mark.parametrize("case", table(__file__, "chains"))
def test_the_sentence_follows_the_chain_from_the_learner_to_the_cause(case: dict[str, Any]) -> None:
    members = [member(name, **{"since_s": 40.0} | facts) for name, facts in case["members"].items()]
    told = sentence(members, stalled_s=61, now_s=100, unheard_s=case.get("unheard_s", {}))
    assert told == f"no learner step after version 7 for 1 min 1 s: {case['told']}"
