"""The process around an engine, facts of its model, and the seeds of its requests."""

import os
from pathlib import Path

import pytest
from composing import compose

from async_rl.core.errors import ConfigError
from async_rl.generation.engine import read_model_facts, seed_of
from async_rl.generation.environment import prepare_environment


def test_variables_of_the_process_follow_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append(list(cores)))
    monkeypatch.setattr(os, "environ", {"VLLM_CPU_KVCACHE_SPACE": "40"})
    prepare_environment(compose("grpo_code", ["generation.vllm.enforce_eager=false"]), [4, 5, 6])
    assert pinned == [[4, 5, 6]]
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    prepare_environment(compose("grpo_code", ["generation.vllm.enforce_eager=true"]), [])
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


def test_the_end_tokens_of_a_model_are_read_or_missed(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"max_position_embeddings": 64}')
    with pytest.raises(ConfigError, match="names eos_token_id"):
        read_model_facts(tmp_path)
    config.write_text('{"max_position_embeddings": 64, "eos_token_id": 1}')
    assert read_model_facts(tmp_path).end_token_ids == (1,)
    # The generation's own configuration goes first.
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    facts = read_model_facts(tmp_path)
    assert (facts.max_positions, facts.end_token_ids) == (64, (5, 6))


def test_a_seed_depends_on_group_sample_and_turn_and_not_on_the_attempt() -> None:
    names = ["7.1.0", "7.1.1", "8.1.0", "7.1.0.1", "7.1.0/0.0.gateway-0", "7.1.1/0.0.gateway-0"]
    seeds = [seed_of(name, 3) for name in names]
    assert len(set(seeds)) == len(names)
    assert [seed_of(name.replace(".1.", ".2.", 1), 3) for name in names] == seeds
    assert seed_of("7.1.0", 4) not in seeds
