"""A failure around the policy is never a score: neither a kill from outside nor a verdict of the
verifier that says that it could not judge.
"""

import asyncio
import signal

import pytest
from composing import compose
from rewards_support import LIMITS, Judging, calls, no_sample, not_asked, prompt_of, score_steps

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import CallTest, StdinTest, Verdict
from async_rl.rewards.scoring import Scorer
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.sandbox.cell import Outcome, Work
from async_rl.sandbox.protocol import Ending, Reply

MIB = 1 << 20
LOADED = b"-1 l 0\n"


class KilledCells:
    """Cells whose child always ends by SIGKILL, after it loaded the program."""

    level = 1
    reasons = ()
    num_replaced = 0

    def __init__(self, *, peak_mb: int, cpu_s: float) -> None:
        self._reply = Reply(
            Ending.SIGNALED, signal.SIGKILL, cpu_s=cpu_s, wall_s=0.1, peak_bytes=peak_mb * MIB
        )
        self.num_runs = 0

    async def run(self, work: Work) -> Outcome:
        self.num_runs += 1
        return Outcome(self._reply, [LOADED, b""])


def judged(cells: KilledCells, test: CallTest | StdinTest) -> Verdict:
    judge = Judge(cells, LIMITS)  # type: ignore[arg-type]
    return asyncio.run(judge.verify(VerifyRequest(code="", tests=[test]))).verdict


@pytest.mark.parametrize(
    "test", [CallTest(function="f", args=[], expected=1), StdinTest(input="", output="")]
)
def test_a_program_that_was_killed_from_outside_has_no_verdict(test: CallTest | StdinTest) -> None:
    # The kernel kills when the machine is out of memory, whatever the program itself uses.
    cells = KilledCells(peak_mb=20, cpu_s=0.1)
    with pytest.raises(InfrastructureError, match="killed from outside"):
        judged(cells, test)
    assert cells.num_runs == 2, "it is tried once more first"


def test_a_program_that_was_killed_at_its_own_limit_has_failed() -> None:
    call = CallTest(function="f", args=[], expected=1)
    assert judged(KilledCells(peak_mb=LIMITS.memory_mb, cpu_s=0.1), call) is Verdict.MEMORY
    assert judged(KilledCells(peak_mb=20, cpu_s=LIMITS.timeout_s), call) is Verdict.TIMEOUT


@pytest.mark.parametrize("found", [[], [Verdict.PASS]])
def test_a_response_that_could_not_be_judged_gets_no_score(found: list[Verdict]) -> None:
    found = [*found, Verdict.INFRASTRUCTURE_ERROR]
    scorer = Scorer(compose("grpo_code"), Judging(lambda number, *_: found[number]), not_asked)
    prompt = prompt_of(*calls(*found))
    with pytest.raises(InfrastructureError, match="prompt p7"):
        asyncio.run(scorer.score(prompt, "def f(x): pass", no_sample))
    with pytest.RaisesGroup(pytest.RaisesExc(InfrastructureError, match="prompt p7")):
        score_steps(scorer, prompt, "```python\ndef f(x):\n    return x + 1\n```")
