"""A private verifier for Python code: a local server process with the jail, which lives as long as
a `with` block.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any, Self, TypeVar

import msgspec

from async_rl.composition.compose import verifier_config
from async_rl.core.errors import ConfigError
from async_rl.core.loop_thread import LoopThread
from async_rl.core.types import AssertTest, CodeTest
from async_rl.launchers.api.run import Overrides
from async_rl.rewards.verifier.client import VerifierClient
from async_rl.rewards.verifier.protocol import VerifyResponse

T = TypeVar("T")
_TOKEN_BYTES = 24
_END_S = 30.0

Test = str | Mapping[str, Any] | CodeTest
"""One test: `assert` statements as text, a JSON object as in docs/data.md, or a CodeTest."""


class Verifier:
    """A server that judges programs in a jail: `with Verifier() as verifier: verifier.check(...)`.

    The server exits with the block, and also if this process is killed. Several threads may use it.

    Args:
        settings: Settings of `sandbox`, `verifiers` and `reward` that differ from conf/, as for
            `launch`.

    Raises:
        ConfigError: A setting is wrong, or no jail works on this machine.
    """

    def __init__(self, settings: Overrides = ()) -> None:
        from async_rl.composition.overrides import as_words

        self._words = as_words(settings)
        self._token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._client = VerifierClient(verifier_config(self._words), self._token)
        self._thread: LoopThread | None = None
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            errors = resources.enter_context(tempfile.TemporaryFile())
            url = self._start_server(errors, resources)
            # In a thread, because the cells of a notebook already run inside an event loop.
            self._thread = LoopThread("verifier")
            resources.callback(self._thread.close)
            resources.callback(lambda: self._result(self._client.close()))
            self._client.update_servers([url])
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()
        self._thread = None

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
        given = [tests] if isinstance(tests, str | Mapping | CodeTest) else tests
        converted = [_as_test(test) for test in given]
        return self._result(self._client.check(code, converted, setup))

    def _start_server(self, errors: IO[bytes], resources: ExitStack) -> str:
        """Start the server, which exits when its standard input is closed; return its URL."""
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "async_rl.launchers.cli", "verifier"),
                *("--end-with-input", *self._words),
            ],
            # It exits with this process, however that ends: the pipe closes.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "ASYNC_RL_TOKEN": self._token},
            start_new_session=True,
            text=True,
        )
        resources.callback(_end, process)
        assert process.stdout is not None, "stdout is a pipe"
        # `verifier at URL (...)`, the first line of the command.
        words = process.stdout.readline().split()
        if len(words) < 3:
            process.wait()
            errors.seek(0)
            raise ConfigError(f"the verifier did not start: {errors.read().decode().strip()}")
        return words[2]

    def _result(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            coroutine.close()
            raise ConfigError("this verifier is not running; use it in its with block")
        return self._thread.run(coroutine)


def _end(process: subprocess.Popen[str]) -> None:
    """Close the server's input and wait until it has answered all accepted requests."""
    try:
        process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


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
