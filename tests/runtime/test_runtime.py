"""What a child process finds when it starts, and how it ends without its supervisor."""

import logging
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from composing import compose
from members import without_supervisor

from async_rl.composition.compose import write_config
from async_rl.core.errors import ProtocolError
from async_rl.core.frozen import Value
from async_rl.core.os import RESTART_CODE
from async_rl.core.types import Role
from async_rl.launchers.backends.local import child_command
from async_rl.planning.topology import ProcessSpec
from async_rl.protocol.base import message_schema
from async_rl.protocol.supervisor import PoolCount
from async_rl.runs.control import ask_status
from async_rl.runtime.context import Control, open_context
from async_rl.wire.rpc import create_keys

POOLS = (
    "generators.pools={big:{count:2,work:train,max_concurrent_groups:3},"
    "judge:{count:1,work:evaluation}}",
)


def make_run(run_dir: Path, messages: str) -> None:
    write_config(compose("grpo_code", POOLS), run_dir / "config.yaml")
    create_keys(run_dir / "keys")
    facts = {"pid": os.getpid(), "machine": "here", "model_path": "model", "messages": messages}
    control = Control(address="tcp://127.0.0.1:1", **facts)  # type: ignore[arg-type]
    (run_dir / "control.json").write_bytes(msgspec.json.encode(control))


async def groups_of(run_dir: Path, name: str, role: Role) -> int:
    """The most groups at a time in the configuration that this process reads."""
    spec = ProcessSpec(name=name, role=role, rank=0, cores=(), gpus=0, env={})
    async with open_context(spec, run_dir, logging.getLogger("test")) as context:
        return context.config.generation.max_concurrent_groups


async def test_a_process_reads_the_settings_of_its_pool(tmp_path: Path) -> None:
    make_run(tmp_path, message_schema())
    assert await groups_of(tmp_path, "generator-big-1", "generator") == 3
    assert await groups_of(tmp_path, "generator-0", "generator") == 32


async def test_a_process_of_another_version_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, "0123456789ab")
    with pytest.raises(ProtocolError, match=r"another version .*are 0123456789ab, here"):
        await groups_of(tmp_path, "buffer", "buffer")
    with pytest.raises(ProtocolError, match="use the version that started it"):
        ask_status(tmp_path)


def test_the_fingerprint_changes_with_a_field_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not the kept value, which other tests of this process use.
    compute = message_schema.__wrapped__
    before = compute()

    class _Private(Value):
        field: int

    assert compute() == before, "a value of another package is none of a message"
    monkeypatch.setitem(PoolCount.__annotations__, "live", "float")
    assert compute() != before


def test_a_process_without_supervisor_exits_after_its_patience_to_be_started_again(
    tmp_path: Path,
) -> None:
    without_supervisor(tmp_path, "verifiers.cells=1", "timeouts.call_s=0.2")
    verifier = ProcessSpec(name="verifier-0", role="verifier", rank=0, cores=(), gpus=0, env={})
    command = child_command(verifier, tmp_path, parent_pid=0, announces=True)
    assert subprocess.run(command, check=False, timeout=60).returncode == RESTART_CODE
    log = (tmp_path / "logs" / "verifier-0.log").read_text()
    assert "did not answer Heartbeat within 0.2 s, for 1.2 s" in log
