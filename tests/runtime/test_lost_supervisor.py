"""A process on another machine has no parent that the kernel could watch: it ends by itself once
the supervisor no longer answers.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec
import pytest
from composing import compose

from async_rl.composition.compose import write_config
from async_rl.core.os import RESTART_CODE
from async_rl.protocol.base import Message, Ok, message_schema
from async_rl.protocol.membership import Heartbeat, Members, NextBeat, Register, WatchMembers
from async_rl.runtime.context import Control
from async_rl.wire.keys import create_keys
from async_rl.wire.rpc import RpcServer


@pytest.mark.slow
def test_a_process_without_supervisor_ends_itself_within_its_patience(
    tmp_path: Path,
) -> None:
    config = compose(
        "ppo_code",
        ["verifiers.cells=1", "timeouts.call_s=1.4"],
    )
    write_config(config, tmp_path / "config.yaml")

    async def main() -> tuple[int | None, float]:
        registered = asyncio.Event()

        async def register(_: Register) -> Message:
            registered.set()
            return Ok()

        async def beat(_: Heartbeat) -> Message:
            return NextBeat(after_s=0.1)

        async def watch(message: WatchMembers) -> Message:
            await asyncio.sleep(message.wait_s)
            return Members(revision=message.known_revision, members=[])

        keys = create_keys(tmp_path / "keys")
        with RpcServer(
            "127.0.0.1", 0, keys, {Register: register, Heartbeat: beat, WatchMembers: watch}
        ) as server:
            control = Control(
                address=server.address,
                pid=os.getpid(),
                machine="elsewhere",
                model_path="",
                messages=message_schema(),
            )
            (tmp_path / "control.json").write_bytes(msgspec.json.encode(control))
            serving = asyncio.create_task(server.serve())
            command = [
                sys.executable,
                "-m",
                "async_rl.runtime.main",
                "--name",
                "verifier-0",
                "--role",
                "verifier",
                "--rank",
                "0",
            ]
            process = await asyncio.create_subprocess_exec(
                *command, "--run-dir", str(tmp_path), "--parent-pid", "0"
            )
            try:
                async with asyncio.timeout(60):
                    await registered.wait()
                    serving.cancel()
                    gone_s = time.monotonic()
                    return await process.wait(), time.monotonic() - gone_s
            finally:
                serving.cancel()
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    code, took_s = asyncio.run(main())
    assert code == RESTART_CODE
    assert took_s < 30, "it repeats its call for 8.4 s; the rest is for a busy machine"
    assert (
        "did not answer Heartbeat within 1.4 s, for 8.4 s"
        in (tmp_path / "logs" / "verifier-0.log").read_text()
    )
