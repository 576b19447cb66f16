"""What a child process finds when it starts."""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from composing import compose

from async_rl.composition.compose import write_config
from async_rl.core.errors import ProtocolError
from async_rl.core.types import Role
from async_rl.protocol.base import message_schema
from async_rl.runs.control import ask_status
from async_rl.runtime.context import Control, open_context
from async_rl.wire.keys import create_keys


@pytest.mark.parametrize(
    ("name", "role", "groups"),
    [
        ("generator-big-1", "generator", 3),
        ("generator-judge-0", "generator", 32),
        ("generator-0", "generator", 32),
        ("buffer", "buffer", 32),
    ],
)
def test_a_process_reads_the_settings_of_its_pool(
    tmp_path: Path, name: str, role: Role, groups: int
) -> None:
    pools = (
        "generators.pools={big:{count:2,work:train,max_concurrent_groups:3},judge:{count:1,work:evaluation}}",
    )
    write_config(compose("grpo_code", pools), tmp_path / "config.yaml")
    control = Control(
        address="tcp://127.0.0.1:1",
        pid=os.getpid(),
        machine="here",
        model_path="model",
        messages=message_schema(),
    )
    (tmp_path / "control.json").write_bytes(msgspec.json.encode(control))
    create_keys(tmp_path / "keys")

    async def read() -> int:
        async with open_context(
            name=name, role=role, rank=0, cores=(), run_dir=tmp_path, log=logging.getLogger("test")
        ) as context:
            return context.config.generation.max_concurrent_groups

    assert asyncio.run(read()) == groups


def test_a_process_of_another_version_is_refused(tmp_path: Path) -> None:
    write_config(compose("grpo_code", ()), tmp_path / "config.yaml")
    create_keys(tmp_path / "keys")

    async def enter() -> None:
        async with open_context(
            name="buffer",
            role="buffer",
            rank=0,
            cores=(),
            run_dir=tmp_path,
            log=logging.getLogger("test"),
        ):
            raise AssertionError("it must not start")

    for messages, shown in (("0123456789ab", "0123456789ab"), ("", "without a schema")):
        control = Control(
            address="tcp://127.0.0.1:1",
            pid=os.getpid(),
            machine="here",
            model_path="model",
            messages=messages,
        )
        (tmp_path / "control.json").write_bytes(msgspec.json.encode(control))
        with pytest.raises(ProtocolError, match=f"another version of async_rl .*are {shown}, here"):
            asyncio.run(enter())
        with pytest.raises(ProtocolError, match="use the version that started it"):
            ask_status(tmp_path)


def test_the_fingerprint_changes_with_a_field_of_a_message() -> None:
    """In a process of its own: the changed class must not be seen by other tests."""
    code = """
import sys
from async_rl.core import frozen
from async_rl.protocol import base, membership
if sys.argv[1] == "changed":
    membership.PoolCount.__annotations__["live"] = "float"
if sys.argv[1] == "elsewhere":
    class Private(frozen.Value):
        field: int
print(base.message_schema())
"""

    def fingerprint(kind: str) -> str:
        command = [sys.executable, "-c", code, kind]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert fingerprint("same") == fingerprint("elsewhere") == f"{message_schema()}\n"
    assert fingerprint("changed") != fingerprint("same")
