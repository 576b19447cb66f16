"""Facts about programs that import packages: which cells they get, and that the others do not pay
for it. Verdicts of such programs are in programs.yaml.
"""

from __future__ import annotations

import asyncio

import pytest
from composing import compose_unchecked
from rewards_support import LIMITS

from async_rl.config.base import replace
from async_rl.core.errors import ConfigError
from async_rl.core.types import CallTest
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.rewards.verifier.serving import open_service

CONFIG = compose_unchecked("ppo_code", ["verifiers.cells=1"])
ARRAYS = "import numpy as np\ndef f(x): return (np.array(x) * 2).tolist()\n"


def found_with(packages: list[str], *programs: str) -> list[tuple[str, bool]]:
    """Each program's verdict, and whether a cell with packages has started by then."""

    async def run() -> list[tuple[str, bool]]:
        config = replace(CONFIG, sandbox=replace(LIMITS, packages=packages))
        test = CallTest(function="f", args=[[1, 2]], expected=[2, 4])
        async with open_service(config) as service:
            found = []
            for code in programs:
                response = await service.verify(VerifyRequest(code=code, tests=[test], timeout_s=2))
                found.append((str(response.verdict), bool(service.judge.packaged.alive)))
            return found

    return asyncio.run(run())


def test_cells_with_packages_start_with_the_first_program_that_names_one() -> None:
    plain = "def f(x): return [2, 4]  # numbers"
    assert found_with(["numpy"], plain, ARRAYS) == [("pass", False), ("pass", True)]
    assert found_with([], ARRAYS) == [("runtime_error", False)]


def test_package_that_is_not_installed_is_refused_at_the_start() -> None:
    said = r"'no_such_package' \(sandbox\.packages\) is not installed"
    with pytest.raises(ConfigError, match=said):
        found_with(["numpy", "no_such_package"])
