"""vLLM may sleep exactly where it shares a GPU with the learner. In a process of its own, as
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
from async_rl.launchers.configuration.compose import compose

path = Path(sys.argv[1])
gpus = ["learner.gpus_each=0.5", "generators.gpus_each=0.5"]
for overrides in (["placement=colocated"], ["placement=colocated", *gpus], gpus):
    print(engine_args(compose("grpo_code", overrides), path, read_model_facts(path),
    0).enable_sleep_mode)
"""


@pytest.mark.slow
def test_vllm_may_sleep_exactly_where_it_shares_a_gpu(tmp_path: Path) -> None:
    make_model(tmp_path / "model", is_tied=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-3:] == ["False", "True", "False"]
