import asyncio

import pytest
from rewards_support import results_with

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import CallTest, CodeProblem, Verdict
from async_rl.rewards.memo import VerdictMemo
from async_rl.rewards.verifier.protocol import TestResult

PROBLEM = CodeProblem(tests=[CallTest(function="f", args=[1], expected=2)])
OTHER = CodeProblem(tests=[CallTest(function="f", args=[1], expected=3)])

PASSES = results_with(Verdict.PASS)


class Counting:
    """Answers with the verdict named in the program, after yielding once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.memo = VerdictMemo(self, size=2)

    async def verify(self, problem: CodeProblem, code: str) -> list[TestResult]:
        self.asked.append(code)
        await asyncio.sleep(0)
        if code == "broken":
            raise InfrastructureError("no verifier")
        return results_with(Verdict(code))


async def test_a_known_program_is_not_judged_again_and_another_problem_is() -> None:
    verifier = Counting()
    for problem in (PROBLEM, PROBLEM, OTHER):
        assert await verifier.memo.verify(problem, "pass") == PASSES
    assert (verifier.memo.num_asked, verifier.memo.num_remembered) == (3, 1)
    assert verifier.asked == ["pass", "pass"]


async def test_verdicts_that_hinge_on_the_machine_are_not_kept() -> None:
    verifier = Counting()
    asked = ["timeout", "memory", "output_limit", "infrastructure_error"] * 2
    for verdict in asked:
        await verifier.memo.verify(PROBLEM, verdict)
    assert verifier.asked == asked


async def test_samples_that_ask_together_share_one_judgement_even_if_the_first_leaves() -> None:
    verifier = Counting()
    first = asyncio.create_task(verifier.memo.verify(PROBLEM, "pass"))
    second = asyncio.create_task(verifier.memo.verify(PROBLEM, "pass"))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second, len(verifier.asked)) == (PASSES, 1)


async def test_a_failed_judgement_reaches_everyone_and_is_tried_again() -> None:
    verifier = Counting()
    together = await asyncio.gather(
        *(verifier.memo.verify(PROBLEM, "broken") for _ in range(2)), return_exceptions=True
    )
    assert [type(error) for error in together] == [InfrastructureError] * 2
    with pytest.raises(InfrastructureError):
        await verifier.memo.verify(PROBLEM, "broken")
    assert len(verifier.asked) == 2
