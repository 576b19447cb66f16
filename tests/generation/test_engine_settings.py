"""The argument of vLLM that each setting of generation.vllm changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from generation_support import make_model, run_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = yaml.safe_load(Path(__file__).with_name("engine_settings.yaml").read_text())


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The arguments by default, then those under each setting."""
    model = tmp_path_factory.mktemp("settings") / "model"
    make_model(model, is_tied=True)
    overrides = [["hardware=cpu"], *(["hardware=cpu", setting] for setting, _, _ in SETTINGS)]
    encoded = json.dumps(overrides)
    return run_scenario("engine_settings.py", model, encoded, out=model.with_name("said.json"))


@pytest.mark.proves("generation.vllm.extra")
@pytest.mark.covers("load_format and the other engine settings")
@pytest.mark.parametrize("index", range(len(SETTINGS)), ids=[setting for setting, *_ in SETTINGS])
def test_a_setting_reaches_vllm(given: list[dict[str, Any]], index: int) -> None:
    _, before, after = SETTINGS[index]
    assert {name: given[0][name] for name in before} == before
    assert {name: given[1 + index][name] for name in after} == after
