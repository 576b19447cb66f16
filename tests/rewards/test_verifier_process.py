from __future__ import annotations

import asyncio
import resource

import psutil
import pytest
from composing import compose_unchecked
from rewards_support import LIMITS, calls, verdicts_of
from verifier_support import TOKEN, context_of, no_functions, run_config

from async_rl.config.base import replace
from async_rl.core.errors import ConfigError
from async_rl.core.types import CodeProblem, StdinTest, Verdict
from async_rl.processes import verifier
from async_rl.rewards.verifier.client import VerifierClient
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.rewards.verifier.service import VerifierService
from async_rl.rewards.verifier.serving import open_service
from async_rl.sandbox.cells import Cells

PROBLEM = CodeProblem(tests=calls(0))


async def test_process_serves_then_drains_and_leaves_no_cell() -> None:
    before = set(psutil.Process().children(recursive=True))
    config = run_config()
    context, registered = context_of(config)
    process = asyncio.create_task(verifier.run(context))
    client = VerifierClient(config, TOKEN)
    client.update_servers([await registered])
    assert verdicts_of(await client.verify(PROBLEM, "def f(x): return x")) == [Verdict.PASS]
    slow = "import time\ntime.sleep(0.5)\ndef f(x): return x"
    last = asyncio.create_task(client.verify(PROBLEM, slow))
    while context.activity.snapshot().state != "judging":  # noqa: ASYNC110  the other side is a socket away
        await asyncio.sleep(0.01)
    context.stopping.set()
    assert verdicts_of(await last) == [Verdict.PASS]
    await asyncio.wait_for(process, 10)
    await client.close()
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_a_service_raises_the_limit_of_descriptors_that_its_jobs_need() -> None:
    """A shell allows 1,024, and each job of 64 streams has 130."""
    request = VerifyRequest(code="print(1)", tests=[StdinTest(input="1", output="1")] * 64)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        async with open_service(compose_unchecked("ppo_code", ["verifiers.cells=1"])) as service:
            assert (await service.verify(request)).verdict is Verdict.PASS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("num_spare", [0, 1])
async def test_programs_that_use_up_their_limit_hold_up_others_only_without_a_spare_place(
    num_spare: int,
) -> None:
    sleeps = "import time\ndef f(x): time.sleep(60)"
    sleeper = VerifyRequest(code=sleeps, tests=calls(0), timeout_s=2)
    quick = VerifyRequest(code="def f(x): return x", tests=calls(0))
    async with await Cells.start(1 + num_spare) as cells:
        service = VerifierService(
            cells=cells, judge=Judge(cells, LIMITS), functions=no_functions(), queue_size=8,
            num_cells=1, queue_timeout_s=30, num_spare=num_spare,
        )  # fmt: skip
        slow = asyncio.create_task(service.verify(sleeper))
        await asyncio.sleep(0)
        assert (await service.verify(quick)).verdict == "pass"
        assert slow.done() is not bool(num_spare)
        assert (await slow).verdict == "timeout"
        # The place of the slow one is free again.
        assert (await service.verify(quick)).verdict == "pass"


ARRAYS = "import numpy as np\ndef f(x): return (np.array(x) + 0).item()\n"


async def found_with(packages: list[str], *programs: str) -> list[tuple[str, bool]]:
    """Each program's verdict, and whether a cell with packages has started by then. Verdicts of
    such programs are in programs.yaml.
    """
    config = compose_unchecked("ppo_code", ["verifiers.cells=1"])
    found = []
    async with open_service(replace(config, sandbox=replace(LIMITS, packages=packages))) as service:
        for code in programs:
            request = VerifyRequest(code=code, tests=calls(0), timeout_s=2)
            verdict = (await service.verify(request)).verdict
            found.append((str(verdict), bool(service.judge.packaged.alive)))
    return found


async def test_cells_with_packages_start_with_the_first_program_that_names_one() -> None:
    plain = "def f(x): return x  # numbers"
    assert await found_with(["numpy"], plain, ARRAYS) == [("pass", False), ("pass", True)]
    assert await found_with([], ARRAYS) == [("runtime_error", False)]


async def test_package_that_is_not_installed_is_refused_at_the_start() -> None:
    said = r"'no_such_package' \(sandbox\.packages\) is not installed"
    with pytest.raises(ConfigError, match=said):
        await found_with(["numpy", "no_such_package"])
