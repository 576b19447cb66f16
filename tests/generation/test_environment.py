"""The process around an engine: its variables, its cores, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from composing import compose

from async_rl.core.errors import ConfigError
from async_rl.generation.engine import read_model_facts
from async_rl.generation.environment import prepare_environment

CHILD = """
import os, signal, sys
from async_rl.core.os import die_with_parent
die_with_parent()
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Restores what `prepare_environment` sets."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return monkeypatch


def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        handle = os.pidfd_open(child)
        try:
            parent.send_signal(signal.SIGKILL)
            # The pipe's other end closes when the child, its last holder, is gone.
            assert parent.stdout.read() == ""
        finally:
            os.close(handle)


def test_settings_of_vllm_and_triton_do_not_come_from_outside(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setitem(os.environ, "VLLM_CPU_KVCACHE_SPACE", "40")
    prepare_environment(compose("grpo_code"), [])
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    # The name and the value are Triton's; test_gpu_kernels.py asks it.
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"


def test_threads_follow_the_cores_given(environment: pytest.MonkeyPatch) -> None:
    pinned: list[list[int]] = []
    environment.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append(list(cores)))
    environment.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6})
    prepare_environment(compose("grpo_code"), [4, 5, 6])
    assert pinned == [[4, 5, 6]]
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_compilation_is_off_exactly_where_the_engine_is_eager(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.delitem(os.environ, "TORCHDYNAMO_DISABLE", raising=False)
    prepare_environment(compose("grpo_code", ["generation.vllm.enforce_eager=false"]), [])
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
