"""An architecture that transformers does not know: the module of model.external_lib registers it,
for learner and generators.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from learner_support import make_config, make_model, make_trainer

from async_rl.core.errors import ConfigError
from async_rl.generation.opener import engine_opener

MODULE = "architecture_of_a_user"
REGISTERS = """
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

class Config(Qwen3Config):
    model_type = "of_a_user"

class Model(Qwen3ForCausalLM):
    config_class = Config

AutoConfig.register("of_a_user", Config, exist_ok=True)
AutoModelForCausalLM.register(Config, Model, exist_ok=True)
"""


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{MODULE}.py").write_text(REGISTERS)
    path = make_model(tmp_path / "model")
    config = path / "config.json"
    config.write_text(
        config.read_text().replace('"qwen3"', '"of_a_user"').replace("Qwen3ForCausalLM", "Model")
    )
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    sys.modules.pop(MODULE, None)


@pytest.mark.covers("external_lib")
def test_the_named_module_is_imported_before_a_model_is_made(own_model: Path) -> None:
    with pytest.raises(ConfigError, match="of_a_user"):
        make_trainer(own_model, "grpo_code")
    lib = f"model.external_lib={MODULE}"
    assert sum(t.numel() for t in make_trainer(own_model, "grpo_code", lib).full_tensors()) > 0
    del sys.modules[MODULE]
    engine_opener(make_config("grpo_code", "generation.engine=hf", lib), own_model)
    assert MODULE in sys.modules
