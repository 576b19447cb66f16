"""Processes of a run as the supervisor and its readers see them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from composing import compose

from async_rl.composition.compose import write_config
from async_rl.protocol.base import message_schema
from async_rl.protocol.supervisor import Heartbeat, Member, StatusReply
from async_rl.runtime.context import Control
from async_rl.wire.rpc import create_keys


def member(name: str, counters: Mapping[str, float] | None = None, **facts: Any) -> Member:
    """A process at work; its role is the first word of its name."""
    usual = {"pid": 7, "address": "", "state": "working", "waits_for": "", "since_s": 0.0}
    values = {**usual, "version": -1, "role": name.partition("-")[0], **facts}
    return Member(name=name, counters=dict(counters or {}), **values)


def heartbeat(name: str, counters: Mapping[str, float] | None = None, **facts: Any) -> Heartbeat:
    usual = {"pid": 1, "state": "generating", "waits_for": "", "since_s": 0.0, "version": 0}
    return Heartbeat(name=name, counters=dict(counters or {}), **{**usual, **facts})


def reply(members: Sequence[Member] = (), **facts: Any) -> StatusReply:
    """The answer of a run at step 3 of 9."""
    usual = {"run_name": "r", "run_dir": "/r", "step": 3, "num_steps": 9, "started_s": 0}
    values = {**usual, "tensorboard_url": "", "metrics": {}, **facts}
    return StatusReply(members=list(members), **values)


def without_supervisor(run_dir: Path, *settings: str) -> None:
    """Write what a process reads at its start; nobody is at the address of the supervisor."""
    write_config(compose("ppo_code", settings), run_dir / "config.yaml")
    create_keys(run_dir / "keys")
    control = Control(
        address="tcp://127.0.0.1:1",
        pid=os.getpid(),
        machine="elsewhere",
        model_path="",
        messages=message_schema(),
    )
    (run_dir / "control.json").write_bytes(msgspec.json.encode(control))
