from __future__ import annotations

import asyncio
import resource

import psutil
from composing import compose_unchecked
from rewards_support import LIMITS, verdicts_of
from verifier_support import TOKEN, context_of, run_config

from async_rl.core.types import CallTest, CodeProblem, StdinTest, Verdict
from async_rl.processes import verifier
from async_rl.rewards.verifier.client import VerifierClient
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.rewards.verifier.serving import open_service

PROBLEM = CodeProblem(tests=[CallTest(function="f", args=[3], expected=9)])
PASSES = [Verdict.PASS]
SLOW = "import time\ndef f(x):\n    time.sleep(0.5)\n    return x * x"


async def test_process_serves_then_drains_and_leaves_no_cell() -> None:
    assert LIMITS.timeout_s == 0.5
    before = set(psutil.Process().children(recursive=True))
    config = run_config()
    context, registered = context_of(config)
    process = asyncio.create_task(verifier.run(context))
    url = await registered
    client = VerifierClient(config, TOKEN)
    client.update_servers([url])
    assert verdicts_of(await client.verify(PROBLEM, SLOW.replace("0.5", "0"))) == PASSES
    last = asyncio.create_task(client.verify(PROBLEM, SLOW))
    while context.activity.snapshot().state != "judging":  # noqa: ASYNC110  the other side is a socket away
        await asyncio.sleep(0.01)
    context.stopping.set()
    assert verdicts_of(await last) == PASSES
    await asyncio.wait_for(process, 10)
    await client.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_service_raises_the_limit_of_descriptors_that_its_jobs_need() -> None:
    """A shell allows 1,024, and each job of 64 streams has 130."""
    tests = [StdinTest(input="1", output="1")] * 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))

    async def run() -> Verdict:
        async with open_service(compose_unchecked("ppo_code", ["verifiers.cells=1"])) as service:
            return (await service.verify(VerifyRequest(code="print(1)", tests=tests))).verdict

    try:
        assert asyncio.run(run()) is Verdict.PASS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
