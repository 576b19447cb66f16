"""Configurations for tests, each composed once per process.

A composition takes 0.2 s of processor time, and hundreds of tests need one. A configuration is
frozen, so they can share it. Tests of composition itself call async_rl/composition/compose.py.
"""

import functools
import os
from collections.abc import Callable, Sequence

from async_rl.composition import compose as composition
from async_rl.config.run import RunConfig


def compose(conf: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose and check. A setting may be named twice; the last value counts, so a helper puts its
    common settings before those of a test.
    """
    return _shared(composition.compose, conf, overrides)


def compose_unchecked(conf: str, overrides: Sequence[str] = ()) -> RunConfig:
    """As `compose`, without the checks of several settings together."""
    return _shared(composition.compose_unchecked, conf, overrides)


def _shared(
    compose: Callable[[str, Sequence[str]], RunConfig], conf: str, overrides: Sequence[str]
) -> RunConfig:
    words = tuple({word.partition("=")[0]: word for word in overrides}.values())
    # A file or a module may change between two tests that name it.
    if any(set("/:") & set(word) or ".py" in word for word in (conf, *words)):
        return compose(conf, words)
    # pytest writes the name of the current test into the environment.
    variables = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return _cached(
        compose, conf, words, os.getcwd(), composition.this_machine(), frozenset(variables.items())
    )


@functools.cache
def _cached(
    compose: Callable[[str, Sequence[str]], RunConfig],
    conf: str,
    words: tuple[str, ...],
    *_: object,
) -> RunConfig:
    """`_` is what else a composition depends on: directory, machine and environment."""
    return compose(conf, words)
