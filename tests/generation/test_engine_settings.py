"""The argument of vLLM that each setting of generation.vllm changes."""

from pathlib import Path

import pytest
import yaml
from generation_support import make_model, run_scenario


@pytest.mark.slow
@pytest.mark.proves("generation.vllm.extra")
@pytest.mark.covers("load_format and the other engine settings")
def test_each_setting_reaches_vllm(tmp_path: Path) -> None:
    """A device is shared: vLLM sleeps, and its share of the memory is none if its cache has a size;
    it refuses a device of which less than the share is free.
    """
    rows = yaml.safe_load(Path(__file__).with_name("engine_settings.yaml").read_text())
    make_model(tmp_path / "model")
    settings = [["hardware=cpu"], *(row[0] for row in rows)]
    plain, *given = run_scenario("engine_settings:main", tmp_path / "model", settings)
    for (setting, before, after), found in zip(rows, given, strict=True):
        assert {name: plain[name] for name in before} == before, setting
        assert {name: found[name] for name in after} == after, setting
