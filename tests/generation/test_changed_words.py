"""Models of vLLM into which a broadcast writes the changed words only."""

from pathlib import Path

import pytest
from generation_support import run_scenario


@pytest.mark.slow
def test_a_model_that_gets_what_changed_equals_one_that_gets_all(tmp_path: Path) -> None:
    said = run_scenario("changed_words_scenario:main", tmp_path)
    assert said.pop("Qwen3 with experts") == {"is_plain": False}, "its kernels read other words"
    assert len(said) == 6
    for family, found in said.items():
        assert found["equal"], family
        assert "parameters got no weights" in found["refused"], family
