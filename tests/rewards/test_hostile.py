from __future__ import annotations

import pytest
from hostile_programs import CASES, HONEST, Case
from rewards_support import Jail

from async_rl.rewards.protocol import VerifyRequest
from async_rl.sandbox.pool import LANDLOCK
from async_rl.types import CallTest, StdinTest, Verdict


def _request(case: Case) -> VerifyRequest:
    test = StdinTest(input="3\n", output="9") if case.is_stdin else CallTest(function="f", args=[3], expected=9)
    return VerifyRequest(code=case.code, tests=[test])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.name}")
def test_hostile_program_gets_its_right_verdict(jail: Jail, case: Case) -> None:
    response = jail.verify(_request(case))

    assert response.verdict in case.right, response
    # The cell is unharmed: an honest program passes in it, and nothing the hostile one wrote is left.
    after = jail.verify(
        VerifyRequest(code="import os\ndef f(x):\n    return os.listdir('.') or 9", tests=[CallTest(function="f", args=[3], expected=9)])
    )
    if jail.pool.level != LANDLOCK:
        assert after.verdict is Verdict.PASS, after
    assert jail.pool.num_replaced == 0


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_honest_program_passes(jail: Jail, case: Case) -> None:
    if case.name == "scratch file" and jail.pool.level == LANDLOCK:
        pytest.skip("without namespaces there is no scratch to write to")
    response = jail.verify(_request(case))

    assert response.verdict is Verdict.PASS, response


def test_corpus_has_teeth_against_a_naive_checker() -> None:
    """exec plus == in one process accepts the liars that do not need to run for long or leave the process."""
    fooled = 0
    for case in CASES:
        if case.family != "lying" or "patched" in case.name:
            continue
        namespace: dict[str, object] = {}
        exec(case.code, namespace)
        try:
            fooled += bool(namespace["f"](3) == 9)  # type: ignore[operator]
        except ValueError:
            continue

    assert fooled >= 8
