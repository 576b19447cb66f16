"""The public attack suite against this verifier, in each form that it speaks."""

from __future__ import annotations

import asyncio

import pytest
from verifier_support import TOKEN, verifier

from async_rl.rewards.verifier.attacks import FORMS, Outcome, attacks, run


@pytest.mark.parametrize("form", FORMS)
def test_no_attack_of_the_public_suite_is_forged_or_crashes_the_verifier(form: str) -> None:
    async def trials() -> None:
        async with verifier() as (url, _):
            found = await asyncio.to_thread(lambda: list(run(url, form, TOKEN)))
        missed = [trial for trial in found if trial.outcome is not Outcome.HELD]
        assert missed == []
        assert any(trial.attack.family == "honest" for trial in found)

    asyncio.run(trials())


def test_suite_counts_a_grader_that_passes_everything_as_forged() -> None:
    families = {attack.family for attack in attacks()}
    assert len(families) >= 8
    assert len({(attack.family, attack.name) for attack in attacks()}) == len(attacks())
