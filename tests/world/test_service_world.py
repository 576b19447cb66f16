"""Clients of a training service get the same answers and weights whatever is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from service import differences


@pytest.mark.parametrize("seed", range(12))
def test_kills_change_neither_the_answers_nor_the_weights(seed: int, tmp_path: Path) -> None:
    assert differences(seed, tmp_path) == []
