"""`async-rl scale` says when more generators will not help; the run itself is played."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from async_rl.composition.compose import compose, write_config
from async_rl.launchers.commands import scale as command
from async_rl.protocol.membership import PoolCount


@pytest.mark.parametrize(
    ("overrides", "generators", "warning"),
    [
        ([], 9, "9 generators share 2 cores, so each becomes slower; more than 2 rarely help"),
        ([], 2, ""),
        (["launcher=ray"], 9, ""),
    ],
)
def test_more_generators_than_cores_are_warned_about(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    generators: int,
    warning: str,
) -> None:
    config = compose("grpo_code", [*overrides, "generators.cores=[0,1]"])
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_config(config, run_dir / "config.yaml")
    state: dict[str, int] = {"live": 1, "starting": 0, "draining": 0}
    pools = [
        PoolCount(pool="generators", wanted=generators, **state),
        PoolCount(pool="verifiers", wanted=4, **state),
    ]
    played = types.SimpleNamespace(scale=lambda **_: pools)
    monkeypatch.setattr(command, "open_run", lambda _: played)
    command.scale([str(run_dir), f"generators={generators}"])
    printed = capsys.readouterr()
    assert f"generators: wanted {generators}" in printed.out
    assert warning in printed.err
    assert bool(warning) == ("warning" in printed.err)
