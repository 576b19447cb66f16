"""Programs that would have two guesses, and helpers of a prompt. Other forgeries: programs.yaml."""

from __future__ import annotations

import pytest
from rewards_support import Jail

from async_rl.core.types import StdinTest
from async_rl.data.problems import read_problem
from async_rl.rewards.verifier.protocol import VerifyRequest

HUMAN_EVAL = {
    "prompt": "def poly(xs, x):\n    return xs[0] + xs[1] * x\ndef root(xs):\n    ...\n",
    "test": "def check(candidate):\n    assert abs(poly([4, 2], candidate([4, 2]))) < 1e-4\n",
    "entry_point": "root",
}


def test_helper_of_a_prompt_is_asked_of_the_prompt_and_not_of_the_program(jail: Jail) -> None:
    problem, _ = read_problem(HUMAN_EVAL)
    for code, verdict in (
        (HUMAN_EVAL["prompt"] + "    return -xs[0] / xs[1]", "pass"),
        ("def root(xs): return -xs[0] / xs[1]", "pass"),
        ("def poly(xs, x): return 0\ndef root(xs): return 7", "wrong_answer"),
    ):
        request = VerifyRequest(code=code, tests=problem.tests, setup=problem.setup)
        assert jail.verify(request).verdict == verdict, code


RANDOM = """
import os, builtins
n = getattr(builtins, 'n', 0)
builtins.n = n + 1
input()
print('no' if n {when} else 'yes')
"""


@pytest.mark.parametrize("when", ["> 0", "== 0 and {random}"])
def test_answer_of_a_stream_is_compared_once(jail: Jail, when: str) -> None:
    """A program that answers otherwise in a fresh process would have two guesses per test."""
    code = RANDOM.format(when=when.format(random="os.urandom(1)[0] < 256"))
    tests = [StdinTest(input=f"{i}\n", output="yes") for i in range(4)]
    response = jail.verify(VerifyRequest(code=code, tests=list(tests), stop_at_first_failure=False))
    shown = [str(test.verdict) for test in response.tests]
    assert shown.count("wrong_answer") >= 1, response
    if when == "> 0":
        assert shown == ["pass", *["wrong_answer"] * 3]
