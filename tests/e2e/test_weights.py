"""Weights through files, as between machines, in a run that loses a generator in the middle of a
push.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_support import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = (
    "conf=grpo_code",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "evaluation.every_steps=0",
)


@pytest.mark.parametrize(
    ("overrides", "kind", "tolerance"),
    [
        (("generation.engine=hf",), "version", 1e-3),
        # By vLLM; each push is compared with the learner, which does not merge.
        (("model.lora=lora", "learner.optimizer.lr=2e-3"), "adapter", 1e-4),
    ],
    ids=["all weights", "adapters"],
)
def test_a_generator_that_dies_is_replaced_and_both_are_fed_from_files(
    overrides: tuple[str, ...], kind: str, tolerance: float, launch: Callable[..., LiveRun]
) -> None:
    run = launch(
        *QUICK,
        *overrides,
        "num_steps=1000",
        "generators.count=2",
        "weights.transfer=filesystem",
        "weights.probe_every_pushes=1",
    )
    run.until(lambda: run.step >= 2, "step 2")
    names: set[str] = set()

    def is_written() -> bool:
        # Between two versions the folder is empty: the old file is deleted before the new one.
        names.update(path.name for path in (run.run_dir / "weights").glob("life_*/*"))
        return bool(names)

    run.until(is_written, "a file of weights", look_s=0.01)
    assert {name.partition("_")[0] for name in names} == {kind}
    assert {Path(name).suffix for name in names} == {".safetensors"}
    killed = run.pid_of("generator-1")
    run.kill("generator-1")
    run.until(lambda: serves(run, "generator-1", other_than=killed), "its next life, with weights")
    at = run.step
    run.until(lambda: run.step >= at + 4, "steps with both")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.terminal
    assert [row["step"] for row in run.rows] == list(range(1, len(run.rows) + 1))
    assert 0 < max(row["weights/probe_abs_max"] for row in run.rows) < tolerance
    assert max(row["staleness/max_versions"] for row in run.rows) <= 2
    assert run.audit()["problems"] == []
    assert list((run.run_dir / "weights").iterdir()) == []


def serves(run: LiveRun, name: str, *, other_than: int) -> bool:
    return any(
        (member["name"], member["pid"] != other_than, member["version"] >= 0) == (name, True, True)
        for member in run.now()["members"]
    )
