"""`async-rl scale` reads its words, or names the wrong one."""

from __future__ import annotations

import pytest

from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.live import counts


def test_each_word_is_a_pool_with_a_number() -> None:
    assert counts(["generators.big=3", "small=0"]) == {"generators.big": 3, "small": 0}
    for words, reason in (
        (["generators"], "generators: is not of the form"),
        (["generators=-1"], "generators=-1: is not of the form"),
    ):
        with pytest.raises(ConfigError, match=reason):
            counts(words)
