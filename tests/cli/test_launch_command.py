"""Facts about `async-rl launch` and `async-rl serve`: what they show, refuse and make."""

import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tables import table

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.launchers.api import starting
from async_rl.runtime.context import load_config
from async_rl.service.address import address_of
from async_rl.wire.http import listen


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Return the runs that a command would supervise, without starting them."""
    configs: list[RunConfig] = []

    def supervise(config: RunConfig, run_dir: Path) -> int:
        assert load_config(run_dir) == config
        configs.append(config)
        return 5

    monkeypatch.setattr(starting, "supervise", supervise)
    return configs


def test_dry_run_shows_configuration_processes_and_numbers_and_makes_nothing(
    tmp_path: Path, async_rl: Any
) -> None:
    pools = "generators.pools={big:{count:1,work:train},judge:{count:1,work:evaluation}}"
    words = ["conf=ppo_code", f"output_dir={tmp_path}/runs", "generators.count=2", "run_name=007"]
    code, shown, err = async_rl("launch", "--dry-run", *words, pools)
    assert (code, err) == (0, "")
    for expected in ("generator-1", "generator-big-0", "generator-judge-0", "memory estimate"):
        assert expected in shown
    assert "staleness bound" in shown
    assert "48 groups in flight" in shown
    text = shown.partition("configuration\n")[2].partition("\nprocesses")[0]
    config = RunConfig.model_validate(msgspec.yaml.decode(text))
    assert (config.run_name, config.buffer.groups_per_step) == ("007", 16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "expected"), table(__file__, "wrong"))
def test_wrong_settings_exit_with_two_and_make_nothing(
    tmp_path: Path, async_rl: Any, arguments: list[str], expected: str
) -> None:
    words = [*arguments, f"output_dir={tmp_path}/runs"] if arguments else []
    code, _, err = async_rl("launch", *words)
    assert code == 2
    assert expected in err
    assert not err.startswith("error: ") or err.count("\n") == 1, "without a traceback"
    assert list(tmp_path.iterdir()) == []


def test_each_launch_makes_a_directory_of_its_own_and_hands_over(
    tmp_path: Path, started: list[RunConfig], async_rl: Any
) -> None:
    for _ in range(2):
        launched = async_rl("launch", "conf=ppo_code", f"output_dir={tmp_path}", "num_steps=3")
        assert launched.code == 5, "the exit code of the run"
    assert [config.num_steps for config in started] == [3, 3]
    names = {config.run_name for config in started}
    assert len(names) == 2
    assert {path.name for path in tmp_path.iterdir()} == names


def test_only_its_owner_reads_a_run(tmp_path: Path) -> None:
    config = compose("grpo_code", [f"output_dir={tmp_path}", "run_name=mine"])
    run_dir = starting.make_run_dir(config)
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_the_address_is_printed_and_kept(
    async_rl: Any, started: list[RunConfig], tmp_path: Path
) -> None:
    answer = async_rl("serve", f"output_dir={tmp_path}", "run_name=mine", "model.lora.rank=8")
    assert answer.code == 5, "the exit code of the run"
    (config,) = started
    run_dir = tmp_path / "mine"
    assert config.agent.is_service
    assert (config.model.path, config.model.adapter.rank) == (None, 8)
    kept = address_of(run_dir)
    assert f"export TINKER_BASE_URL=http://127.0.0.1:{kept.port}\n" in answer.out
    assert f"export TINKER_API_KEY={kept.api_key}\n" in answer.out
    # The client accepts no other beginning.
    assert kept.api_key.startswith("tml-")
    assert "async-rl resume mine" in answer.out
    assert stat.S_IMODE((run_dir / "service" / "address.json").stat().st_mode) == 0o600


def test_a_port_that_is_taken_is_refused_before_anything_is_made(
    async_rl: Any, started: list[RunConfig], tmp_path: Path
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        answer = async_rl("serve", f"output_dir={tmp_path}/runs", "--port", str(port))
    assert (answer.code, f"127.0.0.1:{port} cannot be bound" in answer.err) == (2, True)
    assert list(tmp_path.iterdir()) == []
    assert started == []
    for setting, named in (
        ("model.lora.slots=3", "model.lora.slots=3 with .* set it to 4"),
        ("learner.ranks=2", "learner.ranks"),
    ):
        with pytest.raises(ConfigError, match=named):
            compose("serve", [setting])
