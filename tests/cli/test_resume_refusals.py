"""Facts about settings that a resumed run may not change, because groups that are stored were made
for the old ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.composition.compose import compose, write_config
from async_rl.core.errors import ConfigError
from async_rl.launchers.api.resuming import resumed_config


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm.advantage=remax"],
            (
                "algorithm.advantage=remax: was grpo, and the stored groups have no greedy"
                " answer; keep grpo"
            ),
        ),
        (
            ["generation.group_size=4"],
            "generation.group_size=4: was 8, and the stored groups have that many samples",
        ),
        (
            [
                "reward.placement=steps",
                "reward.mode=fraction",
            ],
            (
                "reward.placement=steps: was end, and the stored groups have scores of their"
                " steps, or have none"
            ),
        ),
    ],
)
def test_what_stored_groups_were_made_for_may_not_change(
    tmp_path: Path, overrides: list[str], expected: str
) -> None:
    write_config(
        compose("grpo_code", ["run_name=run", f"output_dir={tmp_path.parent}"]),
        tmp_path / "config.yaml",
    )
    with pytest.raises(ConfigError) as caught:
        resumed_config(tmp_path, overrides)
    assert expected in str(caught.value)


def test_other_estimators_may_follow_each_other(tmp_path: Path) -> None:
    write_config(
        compose("grpo_code", ["run_name=run", f"output_dir={tmp_path.parent}"]),
        tmp_path / "config.yaml",
    )
    config, changed = resumed_config(tmp_path, ["algorithm.advantage=rloo"])
    assert config.algorithm.advantage.kind == "rloo"
    assert changed == ["algorithm.advantage=rloo (was grpo)"]
