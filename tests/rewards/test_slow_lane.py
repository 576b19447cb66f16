"""Programs that use up their limit do not hold up the others."""

from __future__ import annotations

import asyncio

from rewards_support import LIMITS
from verifier_support import no_functions

from async_rl.core.types import CallTest
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.rewards.verifier.service import VerifierService
from async_rl.sandbox.cells import Cells


def test_slow_programs_do_not_hold_up_quick_ones() -> None:
    sleeper = VerifyRequest(
        code="import time\ndef f(x): time.sleep(60)",
        tests=[CallTest(function="f", args=[3], expected=9)],
        timeout_s=4,
    )
    quick = VerifyRequest(
        code="def f(x): return x * x", tests=[CallTest(function="f", args=[3], expected=9)]
    )

    async def run(num_spare: int) -> tuple[str, str, bool]:
        async with await Cells.start(1 + num_spare) as cells:
            service = VerifierService(
                cells=cells,
                judge=Judge(cells, LIMITS),
                functions=no_functions(),
                queue_size=8,
                num_cells=1,
                queue_timeout_s=30,
                num_spare=num_spare,
            )
            slow = asyncio.create_task(service.verify(sleeper))
            await asyncio.sleep(0)
            first = await service.verify(quick)
            was_slow_running = not slow.done()
            second = await slow
            # The place of the slow one is free again.
            assert (await service.verify(quick)).verdict == "pass"
            return first.verdict, second.verdict, was_slow_running

    assert asyncio.run(run(1)) == ("pass", "timeout", True)
    assert asyncio.run(run(0)) == ("pass", "timeout", False)
