"""Facts about `async-rl init`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from empty_model import write_model

from async_rl.composition.compose import compose
from async_rl.core.machine import this_machine
from async_rl.launchers.preflight.checks import preflight


@pytest.mark.parametrize("template", ["code", "reward", "tool", "agent"])
def test_every_template_composes_and_passes_the_checks_of_a_launch(
    tmp_path: Path, async_rl: Any, template: str
) -> None:
    model = write_model(tmp_path / "model")
    task = tmp_path / "mine"
    given = ["--template", template, "--model", str(model)]
    assert async_rl("init", str(task), *given).code == 0
    # A directory can be moved, since its files are named relative to the configuration.
    moved = task.rename(tmp_path / "moved")
    assert str(tmp_path / "mine") not in (moved / "conf.yaml").read_text()
    config = compose(str(moved / "conf.yaml"), [f"output_dir={tmp_path}/runs"])
    preflight(config, this_machine())
    assert config.data.train_files == [str(moved / "train.jsonl")]
    terms = config.reward.terms
    own = {"reward": terms.get("mine"), "tool": config.rollout.fn, "agent": config.agent.fn}
    assert str(moved) in str(own.get(template, moved))
    code, _, err = async_rl("init", str(moved))
    assert (code, f"{moved}: File exists" in err) == (1, True)


def test_the_data_of_a_new_task_pass_their_own_test(tmp_path: Path, async_rl: Any) -> None:
    task = tmp_path / "mine"
    assert async_rl("init", str(task), "--model", str(tmp_path)).code == 0
    config = compose(str(task / "conf.yaml"))
    assert config.data.val_files == [str(task / "held_out.jsonl")]
    assert config.model.path == str(tmp_path)
    train, held_out = (
        {json.loads(line)["id"] for line in (task / f"{name}.jsonl").read_text().splitlines()}
        for name in ("train", "held_out")
    )
    assert train.isdisjoint(held_out)
    command = [sys.executable, "-m", "pytest", "-q", str(task)]
    tested = subprocess.run(command, cwd=task, capture_output=True, text=True, timeout=60)
    assert tested.returncode == 0, tested.stdout
