"""What a child process finds when it starts."""

import asyncio
import logging
import os
from pathlib import Path

import msgspec
import pytest

from async_rl.core.types import Role
from async_rl.launchers.configuration.compose import compose, write_config
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
        address="tcp://127.0.0.1:1", pid=os.getpid(), machine="here", model_path="model"
    )
    (tmp_path / "control.json").write_bytes(msgspec.json.encode(control))
    create_keys(tmp_path / "keys")

    async def read() -> int:
        async with open_context(
            name=name, role=role, rank=0, cores=(), run_dir=tmp_path, log=logging.getLogger("test")
        ) as context:
            return context.config.generation.max_concurrent_groups

    assert asyncio.run(read()) == groups
