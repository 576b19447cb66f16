"""Facts about programs that import packages: which cells they get, and that the others do not pay
for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from composing import compose_unchecked
from rewards_support import LIMITS
from tables import table

from async_rl.config.base import replace
from async_rl.core.errors import ConfigError
from async_rl.core.types import AssertTest, CallTest, CodeTest
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.rewards.verifier.service import VerifierService
from async_rl.rewards.verifier.serving import open_service

T = TypeVar("T")
CONFIG = compose_unchecked("ppo_code", ["verifiers.cells=1"])
ARRAYS = "import numpy as np\ndef f(x):\n    return (np.array(x) * 2).tolist()\n"
CALL: list[CodeTest] = [CallTest(function="f", args=[[1, 2]], expected=[2, 4])]


def with_service(
    packages: list[str], work: Callable[[VerifierService], Coroutine[Any, Any, T]]
) -> T:
    async def run() -> T:
        sandbox = replace(LIMITS, packages=packages)
        async with open_service(replace(CONFIG, sandbox=sandbox)) as service:
            return await work(service)

    return asyncio.run(run())


def verdict_of(packages: list[str], code: str, tests: list[CodeTest], setup: str = "") -> str:
    async def work(service: VerifierService) -> str:
        return str(
            (
                await service.verify(
                    VerifyRequest(code=code, tests=tests, setup=setup, timeout_s=2)
                )
            ).verdict
        )

    return with_service(packages, work)


def test_program_that_imports_a_package_gets_a_cell_with_it_only_if_it_is_configured() -> None:
    assert verdict_of(["numpy"], ARRAYS, CALL) == "pass"
    assert verdict_of([], ARRAYS, CALL) == "runtime_error"


def test_test_that_imports_a_package_gets_a_cell_with_it_too() -> None:
    test: list[CodeTest] = [
        AssertTest(code="assert list(np.array(f([1, 2]))) == [1, 2] and helper(f([1])) == 1")
    ]
    setup = "import numpy as np\ndef helper(x): return int(np.sum(x))"
    assert verdict_of(["numpy"], "def f(x): return x", test, setup) == "pass"


def test_scalars_and_arrays_that_a_program_returns_are_compared_as_python_compares_them() -> None:
    code = (
        "import numpy as np\ndef total(x): return np.sum(x)\ndef mean(x): return np.mean(x)\ndef"
        " is_large(x): return np.sum(x) > 2\ndef twice(x): return np.array(x) * 2"
    )
    tests: list[CodeTest] = [
        AssertTest(code=c)
        for c in (
            "assert total([1, 2]) == 3",
            "assert mean([1, 2]) == 1.5",
            "assert is_large([1, 2])",
            "assert list(twice([1, 2])) == [2, 4]",
        )
    ]
    assert verdict_of(["numpy"], code, tests) == "pass"


@pytest.mark.parametrize(
    ("function", "expected", "exact"), table(__file__, "numpy_scalars_are_plain_values")
)
def test_numpy_scalars_are_plain_values_for_json_and_another_type_otherwise(
    function: str, expected: object, exact: bool
) -> None:
    code = (
        "import numpy as np\ndef total(): return np.int64(3)\ndef mean(): return"
        f" np.float64({expected if function == 'mean' else 0})\ndef parts(): return [np.int32(1),"
        " [np.uint8(2)]]\ndef counts(): return {'a': np.int64(2)}\ndef plain(): return"
        " np.int64(3).item()"
    )
    for types, passes in (("json", True), ("exact", exact)):
        test: list[CodeTest] = [
            msgspec.convert(
                {"kind": "call", "function": function, "args": [], "expected": expected}
                | {"types": types},
                CodeTest,
            )
        ]
        assert (verdict_of(["numpy"], code, test) == "pass") is passes, types


def test_cells_with_packages_start_with_the_first_program_that_names_one() -> None:
    async def work(service: VerifierService) -> list[bool]:
        packaged = service.judge.packaged
        assert packaged is not None
        plain = VerifyRequest(code="def f(x): return [2, 4]  # numbers", tests=CALL)
        assert (await service.verify(plain)).verdict == "pass"
        before = bool(packaged.alive)
        assert (
            await service.verify(VerifyRequest(code=ARRAYS, tests=CALL, timeout_s=2))
        ).verdict == "pass"
        return [before, bool(packaged.alive)]

    assert with_service(["numpy"], work) == [False, True]


def test_package_that_is_not_installed_is_refused_at_the_start() -> None:
    with pytest.raises(
        ConfigError, match=r"'no_such_package' \(sandbox\.packages\) is not installed"
    ):
        verdict_of(["numpy", "no_such_package"], ARRAYS, CALL)
