"""A process on another machine has no parent that the kernel could watch: it exits by itself once
the supervisor does not answer.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
from composing import compose

from async_rl.composition.compose import write_config
from async_rl.core.os import RESTART_CODE
from async_rl.protocol.base import message_schema
from async_rl.runtime.context import Control
from async_rl.wire.keys import create_keys


def test_a_process_without_supervisor_exits_after_its_patience_to_be_started_again(
    tmp_path: Path,
) -> None:
    write_config(
        compose("ppo_code", ["verifiers.cells=1", "timeouts.call_s=0.2"]), tmp_path / "config.yaml"
    )
    create_keys(tmp_path / "keys")
    control = Control(
        address="tcp://127.0.0.1:1",
        pid=os.getpid(),
        machine="elsewhere",
        model_path="",
        messages=message_schema(),
    )
    (tmp_path / "control.json").write_bytes(msgspec.json.encode(control))
    words = ["--name=verifier-0", "--role=verifier", "--rank=0", "--parent-pid=0"]
    command = [sys.executable, "-m", "async_rl.runtime.main", *words, f"--run-dir={tmp_path}"]
    assert subprocess.run(command, check=False, timeout=60).returncode == RESTART_CODE
    log = (tmp_path / "logs" / "verifier-0.log").read_text()
    assert "did not answer Heartbeat within 0.2 s, for 1.2 s" in log
