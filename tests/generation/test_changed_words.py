"""Models of vLLM into which a broadcast writes the changed words only."""

from __future__ import annotations

from typing import Any

import pytest
from generation_support import run_scenario

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("changed")
    return run_scenario("changed_words_scenario.py", folder / "models", out=folder / "said.json")


def test_a_model_that_gets_what_changed_equals_one_that_gets_all(said: dict[str, Any]) -> None:
    assert said.pop("Qwen3 with experts") == {"is_plain": False}, "its kernels read other words"
    assert len(said) == 6
    for family, found in said.items():
        assert found["equal"], family
        assert "parameters got no weights" in found["refused"], family
