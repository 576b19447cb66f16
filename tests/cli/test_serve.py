"""Facts about `async-rl serve`: what it serves, the address that it prints, what it refuses."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.launchers.api import starting
from async_rl.service.address import address_of
from async_rl.wire.http import listen


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, Path]]:
    """The runs that `serve` would supervise, without starting them."""
    found: list[tuple[RunConfig, Path]] = []

    def supervise(config: RunConfig, run_dir: Path) -> int:
        found.append((config, run_dir))
        return 0

    monkeypatch.setattr(starting, "supervise", supervise)
    return found


def test_the_address_is_printed_and_kept(
    async_rl: Callable[..., Any], served: list[tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    answer = async_rl("serve", f"output_dir={tmp_path}", "run_name=mine", "model.lora.rank=8")
    assert answer.code == 0
    ((config, run_dir),) = served
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
    async_rl: Callable[..., Any], served: list[tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        answer = async_rl("serve", f"output_dir={tmp_path}/runs", "--port", str(port))
    assert (answer.code, f"127.0.0.1:{port} cannot be bound" in answer.err) == (2, True)
    assert list(tmp_path.iterdir()) == []
    assert served == []
    for setting, named in (
        ("model.lora.slots=3", "model.lora.slots=3 with .* set it to 4"),
        ("learner.ranks=2", "learner.ranks"),
    ):
        with pytest.raises(ConfigError, match=named):
            compose("serve", [setting])
