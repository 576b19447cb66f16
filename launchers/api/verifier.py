"""A private verifier for Python code: the jail, in a thread of this process, which lives as long as
a `with` block.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import msgspec

from async_rl.composition.compose import verifier_config
from async_rl.core.closing import LoopThread
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.core.types import AssertTest, CodeTest, Verdict
from async_rl.launchers.api.run import Overrides
from async_rl.rewards.verifier.protocol import VerifyRequest, VerifyResponse

Test = str | Mapping[str, Any] | CodeTest
"""One test: `assert` statements as text, a JSON object as in docs/data.md, or a CodeTest."""


class Verifier:
    """A jail that judges programs: `with Verifier() as verifier: verifier.check(...)`.

    Its processes exit with the block, and also if this process is killed. Several threads may use
    it.

    Args:
        settings: Settings of `sandbox`, `verifiers` and `reward` that differ from conf/, as for
            `launch`.

    Raises:
        ConfigError: A setting is wrong, or no jail works on this machine.
    """

    def __init__(self, settings: Overrides = ()) -> None:
        from async_rl.composition.overrides import as_words

        self._config = verifier_config(as_words(settings))
        self._verify: Callable[[VerifyRequest], VerifyResponse] | None = None
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        # Imports the server of verifiers, which `import async_rl` need not wait for.
        from async_rl.rewards.verifier.service import open_service

        with ExitStack() as resources:
            # In a thread, because the cells of a notebook already run inside an event loop. The
            # kernel ends the processes of the jail with the thread that started them.
            thread = LoopThread("verifier")
            resources.callback(thread.close)
            opened = open_service(self._config)
            service = thread.run(opened.__aenter__())
            resources.callback(lambda: thread.run(opened.__aexit__(None, None, None)))
            self._verify = lambda request: thread.run(service.verify(request))
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._verify = None
        self._resources.close()

    def check(self, code: str, tests: Test | Sequence[Test], *, setup: str = "") -> VerifyResponse:
        """Run a program against tests and return its verdict, with one result per test that ran.

        Args:
            code: The program, Python source.
            tests: One test or several: `assert` statements as text, a JSON object as in
                docs/data.md, or a value of `async_rl.core.types`.
            setup: Code for the tests, for example their imports.

        Raises:
            ConfigError: A test is malformed, or the `with` block was left.
            InfrastructureError: No verdict was possible.
        """
        if self._verify is None:
            raise ConfigError("this verifier is not running; use it in its with block")
        given = [tests] if isinstance(tests, str | Mapping | CodeTest) else tests
        request = VerifyRequest(code=code, tests=[_as_test(test) for test in given], setup=setup)
        response = self._verify(request)
        if response.verdict is Verdict.INFRASTRUCTURE_ERROR:
            raise InfrastructureError(response.failure or response.tests[0].message)
        return response


def _as_test(test: Test) -> CodeTest:
    if isinstance(test, str):
        return AssertTest(code=test)
    try:
        converted: CodeTest = msgspec.convert(test, CodeTest)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{test}: is not a valid test ({error}); docs/data.md lists the kinds"
        ) from error
    return converted
