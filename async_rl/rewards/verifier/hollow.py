"""Programs that do nothing, run on the tests of a row: a test that they pass teaches a policy
nothing, and a test that breaks for them would break for every program.
"""

import keyword

from async_rl.core.assert_tests import names_asked
from async_rl.core.types import AnswerTest, CodeProblem, Verdict
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import VerifyRequest


async def problem_with_tests(judge: Judge, problem: CodeProblem) -> str:
    """The reason why the tests of a row are useless; empty if they are not, or judge words.

    Raises InfrastructureError.
    """
    if not problem.tests or any(isinstance(test, AnswerTest) for test in problem.tests):
        return ""
    usable = sorted(
        name for name in names_asked(problem) if name.isidentifier() and not keyword.iskeyword(name)
    )
    request = VerifyRequest(
        # Prints nothing and defines every function that the tests call; they return None.
        code="".join(f"def {name}(*args, **keywords): pass\n" for name in usable),
        tests=problem.tests,
        setup=problem.setup,
        stop_at_first_failure=False,
    )
    response = await judge.verify(request)
    broken = [test for test in response.tests if test.verdict is Verdict.TEST_ERROR]
    if broken:
        return broken[0].message
    if response.verdict is Verdict.PASS:
        return "a program that prints nothing and returns None passes every test"
    return ""
