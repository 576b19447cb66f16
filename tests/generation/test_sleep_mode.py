"""What vLLM is told of a GPU that it shares with the learner. In a process of its own, as
engine_scenario.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from generation_support import make_model

SCRIPT = """
import sys
from pathlib import Path
from async_rl.generation.engine import read_model_facts
from async_rl.generation.vllm.opening import engine_args
from async_rl.composition.compose import compose

path = Path(sys.argv[1])
gpus = ["learner.gpus_each=0.5", "generators.gpus_each=0.5"]
shared = [*gpus, "generation.vllm.gpu_memory_utilization=0.4"]
given = [*shared, "generation.vllm.kv_cache_mb=99"]
measured = [*shared, "generation.vllm.kv_cache_mb=0"]
for overrides in (["placement=colocated"], ["placement=colocated", *given], given, measured):
    args = engine_args(compose("grpo_code", overrides), path, read_model_facts(path), 0)
    print(args.enable_sleep_mode, args.gpu_memory_utilization, args.kv_cache_memory_bytes)
"""


@pytest.mark.slow
def test_vllm_may_sleep_exactly_where_it_shares_a_gpu_and_needs_no_free_share_for_a_given_cache(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "model", is_tied=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line.split() for line in done.stdout.splitlines()[-4:]]
    assert [sleeps for sleeps, *_ in told] == ["False", "True", "False", "False"]
    # vLLM refuses a GPU of which less than the share is free, whatever the cache.
    cache = str(99 << 20)
    assert told[1][1:] == told[2][1:] == ["0.001", cache]
    assert told[3][1:] == ["0.4", "None"]
